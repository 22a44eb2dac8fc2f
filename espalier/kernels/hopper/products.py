"""The linear layer of few rows and a weight in 4 bits, on Hopper: hopper/nibbles.py has its loop.

It computes what the kernel of linear_quantised.py computes, to the bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from espalier.kernels.hopper.nibbles import Nibbles, nibble_product, rows_of_block
from espalier.kernels.hopper.plans import BLOCK_IN, FEW_ROWS, MAX_ROWS, WARPS, stages
from espalier.kernels.layers.activation import silu_times
from espalier.kernels.layers.quantised import QuantisedMatrix
from espalier.kernels.runtime.jit import gluon_kernel
from espalier.kernels.runtime.launch import Chip
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger


def launch_linear(
    x: Tensor, weight: QuantisedMatrix, bias: Tensor | None, out: Tensor, grid: tuple[int, int], gated: bool, gpu: Chip
) -> None:
    """Write x · weightᵀ + bias to out, as _linear_quantised_kernel.  grid: (blocks of weight rows, splits)."""
    hopper_linear_kernel[grid](
        *(x, *pointers_of(weight), bias, out, len(x), out.shape[-1], x.shape[1], x.stride(0)),
        GATED=gated,
        **options_of(weight, len(x), grid, gpu),
    )


def pointers_of(weight: QuantisedMatrix) -> tuple[Tensor, Tensor, Tensor | None]:
    """Words of codes, scales (words of exponents for MXFP4) and zero points."""
    scales = weight.scales.view(torch.int32) if weight.code == "mxfp4" else weight.scales
    return weight.codes.view(torch.int32), scales, weight.zeros


def options_of(weight: QuantisedMatrix, rows: int, grid: tuple[int, int], gpu: Chip) -> dict[str, Any]:
    """Constants and launch options.  rows: of a tile."""
    tile = FEW_ROWS if rows <= FEW_ROWS else MAX_ROWS
    return {
        "MXFP4": weight.code == "mxfp4",
        "ROWS": tile,
        "STAGES": stages(tile, grid[0] * grid[1], gpu),
        "EVEN_IN": weight.shape[-1] % BLOCK_IN == 0,
        "num_warps": WARPS,
        **pdl_arguments(gpu),
    }


# Arguments are grouped by meaning; one argument per line would hide the groups.
# fmt: off
@gluon_kernel
def gate_and_up_of(tile):
    """As gate_and_up (linear.py)."""
    ROWS: gl.constexpr = tile.shape[1]
    return gl.split(tile.reshape(4, 2, 8, ROWS).permute(0, 2, 3, 1).reshape(32, ROWS, 2))


@gluon_kernel
def hopper_linear_kernel(
    x_ptr, words_ptr, scales_ptr, zeros_ptr, bias_ptr, out_ptr, num_rows, num_out, num_in, x_stride,
    MXFP4: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr, EVEN_IN: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """Grid: (blocks of weight rows, splits).  Arguments as _linear_quantised_kernel."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    X: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    split, num_splits = gl.program_id(1), gl.num_programs(1)
    steps = gl.cdiv(num_in, 256)
    k_begin, k_end = split * steps // num_splits * 256, (split + 1) * steps // num_splits * 256
    pdl_trigger(DEPENDENT)
    rows = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, X)), 1)
    x_places = rows * x_stride + gl.expand_dims(gl.arange(0, 256, layout=gl.SliceLayout(0, X)), 0)
    block = gl.program_id(0)
    acc = nibble_product(
        Nibbles(words_ptr, scales_ptr, zeros_ptr), block, x_ptr, x_places, rows < num_rows, num_out, num_in,
        k_begin, k_end, MXFP4, STAGES, GATED, EVEN_IN, DEPENDENT, ACC,
    )
    if bias_ptr is not None:
        # Only the first split adds the bias.
        bias = gl.load(bias_ptr + rows_of_block(block, num_out, GATED, gl.SliceLayout(1, ACC))).to(gl.float32)
        acc += gl.expand_dims(gl.where(split == 0, bias, 0.0), 1)
    result = acc.to(out_ptr.dtype.element_ty)
    WRITTEN: gl.constexpr = 32 if GATED else 64
    if GATED:
        gate, up = gate_and_up_of(result)
        result = silu_times(gate.to(gl.float32), up.to(gl.float32)).to(out_ptr.dtype.element_ty)
    OUT: gl.constexpr = result.type.layout
    row = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, OUT)), 0)
    column = gl.expand_dims(block * WRITTEN + gl.arange(0, WRITTEN, layout=gl.SliceLayout(1, OUT)), 1)
    places = (split.to(gl.int64) * num_rows + row) * num_out + column
    gl.store(out_ptr + places, result, mask=(row < num_rows) & (column < num_out))


# fmt: on
