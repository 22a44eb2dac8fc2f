"""Units of work of attention: a range of a request's rows (kernels/attention/kv_splits.py), one KV head, a tile of
queries.

What every attention kernel shares, in numbers alone.  Blocks of a persistent grid take units in turns; queries of a
tile are packed: the heads that share a KV head side by side, query after query.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from espalier.kernels.runtime.launch import kernel
from espalier.kernels.runtime.pdl import pdl_wait

if TYPE_CHECKING:
    import triton.language as tl

# What NODES of a kernel says: no staged rows, a chain of them, or ancestor words.
NO_NODES, CHAIN, WORDS = 0, 1, 2
# What STRAIGHT says: of a range's whole blocks none are known to stand side by side in the pool, all do, or as many of
# the first as were counted (kernels/attention/contiguous_blocks.py).
NONE, ALL, COUNTED = 0, 1, 2


@kernel
def items_of(start_ptr, batch, DEPENDENT: tl.constexpr):
    """How many splits there are, once the kernel in front has ended: the first thing that is read.

    The next kernel starts when this one's programs end: those that wait would take room from those that work.
    """
    pdl_wait(DEPENDENT)
    return tl.load(start_ptr + batch)


@kernel
def unit_of(base, backwards):
    """This block's unit of a turn.  Turns go back and forth: the longest unit of one, then the shortest of the next."""
    pid = tl.program_id(0)
    return base + tl.where(backwards == 1, tl.num_programs(0) - 1 - pid, pid)


@kernel
def item_of(unit, items, tiles, KV_HEADS: tl.constexpr, WIDE: tl.constexpr):
    """The range of a unit of work: heads, then splits, then tiles; or, if not WIDE, tiles, then heads, then splits."""
    if WIDE:
        item = unit // KV_HEADS % items
    else:
        item = unit // (tiles * KV_HEADS)
    return item


@kernel
def tile_and_head(unit, items, tiles, KV_HEADS: tl.constexpr, WIDE: tl.constexpr):
    """Longest parts of a causal triangle first; else tiles that read the same keys side by side, then heads."""
    tile = tiles - 1 - unit // (items * KV_HEADS) if WIDE else unit % tiles
    head = unit % KV_HEADS if WIDE else unit // tiles % KV_HEADS
    return tile, head


@kernel
def split_at(item_ptr, item, exists):
    """request, begin, end, siblings: see kernels/attention/kv_splits.py."""
    at = item_ptr + item * 4
    request = tl.load(at, mask=exists, other=0).to(tl.int64)
    begin = tl.load(at + 1, mask=exists, other=0)
    end = tl.load(at + 2, mask=exists, other=0)
    return request, begin, end, tl.load(at + 3, mask=exists, other=0)


@kernel
def work_at(unit, item_ptr, start_ptr, items, tiles, KV_HEADS: tl.constexpr, WIDE: tl.constexpr):
    """Of a unit that exists: its range (item, request, begin, end, siblings), whether that is its request's last, tile
    and head."""
    item = item_of(unit, items, tiles, KV_HEADS, WIDE)
    request, begin, end, siblings = split_at(item_ptr, item, True)
    is_last = item + 1 == tl.load(start_ptr + request + 1)
    tile, head = tile_and_head(unit, items, tiles, KV_HEADS, WIDE)
    return item, request, begin, end, siblings, is_last, tile, head


@kernel
def committed_blocks(begin, end, first, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """Of positions begin .. end, begin a multiple of BLOCK_N: how many blocks, how many of them reach below `first`,
    and how many after these are seen whole, of which nobody can be sure under a window.
    """
    blocks = (tl.maximum(end - begin, 0) + BLOCK_N - 1) // BLOCK_N
    lower = tl.minimum((tl.maximum(first - begin, 0) + BLOCK_N - 1) // BLOCK_N, blocks)
    whole = 0
    if WINDOW == 0:
        whole = tl.maximum((end - begin) // BLOCK_N - lower, 0)
    return blocks, lower, whole


@kernel
def block_at(t, lower, whole):
    """Which block is taken t-th: whole ones, then those before them, then those after them."""
    return tl.where(t < whole, lower + t, tl.where(t < lower + whole, t - whole, t))


@kernel
def nodes_of(
    tile,
    rows,
    NODES: tl.constexpr,
    WINDOW: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Staged rows low .. high that the queries of a tile may see, of `rows`: of a chain none past its last query."""
    low = 0
    high = rows
    if NODES == 1:
        high = tl.minimum(high, (tile * BLOCK_M + BLOCK_M - 1) // GROUPS + 1)
        if WINDOW > 0:
            low = tl.maximum(tile * BLOCK_M // GROUPS - WINDOW + 1, 0) // BLOCK_R * BLOCK_R
    return low, high
