"""The product of each head's rows with the head's own matrix: v_up of latent attention, and k_up beside the rotation
(kernels/layers/latent.py).

Grid: (blocks of outputs, heads).  A program multiplies BLOCK_OUT outputs of one head with all rows.  It loads its part
of the matrix before it waits for the kernel before (PDL).  For few rows only: above MAX_HEAD_ROWS, PyTorch's batched
product is faster.

Tolerance: sums are in float32, in an order that other implementations do not share, and are rounded once.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.layers.linear_plans import DTYPES
from espalier.kernels.ops.rope import MAX_HEAD_INPUTS, MAX_HEAD_ROWS
from espalier.kernels.runtime.jit import kernel
from espalier.kernels.runtime.launch import chip, power_of_two, require
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger, pdl_wait

# Numbers of a matrix that a program holds in registers.
TILE = 8192
NUM_WARPS = 4


@kernel
def multiply_head(
    x_ptr, w_ptr, out_ptr, block, head, num_rows, num_out, num_in, x_n, x_h, w_h, w_in, w_out, out_n, out_h,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One block of a head's outputs, for all rows.  Waits for the kernel before once the matrix is loaded."""
    head = head.to(tl.int64)
    row, k = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_IN)
    column = block * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    # No kernel writes weights.
    w = tl.load(
        w_ptr + head * w_h + column[:, None] * w_out + k[None, :] * w_in,
        mask=(column[:, None] < num_out) & (k[None, :] < num_in), other=0.0,
    )  # fmt: skip
    pdl_wait(DEPENDENT)
    x = tl.load(
        x_ptr + row.to(tl.int64)[None, :] * x_n + head * x_h + k[:, None],
        mask=(row[None, :] < num_rows) & (k[:, None] < num_in), other=0.0,
    )  # fmt: skip
    acc = tl.dot(w, x, out_dtype=tl.float32)
    to = out_ptr + row.to(tl.int64)[:, None] * out_n + head * out_h + column[None, :]
    mask = (row[:, None] < num_rows) & (column[None, :] < num_out)
    tl.store(to, tl.trans(acc).to(out_ptr.dtype.element_ty), mask=mask)


@kernel
def _head_product_kernel(
    x_ptr, w_ptr, out_ptr, num_rows, num_out, num_in, x_n, x_h, w_h, w_in, w_out, out_n, out_h,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    pdl_trigger(DEPENDENT)
    multiply_head(
        x_ptr, w_ptr, out_ptr, tl.program_id(0), tl.program_id(1), num_rows, num_out, num_in,
        x_n, x_h, w_h, w_in, w_out, out_n, out_h, BLOCK_ROWS, BLOCK_OUT, BLOCK_IN, DEPENDENT,
    )  # fmt: skip


def head_product(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """1 to MAX_HEAD_ROWS rows of bfloat16 or float16, at most MAX_HEAD_INPUTS inputs.  The weight may have any strides;
    x and out need a contiguous last dimension.  Raises EspalierError on others."""
    (rows, heads, num_in), num_out = x.shape, weight.shape[2]
    num_blocks, sizes = require_head_product(x, weight, out)
    _head_product_kernel[num_blocks, heads](
        x, weight, out, rows, num_out, num_in, *x.stride()[:2], *weight.stride(), *out.stride()[:2],
        **sizes, num_warps=NUM_WARPS, **pdl_arguments(chip(x)),
    )  # fmt: skip


def require_head_product(x: Tensor, weight: Tensor, out: Tensor) -> tuple[int, dict[str, int]]:
    """(blocks of outputs of a head, the sizes of a block) for multiply_head.  Raises EspalierError as above."""
    (rows, heads, num_in), num_out = x.shape, weight.shape[2]
    require("head_product: weight", weight, (heads, num_in, num_out), x.dtype, x)
    require("head_product: out", out, (rows, heads, num_out), x.dtype, x)
    if (
        not 0 < rows <= MAX_HEAD_ROWS
        or num_in > MAX_HEAD_INPUTS
        or x.dtype not in DTYPES
        or x.stride(2) != 1
        or out.stride(2) != 1
    ):
        raise EspalierError(
            f"head_product: the Triton kernel takes 1 to {MAX_HEAD_ROWS} rows of at most {MAX_HEAD_INPUTS} contiguous "
            f"inputs in bfloat16 or float16, but got {list(x.shape)} in {x.dtype}: use the reference"
        )
    block_in = max(power_of_two(num_in), 16)
    block_out = min(max(power_of_two(num_out), 16), TILE // block_in, 64)
    return -(-num_out // block_out), {"BLOCK_ROWS": MAX_HEAD_ROWS, "BLOCK_OUT": block_out, "BLOCK_IN": block_in}
