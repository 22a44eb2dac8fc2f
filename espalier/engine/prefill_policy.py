"""Decides which prompt tokens the next prefill pass computes.

A pass runs pieces.  A piece is some consecutive tokens of one request.  All pieces are padded to one width.  A request
may have several pieces in a pass.  A small width needs little padding, and a large width makes few pieces."""

from collections.abc import Sequence
from typing import NamedTuple

from espalier.layout import LaunchForm, RoundLayout, captured_form
from espalier.request import Request

# The fixed cost of a pass, in rows: computing this many rows takes as long.  About 150 of them stand for reading the
# weights: 150 is a GPU's bfloat16 peak divided by its bandwidth.  The others stand for a round that may run before the
# next pass.
PASS_OVERHEAD_ROWS = 256
# For an eager pass of fewer rows, the host takes longer to launch the kernels than an H200 takes to run them (8B model,
# docs/log.md).
MIN_EAGER_ROWS = 1024
# A width is near best if its tokens a second are at least this share of the best width's.  The largest such width is
# used, because it makes few pieces.
NEAR_BEST_RATE = 0.98


class PrefillPass(NamedTuple):
    """The size of a prefill pass.

    lengths: for each request of the batch, in order, the number of tokens to compute.  width: the rows of each
    piece."""

    lengths: tuple[int, ...]
    width: int

    @property
    def rows(self) -> int:
        """The number of rows that the pass runs, padding included."""
        return sum(-(-length // self.width) for length in self.lengths) * self.width


# Stands for the missing pass of a launch that is a round.
NO_PREFILL = PrefillPass((), 0)


def is_prefill_next(
    layout: RoundLayout,
    prefilling: Sequence[Request],
    decoding: Sequence[Request],
    is_streamed: bool,
    last_was_prefill: bool,
    idle_rows: float,
) -> bool:
    """Returns whether the next launch is a prefill pass.

    is_streamed: whether a decoding request is streamed.  Then passes and rounds alternate.  Otherwise prompts come
    first, because a full batch makes a round most efficient.  But a small pass waits for more prompts, until idle_rows
    reaches PASS_OVERHEAD_ROWS.
    idle_rows: how many rows the rounds since the last pass would have run for the requests in prefill, had these
    requests been decoding already."""
    if not prefilling or not decoding:
        return bool(prefilling)
    if is_streamed:
        return not last_was_prefill
    tokens_left = sum(r.prefill_len - r.num_prefilled for r in prefilling)
    return tokens_left >= layout.chunk_size or idle_rows >= PASS_OVERHEAD_ROWS


def next_prefill_pass(
    layout: RoundLayout, tokens_left: Sequence[int], max_pass_rows: int, captured_forms: Sequence[LaunchForm] = ()
) -> PrefillPass:
    """Returns the next pass: the fastest pass (the most tokens a second), or a captured pass (a CUDA graph).

    The smallest captured pass that is about as good as the fastest pass is returned.  Two conditions must hold.
    First, the captured pass computes as many tokens as the fastest pass.  Slightly fewer tokens suffice if the fastest
    pass does not compute all tokens either.  Second, the captured pass has at most slightly more rows.  A fastest pass
    with fewer than MIN_EAGER_ROWS rows counts as MIN_EAGER_ROWS rows.
    If no captured pass meets the conditions, the fastest pass is returned.  But if the fastest pass has fewer than
    MIN_EAGER_ROWS rows, the fastest captured pass is returned instead.
    tokens_left: for each request, in queue order, the number of tokens still to compute.
    max_pass_rows: the most rows of the pass, at most chunk_size.  captured_forms: Executor.captured_passes."""
    passes = [
        _pass_with_width(tokens_left, width, max_pass_rows) for width in layout.chunk_widths if width <= max_pass_rows
    ]
    fastest, rows = _fastest_pass([(prefill, _padded_rows(prefill, captured_forms)) for prefill in passes])
    fitting = [form for form in captured_forms if form.pass_rows <= max_pass_rows]
    graphs = [(_pass_with_width(tokens_left, form.width, form.pass_rows), form.pass_rows) for form in fitting]
    max_graph_rows = (PASS_OVERHEAD_ROWS + max(rows, MIN_EAGER_ROWS)) / NEAR_BEST_RATE - PASS_OVERHEAD_ROWS
    # If the pass does not compute all tokens anyway, a few more tokens in the next pass cost little.
    min_tokens = sum(fastest.lengths) * (NEAR_BEST_RATE if sum(fastest.lengths) < sum(tokens_left) else 1)
    for prefill, graph_rows in graphs:
        if graph_rows <= max_graph_rows and sum(prefill.lengths) >= min_tokens:
            return prefill
    if graphs and rows < MIN_EAGER_ROWS:
        return _fastest_pass(graphs)[0]
    return fastest


def _padded_rows(prefill: PrefillPass, captured_forms: Sequence[LaunchForm]) -> int:
    """Returns the rows of the captured form that a pass is padded to; the pass's own rows if no captured form fits."""
    form = captured_form(captured_forms, prefill.width, prefill.rows // prefill.width)
    return prefill.rows if form is None else form.pass_rows


def _fastest_pass(padded_passes: Sequence[tuple[PrefillPass, int]]) -> tuple[PrefillPass, int]:
    """Returns the widest of the passes with nearly the most tokens a second, and the pass's padded rows.

    padded_passes: (pass, the number of rows that it is padded to)."""
    rates = [sum(prefill.lengths) / (PASS_OVERHEAD_ROWS + rows) for prefill, rows in padded_passes]
    min_rate = NEAR_BEST_RATE * max(rates)
    near_best = [padded for padded, rate in zip(padded_passes, rates, strict=True) if rate >= min_rate]
    return max(near_best, key=lambda padded: padded[0].width)


def _pass_with_width(tokens_left: Sequence[int], width: int, max_pass_rows: int) -> PrefillPass:
    """Returns a pass of pieces of this width.  The pass takes whole pieces of each request in turn, while they fit."""
    lengths, pieces_left = [], max_pass_rows // width
    for tokens in tokens_left:
        if not pieces_left:
            break
        lengths.append(min(tokens, pieces_left * width))
        pieces_left -= -(-lengths[-1] // width)
    return PrefillPass(tuple(lengths), width)


def pieces_of(prefill: PrefillPass) -> tuple[tuple[int, int], ...]:
    """Returns (row of the batch, offset of the piece's first token) for each piece, request after request.

    Empty if each request has one piece."""
    pieces = tuple((r, at) for r, length in enumerate(prefill.lengths) for at in range(0, length, prefill.width))
    return pieces if len(pieces) > len(prefill.lengths) else ()
