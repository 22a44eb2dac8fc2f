"""Advance the slots: write decided tokens to the history, and derive the rows that a commit copies.

One launch, the same for rounds and prefill passes.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from espalier.kernels.ops.state import Advanced, Copies, NodeRows
from espalier.kernels.runtime.jit import kernel
from espalier.kernels.runtime.launch import chip, power_of_two, require
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger_and_wait
from espalier.kernels.state.page_rows import page_row
from espalier.slots import COLUMNS, BatchState


def advance(
    slots: BatchState, length: Tensor, picked: Tensor, count_tokens: bool, path: NodeRows | None = None
) -> Advanced:
    table, (batch, width) = slots.table, picked.shape
    require("advance: picked", picked, (slots.batch, -1), torch.int64, table.history)
    require("advance: length", length, (batch,), torch.int64, picked)
    num_picked, copies = torch.empty_like(length), None
    if path is not None:
        require("advance: rows", path.rows, (batch, width), torch.int64, picked)
        copies = Copies(*(picked.new_empty(batch, width) for _ in range(2)))
    if batch:
        rows, nodes = (None, 0) if path is None else (path.rows.contiguous(), path.nodes)
        source, destination = (None, None) if copies is None else copies
        _advance_kernel[(batch,)](
            *(slots.index, slots.prefix_len, slots.commit_from, slots.page_table, length, picked.contiguous(), rows),
            *(table.ints, table.history, table.counts if count_tokens else None, num_picked, source, destination),
            *(slots.index.stride(0), length.stride(0), slots.page_table.shape[1]),
            *(table.history.stride(0), table.counts.stride(0), nodes, table.layout.page_size),
            COLUMNS=COLUMNS,
            WIDTH=width,
            W=power_of_two(width),
            num_warps=1,
            **pdl_arguments(chip(picked)),
        )
    return Advanced(num_picked, copies)


@kernel
def _advance_kernel(
    index_ptr, prefix_len_ptr, commit_from_ptr, page_table_ptr, length_ptr, picked_ptr, row_ptr,
    ints_ptr, history_ptr, counts_ptr, num_picked_ptr, source_ptr, destination_ptr,
    index_stride, length_stride, table_width, history_stride, counts_stride, nodes, page_size,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, W: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program per request."""
    pdl_trigger_and_wait(DEPENDENT)
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(index_ptr + request * index_stride)
    ints = ints_ptr + slot * COLUMNS.num_ints
    prefix_len = tl.load(prefix_len_ptr + request)
    length = tl.load(length_ptr + request * length_stride)
    offset = tl.arange(0, W)
    at = request * WIDTH + offset
    held = tl.minimum(length, WIDTH)
    decided = offset < held
    place = prefix_len + 1 + tl.maximum(length - WIDTH, 0) + offset
    known_len = tl.load(ints + COLUMNS.known_len)
    known = decided & (place < known_len)
    new = decided & (place >= known_len)
    history_at = history_ptr + slot * history_stride + place
    token = tl.load(picked_ptr + at, mask=new, other=0) + tl.load(history_at, mask=known, other=0)

    tl.store(history_at, token, mask=new)
    tl.store(ints + COLUMNS.root + offset * 0, token, mask=offset == held - 1)
    if length > 0:
        tl.store(ints + COLUMNS.prefix_len, prefix_len + length)
    if counts_ptr is not None:
        # A path may have the same token twice.
        tl.atomic_add(counts_ptr + slot * counts_stride + token, new.to(tl.int32), mask=new, sem="relaxed")
    tl.store(num_picked_ptr + request, tl.sum(new.to(tl.int64), 0))

    if row_ptr is not None:
        position = prefix_len + offset
        kept = decided & (position >= tl.load(commit_from_ptr + request))
        destination = page_row(page_table_ptr + request * table_width, position, page_size, kept)
        tl.store(destination_ptr + at, destination, mask=offset < WIDTH)
        row = tl.load(row_ptr + at, mask=offset < WIDTH, other=0)
        tl.store(source_ptr + at, request * nodes + row, mask=offset < WIDTH)
