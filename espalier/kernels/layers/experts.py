"""The expert product of a mixture of experts: each row goes through the gated MLPs of its K experts.

The product usually has three launches.  `_sort_pairs_kernel` sorts the N · K pairs (row, choice) by expert, and cuts
each expert's pairs into tiles.  If there are many pairs, a launch before it counts the pairs of each expert.
`_gated_kernel` computes the activation of each tile, and `_down_kernel` the weighted results.  Both kernels have one
program for each tile and block of outputs, and read only experts that have rows.  Grids depend only on N, K and the
number of experts, so CUDA graphs can capture the launches.  Programs without a tile return at once.  The experts of one
row differ, so for a single row each pair is a tile, and nothing is sorted.  `_down_kernel` prefetches its first weights
while `_gated_kernel` runs.

For few rows the tiles of shared experts run in the same two launches (experts_tiles.py).  On Hopper, few pairs with
4-bit experts run in the kernels of hopper/quantised_products.py, with the same bits.

This file does not sum the K results of a row.  The next norm adds them in float32: first the results of choices 0 to
K - 1, then those of the shared experts' pieces.  The order is the same in every batch.  In this file, the place of a
pair is its index in the sorted order.  Without a sort, place and pair are the same number.
"""

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.hopper.plans import supports_hopper_product
from espalier.kernels.hopper.quantised_products import (
    hopper_down_kernel,
    hopper_gate_up_kernel,
    nibble_launch_options,
    weight_pointers,
)
from espalier.kernels.layers.activation import apply_activation
from espalier.kernels.layers.experts_plan import (
    ExpertsPlan,
    ExpertsShape,
    ProductPlan,
    choose_experts_plan,
    quantised_launch_options,
)
from espalier.kernels.layers.experts_tiles import (
    PREFETCHED_STEPS,
    ExpertTiles,
    check_shared_experts,
    make_expert_tiles,
    prefetch_shared_piece,
    rows_of_tile,
    tile_and_expert,
)
from espalier.kernels.layers.linear import split_gate_and_up, weight_rows
from espalier.kernels.layers.linear_plans import block_rows
from espalier.kernels.layers.linear_quantised import MIN_PREFETCHED_LINES, input_values, kernel_inputs
from espalier.kernels.layers.quantised import InputRows, QuantisedMatrix
from espalier.kernels.layers.quantised_tile import format_constants, kernel_matrix, prefetch_codes, quantised_dot
from espalier.kernels.ops.activation import SILU, Activation, num_up_columns
from espalier.kernels.ops.experts import ExpertBiases, ExpertMatrix, SharedExperts
from espalier.kernels.runtime.jit import kernel
from espalier.kernels.runtime.launch import acc_dtype, chip, require
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger, pdl_wait, prefetch


@kernel
def dense_gate_and_up(
    x_ptrs, gate_ptrs, up_offset, row_exists, num_in,
    NUM_MATRICES: tl.constexpr, ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr,
    EVEN_IN: tl.constexpr, ACC_DTYPE: tl.constexpr,
):  # fmt: skip
    """Returns (gate, up), [BLOCK_OUT, ROWS] each: the products with rows of x [ROWS, num_in].

    x_ptrs [BLOCK_IN, ROWS] and gate_ptrs [BLOCK_OUT, BLOCK_IN] point to the first BLOCK_IN columns.  up_offset: the
    distance from the pointer to a value of gate to the pointer to the same value of up.  If NUM_MATRICES is 1, there is
    no gate matrix, and gate is up.
    """
    if NUM_MATRICES == 1:
        up = dense_product(x_ptrs, gate_ptrs, row_exists, num_in, num_in, ROWS, BLOCK_OUT, BLOCK_IN, EVEN_IN, ACC_DTYPE)
        gate = up
    else:
        ks, up_ptrs = tl.arange(0, BLOCK_IN), gate_ptrs + up_offset
        gate, up = tl.zeros((BLOCK_OUT, ROWS), ACC_DTYPE), tl.zeros((BLOCK_OUT, ROWS), ACC_DTYPE)
        for k in range(0, num_in, BLOCK_IN):
            # Weights are loaded first, because the addresses of inputs must wait for row numbers.
            if EVEN_IN:
                w_gate = tl.load(gate_ptrs)
                w_up = tl.load(up_ptrs)
                x = tl.load(x_ptrs, mask=row_exists[None, :], other=0.0)
            else:
                remaining = num_in - k
                w_gate = tl.load(gate_ptrs, mask=ks[None, :] < remaining, other=0.0)
                w_up = tl.load(up_ptrs, mask=ks[None, :] < remaining, other=0.0)
                x = tl.load(x_ptrs, mask=row_exists[None, :] & (ks[:, None] < remaining), other=0.0)
            gate = tl.dot(w_gate, x, gate, input_precision="ieee", out_dtype=ACC_DTYPE)
            up = tl.dot(w_up, x, up, input_precision="ieee", out_dtype=ACC_DTYPE)
            gate_ptrs += BLOCK_IN
            up_ptrs += BLOCK_IN
            x_ptrs += BLOCK_IN
    return gate, up


@kernel
def dense_product(
    x_ptrs, w_ptrs, row_exists, num_in, k_end,
    ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, EVEN_IN: tl.constexpr, ACC_DTYPE: tl.constexpr,
):  # fmt: skip
    """Returns the product [BLOCK_OUT, ROWS] of one matrix, see dense_gate_and_up.  k_end: num_in; 0 returns zeros."""
    ks = tl.arange(0, BLOCK_IN)
    acc = tl.zeros((BLOCK_OUT, ROWS), ACC_DTYPE)
    for k in range(0, k_end, BLOCK_IN):
        if EVEN_IN:
            w = tl.load(w_ptrs)
            x = tl.load(x_ptrs, mask=row_exists[None, :], other=0.0)
        else:
            remaining = num_in - k
            w = tl.load(w_ptrs, mask=ks[None, :] < remaining, other=0.0)
            x = tl.load(x_ptrs, mask=row_exists[None, :] & (ks[:, None] < remaining), other=0.0)
        acc = tl.dot(w, x, acc, input_precision="ieee", out_dtype=ACC_DTYPE)
        w_ptrs += BLOCK_IN
        x_ptrs += BLOCK_IN
    return acc


DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@kernel
def _gated_kernel(
    x_ptr, x_scales_ptr, w_ptr, scales_ptr, zero_points_ptr, bias_ptr, shared_ptr, pair_order_ptr, pair_ends_ptr,
    tile_experts_ptr, tile_begins_ptr, live_ptr, out_ptr, num_out, num_in, x_stride, num_rows, top_k, num_experts,
    CODE: tl.constexpr, GROUP_SIZE: tl.constexpr, ROWS_PER_SCALE: tl.constexpr, INPUT_GROUP_SIZE: tl.constexpr,
    ACTIVATION_KIND: tl.constexpr, ALPHA: tl.constexpr, UP_OFFSET: tl.constexpr, LIMIT: tl.constexpr,
    NUM_PIECES: tl.constexpr, NUM_MATRICES: tl.constexpr, PREFETCHED_COLUMNS: tl.constexpr, IS_SORTED: tl.constexpr,
    HAS_LIVE: tl.constexpr, ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, EVEN_IN: tl.constexpr,
    ACC_DTYPE: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Write activations to out [(K + NUM_PIECES) · N, num_out]: first those of the sorted pairs, then those of the
    shared experts' pieces.

    w: [E, NUM_MATRICES · num_out, num_in]; bias: [E, NUM_MATRICES · num_out].  EVEN_IN: BLOCK_IN divides num_in.
    shared: [2 · NUM_PIECES · num_out, num_in], of which PREFETCHED_COLUMNS columns are prefetched; None: no pieces.
    CODE: None for dense experts.  For quantised experts, CODE to INPUT_GROUP_SIZE are arguments of quantised_dot."""
    column, ks = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT), tl.arange(0, BLOCK_IN)
    if NUM_PIECES > 0 and USE_PDL:
        prefetch_shared_piece(shared_ptr, column, num_out, num_in, NUM_PIECES, BLOCK_OUT, PREFETCHED_COLUMNS)
    # The trigger comes after the wait, because _down_kernel reads the tiles' expert ids before its own wait.
    pdl_wait(USE_PDL)
    pdl_trigger(USE_PDL)
    tile, expert = tile_and_expert(tile_experts_ptr, live_ptr, top_k, num_experts, NUM_PIECES, IS_SORTED, HAS_LIVE)
    # rows_of_tile comes before the branch on `expert`, so that its loads do not wait for `expert`.
    place, inside, row, _ = rows_of_tile(
        pair_order_ptr, pair_ends_ptr, tile_begins_ptr, tile, tl.maximum(expert, 0), num_rows, top_k, NUM_PIECES,
        IS_SORTED, ROWS,
    )  # fmt: skip
    if (expert < 0) | (expert == num_experts):
        return
    row = row.to(tl.int64)
    # Columns past the end read the last column; their results are not stored.
    w_row = expert * NUM_MATRICES * num_out + tl.minimum(column, num_out - 1)
    if bias_ptr is not None and (USE_PDL and not IS_SORTED):
        # If each pair is a tile, too few programs run to hide the latency of loading biases, so the bias is prefetched.
        prefetch(bias_ptr + w_row)
        prefetch(bias_ptr + w_row + (NUM_MATRICES - 1) * num_out)
    if CODE is None:
        up_offset = num_out.to(tl.int64) * num_in
        if NUM_PIECES > 0:
            piece_offset = (tile + NUM_PIECES).to(tl.int64) * num_out * num_in
            w_ptr = tl.where(tile < 0, shared_ptr + piece_offset, w_ptr)
            up_offset = tl.where(tile < 0, up_offset * NUM_PIECES, up_offset)
        gate_ptrs = w_ptr + w_row[:, None] * num_in + ks[None, :]
        x_ptrs = x_ptr + row[None, :] * x_stride + ks[:, None]
        gate, up = dense_gate_and_up(
            x_ptrs, gate_ptrs, up_offset, inside, num_in, NUM_MATRICES, ROWS, BLOCK_OUT, BLOCK_IN, EVEN_IN, ACC_DTYPE
        )
    else:
        x_scale_ptrs = None
        if x_scales_ptr is not None:
            x_scale_ptrs = x_scales_ptr + row * (tl.cdiv(num_in, INPUT_GROUP_SIZE) if INPUT_GROUP_SIZE > 0 else 1)
        # Gate and up are one product, so that the pipeline fills only once.
        w_rows = expert * NUM_MATRICES * num_out + weight_rows(
            num_out, NUM_MATRICES * BLOCK_OUT, False, NUM_MATRICES == 2
        )
        acc = quantised_dot(
            w_ptr, scales_ptr, zero_points_ptr, w_rows, x_ptr + row * x_stride, x_scale_ptrs, inside, num_in, 0, num_in,
            CODE, GROUP_SIZE, ROWS_PER_SCALE, INPUT_GROUP_SIZE, ROWS, NUM_MATRICES * BLOCK_OUT, BLOCK_IN, EVEN_IN,
        )  # fmt: skip
        gate, up = split_gate_and_up(acc, ROWS, 2 * BLOCK_OUT) if NUM_MATRICES == 2 else (acc, acc)
    if bias_ptr is not None:
        gate += tl.load(bias_ptr + w_row).to(ACC_DTYPE)[:, None]
        up += tl.load(bias_ptr + w_row + (NUM_MATRICES - 1) * num_out).to(ACC_DTYPE)[:, None]
    # Gate and up are rounded before the activation, as the output of a linear layer is.
    out_type = out_ptr.dtype.element_ty
    gate, up = gate.to(out_type).to(ACC_DTYPE), up.to(out_type).to(ACC_DTYPE)
    out = apply_activation(gate, up, ACTIVATION_KIND, ALPHA, UP_OFFSET, LIMIT).to(out_type)
    out_ptrs = out_ptr + place.to(tl.int64)[:, None] * num_out + column[None, :]
    tl.store(out_ptrs, tl.trans(out), mask=inside[:, None] & (column[None, :] < num_out))


@kernel
def _down_kernel(
    x_ptr, x_scales_ptr, w_ptr, scales_ptr, zero_points_ptr, bias_ptr, shared_ptr, weights_ptr, pair_order_ptr,
    pair_ends_ptr, tile_experts_ptr, tile_begins_ptr, live_ptr, out_ptr, num_out, num_in, num_rows, top_k, num_experts,
    CODE: tl.constexpr, GROUP_SIZE: tl.constexpr, ROWS_PER_SCALE: tl.constexpr, INPUT_GROUP_SIZE: tl.constexpr,
    NUM_PIECES: tl.constexpr, IS_SORTED: tl.constexpr, HAS_LIVE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, EVEN_IN: tl.constexpr, ACC_DTYPE: tl.constexpr,
    PREFETCHED_LINES: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Write weight · (x · wᵀ + bias [E, num_out]) to out [K + NUM_PIECES, N, num_out], and 0 for rows without experts.

    num_rows: N.  x: [(K + NUM_PIECES) · N, num_in], in order of place.  EVEN_IN, CODE: as in _gated_kernel.
    shared: [num_out, NUM_PIECES · num_in].  The routing weight of shared pieces is 1.
    PREFETCHED_LINES: L2 lines of each weight row's codes that are prefetched before the wait, a power of two."""
    pdl_trigger(USE_PDL)
    tile, expert = tile_and_expert(tile_experts_ptr, live_ptr, top_k, num_experts, NUM_PIECES, IS_SORTED, HAS_LIVE)
    column, ks = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT), tl.arange(0, BLOCK_IN)
    w_row = tl.maximum(tl.minimum(expert, num_experts - 1), 0) * num_out + tl.minimum(column, num_out - 1)
    w_stride = num_in
    if NUM_PIECES > 0:
        w_ptr = tl.where(tile < 0, shared_ptr + (tile + NUM_PIECES).to(tl.int64) * num_in, w_ptr)
        w_stride = tl.where(tile < 0, num_in * NUM_PIECES, num_in)
    if CODE is None and (USE_PDL and BLOCK_IN >= 64):
        # An L2 line of 128 bytes holds 64 two-byte numbers, and needs one prefetch.
        lines = tl.arange(0, BLOCK_IN // 64) * 64
        prefetch(w_ptr + w_row[:, None] * w_stride + tl.minimum(lines, num_in - 1)[None, :])
    if bias_ptr is not None and (USE_PDL and not IS_SORTED):
        prefetch(bias_ptr + w_row)
    if CODE is not None and USE_PDL:
        prefetch_codes(w_ptr, w_row, 0, num_in, num_in, CODE, PREFETCHED_LINES)
    pdl_wait(USE_PDL)
    place, inside, row, out_part = rows_of_tile(
        pair_order_ptr, pair_ends_ptr, tile_begins_ptr, tile, tl.maximum(expert, 0), num_rows, top_k, NUM_PIECES,
        IS_SORTED, ROWS,
    )  # fmt: skip
    if expert < 0:
        return
    # Rows without experts skip the product, because _gated_kernel has not written their x.
    k_end = tl.where(expert == num_experts, 0, num_in)
    if CODE is None:
        w_ptrs = w_ptr + w_row[:, None] * w_stride + ks[None, :]
        x_ptrs = x_ptr + place.to(tl.int64)[None, :] * num_in + ks[:, None]
        acc = dense_product(x_ptrs, w_ptrs, inside, num_in, k_end, ROWS, BLOCK_OUT, BLOCK_IN, EVEN_IN, ACC_DTYPE)
    else:
        x_row = place.to(tl.int64)
        x_scale_ptrs = None
        if x_scales_ptr is not None:
            x_scale_ptrs = x_scales_ptr + x_row * (tl.cdiv(num_in, INPUT_GROUP_SIZE) if INPUT_GROUP_SIZE > 0 else 1)
        acc = quantised_dot(
            w_ptr, scales_ptr, zero_points_ptr, w_row, x_ptr + x_row * num_in, x_scale_ptrs, inside, num_in, 0, k_end,
            CODE, GROUP_SIZE, ROWS_PER_SCALE, INPUT_GROUP_SIZE, ROWS, BLOCK_OUT, BLOCK_IN, EVEN_IN,
        )  # fmt: skip
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + w_row).to(ACC_DTYPE)[:, None]
    weight = tl.load(weights_ptr + row * top_k + out_part, mask=inside & (out_part < top_k), other=1.0)
    # tl.where instead of a product with 0: the weight of a row without experts may be NaN.
    acc = tl.where(expert == num_experts, 0.0, acc * weight[None, :])
    out_row = out_part.to(tl.int64) * num_rows + row
    out_ptrs = out_ptr + out_row[:, None] * num_out + column[None, :]
    tl.store(out_ptrs, tl.trans(acc), mask=inside[:, None] & (column[None, :] < num_out))


def grouped_experts(
    x: InputRows,
    gate_up: ExpertMatrix,
    down: ExpertMatrix,
    expert_ids: Tensor,
    routing_weights: Tensor,
    live_rows: Tensor | None = None,
    biases: ExpertBiases | None = None,
    activation: Activation = SILU,
    num_extra_parts: int = 0,
    shared_experts: SharedExperts | None = None,
    plan: ExpertsPlan | None = None,
) -> Tensor:
    """See ops/experts.py.  x is bfloat16, float16, float32 (IEEE products) or float64; weights and biases are
    contiguous.

    If the plan is the same, the bits of a row do not depend on the other rows.
    Raises EspalierError on other shapes, dtypes or strides."""
    num_rows, hidden = input_values(x).shape
    _check_arguments(x, gate_up, down, expert_ids, routing_weights, biases, activation)
    gate_up_bias, down_bias = (None, None) if biases is None else (biases.gate_up, biases.down)
    num_experts, inner, top_k = gate_up.shape[0], down.shape[2], expert_ids.shape[1]
    if shared_experts is not None:
        is_plain = isinstance(gate_up, Tensor) and biases is None and activation.is_silu
        check_shared_experts(shared_experts, input_values(x), inner, is_plain)
    if routing_weights.numel() * hidden == 0:
        pieces = 0 if shared_experts is None else shared_experts.num_pieces(inner)
        return routing_weights.new_empty(top_k + pieces + num_extra_parts, num_rows, hidden)
    if plan is None:
        shape = ExpertsShape(num_experts, top_k, hidden, inner)
        plan = choose_experts_plan(shape, num_rows, x.dtype, chip(expert_ids), (gate_up, down))
    tiles = make_expert_tiles(expert_ids, live_rows, num_experts, plan.tile_rows)
    gated = launch_gate_and_up(x, gate_up, tiles, top_k, plan.gated, gate_up_bias, activation, shared_experts)
    return launch_down(gated, down, routing_weights, tiles, plan.down, down_bias, num_extra_parts, shared_experts)


def launch_gate_and_up(
    x: InputRows,
    gate_up: ExpertMatrix,
    tiles: ExpertTiles,
    top_k: int,
    plan: ProductPlan,
    bias: Tensor | None = None,
    activation: Activation = SILU,
    shared_experts: SharedExperts | None = None,
) -> Tensor:
    """Returns activations [N · (K + S), inner size]: of the sorted pairs, then of the shared experts' S pieces."""
    num_rows, (num_experts, num_w_rows, hidden), num_matrices = len(x), gate_up.shape, activation.num_matrices
    inner = num_w_rows // num_matrices
    operands, constants = _product_operands(x, gate_up)
    pieces = 0 if shared_experts is None else shared_experts.num_pieces(inner)
    out = torch.empty(num_rows * (top_k + pieces), inner, dtype=x.dtype, device=tiles.tile_experts.device)
    grid = -(-inner // plan.block_out), pieces + len(tiles.tile_experts)
    if (
        isinstance(gate_up, QuantisedMatrix)
        and num_matrices == 2
        and supports_hopper_product(operands[0], gate_up, tiles.tile_rows, plan.tile_shape(2), chip(out))
    ):
        hopper_gate_up_kernel[grid](
            *(operands[0], *weight_pointers(gate_up), bias, *tiles.pointers, out, inner, hidden),
            *(operands[0].stride(0), top_k, num_experts), **activation.constexpr_arguments,
            IS_SORTED=tiles.tile_rows > 1, HAS_LIVE=tiles.live is not None,
            **nibble_launch_options(gate_up, tiles.tile_rows, grid, chip(out)),
        )  # fmt: skip
        return out
    _gated_kernel[grid](
        *(*operands, bias, None if shared_experts is None else shared_experts.gate_up, *tiles.pointers),
        *(out, inner, hidden, operands[0].stride(0), num_rows, top_k, num_experts),
        **constants, **activation.constexpr_arguments, NUM_MATRICES=num_matrices,
        PREFETCHED_COLUMNS=PREFETCHED_STEPS * max(plan.block_in, 64),
        **_launch_options(x.dtype, gate_up, tiles, plan, num_matrices, pieces, grid),
    )  # fmt: skip
    return out


def launch_down(
    activations: Tensor,
    down: ExpertMatrix,
    routing_weights: Tensor,
    tiles: ExpertTiles,
    plan: ProductPlan,
    bias: Tensor | None = None,
    num_extra_parts: int = 0,
    shared_experts: SharedExperts | None = None,
) -> Tensor:
    """Returns [K + S + num_extra_parts, N, H]: the weighted results of a row's K choices, then of the shared experts' S
    pieces.  The caller writes the last num_extra_parts."""
    num_experts, hidden, inner = down.shape
    num_rows, top_k = routing_weights.shape
    pieces = 0 if shared_experts is None else shared_experts.num_pieces(inner)
    parts = routing_weights.new_empty(top_k + pieces + num_extra_parts, num_rows, hidden)
    operands, constants = _product_operands(activations, down)
    grid = -(-hidden // plan.block_out), pieces + len(tiles.tile_experts)
    if isinstance(down, QuantisedMatrix) and supports_hopper_product(
        operands[0], down, tiles.tile_rows, plan.tile_shape(1), chip(parts)
    ):
        hopper_down_kernel[grid](
            *(operands[0], *weight_pointers(down), bias, routing_weights.contiguous(), *tiles.pointers, parts),
            *(hidden, inner, num_rows, top_k, num_experts),
            IS_SORTED=tiles.tile_rows > 1, HAS_LIVE=tiles.live is not None,
            **nibble_launch_options(down, tiles.tile_rows, grid, chip(parts)),
        )  # fmt: skip
        return parts
    _down_kernel[grid](
        *(*operands, bias, None if shared_experts is None else shared_experts.down),
        *(routing_weights.contiguous(), *tiles.pointers, parts, hidden, inner, num_rows, top_k, num_experts),
        **constants, PREFETCHED_LINES=MIN_PREFETCHED_LINES,
        **_launch_options(activations.dtype, down, tiles, plan, 1, pieces, grid),
    )  # fmt: skip
    return parts


def _product_operands(
    x: InputRows, weight: ExpertMatrix
) -> tuple[tuple[Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None], dict[str, Any]]:
    """Returns (x, scales of x, w, scales of w, zeros of w) and the constexpr arguments of quantised_dot."""
    if isinstance(weight, Tensor):
        assert isinstance(x, Tensor)
        x = x if x.stride(1) == 1 else x.contiguous()
        constants = {"CODE": None, "GROUP_SIZE": 0, "ROWS_PER_SCALE": 1, "INPUT_GROUP_SIZE": 0}
        return (x, None, weight, None, None), constants
    inputs, scales = kernel_inputs(x, weight)
    return (inputs, scales, *kernel_matrix(weight)), format_constants(weight)


def _launch_options(
    dtype: torch.dtype,
    weight: ExpertMatrix,
    tiles: ExpertTiles,
    plan: ProductPlan,
    num_matrices: int,
    num_pieces: int,
    grid: Any,
) -> dict[str, Any]:
    """Returns constexpr arguments and launch options.  num_matrices: 2 if a program multiplies gate and up, else 1."""
    gpu = chip(tiles.tile_experts)
    if isinstance(weight, Tensor):
        stages = plan.fitting_stages(gpu, num_matrices, tiles.tile_rows, weight.itemsize)
        if num_pieces:
            sizes = num_matrices, tiles.tile_rows, weight.itemsize
            stages = plan.one_wave_stages(gpu, stages, *sizes, num_programs=grid[0] * grid[1])
        options: dict[str, Any] = {"BLOCK_IN": plan.block_in, "num_stages": stages}
    else:
        options = quantised_launch_options(plan, weight, num_matrices, tiles.tile_rows, gpu)
    return options | {
        "NUM_PIECES": num_pieces,
        "IS_SORTED": tiles.tile_rows > 1,
        "HAS_LIVE": tiles.live is not None,
        "ROWS": block_rows(tiles.tile_rows),
        "BLOCK_OUT": plan.block_out,
        "EVEN_IN": weight.shape[2] % options["BLOCK_IN"] == 0,
        "ACC_DTYPE": acc_dtype(dtype),
        "num_warps": plan.warps,
        **pdl_arguments(gpu),
    }


def _check_arguments(
    x: InputRows,
    gate_up: ExpertMatrix,
    down: ExpertMatrix,
    expert_ids: Tensor,
    routing_weights: Tensor,
    biases: ExpertBiases | None,
    activation: Activation,
) -> None:
    inner = num_up_columns(gate_up.shape[1], activation)
    (num_rows, hidden), values = input_values(x).shape, input_values(x)
    wide_dtype = torch.promote_types(x.dtype, torch.float32)
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
    require("grouped_experts: ids", expert_ids, (num_rows, -1), torch.int64, values)
    require("grouped_experts: weights", routing_weights, tuple(expert_ids.shape), wide_dtype, values)
    if biases is not None:
        require("grouped_experts: biases of gate_up", biases.gate_up, tuple(gate_up.shape[:2]), x.dtype, values)
        require("grouped_experts: biases of down", biases.down, tuple(down.shape[:2]), x.dtype, values)
        contiguous += [biases.gate_up, biases.down]
    if x.dtype not in DTYPES or not all(tensor.is_contiguous() for tensor in contiguous):
        raise EspalierError(
            f"grouped_experts: the Triton kernel takes contiguous experts of a floating-point dtype of 2 to 8 bytes, "
            f"but got {x.dtype} with strides {[tensor.stride() for tensor in contiguous]}: use the reference"
        )
