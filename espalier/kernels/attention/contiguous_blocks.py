"""Where committed rows stand side by side in the pool, so that a block of attention can be copied in one go.

Counted once a round, for all layers that read the same splits.  Pages of whole blocks need no counting.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.attention.hopper import BLOCK_N
from espalier.kernels.attention.kv_splits import COLUMNS, KVSplits
from espalier.kernels.attention.work_items import committed_blocks, split_at
from espalier.kernels.runtime.launch import chip, kernel, require
from espalier.kernels.runtime.pdl import early, pdl_wait_if
from espalier.kernels.state.page_rows import page_rows

if TYPE_CHECKING:
    import triton.language as tl

# Blocks that are looked at together: all of a range of 4096 rows, an eighth of 32k.
BLOCKS = 64


def straight(splits: KVSplits, page_table: Tensor, page_size: int, first: int) -> Tensor:
    """[items] int32: of each range's whole blocks (units.committed_blocks), how many of the first have their rows side
    by side, in the order of their positions.  What is past the last range is left as it was.

    page_table: [B, T] int32; rows below `first` do not exist.
    """
    return (contiguous_blocks_triton if page_table.is_cuda else contiguous_blocks_reference)(
        splits, page_table, page_size, first
    )


@kernel
def _straight_kernel(
    item_ptr, start_ptr, table_ptr, out_ptr, batch, first, table_b,
    PAGE_SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    pdl_wait_if(DEPENDENT)
    item = tl.program_id(0)
    exists = item < tl.load(start_ptr + batch)
    request, begin, end, _siblings = split_at(item_ptr, item, exists)
    _blocks, lower, whole = committed_blocks(begin, end, first, 0, ROWS)
    table = table_ptr + request * table_b
    block, offset = tl.arange(0, BLOCKS), tl.arange(0, ROWS)
    done = whole * 0
    count = whole * 0
    while done < whole:
        inside = done + block < whole
        position = begin + (lower + done + block)[:, None] * ROWS + offset[None, :]
        page = tl.load(table + position // PAGE_SIZE, mask=inside[:, None], other=0).to(tl.int64)
        start = page * PAGE_SIZE + position % PAGE_SIZE - offset[None, :]
        found = inside & (tl.max(start, 1) == tl.min(start, 1))
        run = tl.min(tl.where(found, BLOCKS, block), 0)
        count += run
        # The first that is not ends the count.
        done = tl.where(run == BLOCKS, done + BLOCKS, whole)
    tl.store(out_ptr + item, count, mask=exists)


def contiguous_blocks_triton(splits: KVSplits, page_table: Tensor, page_size: int, first: int) -> Tensor:
    capacity = splits.items.shape[0]
    require("straight's splits", splits.items, (-1, COLUMNS), torch.int32, page_table)
    require("straight's page_table", page_table, (splits.starts.shape[0] - 1, -1), torch.int32, page_table)
    if page_table.stride(1) != 1 and page_table.shape[1] > 1:
        raise EspalierError("counting straight blocks needs a contiguous last dimension of the page table")
    out = torch.empty(capacity, dtype=torch.int32, device=page_table.device)
    if capacity:
        _straight_kernel[(capacity,)](
            splits.items, splits.starts, page_table, out, page_table.shape[0], first, page_table.stride(0),
            PAGE_SIZE=page_size, ROWS=BLOCK_N, BLOCKS=BLOCKS, num_warps=16, **early(chip(page_table)),
        )  # fmt: skip
    return out


def contiguous_blocks_reference(splits: KVSplits, page_table: Tensor, page_size: int, first: int) -> Tensor:
    out = torch.zeros(splits.items.shape[0], dtype=torch.int32)
    for item, (request, begin, end, _siblings) in enumerate(splits.items[: int(splits.starts[-1])].tolist()):
        low = begin + -(-max(first - begin, 0) // BLOCK_N) * BLOCK_N
        while low + BLOCK_N <= begin + (end - begin) // BLOCK_N * BLOCK_N:
            position = torch.arange(low, low + BLOCK_N, device=page_table.device)
            [rows] = page_rows(page_table[request][None], position[None], page_size)
            if not torch.equal(rows, rows[0] + position - low):
                break
            out[item] += 1
            low += BLOCK_N
    return out.to(page_table.device)
