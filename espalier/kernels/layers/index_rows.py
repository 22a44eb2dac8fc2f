"""Prepares the rows of an indexer: norms the key, applies RoPE to key and queries, and stores the key in the KV cache.

Grid: (rows, 1 + blocks of heads).  Program 0 of a row norms, rotates and stores the key.  The other
programs rotate queries in place.

Tolerance: sums are in float32, in another order than in other implementations, and are rounded once.
"""

import torch
import triton.language as tl
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.layers.latent import HEADS_PER_PROGRAM, NUM_WARPS, load_rotated_halves, store_halves
from espalier.kernels.ops.selection import IndexerInputs
from espalier.kernels.runtime.jit import kernel
from espalier.kernels.runtime.launch import acc_dtype, chip, next_power_of_2, require
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger_and_wait


@kernel
def _norm_key(
    key_ptr, weight_ptr, bias_ptr, column, column_exists, mean, scale, DTYPE: tl.constexpr, ACC_DTYPE: tl.constexpr
):
    """Returns the values of the normed key at `column`, rounded to DTYPE.  scale: 1 / the key's standard deviation."""
    x = tl.load(key_ptr + column, mask=column_exists, other=0.0).to(ACC_DTYPE)
    weight = tl.load(weight_ptr + column, mask=column_exists, other=0.0).to(ACC_DTYPE)
    bias = tl.load(bias_ptr + column, mask=column_exists, other=0.0).to(ACC_DTYPE)
    return ((x - mean) * scale * weight + bias).to(DTYPE).to(ACC_DTYPE)


@kernel
def _store_key(
    key_ptr, out_ptr, cos_ptr, sin_ptr, weight_ptr, bias_ptr,
    EPS: tl.constexpr, HEAD_SIZE: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr, DTYPE: tl.constexpr,
    ACC_DTYPE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Norm and rotate the key at `key_ptr`, and store it at `out_ptr`."""
    HALF: tl.constexpr = ROTARY // 2
    column = tl.arange(0, BLOCK_SIZE)
    exists = column < HEAD_SIZE
    x = tl.load(key_ptr + column, mask=exists, other=0.0).to(ACC_DTYPE)
    mean = tl.sum(x, 0) / HEAD_SIZE
    centred = tl.where(exists, x - mean, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / HEAD_SIZE + EPS)
    is_unrotated = exists & (column >= ROTARY)
    unrotated = _norm_key(key_ptr, weight_ptr, bias_ptr, column, is_unrotated, mean, scale, DTYPE, ACC_DTYPE)
    tl.store(out_ptr + column, unrotated.to(out_ptr.dtype.element_ty), mask=is_unrotated)
    pair = tl.arange(0, BLOCK)
    in_half = pair < HALF
    if INTERLEAVED:
        left_column, right_column = 2 * pair, 2 * pair + 1
    else:
        left_column, right_column = pair, pair + HALF
    left = _norm_key(key_ptr, weight_ptr, bias_ptr, left_column, in_half, mean, scale, DTYPE, ACC_DTYPE)
    right = _norm_key(key_ptr, weight_ptr, bias_ptr, right_column, in_half, mean, scale, DTYPE, ACC_DTYPE)
    left_cos = tl.load(cos_ptr + pair, mask=in_half, other=0.0).to(ACC_DTYPE)
    right_cos = tl.load(cos_ptr + HALF + pair, mask=in_half, other=0.0).to(ACC_DTYPE)
    left_sin = tl.load(sin_ptr + pair, mask=in_half, other=0.0).to(ACC_DTYPE)
    right_sin = tl.load(sin_ptr + HALF + pair, mask=in_half, other=0.0).to(ACC_DTYPE)
    tl.store(out_ptr + pair, (left * left_cos + right * left_sin).to(out_ptr.dtype.element_ty), mask=in_half)
    tl.store(out_ptr + HALF + pair, (right * right_cos + left * right_sin).to(out_ptr.dtype.element_ty), mask=in_half)


@kernel
def _rotate_heads(
    q_ptr, first_head, cos_ptr, sin_ptr, q_stride_h,
    HEADS: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr, ACC_DTYPE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotate BLOCK_H query heads of a row, from head `first_head` on, in place."""
    head = (first_head + tl.arange(0, BLOCK_H))[:, None]
    mask = head < HEADS
    left, right = load_rotated_halves(
        q_ptr + head * q_stride_h, cos_ptr, sin_ptr, mask, ROTARY, INTERLEAVED, ACC_DTYPE, BLOCK
    )
    # All warps must read their values before one of them writes.
    tl.debug_barrier()
    store_halves(q_ptr + head * q_stride_h, left, right, mask, ROTARY, BLOCK)


@kernel
def _index_rows_kernel(
    q_ptr, k_ptr, weight_ptr, bias_ptr, cos_ptr, sin_ptr, row_ptr, plane_ptr,
    q_stride_n, q_stride_h, k_stride_n, cos_stride_n, sin_stride_n, row_stride_n, plane_stride_row,
    EPS: tl.constexpr, HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr,
    ACC_DTYPE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """row_ptr: the row of the plane to which each key is written.  weight_ptr, bias_ptr: the LayerNorm of keys."""
    pdl_trigger_and_wait(USE_PDL)
    n, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cos, sin = cos_ptr + n * cos_stride_n, sin_ptr + n * sin_stride_n
    if block == 0:
        to = plane_ptr + tl.load(row_ptr + n * row_stride_n) * plane_stride_row
        _store_key(
            k_ptr + n * k_stride_n, to, cos, sin, weight_ptr, bias_ptr,
            EPS, HEAD_SIZE, ROTARY, INTERLEAVED, q_ptr.dtype.element_ty, ACC_DTYPE, BLOCK_SIZE, BLOCK,
        )  # fmt: skip
    else:
        _rotate_heads(
            q_ptr + n * q_stride_n, (block - 1) * BLOCK_H, cos, sin, q_stride_h, HEADS, ROTARY, INTERLEAVED, ACC_DTYPE,
            BLOCK_H, BLOCK,
        )  # fmt: skip


def rotate_and_store_index(indexer_inputs: IndexerInputs, cache_rows: Tensor, plane: Tensor) -> Tensor:
    """Stores index keys in `plane` and returns the queries, all rotated.  Overwrites indexer_inputs.q.
    Tolerance: one ulp, plus a few ulps of float32."""
    q, k, norm, rotation = indexer_inputs.q, indexer_inputs.k, indexer_inputs.norm, indexer_inputs.rotation
    count, heads, size = q.shape
    rotary, wide_dtype = rotation.cos.shape[1], torch.promote_types(q.dtype, torch.float32)
    require("index rows: k", k, (count, size), q.dtype, q)
    require("index rows: plane", plane, (-1, 1, size), q.dtype, q)
    require("index rows: rows", cache_rows, (count,), torch.int64, q)
    require("index rows: weight", norm.weight, (size,), q.dtype, q)
    require("index rows: bias", norm.bias, (size,), q.dtype, q)
    for name in ("cos", "sin"):
        require(f"index rows: {name}", getattr(rotation, name), (count, rotary), wide_dtype, q)
    if any(x.stride(-1) != 1 for x in (q, k, plane, norm.weight, norm.bias, rotation.cos, rotation.sin)):
        raise EspalierError("index rows need tensors with a contiguous last dimension: pass them contiguous")
    if rotary % 2 or rotary > size:
        raise EspalierError(f"index rows need an even number of rotated values, {size} at most, but got {rotary}")
    block_h = min(HEADS_PER_PROGRAM, next_power_of_2(heads))
    if count:
        _index_rows_kernel[(count, 1 + -(-heads // block_h))](
            *(q, k, norm.weight, norm.bias, rotation.cos, rotation.sin, cache_rows, plane),
            *(*q.stride()[:2], k.stride(0), rotation.cos.stride(0), rotation.sin.stride(0)),
            *(cache_rows.stride(0), plane.stride(0)),
            EPS=norm.eps, HEADS=heads, HEAD_SIZE=size, ROTARY=rotary, INTERLEAVED=indexer_inputs.interleaved,
            ACC_DTYPE=acc_dtype(q.dtype), BLOCK_H=block_h, BLOCK_SIZE=next_power_of_2(size),
            BLOCK=next_power_of_2(rotary // 2), num_warps=NUM_WARPS, **pdl_arguments(chip(q)),
        )  # fmt: skip
    return q
