"""The expert product of a mixture of experts: each row goes through the gated MLPs of its K experts.

The product has three launches.  `_sort_pairs_kernel` sorts the N · K pairs (row, choice) by expert, and cuts each
expert's pairs into tiles; a launch before it counts many pairs.  `_gated_kernel` computes the activation of each tile,
and `_down_kernel` the weighted results.  Both have one program for each tile and block of outputs, and read only
experts that have rows.  Grids depend only on N, K and the number of experts, so the launches can be captured; programs
without a tile return at once.  The experts of one row differ, so for a single row each pair is a tile, and nothing is
sorted.  `_down_kernel` prefetches its first weights while `_gated_kernel` runs.

For few rows the tiles of shared experts run in the same two launches (experts_tiles.py).  On Hopper, few pairs with
4-bit experts use other kernels for these two (hopper/quantised_products.py), with the same bits.

This file does not sum the K results of a row.  The next norm adds them in float32: first by choice, then the pieces of
the shared experts by column.  The order is the same in every batch.  Below, a pair's place is its index in the sorted
order; without a sort, place and pair are the same.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.hopper.quantised_products import is_hopper_experts, launch_down, launch_gated
from espalier.kernels.layers.activation import apply_activation
from espalier.kernels.layers.experts_plan import ExpertsPlan, ExpertsShape, ProductPlan, launch_options, plan_for
from espalier.kernels.layers.experts_tiles import (
    PREFETCHED_STEPS,
    ExpertTiles,
    make_tiles,
    prefetch_piece,
    require_shared,
    rows_of_tile,
    tile_and_expert,
)
from espalier.kernels.layers.linear import gate_and_up, weight_rows
from espalier.kernels.layers.linear_plans import block_rows
from espalier.kernels.layers.linear_quantised import MIN_PREFETCHED_LINES, kernel_inputs, stored_values
from espalier.kernels.layers.quantised import InputRows, QuantisedMatrix
from espalier.kernels.layers.quantised_tile import format_constants, kernel_matrix, prefetch_codes, quantised_dot
from espalier.kernels.ops.activation import SILU, Activation, require_halves
from espalier.kernels.ops.experts import ExpertBiases, ExpertMatrix, SharedExperts
from espalier.kernels.runtime.jit import kernel
from espalier.kernels.runtime.launch import chip, exact_type, require
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger, pdl_wait, prefetch


@kernel
def dense_gate_up(
    x_ptrs, gate_ptrs, up_ptrs, inside, num_in,
    ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, EVEN_IN: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """(gate, up) [BLOCK_OUT, ROWS]: two products with the same rows of x [ROWS, num_in].  Rows not `inside` are zeros.

    The pointers point to the first BLOCK_IN columns: x_ptrs [BLOCK_IN, ROWS], the others [BLOCK_OUT, BLOCK_IN].
    """
    ks = tl.arange(0, BLOCK_IN)
    gate = tl.zeros((BLOCK_OUT, ROWS), EXACT)
    up = tl.zeros((BLOCK_OUT, ROWS), EXACT)
    for k in range(0, num_in, BLOCK_IN):
        # Weights are loaded first, because their addresses do not depend on the rows, which are still being loaded.
        if EVEN_IN:
            w_gate = tl.load(gate_ptrs)
            w_up = tl.load(up_ptrs)
            x = tl.load(x_ptrs, mask=inside[None, :], other=0.0)
        else:
            left = num_in - k
            w_gate = tl.load(gate_ptrs, mask=ks[None, :] < left, other=0.0)
            w_up = tl.load(up_ptrs, mask=ks[None, :] < left, other=0.0)
            x = tl.load(x_ptrs, mask=inside[None, :] & (ks[:, None] < left), other=0.0)
        gate = tl.dot(w_gate, x, gate, input_precision="ieee", out_dtype=EXACT)
        up = tl.dot(w_up, x, up, input_precision="ieee", out_dtype=EXACT)
        gate_ptrs += BLOCK_IN
        up_ptrs += BLOCK_IN
        x_ptrs += BLOCK_IN
    return gate, up


@kernel
def dense_product(
    x_ptrs, w_ptrs, inside, num_in, k_end,
    ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, EVEN_IN: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """[BLOCK_OUT, ROWS]: one product, with arguments as in dense_gate_up.  k_end: num_in, or 0 for no product."""
    ks = tl.arange(0, BLOCK_IN)
    acc = tl.zeros((BLOCK_OUT, ROWS), EXACT)
    for k in range(0, k_end, BLOCK_IN):
        if EVEN_IN:
            w = tl.load(w_ptrs)
            x = tl.load(x_ptrs, mask=inside[None, :], other=0.0)
        else:
            left = num_in - k
            w = tl.load(w_ptrs, mask=ks[None, :] < left, other=0.0)
            x = tl.load(x_ptrs, mask=inside[None, :] & (ks[:, None] < left), other=0.0)
        acc = tl.dot(w, x, acc, input_precision="ieee", out_dtype=EXACT)
        w_ptrs += BLOCK_IN
        x_ptrs += BLOCK_IN
    return acc


@kernel
def _dense_gate_and_up(
    x_ptrs, gate_ptrs, up_at, inside, num_in,
    HALVES: tl.constexpr, ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, EVEN_IN: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """(gate, up), see dense_gate_up.  If HALVES is 1 there is no gate matrix, and both are up."""
    if HALVES == 1:
        up = dense_product(x_ptrs, gate_ptrs, inside, num_in, num_in, ROWS, BLOCK_OUT, BLOCK_IN, EVEN_IN, EXACT)
        gate = up
    else:
        up_ptrs = gate_ptrs + up_at
        gate, up = dense_gate_up(x_ptrs, gate_ptrs, up_ptrs, inside, num_in, ROWS, BLOCK_OUT, BLOCK_IN, EVEN_IN, EXACT)
    return gate, up


DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@kernel
def _gated_kernel(
    x_ptr, x_scales_ptr, w_ptr, scales_ptr, zeros_ptr, bias_ptr, shared_ptr,
    order_ptr, ends_ptr, tile_experts_ptr, tile_begins_ptr, live_ptr, out_ptr,
    num_out, num_in, x_stride, num_rows, top_k, num_experts,
    CODE: tl.constexpr, GROUP: tl.constexpr, ROW_BLOCK: tl.constexpr, INPUT_GROUP: tl.constexpr,
    KIND: tl.constexpr, ALPHA: tl.constexpr, UP_OFFSET: tl.constexpr, LIMIT: tl.constexpr, SHARED: tl.constexpr,
    HALVES: tl.constexpr, AHEAD: tl.constexpr, SORTED: tl.constexpr, LIVE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, EVEN_IN: tl.constexpr, EXACT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Write the activations of all pairs and pieces, in order of place, to out [(K + SHARED) · N, num_out].

    w: [E, HALVES · num_out, num_in]; bias: [E, HALVES · num_out].  EVEN_IN: BLOCK_IN divides num_in.
    shared: [2 · SHARED · num_out, num_in]; its tiles prefetch AHEAD columns.  None if SHARED is 0.
    CODE: None for dense experts, which have no scales and zeros.  Else CODE, GROUP, ROW_BLOCK and INPUT_GROUP are those
    of quantised_dot.
    """
    column, ks = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT), tl.arange(0, BLOCK_IN)
    if SHARED > 0 and DEPENDENT:
        prefetch_piece(shared_ptr, column, num_out, num_in, SHARED, BLOCK_OUT, AHEAD)
    # The trigger comes after the routing is complete, because _down_kernel reads the experts before it waits.
    pdl_wait(DEPENDENT)
    pdl_trigger(DEPENDENT)
    tile, expert = tile_and_expert(tile_experts_ptr, live_ptr, top_k, num_experts, SHARED, SORTED, LIVE)
    # These loads stand before the branch, which needs `expert`, so that they do not wait for it.
    place, inside, row, _ = rows_of_tile(
        order_ptr, ends_ptr, tile_begins_ptr, tile, tl.maximum(expert, 0), num_rows, top_k, SHARED, SORTED, ROWS
    )
    if (expert < 0) | (expert == num_experts):
        return
    row = row.to(tl.int64)
    # Columns past the end become the last column; their results are not stored.
    w_row = expert * HALVES * num_out + tl.minimum(column, num_out - 1)
    if bias_ptr is not None and (DEPENDENT and not SORTED):
        # If each pair is a tile, there are too few programs to hide the latency of the biases.
        prefetch(bias_ptr + w_row)
        prefetch(bias_ptr + w_row + (HALVES - 1) * num_out)
    if CODE is None:
        up_at = num_out.to(tl.int64) * num_in
        if SHARED > 0:
            piece_at = (tile + SHARED).to(tl.int64) * num_out * num_in
            w_ptr = tl.where(tile < 0, shared_ptr + piece_at, w_ptr)
            up_at = tl.where(tile < 0, up_at * SHARED, up_at)
        gate_ptrs = w_ptr + w_row[:, None] * num_in + ks[None, :]
        x_ptrs = x_ptr + row[None, :] * x_stride + ks[:, None]
        gate, up = _dense_gate_and_up(
            x_ptrs, gate_ptrs, up_at, inside, num_in, HALVES, ROWS, BLOCK_OUT, BLOCK_IN, EVEN_IN, EXACT
        )
    else:
        x_scale_ptrs = None
        if x_scales_ptr is not None:
            x_scale_ptrs = x_scales_ptr + row * (tl.cdiv(num_in, INPUT_GROUP) if INPUT_GROUP > 0 else 1)
        # One product has rows of gate and of up, so that the pipeline fills only once.
        both = expert * HALVES * num_out + weight_rows(num_out, HALVES * BLOCK_OUT, False, HALVES == 2)
        acc = quantised_dot(
            w_ptr, scales_ptr, zeros_ptr, both, x_ptr + row * x_stride, x_scale_ptrs, inside, num_in, 0, num_in,
            CODE, GROUP, ROW_BLOCK, INPUT_GROUP, ROWS, HALVES * BLOCK_OUT, BLOCK_IN, EVEN_IN,
        )  # fmt: skip
        gate, up = gate_and_up(acc, ROWS, 2 * BLOCK_OUT) if HALVES == 2 else (acc, acc)
    if bias_ptr is not None:
        gate += tl.load(bias_ptr + w_row).to(EXACT)[:, None]
        up += tl.load(bias_ptr + w_row + (HALVES - 1) * num_out).to(EXACT)[:, None]
    # Gate and up are rounded before the activation, as the output of a linear layer is.
    out_type = out_ptr.dtype.element_ty
    gate, up = gate.to(out_type).to(EXACT), up.to(out_type).to(EXACT)
    out = apply_activation(gate, up, KIND, ALPHA, UP_OFFSET, LIMIT).to(out_type)
    out_ptrs = out_ptr + place.to(tl.int64)[:, None] * num_out + column[None, :]
    tl.store(out_ptrs, tl.trans(out), mask=inside[:, None] & (column[None, :] < num_out))


@kernel
def _down_kernel(
    x_ptr, x_scales_ptr, w_ptr, scales_ptr, zeros_ptr, bias_ptr, shared_ptr, weights_ptr,
    order_ptr, ends_ptr, tile_experts_ptr, tile_begins_ptr, live_ptr, out_ptr,
    num_out, num_in, num_rows, top_k, num_experts,
    CODE: tl.constexpr, GROUP: tl.constexpr, ROW_BLOCK: tl.constexpr, INPUT_GROUP: tl.constexpr,
    SHARED: tl.constexpr, SORTED: tl.constexpr, LIVE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, EVEN_IN: tl.constexpr, EXACT: tl.constexpr,
    PREFETCHED_LINES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Write weight · (x · wᵀ + bias [E, num_out]) to out [K + SHARED, N, num_out], and 0 for rows without an expert.

    x: [(K + SHARED) · N, num_in], in order of place.  EVEN_IN: BLOCK_IN divides num_in.  CODE: as in _gated_kernel.
    shared: [num_out, SHARED · num_in].  The weight of its pieces is 1.
    PREFETCHED_LINES: as in _linear_quantised_kernel.
    """
    pdl_trigger(DEPENDENT)
    tile, expert = tile_and_expert(tile_experts_ptr, live_ptr, top_k, num_experts, SHARED, SORTED, LIVE)
    column, ks = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT), tl.arange(0, BLOCK_IN)
    w_row = tl.maximum(tl.minimum(expert, num_experts - 1), 0) * num_out + tl.minimum(column, num_out - 1)
    w_stride = num_in
    if SHARED > 0:
        w_ptr = tl.where(tile < 0, shared_ptr + (tile + SHARED).to(tl.int64) * num_in, w_ptr)
        w_stride = tl.where(tile < 0, num_in * SHARED, num_in)
    if CODE is None and (DEPENDENT and BLOCK_IN >= 64):
        # An L2 line of 128 bytes holds 64 two-byte numbers, and needs one prefetch.
        lines = tl.arange(0, BLOCK_IN // 64) * 64
        prefetch(w_ptr + w_row[:, None] * w_stride + tl.minimum(lines, num_in - 1)[None, :])
    if bias_ptr is not None and (DEPENDENT and not SORTED):
        prefetch(bias_ptr + w_row)
    if CODE is not None and DEPENDENT:
        prefetch_codes(w_ptr, w_row, 0, num_in, num_in, CODE, PREFETCHED_LINES)
    pdl_wait(DEPENDENT)
    place, inside, row, part = rows_of_tile(
        order_ptr, ends_ptr, tile_begins_ptr, tile, tl.maximum(expert, 0), num_rows, top_k, SHARED, SORTED, ROWS
    )
    if expert < 0:
        return
    # Rows without an expert take no steps, because _gated_kernel writes nothing to their x.
    k_end = tl.where(expert == num_experts, 0, num_in)
    if CODE is None:
        w_ptrs = w_ptr + w_row[:, None] * w_stride + ks[None, :]
        x_ptrs = x_ptr + place.to(tl.int64)[None, :] * num_in + ks[:, None]
        acc = dense_product(x_ptrs, w_ptrs, inside, num_in, k_end, ROWS, BLOCK_OUT, BLOCK_IN, EVEN_IN, EXACT)
    else:
        x_row = place.to(tl.int64)
        x_scale_ptrs = None
        if x_scales_ptr is not None:
            x_scale_ptrs = x_scales_ptr + x_row * (tl.cdiv(num_in, INPUT_GROUP) if INPUT_GROUP > 0 else 1)
        acc = quantised_dot(
            w_ptr, scales_ptr, zeros_ptr, w_row, x_ptr + x_row * num_in, x_scale_ptrs, inside, num_in, 0, k_end,
            CODE, GROUP, ROW_BLOCK, INPUT_GROUP, ROWS, BLOCK_OUT, BLOCK_IN, EVEN_IN,
        )  # fmt: skip
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + w_row).to(EXACT)[:, None]
    weight = tl.load(weights_ptr + row * top_k + part, mask=inside & (part < top_k), other=1.0)
    # tl.where instead of a product with 0: the weight of a row without an expert may be NaN.
    acc = tl.where(expert == num_experts, 0.0, acc * weight[None, :])
    out_row = part.to(tl.int64) * num_rows + row
    out_ptrs = out_ptr + out_row[:, None] * num_out + column[None, :]
    tl.store(out_ptrs, tl.trans(acc), mask=inside[:, None] & (column[None, :] < num_out))


def grouped_experts(
    x: InputRows,
    gate_up: ExpertMatrix,
    down: ExpertMatrix,
    ids: Tensor,
    weights: Tensor,
    live: Tensor | None = None,
    biases: ExpertBiases | None = None,
    activation: Activation = SILU,
    extra: int = 0,
    shared: SharedExperts | None = None,
    plan: ExpertsPlan | None = None,
) -> Tensor:
    """See ops/experts.py.  x is bfloat16, float16, float32 (IEEE products) or float64; weights and biases contiguous.

    With one plan, the bits of a row depend neither on the other rows nor on their number.
    Raises EspalierError on other shapes, dtypes or strides.
    """
    num_rows, hidden = stored_values(x).shape
    _require(x, gate_up, down, ids, weights, biases, activation)
    gate_up_bias, down_bias = (None, None) if biases is None else (biases.gate_up, biases.down)
    num_experts, inner, top_k = gate_up.shape[0], down.shape[2], ids.shape[1]
    if shared is not None:
        is_plain = isinstance(gate_up, Tensor) and biases is None and activation.is_silu
        require_shared(shared, stored_values(x), inner, is_plain)
    if weights.numel() * hidden == 0:
        pieces = 0 if shared is None else shared.pieces(inner)
        return weights.new_empty(top_k + pieces + extra, num_rows, hidden)
    if plan is None:
        shape = ExpertsShape(num_experts, top_k, hidden, inner)
        plan = plan_for(shape, num_rows, x.dtype, chip(ids), (gate_up, down))
    tiles = make_tiles(ids, live, num_experts, plan.rows)
    gated = gated_triton(x, gate_up, tiles, top_k, plan.gated, gate_up_bias, activation, shared)
    return down_triton(gated, down, weights, tiles, plan.down, down_bias, extra, shared)


def gated_triton(
    x: InputRows,
    gate_up: ExpertMatrix,
    tiles: ExpertTiles,
    top_k: int,
    plan: ProductPlan,
    bias: Tensor | None = None,
    activation: Activation = SILU,
    shared: SharedExperts | None = None,
) -> Tensor:
    """Return the activation of each pair and piece, in order of place: [N·(K + S), I]."""
    num_rows, (num_experts, wide, hidden), halves = len(x), gate_up.shape, activation.halves
    inner = wide // halves
    operands, constants = _operands(x, gate_up)
    pieces = 0 if shared is None else shared.pieces(inner)
    out = torch.empty(num_rows * (top_k + pieces), inner, dtype=x.dtype, device=tiles.experts.device)
    grid = -(-inner // plan.block_out), pieces + len(tiles.experts)
    if (
        isinstance(gate_up, QuantisedMatrix)
        and halves == 2
        and is_hopper_experts(operands[0], gate_up, tiles, plan, 2, chip(out))
    ):
        launch_gated(operands[0], gate_up, bias, tiles, out, top_k, activation, grid, chip(out))
        return out
    _gated_kernel[grid](
        *(*operands, bias, None if shared is None else shared.gate_up, *tiles.pointers),
        *(out, inner, hidden, operands[0].stride(0), num_rows, top_k, num_experts),
        **constants,
        **activation.constants,
        HALVES=halves,
        AHEAD=PREFETCHED_STEPS * max(plan.block_in, 64),
        **_options(x.dtype, gate_up, tiles, plan, halves, pieces, grid),
    )
    return out


def down_triton(
    gated: Tensor,
    down: ExpertMatrix,
    weights: Tensor,
    tiles: ExpertTiles,
    plan: ProductPlan,
    bias: Tensor | None = None,
    extra: int = 0,
    shared: SharedExperts | None = None,
) -> Tensor:
    """Return parts [K + S + extra, N, H], of which the last `extra` are not written.  gated: from gated_triton."""
    num_experts, hidden, inner = down.shape
    num_rows, top_k = weights.shape
    pieces = 0 if shared is None else shared.pieces(inner)
    parts = weights.new_empty(top_k + pieces + extra, num_rows, hidden)
    operands, constants = _operands(gated, down)
    grid = -(-hidden // plan.block_out), pieces + len(tiles.experts)
    if isinstance(down, QuantisedMatrix) and is_hopper_experts(operands[0], down, tiles, plan, 1, chip(parts)):
        launch_down(operands[0], down, bias, weights.contiguous(), tiles, parts, grid, chip(parts))
        return parts
    _down_kernel[grid](
        *(*operands, bias, None if shared is None else shared.down, weights.contiguous(), *tiles.pointers),
        *(parts, hidden, inner, num_rows, top_k, num_experts),
        **constants,
        PREFETCHED_LINES=MIN_PREFETCHED_LINES,
        **_options(gated.dtype, down, tiles, plan, 1, pieces, grid),
    )
    return parts


def _operands(
    x: InputRows, weight: ExpertMatrix
) -> tuple[tuple[Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None], dict[str, Any]]:
    """(the first arguments: x, its scales, w, its scales and zeros; quantised_dot's constexpr arguments)."""
    if isinstance(weight, Tensor):
        assert isinstance(x, Tensor)
        x = x if x.stride(1) == 1 else x.contiguous()
        return (x, None, weight, None, None), {"CODE": None, "GROUP": 0, "ROW_BLOCK": 1, "INPUT_GROUP": 0}
    inputs, scales = kernel_inputs(x, weight)
    return (inputs, scales, *kernel_matrix(weight)), format_constants(weight)


def _options(
    dtype: torch.dtype,
    weight: ExpertMatrix,
    tiles: ExpertTiles,
    plan: ProductPlan,
    matrices: int,
    pieces: int,
    grid: Any,
) -> dict[str, Any]:
    """Constexpr arguments and launch options.  matrices: of a program, 2 for gate and up, 1 for up alone or down."""
    gpu = chip(tiles.experts)
    if isinstance(weight, Tensor):
        stages = plan.fitting_stages(gpu, matrices, tiles.rows, weight.itemsize)
        if pieces:
            stages = plan.one_wave_stages(gpu, stages, matrices, tiles.rows, weight.itemsize, grid[0] * grid[1])
        own: dict[str, Any] = {"BLOCK_IN": plan.block_in, "num_stages": stages}
    else:
        own = launch_options(plan, weight, matrices, tiles.rows, gpu)
    return own | {
        "SHARED": pieces,
        "SORTED": tiles.rows > 1,
        "LIVE": tiles.live is not None,
        "ROWS": block_rows(tiles.rows),
        "BLOCK_OUT": plan.block_out,
        "EVEN_IN": weight.shape[2] % own["BLOCK_IN"] == 0,
        "EXACT": exact_type(dtype),
        "num_warps": plan.warps,
        **pdl_arguments(gpu),
    }


def _require(
    x: InputRows,
    gate_up: ExpertMatrix,
    down: ExpertMatrix,
    ids: Tensor,
    weights: Tensor,
    biases: ExpertBiases | None,
    activation: Activation,
) -> None:
    inner = require_halves(gate_up.shape[1], activation)
    (num_rows, hidden), values = stored_values(x).shape, stored_values(x)
    exact = torch.promote_types(x.dtype, torch.float32)
    contiguous = []
    for name, matrix, shape in (
        ("gate_up", gate_up, (-1, gate_up.shape[1], hidden)),
        ("down", down, (gate_up.shape[0], hidden, inner)),
    ):
        if isinstance(matrix, Tensor):
            require(f"grouped_experts: {name}", matrix, shape, x.dtype, values)
            contiguous.append(matrix)
        else:
            columns = shape[2] if matrix.code == "fp8" else shape[2] // 2
            require(f"grouped_experts: codes of {name}", matrix.codes, (*shape[:2], columns), None, values)
            contiguous += matrix.tensors
    require("grouped_experts: ids", ids, (num_rows, -1), torch.int64, values)
    require("grouped_experts: weights", weights, tuple(ids.shape), exact, values)
    if biases is not None:
        require("grouped_experts: biases of gate_up", biases.gate_up, tuple(gate_up.shape[:2]), x.dtype, values)
        require("grouped_experts: biases of down", biases.down, tuple(down.shape[:2]), x.dtype, values)
        contiguous += [biases.gate_up, biases.down]
    if x.dtype not in DTYPES or not all(tensor.is_contiguous() for tensor in contiguous):
        raise EspalierError(
            f"grouped_experts: the Triton kernel takes contiguous experts of a floating-point dtype of 2 to 8 bytes, "
            f"but got {x.dtype} with strides {[tensor.stride() for tensor in contiguous]}: use the reference"
        )
