"""RMS normalisation (arXiv:1910.07467), alone and after the residual addition that comes before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from espalier.kernels.layers.linear import load_sum, sum_parts_reference
from espalier.kernels.runtime.launch import chip, exact_type, kernel, power_of_two, require
from espalier.kernels.runtime.pdl import early, pdl_wait_if

if TYPE_CHECKING:
    import triton.language as tl


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension of x [..., H], in x's dtype and rounded once; float32
    inside, float64 stays."""
    return rms_norm_triton(x, weight, eps) if x.is_cuda else rms_norm_reference(x, weight, eps)


def add_rms_norm(delta: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(residual + delta, its norm), [N, H] each, both in residual's dtype; the norm is of the rounded sum.

    delta: [N, H] in that dtype, or [parts, N, H] float32, whose sum in order is rounded to it first
    (kernels/layers/linear.py's linear_parts).
    """
    make = add_rms_norm_triton if residual.is_cuda else add_rms_norm_reference
    return make(delta, residual, weight, eps)


@kernel
def _rms_norm_kernel(
    x_ptr,
    delta_ptr,
    weight_ptr,
    sum_ptr,
    out_ptr,
    x_n,
    delta_n,
    delta_part,
    EPS: tl.constexpr,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    pdl_wait_if(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    real = at < SIZE
    # Read before the sum over the row, behind which it would begin another wait for memory.
    weight = tl.load(weight_ptr + at, mask=real, other=0.0).to(EXACT)
    x = tl.load(x_ptr + row * x_n + at, mask=real, other=0.0).to(EXACT)
    if PARTS:
        x += load_sum(delta_ptr + row * delta_n + at, delta_part, real, PARTS, sum_ptr.dtype.element_ty, EXACT)
        # What is normed is what the residual stream holds.
        x = x.to(sum_ptr.dtype.element_ty)
        # Read again by the next norm, before which a linear's weights pass through the L2.
        tl.store(sum_ptr + row * SIZE + at, x, mask=real, eviction_policy="evict_last")
        x = x.to(EXACT)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / SIZE + EPS)
    tl.store(out_ptr + row * SIZE + at, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=real)


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Within an ulp or two of the reference: the sum of squares is taken in another order.

    Rows that stand at one stride are read where they are; any other form is copied first.
    """
    flat = x.reshape(-1, x.shape[-1])
    out = torch.empty(flat.shape, dtype=x.dtype, device=x.device)
    _launch(flat, None, weight, eps, None, out)
    return out.view(x.shape)


def add_rms_norm_triton(delta: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum is the reference's to the bit, the norm as near as rms_norm_triton's."""
    if delta.ndim == 3:
        require("the residual's delta in parts", delta, (-1, *residual.shape), torch.float32, residual)
    else:
        require("the residual's delta", delta, tuple(residual.shape), residual.dtype, residual)
    total, out = (torch.empty(residual.shape, dtype=residual.dtype, device=residual.device) for _ in range(2))
    _launch(residual, delta, weight, eps, total, out)
    return total, out


def _launch(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, total: Tensor | None, out: Tensor) -> None:
    rows, size = x.shape
    require("the norm's weight", weight, (size,), None, x)
    if not rows:
        return
    x = x if x.stride(-1) == 1 else x.contiguous()
    added = x if delta is None else delta if delta.stride(-1) == 1 else delta.contiguous()
    block = power_of_two(size)
    _rms_norm_kernel[(rows,)](
        x,
        added,
        weight.contiguous(),
        out if total is None else total,
        out,
        x.stride(0),
        added.stride(-2),
        added.stride(0),
        # A constant, since as an argument it would be a float32.
        EPS=eps,
        SIZE=size,
        PARTS=0 if delta is None else delta.shape[0] if delta.ndim == 3 else 1,
        EXACT=exact_type(x.dtype),
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
        **early(chip(x)),
    )


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    exact = torch.promote_types(x.dtype, torch.float32)
    return norm_by_length(x.to(exact), *length_constants(weight.to(exact), eps)).to(x.dtype)


def length_constants(weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """What norm_by_length wants of a weight [H]: it times sqrt(H), and the length that eps stands for."""
    size = weight.numel()
    return weight * size**0.5, weight.new_full((), (size * eps) ** 0.5)


def norm_by_length(x: Tensor, scaled_weight: Tensor, floor: Tensor) -> Tensor:
    """The norm with sqrt(sum(x²) + H·eps) as a hypotenuse: four operations where F.rms_norm runs nine."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return (x / torch.hypot(length, floor)).mul_(scaled_weight)


def add_rms_norm_reference(delta: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if delta.ndim == 3:
        delta = sum_parts_reference(delta, residual.dtype)
    total = residual + delta
    return total, rms_norm_reference(total, weight, eps)
