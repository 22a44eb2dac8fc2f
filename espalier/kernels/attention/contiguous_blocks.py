"""Counts blocks of committed rows that are contiguous in the pool: TMA copies such a block with one instruction.

The count runs once a round and serves all layers with the same splits.  It is not needed if the page size is a multiple
of the block: then every block is contiguous.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.attention.work_items import committed_blocks, load_split
from espalier.kernels.hopper.config import BLOCK_N
from espalier.kernels.ops.kv_splits import COLUMNS, KVSplits
from espalier.kernels.runtime.jit import kernel
from espalier.kernels.runtime.launch import chip, require
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger_and_wait

# Blocks checked per step: 4096 rows.
STEP_BLOCKS = 64


@kernel(do_not_specialize=["batch"])
def _contiguous_blocks_kernel(
    split_ptr, start_ptr, table_ptr, out_ptr, batch, first, table_b,
    PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, STEP_BLOCKS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    pdl_trigger_and_wait(DEPENDENT)
    split = tl.program_id(0)
    exists = split < tl.load(start_ptr + batch)
    request, begin, end, _request_splits = load_split(split_ptr, split, exists)
    _num_blocks, num_lower, num_unmasked = committed_blocks(begin, end, first, 0, BLOCK_N)
    table = table_ptr + request * table_b
    block, offset = tl.arange(0, STEP_BLOCKS), tl.arange(0, BLOCK_N)
    num_checked = num_unmasked * 0
    count = num_unmasked * 0
    while num_checked < num_unmasked:
        inside = num_checked + block < num_unmasked
        position = begin + (num_lower + num_checked + block)[:, None] * BLOCK_N + offset[None, :]
        page = tl.load(table + position // PAGE_SIZE, mask=inside[:, None], other=0).to(tl.int64)
        start = page * PAGE_SIZE + position % PAGE_SIZE - offset[None, :]
        contiguous = inside & (tl.max(start, 1) == tl.min(start, 1))
        num_leading = tl.min(tl.where(contiguous, STEP_BLOCKS, block), 0)
        count += num_leading
        # Stop at the first block that is not contiguous.
        num_checked = tl.where(num_leading == STEP_BLOCKS, num_checked + STEP_BLOCKS, num_unmasked)
    tl.store(out_ptr + split, count, mask=exists)


def count_contiguous_blocks(splits: KVSplits, page_table: Tensor, page_size: int, first: int) -> Tensor:
    capacity = splits.table.shape[0]
    require("contiguous blocks' splits", splits.table, (-1, COLUMNS), torch.int32, page_table)
    require("contiguous blocks' page_table", page_table, (splits.starts.shape[0] - 1, -1), torch.int32, page_table)
    if page_table.stride(1) != 1 and page_table.shape[1] > 1:
        raise EspalierError("counting contiguous blocks needs a page table whose last dimension is contiguous")
    out = torch.empty(capacity, dtype=torch.int32, device=page_table.device)
    if capacity:
        _contiguous_blocks_kernel[(capacity,)](
            splits.table, splits.starts, page_table, out, page_table.shape[0], first, page_table.stride(0),
            PAGE_SIZE=page_size, BLOCK_N=BLOCK_N, STEP_BLOCKS=STEP_BLOCKS, num_warps=16,
            **pdl_arguments(chip(page_table)),
        )  # fmt: skip
    return out
