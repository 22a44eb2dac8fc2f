"""Commits accepted paths: updates the recurrent states by the rows of the paths, and the tails of convolutions by the
inputs at these rows.

A tail is the last inputs of a convolution.  Rows update a state one after another, in float32 (float64 for float64),
with the same operations in the same order.  So a state does not depend on how many tokens each round accepted.  Each
program reads a part of a state once and keeps it in registers.  Grid: (parts of a state or tail, requests, layers).
"""

import triton.language as tl
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.ops.states import ConvColumns, PathRows
from espalier.kernels.recurrence.inputs import input_column
from espalier.kernels.runtime.jit import kernel
from espalier.kernels.runtime.launch import acc_dtype, chip, next_power_of_2
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger_and_wait

# BLOCK_V: columns of a state that a program holds.  BLOCK_C: channels of a tail that a program holds.
BLOCK_V, BLOCK_C = 32, 256


@kernel
def _commit_states_kernel(
    state_ptr, k_ptr, v_ptr, gates_ptr, slots_ptr, source_rows_ptr, row_counts_ptr, snapshot_counts_ptr,
    snapshot_rows_ptr, rows_per_request, state_layer_stride, k_layer_stride, v_layer_stride, gates_layer_stride,
    HEADS: tl.constexpr, GROUP_SIZE: tl.constexpr, K_SIZE: tl.constexpr, V_SIZE: tl.constexpr, DELTA_RULE: tl.constexpr,
    ACC_DTYPE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """row_counts: how many rows of each request are accepted.  source_rows: the indices of these rows.

    After snapshot_counts rows of a request, the state is also written to the table row snapshot_rows of the request.
    snapshot_counts_ptr: None if no request has a snapshot."""
    pdl_trigger_and_wait(USE_PDL)
    v_blocks: tl.constexpr = (V_SIZE + BLOCK_V - 1) // BLOCK_V
    head = tl.program_id(0) // v_blocks
    request, layer = tl.program_id(1), tl.program_id(2).to(tl.int64)
    key, value = tl.arange(0, BLOCK_K), tl.program_id(0) % v_blocks * BLOCK_V + tl.arange(0, BLOCK_V)
    is_key, is_value = key < K_SIZE, value < V_SIZE
    state_mask = is_key[:, None] & is_value[None, :]
    state_ptr += layer * state_layer_stride
    state_offsets = (head * K_SIZE + key[:, None]) * V_SIZE + value[None, :]
    count = tl.load(row_counts_ptr + request)
    if count > 0:
        slot = tl.load(slots_ptr + request)
        state = tl.load(state_ptr + slot * HEADS * K_SIZE * V_SIZE + state_offsets, mask=state_mask, other=0.0)
        if snapshot_counts_ptr is not None:
            snapshot_count = tl.load(snapshot_counts_ptr + request)
        for i in range(count):
            row = tl.load(source_rows_ptr + request * rows_per_request + i)
            gates = gates_ptr + layer * gates_layer_stride + row * 2 * HEADS + head
            k_row = k_ptr + layer * k_layer_stride + row * (HEADS // GROUP_SIZE) * K_SIZE + head // GROUP_SIZE * K_SIZE
            v_row = v_ptr + layer * v_layer_stride + (row * HEADS + head) * V_SIZE
            log_decay, beta = tl.load(gates).to(ACC_DTYPE), tl.load(gates + HEADS).to(ACC_DTYPE)
            k = tl.load(k_row + key, mask=is_key, other=0.0).to(ACC_DTYPE)
            v = tl.load(v_row + value, mask=is_value, other=0.0).to(ACC_DTYPE)
            state *= tl.exp(log_decay)
            if DELTA_RULE:
                v -= tl.sum(state * k[:, None], 0)
            state += k[:, None] * (beta * v)[None, :]
            # With `and`, Triton would also compile the second condition, which needs snapshot_count.
            if snapshot_counts_ptr is not None:  # noqa: SIM102
                if i + 1 == snapshot_count:
                    snapshot_row = tl.load(snapshot_rows_ptr + request)
                    tl.store(state_ptr + snapshot_row * HEADS * K_SIZE * V_SIZE + state_offsets, state, mask=state_mask)
        tl.store(state_ptr + slot * HEADS * K_SIZE * V_SIZE + state_offsets, state, mask=state_mask)


def commit_states(state: Tensor, rows: tuple[Tensor, Tensor, Tensor], path: PathRows, is_delta_rule: bool) -> None:
    """Update each request's state by its accepted rows, in every layer.  Mutates `state`.

    state: [layers, table rows, heads, k_size, v_size].  rows: k, v and the gates (log decay and beta) of all rows of
    the pass, for every layer.  is_delta_rule: whether rows update states by the delta rule.
    Tolerance: an ulp of float32 for each row, times the condition number of the system that the reference solves.
    """
    k, v, gates = rows
    layers, _, heads, k_size, v_size = state.shape
    _require_rows_contiguous(state, k, v, gates)
    assert path.source_rows is not None
    batch, width = path.source_rows.shape
    if not batch:
        return
    _commit_states_kernel[heads * -(-v_size // BLOCK_V), batch, layers](
        *(state, k, v, gates, path.slots, path.source_rows, path.row_counts, path.snapshot_counts, path.snapshot_rows),
        *(width, state.stride(0), k.stride(0), v.stride(0), gates.stride(0)),
        HEADS=heads, GROUP_SIZE=heads // k.shape[2], K_SIZE=k_size, V_SIZE=v_size, DELTA_RULE=is_delta_rule,
        ACC_DTYPE=acc_dtype(state.dtype), BLOCK_K=next_power_of_2(k_size), BLOCK_V=BLOCK_V, num_warps=4,
        **pdl_arguments(chip(state)),
    )  # fmt: skip


def _require_rows_contiguous(*tensors: Tensor) -> None:
    for tensor in tensors:
        if tensor.numel() and not tensor[0].is_contiguous():
            raise EspalierError(
                f"states and rows of a layer must be contiguous, and their strides are {tensor.stride()}"
            )


@kernel
def _commit_tails_kernel(
    tail_ptr, x_ptr, slots_ptr, source_rows_ptr, row_counts_ptr, snapshot_counts_ptr, snapshot_rows_ptr, continues_ptr,
    is_last_row_ptr, rows_per_request, x_stride, tail_layer_stride, x_layer_stride,
    CHANNELS: tl.constexpr, TAIL_ROWS: tl.constexpr, Q_COLUMN: tl.constexpr, K_COLUMN: tl.constexpr,
    V_COLUMN: tl.constexpr, K_HEAD_STRIDE: tl.constexpr, V_GROUP_STRIDE: tl.constexpr, K_SIZE: tl.constexpr,
    Q_CHANNELS: tl.constexpr, V_GROUP_CHANNELS: tl.constexpr, BLOCK: tl.constexpr, FIRST_TURN: tl.constexpr,
    END_TURN: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """source_rows_ptr: None if x has `rows_per_request` rows for each request, in order.  continues_ptr,
    is_last_row_ptr: None if no request has several batch rows.  snapshot_counts_ptr: None without snapshots.
    A program takes turns FIRST_TURN .. END_TURN - 1.  Turn 0 writes the tails of snapshots, turn 1 the tails of slots.
    """
    pdl_trigger_and_wait(USE_PDL)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    request, layer = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    is_channel = channel < CHANNELS
    column = input_column(
        channel, Q_COLUMN, K_COLUMN, V_COLUMN, K_HEAD_STRIDE, V_GROUP_STRIDE, K_SIZE, Q_CHANNELS, V_GROUP_CHANNELS
    )
    continues = tl.load(continues_ptr + request) if continues_ptr is not None else False
    tail_ptr += layer * tail_layer_stride
    slot = tl.load(slots_ptr + request)
    old_tail = tail_ptr + slot * TAIL_ROWS * CHANNELS + channel
    # The snapshot's tail is written first, because it may need old inputs, which the slot's new tail overwrites.
    for turn in tl.static_range(FIRST_TURN, END_TURN):
        if turn == 0:
            count = tl.load(snapshot_counts_ptr + request) if snapshot_counts_ptr is not None else 0
            new_tail = (
                tail_ptr
                + (tl.load(snapshot_rows_ptr + request) if snapshot_counts_ptr is not None else 0)
                * TAIL_ROWS
                * CHANNELS
            )
        else:
            count = tl.load(row_counts_ptr + request)
            if is_last_row_ptr is not None:
                count = tl.where(tl.load(is_last_row_ptr + request), count, 0)
            new_tail = tail_ptr + slot * TAIL_ROWS * CHANNELS
        if count > 0:
            # i ascends, so that each old input is read before it is overwritten.
            for i in tl.static_range(TAIL_ROWS):
                input_row = count - TAIL_ROWS + i
                row = request * rows_per_request + input_row
                is_new = (input_row >= 0) | continues
                if source_rows_ptr is not None:
                    row = tl.load(source_rows_ptr + row, mask=is_new, other=0)
                new_input = tl.load(
                    x_ptr + layer * x_layer_stride + row * x_stride + column, mask=is_channel & is_new, other=0.0
                )
                old_input = tl.load(old_tail + (TAIL_ROWS + input_row) * CHANNELS, mask=is_channel & ~is_new, other=0.0)
                tl.store(new_tail + i * CHANNELS + channel, tl.where(is_new, new_input, old_input), mask=is_channel)


def commit_tails(tail: Tensor, inputs: Tensor, path: PathRows, columns: ConvColumns) -> None:
    """Write the last inputs of each request's convolution to the request's tail, in every layer.  Mutates `tail`.
    tail: [layers, table rows, taps - 1, channels].  The kernel only copies, so its result equals the reference's."""
    layers, _, tail_rows, channels = tail.shape
    batch = len(path.slots)
    if not tail_rows or not batch:
        return
    _require_rows_contiguous(tail)
    # If prompts have several pieces, the tails of snapshots have a separate launch: a first piece may need the slot's
    # old tail, which the last piece overwrites.
    is_in_pieces = path.snapshot_counts is not None and path.continues_previous is not None
    for first, end in ((0, 1), (1, 2)) if is_in_pieces else ((0, 2),):
        _commit_tails_kernel[-(-channels // BLOCK_C), batch, layers](
            *(tail, inputs, path.slots, path.source_rows, path.row_counts, path.snapshot_counts, path.snapshot_rows),
            *(path.continues_previous, path.is_last_row),
            *(path.width, inputs.stride(1), tail.stride(0), inputs.stride(0)),
            CHANNELS=channels, TAIL_ROWS=tail_rows, **columns.constexpr_arguments, BLOCK=BLOCK_C, FIRST_TURN=first,
            END_TURN=end, num_warps=2, **pdl_arguments(chip(tail)),
        )  # fmt: skip
