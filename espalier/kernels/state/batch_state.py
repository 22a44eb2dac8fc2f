"""The kernels that read and write the slot table (one slot per request) in a launch.

They read the BatchState and chains of known tokens (such as a piece of a prompt).  They write the sampled tokens, and
read and write the hidden states that a slot carries from one launch to the next.

The row of a position in the pages is page * page_size + offset, with the page from the request's page table.
kernels/ops/state.py:page_rows computes this row in PyTorch, and pool_row in kernels.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from espalier.kernels.ops.state import AcceptedNodes, AdvanceResult, RowCopies, TokenChain
from espalier.kernels.runtime.jit import kernel
from espalier.kernels.runtime.launch import chip, next_power_of_2, require
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger_and_wait
from espalier.slots import COLUMNS, BatchState, ScatterUpdate, SlotTable


@kernel
def pool_row(table_ptr, position, page_size, is_kept):
    """Returns the int64 pool rows of positions, from a request's page table; the dummy row 0 where not `is_kept`."""
    page = tl.load(table_ptr + position // page_size, mask=is_kept, other=0).to(tl.int64)
    return tl.where(is_kept, page * page_size + position % page_size, 0)


MAX_BLOCK_SIZE = 1024
# The number of new page-table entries that a program writes at once, one per thread.
PAGE_UPDATE_BLOCK = 128


def gather_slots(table: SlotTable, slot_indices: Tensor, page_updates: ScatterUpdate | None = None) -> BatchState:
    """The launcher of ops/state.py:gather_slots.  page_updates: new page-table entries, (cells, pages)."""
    (batch,), width = slot_indices.shape, table.page_table.shape[1]
    require("gather: index", slot_indices, (-1,), torch.int64, table.page_table)
    cells, values = (slot_indices[:0], slot_indices[:0]) if page_updates is None else page_updates
    for name, tensor in (("at", cells), ("values", values)):
        require(f"gather: {name}", tensor, tuple(cells.shape), torch.int64, table.page_table)
    scalars = [torch.empty_like(slot_indices) for _ in range(6)]
    is_real, pages = torch.empty_like(slot_indices, dtype=torch.bool), table.page_table.new_empty(batch, width)
    if batch:
        block = min(next_power_of_2(width), MAX_BLOCK_SIZE)
        # The layout's max_accept_depth is end - prefix_len - depth_margin, so max_accept_depth(0, 0) is -depth_margin.
        _gather_slots_kernel[(batch, -(-width // block))](
            *(slot_indices, table.ints, table.page_table, *scalars, is_real, pages, cells, values),
            *(slot_indices.stride(0), width, cells.shape[0]),
            -table.layout.max_accept_depth(0, 0), COLUMNS=COLUMNS, BLOCK=block, UPDATE_BLOCK=PAGE_UPDATE_BLOCK,
            num_warps=4, **pdl_arguments(chip(slot_indices)),
        )  # fmt: skip
    prefix_len, root, commit_from, num_tokens, max_accept_depth, num_logprobs = scalars
    return BatchState(
        table, slot_indices, prefix_len, root, commit_from, num_tokens, max_accept_depth, num_logprobs, is_real, pages
    )


def read_chain(
    slots: BatchState, first_offset: int, num_tokens: Tensor, row_width: int, padding: int | None = None
) -> TokenChain:
    """The launcher of ops/state.py:read_chain.  padding: the token of unused columns; None: the root."""
    batch, table, page_size = slots.batch, slots.table, slots.table.layout.page_size
    require("chain: length", num_tokens, (batch,), torch.int64, slots.prefix_len)
    chain = TokenChain(*(num_tokens.new_empty(batch, row_width) for _ in range(3)))
    if batch:
        block = min(next_power_of_2(row_width), MAX_BLOCK_SIZE)
        _chain_kernel[(batch, -(-row_width // block))](
            *(slots.index, slots.prefix_len, slots.root, slots.commit_from, slots.page_table, table.history),
            *(num_tokens, *chain, slots.index.stride(0), num_tokens.stride(0)),
            *(table.history.stride(0), slots.page_table.shape[1], first_offset, row_width, page_size),
            -1 if padding is None else padding, BLOCK=block, num_warps=1 if block <= 128 else 4,
            **pdl_arguments(chip(num_tokens)),
        )  # fmt: skip
    return chain


def store_carried_field(slots: BatchState, field_name: str, values: Tensor, num_tokens: Tensor) -> None:
    """The launcher of ops/state.py:store_carried_field.  num_tokens: row num_tokens - 1 of values is stored."""
    carried = slots.table.carried[field_name]
    batch, size = slots.batch, carried.shape[1]
    require("carry: values", values, (batch, -1, size), carried.dtype, carried)
    require("carry: length", num_tokens, (batch,), torch.int64, carried)
    values = values.contiguous()
    if batch:
        block = min(next_power_of_2(size), MAX_BLOCK_SIZE)
        _carry_kernel[(batch, -(-size // block))](
            *(slots.index, num_tokens, values, carried, slots.index.stride(0), num_tokens.stride(0), values.shape[1]),
            HIDDEN_SIZE=size, BLOCK=block, num_warps=4, **pdl_arguments(chip(num_tokens)),
        )  # fmt: skip


@kernel(do_not_specialize=["num_updates"])
def _gather_slots_kernel(
    index_ptr, ints_ptr, page_table_ptr,
    prefix_len_ptr, root_ptr, commit_from_ptr, num_tokens_ptr, max_accept_depth_ptr, num_logprobs_ptr, real_ptr,
    pages_ptr, update_indices_ptr, update_pages_ptr,
    index_stride, width, num_updates, depth_margin,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, UPDATE_BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Write new page-table entries, then read a batch's slots.

    Each program writes the new entries of the slot that it reads.  The first program writes the new entries of all
    slots."""
    pdl_trigger_and_wait(USE_PDL)
    b = tl.program_id(0).to(tl.int64)
    slot = tl.load(index_ptr + b * index_stride)
    is_first = (b == 0) & (tl.program_id(1) == 0)
    for start in range(0, num_updates, UPDATE_BLOCK):
        i = start + tl.arange(0, UPDATE_BLOCK)
        cell = tl.load(update_indices_ptr + i, mask=i < num_updates, other=0)
        page = tl.load(update_pages_ptr + i, mask=i < num_updates, other=0).to(tl.int32)
        is_own = (cell >= slot * width) & (cell < (slot + 1) * width)
        tl.store(page_table_ptr + cell, page, mask=(i < num_updates) & (is_first | is_own))
    # The barrier is needed, because a thread may read what another thread has written.
    tl.debug_barrier()
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pages = tl.load(page_table_ptr + slot * width + column, mask=column < width, other=0)
    tl.store(pages_ptr + b * width + column, pages, mask=column < width)
    if tl.program_id(1) == 0:
        ints = ints_ptr + slot * COLUMNS.num_ints
        prefix_len = tl.load(ints + COLUMNS.prefix_len)
        depth_left = tl.load(ints + COLUMNS.end) - depth_margin - prefix_len
        max_accept_depth = tl.maximum(tl.minimum(tl.load(ints + COLUMNS.depth_limit), depth_left), 0)
        tl.store(prefix_len_ptr + b, prefix_len)
        tl.store(root_ptr + b, tl.load(ints + COLUMNS.root))
        tl.store(commit_from_ptr + b, tl.load(ints + COLUMNS.commit_from))
        tl.store(num_tokens_ptr + b, prefix_len + 1)
        tl.store(max_accept_depth_ptr + b, max_accept_depth)
        tl.store(num_logprobs_ptr + b, tl.load(ints + COLUMNS.num_logprobs))
        tl.store(real_ptr + b, slot > 0)


@kernel(do_not_specialize=["padding"])
def _chain_kernel(
    index_ptr, prefix_len_ptr, root_ptr, commit_from_ptr, page_table_ptr, history_ptr, length_ptr,
    positions_ptr, tokens_ptr, rows_ptr,
    index_stride, length_stride, history_stride, table_width, first_offset, width, page_size, padding,
    BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Read `length` tokens of each slot's history.  width: columns of the outputs.  padding: below 0: the root."""
    pdl_trigger_and_wait(USE_PDL)
    b = tl.program_id(0).to(tl.int64)
    offset = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    position = tl.load(prefix_len_ptr + b) + first_offset + offset
    is_known = (offset < tl.load(length_ptr + b * length_stride)) & (offset < width)
    is_written = is_known & (position >= tl.load(commit_from_ptr + b))
    slot = tl.load(index_ptr + b * index_stride)
    token = tl.load(history_ptr + slot * history_stride + position, mask=is_known, other=0)
    out = b * width + offset
    tl.store(positions_ptr + out, position, mask=offset < width)
    padding = tl.where(padding < 0, tl.load(root_ptr + b), padding)
    tl.store(tokens_ptr + out, tl.where(is_known, token, padding), mask=offset < width)
    row = pool_row(page_table_ptr + b * table_width, position, page_size, is_written)
    tl.store(rows_ptr + out, row, mask=offset < width)


@kernel
def _carry_kernel(
    index_ptr, length_ptr, values_ptr, carried_ptr, index_stride, length_stride, rows,
    HIDDEN_SIZE: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Store row length - 1 of values [B, rows, HIDDEN_SIZE] in the slot of each request.  index_ptr: the slots."""
    pdl_trigger_and_wait(USE_PDL)
    b = tl.program_id(0).to(tl.int64)
    last = tl.maximum(tl.load(length_ptr + b * length_stride) - 1, 0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(values_ptr + (b * rows + last) * HIDDEN_SIZE + column, mask=column < HIDDEN_SIZE, other=0.0)
    slot = tl.load(index_ptr + b * index_stride)
    tl.store(carried_ptr + slot * HIDDEN_SIZE + column, value, mask=column < HIDDEN_SIZE)


def advance(
    slots: BatchState, num_tokens: Tensor, picked_tokens: Tensor, count_tokens: bool, path: AcceptedNodes | None = None
) -> AdvanceResult:
    """The launcher of ops/state.py:advance.  count_tokens: whether to count the picked tokens, for penalties."""
    table, (batch, width) = slots.table, picked_tokens.shape
    require("advance: picked_tokens", picked_tokens, (slots.batch, -1), torch.int64, table.history)
    require("advance: length", num_tokens, (batch,), torch.int64, picked_tokens)
    num_picked, copies = torch.empty_like(num_tokens), None
    if path is not None:
        require("advance: nodes", path.nodes, (batch, width), torch.int64, picked_tokens)
        copies = RowCopies(*(picked_tokens.new_empty(batch, width) for _ in range(2)))
    if batch:
        nodes, nodes_per_request = (None, 0) if path is None else (path.nodes.contiguous(), path.nodes_per_request)
        source, destination = (None, None) if copies is None else copies
        _advance_kernel[(batch,)](
            *(slots.index, slots.prefix_len, slots.commit_from, slots.page_table, num_tokens),
            *(picked_tokens.contiguous(), nodes),
            *(table.ints, table.history, table.counts if count_tokens else None, num_picked, source, destination),
            *(slots.index.stride(0), num_tokens.stride(0), slots.page_table.shape[1]),
            *(table.history.stride(0), table.counts.stride(0), nodes_per_request, table.layout.page_size),
            COLUMNS=COLUMNS, WIDTH=width, BLOCK_WIDTH=next_power_of_2(width), num_warps=1,
            **pdl_arguments(chip(picked_tokens)),
        )  # fmt: skip
    return AdvanceResult(num_picked, copies)


@kernel
def _advance_kernel(
    index_ptr, prefix_len_ptr, commit_from_ptr, page_table_ptr, length_ptr, picked_tokens_ptr, node_ptr,
    ints_ptr, history_ptr, counts_ptr, num_new_tokens_ptr, source_ptr, destination_ptr,
    index_stride, length_stride, table_width, history_stride, counts_stride, nodes_per_request, page_size,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Each program writes the sampled tokens of one slot, and makes the last token the slot's root."""
    pdl_trigger_and_wait(USE_PDL)
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(index_ptr + request * index_stride)
    ints = ints_ptr + slot * COLUMNS.num_ints
    prefix_len = tl.load(prefix_len_ptr + request)
    length = tl.load(length_ptr + request * length_stride)
    offset = tl.arange(0, BLOCK_WIDTH)
    at = request * WIDTH + offset
    num_held = tl.minimum(length, WIDTH)
    decided = offset < num_held
    token_position = prefix_len + 1 + tl.maximum(length - WIDTH, 0) + offset
    known_len = tl.load(ints + COLUMNS.known_len)
    known = decided & (token_position < known_len)
    is_new = decided & (token_position >= known_len)
    history_at = history_ptr + slot * history_stride + token_position
    token = tl.load(picked_tokens_ptr + at, mask=is_new, other=0) + tl.load(history_at, mask=known, other=0)

    tl.store(history_at, token, mask=is_new)
    tl.store(ints + COLUMNS.root + offset * 0, token, mask=offset == num_held - 1)
    if length > 0:
        tl.store(ints + COLUMNS.prefix_len, prefix_len + length)
    if counts_ptr is not None:
        # The adds are atomic, because a path may have the same token twice.
        tl.atomic_add(counts_ptr + slot * counts_stride + token, is_new.to(tl.int32), mask=is_new, sem="relaxed")
    tl.store(num_new_tokens_ptr + request, tl.sum(is_new.to(tl.int64), 0))

    if node_ptr is not None:
        position = prefix_len + offset
        is_copied = decided & (position >= tl.load(commit_from_ptr + request))
        destination = pool_row(page_table_ptr + request * table_width, position, page_size, is_copied)
        tl.store(destination_ptr + at, destination, mask=offset < WIDTH)
        node = tl.load(node_ptr + at, mask=offset < WIDTH, other=0)
        tl.store(source_ptr + at, request * nodes_per_request + node, mask=offset < WIDTH)
