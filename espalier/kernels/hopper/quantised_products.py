"""Hopper's kernels for products with 4-bit weights: linear layers, and the two products of MoE layers."""

from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from espalier.kernels.hopper.nibbles import NibblePointers, nibble_product, num_row_scales, weight_rows_of_block
from espalier.kernels.hopper.plans import BLOCK_IN, FEW_ROWS, MAX_ROWS, WARPS, max_stages
from espalier.kernels.layers.activation import apply_activation, silu_and_multiply
from espalier.kernels.layers.experts_tiles import tile_and_expert
from espalier.kernels.layers.quantised import E2M1_CODES, QuantisedMatrix
from espalier.kernels.runtime.jit import gluon_kernel
from espalier.kernels.runtime.launch import Chip
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger, pdl_wait


def weight_pointers(weight: QuantisedMatrix) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns (words of codes, scales, zero points or None).  For E2M1, a word of scales holds four scales.  For NVFP4,
    the third result is the factors of the rows instead."""
    scales = weight.scales.view(torch.int32) if weight.code in E2M1_CODES else weight.scales
    return weight.codes.view(torch.int32), scales, weight.row_scales if weight.code == "nvfp4" else weight.zeros


def nibble_launch_options(weight: QuantisedMatrix, tile_rows: int, grid: tuple[int, int], gpu: Chip) -> dict[str, Any]:
    """Returns the constexpr arguments and launch options of the kernels here.  tile_rows: rows of inputs per tile."""
    tile = FEW_ROWS if tile_rows <= FEW_ROWS else MAX_ROWS
    return {
        "CODE": weight.code,
        "ROWS": tile,
        "STAGES": max_stages(tile, weight.code, grid[0] * grid[1], gpu),
        "EVEN_IN": weight.shape[-1] % BLOCK_IN == 0,
        "num_warps": WARPS,
        **pdl_arguments(gpu),
    }


# fmt: off
@gluon_kernel
def split_gate_and_up(tile):
    """Split a tile of interleaved rows into gate and up, see linear.py:split_gate_and_up."""
    ROWS: gl.constexpr = tile.shape[1]
    return gl.split(tile.reshape(4, 2, 8, ROWS).permute(0, 2, 3, 1).reshape(32, ROWS, 2))


@gluon_kernel
def hopper_linear_kernel(
    x_ptr, words_ptr, scales_ptr, zero_points_ptr, bias_ptr, out_ptr, num_rows, num_out, num_in, x_stride,
    CODE: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, IS_GATED: gl.constexpr, EVEN_IN: gl.constexpr,
    USE_PDL: gl.constexpr,
):
    """A quantised linear layer.  Grid: (blocks of weight rows, splits).  Arguments: see _linear_quantised_kernel."""
    ACC_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    X: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    split, num_splits = gl.program_id(1), gl.num_programs(1)
    steps = gl.cdiv(num_in, 256)
    k_begin, k_end = split * steps // num_splits * 256, (split + 1) * steps // num_splits * 256
    pdl_trigger(USE_PDL)
    rows = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, X)), 1)
    x_places = rows * x_stride + gl.expand_dims(gl.arange(0, 256, layout=gl.SliceLayout(0, X)), 0)
    block = gl.program_id(0)
    acc = nibble_product(
        NibblePointers(words_ptr, scales_ptr, zero_points_ptr), block, x_ptr, x_places, rows < num_rows, num_out,
        num_in, k_begin, k_end, CODE, STAGES, IS_GATED, EVEN_IN, USE_PDL, ACC_LAYOUT,
    )
    if bias_ptr is not None:
        # Only the first split adds the bias.
        bias_rows = weight_rows_of_block(block, num_out, IS_GATED, gl.SliceLayout(1, ACC_LAYOUT))
        bias = gl.load(bias_ptr + bias_rows).to(gl.float32)
        acc += gl.expand_dims(gl.where(split == 0, bias, 0.0), 1)
    result = acc.to(out_ptr.dtype.element_ty)
    WRITTEN: gl.constexpr = 32 if IS_GATED else 64
    if IS_GATED:
        gate, up = split_gate_and_up(result)
        result = silu_and_multiply(gate.to(gl.float32), up.to(gl.float32)).to(out_ptr.dtype.element_ty)
    OUT: gl.constexpr = result.type.layout
    row = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, OUT)), 0)
    column = gl.expand_dims(block * WRITTEN + gl.arange(0, WRITTEN, layout=gl.SliceLayout(1, OUT)), 1)
    places = (split.to(gl.int64) * num_rows + row) * num_out + column
    gl.store(out_ptr + places, result, mask=(row < num_rows) & (column < num_out))


@gluon_kernel
def _pairs_of_tile(
    pair_order_ptr, pair_ends_ptr, begins_ptr, tile_index, expert,
    IS_SORTED: gl.constexpr, ROWS: gl.constexpr, LAYOUT: gl.constexpr,
):
    """Returns a tile's pairs (token, expert), see experts_tiles.py:pairs_of_tile."""
    place = gl.arange(0, ROWS, layout=LAYOUT)
    if IS_SORTED:
        place += gl.load(begins_ptr + tile_index)
        inside = place < gl.load(pair_ends_ptr + expert)
        pair = gl.load(pair_order_ptr + place, mask=inside, other=0)
    else:
        place += tile_index
        inside = place == tile_index
        pair = gl.where(inside, place, 0)
    return place, inside, pair


@gluon_kernel
def hopper_gate_up_kernel(
    x_ptr, words_ptr, scales_ptr, zero_points_ptr, bias_ptr,
    pair_order_ptr, pair_ends_ptr, tile_experts_ptr, tile_begins_ptr, live_ptr, out_ptr,
    num_out, num_in, x_stride, top_k, num_experts,
    CODE: gl.constexpr, ACTIVATION_KIND: gl.constexpr, ALPHA: gl.constexpr, UP_OFFSET: gl.constexpr,
    LIMIT: gl.constexpr, IS_SORTED: gl.constexpr, HAS_LIVE: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
    EVEN_IN: gl.constexpr, USE_PDL: gl.constexpr,
):
    """Computes the activations of all pairs (token, expert), see experts.py:_gated_kernel.  No shared experts.
    CODE: the format of the weights, "int4", "mxfp4" or "nvfp4"."""
    ACC_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    X: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    # The trigger comes after the routing is complete, because hopper_down_kernel reads the experts before it waits.
    pdl_wait(USE_PDL)
    pdl_trigger(USE_PDL)
    tile, expert = tile_and_expert(tile_experts_ptr, live_ptr, top_k, num_experts, 0, IS_SORTED, HAS_LIVE)
    if (expert < 0) | (expert == num_experts):
        return
    block = gl.program_id(0)
    _, inside, pair = _pairs_of_tile(
        pair_order_ptr, pair_ends_ptr, tile_begins_ptr, tile, expert, IS_SORTED, ROWS, gl.SliceLayout(1, X),
    )
    x_places = gl.expand_dims(pair // top_k * x_stride, 1)
    x_places += gl.expand_dims(gl.arange(0, 256, layout=gl.SliceLayout(0, X)), 0)
    if bias_ptr is not None:
        first_bias = bias_ptr + expert * 2 * num_out
        bias = gl.load(first_bias + weight_rows_of_block(block, num_out, True, gl.SliceLayout(1, ACC_LAYOUT)))
    first, row_words, row_scales = expert * 2 * num_out, num_in // 32 * 4, num_row_scales(num_in, CODE)
    if zero_points_ptr is not None:
        zero_points_ptr += first if CODE == "nvfp4" else first * row_scales
    acc = nibble_product(
        NibblePointers(words_ptr + first * row_words, scales_ptr + first * row_scales, zero_points_ptr), block, x_ptr,
        x_places, gl.expand_dims(inside, 1), num_out, num_in, 0, num_in,
        CODE, STAGES, True, EVEN_IN, False, ACC_LAYOUT,
    )
    if bias_ptr is not None:
        acc += gl.expand_dims(bias.to(gl.float32), 1)
    # Gate and up are rounded before the activation, as the output of a linear layer is.
    gate, up = split_gate_and_up(acc.to(out_ptr.dtype.element_ty))
    OUT: gl.constexpr = gate.type.layout
    out = apply_activation(gate.to(gl.float32), up.to(gl.float32), ACTIVATION_KIND, ALPHA, UP_OFFSET, LIMIT)
    place, inside, _ = _pairs_of_tile(
        pair_order_ptr, pair_ends_ptr, tile_begins_ptr, tile, expert, IS_SORTED, ROWS, gl.SliceLayout(0, OUT),
    )
    column = gl.expand_dims(block * 32 + gl.arange(0, 32, layout=gl.SliceLayout(1, OUT)), 1)
    places = gl.expand_dims(place.to(gl.int64) * num_out, 0) + column
    gl.store(out_ptr + places, out.to(out_ptr.dtype.element_ty), mask=gl.expand_dims(inside, 0) & (column < num_out))


@gluon_kernel
def hopper_down_kernel(
    x_ptr, words_ptr, scales_ptr, zero_points_ptr, bias_ptr, weights_ptr,
    pair_order_ptr, pair_ends_ptr, tile_experts_ptr, tile_begins_ptr, live_ptr, out_ptr,
    num_out, num_in, num_rows, top_k, num_experts,
    CODE: gl.constexpr, IS_SORTED: gl.constexpr, HAS_LIVE: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
    EVEN_IN: gl.constexpr, USE_PDL: gl.constexpr,
):
    """Computes the weighted results of all pairs (token, expert), see experts.py:_down_kernel.  No shared experts."""
    ACC_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    X: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    pdl_trigger(USE_PDL)
    tile, expert = tile_and_expert(tile_experts_ptr, live_ptr, top_k, num_experts, 0, IS_SORTED, HAS_LIVE)
    if expert < 0:
        # Every program must wait, so that the next kernel may rely on all earlier kernels (runtime/pdl.py).
        pdl_wait(USE_PDL)
        return
    block = gl.program_id(0)
    place, inside, _ = _pairs_of_tile(
        pair_order_ptr, pair_ends_ptr, tile_begins_ptr, tile, expert, IS_SORTED, ROWS, gl.SliceLayout(1, X),
    )
    x_places = gl.expand_dims(place * num_in, 1) + gl.expand_dims(gl.arange(0, 256, layout=gl.SliceLayout(0, X)), 0)
    weight_expert = gl.minimum(expert, num_experts - 1)
    if bias_ptr is not None:
        bias_rows = weight_rows_of_block(block, num_out, False, gl.SliceLayout(1, ACC_LAYOUT))
        bias = gl.load(bias_ptr + weight_expert * num_out + bias_rows)
    # Rows without an expert take no steps, because hopper_gate_up_kernel writes no inputs for these rows.
    first, row_words, row_scales = weight_expert * num_out, num_in // 32 * 4, num_row_scales(num_in, CODE)
    if zero_points_ptr is not None:
        zero_points_ptr += first if CODE == "nvfp4" else first * row_scales
    acc = nibble_product(
        NibblePointers(words_ptr + first * row_words, scales_ptr + first * row_scales, zero_points_ptr), block, x_ptr,
        x_places, gl.expand_dims(inside, 1), num_out, num_in, 0,
        gl.where(expert == num_experts, 0, num_in),
        CODE, STAGES, False, EVEN_IN, USE_PDL, ACC_LAYOUT,
    )
    if bias_ptr is not None:
        acc += gl.expand_dims(bias.to(gl.float32), 1)
    place, inside, pair = _pairs_of_tile(
        pair_order_ptr, pair_ends_ptr, tile_begins_ptr, tile, expert, IS_SORTED, ROWS, gl.SliceLayout(0, ACC_LAYOUT),
    )
    weight = gl.load(weights_ptr + pair, mask=inside, other=1.0)
    # gl.where instead of a product with 0, because the weight of a row without an expert may be NaN.
    acc = gl.where(expert == num_experts, 0.0, acc * gl.expand_dims(weight, 0))
    column = gl.expand_dims(block * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, ACC_LAYOUT)), 1)
    places = gl.expand_dims((pair % top_k * num_rows + pair // top_k).to(gl.int64) * num_out, 0) + column
    gl.store(out_ptr + places, acc, mask=gl.expand_dims(inside, 0) & (column < num_out))
