"""A linear map.  Merged projections, weight formats and, later, shards are this file's business alone.

On an x86 CPU in float32 the weight is kept in oneDNN's own blocked layout: the plain call goes to a BLAS that takes 2
to 4 times as long for the few rows of a decoding step (docs/log.md).  The two agree to float32 rounding.

On a GPU a measured table says for each shape and number of rows whether our kernel or F.linear computes it
(kernels/choices.py); where it says nothing, F.linear does.
"""

import platform

import torch
import torch.nn.functional as F
from torch import Tensor

from espalier.kernels.choices import choices_for
from espalier.kernels.linear import linear, linear_gated, linear_parts
from espalier.kernels.silu import silu_mul

# The layout is chosen for a typical number of rows; one for 16 is near the best from 1 to 128.
PACKED_FOR_ROWS = 16


class Linear:
    """y = x · weightᵀ + bias, weight [out, in].  Several projections of one input may be stacked in it."""

    __slots__ = ("shape", "bias", "weight", "_packed", "_choices")

    def __init__(self, weight: Tensor, bias: Tensor | None = None, packed: bool | None = None) -> None:
        """packed: None packs where that is possible; False keeps the plain layout.  A packed weight is opaque."""
        self.shape = tuple(weight.shape)
        self.bias = bias
        self._packed = can_pack(weight) if packed is None else packed
        self.weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKED_FOR_ROWS) if self._packed else weight
        )
        self._choices = choices_for(weight)

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., in] -> a fresh tensor [..., out]."""
        if self._packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        if self._choices is None:
            return F.linear(x, self.weight, self.bias)
        rows = x.flatten(0, -2)
        out = linear(rows, self.weight, self.bias, self._choices.at(len(rows)))
        return out.view(*x.shape[:-1], self.shape[0])

    def in_parts(self, x: Tensor) -> Tensor:
        """x [rows, in] -> [rows, out], or [parts, rows, out] float32 that whoever reads it adds (RMSNorm.after)."""
        if self._choices is None:
            return self(x)
        return linear_parts(x, self.weight, self.bias, self._choices.at(len(x)))

    def gated(self, x: Tensor) -> Tensor:
        """x [rows, in] -> silu(gate) · up [rows, out / 2] of a weight that stacks gate over up."""
        if self._choices is None:
            return silu_mul(self(x))
        return linear_gated(x, self.weight, self.bias, self._choices.at(len(x)))


def can_pack(weight: Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and platform.machine() in ("x86_64", "AMD64")
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )
