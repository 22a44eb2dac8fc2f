"""The activation of an MLP: a kernel that computes only the activation, and functions that other kernels call.

Grid: (rows, blocks of BLOCK columns), or (rows, 1) if rows are rounded to FP8.  Kernels compute in float32
(float64 for float64).
"""

import torch
import triton.language as tl
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.layers.quantise_rows import allocate_rounded_rows, store_rounded_row, store_rounded_row_arguments
from espalier.kernels.layers.quantised import InputRows, InputScales
from espalier.kernels.ops.activation import SILU, Activation, num_up_columns
from espalier.kernels.ops.linear import can_round_activation
from espalier.kernels.runtime.jit import kernel, load_sum
from espalier.kernels.runtime.launch import acc_dtype, chip, next_power_of_2, require
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger_and_wait

BLOCK = 1024
# For programs that round a whole row: values per warp, and the most warps.
VALUES_PER_WARP, MAX_WARPS = 128, 16


@kernel
def silu_and_multiply(gate, up):
    """Returns silu(gate) · up, in the dtype of the arguments.  linear.py also calls it, at the end of a product."""
    return gate / (1.0 + tl.exp(-gate)) * up


@kernel
def apply_activation(
    gate, up, ACTIVATION_KIND: tl.constexpr, ALPHA: tl.constexpr, UP_OFFSET: tl.constexpr, LIMIT: tl.constexpr
):  # fmt: skip
    """Returns the activation (ops/activation.py:Activation), in the dtype of gate and up.

    For an activation without a gate, the caller passes up as `gate` too.  NaN stays NaN (tl.minimum would drop it)."""
    if LIMIT is not None:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    if UP_OFFSET != 0:
        up += UP_OFFSET
    if ACTIVATION_KIND == "gelu_tanh":
        # (1 + tanh(x)) / 2 = sigmoid(2x), with x = sqrt(2 / pi) · (gate + 0.044715 · gate³).
        doubled = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        return gate / (1.0 + tl.exp(-doubled)) * up
    if ACTIVATION_KIND == "relu2":
        return tl.where(gate < 0, 0.0, gate) * up
    return gate / (1.0 + tl.exp(-ALPHA * gate)) * up


@kernel
def _activation_kernel(
    x_ptr, out_ptr, rounded_values_ptr, rounded_scales_ptr, static_scale_ptr, x_row_stride, split_stride,
    ACTIVATION_KIND: tl.constexpr, ALPHA: tl.constexpr, UP_OFFSET: tl.constexpr, LIMIT: tl.constexpr,
    SILU: tl.constexpr, NUM_MATRICES: tl.constexpr, SPLITS: tl.constexpr, ROW_SIZE: tl.constexpr,
    ACC_DTYPE: tl.constexpr, GROUP_COLUMNS: tl.constexpr, FP8_MAX: tl.constexpr, BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """x_ptr: gate and up, or partial sums of them.  rounded_values_ptr: if not None, a program rounds a whole row to
    FP8, in groups of GROUP_COLUMNS columns.  ACTIVATION_KIND to LIMIT: the fields of Activation."""
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    pdl_trigger_and_wait(USE_PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < ROW_SIZE
    place = x_ptr + row * x_row_stride + column
    gate = load_sum(place, split_stride, mask, SPLITS, DTYPE, ACC_DTYPE)
    up = gate
    if NUM_MATRICES == 2:
        up = load_sum(place + ROW_SIZE, split_stride, mask, SPLITS, DTYPE, ACC_DTYPE)
    if SILU:
        result = silu_and_multiply(gate, up)
    else:
        result = apply_activation(gate, up, ACTIVATION_KIND, ALPHA, UP_OFFSET, LIMIT)
    if rounded_values_ptr is not None:
        row_values = tl.where(mask, result.to(DTYPE).to(tl.float32), 0.0)
        store_rounded_row(
            row_values, row, rounded_values_ptr, rounded_scales_ptr, static_scale_ptr, ROW_SIZE, BLOCK, GROUP_COLUMNS,
            FP8_MAX,
        )  # fmt: skip
    else:
        tl.store(out_ptr + row * ROW_SIZE + column, result.to(DTYPE), mask=mask)


def gated_activation(gate_up: Tensor, activation: Activation = SILU) -> Tensor:
    """Returns the activation of gate_up, see ops/activation.py.  The result is rounded once, at the end.

    Tolerance: PyTorch and transformers also round silu(gate), which changes a result by 1 ulp, or by 2 ulps at a tie.
    For GELU, 1 ulp plus 2^-22 of gate · up, because the argument of the exponential is a rounded cubic."""
    require("gated: gate_up", gate_up, (-1, -1), None, gate_up)
    out = activate_partial_sums(gate_up[None], gate_up.dtype, activation)
    assert isinstance(out, Tensor)
    return out


def activate_partial_sums(
    partial_sums: Tensor, dtype: torch.dtype, activation: Activation = SILU, rounding: InputScales | None = None
) -> InputRows:
    """Adds the partial sums and applies the activation.  rounding: to FP8, with the bits of quantise_rows."""
    partial_sums = partial_sums if partial_sums.ndim == 3 else partial_sums[None]
    require("activate_partial_sums: parts", partial_sums, (-1, -1, -1), None, partial_sums)
    rows, size = partial_sums.shape[1], num_up_columns(partial_sums.shape[2], activation)
    if rounding is not None and not can_round_activation(size, rounding):
        raise EspalierError(f"an activation of {size} columns is not rounded in groups of {rounding.group_size}")
    partial_sums = partial_sums if partial_sums.stride(2) == 1 else partial_sums.contiguous()
    out = torch.empty(rows, size, dtype=dtype, device=partial_sums.device)
    rounded = None if rounding is None else allocate_rounded_rows(out, rounding)
    block = BLOCK if rounding is None else next_power_of_2(size)
    if rows:
        _activation_kernel[rows, -(-size // block)](
            *(partial_sums, out), x_row_stride=partial_sums.stride(1), split_stride=partial_sums.stride(0),
            **activation.constexpr_arguments, SILU=activation.is_silu, NUM_MATRICES=activation.num_matrices,
            SPLITS=partial_sums.shape[0], ROW_SIZE=size, ACC_DTYPE=acc_dtype(dtype), BLOCK=block,
            num_warps=4 if rounded is None else min(max(block // VALUES_PER_WARP, 1), MAX_WARPS),
            **store_rounded_row_arguments(rounded, rounding, block), **pdl_arguments(chip(partial_sums)),
        )  # fmt: skip
    return out if rounded is None else rounded
