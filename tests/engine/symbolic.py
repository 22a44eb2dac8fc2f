"""A device of symbols: what a launch would read and write, without the arithmetic.

A page row holds the digest of the tokens up to its position, so a stale, shared, missing or misplaced row is seen at
the launch that reads it, by name.  The scheduler, pages, prefix tree and engine above it are the real ones; thousands
of steps take a second.
"""

from dataclasses import dataclass, replace
from math import nan
from random import Random
from types import SimpleNamespace

import numpy as np

from espalier.engine.engine import Engine
from espalier.engine.launch_input import DraftTree, LaunchInput, RequestResult, TreeSize
from espalier.engine.prefill_policy import PrefillPass, pieces_of
from espalier.layout import RoundLayout
from espalier.logprobs import CHOSEN, TOKEN, row_words
from espalier.request import Request
from espalier.slots import SlotInit
from espalier.speculate.round import ModelRunner

VOCAB = 16
MASK = (1 << 61) - 1
TARGET, DRAFT = "target", "draft"
SEED = 7


def digest(tokens: list[int]) -> int:
    """Of a whole sequence; a row's content is the digest up to and with its own token."""
    value = SEED
    for token in tokens:
        value = extend(value, token)
    return value


def extend(value: int, token: int) -> int:
    return (value * 1_000_003 + token + 1) & MASK


def next_token(value: int) -> int:
    """The symbolic model: greedy, and a function of the whole sequence."""
    return (value ^ value >> 29) * 0x9E3779B1 % (1 << 40) // 977 % VOCAB


def continuation(request: Request, max_context: int) -> tuple[list[int], str]:
    """What plain decoding makes of the request, and how it ends."""
    tokens = list(request.prompt)
    value = digest(tokens)
    while True:
        token = next_token(value)
        tokens.append(token)
        value = extend(value, token)
        if token in request.stop_ids:
            return tokens[len(request.prompt) :], "stop"
        if len(tokens) >= request.max_num_tokens(max_context):
            return tokens[len(request.prompt) :], "length"


class Slot:
    """tokens known of it; digests: of the tokens up to and with each position."""

    def __init__(self, slot_init: SlotInit | None = None) -> None:
        self.slot_init = slot_init
        self.tokens: list[int] = []
        self.digests: list[int] = []
        self.table: list[int] = []
        self.prefix_len = 0
        if slot_init is not None:
            self.table = list(slot_init.pages)
            self.prefix_len = slot_init.start
            for token in slot_init.tokens:
                self.append(token)

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.digests.append(extend(self.digests[-1] if self.digests else SEED, token))

    def append_next(self) -> None:
        self.append(next_token(self.digests[-1]))


def extends(launch_input: LaunchInput) -> bool:
    return launch_input.tree is None or launch_input.tree.extends


class SymbolicDevice:
    """Runs launches like the executor does.  poison: a token whose rows are NaN; None for a sound model."""

    def __init__(self, layout: RoundLayout, num_pages: int, overlap: bool, random: Random, poison: int | None = None):
        self.layout = layout
        self.captured_passes = ()
        self.runs_any_tree = False
        self.overlap = overlap
        self.random = random
        self.poison = poison
        self.slots = [Slot() for _ in range(layout.num_slots)]
        self.pages: list[dict[tuple[str, int], int]] = [{} for _ in range(num_pages)]
        self.poisoned: set[int] = set()
        self.launch_inputs: list[LaunchInput] = []
        self.runner: ModelRunner

    def launch(self, launch_input: LaunchInput) -> "SymbolicDevice.Done":
        assert not launch_input.is_staged, "nothing is masked here"
        return self.Done(self.run(launch_input))

    @dataclass
    class Done:
        rows: list[RequestResult]

        def wait(self) -> None:
            pass

        def result(self) -> list[RequestResult]:
            return self.rows

    def close(self) -> None:
        pass

    def run(self, launch_input: LaunchInput) -> list[RequestResult]:
        self.launch_inputs.append(launch_input)
        assert launch_input.is_prefill or not launch_input.slot_inits, "a round's launch input has a fixed form"
        owners = [slot_init.slot for slot_init in launch_input.slot_inits]
        assert len(set(owners)) == len(owners), "two requests begin in one slot; on a GPU the earlier may win"
        own = [page for a in launch_input.slot_inits for page in a.pages[a.commit_from // self.layout.page_size :]]
        for page in (*own, *(page for _, _, page in launch_input.appended_pages)):
            self.pages[page].clear()
            self.poisoned.discard(page)
        for slot_init in launch_input.slot_inits:
            self.slots[slot_init.slot] = Slot(slot_init)
        for slot, column, page in launch_input.appended_pages:
            table = self.slots[slot].table
            assert column == len(table), f"page {page} of slot {slot} was appended for an earlier owner of the slot"
            table.append(page)
        assert 0 not in launch_input.slots
        assert len(set(launch_input.slots)) == len(launch_input.slots) <= self.layout.max_batch
        if launch_input.is_prefill:
            made = PrefillPass(launch_input.lengths, launch_input.width)
            assert made.rows <= self.layout.chunk_size
            assert launch_input.pieces == pieces_of(made)
            assert launch_input.width in self.layout.chunk_widths
            slots = [self.slots[s] for s in launch_input.slots]
            firsts = [slot.prefix_len for slot in slots]
            # Spans count rows of the whole pass.
            before = [PrefillPass(made.lengths[:i], made.width).rows for i in range(len(slots))]
            lengths = zip(slots, launch_input.lengths, strict=True)
            rows = [self._prefill(slot, n, extends(launch_input)) for slot, n in lengths]
            if launch_input.prompt_rows is None:
                return rows
            spans = [
                (max(begin - rows, 0), max(end - rows, 0))
                for (begin, end), rows in zip(launch_input.prompt_rows.row_spans, before, strict=True)
            ]
            of_prompts = map(self._of_prompt, slots, firsts, spans)
            return [replace(row, prompt_logprobs=own) for row, own in zip(rows, of_prompts, strict=True)]
        return [self._round(self.slots[s], extends(launch_input)) for s in launch_input.slots]

    def _prefill(self, slot: Slot, length: int, extends: bool) -> RequestResult:
        first = slot.prefix_len
        assert 1 <= length <= self.layout.chunk_size
        assert first + length <= len(slot.tokens)
        self._read(slot, first)
        assert slot.slot_init is not None
        self._write(slot, TARGET, range(max(first, slot.slot_init.commit_from), first + length))
        slot.prefix_len += length
        picked = slot.prefix_len == len(slot.tokens)
        if picked:
            slot.append_next()
        self._write_draft(slot, first, length, extends)
        num_finite = self._sound(slot, slot.prefix_len)
        return RequestResult([slot.tokens[slot.prefix_len]] if picked and num_finite else [], num_finite or not picked)

    def _of_prompt(self, slot: Slot, first: int, span: tuple[int, int]) -> np.ndarray:
        """Of the tokens after rows `span` of a pass from `first` on; NaN where these rows are."""
        assert slot.slot_init is not None
        begin, end = (first + at for at in span)
        assert begin == end or first <= begin < end < slot.slot_init.prompt_len
        values = [-1.0 if self._sound(slot, row + 1) else nan for row in range(begin, end)]
        rows = np.ones((len(values), row_words(0)), np.int64)
        rows[:, TOKEN] = slot.tokens[begin + 1 : end + 1]
        rows.view(np.float64)[:, CHOSEN] = values
        return rows

    def _round(self, slot: Slot, extends: bool) -> RequestResult:
        first = slot.prefix_len
        assert len(slot.tokens) == first + 1
        self._read(slot, first)
        slot_init = slot.slot_init
        assert slot_init is not None
        deepest = max(0, min(slot_init.depth_limit, slot_init.end - 2 - first))
        length = 1 + self.random.randint(0, deepest)
        for _ in range(length):
            slot.append_next()
        self._write(slot, TARGET, range(first, first + length))
        self._write_draft(slot, first, length, extends)
        slot.prefix_len += length
        nodes = self.layout.num_draft_tokens
        tree = DraftTree([0] * nodes, [0] * nodes, [0] * nodes, [0.0] * nodes, list(range(length)))
        num_finite = sum(self._sound(slot, first + i) for i in range(1, length + 1))
        tree_size = TreeSize((nodes - 1, *[0] * (self.layout.steps - 1)) if nodes > 1 else ())
        return RequestResult(slot.tokens[first + 1 :][:num_finite], num_finite == length, tree_size, tree)

    def _sound(self, slot: Slot, length: int) -> bool:
        """Whether what is picked after so many tokens is picked from finite logits."""
        return self.poison is None or self.poison not in slot.tokens[:length]

    def _write_draft(self, slot: Slot, first: int, length: int, extends: bool) -> None:
        assert slot.slot_init is not None
        assert extends or not slot.slot_init.depth_limit, "the draft left out tokens of a request that speculates"
        if self.layout.num_recomputed_tokens and extends:
            self._write(slot, DRAFT, range(max(first + 1, slot.slot_init.commit_from), first + length + 1))

    def _place(self, slot: Slot, position: int) -> tuple[int, int]:
        column, offset = divmod(position, self.layout.page_size)
        assert column < min(len(slot.table), self.layout.table_width), f"position {position} is past the page table"
        assert slot.table[column], f"position {position} stands in the dummy page"
        return slot.table[column], offset

    def _write(self, slot: Slot, layer: str, positions: range) -> None:
        for position in positions:
            page, offset = self._place(slot, position)
            assert (layer, offset) not in self.pages[page], f"{layer} row {position} in page {page} is written twice"
            self.pages[page][layer, offset] = slot.digests[position]
            if not self._sound(slot, position + 1):
                self.poisoned.add(page)

    def _read(self, slot: Slot, prefix_len: int) -> None:
        """Rows 0 .. prefix_len - 1 of the target and 1 .. prefix_len of the draft, as attention reads them.

        What the draft says of a request that never speculates is not used."""
        assert slot.slot_init is not None
        drafted, size = self.layout.num_recomputed_tokens and slot.slot_init.depth_limit, self.layout.page_size
        for first in range(0, prefix_len + 1, size):
            page, _ = self._place(slot, first)
            stored = self.pages[page]
            for offset, value in enumerate(slot.digests[first : min(first + size, prefix_len + 1)]):
                position = first + offset
                if position < prefix_len:
                    assert stored.get((TARGET, offset)) == value, f"target row {position} in page {page} is wrong"
                if position and drafted:
                    assert stored.get((DRAFT, offset)) == value, f"draft row {position} in page {page} is wrong"


def symbolic_engine(
    layout: RoundLayout,
    num_pages: int,
    overlap: bool,
    prefix_cache: bool = True,
    random: Random | None = None,
    poison: int | None = None,
) -> Engine:
    """The real engine over a device of symbols."""
    parts = SimpleNamespace(
        layout=layout,
        target=SimpleNamespace(config=SimpleNamespace(vocab_size=VOCAB, max_position=layout.max_context)),
        pages=SimpleNamespace(num_pages=num_pages),
        cache=SimpleNamespace(snapshot_rows=None),
    )
    device = SymbolicDevice(layout, num_pages, overlap, random or Random(0), poison)
    device.runner = parts  # type: ignore[assignment]
    return Engine(device, overlap, prefix_cache)
