"""The factors of a depth's rows, for edges that read more than the token before (edges.py:FactorProjection).

One program per (request, tile of rows, block of the rank).  It multiplies the rows' states and embeddings with its
columns of the projection, adds what the hidden state gives, and writes its part of the factors and of the new states.

The reference is LowRankEdges.factors.  Tolerance: products are summed in float32 (float64 for float64), and each result
is rounded once, to the dtype of `before`; the reference rounds every operation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.runtime.launch import chip, exact_type, kernel, power_of_two, require
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger, pdl_wait
from espalier.kernels.tree.edges import LowRankEdges, Rows

if TYPE_CHECKING:
    import triton.language as tl

# Numbers of a program's block of the rank, and of the inputs that it multiplies in a step.  The least is what tensor
# cores take.
BLOCK_OUT, BLOCK_IN, LEAST = 16, 64, 16
# Rows of a program.
LEAST_ROWS, MOST_ROWS = 16, 32


def edge_factors_triton(edges: LowRankEdges, depth: int, rows: Rows) -> tuple[Tensor, Tensor | None]:
    """As LowRankEdges.factors, of edges with a projection.  Raises EspalierError for other shapes and dtypes."""
    projection, before = edges.projection, edges.before
    assert projection is not None
    (batch, num_rows), rank = rows.tokens.shape, before.shape[1]
    parts, inputs = (3, 2) if projection.is_recurrent else (1, 1)
    of_hidden = projection.of_hidden[:, depth]
    require("edge_factors: of_hidden", of_hidden, (batch, parts * rank), before.dtype, before)
    require("edge_factors: weight", projection.weight, (parts * rank, inputs * rank), before.dtype, before)
    require("edge_factors: tokens", rows.tokens, (batch, num_rows), torch.int64, before)
    if any(value.stride(-1) != 1 for value in (of_hidden, projection.weight, before)):
        raise EspalierError("edge_factors: of_hidden, weight and before must be dense in their last dimension")
    parents, states = rows.parents, rows.states
    if parents is not None and states is not None:
        require("edge_factors: states", states, (batch, -1, rank), before.dtype, before)
        require("edge_factors: parents", parents, (batch, num_rows), torch.int64, before)
        states = states.contiguous()
    factors = before.new_empty(batch, num_rows, rank)
    made = before.new_empty(batch, num_rows, rank) if projection.is_recurrent else None
    if not factors.numel():
        return factors, made
    tile = min(max(power_of_two(num_rows), LEAST_ROWS), MOST_ROWS)
    _edge_factors_kernel[(batch, -(-num_rows // tile), -(-rank // BLOCK_OUT))](
        *(factors, made, rows.tokens, *rows.tokens.stride(), before, before.stride(0)),
        *(parents, *((0, 0) if parents is None else parents.stride())),
        *(states, 0 if states is None else states.shape[1], of_hidden, of_hidden.stride(0)),
        *(projection.weight, projection.weight.stride(0), num_rows),
        RANK=rank,
        ROWS=tile,
        BLOCK_OUT=BLOCK_OUT,
        BLOCK_IN=min(max(power_of_two(rank), LEAST), BLOCK_IN),
        IS_RECURRENT=projection.is_recurrent,
        EXACT=exact_type(before.dtype),
        num_warps=4,
        **pdl_arguments(chip(before)),
    )
    return factors, made


@kernel
def _edge_factors_kernel(
    factors_ptr, made_ptr, tokens_ptr, tokens_batch_stride, tokens_row_stride, before_ptr, before_stride,
    parents_ptr, parents_batch_stride, parents_row_stride, states_ptr, states_rows, of_hidden_ptr, of_hidden_stride,
    weight_ptr, weight_stride, num_rows,
    RANK: tl.constexpr, ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr,
    IS_RECURRENT: tl.constexpr, EXACT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """p [ROWS, BLOCK_OUT] is a part of the projection.  Inputs are the states, if there are any, and the embeddings."""
    pdl_trigger(DEPENDENT)
    b = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    out = tl.program_id(2) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    exists, is_out = row < num_rows, out < RANK
    pdl_wait(DEPENDENT)
    token = tl.load(tokens_ptr + b * tokens_batch_stride + row * tokens_row_stride, mask=exists, other=0)
    of_row = before_ptr + tl.maximum(token, 0) * before_stride
    of_hidden = of_hidden_ptr + b * of_hidden_stride + out
    weight = weight_ptr + out.to(tl.int64) * weight_stride
    written = (b * num_rows + row)[:, None] * RANK + out[None, :]
    mask = exists[:, None] & is_out[None, :]
    embedded = tl.load(of_row[:, None] + out[None, :], mask=mask, other=0.0).to(EXACT)
    if not IS_RECURRENT:
        gate = _projected(of_hidden, of_row, weight, is_out, RANK, ROWS, BLOCK_OUT, BLOCK_IN, EXACT)
        factor = _sigmoid(gate) * embedded
        tl.store(factors_ptr + written, factor.to(factors_ptr.dtype.element_ty), mask=mask)
    else:
        from_embedding = weight + RANK
        part = RANK * weight_stride
        gate = _projected(of_hidden, of_row, from_embedding, is_out, RANK, ROWS, BLOCK_OUT, BLOCK_IN, EXACT)
        candidate = _projected(
            of_hidden + RANK, of_row, from_embedding + part, is_out, RANK, ROWS, BLOCK_OUT, BLOCK_IN, EXACT
        )
        output = _projected(
            of_hidden + 2 * RANK, of_row, from_embedding + 2 * part, is_out, RANK, ROWS, BLOCK_OUT, BLOCK_IN, EXACT
        )
        state = tl.zeros([ROWS, BLOCK_OUT], EXACT)
        if states_ptr is not None:
            parent = tl.load(parents_ptr + b * parents_batch_stride + row * parents_row_stride, mask=exists, other=0)
            of_state = states_ptr + (b * states_rows + parent) * RANK
            state = tl.load(of_state[:, None] + out[None, :], mask=mask, other=0.0).to(EXACT)
            gate += _product(of_state, weight, is_out, RANK, ROWS, BLOCK_OUT, BLOCK_IN, EXACT)
            candidate += _product(of_state, weight + part, is_out, RANK, ROWS, BLOCK_OUT, BLOCK_IN, EXACT)
            output += _product(of_state, weight + 2 * part, is_out, RANK, ROWS, BLOCK_OUT, BLOCK_IN, EXACT)
        kept = _sigmoid(gate)
        made = kept * state + (1 - kept) * _tanh(candidate)
        tl.store(made_ptr + written, made.to(made_ptr.dtype.element_ty), mask=mask)
        tl.store(factors_ptr + written, _tanh(output).to(factors_ptr.dtype.element_ty), mask=mask)


@kernel
def _projected(
    of_hidden, of_row, weight, is_out,
    RANK: tl.constexpr, ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """What the hidden state and the embeddings give: [ROWS, BLOCK_OUT]."""
    given = tl.load(of_hidden, mask=is_out, other=0.0).to(EXACT)
    return _product(of_row, weight, is_out, RANK, ROWS, BLOCK_OUT, BLOCK_IN, EXACT) + given[None, :]


@kernel
def _product(
    of_row, weight, is_out,
    RANK: tl.constexpr, ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Rows [ROWS] of RANK numbers times the transpose of rows `weight` [BLOCK_OUT]: pointers to their first numbers."""
    total = tl.zeros([ROWS, BLOCK_OUT], EXACT)
    for start in range(0, RANK, BLOCK_IN):
        place = start + tl.arange(0, BLOCK_IN)
        inside = place < RANK
        x = tl.load(of_row[:, None] + place[None, :], mask=inside[None, :], other=0.0)
        w = tl.load(weight[None, :] + place[:, None], mask=inside[:, None] & is_out[None, :], other=0.0)
        total = tl.dot(x, w, total, input_precision="ieee", out_dtype=EXACT)
    return total


@kernel
def _sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@kernel
def _tanh(x):
    return 2 * _sigmoid(2 * x) - 1
