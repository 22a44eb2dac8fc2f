"""Computes the outputs and states of prompts, in chunks of CHUNK_ROWS rows (Yang et al. 2024, arXiv:2406.06484).

There are three kernels, because only the second must run chunk after chunk.  The first solves the system of each chunk.
The chunk's rows then add keyᵀ (u - w S) to the state S before the chunk.  In the second, a program holds a part of a
head's state.  For each chunk, it stores the state before the chunk and the values u - w S.  The third computes the
outputs of all chunks.
"""

from __future__ import annotations

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

# How many columns of keys, and of values, are multiplied at once.
STEP_COLUMNS = 64


@kernel
def _rows_of_chunk(request, chunk, rows_per_request, row_counts_ptr, CHUNK_ROWS: tl.constexpr):
    """For each row of the chunk: (row index, whether it is inside the batch row, whether it exists: no padding)."""
    within = chunk * CHUNK_ROWS + tl.arange(0, CHUNK_ROWS)
    return request * rows_per_request + within, within < rows_per_request, within < tl.load(row_counts_ptr + request)


@kernel
def _inverse(
    system, PRECISION: tl.constexpr, PRODUCT_DTYPE: tl.constexpr, ACC_DTYPE: tl.constexpr, CHUNK_ROWS: tl.constexpr
):
    """Returns the inverse of I + system.  `system` is strictly lower triangular.

    The inverse of [[P, 0], [C, R]] is [[P', 0], [-R' C P', R']], with P' and R' the inverses of P and R.  So two
    products turn the inverses of blocks of n rows into the inverses of blocks of 2n rows.
    """
    row, column = tl.arange(0, CHUNK_ROWS)[:, None], tl.arange(0, CHUNK_ROWS)[None, :]
    inverse = tl.where(row == column, 1.0, 0.0).to(ACC_DTYPE)
    inverse -= tl.where((row % 2 == 1) & (column == row - 1), system, 0.0)
    size = 2
    while size < CHUNK_ROWS:
        below = (row // size % 2 == 1) & (column // size == row // size - 1)
        at_corners = tl.where(below, system, 0.0).to(PRODUCT_DTYPE)
        corner = tl.dot(inverse.to(PRODUCT_DTYPE), at_corners, input_precision=PRECISION, out_dtype=ACC_DTYPE)
        inverse -= tl.dot(
            corner.to(PRODUCT_DTYPE), inverse.to(PRODUCT_DTYPE), input_precision=PRECISION, out_dtype=ACC_DTYPE
        )
        size *= 2
    return inverse


@kernel
def _solve_kernel(
    k_ptr, v_ptr, gates_ptr, row_counts_ptr, decay_ptr, key_ptr, w_ptr, new_ptr, rows,
    HEADS: tl.constexpr, GROUP_SIZE: tl.constexpr, K_SIZE: tl.constexpr, V_SIZE: tl.constexpr, DELTA_RULE: tl.constexpr,
    ACC_DTYPE: tl.constexpr, PRECISION: tl.constexpr, SOLVE_DTYPE: tl.constexpr, CHUNK_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, STEP_COLUMNS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Computes, for each chunk and head: the log-decay from the chunk's start to each row, the keys decayed to the
    chunk's end, w and u.  Padding rows add nothing to the state."""
    pdl_trigger_and_wait(USE_PDL)
    PRODUCT_DTYPE: tl.constexpr = new_ptr.dtype.element_ty
    head, chunk, request = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    row, is_row, exists = _rows_of_chunk(request, chunk, rows, row_counts_ptr, CHUNK_ROWS)
    exists = is_row & exists
    order = tl.arange(0, CHUNK_ROWS)
    gate = gates_ptr + row * 2 * HEADS + head
    decay = tl.cumsum(tl.load(gate, mask=exists, other=0.0).to(ACC_DTYPE), 0)
    beta = tl.load(gate + HEADS, mask=exists, other=0.0).to(ACC_DTYPE)
    of_row = ((request * tl.num_programs(1) + chunk) * HEADS + head) * CHUNK_ROWS + order
    tl.store(decay_ptr + of_row, decay)
    of_key = (row * (HEADS // GROUP_SIZE) + head // GROUP_SIZE) * K_SIZE
    if DELTA_RULE:
        system = tl.zeros([CHUNK_ROWS, CHUNK_ROWS], ACC_DTYPE)
        for first in range(0, BLOCK_K, STEP_COLUMNS):
            key = first + tl.arange(0, STEP_COLUMNS)
            mask = exists[:, None] & (key < K_SIZE)[None, :]
            k = tl.load(k_ptr + of_key[:, None] + key[None, :], mask=mask, other=0.0).to(PRODUCT_DTYPE)
            system += tl.dot(k, tl.trans(k), input_precision=PRECISION, out_dtype=ACC_DTYPE)
        below = order[None, :] < order[:, None]
        carry = tl.where(below, tl.exp(tl.where(below, decay[:, None] - decay[None, :], 0.0)), 0.0)
        inverse = _inverse(beta[:, None] * system * carry, PRECISION, SOLVE_DTYPE, ACC_DTYPE, CHUNK_ROWS)
        inverse = (inverse * beta[None, :]).to(PRODUCT_DTYPE)
    to_end = tl.exp(tl.sum(tl.where(order == CHUNK_ROWS - 1, decay, 0.0), 0) - decay)
    for first in range(0, BLOCK_K, STEP_COLUMNS):
        key = first + tl.arange(0, STEP_COLUMNS)
        mask = (key < K_SIZE)[None, :]
        k = tl.load(k_ptr + of_key[:, None] + key[None, :], mask=exists[:, None] & mask, other=0.0).to(ACC_DTYPE)
        tile = of_row[:, None] * K_SIZE + key[None, :]
        tl.store(key_ptr + tile, (to_end[:, None] * k).to(PRODUCT_DTYPE), mask=mask)
        if DELTA_RULE:
            k = (tl.exp(decay)[:, None] * k).to(PRODUCT_DTYPE)
            w = tl.dot(inverse, k, input_precision=PRECISION, out_dtype=ACC_DTYPE)
            tl.store(w_ptr + tile, w.to(PRODUCT_DTYPE), mask=mask)
    for first in range(0, BLOCK_V, STEP_COLUMNS):
        value = first + tl.arange(0, STEP_COLUMNS)
        mask = (value < V_SIZE)[None, :]
        v_place = (row * HEADS + head)[:, None] * V_SIZE + value[None, :]
        new = tl.load(v_ptr + v_place, mask=exists[:, None] & mask, other=0.0).to(ACC_DTYPE)
        if DELTA_RULE:
            new = tl.dot(inverse, new.to(PRODUCT_DTYPE), input_precision=PRECISION, out_dtype=ACC_DTYPE)
        else:
            new = beta[:, None] * new
        tl.store(new_ptr + of_row[:, None] * V_SIZE + value[None, :], new.to(PRODUCT_DTYPE), mask=mask)


@kernel
def _states_kernel(
    state_ptr, slots_ptr, row_counts_ptr, snapshot_counts_ptr, snapshot_rows_ptr, continues_ptr, decay_ptr, key_ptr,
    w_ptr, new_ptr, before_ptr, batch, chunks,
    HEADS: tl.constexpr, K_SIZE: tl.constexpr, V_SIZE: tl.constexpr, DELTA_RULE: tl.constexpr, ACC_DTYPE: tl.constexpr,
    PRECISION: tl.constexpr, CHUNK_ROWS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_B: tl.constexpr, STAGES: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """new_ptr: u; the kernel replaces u by u - w S, the values that rows add.  before_ptr: the states before chunks.
    A snapshot's table row gets the state before the chunk that contains the snapshot; _outputs_kernel adds the rest.
    continues_ptr: for each batch row, whether it continues the piece of a prompt in the batch row before; may be
    None."""
    pdl_trigger_and_wait(USE_PDL)
    PRODUCT_DTYPE: tl.constexpr = new_ptr.dtype.element_ty
    v_blocks: tl.constexpr = (V_SIZE + BLOCK_V - 1) // BLOCK_V
    head, first = tl.program_id(0) // v_blocks, tl.program_id(1).to(tl.int64)
    pieces = 1
    is_first = True
    if continues_ptr is not None:
        others = first + 1 + tl.arange(0, BLOCK_B)
        goes_on = tl.load(continues_ptr + others, mask=others < batch, other=False).to(tl.int1)
        pieces = 1 + tl.min(tl.where(goes_on, BLOCK_B, tl.arange(0, BLOCK_B)), 0)
        is_first = tl.load(continues_ptr + first) == 0
    if is_first:
        key, value = tl.arange(0, BLOCK_K), tl.program_id(0) % v_blocks * BLOCK_V + tl.arange(0, BLOCK_V)
        order = tl.arange(0, CHUNK_ROWS)
        is_key, is_value = key < K_SIZE, value < V_SIZE
        is_both = is_key[:, None] & is_value[None, :]
        within = key[:, None] * V_SIZE + value[None, :]
        place = head * K_SIZE * V_SIZE + within
        own = state_ptr + tl.load(slots_ptr + first) * HEADS * K_SIZE * V_SIZE
        state = tl.load(own + place, mask=is_both, other=0.0)
        for i in tl.range(0, pieces * chunks, num_stages=STAGES):
            tile = (first * chunks + i) * HEADS + head
            if snapshot_counts_ptr is not None:
                request = first + i // chunks
                here = tl.load(snapshot_counts_ptr + request) - i % chunks * CHUNK_ROWS
                if (here > 0) & (here <= CHUNK_ROWS):
                    mark = state_ptr + tl.load(snapshot_rows_ptr + request) * HEADS * K_SIZE * V_SIZE
                    tl.store(mark + place, state, mask=is_both)
            before = state.to(PRODUCT_DTYPE)
            tl.store(before_ptr + tile * K_SIZE * V_SIZE + within, before, mask=is_both)
            k_place = (tile * CHUNK_ROWS + order)[:, None] * K_SIZE + key[None, :]
            v_place = (tile * CHUNK_ROWS + order)[:, None] * V_SIZE + value[None, :]
            new = tl.load(new_ptr + v_place, mask=is_value[None, :], other=0.0)
            if DELTA_RULE:
                w = tl.load(w_ptr + k_place, mask=is_key[None, :], other=0.0)
                new = new.to(ACC_DTYPE) - tl.dot(w, before, input_precision=PRECISION, out_dtype=ACC_DTYPE)
                new = new.to(PRODUCT_DTYPE)
                tl.store(new_ptr + v_place, new, mask=is_value[None, :])
            k = tl.load(key_ptr + k_place, mask=is_key[None, :], other=0.0)
            whole = tl.load(decay_ptr + tile * CHUNK_ROWS + CHUNK_ROWS - 1)
            state = tl.exp(whole) * state
            state += tl.dot(tl.trans(k), new, input_precision=PRECISION, out_dtype=ACC_DTYPE)
        if tl.load(row_counts_ptr + first) > 0:
            tl.store(own + place, state, mask=is_both)


@kernel
def _outputs_kernel(
    q_ptr, k_ptr, v_ptr, state_ptr, row_counts_ptr, snapshot_counts_ptr, snapshot_rows_ptr, decay_ptr, new_ptr,
    before_ptr, skip_ptr, out_ptr, rows,
    HEADS: tl.constexpr, GROUP_SIZE: tl.constexpr, K_SIZE: tl.constexpr, V_SIZE: tl.constexpr, ACC_DTYPE: tl.constexpr,
    PRECISION: tl.constexpr, CHUNK_ROWS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    STEP_COLUMNS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Computes the outputs of a chunk.  If the chunk contains a snapshot, the kernel also adds the chunk's rows up to
    the snapshot to the state in the snapshot's table row."""
    pdl_trigger_and_wait(USE_PDL)
    PRODUCT_DTYPE: tl.constexpr = new_ptr.dtype.element_ty
    v_blocks: tl.constexpr = (V_SIZE + BLOCK_V - 1) // BLOCK_V
    head, chunk, request = tl.program_id(0) // v_blocks, tl.program_id(1), tl.program_id(2).to(tl.int64)
    row, is_row, exists = _rows_of_chunk(request, chunk, rows, row_counts_ptr, CHUNK_ROWS)
    order, value = tl.arange(0, CHUNK_ROWS), tl.program_id(0) % v_blocks * BLOCK_V + tl.arange(0, BLOCK_V)
    is_value = value < V_SIZE
    tile = (request * tl.num_programs(1) + chunk) * HEADS + head
    decay = tl.load(decay_ptr + tile * CHUNK_ROWS + order)
    of_key = (row * (HEADS // GROUP_SIZE) + head // GROUP_SIZE) * K_SIZE
    scores, out = tl.zeros([CHUNK_ROWS, CHUNK_ROWS], ACC_DTYPE), tl.zeros([CHUNK_ROWS, BLOCK_V], ACC_DTYPE)
    for first in range(0, BLOCK_K, STEP_COLUMNS):
        key = first + tl.arange(0, STEP_COLUMNS)
        is_key, k_place = key < K_SIZE, of_key[:, None] + key[None, :]
        q = tl.load(q_ptr + k_place, mask=is_row[:, None] & is_key[None, :], other=0.0).to(PRODUCT_DTYPE)
        k = tl.load(k_ptr + k_place, mask=(is_row & exists)[:, None] & is_key[None, :], other=0.0).to(PRODUCT_DTYPE)
        state_place = tile * K_SIZE * V_SIZE + key[:, None] * V_SIZE + value[None, :]
        before = tl.load(before_ptr + state_place, mask=is_key[:, None] & is_value[None, :], other=0.0)
        scores += tl.dot(q, tl.trans(k), input_precision=PRECISION, out_dtype=ACC_DTYPE)
        out += tl.dot(q, before, input_precision=PRECISION, out_dtype=ACC_DTYPE)
    seen = order[None, :] <= order[:, None]
    carry = tl.where(seen, tl.exp(tl.where(seen, decay[:, None] - decay[None, :], 0.0)), 0.0)
    new_place = (tile * CHUNK_ROWS + order)[:, None] * V_SIZE + value[None, :]
    new = tl.load(new_ptr + new_place, mask=is_value[None, :], other=0.0)
    out = tl.exp(decay)[:, None] * out
    out += tl.dot((scores * carry).to(PRODUCT_DTYPE), new, input_precision=PRECISION, out_dtype=ACC_DTYPE)
    v_place = (row * HEADS + head)[:, None] * V_SIZE + value[None, :]
    is_out = is_row[:, None] & is_value[None, :]
    if skip_ptr is not None:
        out += tl.load(skip_ptr + head).to(ACC_DTYPE) * tl.load(v_ptr + v_place, mask=is_out, other=0.0).to(ACC_DTYPE)
    tl.store(out_ptr + v_place, out.to(out_ptr.dtype.element_ty), mask=is_out)
    if snapshot_counts_ptr is not None:
        here = tl.load(snapshot_counts_ptr + request) - chunk * CHUNK_ROWS
        if (here > 0) & (here <= CHUNK_ROWS):
            whole = tl.sum(tl.where(order == here - 1, decay, 0.0), 0)
            share = tl.where(order < here, tl.exp(tl.where(order < here, whole - decay, 0.0)), 0.0)
            taken = (share[:, None] * new.to(ACC_DTYPE)).to(PRODUCT_DTYPE)
            state_ptr += (tl.load(snapshot_rows_ptr + request) * HEADS + head) * K_SIZE * V_SIZE
            for first in range(0, BLOCK_K, STEP_COLUMNS):
                key = first + tl.arange(0, STEP_COLUMNS)
                is_both = (key < K_SIZE)[:, None] & is_value[None, :]
                is_key = (is_row & exists)[:, None] & (key < K_SIZE)[None, :]
                k = tl.load(k_ptr + of_key[:, None] + key[None, :], mask=is_key, other=0.0).to(PRODUCT_DTYPE)
                added = tl.dot(tl.trans(k), taken, input_precision=PRECISION, out_dtype=ACC_DTYPE)
                mark = state_ptr + key[:, None] * V_SIZE + value[None, :]
                tl.store(mark, tl.exp(whole) * tl.load(mark, mask=is_both, other=0.0) + added, mask=is_both)


def chain_outputs(
    q: Tensor,
    rows: tuple[Tensor, Tensor, Tensor],
    state: SlotStates,
    path: PathRows,
    skip_weight: Tensor | None,
    is_delta_rule: bool,
) -> Tensor:
    """See ops/states.py.  Tolerance of outputs and states: tree_outputs' times the condition number of a chunk's
    system."""
    k, v, gates = (x.contiguous() for x in rows)
    q = q.contiguous()
    (batch, count, heads, v_size), (k_heads, k_size) = v.shape, k.shape[2:]
    table, slots = state
    out = torch.empty_like(v)
    if not batch or not count:
        return out
    chunks, products = -(-count // CHUNK_ROWS), choose_precision(v, table)
    plan = choose_plan(v_size, products)
    tiles, kept = (batch, chunks, heads), table.new_empty(0, dtype=products.operand_dtype)
    decay = table.new_empty(*tiles, CHUNK_ROWS)
    keys, new = kept.new_empty(*tiles, CHUNK_ROWS, k_size), kept.new_empty(*tiles, CHUNK_ROWS, v_size)
    w = torch.empty_like(keys) if is_delta_rule else None
    before = kept.new_empty(*tiles, k_size, v_size)
    constants = {
        "HEADS": heads,
        "K_SIZE": k_size,
        "V_SIZE": v_size,
        "ACC_DTYPE": acc_dtype(table.dtype),
        "PRECISION": products.precision,
        "CHUNK_ROWS": CHUNK_ROWS,
        "BLOCK_K": max(next_power_of_2(k_size), MIN_BLOCK),
        **pdl_arguments(chip(v)),
    }
    _solve_kernel[heads, chunks, batch](
        *(k, v, gates, path.row_counts, decay, keys, w, new, count),
        GROUP_SIZE=heads // k_heads, DELTA_RULE=is_delta_rule, SOLVE_DTYPE=plan.solve_dtype,
        BLOCK_V=max(next_power_of_2(v_size), MIN_BLOCK), STEP_COLUMNS=STEP_COLUMNS, num_warps=plan.solve_warps,
        **constants,
    )  # fmt: skip
    _states_kernel[heads * -(-v_size // plan.states_v), batch](
        *(table, slots, path.row_counts, path.snapshot_counts, path.snapshot_rows, path.continues_previous),
        *(decay, keys, w, new, before),
        *(batch, chunks),
        DELTA_RULE=is_delta_rule, BLOCK_V=plan.states_v, BLOCK_B=next_power_of_2(batch), STAGES=plan.stages,
        num_warps=plan.states_warps, **constants,
    )  # fmt: skip
    _outputs_kernel[heads * -(-v_size // plan.outputs_v), chunks, batch](
        *(q, k, v, table, path.row_counts, path.snapshot_counts, path.snapshot_rows),
        *(decay, new, before, skip_weight, out, count),
        GROUP_SIZE=heads // k_heads, BLOCK_V=plan.outputs_v, STEP_COLUMNS=STEP_COLUMNS, num_warps=plan.outputs_warps,
        num_stages=2,
        **constants,
    )  # fmt: skip
    return out


class ChainPlan(NamedTuple):
    """Launch parameters.  states_v, outputs_v: columns of a state per program.  stages: chunks whose loads are in
    flight."""

    solve_dtype: object
    solve_warps: int
    states_v: int
    states_warps: int
    stages: int
    outputs_v: int
    outputs_warps: int


def choose_plan(v_size: int, products: ProductPrecision) -> ChainPlan:
    """Chooses the launch parameters.

    With 16-bit operands, a program of _outputs_kernel takes 64 columns even if a head is smaller, so that all operands
    of wgmma have one layout.  With two layouts, ptxas 12.8 drops the first part of an operand
    (tests/kernels/machine_code.py).
    """
    largest = max(next_power_of_2(v_size), MIN_BLOCK)
    if products.operand_dtype.itemsize > 2:
        return ChainPlan(products.operand_type, 4, min(largest, 32), 4, 1, min(largest, 32), 4)
    return ChainPlan(tl.bfloat16, 4, min(largest, 32), 4, 3, 64, 4)
