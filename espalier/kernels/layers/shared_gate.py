"""Computes a shared expert's gate and multiplies the expert's result by it, in one launch.

Grid: (rows, blocks of the result).  Each program computes its row's gate, and loads the gate's weight before it waits
for the previous kernel (PDL).
"""

import triton.language as tl
from torch import Tensor

from espalier.kernels.runtime.jit import kernel, load_sum
from espalier.kernels.runtime.launch import acc_dtype, chip, next_power_of_2, require
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger, pdl_wait

# Values of the result that a program writes.
BLOCK = 1024


@kernel
def _scale_by_gate_kernel(
    result_ptr, x_ptr, gate_ptr, out_ptr, result_row_stride, result_split_stride, x_row_stride, out_row_stride,
    NUM_IN: tl.constexpr, ROW_SIZE: tl.constexpr, SPLITS: tl.constexpr, ACC_DTYPE: tl.constexpr, BLOCK_IN: tl.constexpr,
    BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """SPLITS: partial sums of `result`.  NUM_IN, ROW_SIZE: the columns of x and of the result."""
    pdl_trigger(USE_PDL)
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_IN)
    gate = tl.load(gate_ptr + column, mask=column < NUM_IN, other=0.0).to(ACC_DTYPE)
    pdl_wait(USE_PDL)
    x = tl.load(x_ptr + row * x_row_stride + column, mask=column < NUM_IN, other=0.0).to(ACC_DTYPE)
    logit = tl.sum(x * gate, 0).to(x_ptr.dtype.element_ty).to(ACC_DTYPE)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < ROW_SIZE
    result = load_sum(
        result_ptr + row * result_row_stride + column, result_split_stride, mask, SPLITS, x_ptr.dtype.element_ty,
        ACC_DTYPE,
    )  # fmt: skip
    tl.store(out_ptr + row * out_row_stride + column, result / (1.0 + tl.exp(-logit)), mask=mask)


def scale_by_gate(result: Tensor, x: Tensor, gate: Tensor, out: Tensor) -> None:
    """The launcher of ops/experts.py:scale_by_gate.  Tolerance: one rounding of the gate's product to x's dtype."""
    sums = result if result.ndim == 3 else result[None]
    rows, size = out.shape
    require("scale_by_gate: result", sums, (-1, rows, size), None, x)
    require("scale_by_gate: gate", gate, (1, x.shape[1]), x.dtype, x)
    if not out.numel():
        return
    x, sums = x if x.stride(1) == 1 else x.contiguous(), sums if sums.stride(2) == 1 else sums.contiguous()
    block = min(next_power_of_2(size), BLOCK)
    _scale_by_gate_kernel[rows, -(-size // block)](
        *(sums, x, gate.contiguous(), out, sums.stride(1), sums.stride(0), x.stride(0), out.stride(0)),
        NUM_IN=x.shape[1], ROW_SIZE=size, SPLITS=sums.shape[0], ACC_DTYPE=acc_dtype(x.dtype),
        BLOCK_IN=next_power_of_2(x.shape[1]), BLOCK=block, num_warps=4, **pdl_arguments(chip(x)),
    )  # fmt: skip
