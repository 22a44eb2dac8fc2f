"""The sizes of rounds and prefill passes, derived from the configuration.

Derived sizes are computed only here.  A RoundLayout gives the sizes of all buffers.  Functions that launch kernels
check their arguments against the RoundLayout on the host, without reading from the device.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from espalier.errors import EspalierError

if TYPE_CHECKING:
    from torch import Tensor

ANCESTOR_BITS = 64
MAX_PAGE_SIZE = 512
MIN_CHUNK_WIDTH = 16
MAX_ROUNDS_IN_FLIGHT = 2
# Limits of prefill passes that are CUDA graphs: the widths of their pieces, and the most pieces and rows.  A pass of
# more rows needs no graph: its kernels run for longer than the host needs to launch them (docs/log.md).
CAPTURED_WIDTHS = (16, 64, 256)
MAX_CAPTURED_PIECES = 16
MAX_CAPTURED_ROWS = 2048
# The KV cache's row for padding.  It must stay zero: attention may read it with weight zero, and 0 · NaN is NaN.
DUMMY_ROW = 0

Number = TypeVar("Number", int, "Tensor")


def max_draft_tokens(steps: int, topk: int) -> int:
    """Returns the most nodes of a tree: the root, and topk nodes at each depth but the last, have topk children."""
    return 1 + topk + (steps - 1) * topk**2 if steps else 1


def _check_sizes(*checks: tuple[bool, str, int, str]) -> None:
    """Raise EspalierError for the first failed check.  checks: (whether it failed, field name, value, what to use)."""
    for has_failed, name, value, supported in checks:
        if has_failed:
            raise EspalierError(f"{name}={value} is not supported; use {supported}")


@dataclass(frozen=True)
class TreeShape:
    """The shape of a draft tree.

    steps: the depth.  topk: branches kept at each depth.  num_draft_tokens: nodes verified per round, root included.
    shared_rows: if not 0, a round of B requests verifies only the B * shared_rows nodes with the best scores, whichever
    request they belong to.  0: each request verifies num_draft_tokens nodes.
    drafts: whether the draft model proposes nodes; if False, other sources, such as the request's text, propose all.
    extends: whether the draft model runs over the round's output tokens, so that it can propose in a later round.
    Raises EspalierError if a tree of this depth and topk has fewer than num_draft_tokens nodes."""

    steps: int
    topk: int
    num_draft_tokens: int
    shared_rows: int = 0
    drafts: bool = True
    extends: bool = True

    def __post_init__(self) -> None:
        bound = max_draft_tokens(self.steps, self.topk)
        _check_sizes(
            (self.steps < 0, "steps", self.steps, "0 (plain decoding) or more"),
            (self.topk < 1, "topk", self.topk, "1 (a chain) or more"),
            (
                not 1 <= self.num_draft_tokens <= bound,
                "num_draft_tokens",
                self.num_draft_tokens,
                f"1 to {bound} at steps={self.steps}, topk={self.topk} (1 + topk + (steps - 1)·topk²; 1 at steps=0): "
                "lower it, or raise steps or topk",
            ),
            (self.shared_rows < 0, "shared_rows", self.shared_rows, "0 (each request has its own) or more"),
        )

    @property
    def sizes(self) -> dict[str, Any]:
        """The values of steps, topk and num_draft_tokens, by name."""
        return {name: getattr(self, name) for name in TREE_FIELDS}

    @property
    def rows(self) -> int:
        """Rows of the verify pass for each request."""
        return min(self.shared_rows or self.num_draft_tokens, self.num_draft_tokens)

    def __str__(self) -> str:
        if not self.steps:
            return "plain decoding" if self.extends else "plain decoding without a draft"
        shared = f", sharing {self.shared_rows} rows a request" if self.shared_rows else ""
        undrafted = "" if self.drafts else ", without a draft pass"
        return ", ".join(f"{name} {size}" for name, size in self.sizes.items()) + shared + undrafted

    def require_fits(self, other: "TreeShape") -> None:
        """Check that buffers sized for this tree can hold `other`.  Raises EspalierError."""
        for name in TREE_FIELDS:
            size, configured = getattr(other, name), getattr(self, name)
            if size > configured:
                raise EspalierError(
                    f"a batch's tree with {name}={size} is above the configured {name}={configured}, which sizes the "
                    f"buffers; lower it, or raise {name}"
                )


TREE_FIELDS = ("steps", "topk", "num_draft_tokens")
PLAIN_TREE = TreeShape(steps=0, topk=1, num_draft_tokens=1)
TARGET_ONLY = replace(PLAIN_TREE, extends=False)


def padded_batch(batch: int, buckets: Iterable[int]) -> int:
    """Returns the smallest of `buckets` (padded batch sizes, ascending) that holds `batch` requests, else `batch`."""
    return next((bucket for bucket in buckets if bucket >= batch), batch)


def next_bucket(batch: int) -> int:
    """Returns the smallest number >= batch that is a power of two or halfway between two powers of two."""
    power = 1 << max(batch - 1, 0).bit_length()
    middle = power - power // 4
    return middle if power > 2 and middle >= batch else power


class LaunchForm(NamedTuple):
    """The numbers that determine all tensor shapes of a launch, padding included.

    batch: number of requests.  width: rows of each piece of a prompt in a prefill pass; 0 for a round.
    pieces: number of pieces; 0 if each request has one piece.
    tree: the round's tree; None for that of RoundLayout.for_batch, and for a captured prefill (it runs the draft)."""

    batch: int
    width: int = 0
    pieces: int = 0
    tree: TreeShape | None = None

    @property
    def pass_rows(self) -> int:
        """Rows of a prefill pass."""
        return self.width * (self.pieces or self.batch)

    @property
    def name(self) -> str:
        if self.width:
            return f"a prefill pass of {self.pass_rows} rows"
        return f"a round of batch {self.batch}" + (f", {self.tree}" if self.tree else "")


def captured_form(captured_forms: Sequence[LaunchForm], width: int, pieces: int) -> LaunchForm | None:
    """Returns the form that a prefill pass is padded to: the first form with its width and enough pieces, or None.
    captured_forms: the forms that have a CUDA graph, in the order of RoundLayout.captured_passes."""
    return next((form for form in captured_forms if form.width == width and form.pieces >= pieces), None)


@dataclass(frozen=True)
class RoundLayout:
    """Sizes of rounds and prefill passes.

    max_batch: requests per round.  page_size: rows per page.  max_context: prompt and output of a request, in tokens.
    steps, topk, num_draft_tokens, shared_rows, drafts, extends: the configured tree (TreeShape).  No round has a
    larger tree, so this tree sets the size of the buffers.
    trees: (n, shape), n ascending.  Rounds of n or more requests, up to the next n, use this shape; smaller rounds use
    the configured tree.
    choices: (n, shapes), n ascending from 1.  Rounds of n or more requests, up to the next n, use one of these shapes,
    and not that of `trees`.  The first shape is used at first.  Batches of one padded size have the same shapes.  Empty
    if the engine does not choose trees while it runs.
    chunk_size: rows of one prefill pass.  busy_chunk_size: the same while streaming users wait; None: chunk_size.
    num_recomputed_tokens: how many rows at the end of a cached prefix the target computes again, for the draft.
    block_rows: rows of the pass in which a block draft proposes all depths; 0 for other drafts.
    num_text_paths: how many token sequences from the request's own text, found by the device, join each tree.
    num_sent_paths: how many token sequences that the host proposes join each tree."""

    max_batch: int
    steps: int
    topk: int
    num_draft_tokens: int
    page_size: int
    max_context: int
    num_recomputed_tokens: int
    chunk_size: int
    trees: tuple[tuple[int, TreeShape], ...] = ()
    busy_chunk_size: int | None = None
    block_rows: int = 0
    choices: tuple[tuple[int, tuple[TreeShape, ...]], ...] = ()
    num_text_paths: int = 0
    num_sent_paths: int = 0
    shared_rows: int = 0
    drafts: bool = True
    extends: bool = True

    def __post_init__(self) -> None:
        configured = self.tree
        _check_sizes(
            (not 1 <= self.page_size <= MAX_PAGE_SIZE, "page_size", self.page_size, f"1 to {MAX_PAGE_SIZE}"),
            (self.max_batch < 1, "max_batch", self.max_batch, "1 or more"),
            (self.max_context < 2, "max_context", self.max_context, "2 or more: a prompt token and an answer"),
            (self.chunk_size < MIN_CHUNK_WIDTH, "chunk_size", self.chunk_size, f"{MIN_CHUNK_WIDTH} or more"),
            (
                not MIN_CHUNK_WIDTH <= (self.busy_chunk_size or self.chunk_size) <= self.chunk_size,
                "busy_chunk_size",
                self.busy_chunk_size or 0,
                f"{MIN_CHUNK_WIDTH} to {self.chunk_size} (chunk_size)",
            ),
        )
        for shape in (*(shape for _, shape in self.trees), *(shape for _, shapes in self.choices for shape in shapes)):
            configured.require_fits(shape)
        sizes = [batch for batch, _ in self.trees]
        if any(size <= before for before, size in zip([0, *sizes], sizes, strict=False)):
            raise EspalierError(f"batch sizes {sizes} of `trees` are not supported; use 1 or more, ascending")

    @cached_property
    def tree(self) -> TreeShape:
        """The configured tree."""
        return TreeShape(self.steps, self.topk, self.num_draft_tokens, self.shared_rows, self.drafts, self.extends)

    @property
    def has_draft_model(self) -> bool:
        return self.num_recomputed_tokens > 0 or self.block_rows > 0

    @property
    def tree_without_draft(self) -> TreeShape:
        """The tree of rounds in which no request speculates, now or in a later round."""
        return TARGET_ONLY if self.has_draft_model else PLAIN_TREE

    @property
    def calibrates_scores(self) -> bool:
        """Whether nodes from different sources or requests compete for places in a tree, so scores are calibrated."""
        shapes = (self.tree, *(shape for _, of_bucket in self.choices for shape in of_bucket))
        return bool(self.num_text_paths or self.num_sent_paths) or any(shape.shared_rows for shape in shapes)

    @lru_cache(256)  # noqa: B019 (every round calls this, and a process has few, small layouts)
    def with_tree(self, shape: TreeShape) -> "RoundLayout":
        """Returns the layout of rounds with this tree.  Raises EspalierError for a tree above the configured tree.

        Use the result only for the sizes of a launch.  Size page tables and allocate pages by the original layout."""
        self.tree.require_fits(shape)
        return replace(self, **asdict(shape), trees=(), choices=())

    def for_batch(self, batch: int) -> "RoundLayout":
        """Returns the layout of a round with `batch` requests, padding included."""
        shape = next((shape for min_batch, shape in reversed(self.trees) if min_batch <= batch), self.tree)
        return self if shape == self.tree else self.with_tree(shape)

    def tree_choices_for(self, batch: int) -> tuple[TreeShape, ...]:
        """Returns the trees that a round of `batch` requests may choose from; empty if the engine does not choose."""
        return next((shapes for min_batch, shapes in reversed(self.choices) if min_batch <= batch), ())

    def round_forms(self, buckets: Sequence[int]) -> list[LaunchForm]:
        """Returns a form for each tree of each bucket (padded batch size), the form with the most rows first."""
        trees_without_draft = (self.tree_without_draft,) if self.steps else ()
        trees = {
            batch: dict.fromkeys((*(self.tree_choices_for(batch) or (None,)), *trees_without_draft))
            for batch in buckets
        }
        forms = [LaunchForm(batch, tree=tree) for batch in buckets for tree in trees[batch]]
        rows = {form: form.batch * (form.tree or self.for_batch(form.batch).tree).rows for form in forms}
        return sorted(forms, key=lambda form: (rows[form], form.batch), reverse=True)

    @property
    def largest_rounds(self) -> tuple[tuple[int, "RoundLayout"], ...]:
        """For each tree, the largest batch that uses it and the layout of its rounds."""
        max_batches = [*(least - 1 for least, _ in self.trees if least <= self.max_batch), self.max_batch]
        fixed_rounds = [(batch, self.for_batch(batch)) for batch in max_batches if batch]
        choice_ends = [*(least - 1 for least, _ in self.choices[1:]), self.max_batch]
        batch_of_choice = {
            shape: min(end, self.max_batch)
            for end, (least, shapes) in zip(choice_ends, self.choices, strict=False)
            if least <= self.max_batch
            for shape in shapes
        }
        return (*fixed_rounds, *((batch, self.with_tree(shape)) for shape, batch in batch_of_choice.items()))

    @property
    def num_slots(self) -> int:
        """Rows of the slot table: one per running request, and slot 0 for padding."""
        return self.max_batch + 1

    @property
    def extend_width(self) -> int:
        """The most tokens that one round decides.  The draft also runs over these output tokens."""
        return self.steps + 1

    @property
    def ancestor_words(self) -> int:
        return -(-self.num_draft_tokens // ANCESTOR_BITS)

    @property
    def beam_rows(self) -> int:
        """K/V rows of the draft that staging holds while a request's tree grows: topk for every depth but the last."""
        return self.draft_rows_above(max(self.steps, 1))

    @property
    def beam_ancestor_words(self) -> int:
        """How many int64 words the ancestor bits of one draft row take."""
        return -(-self.beam_rows // ANCESTOR_BITS)

    def draft_rows_above(self, depth: int) -> int:
        """Returns how many draft rows the depths 1 to `depth` - 1 have together."""
        return (depth - 1) * self.topk

    @property
    def verify_rows(self) -> int:
        """The most nodes verified in one round."""
        return max(batch * layout.num_draft_tokens for batch, layout in self.largest_rounds)

    @property
    def target_rows(self) -> int:
        """Rows of the target's staging buffer, enough for the largest verify or prefill pass."""
        return max(self.verify_rows, self.chunk_size)

    @property
    def draft_rows(self) -> int:
        """Rows of the draft's staging buffer: enough for the beams or the output tokens of a round, or a prefill."""
        round_rows = max(
            batch * max(self.block_rows or layout.beam_rows, layout.extend_width)
            for batch, layout in self.largest_rounds
        )
        return max(round_rows, self.chunk_size)

    @property
    def chunk_widths(self) -> tuple[int, ...]:
        """The possible numbers of rows of a piece, ascending: MIN_CHUNK_WIDTH times powers of two, the values halfway
        between these, and chunk_size."""
        doublings = [MIN_CHUNK_WIDTH << i for i in range(self.chunk_size.bit_length())]
        middles = [width + width // 2 for width in doublings[1:]]
        return (*sorted(width for width in doublings + middles if width < self.chunk_size), self.chunk_size)

    def max_pieces(self, width: int) -> int:
        """Returns the number of pieces of this width that one prefill pass holds."""
        return self.chunk_size // width

    @property
    def captured_passes(self) -> tuple[LaunchForm, ...]:
        """The few forms of prefill passes that can be CUDA graphs.  Passes are padded to these forms.

        The forms are sorted by rows, ascending.  Among forms with equally many rows, the widest comes first."""
        forms = (
            LaunchForm(min(pieces, self.max_batch), width, pieces)
            for width in CAPTURED_WIDTHS
            for pieces in self.batch_buckets(MAX_CAPTURED_PIECES)
        )
        max_rows = min(MAX_CAPTURED_ROWS, self.chunk_size)
        fitting = (form for form in forms if form.pass_rows <= max_rows)
        return tuple(sorted(fitting, key=lambda form: (form.pass_rows, -form.width)))

    @property
    def captured_full_passes(self) -> tuple[LaunchForm, ...]:
        """Prefill passes with about chunk_size rows that can be CUDA graphs too, in addition to captured_passes."""
        widths = CAPTURED_WIDTHS[:0:-1] if self.chunk_size > MAX_CAPTURED_ROWS else ()
        sizes = ((width, self.max_pieces(width)) for width in widths)
        forms = (LaunchForm(min(pieces, self.max_batch), width, pieces) for width, pieces in sizes)
        return tuple(form for form in forms if form not in self.captured_passes)

    def max_pass_rows(self, is_streamed: bool) -> int:
        """Returns the most rows of a prefill pass.  is_streamed: whether running streams wait for the pass."""
        return (is_streamed and self.busy_chunk_size) or self.chunk_size

    def max_tokens_ahead(self, rounds: int) -> int:
        """Returns the most tokens after `rounds` rounds, counted from the last token that the host has read (included).

        rounds: the rounds in flight, and the next launch."""
        return rounds * self.extend_width + 1

    def max_committed_rows(self, num_known: int, rounds_in_flight: int) -> int:
        """Returns the largest possible number of the target's K/V rows in a request's pages before a launch.
        num_known: index of the last token that the host has read.  rounds_in_flight: launched rounds, not yet read."""
        return num_known + rounds_in_flight * self.extend_width

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def num_full_pages(self, num_tokens: int) -> int:
        """Returns how many pages `num_tokens` rows fill completely."""
        return num_tokens // self.page_size

    def tokens_in(self, num_pages: int) -> int:
        return num_pages * self.page_size

    def pages_needed(self, num_known: int, rounds: int, end: int) -> int:
        """Returns the number of pages that a request must hold before a launch.

        num_known: index of the last token that the host has read.  rounds: the rounds in flight, and the next launch.
        end: number of tokens at which the request finishes.  A round from there on decides at most one token."""
        return self.pages_for(min(num_known + self.max_tokens_ahead(rounds), end + rounds - 1))

    def max_accept_depth(self, end: Number, prefix_len: Number) -> Number:
        """Returns the greatest depth that a round may accept; negative if the request is finished.

        end: the most tokens of the request.  prefix_len: the index of the root.  There must be room for the root, the
        accepted nodes, and the token that the target picks after them.  Takes integers or integer tensors."""
        return end - 2 - prefix_len

    def max_appended_pages(self, batch: int) -> int:
        """Returns the most entries that the page tables of a batch gain from one round to the next."""
        return batch * (1 + self.pages_for(self.max_tokens_ahead(MAX_ROUNDS_IN_FLIGHT)))

    def batch_buckets(self, max_batch_size: int) -> tuple[int, ...]:
        """Returns the padded batch sizes of rounds, up to `max_batch_size` (see next_bucket)."""
        return tuple(sorted({min(next_bucket(batch), max_batch_size) for batch in range(1, max_batch_size + 1)}))

    @property
    def history_width(self) -> int:
        """The most tokens that SlotTable.history holds for a request."""
        return self.max_context + self.max_tokens_ahead(MAX_ROUNDS_IN_FLIGHT)

    @property
    def table_width(self) -> int:
        """The most pages of a request: columns of the page table."""
        return self.pages_for(self.history_width)

    @property
    def position_rows(self) -> int:
        """Number of positions: rows of the rotary tables.  Padding and mask tokens reach beyond the last token."""
        return self.history_width + max(self.steps, self.chunk_size, self.block_rows)

    @property
    def min_pages(self) -> int:
        """The fewest pages of a usable KV cache: those of one request of max_context, and the dummy page."""
        return 1 + self.table_width

    @property
    def max_pages(self) -> int:
        """The most pages of a KV cache by default: for max_batch requests of max_context tokens, and the dummy page."""
        return 1 + self.max_batch * self.table_width

    def require_batch(self, batch: int) -> None:
        """Check on the host that the buffers hold a round of this batch.  Raises EspalierError."""
        if batch > self.max_batch:
            raise EspalierError(
                f"buffers hold rounds of {self.max_batch} requests and this launch has {batch}; "
                f"both follow from {self}: launch at most max_batch requests, or raise max_batch"
            )

    def require_chunk(self, batch: int, width: int) -> None:
        """Check on the host that the buffers hold this prefill pass.  Raises EspalierError."""
        if batch * width > self.chunk_size:
            raise EspalierError(
                f"a prefill pass holds {self.chunk_size} rows and this launch needs {batch} · {width}; "
                f"both follow from {self}: launch fewer or narrower chunks, or raise chunk_size"
            )

    def require_shape(self, name: str, tensor: "Tensor", *shape: int) -> None:
        """Check a buffer's shape on the host; -1 accepts any size.

        Raises EspalierError with the buffer's name, both shapes, and this layout."""
        fits = tensor.ndim == len(shape) and all(
            need in (-1, have) for need, have in zip(shape, tensor.shape, strict=True)
        )
        if not fits:
            raise EspalierError(
                f"buffer {name} needs shape {list(shape)} and has {list(tensor.shape)}; both follow from {self}: "
                "allocate and launch from the same layout"
            )
