"""The activation of an MLP: a kernel that computes it alone, and the functions that other kernels call.

Grid: (rows, blocks of BLOCK columns).  The kernel computes in float32 (float64 for float64).
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from espalier.kernels.ops.activation import SILU, Activation, require_halves
from espalier.kernels.runtime.jit import kernel, load_sum
from espalier.kernels.runtime.launch import chip, exact_type, require
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger_and_wait

BLOCK = 1024


@kernel
def silu_times(gate, up):
    """Returns silu(gate) · up, in the dtype of the arguments.  kernels/layers/linear.py uses it as epilogue."""
    return gate / (1.0 + tl.exp(-gate)) * up


@kernel
def apply_activation(
    gate, up, KIND: tl.constexpr, ALPHA: tl.constexpr, UP_OFFSET: tl.constexpr, LIMIT: tl.constexpr
):  # fmt: skip
    """Returns the activation (ops/activation.py:Activation), in the dtype of gate and up.

    For an activation without a gate, the caller passes up as `gate` too.  NaN stays NaN; tl.minimum and tl.maximum
    would replace NaN by the limit.
    """
    if LIMIT is not None:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    if UP_OFFSET != 0:
        up += UP_OFFSET
    if KIND == "gelu_tanh":
        # (1 + tanh(x)) / 2 = sigmoid(2x), with x = sqrt(2 / pi) · (gate + 0.044715 · gate³).
        doubled = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        return gate / (1.0 + tl.exp(-doubled)) * up
    if KIND == "relu2":
        return tl.where(gate < 0, 0.0, gate) * up
    return gate / (1.0 + tl.exp(-ALPHA * gate)) * up


@kernel
def _gated_kernel(
    x_ptr, out_ptr, x_row_stride, split_stride, size,
    KIND: tl.constexpr, ALPHA: tl.constexpr, UP_OFFSET: tl.constexpr, LIMIT: tl.constexpr, SILU: tl.constexpr,
    HALVES: tl.constexpr, SPLITS: tl.constexpr, EXACT: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    TYPE: tl.constexpr = out_ptr.dtype.element_ty
    pdl_trigger_and_wait(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    place = x_ptr + row * x_row_stride + column
    gate = load_sum(place, split_stride, mask, SPLITS, TYPE, EXACT)
    up = gate
    if HALVES == 2:
        up = load_sum(place + size, split_stride, mask, SPLITS, TYPE, EXACT)
    if SILU:
        result = silu_times(gate, up)
    else:
        result = apply_activation(gate, up, KIND, ALPHA, UP_OFFSET, LIMIT)
    tl.store(out_ptr + row * size + column, result.to(TYPE), mask=mask)


def gated(gate_up: Tensor, activation: Activation = SILU) -> Tensor:
    """Returns the activation of gate_up, see ops/activation.py.  The result is rounded once, at the end.

    PyTorch also rounds silu(gate), and so does transformers in bfloat16.
    Tolerance: that extra rounding changes a result by 1 ulp of the dtype, or 2 at a tie.  GELU: 1 ulp of the dtype plus
    2^-22 of gate · up, because the argument of its exponential is a rounded cubic.
    """
    require("gated: gate_up", gate_up, (-1, -1), None, gate_up)
    return gated_parts(gate_up[None], gate_up.dtype, activation)


def gated_parts(parts: Tensor, dtype: torch.dtype, activation: Activation = SILU) -> Tensor:
    if parts.ndim == 2:
        return gated(parts, activation)
    require("gated_parts: parts", parts, (-1, -1, -1), None, parts)
    rows, size = parts.shape[1], require_halves(parts.shape[2], activation)
    parts = parts if parts.stride(2) == 1 else parts.contiguous()
    out = torch.empty(rows, size, dtype=dtype, device=parts.device)
    if rows:
        _gated_kernel[rows, -(-size // BLOCK)](
            *(parts, out, parts.stride(1), parts.stride(0), size),
            **activation.constants,
            SILU=activation.is_silu,
            HALVES=activation.halves,
            SPLITS=parts.shape[0],
            EXACT=exact_type(dtype),
            BLOCK=BLOCK,
            num_warps=4,
            **pdl_arguments(chip(parts)),
        )
    return out
