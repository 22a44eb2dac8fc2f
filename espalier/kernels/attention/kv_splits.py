"""The splits of split-KV attention, computed on the device once per pass.

The committed rows of each request are divided into splits that run in parallel.  kernels/attention/merge_splits.py
merges their partial results in position order.  The length of a split depends on the request's rows, the number of
queries and the batch bucket of the pass.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from espalier.kernels.ops.kv_splits import COLUMNS, SPLIT_STEP, KVSplitPolicy, KVSplits
from espalier.kernels.runtime.jit import kernel
from espalier.kernels.runtime.launch import power_of_two, require


@kernel(do_not_specialize=["first", "num_splits", "max_splits"])
def _kv_splits_kernel(
    length_ptr,
    position_ptr,
    split_ptr,
    start_ptr,
    batch,
    queries,
    first,
    num_splits,
    max_splits,
    length_b,
    position_b,
    position_q,
    WINDOW: tl.constexpr,
    STEP: tl.constexpr,
    MIN_ROWS: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    request = tl.arange(0, BLOCK_B)
    request_exists = request < batch
    length = tl.load(length_ptr + request * length_b, mask=request_exists, other=0).to(tl.int32)
    begin = tl.zeros([BLOCK_B], tl.int32) + first
    if WINDOW > 0:
        min_position = tl.full([BLOCK_B], 0x7FFFFFFF, tl.int32)
        for at in range(0, queries, BLOCK_Q):
            query = at + tl.arange(0, BLOCK_Q)
            query_exists = request_exists[:, None] & (query < queries)[None, :]
            row = request[:, None].to(tl.int64) * position_b + query[None, :] * position_q
            position = tl.load(position_ptr + row, mask=query_exists, other=0x7FFFFFFF).to(tl.int32)
            min_position = tl.minimum(min_position, tl.min(position, 1))
        begin = tl.where(request_exists, tl.maximum(begin, min_position - WINDOW + 1), 0)
    begin = begin // STEP * STEP
    num_rows = tl.maximum(length - begin, 0)
    wanted = tl.maximum(
        tl.minimum((num_rows + MIN_ROWS - 1) // MIN_ROWS, num_splits), (num_rows + MAX_ROWS - 1) // MAX_ROWS
    )
    count = tl.minimum(tl.maximum(wanted, 1), max_splits)
    width = tl.maximum((num_rows + count * STEP - 1) // (count * STEP), 1) * STEP
    count = tl.where(request_exists, tl.maximum((num_rows + width - 1) // width, 1), 0)
    end_split = tl.cumsum(count, 0)
    start = end_split - count
    tl.store(start_ptr + request, start, mask=request_exists)
    tl.store(start_ptr + request + 1, end_split, mask=request == batch - 1)
    for i in range(max_splits):
        exists = i < count
        low = begin + i * width
        split = split_ptr + (start + i) * 4
        tl.store(split, request, mask=exists)
        tl.store(split + 1, low, mask=exists)
        tl.store(split + 2, tl.minimum(low + width, tl.maximum(length, low)), mask=exists)
        tl.store(split + 3, count, mask=exists)


def kv_splits(
    length: Tensor, first: int, policy: KVSplitPolicy, positions: Tensor | None = None, window: int = 0
) -> KVSplits:
    batch = length.shape[0]
    require("splits' length", length, (-1,), torch.int64, length)
    table = torch.empty(batch * policy.max_splits, COLUMNS, dtype=torch.int32, device=length.device)
    starts = torch.empty(batch + 1, dtype=torch.int32, device=length.device)
    if not window:
        positions = None
    if positions is not None:
        require("splits' positions", positions, (batch, -1), torch.int64, length)
    if batch:
        queries, position_b, position_q = (0, 0, 0) if positions is None else (positions.shape[1], *positions.stride())
        _kv_splits_kernel[(1,)](
            *(length, length if positions is None else positions, table, starts, batch, queries, first),
            *(policy.num_splits, policy.max_splits, length.stride(0), position_b, position_q),
            WINDOW=window,
            STEP=SPLIT_STEP,
            MIN_ROWS=policy.min_split_rows,
            MAX_ROWS=policy.max_split_rows,
            BLOCK_B=power_of_two(batch),
            BLOCK_Q=16,
            num_warps=4 if batch <= 256 else 8,
        )
    return KVSplits(table, starts, policy)
