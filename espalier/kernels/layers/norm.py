"""RMS norm (arXiv:1910.07467), alone or fused with the residual addition that precedes the norm.

Grid: one program per row, which holds the whole row in registers.  A norm is rounded once, from float32 or float64.

For a few rows, another kernel also multiplies the norm with the router of a mixture of experts.  Grid: (rows, blocks of
experts).  Each program norms the whole row and multiplies the norm with BLOCK_E rows of the router.  So num_experts /
BLOCK_E programs compute the same norm.  A program loads its rows of the router before it waits for the preceding kernel
(PDL).
For more than MAX_ROUTER_ROWS rows, separate launches for norm and product are faster.
"""

import torch
import triton.language as tl
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.layers.linear_plans import DTYPES
from espalier.kernels.layers.quantise_rows import allocate_rounded_rows, store_rounded_row, store_rounded_row_arguments
from espalier.kernels.layers.quantised import InputRows, InputScales, RoundedRows
from espalier.kernels.ops.norm import MAX_ROUTER_ROWS, can_round_norm
from espalier.kernels.runtime.jit import kernel, load_sum
from espalier.kernels.runtime.launch import acc_dtype, chip, next_power_of_2, require, warps_for
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger, pdl_trigger_and_wait, pdl_wait

# Values of a row per warp.  Each thread loads only four, because a program has no other work during the loads.
VALUES_PER_NORM_WARP = 128


@kernel
def norm_row(x, weight, EPS: tl.constexpr, ROW_SIZE: tl.constexpr, ACC_DTYPE: tl.constexpr):
    """Returns the RMS norm of a row, in ACC_DTYPE, times weight.  x: the row's ROW_SIZE values, then zeros."""
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / ROW_SIZE + EPS)
    return x * scale * weight.to(ACC_DTYPE)


@kernel
def _rms_norm_kernel(
    x_ptr, delta_ptr, weight_ptr, sum_ptr, out_ptr, x_row_stride, delta_row_stride, delta_split_stride,
    rounded_values_ptr, rounded_scales_ptr, static_scale_ptr,
    EPS: tl.constexpr, ROW_SIZE: tl.constexpr, SPLITS: tl.constexpr, ACC_DTYPE: tl.constexpr, BLOCK: tl.constexpr,
    GROUP_COLUMNS: tl.constexpr, FP8_MAX: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """delta: the output of a block, which is added to x.  SPLITS: the number of delta's partial sums; 1 for a delta
    without splits, 0 for no delta.  out_ptr: gets the norm; may be None.  rounded_values_ptr: gets the norm rounded to
    FP8 as in quantise_rows.py, with a scale for each GROUP_COLUMNS columns; may be None."""
    pdl_trigger_and_wait(USE_PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < ROW_SIZE
    # The weight is loaded before the reduction, so that both loads overlap.
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(ACC_DTYPE)
    x = tl.load(x_ptr + row * x_row_stride + column, mask=mask, other=0.0).to(ACC_DTYPE)
    if SPLITS:
        delta = delta_ptr + row * delta_row_stride + column
        x += load_sum(delta, delta_split_stride, mask, SPLITS, sum_ptr.dtype.element_ty, ACC_DTYPE)
        # The sum is rounded before the norm, because the residual stream holds the rounded sum.
        x = x.to(sum_ptr.dtype.element_ty)
        # evict_last, because the next norm reads the sum again, after a layer's weights have passed through the L2.
        tl.store(sum_ptr + row * ROW_SIZE + column, x, mask=mask, eviction_policy="evict_last")
        x = x.to(ACC_DTYPE)
    norm = norm_row(x, weight, EPS, ROW_SIZE, ACC_DTYPE)
    if rounded_values_ptr is not None:
        row_values = norm.to(x_ptr.dtype.element_ty).to(tl.float32)
        store_rounded_row(
            row_values, row, rounded_values_ptr, rounded_scales_ptr, static_scale_ptr, ROW_SIZE, BLOCK, GROUP_COLUMNS,
            FP8_MAX,
        )  # fmt: skip
    if out_ptr is not None:
        tl.store(out_ptr + row * ROW_SIZE + column, norm.to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ops/norm.py.  Tolerance: two ulps of the reference, because the order of the sum of squares differs.

    A two-dimensional x with contiguous rows, of any row stride, is read in place; other layouts may be copied first."""
    flat = x.reshape(-1, x.shape[-1])
    out = torch.empty(flat.shape, dtype=x.dtype, device=x.device)
    _launch_kernel(flat, None, weight, eps, None, out)
    return out.view(x.shape)


def add_rms_norm(delta: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns (residual + delta, its RMS norm).  Tolerance: none for the sum; that of rms_norm for the norm."""
    _require_delta(delta, residual)
    total, out = (torch.empty(residual.shape, dtype=residual.dtype, device=residual.device) for _ in range(2))
    _launch_kernel(residual, delta, weight, eps, total, out)
    return total, out


def rounded_norm(
    delta: Tensor | None,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    input_scales: InputScales,
    return_norm: bool = False,
) -> tuple[Tensor, Tensor | None, RoundedRows]:
    """The launcher of ops/norm.py:rounded_norm.  return_norm: whether the unrounded norm is returned too."""
    if not can_round_norm(residual.shape[1], input_scales):
        raise EspalierError(
            f"a norm of {residual.shape[1]} columns is rounded in groups of a power of two, "
            f"not {input_scales.group_size}"
        )
    if delta is not None:
        _require_delta(delta, residual)
    total = None if delta is None else torch.empty_like(residual, memory_format=torch.contiguous_format)
    out = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device) if return_norm else None
    rounded = allocate_rounded_rows(residual, input_scales)
    _launch_kernel(residual, delta, weight, eps, total, out, rounded, input_scales)
    return residual if total is None else total, out, rounded


def _require_delta(delta: Tensor, residual: Tensor) -> None:
    if delta.ndim == 3:
        wide_dtype = torch.promote_types(residual.dtype, torch.float32)
        require("add_rms_norm: delta's partial sums", delta, (-1, *residual.shape), wide_dtype, residual)
    else:
        require("add_rms_norm: delta", delta, tuple(residual.shape), residual.dtype, residual)


def num_partial_sums(values: Tensor | None) -> int:
    """Returns the number of partial sums of `values`, [splits, N, columns] or [N, columns]; 0 for None."""
    return 0 if values is None else len(values) if values.ndim == 3 else 1


def _launch_kernel(
    x: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    eps: float,
    sum_out: Tensor | None,
    norm_out: Tensor | None,
    rounded: RoundedRows | None = None,
    input_scales: InputScales | None = None,
) -> None:
    """Writes x + delta to sum_out, and its norm to norm_out and `rounded`.  None: not written; delta None: 0."""
    rows, size = x.shape
    require("rms_norm: weight", weight, (size,), None, x)
    if not rows:
        return
    x = x if x.stride(-1) == 1 else x.contiguous()
    addend = x if delta is None else delta if delta.stride(-1) == 1 else delta.contiguous()
    block = next_power_of_2(size)
    _rms_norm_kernel[(rows,)](
        *(x, addend, weight.contiguous(), x if sum_out is None else sum_out, norm_out),
        *(x.stride(0), addend.stride(-2), addend.stride(0)),
        EPS=eps, ROW_SIZE=size, SPLITS=num_partial_sums(delta),
        ACC_DTYPE=acc_dtype(x.dtype), BLOCK=block, num_warps=warps_for(block, VALUES_PER_NORM_WARP),
        **store_rounded_row_arguments(rounded, input_scales, block), **pdl_arguments(chip(x)),
    )  # fmt: skip


# The most values of the router that a program holds in registers.
TILE_VALUES = 8192


@kernel
def _norm_router_kernel(
    x_ptr, delta_ptr, weight_ptr, router_ptr, sum_ptr, out_ptr, logits_ptr,
    x_row_stride, delta_row_stride, delta_split_stride, num_experts, rounded_values_ptr, rounded_scales_ptr,
    static_scale_ptr,
    EPS: tl.constexpr, ROW_SIZE: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr,
    GROUP_COLUMNS: tl.constexpr, FP8_MAX: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """SPLITS: the number of delta's partial sums; 1 for a delta without splits.

    rounded_values_ptr: gets the norm rounded to FP8, as in _rms_norm_kernel; may be None."""
    pdl_trigger(USE_PDL)
    row = tl.program_id(0).to(tl.int64)
    column, expert = tl.arange(0, BLOCK), tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    mask = column < ROW_SIZE
    # The router is loaded before the wait, because no kernel writes weights.
    router = tl.load(
        router_ptr + expert.to(tl.int64)[:, None] * ROW_SIZE + column[None, :],
        mask=(expert < num_experts)[:, None] & mask[None, :], other=0.0,
    )  # fmt: skip
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    pdl_wait(USE_PDL)
    x = tl.load(x_ptr + row * x_row_stride + column, mask=mask, other=0.0).to(tl.float32)
    delta = delta_ptr + row * delta_row_stride + column
    x += load_sum(delta, delta_split_stride, mask, SPLITS, sum_ptr.dtype.element_ty, tl.float32)
    # The sum is rounded before the norm, and the norm before the router, as in separate launches.
    total = x.to(sum_ptr.dtype.element_ty)
    x = total.to(tl.float32)
    normed = norm_row(x, weight, EPS, ROW_SIZE, tl.float32).to(out_ptr.dtype.element_ty)
    if tl.program_id(1) == 0:
        tl.store(sum_ptr + row * ROW_SIZE + column, total, mask=mask)
        tl.store(out_ptr + row * ROW_SIZE + column, normed, mask=mask)
        if rounded_values_ptr is not None:
            values = normed.to(tl.float32)
            store_rounded_row(
                values, row, rounded_values_ptr, rounded_scales_ptr, static_scale_ptr, ROW_SIZE, BLOCK, GROUP_COLUMNS,
                FP8_MAX,
            )  # fmt: skip
    logits = tl.sum(router.to(tl.float32) * normed.to(tl.float32)[None, :], 1)
    logits = logits.to(logits_ptr.dtype.element_ty)
    tl.store(logits_ptr + row * num_experts + expert, logits, mask=expert < num_experts)


def norm_router(
    delta: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    router: Tensor,
    rounding: InputScales | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, InputRows, Tensor]:
    """The launcher of ops/norm.py:norm_router.  rounding: how the norm is rounded to FP8; None: not rounded."""
    rows, size = residual.shape
    num_experts = router.shape[0]
    partial_sums = delta if delta.ndim == 3 else delta[None]
    delta_dtype = torch.float32 if delta.ndim == 3 else residual.dtype
    require("norm_router: delta", partial_sums, (-1, rows, size), delta_dtype, residual)
    require("norm_router: weight", weight, (size,), None, residual)
    require("norm_router: router", router, (num_experts, size), residual.dtype, residual)
    read_tensors = (partial_sums, residual, weight)
    if (
        not 0 < rows <= MAX_ROUTER_ROWS
        or residual.dtype not in DTYPES
        or any(tensor.stride(-1) != 1 for tensor in read_tensors)
    ):
        raise EspalierError(
            f"norm_router: the Triton kernel takes 1 to {MAX_ROUTER_ROWS} contiguous rows of bfloat16 or float16, but "
            f"got {rows} of {residual.dtype}: use the reference"
        )
    if not router.is_contiguous():
        raise EspalierError(f"norm_router: the router must be contiguous, but has strides {router.stride()}")
    if rounding is not None and not can_round_norm(size, rounding):
        raise EspalierError(f"norm_router: a norm is rounded in groups of a power of two, not {rounding.group_size}")
    total, out = (torch.empty_like(residual, memory_format=torch.contiguous_format) for _ in range(2))
    rounded = None if rounding is None else allocate_rounded_rows(residual, rounding)
    logits = residual.new_empty(rows, num_experts, dtype=dtype)
    block = next_power_of_2(size)
    block_e = max(min(TILE_VALUES // block, next_power_of_2(num_experts)), 1)
    _norm_router_kernel[rows, -(-num_experts // block_e)](
        residual, partial_sums, weight, router, total, out, logits,
        residual.stride(0), partial_sums.stride(1), partial_sums.stride(0), num_experts,
        EPS=eps, ROW_SIZE=size, SPLITS=partial_sums.shape[0], BLOCK=block, BLOCK_E=block_e,
        num_warps=warps_for(block, VALUES_PER_NORM_WARP),
        **store_rounded_row_arguments(rounded, rounding, block), **pdl_arguments(chip(residual)),
    )  # fmt: skip
    return total, out, out if rounded is None else rounded, logits
