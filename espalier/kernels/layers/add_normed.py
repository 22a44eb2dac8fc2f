"""Computes in one launch the norms of blocks' outputs, the residual addition and the norms before the next blocks.

Grid: one program per row, which holds the whole row in registers.  The kernel computes in float32 (float64 for float64)
and rounds where separate launches would round, so 16-bit rows get the bits of separate launches of norm.py.  For
float32 and float64 the bits may differ, because the compiler may fuse a product and a sum.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.layers.norm import VALUES_PER_NORM_WARP, norm_row, num_partial_sums
from espalier.kernels.ops.norm import MAX_NORMS, MAX_OUTPUTS, NormWeight
from espalier.kernels.runtime.jit import kernel, load_sum
from espalier.kernels.runtime.launch import acc_dtype, chip, next_power_of_2, require, warps_for
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger, pdl_wait


@kernel
def _add_normed_kernel(
    x_ptr, first_output_ptr, second_output_ptr, sum_ptr, first_weight_ptr, second_weight_ptr, output_weight_ptr,
    weight_ptr, weight_1_ptr, weight_2_ptr, out_ptr, out_1_ptr, out_2_ptr,
    x_row_stride, first_row_stride, first_split_stride, second_row_stride, second_split_stride,
    FIRST_EPS: tl.constexpr, SECOND_EPS: tl.constexpr, OUTPUT_EPS: tl.constexpr, EPS: tl.constexpr,
    EPS_1: tl.constexpr, EPS_2: tl.constexpr, FIRST_SPLITS: tl.constexpr, SECOND_SPLITS: tl.constexpr,
    SCALE: tl.constexpr, ROW_SIZE: tl.constexpr, ACC_DTYPE: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """x: the residual.  first, second: the outputs of blocks.  *_SPLITS: the number of partial sums.

    second_output_ptr, output_weight_ptr, out_ptr, out_1_ptr, out_2_ptr: None if there is no such tensor."""
    DTYPE: tl.constexpr = sum_ptr.dtype.element_ty
    pdl_trigger(USE_PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < ROW_SIZE
    # The weights are loaded before the wait, because no kernel writes them.
    first_weight = tl.load(first_weight_ptr + column, mask=mask, other=0.0)
    if second_output_ptr is not None:
        second_weight = tl.load(second_weight_ptr + column, mask=mask, other=0.0)
    if output_weight_ptr is not None:
        output_weight = tl.load(output_weight_ptr + column, mask=mask, other=0.0)
    if out_ptr is not None:
        weight = tl.load(weight_ptr + column, mask=mask, other=0.0)
    if out_1_ptr is not None:
        weight_1 = tl.load(weight_1_ptr + column, mask=mask, other=0.0)
    if out_2_ptr is not None:
        weight_2 = tl.load(weight_2_ptr + column, mask=mask, other=0.0)
    pdl_wait(USE_PDL)
    x = tl.load(x_ptr + row * x_row_stride + column, mask=mask, other=0.0).to(ACC_DTYPE)
    first = first_output_ptr + row * first_row_stride + column
    added = load_sum(first, first_split_stride, mask, FIRST_SPLITS, DTYPE, ACC_DTYPE)
    if second_output_ptr is not None:
        second = second_output_ptr + row * second_row_stride + column
        second_added = load_sum(second, second_split_stride, mask, SECOND_SPLITS, DTYPE, ACC_DTYPE)
        second_added = norm_row(second_added, second_weight, SECOND_EPS, ROW_SIZE, ACC_DTYPE).to(DTYPE).to(ACC_DTYPE)
    added = norm_row(added, first_weight, FIRST_EPS, ROW_SIZE, ACC_DTYPE).to(DTYPE).to(ACC_DTYPE)
    if second_output_ptr is not None:
        added = (added + second_added).to(DTYPE).to(ACC_DTYPE)
    if output_weight_ptr is not None:
        added = norm_row(added, output_weight, OUTPUT_EPS, ROW_SIZE, ACC_DTYPE).to(DTYPE).to(ACC_DTYPE)
    if SCALE != 1.0:
        x = (x * SCALE).to(DTYPE).to(ACC_DTYPE)
    total = (x + added).to(DTYPE)
    # evict_last, because the next norm reads the sum again, after a linear layer's weights have passed through the L2.
    tl.store(sum_ptr + row * ROW_SIZE + column, total, mask=mask, eviction_policy="evict_last")
    x = total.to(ACC_DTYPE)
    if out_ptr is not None:
        tl.store(out_ptr + row * ROW_SIZE + column, norm_row(x, weight, EPS, ROW_SIZE, ACC_DTYPE).to(DTYPE), mask=mask)
    if out_1_ptr is not None:
        tl.store(
            out_1_ptr + row * ROW_SIZE + column, norm_row(x, weight_1, EPS_1, ROW_SIZE, ACC_DTYPE).to(DTYPE), mask=mask
        )
    if out_2_ptr is not None:
        tl.store(
            out_2_ptr + row * ROW_SIZE + column, norm_row(x, weight_2, EPS_2, ROW_SIZE, ACC_DTYPE).to(DTYPE), mask=mask
        )


def add_normed(
    block_outputs: tuple[tuple[Tensor, NormWeight], ...],
    output_norm: NormWeight | None,
    residual: Tensor,
    residual_scale: float,
    next_norms: tuple[NormWeight, ...],
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Returns (sum, norms of the sum), see ops/norm.py.  All have the tolerance of norm.py:rms_norm."""
    _check_arguments(block_outputs, output_norm, residual, next_norms)
    total, *out = (torch.empty_like(residual, memory_format=torch.contiguous_format) for _ in (None, *next_norms))
    if not len(residual):
        return total, tuple(out)
    size = residual.shape[1]
    block = next_power_of_2(size)
    outputs, block_norms = zip(*block_outputs, strict=True)
    x, *dense_outputs = (rows if rows.stride(-1) == 1 else rows.contiguous() for rows in (residual, *outputs))
    first, second = _pad_with_none(dense_outputs, MAX_OUTPUTS)
    norms = (*_pad_with_none(block_norms, MAX_OUTPUTS), output_norm, *_pad_with_none(next_norms, MAX_NORMS))
    # eps is a constexpr argument, because a run-time eps would be rounded to float32.
    _add_normed_kernel[(len(residual),)](
        *(x, first, second, total),
        *(None if norm is None else norm.weight.contiguous() for norm in norms),
        *_pad_with_none(out, MAX_NORMS),
        *(x.stride(0), *_row_and_split_strides(first), *_row_and_split_strides(second)),
        *(0.0 if norm is None else norm.eps for norm in norms),
        *(num_partial_sums(first), num_partial_sums(second)),
        SCALE=residual_scale, ROW_SIZE=size, ACC_DTYPE=acc_dtype(residual.dtype), BLOCK=block,
        num_warps=warps_for(block, VALUES_PER_NORM_WARP), **pdl_arguments(chip(residual)),
    )  # fmt: skip
    return total, tuple(out)


def _check_arguments(
    block_outputs: tuple[tuple[Tensor, NormWeight], ...],
    output_norm: NormWeight | None,
    residual: Tensor,
    next_norms: tuple[NormWeight, ...],
) -> None:
    if not 1 <= len(block_outputs) <= MAX_OUTPUTS or len(next_norms) > MAX_NORMS:
        raise EspalierError(
            f"add_normed: 1 to {MAX_OUTPUTS} outputs and at most {MAX_NORMS} norms are supported, but got "
            f"{len(block_outputs)} and {len(next_norms)}: use the reference"
        )
    wide = torch.promote_types(residual.dtype, torch.float32)
    for output, _ in block_outputs:
        shape, dtype = ((-1, *residual.shape), wide) if output.ndim == 3 else (tuple(residual.shape), residual.dtype)
        require("add_normed: an output", output, shape, dtype, residual)
    for norm in (*(own for _, own in block_outputs), output_norm, *next_norms):
        if norm is not None:
            require("add_normed: a weight", norm.weight, (residual.shape[1],), None, residual)


def _pad_with_none(items: Sequence[Any], length: int) -> list[Any]:
    """Returns `items`, filled up with None to a list of `length` items."""
    return [*items, *[None] * (length - len(items))]


def _row_and_split_strides(output: Tensor | None) -> tuple[int, int]:
    """Returns the strides of a row and of a partial sum; zeros without an output."""
    return (0, 0) if output is None else (output.stride(-2), output.stride(0))
