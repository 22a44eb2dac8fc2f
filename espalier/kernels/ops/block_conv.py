"""The convolutions of a DFlash 2 draft, of a sublayer's input and of its output, over the rows of a block."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.ops.linear import sum_parts
from espalier.kernels.ops.norm import add_rms_norm
from espalier.kernels.runtime.launch import require
from espalier.kernels.runtime.op import op


def convolved(x: Tensor, delta: Tensor, base: Tensor, width: int) -> Tensor:
    """x [N, H], rows of blocks of `width` rows, convolved with base [T, H] + delta [N, T, G] of its channel's group."""
    exact = torch.promote_types(x.dtype, torch.float32)
    group = x.shape[1] // delta.shape[2]
    coefficients = base.to(exact) + delta.to(exact).repeat_interleave(group, 2)
    blocks = x.to(exact).unflatten(0, (-1, width))
    total = torch.zeros_like(blocks)
    for tap in range(base.shape[0]):
        behind = F.pad(blocks, (0, 0, tap, 0))[:, :width]
        total += behind * coefficients[:, tap].unflatten(0, (-1, width))
    return total.flatten(0, 1).to(x.dtype)


def require_block_conv(x: Tensor, weight: Tensor, base: Tensor, width: int) -> tuple[int, int]:
    """(taps, groups), after a check of the sizes."""
    taps, size = base.shape
    groups = weight.shape[0] // (2 * taps)
    require("block_conv: x", x, (-1, size), None, x)
    require("block_conv: weight", weight, (2 * taps * groups, size), x.dtype, x)
    require("block_conv: base", base, (taps, size), x.dtype, x)
    if not groups or size % groups or width < 1 or len(x) % width:
        raise EspalierError(
            f"block_conv: {size} channels in {groups} groups, and {len(x)} rows in blocks of {width}, do not divide: "
            "allocate and launch from the same layout"
        )
    return taps, groups


@op("espalier.kernels.layers.block_conv")
def block_conv(x: Tensor, weight: Tensor, base: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """(the convolved rows [N, H], the coefficients of the output's convolution [N, T, G]) in x's dtype.

    x: [N, H], normed rows of blocks of `width` rows; weight: [2 · T · G, H], T taps and G groups, the input's half
    first; base: [T, H].  Raises EspalierError if sizes do not agree.
    """
    taps, groups = require_block_conv(x, weight, base, width)
    delta = F.linear(x, weight).view(len(x), 2, taps, groups)
    return convolved(x, delta[:, 0], base, width), delta[:, 1]


@op("espalier.kernels.layers.block_conv_norm", on="residual")
def block_conv_norm(
    delta: Tensor, coefficients: Tensor, base: Tensor, residual: Tensor, weight: Tensor, eps: float, width: int
) -> tuple[Tensor, Tensor]:
    """(sum, norm) with sum = residual + conv(delta), each [N, H] in residual's dtype.

    delta: [N, H] in residual's dtype, or partial sums [parts, N, H] in float32 at least, rows of blocks of `width`;
    coefficients: [N, T, G], from block_conv; base: [T, H]; weight: [H], of the norm.
    Raises EspalierError if sizes do not agree.
    """
    if delta.ndim == 3:
        delta = sum_parts.reference(delta, residual.dtype)
    return add_rms_norm.reference(convolved(delta, coefficients, base, width), residual, weight, eps)
