"""The splits of split-KV attention, computed on the device once per pass.

The committed rows of each request are divided into splits that run in parallel.  merge.py merges the partial results
of the splits in position order.  The length of a split depends on the request's rows, the number of queries and the
batch bucket of the pass (the batch, rounded up).  In the table the requests with the longest splits come first.
Programs take splits in turn, so all programs get about equally much work (work_items.py:work_item_of_program).

TMA copies a block of committed rows with one instruction if the block is contiguous in the pages.  Contiguous blocks
are counted once per Prefix, for all layers with the same splits and rows per block.  If the page size is a multiple of
the rows per block, every block is contiguous, and nothing is counted.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.attention.work_items import count_committed_blocks, load_split_range
from espalier.kernels.ops.selection import SPLIT_ALIGNMENT, SPLIT_COLUMNS, KVSplitPolicy, KVSplits
from espalier.kernels.runtime.jit import kernel
from espalier.kernels.runtime.launch import chip, next_power_of_2, require
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger_and_wait

# The number of queries, or of other requests, that one step of _kv_splits_kernel reads for each request.
COMPARED_PER_STEP = 16


@kernel
def _split_rows_and_count(
    num_rows, request_exists, num_splits, max_splits, STEP: tl.constexpr, MIN_ROWS: tl.constexpr, MAX_ROWS: tl.constexpr
):
    """Returns (rows per split, number of splits) of requests with num_rows rows, as KVSplitPolicy.rows_per_split does.
    A request that does not exist has no splits."""
    num_rows = tl.maximum(num_rows, 0)
    num_wanted = tl.maximum(
        tl.minimum((num_rows + MIN_ROWS - 1) // MIN_ROWS, num_splits), (num_rows + MAX_ROWS - 1) // MAX_ROWS
    )
    count = tl.minimum(tl.maximum(num_wanted, 1), max_splits)
    split_rows = tl.maximum((num_rows + count * STEP - 1) // (count * STEP), 1) * STEP
    return split_rows, tl.where(request_exists, tl.maximum((num_rows + split_rows - 1) // split_rows, 1), 0)


@kernel(do_not_specialize=["first_position", "num_splits", "max_splits"])
def _kv_splits_kernel(
    length_ptr, position_ptr, splits_ptr, split_starts_ptr, batch, queries, first_position, num_splits, max_splits,
    length_stride_b, position_stride_b, position_stride_q,
    WINDOW: tl.constexpr, STEP: tl.constexpr, MIN_ROWS: tl.constexpr, MAX_ROWS: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """One program computes the splits of all requests.  MIN_ROWS, MAX_ROWS: see KVSplitPolicy.  WINDOW: 0 for none.
    STEP: the rows of a split are a multiple of it.  BLOCK_B: at least the batch.  BLOCK_Q: queries read at a time."""
    request = tl.arange(0, BLOCK_B)
    request_exists = request < batch
    length = tl.load(length_ptr + request * length_stride_b, mask=request_exists, other=0).to(tl.int32)
    begin = tl.zeros([BLOCK_B], tl.int32) + first_position
    if WINDOW > 0:
        min_position = tl.full([BLOCK_B], 0x7FFFFFFF, tl.int32)
        for at in range(0, queries, BLOCK_Q):
            query = at + tl.arange(0, BLOCK_Q)
            query_exists = request_exists[:, None] & (query < queries)[None, :]
            row = request[:, None].to(tl.int64) * position_stride_b + query[None, :] * position_stride_q
            position = tl.load(position_ptr + row, mask=query_exists, other=0x7FFFFFFF).to(tl.int32)
            min_position = tl.minimum(min_position, tl.min(position, 1))
        begin = tl.where(request_exists, tl.maximum(begin, min_position - WINDOW + 1), 0)
    begin = begin // STEP * STEP
    size, count = _split_rows_and_count(
        length - begin, request_exists, num_splits, max_splits, STEP, MIN_ROWS, MAX_ROWS
    )
    if WINDOW > 0:
        # With a window, all splits are about equally long, so they are not sorted by length.
        start = tl.cumsum(count, 0) - count
    else:
        start = tl.zeros([BLOCK_B], tl.int32)
        for at in range(0, batch, BLOCK_Q):
            other = at + tl.arange(0, BLOCK_Q)
            exists = other < batch
            other_rows = (
                tl.load(length_ptr + other * length_stride_b, mask=exists, other=0).to(tl.int32)
                - first_position // STEP * STEP
            )
            other_size, other_count = _split_rows_and_count(
                other_rows, exists, num_splits, max_splits, STEP, MIN_ROWS, MAX_ROWS
            )
            is_before = other_size[None, :] > size[:, None]
            is_before |= (other_size[None, :] == size[:, None]) & (other[None, :] < request[:, None])
            start += tl.sum(tl.where(is_before, other_count[None, :], 0), 1)
    tl.store(split_starts_ptr + request, start, mask=request_exists)
    tl.store(split_starts_ptr + batch, tl.sum(count, 0))
    tl.store(split_starts_ptr + batch + 1 + request, count, mask=request_exists)
    for i in range(max_splits):
        exists = i < count
        split_begin = begin + i * size
        split = splits_ptr + (start + i) * 4
        tl.store(split, request, mask=exists)
        tl.store(split + 1, split_begin, mask=exists)
        tl.store(split + 2, tl.minimum(split_begin + size, tl.maximum(length, split_begin)), mask=exists)
        tl.store(split + 3, count, mask=exists)


def kv_splits(
    length: Tensor, first_position: int, policy: KVSplitPolicy, positions: Tensor | None = None, window: int = 0
) -> KVSplits:
    """The launcher of ops/selection.py:kv_splits.  length: [B].  positions: of queries, for a window."""
    batch = length.shape[0]
    require("splits' length", length, (-1,), torch.int64, length)
    table = torch.empty(batch * policy.max_splits, SPLIT_COLUMNS, dtype=torch.int32, device=length.device)
    starts = torch.empty(2 * batch + 1, dtype=torch.int32, device=length.device)
    # Without a window, the kernel does not read positions.
    positions = length[:, None] if positions is None or not window else positions
    require("splits' positions", positions, (batch, -1), torch.int64, length)
    if batch:
        _kv_splits_kernel[(1,)](
            *(length, positions, table, starts, batch, positions.shape[1], first_position),
            *(policy.num_splits, policy.max_splits, length.stride(0), *positions.stride()),
            WINDOW=window, STEP=SPLIT_ALIGNMENT, MIN_ROWS=policy.min_split_rows, MAX_ROWS=policy.max_split_rows,
            BLOCK_B=next_power_of_2(batch), BLOCK_Q=COMPARED_PER_STEP, num_warps=4 if batch <= 256 else 8,
        )  # fmt: skip
    return KVSplits(table, starts, policy)


# Blocks checked per step: 4096 rows.
BLOCKS_PER_STEP = 64


@kernel(do_not_specialize=["batch"])
def _count_contiguous_blocks_kernel(
    splits_ptr, split_starts_ptr, page_table_ptr, out_ptr, batch, first_position, page_table_stride_b,
    PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCKS_PER_STEP: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (splits).  A program counts the first unmasked blocks of a split that are contiguous."""
    pdl_trigger_and_wait(USE_PDL)
    split = tl.program_id(0)
    exists = split < tl.load(split_starts_ptr + batch)
    request, begin, end, _request_splits = load_split_range(splits_ptr, split, exists)
    _num_blocks, num_lower, num_unmasked = count_committed_blocks(begin, end, first_position, 0, BLOCK_N)
    table = page_table_ptr + request * page_table_stride_b
    block, offset = tl.arange(0, BLOCKS_PER_STEP), tl.arange(0, BLOCK_N)
    num_checked = num_unmasked * 0
    count = num_unmasked * 0
    while num_checked < num_unmasked:
        block_exists = num_checked + block < num_unmasked
        position = begin + (num_lower + num_checked + block)[:, None] * BLOCK_N + offset[None, :]
        page = tl.load(table + position // PAGE_SIZE, mask=block_exists[:, None], other=0).to(tl.int64)
        first_pool_row = page * PAGE_SIZE + position % PAGE_SIZE - offset[None, :]
        contiguous = block_exists & (tl.max(first_pool_row, 1) == tl.min(first_pool_row, 1))
        num_leading = tl.min(tl.where(contiguous, BLOCKS_PER_STEP, block), 0)
        count += num_leading
        # Stop at the first block that is not contiguous.
        num_checked = tl.where(num_leading == BLOCKS_PER_STEP, num_checked + BLOCKS_PER_STEP, num_unmasked)
    tl.store(out_ptr + split, count, mask=exists)


def count_contiguous_blocks(
    splits: KVSplits, page_table: Tensor, page_size: int, first_position: int, block_rows: int
) -> Tensor:
    """The launcher of ops/attention.py:count_contiguous_blocks.  block_rows: committed rows per block."""
    capacity = splits.table.shape[0]
    require("contiguous blocks' splits", splits.table, (-1, SPLIT_COLUMNS), torch.int32, page_table)
    require("contiguous blocks' page_table", page_table, (splits.starts.shape[0] // 2, -1), torch.int32, page_table)
    if page_table.stride(1) != 1 and page_table.shape[1] > 1:
        raise EspalierError("counting contiguous blocks needs a page table whose last dimension is contiguous")
    out = torch.empty(capacity, dtype=torch.int32, device=page_table.device)
    if capacity:
        _count_contiguous_blocks_kernel[(capacity,)](
            splits.table, splits.starts, page_table, out, page_table.shape[0], first_position, page_table.stride(0),
            PAGE_SIZE=page_size, BLOCK_N=block_rows, BLOCKS_PER_STEP=BLOCKS_PER_STEP, num_warps=16,
            **pdl_arguments(chip(page_table)),
        )  # fmt: skip
    return out
