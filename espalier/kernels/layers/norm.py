"""RMS norm (arXiv:1910.07467), alone or fused with the residual addition before it.

Grid: one program per row, which holds the whole row in registers.  Computed in float32 (float64 for float64) and
rounded once.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.layers.linear import load_sum
from espalier.kernels.layers.quantise_rows import empty_rounded, rounded_arguments, store_rounded
from espalier.kernels.layers.quantised import InputScales, RoundedRows
from espalier.kernels.ops.norm import rounds_norm
from espalier.kernels.runtime.jit import kernel
from espalier.kernels.runtime.launch import chip, exact_type, power_of_two, require
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger_and_wait

# Values of a row that a warp norms, and the most warps of a program.  A thread loads few values, because nothing hides
# the latency of a lone row's loads (docs/log.md).
WARP_VALUES, MAX_WARPS = 128, 16


@kernel
def _rms_norm_kernel(
    x_ptr,
    delta_ptr,
    weight_ptr,
    sum_ptr,
    out_ptr,
    x_row_stride,
    delta_row_stride,
    delta_split_stride,
    values_ptr,
    scales_ptr,
    static_ptr,
    EPS: tl.constexpr,
    SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    MOST: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """SPLITS: the number of delta's partial sums; 1 for a delta without splits, 0 for no delta.

    out_ptr: None, or the norm is written.  values_ptr: None, or it is rounded to FP8 with a scale for GROUP columns, as
    quantise_rows.py rounds it.
    """
    pdl_trigger_and_wait(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < SIZE
    # Loaded before the reduction: a load after it would stall once more on memory.
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(EXACT)
    x = tl.load(x_ptr + row * x_row_stride + column, mask=mask, other=0.0).to(EXACT)
    if SPLITS:
        delta = delta_ptr + row * delta_row_stride + column
        x += load_sum(delta, delta_split_stride, mask, SPLITS, sum_ptr.dtype.element_ty, EXACT)
        # Round first: the norm is of the values that the residual stream holds.
        x = x.to(sum_ptr.dtype.element_ty)
        # evict_last: the next norm reads the sum again, after a linear's weights have passed through the L2.
        tl.store(sum_ptr + row * SIZE + column, x, mask=mask, eviction_policy="evict_last")
        x = x.to(EXACT)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / SIZE + EPS)
    norm = x * scale * weight
    if values_ptr is not None:
        of_type = norm.to(x_ptr.dtype.element_ty).to(tl.float32)
        store_rounded(of_type, row, values_ptr, scales_ptr, static_ptr, SIZE, BLOCK, GROUP, MOST)
    if out_ptr is not None:
        tl.store(out_ptr + row * SIZE + column, norm.to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Tolerance: two ulps of the reference, because the sum of squares has another reduction order.

    A two-dimensional x with contiguous rows, of any row stride, is read in place; other layouts may be copied first.
    """
    flat = x.reshape(-1, x.shape[-1])
    out = torch.empty(flat.shape, dtype=x.dtype, device=x.device)
    _launch(flat, None, weight, eps, None, out)
    return out.view(x.shape)


def add_rms_norm(delta: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum equals the reference's to the bit; the norm has the tolerance of rms_norm."""
    _require_delta(delta, residual)
    total, out = (torch.empty(residual.shape, dtype=residual.dtype, device=residual.device) for _ in range(2))
    _launch(residual, delta, weight, eps, total, out)
    return total, out


def rounded_norm(
    delta: Tensor | None, residual: Tensor, weight: Tensor, eps: float, inputs: InputScales
) -> tuple[Tensor, RoundedRows]:
    total, rounded = _begin_rounded(delta, residual, inputs)
    _launch(residual, delta, weight, eps, total, None, rounded, inputs)
    return residual if total is None else total, rounded


def norm_and_rounded(
    delta: Tensor | None, residual: Tensor, weight: Tensor, eps: float, inputs: InputScales
) -> tuple[Tensor, Tensor, RoundedRows]:
    total, rounded = _begin_rounded(delta, residual, inputs)
    out = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)
    _launch(residual, delta, weight, eps, total, out, rounded, inputs)
    return residual if total is None else total, out, rounded


def _begin_rounded(delta: Tensor | None, residual: Tensor, inputs: InputScales) -> tuple[Tensor | None, RoundedRows]:
    """Memory for the sum, None if there is none, and for the rounded norm."""
    size = residual.shape[1]
    if not rounds_norm(size, inputs):
        raise EspalierError(f"a norm of {size} columns is rounded in groups of a power of two, not {inputs.group}")
    if delta is not None:
        _require_delta(delta, residual)
    total = None if delta is None else torch.empty_like(residual, memory_format=torch.contiguous_format)
    return total, empty_rounded(residual, inputs)


def _require_delta(delta: Tensor, residual: Tensor) -> None:
    if delta.ndim == 3:
        exact = torch.promote_types(residual.dtype, torch.float32)
        require("add_rms_norm: delta's partial sums", delta, (-1, *residual.shape), exact, residual)
    else:
        require("add_rms_norm: delta", delta, tuple(residual.shape), residual.dtype, residual)


def _launch(
    x: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    eps: float,
    total: Tensor | None,
    out: Tensor | None,
    rounded: RoundedRows | None = None,
    inputs: InputScales | None = None,
) -> None:
    rows, size = x.shape
    require("rms_norm: weight", weight, (size,), None, x)
    if not rows:
        return
    x = x if x.stride(-1) == 1 else x.contiguous()
    addend = x if delta is None else delta if delta.stride(-1) == 1 else delta.contiguous()
    block = power_of_two(size)
    _rms_norm_kernel[(rows,)](
        x,
        addend,
        weight.contiguous(),
        x if total is None else total,
        out,
        x.stride(0),
        addend.stride(-2),
        addend.stride(0),
        # constexpr: as a run-time argument eps would be rounded to float32.
        EPS=eps,
        SIZE=size,
        SPLITS=0 if delta is None else delta.shape[0] if delta.ndim == 3 else 1,
        EXACT=exact_type(x.dtype),
        BLOCK=block,
        num_warps=warps_for(block),
        **rounded_arguments(rounded, inputs, block),
        **pdl_arguments(chip(x)),
    )


def warps_for(block: int) -> int:
    """The warps of a program that norms a row of `block` values."""
    return min(max(block // WARP_VALUES, 1), MAX_WARPS)
