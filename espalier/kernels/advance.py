"""What follows accept in one launch: the slot table moves on, and the rows that commit copies are derived."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from espalier.kernels.dependent import after_previous, early
from espalier.kernels.launch import chip, kernel, power_of_two, require
from espalier.layout import DUMMY_ROW

if TYPE_CHECKING:
    import triton.language as tl


class Copies(NamedTuple):
    """source, destination [B, S+1]: rows of the target's staging, and rows of its pages, 0 past a request's length."""

    source: Tensor
    destination: Tensor


class Before(NamedTuple):
    """A batch as it stood when the launch began: slots [B], prefix_len [B], page_table [B, table_width]."""

    slots: Tensor
    prefix_len: Tensor
    page_table: Tensor


class After(NamedTuple):
    """What moves on, written in place: history [slots, history_width] int64, prefix_len and root [slots] int64 (columns
    of a wider table are legal), counts [slots, V] int32 of output tokens, None where nobody is penalised."""

    history: Tensor
    prefix_len: Tensor
    root: Tensor
    counts: Tensor | None


def advance(
    before: Before, after: After, rows: Tensor, length: Tensor, tokens: Tensor, nodes: int, page_size: int
) -> Copies:
    """Decide `length` [B] more tokens of each slot: tokens [B, S+1], the last of them the new root.

    rows [B, S+1]: their nodes, request b's standing in staging from b · nodes on.  They go to positions prefix_len ..
    of their pages.  Where length is 0 (padding, which may name one slot twice) nothing of the slot changes.
    Raises EspalierError if sizes do not agree.  Exact.
    """
    run = advance_triton if tokens.is_cuda else advance_reference
    return run(before, after, rows, length, tokens, nodes, page_size)


def advance_triton(
    before: Before, after: After, rows: Tensor, length: Tensor, tokens: Tensor, nodes: int, page_size: int
) -> Copies:
    batch, width = tokens.shape
    slots = after.history.shape[0]
    for name, value, shape in (
        ("rows", rows, (batch, width)),
        ("tokens", tokens, (batch, width)),
        ("length", length, (batch,)),
        ("before.slots", before.slots, (batch,)),
        ("before.prefix_len", before.prefix_len, (batch,)),
        ("before.page_table", before.page_table, (batch, -1)),
        ("after.history", after.history, (slots, -1)),
        ("after.prefix_len", after.prefix_len, (slots,)),
        ("after.root", after.root, (slots,)),
    ):
        require(f"advance: {name}", value, shape, torch.int64, tokens)
    if after.counts is not None:
        require("advance: after.counts", after.counts, (slots, -1), torch.int32, tokens)
    copies = Copies(torch.empty_like(rows), torch.empty_like(rows))
    if batch:
        _advance_kernel[(batch,)](
            *(value.contiguous() for value in (*before, rows, length, tokens)),
            *after,
            *copies,
            nodes,
            page_size,
            before.page_table.shape[1],
            after.history.stride(0),
            after.prefix_len.stride(0),
            after.root.stride(0),
            0 if after.counts is None else after.counts.stride(0),
            WIDTH=width,
            W=power_of_two(width),
            num_warps=1,
            **early(chip(tokens)),
        )
    return copies


def advance_reference(
    before: Before, after: After, rows: Tensor, length: Tensor, tokens: Tensor, nodes: int, page_size: int
) -> Copies:
    slots, prefix_len, page_table = before
    offsets = torch.arange(tokens.shape[1], device=tokens.device)
    decided = offsets < length[:, None]
    positions = prefix_len[:, None] + offsets
    # Where nothing is decided the entry keeps what it holds.
    columns = (positions + 1).clamp(max=after.history.shape[1] - 1)
    rows_of = slots[:, None].expand_as(columns)
    after.history[rows_of, columns] = torch.where(decided, tokens, after.history[rows_of, columns])
    last = tokens.gather(1, (length - 1).clamp(min=0)[:, None])[:, 0]
    after.root[slots] = torch.where(length > 0, last, after.root[slots])
    after.prefix_len[slots] = prefix_len + length
    if after.counts is not None:
        after.counts.index_put_((rows_of, tokens), decided.to(after.counts.dtype), accumulate=True)
    pages = page_table.gather(1, (positions // page_size).clamp(max=page_table.shape[1] - 1))
    destination = (pages * page_size + positions % page_size).masked_fill(~decided, DUMMY_ROW)
    first = torch.arange(tokens.shape[0], device=tokens.device) * nodes
    return Copies(rows + first[:, None], destination)


@kernel
def _advance_kernel(
    index_ptr,
    prefix_len_ptr,
    page_table_ptr,
    rows_ptr,
    length_ptr,
    tokens_ptr,
    history_ptr,
    out_prefix_len_ptr,
    root_ptr,
    counts_ptr,
    source_ptr,
    destination_ptr,
    nodes,
    page_size,
    table_width,
    history_stride,
    prefix_len_stride,
    root_stride,
    counts_stride,
    WIDTH: tl.constexpr,
    W: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A program a request."""
    after_previous(DEPENDENT)
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(index_ptr + request)
    prefix_len = tl.load(prefix_len_ptr + request)
    length = tl.load(length_ptr + request)
    offset = tl.arange(0, W)
    at = request * WIDTH + offset
    decided = (offset < length) & (offset < WIDTH)
    token = tl.load(tokens_ptr + at, mask=decided, other=0)
    position = prefix_len + offset

    tl.store(history_ptr + slot * history_stride + position + 1, token, mask=decided)
    tl.store(root_ptr + slot * root_stride + offset * 0, token, mask=offset == length - 1)
    if length > 0:
        tl.store(out_prefix_len_ptr + slot * prefix_len_stride, prefix_len + length)
    if counts_ptr is not None:
        # A path may hold a token twice.
        tl.atomic_add(counts_ptr + slot * counts_stride + token, decided.to(tl.int32), mask=decided, sem="relaxed")

    page = tl.load(page_table_ptr + request * table_width + position // page_size, mask=decided, other=0)
    destination = tl.where(decided, page * page_size + position % page_size, 0)
    tl.store(destination_ptr + at, destination, mask=offset < WIDTH)
    row = tl.load(rows_ptr + at, mask=offset < WIDTH, other=0)
    tl.store(source_ptr + at, request * nodes + row, mask=offset < WIDTH)
