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

FORM = re.compile(r"(\d+)x(\d+):(?:(plain|auto)|(\d+),(\d+),(\d+))(?:@(\d+(?:,\d+)*))?")
PLAIN = (0, 1, 1)
# Rounds before the timed ones: in the first, clocks and caches are still those of a prefill.
WARM_UP = 6
# Where the engine chooses trees, it finds the best in so many rounds.  They are of other requests than
# the timed ones, because a round takes longer behind more tokens.
FINDING = 250
# Rounds after the timed ones, in which the experts that a pass touches are counted.
COUNTED = 3


@dataclass(frozen=True)
class Cell:
    """context: tokens of each prompt; tree: steps, topk and nodes; is_auto: whether the engine chooses trees, up to the
    default one, which `tree` is then."""

    batch: int
    context: int
    tree: tuple[int, int, int]
    page_size: int
    is_auto: bool = False

    @property
    def rounds_before(self) -> tuple[int, ...]:
        """Rounds before the timed ones, each time of new requests."""
        return (FINDING, WARM_UP) if self.is_auto else (WARM_UP,)

    @property
    def drafts(self) -> bool:
        return self.tree[0] > 0

    @property
    def name(self) -> str:
        return f"{self.batch}x{self.context}:{self.tree_name}"

    @property
    def tree_name(self) -> str:
        """The tree and the page size."""
        tree = "auto" if self.is_auto else ",".join(map(str, self.tree)) if self.drafts else "plain"
        return f"{tree}@{self.page_size}"

    def own_layout(self, chunk_size: int, rounds: int, draft: DraftSpec) -> RoundLayout:
        """The smallest layout that holds this cell, whose trees this draft grows, and `rounds` timed rounds."""
        sizes = (draft.num_recomputed_tokens, chunk_size) if self.drafts else (0, chunk_size)
        layout = RoundLayout(self.batch, *self.tree, self.page_size, self.context + 2, *sizes)
        layout = replace(layout, block_rows=draft.block_rows if self.drafts else 0)
        return replace(layout, max_context=self.context + self.max_tokens(layout, rounds))

    def max_tokens(self, layout: RoundLayout, rounds: int) -> int:
        """The most tokens of a request: decoded while later prompts enter, and then either in the rounds that find a
        tree, or in the warm-up, in timed rounds and in counted ones."""
        entering = passes(layout, [self.context] * self.batch)
        return (entering + max(*self.rounds_before, WARM_UP + rounds + COUNTED) + 4) * layout.extend_width + 2


def passes(layout: RoundLayout, prompts: Sequence[int]) -> int:
    """The number of prefill passes until prompts of these lengths have entered, if requests decode all the while."""
    left, num_passes = list(prompts), 0
    while left:
        lengths = next_prefill_pass(layout, left[: layout.max_batch], layout.max_pass_rows(decoding=True)).lengths
        left = [tokens - n for tokens, n in zip(left, lengths, strict=False) if tokens > n] + left[len(lengths) :]
        num_passes += 1
    return num_passes


def parse_cells(texts: Sequence[str], page_sizes: Sequence[int]) -> tuple[Cell, ...]:
    """The cells that the texts name, each once, in order.  A text without page sizes gives a cell for each of
    `page_sizes`.

    Raises EspalierError for a text that names no cell, and for a cell without a valid layout.
    """
    cells: dict[Cell, None] = {}
    for text in texts:
        match = FORM.fullmatch(text)
        if match is None:
            raise EspalierError(f"--cells {text!r} is not a cell; write {CELL_EXAMPLES}")
        batch, context, word, *tree, pages = match.groups()
        named = (DEFAULT_STEPS, DEFAULT_TOPK, DEFAULT_NUM_DRAFT_TOKENS) if word == "auto" else PLAIN
        sizes = named if word else (int(tree[0]), int(tree[1]), int(tree[2]))
        if not word and not sizes[0]:
            raise EspalierError(f"--cells {text!r} has no steps; plain decoding is written {batch}x{context}:plain")
        for page_size in map(int, pages.split(",")) if pages else page_sizes:
            cell = Cell(int(batch), int(context), sizes, page_size, word == "auto")
            _check(cell, text)
            cells[cell] = None
    return tuple(cells)


def with_plain(cells: Sequence[Cell]) -> tuple[Cell, ...]:
    """The cells, and for each batch and context without plain decoding a plain cell, at the page size of its first
    cell."""
    have = {(cell.batch, cell.context) for cell in cells if not cell.drafts}
    added: dict[tuple[int, int], Cell] = {}
    for cell in cells:
        if (cell.batch, cell.context) not in have:
            added.setdefault((cell.batch, cell.context), Cell(cell.batch, cell.context, PLAIN, cell.page_size))
    return (*cells, *added.values())


def _check(cell: Cell, text: str) -> None:
    if cell.context < 1:
        raise EspalierError(f"--cells {text!r} has no context; use a prompt of 1 token or more")
    try:
        RoundLayout(cell.batch, *cell.tree, cell.page_size, cell.context + 2, int(cell.drafts), 16)
    except EspalierError as error:
        raise EspalierError(f"--cells {text!r}: {error}") from None
