"""The cells of `bench round --shape`: batch, context, tree and page size, read from text."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from espalier.engine.prefill_policy import next_pass
from espalier.errors import EspalierError
from espalier.layout import RoundLayout

FORM = re.compile(r"(\d+)x(\d+):(?:(plain)|(\d+),(\d+),(\d+))(?:@(\d+(?:,\d+)*))?")
EXAMPLES = "1x1024:5,8,64, 8x1024:plain or 1x32768:5,8,64@1,64 (BATCHxCONTEXT:STEPS,TOPK,NODES@PAGES)"
PLAIN = (0, 1, 1)
# Rounds before the timed ones: in the first, clocks and caches are still those of a prefill.
WARM_UP = 6


@dataclass(frozen=True)
class Cell:
    """context: tokens of each prompt; tree: steps, topk and nodes."""

    batch: int
    context: int
    tree: tuple[int, int, int]
    page_size: int

    @property
    def drafts(self) -> bool:
        return self.tree[0] > 0

    @property
    def name(self) -> str:
        tree = ",".join(map(str, self.tree)) if self.drafts else "plain"
        return f"{self.batch}x{self.context}:{tree}@{self.page_size}"

    def layout(self, chunk_size: int, rounds: int) -> RoundLayout:
        """A layout with room for the prompts, for the tokens that early prompts decode while later ones enter, and for
        `rounds` timed rounds."""
        steps, topk, nodes = self.tree
        sizes = (self.batch, steps, topk, nodes, self.page_size)
        layout = RoundLayout(*sizes, self.context + 2, int(self.drafts), chunk_size)
        num_tokens = (passes(layout, [self.context] * self.batch) + WARM_UP + rounds + 4) * layout.extend_width
        return RoundLayout(*sizes, self.context + num_tokens + 2, int(self.drafts), chunk_size)


def passes(layout: RoundLayout, prompts: Sequence[int]) -> int:
    """The number of prefill passes until prompts of these lengths have entered."""
    left, num_passes = list(prompts), 0
    while left:
        lengths = next_pass(layout, left[: layout.max_batch], layout.chunk_size).lengths
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
            raise EspalierError(f"--cells {text!r} is not a cell; write {EXAMPLES}")
        batch, context, plain, *tree, pages = match.groups()
        sizes = PLAIN if plain else (int(tree[0]), int(tree[1]), int(tree[2]))
        if not plain and not sizes[0]:
            raise EspalierError(f"--cells {text!r} has no steps; plain decoding is written {batch}x{context}:plain")
        for page_size in map(int, pages.split(",")) if pages else page_sizes:
            cell = Cell(int(batch), int(context), sizes, page_size)
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
