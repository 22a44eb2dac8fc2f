"""Multi-head latent attention (MLA) before attention: norms the latent, applies RoPE, and stores one row per token.

K is the whole row, [normed latent, rotated RoPE part].  V is the latent part of the same row (DeepSeek-AI 2024,
arXiv:2405.04434, section 2.1).  On a GPU this is one launch.  The first program of a row stores the latent, and the
row's other programs rotate blocks of query heads.  In `write_latents` with few rows, more programs of the launch
multiply queries with k_up.

`head_product` multiplies the rows of each head with the head's own matrix (v_up or k_up).  Grid: (blocks of outputs,
heads).  A program multiplies all rows for BLOCK_OUT outputs of one head.  A program loads its part of the matrix before
it waits for the previous kernel (PDL).  The kernel is for few rows: above MAX_HEAD_ROWS, PyTorch's batched product is
faster.

Tolerance: sums are in float32, in another order than in other implementations, and are rounded once.
"""

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.layers.linear_plans import DTYPES
from espalier.kernels.layers.norm import norm_row
from espalier.kernels.layers.quantised import FP8_MAX
from espalier.kernels.ops.rope import MAX_HEAD_INPUTS, MAX_HEAD_ROWS, LatentDestination, check_latent_sizes
from espalier.kernels.runtime.jit import divide_and_clamp_to_fp8, kernel
from espalier.kernels.runtime.launch import acc_dtype, chip, next_power_of_2, require
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger, pdl_trigger_and_wait, pdl_wait
from espalier.kernels.state.kv_scales import require_kv_rows

# The most values of a head's matrix that a program holds in registers.
TILE_VALUES = 8192
NUM_WARPS = 4


@kernel
def multiply_head(
    x_ptr, w_ptr, out_ptr, block_index, head, num_rows, num_out, num_in, x_stride_n, x_stride_h, w_stride_h,
    w_stride_in, w_stride_out, out_stride_n, out_stride_h,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Compute one block of a head's outputs for all rows.  The matrix is loaded before the PDL wait."""
    head = head.to(tl.int64)
    row, k = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_IN)
    column = block_index * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    # The matrix may be loaded before the wait, because no kernel writes weights.
    w = tl.load(
        w_ptr + head * w_stride_h + column[:, None] * w_stride_out + k[None, :] * w_stride_in,
        mask=(column[:, None] < num_out) & (k[None, :] < num_in), other=0.0,
    )  # fmt: skip
    pdl_wait(USE_PDL)
    x = tl.load(
        x_ptr + row.to(tl.int64)[None, :] * x_stride_n + head * x_stride_h + k[:, None],
        mask=(row[None, :] < num_rows) & (k[:, None] < num_in), other=0.0,
    )  # fmt: skip
    acc = tl.dot(w, x, out_dtype=tl.float32)
    out_ptrs = out_ptr + row.to(tl.int64)[:, None] * out_stride_n + head * out_stride_h + column[None, :]
    mask = (row[:, None] < num_rows) & (column[None, :] < num_out)
    tl.store(out_ptrs, tl.trans(acc).to(out_ptr.dtype.element_ty), mask=mask)


@kernel
def _head_product_kernel(
    x_ptr, w_ptr, out_ptr, num_rows, num_out, num_in, x_stride_n, x_stride_h, w_stride_h, w_stride_in, w_stride_out,
    out_stride_n, out_stride_h,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of outputs, heads).  Arguments: see multiply_head."""
    pdl_trigger(USE_PDL)
    multiply_head(
        x_ptr, w_ptr, out_ptr, tl.program_id(0), tl.program_id(1), num_rows, num_out, num_in,
        x_stride_n, x_stride_h, w_stride_h, w_stride_in, w_stride_out, out_stride_n, out_stride_h, BLOCK_ROWS,
        BLOCK_OUT, BLOCK_IN, USE_PDL,
    )  # fmt: skip


def head_product(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Writes x · weight to out, head by head.  Takes 1 to MAX_HEAD_ROWS rows of bfloat16 or float16, and at most
    MAX_HEAD_INPUTS inputs.

    The weight may have any strides; x and out need a contiguous last dimension.  Raises EspalierError otherwise."""
    (rows, heads, num_in), num_out = x.shape, weight.shape[2]
    num_blocks, sizes = require_head_product(x, weight, out)
    _head_product_kernel[num_blocks, heads](
        x, weight, out, rows, num_out, num_in, *x.stride()[:2], *weight.stride(), *out.stride()[:2],
        **sizes, num_warps=NUM_WARPS, **pdl_arguments(chip(x)),
    )  # fmt: skip


def require_head_product(x: Tensor, weight: Tensor, out: Tensor) -> tuple[int, dict[str, int]]:
    """Returns (blocks of outputs per head, BLOCK sizes) for multiply_head.  Raises EspalierError as head_product."""
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
    block_in = max(next_power_of_2(num_in), 16)
    block_out = min(max(next_power_of_2(num_out), 16), TILE_VALUES // block_in, 64)
    return -(-num_out // block_out), {"BLOCK_ROWS": MAX_HEAD_ROWS, "BLOCK_OUT": block_out, "BLOCK_IN": block_in}


# Query heads per program.
HEADS_PER_PROGRAM = 16


@kernel
def load_rotated_halves(values_ptr, cos_ptr, sin_ptr, mask, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr,
                    ACC_DTYPE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Returns (left, right): the rotated halves of the values at values_ptr [.., 1], which all belong to one token
    position."""
    column = tl.arange(0, BLOCK)
    half: tl.constexpr = ROTARY // 2
    exists = column < half
    mask = mask & exists[None, :]
    if INTERLEAVED:
        left_ptrs = values_ptr + 2 * column[None, :]
        right_ptrs = left_ptrs + 1
    else:
        left_ptrs = values_ptr + column[None, :]
        right_ptrs = left_ptrs + half
    left = tl.load(left_ptrs, mask=mask, other=0.0).to(ACC_DTYPE)
    right = tl.load(right_ptrs, mask=mask, other=0.0).to(ACC_DTYPE)
    left_cos = tl.load(cos_ptr + column, mask=exists, other=0.0).to(ACC_DTYPE)[None, :]
    right_cos = tl.load(cos_ptr + half + column, mask=exists, other=0.0).to(ACC_DTYPE)[None, :]
    left_sin = tl.load(sin_ptr + column, mask=exists, other=0.0).to(ACC_DTYPE)[None, :]
    right_sin = tl.load(sin_ptr + half + column, mask=exists, other=0.0).to(ACC_DTYPE)[None, :]
    return left * left_cos + right * left_sin, right * right_cos + left * right_sin


@kernel
def store_halves(ptrs, left, right, mask, ROTARY: tl.constexpr, BLOCK: tl.constexpr):
    """Store the two halves of rotated values at ptrs [.., 1]."""
    column = tl.arange(0, BLOCK)[None, :]
    half: tl.constexpr = ROTARY // 2
    mask = mask & (column < half)
    tl.store(ptrs + column, left.to(ptrs.dtype.element_ty), mask=mask)
    tl.store(ptrs + half + column, right.to(ptrs.dtype.element_ty), mask=mask)


class LatentConstants(NamedTuple):
    """Constexpr arguments.  RANK: the number of values before the rotated values in a latent row.  Q_ROPE_OFFSET: the
    same in a query head.  BLOCK_H: heads per program.  BLOCK_RANK, BLOCK: powers of two, at least RANK and ROTARY / 2.
    """

    EPS: float
    HEADS: int
    RANK: int
    ROTARY: int
    Q_ROPE_OFFSET: int
    INTERLEAVED: bool
    ACC_DTYPE: Any
    FP8_MAX: float
    BLOCK_H: int
    BLOCK_RANK: int
    BLOCK: int


@kernel
def _store_latent(
    latent_ptr, out_ptr, cos_ptr, sin_ptr, norm_ptr, scale_ptr, DTYPE: tl.constexpr, CONSTANTS: tl.constexpr
):
    """Norm and rotate the latent at `latent_ptr`, and store it at `out_ptr`.

    norm_ptr: None without a norm.  scale_ptr: the scale of FP8 rows; None for other rows."""
    RANK: tl.constexpr = CONSTANTS.RANK
    ACC_DTYPE: tl.constexpr = CONSTANTS.ACC_DTYPE
    column = tl.arange(0, CONSTANTS.BLOCK_RANK)
    exists = column < RANK
    x = tl.load(latent_ptr + column, mask=exists, other=0.0).to(ACC_DTYPE)
    if norm_ptr is not None:
        weight = tl.load(norm_ptr + column, mask=exists, other=0.0)
        x = norm_row(x, weight, CONSTANTS.EPS, RANK, ACC_DTYPE)
    one = tl.zeros([1, 1], tl.int32)
    left, right = load_rotated_halves(
        latent_ptr + RANK + one, cos_ptr, sin_ptr, one == 0, CONSTANTS.ROTARY, CONSTANTS.INTERLEAVED, ACC_DTYPE,
        CONSTANTS.BLOCK,
    )  # fmt: skip
    if scale_ptr is not None:
        scale = tl.load(scale_ptr).to(ACC_DTYPE)
        x = divide_and_clamp_to_fp8(x.to(DTYPE).to(ACC_DTYPE), scale, CONSTANTS.FP8_MAX)
        left = divide_and_clamp_to_fp8(left.to(DTYPE).to(ACC_DTYPE), scale, CONSTANTS.FP8_MAX)
        right = divide_and_clamp_to_fp8(right.to(DTYPE).to(ACC_DTYPE), scale, CONSTANTS.FP8_MAX)
    tl.store(out_ptr + column, x.to(out_ptr.dtype.element_ty), mask=exists)
    store_halves(out_ptr + RANK + one, left, right, one == 0, CONSTANTS.ROTARY, CONSTANTS.BLOCK)


@kernel
def _rotate_or_store(row_index, block_index, operands, CONSTANTS: tl.constexpr):
    """Store the latent of row `row_index` (block 0), or rotate the queries of BLOCK_H heads (blocks from 1 on)."""
    (
        rope_ptr, q_ptr, latent_ptr, cos_ptr, sin_ptr, norm_ptr, row_ptr, plane_ptr, scale_ptr,
        rope_stride_n, rope_stride_h, q_stride_n, q_stride_h, latent_stride_n, cos_stride_n, sin_stride_n, row_stride_n,
        plane_stride_row,
    ) = operands  # fmt: skip
    ROTARY: tl.constexpr = CONSTANTS.ROTARY
    row_index = row_index.to(tl.int64)
    cos, sin = cos_ptr + row_index * cos_stride_n, sin_ptr + row_index * sin_stride_n
    if block_index == 0:
        to = plane_ptr + tl.load(row_ptr + row_index * row_stride_n) * plane_stride_row
        dtype: tl.constexpr = q_ptr.dtype.element_ty
        _store_latent(latent_ptr + row_index * latent_stride_n, to, cos, sin, norm_ptr, scale_ptr, dtype, CONSTANTS)
    else:
        head = ((block_index - 1) * CONSTANTS.BLOCK_H + tl.arange(0, CONSTANTS.BLOCK_H))[:, None]
        mask, rope = head < CONSTANTS.HEADS, rope_ptr + row_index * rope_stride_n + head * rope_stride_h
        left, right = load_rotated_halves(
            rope, cos, sin, mask, ROTARY, CONSTANTS.INTERLEAVED, CONSTANTS.ACC_DTYPE, CONSTANTS.BLOCK
        )
        # q_rope may be a view of q, so all warps must read their values before one of them writes.
        tl.debug_barrier()
        store_halves(
            q_ptr + row_index * q_stride_n + head * q_stride_h + CONSTANTS.Q_ROPE_OFFSET, left, right, mask, ROTARY,
            CONSTANTS.BLOCK,
        )  # fmt: skip


@kernel
def _rotate_latent_kernel(operands, CONSTANTS: tl.constexpr, USE_PDL: tl.constexpr):
    """Store latents and rotate queries, see _rotate_or_store.  Grid: (rows, 1 + blocks of heads)."""
    pdl_trigger_and_wait(USE_PDL)
    _rotate_or_store(tl.program_id(0), tl.program_id(1), operands, CONSTANTS)


@kernel
def _write_latents_kernel(
    x_ptr, w_ptr, q_ptr, num_rows, num_in, num_product, x_stride_n, x_stride_h, w_stride_h, w_stride_in, w_stride_out,
    q_stride_n, q_stride_h, operands,
    CONSTANTS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid: num_product programs for the product with k_up, then the programs of _rotate_latent_kernel, row by row."""
    HEADS: tl.constexpr = CONSTANTS.HEADS
    pdl_trigger(USE_PDL)
    program = tl.program_id(0)
    if program < num_product:
        multiply_head(
            x_ptr, w_ptr, q_ptr, program // HEADS, program % HEADS, num_rows, CONSTANTS.RANK, num_in,
            x_stride_n, x_stride_h, w_stride_h, w_stride_in, w_stride_out, q_stride_n, q_stride_h, BLOCK_ROWS,
            BLOCK_OUT, BLOCK_IN, USE_PDL,
        )  # fmt: skip
    else:
        pdl_wait(USE_PDL)
        at, per_row = program - num_product, 1 + (HEADS + CONSTANTS.BLOCK_H - 1) // CONSTANTS.BLOCK_H
        _rotate_or_store(at // per_row, at % per_row, operands, CONSTANTS)


def rotate_and_store_latent(q_rope: Tensor, q: Tensor, latent: Tensor, destination: LatentDestination) -> None:
    """Rotates q_rope into the last columns of q, and stores the latents, see ops/rope.py.
    Tolerance: one ulp of the dtype and a few ulps of float32 from the reference."""
    check_latent_sizes(q_rope, q, latent, destination)
    operands, constants, blocks = _rotation_arguments(q_rope, q, latent, destination)
    if len(q):
        _rotate_latent_kernel[len(q), blocks](
            operands, CONSTANTS=constants, num_warps=NUM_WARPS, **pdl_arguments(chip(q))
        )


def write_latents(q_inputs: Tensor, k_up: Tensor, q: Tensor, latent: Tensor, destination: LatentDestination) -> None:
    """Computes q from q_inputs and stores the latents, see ops/rope.py.  q must not be a view of q_inputs.

    The bits and the errors are the same as from head_product and rotate_and_store_latent."""
    num_unrotated, rank = k_up.shape[1:]
    x, q_rope = q_inputs[..., :num_unrotated], q_inputs[..., num_unrotated:]
    check_latent_sizes(q_rope, q, latent, destination)
    num_blocks, sizes = require_head_product(x, k_up, q[..., :rank])
    operands, constants, blocks = _rotation_arguments(q_rope, q, latent, destination)
    num_product = num_blocks * x.shape[1]
    _write_latents_kernel[(num_product + len(q) * blocks,)](
        *(x, k_up, q, len(x), x.shape[2], num_product, *x.stride()[:2], *k_up.stride(), *q.stride()[:2], operands),
        CONSTANTS=constants, num_warps=NUM_WARPS, **sizes, **pdl_arguments(chip(q)),
    )  # fmt: skip


def _rotation_arguments(
    q_rope: Tensor, q: Tensor, latent: Tensor, destination: LatentDestination
) -> tuple[tuple[Any, ...], LatentConstants, int]:
    """Returns (operands, constexpr arguments, blocks per row) of _rotate_or_store.  Raises EspalierError."""
    rotation, form, rows, plane, scales = destination
    (count, heads, rotary), size = q_rope.shape, plane.shape[2]
    wide_dtype = torch.promote_types(q.dtype, torch.float32)
    require("latent rope: q", q, (count, heads, -1), None, plane)
    require("latent rope: q_rope", q_rope, (count, heads, rotary), q.dtype, plane)
    require("latent rope: latent", latent, (count, 1, size), q.dtype, plane)
    require_kv_rows("latent rope: plane", plane, (-1, 1, size), scales, q)
    require("latent rope: rows", rows, (count,), torch.int64, plane)
    for name in ("cos", "sin"):
        require(f"latent rope: {name}", getattr(rotation, name), (count, rotary), wide_dtype, plane)
    norm = form.norm
    if norm is not None:
        require("latent rope: norm", norm, (size - rotary,), None, plane)
    read_tensors = (q_rope, q, latent, rotation.cos, rotation.sin, plane, *(() if norm is None else (norm,)))
    if any(tensor.stride(-1) != 1 and tensor.shape[-1] > 1 for tensor in read_tensors):
        raise EspalierError("latent rope needs tensors with a contiguous last dimension: pass them contiguous")
    block_h = min(HEADS_PER_PROGRAM, next_power_of_2(heads))
    operands = (
        *(q_rope, q, latent, rotation.cos, rotation.sin, norm),
        *(rows, plane, None if scales is None else scales.k),
        *(*q_rope.stride()[:2], *q.stride()[:2], latent.stride(0)),
        *(rotation.cos.stride(0), rotation.sin.stride(0), rows.stride(0), plane.stride(0)),
    )
    constants = LatentConstants(
        *(form.eps, heads, size - rotary, rotary, q.shape[2] - rotary, form.interleaved, acc_dtype(q.dtype), FP8_MAX),
        *(block_h, next_power_of_2(max(size - rotary, 1)), next_power_of_2(rotary // 2)),
    )
    return operands, constants, 1 + -(-heads // block_h)
