"""RMS normalisation (arXiv:1910.07467), alone and after the residual addition that comes before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from espalier.kernels.launch import kernel, power_of_two, require

if TYPE_CHECKING:
    import triton.language as tl


@kernel
def _rms_norm_kernel(
    x_ptr,
    delta_ptr,
    weight_ptr,
    sum_ptr,
    out_ptr,
    x_n,
    delta_n,
    EPS: tl.constexpr,
    SIZE: tl.constexpr,
    ADD: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    real = at < SIZE
    x = tl.load(x_ptr + row * x_n + at, mask=real, other=0.0).to(EXACT)
    if ADD:
        x += tl.load(delta_ptr + row * delta_n + at, mask=real, other=0.0).to(EXACT)
        # What is normed is what the residual stream holds.
        x = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * SIZE + at, x, mask=real)
        x = x.to(EXACT)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / SIZE + EPS)
    weight = tl.load(weight_ptr + at, mask=real, other=0.0).to(EXACT)
    tl.store(out_ptr + row * SIZE + at, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=real)


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension of x [..., H], rounded once; float32 inside, float64
    stays.  The last dimension is contiguous, and rows stand at one stride.

    Within an ulp or two of the reference: the sum of squares is taken in another order.
    """
    flat = x.reshape(-1, x.shape[-1])
    out = torch.empty(flat.shape, dtype=x.dtype, device=x.device)
    _launch(flat, None, weight, eps, None, out)
    return out.view(x.shape)


def add_rms_norm_triton(delta: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(residual + delta, its norm), [N, H] each, both in residual's dtype; the norm is of the rounded sum."""
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
        weight,
        out if total is None else total,
        out,
        x.stride(0),
        added.stride(0),
        # A constant, since as an argument it would be a float32.
        EPS=eps,
        SIZE=size,
        ADD=delta is not None,
        EXACT=exact_type(x.dtype),
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
    )


def exact_type(dtype: torch.dtype) -> object:
    """What a kernel computes in: float32, or float64 for float64."""
    import triton.language as tl

    return tl.float64 if dtype == torch.float64 else tl.float32


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    exact = torch.promote_types(x.dtype, torch.float32)
    return F.rms_norm(x.to(exact), weight.shape, weight.to(exact), eps).to(x.dtype)


def add_rms_norm_reference(delta: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = residual + delta
    return total, rms_norm_reference(total, weight, eps)
