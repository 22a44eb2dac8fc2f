"""What `bench round` measures at a named shape: cells of batch, context, tree and page size, read from text."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from espalier.engine.prefill_policy import next_pass
from espalier.errors import EspalierError
from espalier.layout import RoundLayout

FORM = re.compile(r"(\d+)x(\d+):(?:(plain)|(\d+),(\d+),(\d+))(?:@(\d+(?:,\d+)*))?")
EXAMPLES = "1x1024:5,8,64, 8x1024:plain or 1x32768:5,8,64@1,64 (BATCHxCONTEXT:STEPS,TOPK,NODES@PAGES)"
PLAIN = (0, 1, 1)
# Rounds before those that count: the first find clocks and caches of a prefill.
WARM = 6


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
        """Room for the prompts, and for `rounds` full rounds after whatever those decode who entered first."""
        steps, topk, nodes = self.tree
        sizes = (self.batch, steps, topk, nodes, self.page_size)
        layout = RoundLayout(*sizes, self.context + 2, int(self.drafts), chunk_size)
        most = (passes(layout, [self.context] * self.batch) + WARM + rounds + 4) * layout.extend_width
        return RoundLayout(*sizes, self.context + most + 2, int(self.drafts), chunk_size)


def passes(layout: RoundLayout, prompts: Sequence[int]) -> int:
    """Prefill passes until prompts of so many tokens have entered."""
    left, count = list(prompts), 0
    while left:
        lengths = next_pass(layout, left[: layout.max_batch], layout.chunk_size).lengths
        left = [tokens - n for tokens, n in zip(left, lengths, strict=False) if tokens > n] + left[len(lengths) :]
        count += 1
    return count


def parse_cells(texts: Sequence[str], page_sizes: Sequence[int]) -> tuple[Cell, ...]:
    """The cells that texts name, those without pages of their own at each of `page_sizes`, each once, in order.

    Raises EspalierError for what is no cell or no layout.
    """
    cells: dict[Cell, None] = {}
    for text in texts:
        found = FORM.fullmatch(text)
        if found is None:
            raise EspalierError(f"--cells {text!r} is not a cell; write {EXAMPLES}")
        batch, context, plain, *tree, pages = found.groups()
        nodes = PLAIN if plain else (int(tree[0]), int(tree[1]), int(tree[2]))
        if not plain and not nodes[0]:
            raise EspalierError(f"--cells {text!r} has no steps; plain decoding is written {batch}x{context}:plain")
        for page_size in map(int, pages.split(",")) if pages else page_sizes:
            cell = Cell(int(batch), int(context), nodes, page_size)
            _check(cell, text)
            cells[cell] = None
    return tuple(cells)


def with_plain(cells: Sequence[Cell]) -> tuple[Cell, ...]:
    """The cells, and a plain one, at the pages of the first, for each batch and context that has none."""
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
