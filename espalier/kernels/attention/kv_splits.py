"""The plan of attention over committed rows: which request, from which row to which, made on the device once a round.

A range's length follows from the request's own rows and from the layout, never from the batch, and ranges are merged
in position order: a request's bits are its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from espalier.kernels.runtime.launch import kernel, power_of_two, require
from espalier.layout import RANGE_STEP, KVSplitPolicy

if TYPE_CHECKING:
    import triton.language as tl

# Columns of a range: its request, its first row (a multiple of RANGE_STEP), the row past its last, and how many
# ranges its request has.
COLUMNS = 4


@dataclass(frozen=True)
class KVSplits:
    """A work list.  items: [B * cut.most, COLUMNS] int32, what is not used left as it was; starts: [B + 1] int32, the
    first range of each request and, last, how many there are.  Every request has a range, if an empty one.
    """

    items: Tensor
    starts: Tensor
    cut: KVSplitPolicy


def ranges(
    length: Tensor, first: int, cut: KVSplitPolicy, positions: Tensor | None = None, window: int = 0
) -> KVSplits:
    """KVSplitPolicy the committed rows of requests, [first, length) each, into ranges.

    length: [B] int64; positions: [B, Q] int64 of the queries and window: rows below the shallowest query's window are
    left out (window 0: none are, and positions may be None).
    """
    make = kv_splits_triton if length.is_cuda else kv_splits_reference
    return make(length, first, cut, positions, window)


@kernel
def _kv_splits_kernel(
    length_ptr,
    position_ptr,
    item_ptr,
    start_ptr,
    batch,
    queries,
    first,
    rows,
    most,
    length_b,
    position_b,
    position_q,
    WINDOW: tl.constexpr,
    STEP: tl.constexpr,
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
    count = tl.minimum(tl.maximum((span + rows - 1) // rows, 1), most)
    width = tl.maximum((span + count * STEP - 1) // (count * STEP), 1) * STEP
    count = tl.where(real, tl.maximum((span + width - 1) // width, 1), 0)
    past = tl.cumsum(count, 0)
    start = past - count
    tl.store(start_ptr + request, start, mask=real)
    tl.store(start_ptr + request + 1, past, mask=request == batch - 1)
    for i in range(most):
        wanted = i < count
        low = begin + i * width
        item = item_ptr + (start + i) * 4
        tl.store(item, request, mask=wanted)
        tl.store(item + 1, low, mask=wanted)
        tl.store(item + 2, tl.minimum(low + width, tl.maximum(length, low)), mask=wanted)
        tl.store(item + 3, count, mask=wanted)


def kv_splits_triton(
    length: Tensor, first: int, cut: KVSplitPolicy, positions: Tensor | None = None, window: int = 0
) -> KVSplits:
    batch = length.shape[0]
    require("ranges' length", length, (-1,), torch.int64, length)
    items = torch.empty(batch * cut.most, COLUMNS, dtype=torch.int32, device=length.device)
    starts = torch.empty(batch + 1, dtype=torch.int32, device=length.device)
    if not window:
        positions = None
    if positions is not None:
        require("ranges' positions", positions, (batch, -1), torch.int64, length)
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
            cut.rows,
            cut.most,
            length.stride(0),
            position_b,
            position_q,
            WINDOW=window,
            STEP=RANGE_STEP,
            BLOCK_B=power_of_two(batch),
            BLOCK_Q=16,
            num_warps=4 if batch <= 256 else 8,
        )
    return KVSplits(items, starts, cut)


def kv_splits_reference(
    length: Tensor, first: int, cut: KVSplitPolicy, positions: Tensor | None = None, window: int = 0
) -> KVSplits:
    batch = length.shape[0]
    items = torch.zeros(batch * cut.most, COLUMNS, dtype=torch.int32)
    starts = [0]
    for request, rows in enumerate(length.tolist()):
        begin = first
        if window and positions is not None:
            begin = max(first, int(positions[request].min()) - window + 1)
        begin = begin // RANGE_STEP * RANGE_STEP
        span = max(rows - begin, 0)
        width = cut.width(span)
        count = max(1, -(-span // width))
        for i in range(count):
            low = begin + i * width
            items[starts[-1] + i] = torch.tensor([request, low, min(low + width, max(rows, low)), count])
        starts.append(starts[-1] + count)
    return KVSplits(items.to(length.device), torch.tensor(starts, dtype=torch.int32).to(length.device), cut)
