"""The cells of `lab round --shape`: batch, context, tree and page size, read from text."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from espalier.engine.prefill_policy import next_prefill_pass
from espalier.errors import EspalierError
from espalier.layout import RoundLayout
from espalier.models.draft import DraftSpec
from espalier.startup.resolve import DEFAULT_NUM_DRAFT_TOKENS, DEFAULT_STEPS, DEFAULT_TOPK
from lab.bench.flags import CELL_EXAMPLES

CELL_PATTERN = re.compile(r"(\d+)x(\d+):(?:(plain|auto)|(\d+),(\d+),(\d+))(?:@(\d+(?:,\d+)*))?")
PLAIN_TREE_SIZES = (0, 1, 1)
# Rounds before the timed rounds: in the first rounds, clocks and caches still have the state after a prefill.
WARM_UP_ROUNDS = 6
# Rounds in which an engine that chooses trees finds the best tree.  They run other requests than the timed rounds,
# because a round takes longer after more tokens.
TREE_SEARCH_ROUNDS = 250
# Rounds after the timed rounds, in which the experts that a pass touches are counted.
EXPERT_COUNT_ROUNDS = 3


@dataclass(frozen=True)
class RoundCell:
    """A cell of the table: a batch of prompts and a tree.

    context: tokens of each prompt; tree: steps, topk and nodes; is_auto: whether the engine chooses trees; `tree` is
    then the largest.
    """

    batch: int
    context: int
    tree: tuple[int, int, int]
    page_size: int
    is_auto: bool = False

    @property
    def rounds_before(self) -> tuple[int, ...]:
        """Returns the numbers of rounds that run before the timed rounds, each number with new requests."""
        return (TREE_SEARCH_ROUNDS, WARM_UP_ROUNDS) if self.is_auto else (WARM_UP_ROUNDS,)

    @property
    def has_draft(self) -> bool:
        return self.tree[0] > 0

    @property
    def name(self) -> str:
        return f"{self.batch}x{self.context}:{self.tree_name}"

    @property
    def tree_name(self) -> str:
        """The tree and the page size."""
        tree = "auto" if self.is_auto else ",".join(map(str, self.tree)) if self.has_draft else "plain"
        return f"{tree}@{self.page_size}"

    def own_layout(self, chunk_size: int, rounds: int, draft: DraftSpec) -> RoundLayout:
        """Returns the smallest layout for this cell with `rounds` timed rounds.  draft: of the draft that runs."""
        sizes = (draft.num_recomputed_tokens, chunk_size) if self.has_draft else (0, chunk_size)
        layout = RoundLayout(self.batch, *self.tree, self.page_size, self.context + 2, *sizes)
        layout = replace(layout, block_rows=draft.block_rows if self.has_draft else 0)
        return replace(layout, max_context=self.context + self.max_tokens(layout, rounds))

    def max_tokens(self, layout: RoundLayout, rounds: int) -> int:
        """Returns the most tokens that a request decodes: during later prefills, and then in the rounds of the tree
        search, or in the warm-up, the timed rounds and the rounds that count experts."""
        entering = count_prefill_passes(layout, [self.context] * self.batch)
        last = WARM_UP_ROUNDS + rounds + EXPERT_COUNT_ROUNDS
        return (entering + max(*self.rounds_before, last) + 4) * layout.extend_width + 2


def count_prefill_passes(layout: RoundLayout, prompts: Sequence[int]) -> int:
    """Returns the number of prefill passes for prompts of these lengths, if requests decode in between."""
    left, num_passes = list(prompts), 0
    while left:
        lengths = next_prefill_pass(layout, left[: layout.max_batch], layout.max_pass_rows(is_streamed=True)).lengths
        left = [tokens - n for tokens, n in zip(left, lengths, strict=False) if tokens > n] + left[len(lengths) :]
        num_passes += 1
    return num_passes


def parse_cells(texts: Sequence[str], page_sizes: Sequence[int]) -> tuple[RoundCell, ...]:
    """Returns the cells that the texts name, in order and without duplicates.

    A text without page sizes gives a cell for each of `page_sizes`.

    Raises EspalierError for a text that names no cell, and for a cell without a valid layout.
    """
    cells: dict[RoundCell, None] = {}
    for text in texts:
        match = CELL_PATTERN.fullmatch(text)
        if match is None:
            raise EspalierError(f"--cells {text!r} is not a cell; write {CELL_EXAMPLES}")
        batch, context, word, *tree, pages = match.groups()
        named = (DEFAULT_STEPS, DEFAULT_TOPK, DEFAULT_NUM_DRAFT_TOKENS) if word == "auto" else PLAIN_TREE_SIZES
        sizes = named if word else (int(tree[0]), int(tree[1]), int(tree[2]))
        if not word and not sizes[0]:
            raise EspalierError(f"--cells {text!r} has no steps; plain decoding is written {batch}x{context}:plain")
        for page_size in map(int, pages.split(",")) if pages else page_sizes:
            cell = RoundCell(int(batch), int(context), sizes, page_size, word == "auto")
            _check_cell(cell, text)
            cells[cell] = None
    return tuple(cells)


def with_plain_cells(cells: Sequence[RoundCell]) -> tuple[RoundCell, ...]:
    """The cells, and for each batch and context without plain decoding a plain cell, at the page size of its first
    cell."""
    have = {(cell.batch, cell.context) for cell in cells if not cell.has_draft}
    added: dict[tuple[int, int], RoundCell] = {}
    for cell in cells:
        sizes = cell.batch, cell.context
        if sizes not in have:
            added.setdefault(sizes, RoundCell(*sizes, PLAIN_TREE_SIZES, cell.page_size))
    return (*cells, *added.values())


def _check_cell(cell: RoundCell, text: str) -> None:
    if cell.context < 1:
        raise EspalierError(f"--cells {text!r} has no context; use a prompt of 1 token or more")
    try:
        RoundLayout(cell.batch, *cell.tree, cell.page_size, cell.context + 2, int(cell.has_draft), 16)
    except EspalierError as error:
        raise EspalierError(f"--cells {text!r}: {error}") from None
