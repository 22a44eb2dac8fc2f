"""The operations on a layer's QKV before attention: norm the Q and K heads, apply RoPE, store K and V rows in the
cache.

On a GPU this is one launch.  The launch overwrites the Q heads in place if qkv has no partial sums and no gates.  Grid:
(rows, blocks of heads).  A program takes BLOCK_H heads of one row, so the heads of a single row spread over many SMs.
"""

import torch
import triton.language as tl
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.layers.quantised import FP8_MAX
from espalier.kernels.ops.rope import HeadNorms, Rotation, num_q_heads
from espalier.kernels.runtime.jit import divide_and_clamp_to_fp8, kernel, load_sum
from espalier.kernels.runtime.launch import acc_dtype, chip, is_oversubscribed, next_power_of_2, require
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger_and_wait
from espalier.kernels.state.kv_scales import KVScales, require_kv_rows

# Heads per block.  One warp computes a block if a head has at most 128 values; otherwise two warps do.
HEADS_PER_BLOCK = 2
# Blocks per program if one block per program would oversubscribe the chip.  A block keeps its number of warps, so the
# bits are the same.
BLOCKS_PER_PROGRAM = 4


@kernel
def _load_converted(pointer, mask, ACC_DTYPE: tl.constexpr):
    """Load values, 0 where mask is false, and convert them to ACC_DTYPE."""
    return tl.load(pointer, mask=mask, other=0.0).to(ACC_DTYPE)


@kernel
def _norm_heads(
    values, scale, is_q_head, q_norm_ptr, k_norm_ptr, column, column_exists,
    DTYPE: tl.constexpr, ACC_DTYPE: tl.constexpr,
):  # fmt: skip
    """Returns values [H, C] times the scale [H, 1] of each head and the weight of Q's or K's norm, rounded to DTYPE."""
    q_weight = _load_converted(q_norm_ptr + column, column_exists, ACC_DTYPE)
    k_weight = _load_converted(k_norm_ptr + column, column_exists, ACC_DTYPE)
    return (values * scale * tl.where(is_q_head, q_weight, k_weight)).to(DTYPE).to(ACC_DTYPE)


@kernel
def _store_heads(
    destinations, values, head, column, mask,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, ACC_DTYPE: tl.constexpr, FP8_MAX: tl.constexpr,
):  # fmt: skip
    """Store values [H, C]: Q heads in a row of `out`, K and V heads in a row of K and a row of V.
    destinations: pointers and strides of `out`, K and V."""
    out_ptr, out_stride_h, k_ptr, v_ptr, k_stride_h, v_stride_h, k_scale_ptr, v_scale_ptr = destinations
    tl.store(out_ptr + head[:, None] * out_stride_h + column[None, :], values, mask=mask & (head < HEADS)[:, None])
    k_head, v_head = head - HEADS, head - HEADS - KV_HEADS
    is_k, is_v = (k_head >= 0) & (v_head < 0), (v_head >= 0) & (v_head < KV_HEADS)
    if k_scale_ptr is not None:
        k_scale = tl.load(k_scale_ptr + k_head, mask=is_k, other=1.0)
        scale = tl.where(is_v, tl.load(v_scale_ptr + v_head, mask=is_v, other=1.0), k_scale)
        values = divide_and_clamp_to_fp8(values.to(ACC_DTYPE), scale.to(ACC_DTYPE)[:, None], FP8_MAX)
    tl.store(k_ptr + k_head[:, None] * k_stride_h + column[None, :], values, mask=mask & is_k[:, None])
    tl.store(v_ptr + v_head[:, None] * v_stride_h + column[None, :], values, mask=mask & is_v[:, None])


@kernel
def _rotate_kernel(
    qkv_ptr, out_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, row_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr,
    qkv_stride_split, qkv_stride_n, qkv_stride_h, out_stride_n, out_stride_h, cos_stride_n, sin_stride_n, row_stride_n,
    k_stride_row, k_stride_h, v_stride_row, v_stride_h,
    EPS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, ROTARY: tl.constexpr,
    SPLITS: tl.constexpr, HAS_NORMS: tl.constexpr, HAS_V_NORM: tl.constexpr, V_IS_K: tl.constexpr,
    HAS_GATES: tl.constexpr, ACC_DTYPE: tl.constexpr, FP8_MAX: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_REST: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """left, right: the halves of a head's rotated values; rest: the unrotated values after them.
    V_IS_K: qkv has no V heads; each K head is also stored as V, before RoPE, normed if HAS_V_NORM.
    HAS_GATES: qkv has a gate after each Q head.  FP8_MAX: the largest FP8 value, for K and V rows in FP8."""
    pdl_trigger_and_wait(USE_PDL)
    n = tl.program_id(0).to(tl.int64)
    row = tl.load(row_ptr + n * row_stride_n)
    head, column = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK)
    half: tl.constexpr = ROTARY // 2
    in_half = column < half
    head_exists = (head < HEADS + (KV_HEADS if V_IS_K else 2 * KV_HEADS))[:, None]
    mask = head_exists & in_half[None, :]
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    qkv_head = head + tl.minimum(head, HEADS) if HAS_GATES else head
    head_ptrs = qkv_ptr + n * qkv_stride_n + qkv_head[:, None] * qkv_stride_h
    left_ptrs = head_ptrs + column[None, :]
    left = load_sum(left_ptrs, qkv_stride_split, mask, SPLITS, DTYPE, ACC_DTYPE)
    right = load_sum(left_ptrs + half, qkv_stride_split, mask, SPLITS, DTYPE, ACC_DTYPE)
    is_q, is_v, v_left, v_right = head < HEADS, head >= HEADS + KV_HEADS, left, right
    if ROTARY < HEAD_SIZE:
        rest_column = ROTARY + tl.arange(0, BLOCK_REST)
        rest_mask = head_exists & (rest_column < HEAD_SIZE)[None, :]
        rest = load_sum(head_ptrs + rest_column[None, :], qkv_stride_split, rest_mask, SPLITS, DTYPE, ACC_DTYPE)
        v_rest = rest
    if HAS_NORMS:
        squares = tl.sum(left * left, 1) + tl.sum(right * right, 1)
        if ROTARY < HEAD_SIZE:
            squares += tl.sum(rest * rest, 1)
        scale, is_q_head = (1.0 / tl.sqrt(squares / HEAD_SIZE + EPS))[:, None], is_q[:, None]
        if HAS_V_NORM:
            v_left, v_right = left * scale, right * scale
        left = _norm_heads(left, scale, is_q_head, q_norm_ptr, k_norm_ptr, column, in_half, DTYPE, ACC_DTYPE)
        right = _norm_heads(right, scale, is_q_head, q_norm_ptr, k_norm_ptr, half + column, in_half, DTYPE, ACC_DTYPE)
        if ROTARY < HEAD_SIZE:
            if HAS_V_NORM:
                v_rest = rest * scale
            in_rest = rest_column < HEAD_SIZE
            rest = _norm_heads(rest, scale, is_q_head, q_norm_ptr, k_norm_ptr, rest_column, in_rest, DTYPE, ACC_DTYPE)
    cos_ptrs, sin_ptrs = cos_ptr + n * cos_stride_n + column, sin_ptr + n * sin_stride_n + column
    left_cos, left_sin = _load_converted(cos_ptrs, in_half, ACC_DTYPE), _load_converted(sin_ptrs, in_half, ACC_DTYPE)
    rotated_left = left * left_cos[None, :] + right * left_sin[None, :]
    rotated_right = right * _load_converted(cos_ptrs + half, in_half, ACC_DTYPE)[None, :]
    rotated_right += left * _load_converted(sin_ptrs + half, in_half, ACC_DTYPE)[None, :]
    left = tl.where(is_v[:, None], v_left, rotated_left).to(DTYPE)
    right = tl.where(is_v[:, None], v_right, rotated_right).to(DTYPE)
    k_row_ptr, v_row_ptr, out_ptr = k_ptr + row * k_stride_row, v_ptr + row * v_stride_row, out_ptr + n * out_stride_n
    destinations = (out_ptr, out_stride_h, k_row_ptr, v_row_ptr, k_stride_h, v_stride_h, k_scale_ptr, v_scale_ptr)
    _store_heads(destinations, left, head, column, mask, HEADS, KV_HEADS, ACC_DTYPE, FP8_MAX)
    _store_heads(destinations, right, head, half + column, mask, HEADS, KV_HEADS, ACC_DTYPE, FP8_MAX)
    if ROTARY < HEAD_SIZE:
        rest = tl.where(is_v[:, None], v_rest, rest).to(DTYPE)
        _store_heads(destinations, rest, head, rest_column, rest_mask, HEADS, KV_HEADS, ACC_DTYPE, FP8_MAX)
    if V_IS_K:
        v_head, is_k = head + KV_HEADS, (head >= HEADS)[:, None]
        mask = mask & is_k
        _store_heads(destinations, v_left.to(DTYPE), v_head, column, mask, HEADS, KV_HEADS, ACC_DTYPE, FP8_MAX)
        _store_heads(destinations, v_right.to(DTYPE), v_head, half + column, mask, HEADS, KV_HEADS, ACC_DTYPE, FP8_MAX)
        if ROTARY < HEAD_SIZE:
            mask, v_rest = rest_mask & is_k, v_rest.to(DTYPE)
            _store_heads(destinations, v_rest, v_head, rest_column, mask, HEADS, KV_HEADS, ACC_DTYPE, FP8_MAX)


def rotate_and_store(
    qkv: Tensor,
    rotation: Rotation,
    norms: HeadNorms | None,
    cache_rows: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    scales: KVScales | None = None,
) -> Tensor:
    """Norms and rotates Q and K, stores K and V, and returns Q, see ops/rope.py.  Tolerance: one ulp, because the
    reference may fuse multiply-adds.  Raises EspalierError for other shapes, dtypes or strides."""
    sums = qkv[None] if qkv.ndim == 3 else qkv
    dtype = k_buffer.dtype if scales is None else scales.dtype
    count, num_heads, size = sums.shape[-3:]
    kv_heads = k_buffer.shape[1]
    v_is_k, has_gates = (False, False) if norms is None else (norms.v_is_k, norms.has_gates)
    heads, rotary = num_q_heads(num_heads, kv_heads, norms), rotation.cos.shape[1]
    in_place = qkv.ndim == 3 and not has_gates
    out = qkv if in_place else torch.empty(count, max(heads, 0), size, dtype=dtype, device=qkv.device)
    require("rope: qkv's partial sums", sums, (-1, -1, -1, -1), out.dtype if qkv.ndim == 3 else torch.float32, k_buffer)
    _check_arguments(sums, out, rotation, norms, cache_rows, k_buffer, v_buffer, scales)
    # Without norms the kernel gets placeholder pointers, which it does not read.
    q_norm, k_norm, eps, norms_v_heads, *_ = HeadNorms(rotation.cos, rotation.cos, 0.0) if norms is None else norms
    num_heads -= heads if has_gates else 0
    blocks = BLOCKS_PER_PROGRAM if is_oversubscribed(count * -(-num_heads // HEADS_PER_BLOCK), chip(qkv)) else 1
    if count:
        # With fused multiply-adds the bits would depend on the block size, because the compiler chooses what to fuse.
        _rotate_kernel[(count, -(-num_heads // (blocks * HEADS_PER_BLOCK)))](
            *(sums, out, rotation.cos, rotation.sin, q_norm, k_norm, cache_rows, k_buffer, v_buffer),
            *((None, None) if scales is None else (scales.k, scales.v)),
            *(*sums.stride()[:3], *out.stride()[:2], rotation.cos.stride(0), rotation.sin.stride(0)),
            *(cache_rows.stride(0), *k_buffer.stride()[:2], *v_buffer.stride()[:2]),
            EPS=eps, HEADS=heads, KV_HEADS=kv_heads, HEAD_SIZE=size, ROTARY=rotary, SPLITS=len(sums),
            HAS_NORMS=norms is not None, HAS_V_NORM=norms_v_heads, V_IS_K=v_is_k, HAS_GATES=has_gates,
            ACC_DTYPE=acc_dtype(out.dtype), FP8_MAX=FP8_MAX, BLOCK_H=blocks * HEADS_PER_BLOCK,
            BLOCK=next_power_of_2(rotary // 2), BLOCK_REST=next_power_of_2(max(size - rotary, 1)),
            num_warps=blocks * (1 if size <= 128 else 2), enable_fp_fusion=False, **pdl_arguments(chip(qkv)),
        )  # fmt: skip
    return out[:, :heads]


def _check_arguments(
    sums: Tensor,
    out: Tensor,
    rotation: Rotation,
    norms: HeadNorms | None,
    cache_rows: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    scales: KVScales | None,
) -> None:
    count, num_heads, size = sums.shape[1:]
    kv_heads, rotary = k_buffer.shape[1], rotation.cos.shape[1]
    wide_dtype = torch.promote_types(out.dtype, torch.float32)
    for name in ("cos", "sin"):
        require(f"rope: {name}", getattr(rotation, name), (count, rotary), wide_dtype, out)
    require("rope: rows", cache_rows, (count,), torch.int64, out)
    require_kv_rows("rope: k_buffer", k_buffer, (-1, kv_heads, size), scales, out)
    require_kv_rows("rope: v_buffer", v_buffer, (-1, kv_heads, size), scales, out)
    head_norms = () if norms is None else norms[:2]
    for name, norm in zip(("q_norm", "k_norm"), head_norms, strict=False):
        require(f"rope: {name}", norm, (size,), None, out)
    if rotary % 2 or rotary > size or num_heads < kv_heads * (1 if norms is not None and norms.v_is_k else 2):
        raise EspalierError(
            f"rope: got qkv {list(sums.shape[1:])}, {kv_heads} KV heads and {rotary} values per head to rotate: it "
            "needs K and V of each KV head, and an even number of rotated values within the head"
        )
    for tensor in (sums, out, *rotation, k_buffer, v_buffer, *head_norms):
        if tensor.stride(-1) != 1:
            raise EspalierError(
                f"rope: a tensor {list(tensor.shape)} with strides {tensor.stride()} is not contiguous in its last "
                "dimension: pass it contiguous"
            )
