"""A linear layer for few rows: y = x · weightᵀ + bias.  Reading the weight takes most of the time.

Grid: (blocks of weight rows, splits).  A program multiplies BLOCK_OUT rows of the weight with all rows of x.  A program
covers all columns, or one of `splits` parts of the columns (split-K).  Split-K programs write float32 partial sums
[splits, rows, out] without atomics.  The next kernel adds the partial sums in order, so equal inputs give equal bits.
`linear` adds them with a second kernel.  `linear_partial_sums` returns them for a kernel of the caller.

Above about 100 rows PyTorch's GEMM library is faster.  For some shapes several smaller calls of the library are faster
than one (`LibraryPlan`), because a grid of 1.5 waves of programs takes as long as a grid of 2 waves.

`espalier doctor --tune` measures which plan is fastest.  linear_plans.py reads the result, lists the plans worth
measuring, and has a rule for unmeasured shapes.

Tolerance: products of 16-bit floats are exact in float32.  The products are summed in float32, in a fixed order that
other implementations do not share, and the result is rounded once.  Against float64 the error is at most half an ulp of
the result, plus in · 2⁻²⁴ times the sum of the products' magnitudes.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.hopper.gated import fills_chip, hopper_gated, supports_hopper_gated
from espalier.kernels.layers.activation import silu_and_multiply
from espalier.kernels.layers.linear_plans import DTYPES, MAX_ROWS, LibraryPlan, LinearPlan, TritonPlan, block_rows
from espalier.kernels.ops.activation import SILU, Activation, num_up_columns
from espalier.kernels.ops.linear import activate_partial_sums, library_partial_sums
from espalier.kernels.runtime.jit import kernel, load_sum
from espalier.kernels.runtime.launch import Chip, chip, is_precompiling, require
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger, pdl_trigger_and_wait, pdl_wait, prefetch

SUM_BLOCK = 1024


@kernel
def _linear_kernel(
    x_ptr, w_ptr, bias_ptr, out_ptr, num_rows, num_out, num_in, x_stride, w_stride,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr,
    EVEN_OUT: tl.constexpr, EVEN_IN: tl.constexpr, HAS_BIAS: tl.constexpr, IS_GATED: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """acc [BLOCK_OUT, BLOCK_ROWS] is a transposed tile of out.  EVEN_OUT, EVEN_IN: whether the block size divides
    num_out, num_in.

    IS_GATED: the weight has num_out rows of gate, then num_out rows of up; out has num_out columns of silu(gate) * up.
    """
    w_rows = weight_rows(num_out, BLOCK_OUT, EVEN_OUT, IS_GATED)
    split, num_splits = tl.program_id(1), tl.num_programs(1)
    steps = tl.cdiv(num_in, BLOCK_IN)
    k_begin, k_end = split * steps // num_splits * BLOCK_IN, (split + 1) * steps // num_splits * BLOCK_IN
    rows, ks = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_IN)
    w_ptrs = w_ptr + w_rows.to(tl.int64)[:, None] * w_stride + (k_begin + ks)[None, :]
    pdl_trigger(USE_PDL)
    if USE_PDL:
        # One prefetch per L2 line of 128 bytes, which holds 64 numbers.
        lines = k_begin + tl.arange(0, BLOCK_IN // 64) * 64
        prefetch(w_ptr + w_rows.to(tl.int64)[:, None] * w_stride + tl.minimum(lines, num_in - 1)[None, :])
    pdl_wait(USE_PDL)
    x_ptrs = x_ptr + rows.to(tl.int64)[None, :] * x_stride + (k_begin + ks)[:, None]
    acc = tl.zeros((BLOCK_OUT, BLOCK_ROWS), tl.float32)
    for k in range(k_begin, k_end, BLOCK_IN):
        if EVEN_IN:
            w = tl.load(w_ptrs)
            x = tl.load(x_ptrs, mask=rows[None, :] < num_rows, other=0.0)
        else:
            remaining = num_in - k
            w = tl.load(w_ptrs, mask=ks[None, :] < remaining, other=0.0)
            x = tl.load(x_ptrs, mask=(rows[None, :] < num_rows) & (ks[:, None] < remaining), other=0.0)
        acc = tl.dot(w, x, acc)
        w_ptrs += BLOCK_IN
        x_ptrs += BLOCK_IN
    if HAS_BIAS:
        # Only the first split adds the bias.
        acc += tl.where(split == 0, tl.load(bias_ptr + w_rows).to(tl.float32), 0.0)[:, None]
    store_tile(acc, out_ptr, split, rows, num_rows, num_out, BLOCK_ROWS, BLOCK_OUT, IS_GATED)


@kernel
def weight_rows(num_out, BLOCK_OUT: tl.constexpr, EVEN_OUT: tl.constexpr, IS_GATED: tl.constexpr):
    """Returns the rows of the weight that a program multiplies with: [BLOCK_OUT]."""
    row = tl.arange(0, BLOCK_OUT)
    if IS_GATED:
        # 8 rows of gate alternate with the 8 matching rows of up.  So in a tensor core's tile of 16 rows, one thread
        # holds a value of gate and the matching value of up.
        w_rows = tl.program_id(0) * (BLOCK_OUT // 2) + row // 16 * 8 + row % 8
        return (w_rows if EVEN_OUT else tl.minimum(w_rows, num_out - 1)) + row % 16 // 8 * num_out
    # Rows past the end read the last row instead; their results are not stored.
    w_rows = tl.program_id(0) * BLOCK_OUT + row
    return w_rows if EVEN_OUT else tl.minimum(w_rows, num_out - 1)


@kernel
def split_gate_and_up(tile, BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr):
    """Returns gate and up, [BLOCK_OUT / 2, BLOCK_ROWS] each, of a tile of interleaved rows (see weight_rows)."""
    pairs = tl.reshape(tile, (BLOCK_OUT // 16, 2, 8, BLOCK_ROWS)).permute(0, 2, 3, 1)
    return tl.split(tl.reshape(pairs, (BLOCK_OUT // 2, BLOCK_ROWS, 2)))


@kernel
def store_tile(
    acc, out_ptr, split, rows, num_rows, num_out,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, IS_GATED: tl.constexpr,
):  # fmt: skip
    """Writes acc [BLOCK_OUT, BLOCK_ROWS], or silu(gate) · up, to partial sum `split` of out (0 without split-K)."""
    BLOCK_WRITTEN: tl.constexpr = BLOCK_OUT // 2 if IS_GATED else BLOCK_OUT
    result = acc.to(out_ptr.dtype.element_ty)
    if IS_GATED:
        gate, up = split_gate_and_up(result, BLOCK_ROWS, BLOCK_OUT)
        result = silu_and_multiply(gate.to(tl.float32), up.to(tl.float32)).to(out_ptr.dtype.element_ty)
    columns = tl.program_id(0) * BLOCK_WRITTEN + tl.arange(0, BLOCK_WRITTEN)
    offsets = (split.to(tl.int64) * num_rows + rows)[:, None] * num_out + columns[None, :]
    mask = (rows[:, None] < num_rows) & (columns[None, :] < num_out)
    tl.store(out_ptr + offsets, tl.trans(result), mask=mask)


@kernel
def _add_partial_sums_kernel(
    partial_sums_ptr, out_ptr, num_values, SPLITS: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """out [num_values] = sum of partial sums [SPLITS, num_values] float32; a program sums BLOCK numbers."""
    pdl_trigger_and_wait(USE_PDL)
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < num_values
    total = load_sum(partial_sums_ptr + offset, num_values, mask, SPLITS, out_ptr.dtype.element_ty, tl.float32)
    tl.store(out_ptr + offset, total.to(out_ptr.dtype.element_ty), mask=mask)


def add_partial_sums(partial_sums: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the sum of partial sums [splits, rows, out] in `dtype`; a result without splits unchanged."""
    if partial_sums.ndim == 2:
        return partial_sums
    splits, rows, num_out = partial_sums.shape
    out = partial_sums.new_empty(rows, num_out, dtype=dtype)
    _add_partial_sums_kernel[(-(-out.numel() // SUM_BLOCK),)](
        partial_sums, out, out.numel(), SPLITS=splits, BLOCK=SUM_BLOCK, num_warps=4, **pdl_arguments(chip(partial_sums))
    )
    return out


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, plan: LinearPlan) -> Tensor:
    return add_partial_sums(linear_partial_sums(x, weight, bias, plan), x.dtype)


def linear_partial_sums(x: Tensor, weight: Tensor, bias: Tensor | None, plan: LinearPlan) -> Tensor:
    """For a TritonPlan, each row of x and weight must be contiguous, with any row stride; all tensors have x's dtype.

    Raises EspalierError on other shapes, dtypes or strides, and if the plan does not fit the chip."""
    if plan is None:
        return F.linear(x, weight, bias)
    if isinstance(plan, LibraryPlan):
        return library_partial_sums(x, weight, bias, plan)
    return _launch_kernel(x, weight, bias, plan, is_gated=False)


def linear_gated(
    x: Tensor, weight: Tensor, bias: Tensor | None, plan: LinearPlan, activation: Activation = SILU
) -> Tensor:
    """With silu and a TritonPlan, one launch without split-K also computes the activation, which saves two launches.
    With silu and no plan, many rows on Hopper run in the kernel of hopper/gated.py."""
    num_up_columns(weight.shape[0], activation)
    if activation.is_silu and isinstance(plan, TritonPlan):
        return _launch_kernel(x, weight, bias, replace(plan, splits=1), is_gated=True)
    if activation.is_silu and plan is None and x.is_cuda and supports_hopper_gated(x, weight, bias, chip(x)):
        if fills_chip(len(x), weight.shape[0] // 2, chip(x)):
            return hopper_gated(x, weight)
        if is_precompiling():
            hopper_gated(x, weight)
    out = activate_partial_sums.triton(linear_partial_sums(x, weight, bias, plan), x.dtype, activation)
    assert isinstance(out, Tensor)
    return out


def write_parts(x: Tensor, weight: Tensor, bias: Tensor | None, plan: TritonPlan, out: Tensor) -> None:
    """The launcher of ops/linear.py:write_parts.  out: [plan.splits, rows, out], gets the partial sums."""
    require("linear: parts", out, (plan.splits, len(x), weight.shape[0]), torch.float32, x)
    if not out.is_contiguous():
        raise EspalierError(f"linear: parts must be contiguous, but have strides {out.stride()}")
    _launch_kernel(x, weight, bias, plan, is_gated=False, out=out)


def _launch_kernel(
    x: Tensor, weight: Tensor, bias: Tensor | None, plan: TritonPlan, is_gated: bool, out: Tensor | None = None
) -> Tensor:
    """is_gated: whether the kernel returns silu(gate) · up.  out: for the result or its partial sums; None: new."""
    rows, num_in = x.shape
    splits, gpu = plan.splits, chip(x)
    _check_arguments(x, weight, bias, plan, gpu)
    num_out, block_written = weight.shape[0], plan.block_out
    if is_gated:
        num_out, block_written = num_out // 2, block_written // 2
    if out is None:
        is_split = splits > 1 and rows * num_out > 0
        out = x.new_empty(splits, rows, num_out, dtype=torch.float32) if is_split else x.new_empty(rows, num_out)
    if out.numel() == 0:
        return out
    _linear_kernel[-(-num_out // block_written), splits](
        x, weight, bias, out, rows, num_out, num_in, x.stride(0), weight.stride(0),
        BLOCK_ROWS=block_rows(rows), BLOCK_OUT=plan.block_out, BLOCK_IN=plan.block_in,
        EVEN_OUT=num_out % block_written == 0, EVEN_IN=num_in % plan.block_in == 0,
        HAS_BIAS=bias is not None, IS_GATED=is_gated,
        num_warps=plan.warps, num_stages=plan.stages, **pdl_arguments(gpu),
    )  # fmt: skip
    return out


def _check_arguments(x: Tensor, weight: Tensor, bias: Tensor | None, plan: TritonPlan, gpu: Chip) -> None:
    rows, num_in = x.shape
    require("weight", weight, (-1, num_in), x.dtype, x)
    if bias is not None:
        require("bias", bias, (weight.shape[0],), x.dtype, x)
    if x.dtype not in DTYPES or rows > MAX_ROWS:
        raise EspalierError(
            f"linear: the Triton kernel takes at most {MAX_ROWS} rows of bfloat16 or float16, but got {rows} rows of "
            f"{x.dtype}: use F.linear (plan None)"
        )
    if 1 not in (x.stride(1), num_in) or 1 not in (weight.stride(1), num_in):
        raise EspalierError("linear: the rows of x and weight must be contiguous, but one of the two is transposed")
    if plan.shared_memory(rows) > gpu.shared_memory:
        raise EspalierError(
            f"linear: for {rows} rows {plan} needs {plan.shared_memory(rows)} bytes of shared memory, but this chip "
            f"has {gpu.shared_memory}: measure again with espalier doctor --tune"
        )
