"""The work list of split-KV attention, made on the device once a pass.

A request's committed rows are cut into splits that run in parallel; their partial results are merged in the order of
positions (kernels/attention/merge_splits.py).  Lengths of splits follow from the request's rows, the number of queries
and the pass's batch bucket.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from espalier.kernels.runtime.launch import kernel, power_of_two, require
from espalier.layout import next_bucket

if TYPE_CHECKING:
    import triton.language as tl

# Boundaries of splits are multiples of this.  No kernel's block of rows is larger.
SPLIT_STEP = 64
# Shorter splits than this cost more to merge than they save.
MIN_SPLIT_ROWS = 128
# A longer request is split further, whatever the batch: one long request among short ones would run alone at the end.
MAX_SPLIT_ROWS = 2048
# Programs that fill a GPU: one reads K/V at about half of what a multiprocessor can read; one with a large query tile
# keeps a multiprocessor's tensor cores busy alone (H200, docs/log.md).
PROGRAMS = 256
LARGE_TILE, LARGE_TILE_PROGRAMS = 128, 128
# Limits: splits of one request; partial results (queries times splits) of a whole batch and of one request.
MAX_SPLITS = 32
MAX_PARTIAL_ROWS = 16384
MAX_PARTIAL_ROWS_PER_REQUEST = 512
# Columns of a work item: the request, the split's first row (a multiple of SPLIT_STEP), the row after its last, and the
# number of splits that the request has.
COLUMNS = 4


@dataclass(frozen=True)
class KVSplitPolicy:
    """How a pass splits the committed rows of each request.

    splits: into how many, as long as splits have MIN_SPLIT_ROWS to MAX_SPLIT_ROWS rows; max_splits: the limit for long
    requests, whose splits may then be longer.
    """

    splits: int
    max_splits: int

    @classmethod
    def of(cls, batch: int, queries: int, kv_heads: int, group: int, max_rows: int) -> KVSplitPolicy:
        """As many splits as fill a GPU.

        queries: of each request; group: query heads that share a KV head; max_rows: committed rows of a request at
        most.  The batch counts as the next power of two or middle between two of them, so that a graph's padded batch
        and an eager launch of the same requests split alike.
        """
        batch, packed = next_bucket(batch), queries * group
        programs, tiles = (LARGE_TILE_PROGRAMS, -(-packed // LARGE_TILE)) if packed > LARGE_TILE // 2 else (PROGRAMS, 1)
        in_partials = min(MAX_PARTIAL_ROWS // (batch * queries), MAX_PARTIAL_ROWS_PER_REQUEST // queries)
        max_splits = max(1, min(MAX_SPLITS, in_partials, -(-max_rows // MIN_SPLIT_ROWS)))
        splits = min(max(1, programs // (batch * kv_heads * tiles)), max_splits)
        return cls(splits, splits if max_rows <= splits * MAX_SPLIT_ROWS else max_splits)

    def width(self, rows: int) -> int:
        """Rows of each split but the last, of a request of this many rows: as even as SPLIT_STEP allows."""
        wanted = max(min(-(-rows // MIN_SPLIT_ROWS), self.splits), -(-rows // MAX_SPLIT_ROWS))
        count = min(max(wanted, 1), self.max_splits)
        return max(-(-rows // (count * SPLIT_STEP)), 1) * SPLIT_STEP


@dataclass(frozen=True)
class KVSplits:
    """A work list.

    items: [B * policy.max_splits, COLUMNS] int32, unused rows undefined; starts: [B + 1] int32, the first item of each
    request and, last, the number of items.  Every request has at least one split, which may be empty.
    """

    items: Tensor
    starts: Tensor
    policy: KVSplitPolicy


def kv_splits(
    length: Tensor, first: int, policy: KVSplitPolicy, positions: Tensor | None = None, window: int = 0
) -> KVSplits:
    """Split the committed rows [first, length) of each request.

    length: [B] int64; positions: [B, Q] int64 of the queries and window: rows below the shallowest query's window are
    left out (window 0: none are left out, and positions may be None).
    """
    make = kv_splits_triton if length.is_cuda else kv_splits_reference
    return make(length, first, policy, positions, window)


@kernel
def _kv_splits_kernel(
    length_ptr,
    position_ptr,
    item_ptr,
    start_ptr,
    batch,
    queries,
    first,
    splits,
    most,
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
    real = request < batch
    length = tl.load(length_ptr + request * length_b, mask=real, other=0).to(tl.int32)
    begin = tl.zeros([BLOCK_B], tl.int32) + first
    if WINDOW > 0:
        shallowest = tl.full([BLOCK_B], 0x7FFFFFFF, tl.int32)
        for at in range(0, queries, BLOCK_Q):
            query = at + tl.arange(0, BLOCK_Q)
            asked = real[:, None] & (query < queries)[None, :]
            row = request[:, None].to(tl.int64) * position_b + query[None, :] * position_q
            position = tl.load(position_ptr + row, mask=asked, other=0x7FFFFFFF).to(tl.int32)
            shallowest = tl.minimum(shallowest, tl.min(position, 1))
        begin = tl.where(real, tl.maximum(begin, shallowest - WINDOW + 1), 0)
    begin = begin // STEP * STEP
    span = tl.maximum(length - begin, 0)
    wanted = tl.maximum(tl.minimum((span + MIN_ROWS - 1) // MIN_ROWS, splits), (span + MAX_ROWS - 1) // MAX_ROWS)
    count = tl.minimum(tl.maximum(wanted, 1), most)
    width = tl.maximum((span + count * STEP - 1) // (count * STEP), 1) * STEP
    count = tl.where(real, tl.maximum((span + width - 1) // width, 1), 0)
    past = tl.cumsum(count, 0)
    start = past - count
    tl.store(start_ptr + request, start, mask=real)
    tl.store(start_ptr + request + 1, past, mask=request == batch - 1)
    for i in range(most):
        exists = i < count
        low = begin + i * width
        item = item_ptr + (start + i) * 4
        tl.store(item, request, mask=exists)
        tl.store(item + 1, low, mask=exists)
        tl.store(item + 2, tl.minimum(low + width, tl.maximum(length, low)), mask=exists)
        tl.store(item + 3, count, mask=exists)


def kv_splits_triton(
    length: Tensor, first: int, policy: KVSplitPolicy, positions: Tensor | None = None, window: int = 0
) -> KVSplits:
    batch = length.shape[0]
    require("splits' length", length, (-1,), torch.int64, length)
    items = torch.empty(batch * policy.max_splits, COLUMNS, dtype=torch.int32, device=length.device)
    starts = torch.empty(batch + 1, dtype=torch.int32, device=length.device)
    if not window:
        positions = None
    if positions is not None:
        require("splits' positions", positions, (batch, -1), torch.int64, length)
    if batch:
        queries, position_b, position_q = (0, 0, 0) if positions is None else (positions.shape[1], *positions.stride())
        _kv_splits_kernel[(1,)](
            length,
            length if positions is None else positions,
            items,
            starts,
            batch,
            queries,
            first,
            policy.splits,
            policy.max_splits,
            length.stride(0),
            position_b,
            position_q,
            WINDOW=window,
            STEP=SPLIT_STEP,
            MIN_ROWS=MIN_SPLIT_ROWS,
            MAX_ROWS=MAX_SPLIT_ROWS,
            BLOCK_B=power_of_two(batch),
            BLOCK_Q=16,
            num_warps=4 if batch <= 256 else 8,
        )
    return KVSplits(items, starts, policy)


def kv_splits_reference(
    length: Tensor, first: int, policy: KVSplitPolicy, positions: Tensor | None = None, window: int = 0
) -> KVSplits:
    batch = length.shape[0]
    items = torch.zeros(batch * policy.max_splits, COLUMNS, dtype=torch.int32)
    starts = [0]
    for request, rows in enumerate(length.tolist()):
        begin = first
        if window and positions is not None:
            begin = max(first, int(positions[request].min()) - window + 1)
        begin = begin // SPLIT_STEP * SPLIT_STEP
        span = max(rows - begin, 0)
        width = policy.width(span)
        count = max(1, -(-span // width))
        for i in range(count):
            low = begin + i * width
            items[starts[-1] + i] = torch.tensor([request, low, min(low + width, max(rows, low)), count])
        starts.append(starts[-1] + count)
    return KVSplits(items.to(length.device), torch.tensor(starts, dtype=torch.int32).to(length.device), policy)
