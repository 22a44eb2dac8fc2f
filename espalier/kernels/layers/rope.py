"""A layer's projections before they meet: head norms and rotation, and rows of K and V written to their planes.

The reference takes the steps one by one; on a GPU they are one launch, which turns query and key heads in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.layers.linear import load_sum, sum_parts_reference
from espalier.kernels.layers.norm import rms_norm_reference
from espalier.kernels.runtime.launch import chip, exact_type, kernel, oversubscribed, power_of_two, require
from espalier.kernels.runtime.pdl import early, pdl_wait_if

if TYPE_CHECKING:
    import triton.language as tl

# Of one program, a warp for heads of up to 128: a row's heads turn on many processors at once.
HEADS_A_BLOCK = 2
# Where programs of one block would crowd the chip, so many blocks share one, each with its own warps: no bit changes.
BLOCKS_A_PROGRAM = 4


@dataclass(frozen=True)
class RopeAndNorm:
    """cos, sin: [N, rotary] of the rows' positions, the sine's first half negated, float32 (float64 for float64); the
    first `rotary` values of a head are rotated, the others are left.

    q_norm, k_norm: [size] weights of the RMS norm that some families give each head first, with its eps; both or none.
    """

    cos: Tensor
    sin: Tensor
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0


def rotate_and_store(
    qkv: Tensor, rope_and_norm: RopeAndNorm, rows: Tensor, k_buffer: Tensor, v_buffer: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm and rotate the q and k heads of qkv [N, heads + 2 · kv_heads, size], q before k before v.

    qkv may come as [parts, N, ...] float32, whose sum in order is rounded to the buffers' dtype first
    (kernels/layers/linear.py's linear_parts).  k and v go to rows [N] int64 of k_buffer and v_buffer [R, kv_heads,
    size]. Returns q [N, heads, size], k and v [N, kv_heads, size]; a qkv that is no parts is overwritten on a GPU.
    """
    make = rotate_and_store_triton if qkv.is_cuda else rotate_and_store_reference
    return make(qkv, rope_and_norm, rows, k_buffer, v_buffer)


@kernel
def _half(pointer, real, EXACT: tl.constexpr):
    return tl.load(pointer, mask=real, other=0.0).to(EXACT)


@kernel
def _rotate_kernel(
    qkv_ptr, turned_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, row_ptr, k_ptr, v_ptr,
    qkv_part, qkv_n, qkv_h, turned_n, turned_h, cos_n, sin_n, row_n, k_row, k_h, v_row, v_h,
    EPS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr,
    ROTARY: tl.constexpr, PARTS: tl.constexpr, IN_PLACE: tl.constexpr, NORMS: tl.constexpr,
    EXACT: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK: tl.constexpr, BLOCK_REST: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    pdl_wait_if(DEPENDENT)
    n = tl.program_id(0).to(tl.int64)
    row = tl.load(row_ptr + n * row_n)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    at = tl.arange(0, BLOCK)
    half: tl.constexpr = ROTARY // 2
    inside = at < half
    real = (head < HEADS + 2 * KV_HEADS)[:, None] & inside[None, :]
    TYPE: tl.constexpr = turned_ptr.dtype.element_ty
    left_at = qkv_ptr + n * qkv_n + head[:, None] * qkv_h + at[None, :]
    left = load_sum(left_at, qkv_part, real, PARTS, TYPE, EXACT)
    right = load_sum(left_at + half, qkv_part, real, PARTS, TYPE, EXACT)
    is_q, is_v = head < HEADS, head >= HEADS + KV_HEADS
    kept_left, kept_right = left, right
    # What lies past the rotated values of a head.
    if ROTARY < SIZE:
        rest_of = ROTARY + tl.arange(0, BLOCK_REST)
        rest_real = (head < HEADS + 2 * KV_HEADS)[:, None] & (rest_of < SIZE)[None, :]
        rest_at = qkv_ptr + n * qkv_n + head[:, None] * qkv_h + rest_of[None, :]
        rest = load_sum(rest_at, qkv_part, rest_real, PARTS, TYPE, EXACT)
    if NORMS:
        squares = tl.sum(left * left, 1) + tl.sum(right * right, 1)
        if ROTARY < SIZE:
            squares += tl.sum(rest * rest, 1)
        mean = squares / SIZE
        scale = (1.0 / tl.sqrt(mean + EPS))[:, None]
        of_q = is_q[:, None]
        weight = tl.where(of_q, _half(q_norm_ptr + at, inside, EXACT), _half(k_norm_ptr + at, inside, EXACT))
        left = (left * scale * weight).to(TYPE).to(EXACT)
        q_right, k_right = _half(q_norm_ptr + half + at, inside, EXACT), _half(k_norm_ptr + half + at, inside, EXACT)
        right = (right * scale * tl.where(of_q, q_right, k_right)).to(TYPE).to(EXACT)
        if ROTARY < SIZE:
            q_rest = _half(q_norm_ptr + rest_of, rest_of < SIZE, EXACT)
            k_rest = _half(k_norm_ptr + rest_of, rest_of < SIZE, EXACT)
            normed = rest * scale * tl.where(of_q, q_rest, k_rest)
            rest = tl.where(is_v[:, None], rest, normed.to(TYPE).to(EXACT))
    cos_at, sin_at = cos_ptr + n * cos_n + at, sin_ptr + n * sin_n + at
    turned_left = left * _half(cos_at, inside, EXACT)[None, :] + right * _half(sin_at, inside, EXACT)[None, :]
    turned_right = right * _half(cos_at + half, inside, EXACT)[None, :]
    turned_right += left * _half(sin_at + half, inside, EXACT)[None, :]
    left = tl.where(is_v[:, None], kept_left, turned_left).to(TYPE)
    right = tl.where(is_v[:, None], kept_right, turned_right).to(TYPE)
    # In place, values stand already.
    turned = real & (head < HEADS + KV_HEADS)[:, None] if IN_PLACE else real
    turned_at = turned_ptr + n * turned_n + head[:, None] * turned_h + at[None, :]
    tl.store(turned_at, left, mask=turned)
    tl.store(turned_at + half, right, mask=turned)
    is_k = real & (is_q == is_v)[:, None]
    k_at = k_ptr + row * k_row + (head - HEADS)[:, None] * k_h + at[None, :]
    tl.store(k_at, left, mask=is_k)
    tl.store(k_at + half, right, mask=is_k)
    v_at = v_ptr + row * v_row + (head - HEADS - KV_HEADS)[:, None] * v_h + at[None, :]
    tl.store(v_at, left, mask=real & is_v[:, None])
    tl.store(v_at + half, right, mask=real & is_v[:, None])
    if ROTARY < SIZE:
        own = rest_of[None, :]
        turned = rest_real & (head < HEADS + KV_HEADS)[:, None] if IN_PLACE else rest_real
        tl.store(turned_ptr + n * turned_n + head[:, None] * turned_h + own, rest, mask=turned)
        k_rest_at = k_ptr + row * k_row + (head - HEADS)[:, None] * k_h + own
        tl.store(k_rest_at, rest, mask=rest_real & (is_q == is_v)[:, None])
        v_rest_at = v_ptr + row * v_row + (head - HEADS - KV_HEADS)[:, None] * v_h + own
        tl.store(v_rest_at, rest, mask=rest_real & is_v[:, None])


def rotate_and_store_triton(
    qkv: Tensor, rope_and_norm: RopeAndNorm, rows: Tensor, k_buffer: Tensor, v_buffer: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Products and the sum in float32, rounded once: within an ulp of the reference, whose addcmul may fuse them.

    Raises EspalierError where a tensor's form is not what rotate_and_store says.
    """
    in_place = qkv.ndim == 3
    parts = qkv[None] if in_place else qkv
    turned = qkv if in_place else torch.empty(qkv.shape[1:], dtype=k_buffer.dtype, device=qkv.device)
    require("projections in parts", parts, (-1, -1, -1, -1), qkv.dtype if in_place else torch.float32, k_buffer)
    _check(parts, turned, rope_and_norm, rows, k_buffer, v_buffer)
    count, num_heads, size = turned.shape
    kv_heads = k_buffer.shape[1]
    heads, rotary = num_heads - 2 * kv_heads, rope_and_norm.cos.shape[1]
    q_norm, k_norm = (
        rope_and_norm.cos if norm is None else norm for norm in (rope_and_norm.q_norm, rope_and_norm.k_norm)
    )
    blocks = BLOCKS_A_PROGRAM if oversubscribed(count * -(-num_heads // HEADS_A_BLOCK), chip(qkv)) else 1
    if count:
        _rotate_kernel[(count, -(-num_heads // (blocks * HEADS_A_BLOCK)))](
            parts,
            turned,
            rope_and_norm.cos,
            rope_and_norm.sin,
            q_norm,
            k_norm,
            rows,
            k_buffer,
            v_buffer,
            *parts.stride()[:3],
            *turned.stride()[:2],
            rope_and_norm.cos.stride(0),
            rope_and_norm.sin.stride(0),
            rows.stride(0),
            *k_buffer.stride()[:2],
            *v_buffer.stride()[:2],
            # A constant, since as an argument it would be a float32.
            EPS=rope_and_norm.eps,
            HEADS=heads,
            KV_HEADS=kv_heads,
            SIZE=size,
            ROTARY=rotary,
            PARTS=len(parts),
            IN_PLACE=in_place,
            NORMS=rope_and_norm.q_norm is not None,
            EXACT=exact_type(turned.dtype),
            BLOCK_H=blocks * HEADS_A_BLOCK,
            BLOCK=power_of_two(rotary // 2),
            BLOCK_REST=power_of_two(max(size - rotary, 1)),
            num_warps=blocks * (1 if size <= 128 else 2),
            # Which of two products a multiply-add takes in is the compiler's whim, another with other blocks.
            enable_fp_fusion=False,
            **early(chip(qkv)),
        )
    return turned[:, :heads], turned[:, heads : heads + kv_heads], turned[:, heads + kv_heads :]


def _check(
    parts: Tensor, qkv: Tensor, rope_and_norm: RopeAndNorm, rows: Tensor, k_buffer: Tensor, v_buffer: Tensor
) -> None:
    count, _, size = qkv.shape
    kv_heads, rotary = k_buffer.shape[1], rope_and_norm.cos.shape[1]
    exact = torch.promote_types(qkv.dtype, torch.float32)
    for name in ("cos", "sin"):
        require(f"the rotation's {name}", getattr(rope_and_norm, name), (count, rotary), exact, qkv)
    require("the rows that keys and values go to", rows, (count,), torch.int64, qkv)
    require("the buffer of keys", k_buffer, (-1, kv_heads, size), qkv.dtype, qkv)
    require("the buffer of values", v_buffer, (-1, kv_heads, size), qkv.dtype, qkv)
    for name, norm in (("q", rope_and_norm.q_norm), ("k", rope_and_norm.k_norm)):
        if norm is not None:
            require(f"the norm of {name} heads", norm, (size,), None, qkv)
    if (
        (rope_and_norm.q_norm is None) != (rope_and_norm.k_norm is None)
        or rotary % 2
        or rotary > size
        or qkv.shape[1] <= 2 * kv_heads
    ):
        raise EspalierError(
            f"a rotation of {rotary} values of {list(qkv.shape)} with {kv_heads} key heads needs query heads, an even "
            "number of values of a head, and head norms for queries and keys or for neither"
        )
    for what in (
        parts,
        qkv,
        rope_and_norm.cos,
        rope_and_norm.sin,
        k_buffer,
        v_buffer,
        rope_and_norm.q_norm,
        rope_and_norm.k_norm,
    ):
        if what is not None and what.stride(-1) != 1:
            raise EspalierError(
                f"a rotation needs the values of a head side by side, and strides {what.stride()} of a tensor "
                f"{list(what.shape)} keep them apart: pass it contiguous in its last dimension"
            )


def rotate_and_store_reference(
    qkv: Tensor, rope_and_norm: RopeAndNorm, rows: Tensor, k_buffer: Tensor, v_buffer: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """qkv is left as it was."""
    if qkv.ndim == 4:
        qkv = sum_parts_reference(qkv, k_buffer.dtype)
    rotated = qkv.shape[1] - k_buffer.shape[1]
    heads = rotated - k_buffer.shape[1]
    turned = rotate(
        _normed(qkv[:, :rotated], heads, rope_and_norm), rope_and_norm.cos[:, None], rope_and_norm.sin[:, None]
    )
    q, k, v = turned[:, :heads], turned[:, heads:], qkv[:, rotated:]
    write_rows((k_buffer, v_buffer), rows, (k, v))
    return q, k, v


def write_rows(planes: Sequence[Tensor], rows: Tensor, values: Sequence[Tensor]) -> None:
    """values [N, heads, size] to rows [N] of each plane [R, heads, size]."""
    for plane, value in zip(planes, values, strict=True):
        plane.index_copy_(0, rows, value)


def _normed(turned: Tensor, heads: int, rope_and_norm: RopeAndNorm) -> Tensor:
    """The q and k heads, normed head by head where the family does so."""
    if rope_and_norm.q_norm is None or rope_and_norm.k_norm is None:
        return turned
    q, k = turned[:, :heads], turned[:, heads:]
    return torch.cat(
        (
            rms_norm_reference(q, rope_and_norm.q_norm, rope_and_norm.eps),
            rms_norm_reference(k, rope_and_norm.k_norm, rope_and_norm.eps),
        ),
        1,
    )


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [N, heads, size], its first `rotary` values rotated by its row's position, in x's dtype; cos, sin: [N, 1,
    rotary], see RopeAndNorm."""
    rotary = cos.shape[-1]
    turned = x[..., :rotary]
    left, right = turned.chunk(2, dim=-1)
    turned = torch.addcmul(turned * cos, torch.cat((right, left), dim=-1), sin).to(x.dtype)
    return turned if rotary == x.shape[-1] else torch.cat((turned, x[..., rotary:]), -1)
