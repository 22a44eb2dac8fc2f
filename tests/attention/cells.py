"""The cells over which a backend's declaration and its behaviour are compared: page sizes, what layers keep, the left
bound, windows; each with several numbers of nodes and lengths around the ends of pages."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from espalier.attention import Nodes, Prefix
from espalier.cache.kv import PagedKV
from espalier.cache.layer_spec import KVHeads, LatentKV, LayerSpec
from espalier.kernels.attention.ancestor_bits import pack_bits
from espalier.layout import RoundLayout

PAGE_SIZES = (1, 2, 16, 64, 128, 256, 512)
# Nodes of a pass.  1 and 6 are chains, the others trees; the last two are more than an ancestor word holds.
NODES = (1, 8, 6, 64, 65, 129)
CHAINS = (1, 6)
GROUPS = (1, 4, 8, 16)
LATENT = LayerSpec(8, LatentKV(576, 512))
SPECS = (
    *(LayerSpec(group, KVHeads(1, 64, 64)) for group in GROUPS),
    LayerSpec(8, KVHeads(2, 128, 128)),
    LayerSpec(4, KVHeads(2, 64, 64), window=20),
    LayerSpec(4, KVHeads(2, 84, 84)),
    LayerSpec(4, KVHeads(2, 64, 32)),
    LayerSpec(4, KVHeads(2, 64, 64), softcap=8.0),
    LayerSpec(4, KVHeads(1, 512, 512)),
    LATENT,
)


@dataclass(frozen=True)
class Cell:
    """first: the left bound, 1 and 2 for the rows of a draft."""

    page_size: int
    first: int
    specs: tuple[LayerSpec, ...]


CELLS = [Cell(page, first, (spec,)) for page, first, spec in product(PAGE_SIZES, (0, 1, 2), SPECS)]


def lengths_around(page_size: int) -> list[int]:
    """0, 1, a page and its neighbours, several pages and a part of one."""
    return [0, 1, page_size - 1, page_size, page_size + 1, 2 * page_size + 3]


def pages_of(cell: Cell, lengths: Sequence[int], dtype: torch.dtype, device: torch.device) -> tuple[PagedKV, Tensor]:
    """Pages of noise for this many rows, NaN where no row exists, and their shuffled table."""
    batch, most = len(lengths), max(lengths, default=0) + 2
    layout = RoundLayout(max(batch, 1), 2, 2, 4, cell.page_size, most, 0, 16)
    width = layout.table_width
    specs = tuple(replace(spec, window=None) for spec in cell.specs)
    pages = PagedKV(layout, 1 + max(batch, 1) * width, specs, len(specs), dtype, device)
    generator = torch.Generator().manual_seed(0)
    table = 1 + torch.randperm(max(batch, 1) * width, generator=generator).view(max(batch, 1), width)[:batch].int()
    for plane in (each for stack in pages.target_stacks for each in stack.planes):
        plane.copy_(torch.randn(plane.shape, generator=generator))
        for b, length in enumerate(lengths):
            held = torch.arange(width * cell.page_size)
            rows = table[b, held // cell.page_size].long() * cell.page_size + held % cell.page_size
            plane[:, rows[(held < cell.first) | (held >= length)]] = torch.nan
    return pages, table.to(device)


def pass_of(
    cell: Cell, pages: PagedKV, table: Tensor, lengths: Sequence[int], queries: int
) -> tuple[Prefix, Nodes, list[Tensor]]:
    """A prefix, nodes behind it (a chain or a random tree), and q, k, v of the first layer's shape."""
    device, batch = pages.device, len(lengths)
    length = torch.tensor(lengths, dtype=torch.int64, device=device).view(batch)
    generator = torch.Generator().manual_seed(queries)
    if queries in CHAINS:
        nodes = Nodes.chain(length[:, None] + torch.arange(queries, device=device))
    else:
        mask = torch.rand(batch, queries, queries, generator=generator).tril() > 0.5
        mask |= torch.eye(queries, dtype=torch.bool)
        positions = length[:, None] + (mask.sum(2) - 1).to(device)
        nodes = Nodes(positions, positions, pack_bits(mask).to(device))
    spec = cell.specs[0]
    kept = spec.cache_spec
    shapes = (spec.heads, kept.k_size), (kept.kv_heads, kept.k_size), (kept.kv_heads, kept.v_size)
    values = [torch.randn(batch, queries, *shape, generator=generator).to(device, pages.dtype) for shape in shapes]
    return Prefix(table, length, cell.first), nodes, values
