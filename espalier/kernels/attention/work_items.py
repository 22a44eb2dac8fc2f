"""Work items of the attention kernels.  A work item is (split, KV head, query tile).

A split is a part of one request's committed rows (kv_splits.py).  A query tile holds BLOCK_M packed queries: query
after query, and for each query the GROUP_SIZE heads that share the KV head.  The Triton and the Gluon kernels share the
functions here, which compute scalars.  The programs of a persistent grid take work items in turn.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

from espalier.kernels.runtime.jit import kernel
from espalier.kernels.runtime.pdl import pdl_trigger, pdl_wait

# Values of a kernel's STAGED_KIND: no staged rows; rows of a chain; rows of a tree, with ancestor bits.
STAGED_NONE, STAGED_CHAIN, STAGED_TREE = 0, 1, 2
# Values of a kernel's TMA_BLOCKS, the blocks of a split that TMA copies: no blocks; all blocks without a mask, if every
# block is contiguous in the pages; only the contiguous blocks at the split's beginning, which kv_splits.py counts.
TMA_NONE, TMA_ALL, TMA_COUNTED = 0, 1, 2


class WorkPlan(NamedTuple):
    """Values that all work items of a launch share.

    splits_ptr, split_starts_ptr: KVSplits.table and KVSplits.starts.  num_splits: the splits of the whole batch.
    num_tiles, queries, num_staged_rows: the numbers of query tiles, queries and staged rows of each request.
    first_position: see Prefix."""

    splits_ptr: Any
    split_starts_ptr: Any
    num_splits: Any
    num_tiles: Any
    queries: Any
    num_staged_rows: Any
    first_position: Any


class WorkItem(NamedTuple):
    """One work item.  begin, end: the positions of the split's rows.  request_splits: how many splits the request has.
    is_last_split: whether `split` is the last of these."""

    split: Any
    request: Any
    begin: Any
    end: Any
    request_splits: Any
    is_last_split: Any
    query_tile: Any
    kv_head: Any


@kernel
def wait_and_count_splits(split_starts_ptr, batch, queries, USE_PDL: tl.constexpr):
    """Wait for the previous kernel, let the merge of splits start if it is small, then return the number of splits.

    With PDL (runtime/pdl.py), a kernel triggers the start of the next kernel.  This kernel triggers the merge after its
    own wait, so the merge may read the splits before it waits (merge.py).  A large merge is triggered later, in
    `trigger_merge`.  If a large merge started here, its programs would take multiprocessors from attention."""
    pdl_wait(USE_PDL)
    num_splits = tl.load(split_starts_ptr + batch)
    # If no request has several splits, there is nothing to merge.  The limit of 16 queries was measured (docs/log.md).
    if (num_splits <= batch) | (batch * queries <= 16):
        pdl_trigger(USE_PDL)
    return num_splits


@kernel
def trigger_merge(first_work_item, num_work_items, USE_PDL: tl.constexpr):
    """Let the merge start if this is the program's last work item.  Called before each result is written."""
    if first_work_item + tl.num_programs(0) >= num_work_items:
        pdl_trigger(USE_PDL)


@kernel
def work_item_of_program(first_work_item, is_reversed):
    """Returns this program's work item in the iteration that starts at `first_work_item`.

    Every second iteration is reversed, so the program that had the longest work item then gets the shortest."""
    pid = tl.program_id(0)
    return first_work_item + tl.where(is_reversed == 1, tl.num_programs(0) - 1 - pid, pid)


@kernel
def split_of_work_item(work_item, num_splits, num_tiles, KV_HEADS: tl.constexpr, LONGEST_FIRST: tl.constexpr):
    """Returns a work item's split.  Order of work items: by split, head, tile; LONGEST_FIRST: by tile, split, head."""
    if LONGEST_FIRST:
        split = work_item // KV_HEADS % num_splits
    else:
        split = work_item // (num_tiles * KV_HEADS)
    return split


@kernel
def tile_and_kv_head(work_item, num_splits, num_tiles, KV_HEADS: tl.constexpr, LONGEST_FIRST: tl.constexpr):
    """Returns the query tile and the KV head of a work item.

    LONGEST_FIRST: whether the last tile comes first, because the queries of the last tile see the most rows of a chain.
    If false, tiles that read the same keys are neighbours."""
    tile = num_tiles - 1 - work_item // (num_splits * KV_HEADS) if LONGEST_FIRST else work_item % num_tiles
    head = work_item % KV_HEADS if LONGEST_FIRST else work_item // num_tiles % KV_HEADS
    return tile, head


@kernel
def load_split_range(splits_ptr, split, split_exists):
    """Returns (request, begin, end, request_splits): row `split` of KVSplits.table; zeros unless split_exists."""
    at = splits_ptr + split * 4
    request = tl.load(at, mask=split_exists, other=0).to(tl.int64)
    begin = tl.load(at + 1, mask=split_exists, other=0)
    end = tl.load(at + 2, mask=split_exists, other=0)
    return request, begin, end, tl.load(at + 3, mask=split_exists, other=0)


@kernel
def load_work_item(plan, work_item, KV_HEADS: tl.constexpr, LONGEST_FIRST: tl.constexpr):
    """Returns work item number `work_item`, which must exist, of a WorkPlan."""
    split = split_of_work_item(work_item, plan.num_splits, plan.num_tiles, KV_HEADS, LONGEST_FIRST)
    request, begin, end, request_splits = load_split_range(plan.splits_ptr, split, True)
    is_last_split = split + 1 == tl.load(plan.split_starts_ptr + request) + request_splits
    tile, head = tile_and_kv_head(work_item, plan.num_splits, plan.num_tiles, KV_HEADS, LONGEST_FIRST)
    return WorkItem(split, request, begin, end, request_splits, is_last_split, tile, head)


@kernel
def count_committed_blocks(begin, end, first_position, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """Returns (num_blocks, num_lower, num_unmasked) of positions begin .. end.  begin is a multiple of BLOCK_N.

    The first num_lower blocks contain positions below `first_position`.  The next num_unmasked blocks need no
    mask.  With a window, num_unmasked is 0."""
    num_blocks = (tl.maximum(end - begin, 0) + BLOCK_N - 1) // BLOCK_N
    num_lower = tl.minimum((tl.maximum(first_position - begin, 0) + BLOCK_N - 1) // BLOCK_N, num_blocks)
    num_unmasked = 0
    if WINDOW == 0:
        num_unmasked = tl.maximum((end - begin) // BLOCK_N - num_lower, 0)
    return num_blocks, num_lower, num_unmasked


@kernel
def nth_block_index(step, num_lower, num_unmasked):
    """Returns the block to process in this step: first the unmasked blocks, then the blocks before and after them."""
    return tl.where(
        step < num_unmasked, num_lower + step, tl.where(step < num_lower + num_unmasked, step - num_unmasked, step)
    )


@kernel
def visible_staged_range(
    tile, rows,
    STAGED_KIND: tl.constexpr, WINDOW: tl.constexpr, GROUP_SIZE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Returns (low, high): a query tile sees no staged rows outside low .. high-1.  In a chain, it sees no rows after
    its last query."""
    low = 0
    high = rows
    if STAGED_KIND == 1:
        high = tl.minimum(high, (tile * BLOCK_M + BLOCK_M - 1) // GROUP_SIZE + 1)
        if WINDOW > 0:
            low = tl.maximum(tile * BLOCK_M // GROUP_SIZE - WINDOW + 1, 0) // BLOCK_R * BLOCK_R
    return low, high
