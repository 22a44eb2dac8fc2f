"""The pairs (row, choice) of a mixture of experts, sorted by expert and cut into tiles of one expert each.

The programs of experts.py take a tile each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from espalier.kernels.runtime.jit import kernel
from espalier.kernels.runtime.launch import chip, power_of_two, require
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger_and_wait

# Pairs that a sorting program reads per step.  It reads all pairs, so it has up to 1024 threads, the most of a program.
MAX_SORT_BLOCK = 8192
PAIRS_PER_THREAD = 8
# With fewer pairs than threads, some threads would hold copies, which tl.histogram must leave out.  So a step has at
# least this many pairs and threads.
MIN_SORT_THREADS = 128
WARP = 32


@kernel
def _experts_of(ids_ptr, live_ptr, pair, num_pairs, TOP_K: tl.constexpr, NUM_EXPERTS: tl.constexpr, LIVE: tl.constexpr):
    """The experts of pairs [BLOCK]: NUM_EXPERTS for rows without expert, NUM_EXPERTS + 1 past the last pair."""
    inside = pair < num_pairs
    expert = tl.load(ids_ptr + pair, mask=inside, other=NUM_EXPERTS + 1).to(tl.int32)
    if LIVE:
        live = tl.load(live_ptr + pair // TOP_K, mask=inside, other=1)
        expert = tl.where(live != 0, expert, NUM_EXPERTS)
    return expert


@kernel(do_not_specialize=["num_tiles"])
def _sort_pairs_kernel(
    ids_ptr, live_ptr, order_ptr, ends_ptr, tile_experts_ptr, tile_begins_ptr, num_pairs, num_tiles,
    TOP_K: tl.constexpr, NUM_EXPERTS: tl.constexpr, BINS: tl.constexpr, ROWS: tl.constexpr, LIVE: tl.constexpr,
    BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: one program for each expert, and one for the rows without expert.

    Each program reads all pairs, so the sort is stable and needs no atomics.
    """
    pdl_trigger_and_wait(DEPENDENT)
    own = tl.program_id(0)
    offset, bins = tl.arange(0, BLOCK), tl.arange(0, BINS)
    counts = tl.zeros((BINS,), tl.int32)
    for begin in range(0, num_pairs, BLOCK):
        counts += tl.histogram(
            _experts_of(ids_ptr, live_ptr, begin + offset, num_pairs, TOP_K, NUM_EXPERTS, LIVE), BINS
        )
    tiles = tl.cdiv(counts, ROWS)
    place = tl.sum(tl.where(bins < own, counts, 0), 0)
    first_tile = tl.sum(tl.where(bins < own, tiles, 0), 0)
    own_tiles = tl.sum(tl.where(bins == own, tiles, 0), 0)
    tl.store(ends_ptr + own, place + tl.sum(tl.where(bins == own, counts, 0), 0))
    # The last program also marks the unused tiles, with -1.
    listed = num_tiles - first_tile if own == NUM_EXPERTS else own_tiles
    for begin in range(0, listed, BLOCK):
        tile = begin + offset
        mask = tile < listed
        tl.store(tile_experts_ptr + first_tile + tile, tl.where(tile < own_tiles, own, -1), mask=mask)
        tl.store(tile_begins_ptr + first_tile + tile, place + tile * ROWS, mask=mask)
    for begin in range(0, num_pairs, BLOCK):
        pair = begin + offset
        expert = _experts_of(ids_ptr, live_ptr, pair, num_pairs, TOP_K, NUM_EXPERTS, LIVE)
        is_own = (expert == own).to(tl.int32)
        tl.store(order_ptr + place + tl.cumsum(is_own, 0) - 1, pair, mask=is_own != 0)
        place += tl.sum(is_own, 0)


@kernel
def expert_of_tile(experts_ptr, live_ptr, tile, top_k, num_experts, SORTED: tl.constexpr, LIVE: tl.constexpr):
    """The expert of a tile: num_experts for pairs without expert, -1 where there is no tile."""
    expert = tl.load(experts_ptr + tile).to(tl.int64)
    if LIVE and not SORTED:
        expert = tl.where(tl.load(live_ptr + tile // top_k) != 0, expert, num_experts)
    return expert


@kernel
def pairs_of_tile(
    order_ptr, ends_ptr, begins_ptr, tile, expert, SORTED: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """(place, inside, pair), each [ROWS]: the places of a tile's pairs, whether they exist, and the pairs."""
    if SORTED:
        place = tl.load(begins_ptr + tile) + tl.arange(0, ROWS)
        inside = place < tl.load(ends_ptr + expert)
        pair = tl.load(order_ptr + place, mask=inside, other=0)
    else:
        place = tile + tl.arange(0, ROWS)
        inside = place == tile
        pair = tl.where(inside, place, 0)
    return place, inside, pair


@dataclass(frozen=True)
class Tiles:
    """The pairs (row, choice) in tiles of one expert each.  A pair is the number row · K + choice.

    rows: the most pairs of a tile; 1: each pair is a tile, and nothing is sorted.
    experts: [tiles], the expert of each tile; E: no expert, -1: no tile.  begins: [tiles], each tile's first place.
    order: [N·K] int32, the pairs sorted by expert.  ends: [E + 1] int32, the place where each expert's pairs end.
    live: as in grouped_experts.  With rows = 1, `experts` is ids [N·K], and begins, order and ends are not read.
    """

    rows: int
    experts: Tensor
    begins: Tensor
    order: Tensor
    ends: Tensor
    live: Tensor | None

    @property
    def pointers(self) -> tuple[Tensor, ...]:
        live = self.experts if self.live is None else self.live
        return self.order, self.ends, self.experts, self.begins, live


def tiles_of(ids: Tensor, live: Tensor | None, num_experts: int, rows: int) -> Tiles:
    """rows: the most pairs of a tile.  Raises EspalierError for wrong shapes or dtypes."""
    if live is not None:
        require("grouped_experts: live", live, (ids.shape[0],), torch.bool, ids)
        live = live.contiguous()
    ids = ids.contiguous()
    if rows == 1:
        flat = ids.flatten()
        return Tiles(rows, flat, flat, flat, flat, live)
    return _sorted_tiles(ids, live, num_experts, rows)


def _sorted_tiles(ids: Tensor, live: Tensor | None, num_experts: int, rows: int) -> Tiles:
    num_pairs, top_k = ids.numel(), ids.shape[1]
    block = min(power_of_two(max(num_pairs, MIN_SORT_THREADS)), MAX_SORT_BLOCK)
    # Upper bound: rounding up adds less than one tile for each expert that has pairs.
    num_tiles = num_pairs // rows + min(num_experts + 1, num_pairs)
    order, ends, experts, begins = (
        torch.empty(size, dtype=torch.int32, device=ids.device)
        for size in (num_pairs, num_experts + 1, num_tiles, num_tiles)
    )
    _sort_pairs_kernel[(num_experts + 1,)](
        ids, ids if live is None else live, order, ends, experts, begins, num_pairs, num_tiles,
        TOP_K=top_k, NUM_EXPERTS=num_experts, BINS=power_of_two(max(num_experts + 2, WARP)), ROWS=rows,
        LIVE=live is not None, BLOCK=block, num_warps=max(MIN_SORT_THREADS, block // PAIRS_PER_THREAD) // WARP,
        **pdl_arguments(chip(ids)),
    )  # fmt: skip
    return Tiles(rows, experts, begins, order, ends, live)
