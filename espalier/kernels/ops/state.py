"""Operations that read and write the data of a launch (a prefill pass or a round): slots of requests, known tokens,
rows of pages, results."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from espalier.kernels.ops.tree import gather_rows
from espalier.kernels.runtime.launch import require
from espalier.kernels.runtime.op import op
from espalier.layout import DUMMY_ROW
from espalier.slots import BatchState, ScatterUpdate, SlotTable

# The value of a column of the results that belongs to no field.
EMPTY_COLUMN = -1


def page_rows(page_table: Tensor, positions: Tensor, page_size: int, is_kept: Tensor | None = None) -> Tensor:
    """Returns the rows of pages [B, P] int64 that hold positions [B, P] int64.  page_table: [B, T] int32.

    Only padding has positions past the table; they use the table's last column.  is_kept: [B, P] bool; the result is
    the dummy row where it is False.  None: all positions are kept."""
    columns = (positions // page_size).clamp(max=page_table.shape[1] - 1)
    rows = page_table.gather(1, columns).long() * page_size + positions % page_size
    return rows if is_kept is None else rows.where(is_kept, DUMMY_ROW)


class AcceptedNodes(NamedTuple):
    """The accepted paths of a round.  nodes: [B, W] int64, the indices of each path's nodes from the root down.
    nodes_per_request: the number of nodes of a tree.  Each node has a staged row (new K and V)."""

    nodes: Tensor
    nodes_per_request: int


class RowCopies(NamedTuple):
    """The rows of K and V to copy after a round, by index.

    source: [B, W], rows of the target's staging buffers.  destination: [B, W], rows of the target's pages; 0: no copy.
    """

    source: Tensor
    destination: Tensor


class AdvanceResult(NamedTuple):
    """The result of `advance`.
    num_new_tokens: [B] int64, how many tokens were added to the slot's history.  copies: None for a prefill pass."""

    num_new_tokens: Tensor
    copies: RowCopies | None


class TokenChain(NamedTuple):
    """Consecutive known tokens of each request.  Fields: [B, W] int64.  rows: the row of the pages for each token."""

    positions: Tensor
    tokens: Tensor
    rows: Tensor


def load_carried_field(slots: BatchState, field_name: str) -> Tensor:
    """Returns the values [B, 1, H] that `store_carried_field` stored in each request's slot in an earlier launch."""
    return gather_rows(slots.index[None], slots.table.carried[field_name][None]).transpose(0, 1)


def check_row_copies(
    staged: Sequence[Tensor], committed: Sequence[Tensor], source_rows: Tensor, destination_rows: Tensor
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Check the shapes of commit_rows' arguments.  Returns (staged, committed).
    FP8 tensors are returned as bytes, because PyTorch cannot copy FP8 rows by index."""
    for i, (src, dst) in enumerate(zip(staged, committed, strict=True)):
        require(f"staged tensor {i}", src, (committed[0].shape[0], -1, *dst.shape[2:]), dst.dtype, dst)
    require("commit's source", source_rows, (-1,), torch.int64, committed[0])
    require("commit's rows", destination_rows, tuple(source_rows.shape), torch.int64, source_rows)
    staged, committed = (
        [tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor for tensor in tensors]
        for tensors in (staged, committed)
    )
    return staged, committed


@op("espalier.kernels.state.batch_state", tensor="picked_tokens")
def advance(
    slots: BatchState, num_tokens: Tensor, picked_tokens: Tensor, count_tokens: bool, path: AcceptedNodes | None = None
) -> AdvanceResult:
    """Move each slot forward by `num_tokens` [B] tokens.  The last token becomes the slot's root, the root of the next
    tree.

    picked_tokens: [B, W] int64, the last W of these tokens, or all of them if there are fewer.  The other tokens are
    already in the slot's history.  If the history has a known token at a position, this token stays, and the picked
    token is dropped.
    count_tokens: whether to count picked tokens, for penalties.  path: the accepted nodes, whose rows must be copied to
    the positions from prefix_len on; None for a prefill pass, whose rows Pass.commit copies.  A slot with num_tokens 0
    is padding and does not change.  Two entries may have the same slot only if they are padding.  Raises EspalierError
    if sizes do not agree."""
    table, width = slots.table, picked_tokens.shape[1]
    offsets = torch.arange(width, device=picked_tokens.device)
    decided = offsets < num_tokens[:, None]
    token_positions = slots.prefix_len[:, None] + 1 + (num_tokens[:, None] - width).clamp(min=0) + offsets
    # At positions where is_new is False, the history keeps its token.
    columns = token_positions.clamp(max=table.layout.history_width - 1)
    slot = slots.index[:, None].expand_as(columns)
    is_new = decided & (token_positions >= table.known_len[slots.index][:, None])
    tokens = torch.where(is_new, picked_tokens, table.history[slot, columns])
    table.history[slot, columns] = tokens
    last = tokens.gather(1, (num_tokens.clamp(max=width) - 1).clamp(min=0)[:, None])[:, 0]
    table.root[slots.index] = torch.where(num_tokens > 0, last, table.root[slots.index])
    table.prefix_len[slots.index] = slots.prefix_len + num_tokens
    if count_tokens:
        table.counts.index_put_((slot, tokens), is_new.to(table.counts.dtype), accumulate=True)
    num_picked = is_new.sum(1)
    if path is None:
        return AdvanceResult(num_picked, None)
    positions = slots.prefix_len[:, None] + offsets
    is_copied = decided & (positions >= slots.commit_from[:, None])
    destination = page_rows(slots.page_table, positions, table.layout.page_size, is_copied)
    first_staged_row = torch.arange(slots.batch, device=picked_tokens.device) * path.nodes_per_request
    return AdvanceResult(num_picked, RowCopies(path.nodes + first_staged_row[:, None], destination))


@op("espalier.kernels.state.batch_state", tensor="slot_indices")
def gather_slots(table: SlotTable, slot_indices: Tensor, page_updates: ScatterUpdate | None = None) -> BatchState:
    """Writes `page_updates` to the page tables, then returns the BatchState of the slots `slot_indices` [B] int64.

    page_updates: new entries of any page tables; all values for the same cell must be equal."""
    if page_updates is not None:
        table.write({"page_table": page_updates})
    prefix_len = table.prefix_len[slot_indices]
    room = table.layout.max_accept_depth(table.end[slot_indices], prefix_len)
    return BatchState(
        table=table, index=slot_indices, prefix_len=prefix_len, root=table.root[slot_indices],
        commit_from=table.commit_from[slot_indices],
        num_tokens=prefix_len + 1, max_accept_depth=torch.minimum(table.depth_limit[slot_indices], room).clamp(min=0),
        num_logprobs=table.num_logprobs[slot_indices], is_real=slot_indices > 0,
        page_table=table.page_table[slot_indices],
    )  # fmt: skip


@op("espalier.kernels.state.batch_state", tensor="num_tokens")
def read_chain(
    slots: BatchState, first_offset: int, num_tokens: Tensor, row_width: int, padding: int | None = None
) -> TokenChain:
    """Returns `num_tokens` [B] tokens of each slot's history, from prefix_len + `first_offset` on.

    The result has W = row_width columns.  In the columns after num_tokens, the token is `padding`; None: the root.
    `rows` has the dummy row in these columns, and at positions below commit_from, whose pages other requests share."""
    offsets = torch.arange(row_width, device=num_tokens.device)
    positions = slots.prefix_len[:, None] + first_offset + offsets
    is_known = offsets < num_tokens[:, None]
    tokens = torch.where(is_known, slots.history_at(positions), slots.root[:, None] if padding is None else padding)
    kept = is_known & (positions >= slots.commit_from[:, None])
    return TokenChain(positions, tokens, page_rows(slots.page_table, positions, slots.table.layout.page_size, kept))


@op("espalier.kernels.state.batch_state", tensor="num_tokens")
def store_carried_field(slots: BatchState, field_name: str, values: Tensor, num_tokens: Tensor) -> None:
    """Store row num_tokens - 1 (row 0 for no tokens) of `values` [B, W, H] in each slot, for the slot's next launch.

    field_name: a name in DraftSpec.slot_tensor_shapes.  num_tokens: [B] int64."""
    last = (num_tokens - 1).clamp(min=0)[:, None, None].expand(-1, 1, values.shape[2])
    slots.table.carried[field_name][slots.index] = values.gather(1, last)[:, 0]


@op("espalier.kernels.state.commit", tensor="source_rows")
def commit_rows(
    staged: Sequence[Tensor], committed: Sequence[Tensor], source_rows: Tensor, destination_rows: Tensor
) -> None:
    """Copy rows `source_rows` [N] of the staged tensors to destination_rows [N] of the committed tensors.

    Each tensor is [layers, rows, heads, size], such as K or V of a group of layers.  staged: the rows of this pass;
    committed: the rows of pages.  No row may be in `destination_rows` twice, except the dummy row 0, which is not
    written.  Raises EspalierError if shapes do not agree."""
    staged, committed = check_row_copies(staged, committed, source_rows, destination_rows)
    for src, dst in zip(staged, committed, strict=True):
        dummy = dst[:, DUMMY_ROW].clone()
        dst.index_copy_(1, destination_rows, src.index_select(1, source_rows))
        dst[:, DUMMY_ROW] = dummy


@op("espalier.kernels.state.commit")
def write_results(ring: Tensor, entry_index: Tensor, fields_by_column: Mapping[int, Tensor]) -> None:
    """Write a launch's results for B requests to the first B rows of one entry of the results ring.

    ring: [entries, rows, width] int64, contiguous in the last dimension.  entry_index: [1], the entry's index.
    fields_by_column: for each field its first column, and its values [B, columns] int64 or float32.  A float32 value is
    written as its bits.  Columns without a field become EMPTY_COLUMN.  Raises EspalierError if sizes do not agree."""
    batch = next(iter(fields_by_column.values())).shape[0]
    entry_rows = ring.new_full((batch, ring.shape[2]), EMPTY_COLUMN)
    for start, field in fields_by_column.items():
        value = field.contiguous().view(torch.int32).to(torch.int64) if field.dtype == torch.float32 else field
        entry_rows[:, start : start + field.shape[1]] = value
    ring[entry_index, torch.arange(batch, device=ring.device)] = entry_rows
