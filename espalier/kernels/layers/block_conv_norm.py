"""The convolution of a sublayer's output in a DFlash 2 draft, the residual addition and the next norm in one launch.

The convolution is that of block_conv.py; its coefficients follow from the sublayer's input.  Grid: one program per row,
which holds the whole row in registers and reads the output's rows of all taps.

Tolerance: the sublayer's output is summed from its parts and rounded, convolved in float32 (float64 for float64), and
rounded before the addition.  From there on as kernels/layers/norm.py.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.layers.linear import load_sum
from espalier.kernels.runtime.jit import kernel
from espalier.kernels.runtime.launch import chip, exact_type, power_of_two, require
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger_and_wait


def block_conv_norm(
    delta: Tensor, coefficients: Tensor, base: Tensor, residual: Tensor, weight: Tensor, eps: float, width: int
) -> tuple[Tensor, Tensor]:
    rows, size = residual.shape
    _, taps, groups = coefficients.shape
    parts = delta if delta.ndim == 3 else delta[None]
    dtype = torch.promote_types(residual.dtype, torch.float32) if delta.ndim == 3 else residual.dtype
    require("block_conv_norm: delta", parts, (-1, rows, size), dtype, residual)
    require("block_conv_norm: coefficients", coefficients, (rows, taps, groups), residual.dtype, residual)
    require("block_conv_norm: base", base, (taps, size), residual.dtype, residual)
    require("block_conv_norm: weight", weight, (size,), residual.dtype, residual)
    if rows % width or size % groups:
        raise EspalierError(
            f"block_conv_norm: {rows} rows in blocks of {width}, and {size} channels in {groups} groups, do not "
            "divide: allocate and launch from the same layout"
        )
    total, out = (torch.empty_like(residual, memory_format=torch.contiguous_format) for _ in range(2))
    if rows:
        block = power_of_two(size)
        _block_conv_norm_kernel[(rows,)](
            *(parts.contiguous(), coefficients.contiguous(), base.contiguous(), residual.contiguous()),
            *(weight.contiguous(), total, out, rows * size, width),
            # constexpr: as a run-time argument eps would be rounded to float32.
            EPS=eps,
            SIZE=size,
            GROUPS=groups,
            TAPS=taps,
            SPLITS=parts.shape[0],
            EXACT=exact_type(residual.dtype),
            BLOCK=block,
            num_warps=min(max(block // 512, 1), 16),
            **pdl_arguments(chip(residual)),
        )
    return total, out


@kernel
def _block_conv_norm_kernel(
    delta_ptr, coefficients_ptr, base_ptr, residual_ptr, weight_ptr, sum_ptr, out_ptr, split_stride, width,
    EPS: tl.constexpr, SIZE: tl.constexpr, GROUPS: tl.constexpr, TAPS: tl.constexpr, SPLITS: tl.constexpr,
    EXACT: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    pdl_trigger_and_wait(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < SIZE
    group = column // (SIZE // GROUPS)
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(EXACT)
    x = tl.load(residual_ptr + row * SIZE + column, mask=mask, other=0.0).to(EXACT)
    added = tl.zeros([BLOCK], EXACT)
    for tap in tl.static_range(TAPS):
        base = tl.load(base_ptr + tap * SIZE + column, mask=mask, other=0.0).to(EXACT)
        own = tl.load(coefficients_ptr + (row * TAPS + tap) * GROUPS + group, mask=mask, other=0.0).to(EXACT)
        behind = mask & (row % width >= tap)
        delta = delta_ptr + (row - tap) * SIZE + column
        added += load_sum(delta, split_stride, behind, SPLITS, sum_ptr.dtype.element_ty, EXACT) * (base + own)
    # Rounded as each of the three would alone.
    x += added.to(sum_ptr.dtype.element_ty).to(EXACT)
    x = x.to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + row * SIZE + column, x, mask=mask, eviction_policy="evict_last")
    x = x.to(EXACT)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / SIZE + EPS)
    tl.store(out_ptr + row * SIZE + column, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=mask)
