"""Computes the factors of the rows at one depth of a block draft, for edges with a projection
(edges.py:FactorProjection).

Grid: (requests, tiles of rows, blocks of BLOCK_OUT factor values).  A program multiplies the rows' states and token
embeddings with its part of the projection, adds the hidden state's part, and writes its part of the factors and of the
new states.  No kernel writes the projection, so its first columns are read before the wait for the previous kernel.

The reference is LowRankEdges.factors.  Tolerance: products are summed in float32 (float64 for float64), and each result
is rounded once, to the dtype of token_factors; the reference rounds every operation.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.runtime.jit import kernel
from espalier.kernels.runtime.launch import acc_dtype, chip, next_power_of_2, require
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger, pdl_wait
from espalier.kernels.tree.edges import DepthRows, LowRankEdges

# Factor values per program (a factor has `rank` values), and the smallest rank that tensor cores take.
BLOCK_OUT, MIN_RANK = 16, 16
# The largest rank for which a program has 4 warps.  For larger ranks, a program has 8 warps.
MAX_4_WARP_RANK = 128
# Rows per program.
MIN_TILE_ROWS, MAX_TILE_ROWS = 16, 32


def edge_factors_triton(edges: LowRankEdges, depth: int, rows: DepthRows) -> tuple[Tensor, Tensor | None]:
    """Returns LowRankEdges.factors of the rows of a depth, counted from 0.  The edges must have a projection.
    Raises EspalierError for other shapes or dtypes."""
    projection, before = edges.projection, edges.token_factors
    assert projection is not None
    (batch, num_rows), rank = rows.tokens.shape, before.shape[1]
    num_parts, num_inputs = (3, 2) if projection.is_recurrent else (1, 1)
    hidden_part = projection.hidden_part[:, depth]
    require("edge_factors: hidden_part", hidden_part, (batch, num_parts * rank), before.dtype, before)
    require("edge_factors: weight", projection.weight, (num_parts * rank, num_inputs * rank), before.dtype, before)
    require("edge_factors: tokens", rows.tokens, (batch, num_rows), torch.int64, before)
    if any(value.stride(-1) != 1 for value in (hidden_part, projection.weight, before)):
        raise EspalierError("edge_factors: hidden_part, weight and token_factors must be dense in their last dimension")
    parents, states = rows.parents, rows.states
    if parents is not None and states is not None:
        require("edge_factors: states", states, (batch, -1, rank), before.dtype, before)
        require("edge_factors: parents", parents, (batch, num_rows), torch.int64, before)
        states = states.contiguous()
    factors = before.new_empty(batch, num_rows, rank)
    new_states = before.new_empty(batch, num_rows, rank) if projection.is_recurrent else None
    if not factors.numel():
        return factors, new_states
    tile = min(max(next_power_of_2(num_rows), MIN_TILE_ROWS), MAX_TILE_ROWS)
    block_rank = max(next_power_of_2(rank), MIN_RANK)
    # block_rank (columns per step) is halved until a step's weights and inputs fit in half of the shared memory.
    rank_bytes = (num_parts * num_inputs * BLOCK_OUT + tile) * before.element_size()
    while block_rank > MIN_RANK and block_rank * rank_bytes > chip(before).shared_memory // 2:
        block_rank //= 2
    _edge_factors_kernel[(batch, -(-num_rows // tile), -(-rank // BLOCK_OUT))](
        *(factors, new_states, rows.tokens, *rows.tokens.stride(), before, before.stride(0)),
        *(parents, *((0, 0) if parents is None else parents.stride())),
        *(states, 0 if states is None else states.shape[1], hidden_part, hidden_part.stride(0)),
        *(projection.weight, projection.weight.stride(0), num_rows),
        RANK=rank, ROWS=tile, BLOCK_OUT=BLOCK_OUT, BLOCK_RANK=block_rank, IS_RECURRENT=projection.is_recurrent,
        ACC_DTYPE=acc_dtype(before.dtype), num_warps=4 if rank <= MAX_4_WARP_RANK else 8, **pdl_arguments(chip(before)),
    )  # fmt: skip
    return factors, new_states


@kernel
def _edge_factors_kernel(
    factors_ptr, new_states_ptr, tokens_ptr, tokens_batch_stride, tokens_row_stride, token_factors_ptr,
    token_factors_stride, parents_ptr, parents_batch_stride, parents_row_stride, states_ptr, states_rows,
    hidden_part_ptr, hidden_part_stride, weight_ptr, weight_stride, num_rows,
    RANK: tl.constexpr, ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_RANK: tl.constexpr,
    IS_RECURRENT: tl.constexpr, ACC_DTYPE: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Weights are transposed, [BLOCK_RANK, BLOCK_OUT].  Variables e_* are weights for the embedding, s_* weights for
    the state.  BLOCK_RANK: how many values of an embedding or a state one step multiplies."""
    pdl_trigger(USE_PDL)
    b = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    out = tl.program_id(2) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    column = tl.arange(0, BLOCK_RANK)
    exists, out_exists, inside = row < num_rows, out < RANK, column < RANK
    w_ptrs = weight_ptr + out.to(tl.int64)[None, :] * weight_stride + column[:, None]
    is_weight = inside[:, None] & out_exists[None, :]
    part = RANK * weight_stride
    if IS_RECURRENT:
        s_gate = tl.load(w_ptrs, mask=is_weight, other=0.0)
        s_candidate = tl.load(w_ptrs + part, mask=is_weight, other=0.0)
        s_output = tl.load(w_ptrs + 2 * part, mask=is_weight, other=0.0)
        w_ptrs += RANK
        e_candidate = tl.load(w_ptrs + part, mask=is_weight, other=0.0)
        e_output = tl.load(w_ptrs + 2 * part, mask=is_weight, other=0.0)
    e_gate = tl.load(w_ptrs, mask=is_weight, other=0.0)
    pdl_wait(USE_PDL)
    tokens = tokens_ptr + b * tokens_batch_stride + row * tokens_row_stride
    row_ptrs = token_factors_ptr + tl.maximum(tl.load(tokens, mask=exists, other=0), 0) * token_factors_stride
    embedded = tl.load(row_ptrs[:, None] + column[None, :], mask=inside[None, :], other=0.0)
    hidden_part = hidden_part_ptr + b * hidden_part_stride + out
    gate = tl.load(hidden_part, mask=out_exists, other=0.0).to(ACC_DTYPE)[None, :]
    gate += tl.dot(embedded, e_gate, input_precision="ieee", out_dtype=ACC_DTYPE)
    gate = _add_products(gate, row_ptrs, w_ptrs, out_exists, RANK, BLOCK_RANK, ACC_DTYPE)
    mask = exists[:, None] & out_exists[None, :]
    out_offsets = (b * num_rows + row)[:, None] * RANK + out[None, :]
    if IS_RECURRENT:
        candidate = tl.load(hidden_part + RANK, mask=out_exists, other=0.0).to(ACC_DTYPE)[None, :]
        candidate += tl.dot(embedded, e_candidate, input_precision="ieee", out_dtype=ACC_DTYPE)
        candidate = _add_products(candidate, row_ptrs, w_ptrs + part, out_exists, RANK, BLOCK_RANK, ACC_DTYPE)
        output = tl.load(hidden_part + 2 * RANK, mask=out_exists, other=0.0).to(ACC_DTYPE)[None, :]
        output += tl.dot(embedded, e_output, input_precision="ieee", out_dtype=ACC_DTYPE)
        output = _add_products(output, row_ptrs, w_ptrs + 2 * part, out_exists, RANK, BLOCK_RANK, ACC_DTYPE)
        own_state = tl.zeros([ROWS, BLOCK_OUT], ACC_DTYPE)
        if states_ptr is not None:
            parents = parents_ptr + b * parents_batch_stride + row * parents_row_stride
            state_ptrs = states_ptr + (b * states_rows + tl.load(parents, mask=exists, other=0)) * RANK
            state = tl.load(state_ptrs[:, None] + column[None, :], mask=inside[None, :], other=0.0)
            own_state = tl.load(state_ptrs[:, None] + out[None, :], mask=mask, other=0.0).to(ACC_DTYPE)
            gate += tl.dot(state, s_gate, input_precision="ieee", out_dtype=ACC_DTYPE)
            candidate += tl.dot(state, s_candidate, input_precision="ieee", out_dtype=ACC_DTYPE)
            output += tl.dot(state, s_output, input_precision="ieee", out_dtype=ACC_DTYPE)
            w_ptrs -= RANK
            gate = _add_products(gate, state_ptrs, w_ptrs, out_exists, RANK, BLOCK_RANK, ACC_DTYPE)
            candidate = _add_products(candidate, state_ptrs, w_ptrs + part, out_exists, RANK, BLOCK_RANK, ACC_DTYPE)
            output = _add_products(output, state_ptrs, w_ptrs + 2 * part, out_exists, RANK, BLOCK_RANK, ACC_DTYPE)
        kept_share = _sigmoid(gate)
        new_state = kept_share * own_state + (1 - kept_share) * _tanh(candidate)
        tl.store(new_states_ptr + out_offsets, new_state.to(new_states_ptr.dtype.element_ty), mask=mask)
        factor = _tanh(output)
    else:
        token_factor = tl.load(row_ptrs[:, None] + out[None, :], mask=mask, other=0.0).to(ACC_DTYPE)
        factor = _sigmoid(gate) * token_factor
    tl.store(factors_ptr + out_offsets, factor.to(factors_ptr.dtype.element_ty), mask=mask)


@kernel
def _add_products(
    total, row_ptrs, weight_ptrs, out_exists, RANK: tl.constexpr, BLOCK_RANK: tl.constexpr, ACC_DTYPE: tl.constexpr,
):  # fmt: skip
    """Adds the products of inputs and weights to total [ROWS, BLOCK_OUT], for the columns from BLOCK_RANK on."""
    for start in range(BLOCK_RANK, RANK, BLOCK_RANK):
        column = start + tl.arange(0, BLOCK_RANK)
        inside = column < RANK
        x = tl.load(row_ptrs[:, None] + column[None, :], mask=inside[None, :], other=0.0)
        w = tl.load(weight_ptrs + start, mask=inside[:, None] & out_exists[None, :], other=0.0)
        total += tl.dot(x, w, input_precision="ieee", out_dtype=ACC_DTYPE)
    return total


@kernel
def _sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@kernel
def _tanh(x):
    return 2 * _sigmoid(2 * x) - 1
