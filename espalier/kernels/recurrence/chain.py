"""Computes the outputs and recurrent states of prompts, in chunks of CHUNK_ROWS rows (Yang et al., arXiv:2406.06484).

There are two kernels, because only the second must run chunk after chunk.  The first kernel computes, for each chunk,
the values that do not depend on a state: the scores between the rows of the chunk and, with the delta rule, the inverse
of the chunk's system of equations.  In the second kernel, a program holds a part of a head's state.  For each chunk,
the program computes the values that the rows add to the state, the outputs, and the next state.
"""

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from espalier.kernels.ops.recurrence import CHUNK_ROWS
from espalier.kernels.ops.states import PathRows, SlotStates
from espalier.kernels.recurrence.tree import MIN_BLOCK, ProductPrecision, choose_precision
from espalier.kernels.runtime.jit import kernel
from espalier.kernels.runtime.launch import acc_dtype, chip, next_power_of_2
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger_and_wait

# How many columns of the keys _solve_chunks_kernel multiplies in one step.
STEP_COLUMNS = 32


@kernel
def _invert_triangular_system(
    system, PRECISION: tl.constexpr, PRODUCT_DTYPE: tl.constexpr, ACC_DTYPE: tl.constexpr, BITS: tl.constexpr
):
    """Returns the inverse of I + system.  `system` is strictly lower triangular and has 2^BITS rows.

    The inverse of [[P, 0], [C, R]] is [[P', 0], [-R' C P', R']], with P' and R' the inverses of P and R.  So two
    products make the inverses of all blocks of 2n rows from the inverses of the blocks of n rows.  For blocks of n
    rows, a value of `system` is in a C if n is the highest bit in which its row index and column index differ.
    """
    differ = tl.arange(0, 2**BITS)[:, None] ^ tl.arange(0, 2**BITS)[None, :]
    inverse = tl.where(differ == 0, 1.0, 0.0).to(ACC_DTYPE) - tl.where(differ == 1, system, 0.0)
    for bit in tl.static_range(1, BITS):
        at_corners = tl.where(differ >> bit == 1, system, 0.0).to(PRODUCT_DTYPE)
        corner = tl.dot(inverse.to(PRODUCT_DTYPE), at_corners, input_precision=PRECISION, out_dtype=ACC_DTYPE)
        inverse -= tl.dot(
            corner.to(PRODUCT_DTYPE), inverse.to(PRODUCT_DTYPE), input_precision=PRECISION, out_dtype=ACC_DTYPE
        )
    return inverse


@kernel
def _solve_chunks_kernel(
    q_ptr, k_ptr, gates_ptr, row_counts_ptr, decay_ptr, q_out_ptr, k_out_ptr, inverse_ptr, scores_ptr, rows_per_request,
    HEADS: tl.constexpr, GROUP_SIZE: tl.constexpr, K_SIZE: tl.constexpr, DELTA_RULE: tl.constexpr,
    ACC_DTYPE: tl.constexpr, PRECISION: tl.constexpr, CHUNK_ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
    STEP_COLUMNS: tl.constexpr, BITS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Computes, for each chunk and head: the log-decay from the chunk's start to each row, the scores (q · k times
    decay) between rows, and with the delta rule the inverse of the system, times beta.  For each chunk and head of k,
    the kernel also rounds q and k to the dtype of products.  Padding rows get zeros."""
    pdl_trigger_and_wait(USE_PDL)
    PRODUCT_DTYPE: tl.constexpr = k_out_ptr.dtype.element_ty
    head, chunk, request = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    order = tl.arange(0, CHUNK_ROWS)
    row_in_request = chunk * CHUNK_ROWS + order
    first = request * rows_per_request + chunk * CHUNK_ROWS
    is_row = row_in_request < rows_per_request
    exists = is_row & (row_in_request < tl.load(row_counts_ptr + request))
    gate = gates_ptr + first * 2 * HEADS + head + order * 2 * HEADS
    decay = tl.cumsum(tl.load(gate, mask=exists, other=0.0).to(ACC_DTYPE), 0)
    tile = (request * tl.num_programs(1) + chunk) * HEADS + head
    tl.store(decay_ptr + tile * CHUNK_ROWS + order, decay)
    K_HEADS: tl.constexpr = HEADS // GROUP_SIZE
    chunk_offset = (first * K_HEADS + head // GROUP_SIZE) * K_SIZE
    k_tile = ((request * tl.num_programs(1) + chunk) * K_HEADS + head // GROUP_SIZE) * CHUNK_ROWS * K_SIZE
    system, scores = tl.zeros([CHUNK_ROWS, CHUNK_ROWS], ACC_DTYPE), tl.zeros([CHUNK_ROWS, CHUNK_ROWS], ACC_DTYPE)
    for at in range(0, BLOCK_K, STEP_COLUMNS):
        key = at + tl.arange(0, STEP_COLUMNS)
        is_key = (key < K_SIZE)[None, :]
        place = order[:, None] * (K_HEADS * K_SIZE) + key[None, :]
        q = tl.load(q_ptr + chunk_offset + place, mask=is_row[:, None] & is_key, other=0.0).to(PRODUCT_DTYPE)
        k = tl.load(k_ptr + chunk_offset + place, mask=exists[:, None] & is_key, other=0.0).to(PRODUCT_DTYPE)
        if head % GROUP_SIZE == 0:
            tile_offsets = k_tile + order[:, None] * K_SIZE + key[None, :]
            tl.store(q_out_ptr + tile_offsets, q, mask=is_key)
            tl.store(k_out_ptr + tile_offsets, k, mask=is_key)
        scores += tl.dot(q, tl.trans(k), input_precision=PRECISION, out_dtype=ACC_DTYPE)
        if DELTA_RULE:
            system += tl.dot(k, tl.trans(k), input_precision=PRECISION, out_dtype=ACC_DTYPE)
    is_earlier = order[None, :] <= order[:, None]
    decay_between = tl.where(is_earlier, tl.exp(tl.where(is_earlier, decay[:, None] - decay[None, :], 0.0)), 0.0)
    square_offsets = tile * CHUNK_ROWS * CHUNK_ROWS + order[:, None] * CHUNK_ROWS + order[None, :]
    tl.store(scores_ptr + square_offsets, (scores * decay_between).to(PRODUCT_DTYPE))
    if DELTA_RULE:
        beta = tl.load(gate + HEADS, mask=exists, other=0.0).to(ACC_DTYPE)
        system = tl.where(order[None, :] < order[:, None], beta[:, None] * system * decay_between, 0.0)
        inverse = _invert_triangular_system(system, PRECISION, PRODUCT_DTYPE, ACC_DTYPE, BITS)
        tl.store(inverse_ptr + square_offsets, (inverse * beta[None, :]).to(PRODUCT_DTYPE))


@kernel
def _prompt_pieces(batch_row, continues_ptr, row_counts_ptr, batch, BLOCK_B: tl.constexpr):
    """Returns (whether a batch row is a prompt's first piece in this pass, number of the prompt's pieces from this
    batch row on, number of rows in these pieces)."""
    is_first, num_pieces, num_rows = True, 1, tl.load(row_counts_ptr + batch_row)
    if continues_ptr is not None:
        later_rows = batch_row + 1 + tl.arange(0, BLOCK_B)
        continues = tl.load(continues_ptr + later_rows, mask=later_rows < batch, other=False).to(tl.int1)
        num_pieces = 1 + tl.min(tl.where(continues, BLOCK_B, tl.arange(0, BLOCK_B)), 0)
        # All pieces before the last piece with rows are full, so the rows that exist come first.
        num_rows += tl.sum(tl.load(row_counts_ptr + later_rows, mask=later_rows < batch_row + num_pieces, other=0), 0)
        is_first = tl.load(continues_ptr + batch_row) == 0
    return is_first, num_pieces, num_rows


@kernel
def _values_added_to_state(
    k_ptr, v_ptr, gates_ptr, decay_ptr, inverse_ptr, state_t, tile, k_tile, first_row, v_column, row_exists,
    HEADS: tl.constexpr, K_SIZE: tl.constexpr, V_SIZE: tl.constexpr, DELTA_RULE: tl.constexpr, ACC_DTYPE: tl.constexpr,
    PRECISION: tl.constexpr, CHUNK_ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Returns (k, v_t, log-decay from the chunk's start to each row, values that the rows add to the state) for one
    chunk.  state_t: the state before the chunk.  first_row: the chunk's first row.  v_ptr and gates_ptr point to the
    head's values."""
    PRODUCT_DTYPE: tl.constexpr = k_ptr.dtype.element_ty
    order, key = tl.arange(0, CHUNK_ROWS), tl.arange(0, BLOCK_K)
    k = tl.load(k_ptr + k_tile + order[:, None] * K_SIZE + key[None, :], mask=(key < K_SIZE)[None, :], other=0.0)
    of_value = v_column[:, None] + order[None, :] * (HEADS * V_SIZE)
    v_t = tl.load(
        v_ptr + first_row * HEADS * V_SIZE + of_value,
        mask=(v_column < V_SIZE)[:, None] & row_exists[None, :],
        other=0.0,
    ).to(ACC_DTYPE)
    decay = tl.load(decay_ptr + tile * CHUNK_ROWS + order)
    if DELTA_RULE:
        new_t = tl.dot(state_t.to(PRODUCT_DTYPE), tl.trans(k), input_precision=PRECISION, out_dtype=ACC_DTYPE)
        new_t = v_t - tl.exp(decay)[None, :] * new_t
        inverse = tl.load(inverse_ptr + tile * CHUNK_ROWS * CHUNK_ROWS + order[:, None] * CHUNK_ROWS + order[None, :])
        new_t = tl.dot(new_t.to(PRODUCT_DTYPE), tl.trans(inverse), input_precision=PRECISION, out_dtype=ACC_DTYPE)
    else:
        beta = tl.load(gates_ptr + first_row * 2 * HEADS + HEADS + order * 2 * HEADS, mask=row_exists, other=0.0)
        new_t = beta.to(ACC_DTYPE)[None, :] * v_t
    return k, v_t, decay, new_t


@kernel
def _complete_snapshot(
    k_ptr, v_ptr, gates_ptr, decay_ptr, inverse_ptr, snapshot_ptrs, mask, rows_before_snapshot, request, head,
    v_column, rows_per_request, num_chunks,
    HEADS: tl.constexpr, GROUP_SIZE: tl.constexpr, K_SIZE: tl.constexpr, V_SIZE: tl.constexpr, DELTA_RULE: tl.constexpr,
    ACC_DTYPE: tl.constexpr, PRECISION: tl.constexpr, CHUNK_ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Completes a snapshot.  snapshot_ptrs holds the state before the chunk, and is updated by the chunk's rows before
    the snapshot."""
    at = (rows_before_snapshot - 1) // CHUNK_ROWS * CHUNK_ROWS
    tile = (request * num_chunks + at // CHUNK_ROWS) * HEADS + head
    row = at + tl.arange(0, CHUNK_ROWS)
    is_taken = row < rows_before_snapshot
    state_t = tl.load(snapshot_ptrs, mask=mask, other=0.0)
    k, _, decay, new_t = _values_added_to_state(
        k_ptr, v_ptr, gates_ptr, decay_ptr, inverse_ptr, state_t, tile, (tile // GROUP_SIZE) * CHUNK_ROWS * K_SIZE,
        request * rows_per_request + at, v_column, is_taken, HEADS, K_SIZE, V_SIZE, DELTA_RULE, ACC_DTYPE, PRECISION,
        CHUNK_ROWS, BLOCK_K,
    )  # fmt: skip
    total_decay = tl.sum(tl.where(row == rows_before_snapshot - 1, decay, 0.0), 0)
    share = tl.where(is_taken, tl.exp(tl.where(is_taken, total_decay - decay, 0.0)), 0.0)
    new_t = (share[None, :] * new_t).to(k.dtype)
    state_t = tl.exp(total_decay) * state_t
    state_t += tl.dot(new_t, k, input_precision=PRECISION, out_dtype=ACC_DTYPE)
    tl.store(snapshot_ptrs, state_t, mask=mask)


@kernel
def _scan_chunks_kernel(
    q_ptr, k_ptr, v_ptr, gates_ptr, state_ptr, slots_ptr, row_counts_ptr, snapshot_counts_ptr, snapshot_rows_ptr,
    continues_ptr, decay_ptr, inverse_ptr, scores_ptr, skip_ptr, out_ptr, batch, rows_per_request, num_chunks,
    HEADS: tl.constexpr, GROUP_SIZE: tl.constexpr, K_SIZE: tl.constexpr, V_SIZE: tl.constexpr, DELTA_RULE: tl.constexpr,
    ACC_DTYPE: tl.constexpr, PRECISION: tl.constexpr, CHUNK_ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_B: tl.constexpr, STAGES: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """q_ptr, k_ptr: q and k, rounded by _solve_chunks_kernel.  Tensors whose names end in _t are transposed: they have
    a column for each row of the chunk, so that products take them from registers.  continues_ptr: for each batch row,
    whether it is the next piece of the prompt of the batch row before; None: no batch row is."""
    pdl_trigger_and_wait(USE_PDL)
    PRODUCT_DTYPE: tl.constexpr = k_ptr.dtype.element_ty
    v_blocks: tl.constexpr = (V_SIZE + BLOCK_V - 1) // BLOCK_V
    head, first = tl.program_id(0) // v_blocks, tl.program_id(1).to(tl.int64)
    is_first, pieces, count = _prompt_pieces(first, continues_ptr, row_counts_ptr, batch, BLOCK_B)
    if is_first:
        order, key = tl.arange(0, CHUNK_ROWS), tl.arange(0, BLOCK_K)
        value = tl.program_id(0) % v_blocks * BLOCK_V + tl.arange(0, BLOCK_V)
        is_key, is_value = key < K_SIZE, value < V_SIZE
        mask = is_value[:, None] & is_key[None, :]
        state_ptr += head * K_SIZE * V_SIZE
        place = value[:, None] + key[None, :] * V_SIZE
        v_ptr, out_ptr, gates_ptr = v_ptr + head * V_SIZE, out_ptr + head * V_SIZE, gates_ptr + head
        slot_ptr = state_ptr + tl.load(slots_ptr + first) * HEADS * K_SIZE * V_SIZE
        state_t = tl.load(slot_ptr + place, mask=mask, other=0.0)
        for i in tl.range(0, pieces * num_chunks, num_stages=STAGES):
            piece, at = i // num_chunks, i % num_chunks * CHUNK_ROWS
            row = (first + piece) * rows_per_request + at
            is_row = at + order < rows_per_request
            exists = is_row & (piece * rows_per_request + at + order < count)
            tile = (first * num_chunks + i) * HEADS + head
            k_tile = (tile // GROUP_SIZE) * CHUNK_ROWS * K_SIZE
            if snapshot_counts_ptr is not None:
                here = tl.load(snapshot_counts_ptr + first + piece) - at
                if (here > 0) & (here <= CHUNK_ROWS):
                    snapshot = state_ptr + tl.load(snapshot_rows_ptr + first + piece) * HEADS * K_SIZE * V_SIZE
                    tl.store(snapshot + place, state_t, mask=mask)
            k, v_t, decay, new_t = _values_added_to_state(
                k_ptr, v_ptr, gates_ptr, decay_ptr, inverse_ptr, state_t, tile, k_tile, row, value, exists, HEADS,
                K_SIZE, V_SIZE, DELTA_RULE, ACC_DTYPE, PRECISION, CHUNK_ROWS, BLOCK_K,
            )  # fmt: skip
            total_decay = tl.load(decay_ptr + tile * CHUNK_ROWS + CHUNK_ROWS - 1)
            q = tl.load(q_ptr + k_tile + order[:, None] * K_SIZE + key[None, :], mask=is_key[None, :], other=0.0)
            scores = tl.load(scores_ptr + tile * CHUNK_ROWS * CHUNK_ROWS + order[:, None] * CHUNK_ROWS + order[None, :])
            out_t = tl.dot(state_t.to(PRODUCT_DTYPE), tl.trans(q), input_precision=PRECISION, out_dtype=ACC_DTYPE)
            out_t = tl.exp(decay)[None, :] * out_t
            out_t += tl.dot(new_t.to(PRODUCT_DTYPE), tl.trans(scores), input_precision=PRECISION, out_dtype=ACC_DTYPE)
            if skip_ptr is not None:
                out_t += tl.load(skip_ptr + head).to(ACC_DTYPE) * v_t
            out_offsets = row * HEADS * V_SIZE + value[:, None] + order[None, :] * (HEADS * V_SIZE)
            is_out = is_value[:, None] & is_row[None, :]
            tl.store(out_ptr + out_offsets, out_t.to(out_ptr.dtype.element_ty), mask=is_out)
            new_t = (tl.exp(total_decay - decay)[None, :] * new_t).to(PRODUCT_DTYPE)
            state_t = tl.exp(total_decay) * state_t
            state_t += tl.dot(new_t, k, input_precision=PRECISION, out_dtype=ACC_DTYPE)
        if tl.load(row_counts_ptr + first) > 0:
            tl.store(slot_ptr + place, state_t, mask=mask)
        if snapshot_counts_ptr is not None:
            # A snapshot's table row holds the state before the snapshot's chunk.  Other threads wrote this state.
            tl.debug_barrier()
            for piece in range(pieces):
                here = tl.load(snapshot_counts_ptr + first + piece)
                if here > 0:
                    snapshot = state_ptr + tl.load(snapshot_rows_ptr + first + piece) * HEADS * K_SIZE * V_SIZE
                    _complete_snapshot(
                        k_ptr, v_ptr, gates_ptr, decay_ptr, inverse_ptr, snapshot + place, mask, here, first + piece,
                        head, value, rows_per_request, num_chunks, HEADS, GROUP_SIZE, K_SIZE, V_SIZE, DELTA_RULE,
                        ACC_DTYPE, PRECISION, CHUNK_ROWS, BLOCK_K,
                    )  # fmt: skip


def chain_outputs(
    q: Tensor,
    rows: tuple[Tensor, Tensor, Tensor],
    state: SlotStates,
    path: PathRows,
    skip_weight: Tensor | None,
    is_delta_rule: bool,
) -> Tensor:
    """The launcher of ops/states.py:chain_outputs.  rows: (k, v, gates).
    Tolerance of outputs and states: the rounding of products' operands, times the condition number of a chunk's system.
    """
    k, v, gates = (x.contiguous() for x in rows)
    q = q.contiguous()
    (batch, count, heads, v_size), (k_heads, k_size) = v.shape, k.shape[2:]
    table, slots = state
    out = torch.empty_like(v)
    if not batch or not count:
        return out
    chunks, products = -(-count // CHUNK_ROWS), choose_precision(v, table)
    plan = choose_chain_plan(products, is_delta_rule)
    products_like = table.new_empty(0, dtype=products.operand_dtype)
    decay = table.new_empty(batch, chunks, heads, CHUNK_ROWS)
    tiles_q, tiles_k = (products_like.new_empty(batch, chunks, k_heads, CHUNK_ROWS, k_size) for _ in range(2))
    scores = products_like.new_empty(batch, chunks, heads, CHUNK_ROWS, CHUNK_ROWS)
    inverse = torch.empty_like(scores) if is_delta_rule else None
    constants = {
        "HEADS": heads,
        "GROUP_SIZE": heads // k_heads,
        "K_SIZE": k_size,
        "DELTA_RULE": is_delta_rule,
        "ACC_DTYPE": acc_dtype(table.dtype),
        "PRECISION": products.precision,
        "CHUNK_ROWS": CHUNK_ROWS,
        "BLOCK_K": max(next_power_of_2(k_size), MIN_BLOCK),
        **pdl_arguments(chip(v)),
    }
    _solve_chunks_kernel[heads, chunks, batch](
        *(q, k, gates, path.row_counts, decay, tiles_q, tiles_k, inverse, scores, count),
        STEP_COLUMNS=min(STEP_COLUMNS, constants["BLOCK_K"]), BITS=CHUNK_ROWS.bit_length() - 1,
        num_warps=4, num_stages=1, maxnreg=plan.solve_registers, **constants,
    )  # fmt: skip
    _scan_chunks_kernel[heads * -(-v_size // plan.block_v), batch](
        *(tiles_q, tiles_k, v, gates, table, slots),
        *(path.row_counts, path.snapshot_counts, path.snapshot_rows, path.continues_previous),
        *(decay, inverse, scores, skip_weight, out, batch, count, chunks),
        V_SIZE=v_size, BLOCK_V=plan.block_v, BLOCK_B=next_power_of_2(batch), STAGES=plan.num_stages,
        num_warps=plan.num_warps, **constants,
    )  # fmt: skip
    return out


class ChainPlan(NamedTuple):
    """Launch parameters.  block_v (state columns per program), num_stages and num_warps are for _scan_chunks_kernel.
    solve_registers: the most registers per thread of _solve_chunks_kernel; None for no limit."""

    block_v: int
    num_stages: int
    num_warps: int
    solve_registers: int | None = None


def choose_chain_plan(products: ProductPrecision, is_delta_rule: bool) -> ChainPlan:
    """Returns the launch parameters that were fastest on an H100 (docs/log.md).

    With 16-bit operands, a program takes 64 columns of a state, even if a head has fewer, because they are the rows of
    wgmma's products, and wgmma takes at least 64 rows.  Only wgmma takes 16-bit operands from registers in the layout
    of a product's results.
    """
    if products.operand_dtype.itemsize > 2:
        return ChainPlan(32, 1, 4)
    return ChainPlan(64, 2 if is_delta_rule else 3, 4, 168)
