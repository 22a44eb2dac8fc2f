"""RMS normalisation with a weight, alone or fused with the residual addition before it; and no normalisation."""

from collections.abc import Sequence
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from espalier.kernels.layers.quantised import InputScales, Rows
from espalier.kernels.layers.scaled_product import kernel_rows
from espalier.kernels.ops.linear import sum_parts
from espalier.kernels.ops.norm import (
    NormWeight,
    add_normed,
    add_rms_norm,
    length_constants,
    norm_by_length,
    rms_norm,
    rounded_norm,
    rounds_norm,
)
from espalier.kernels.runtime.launch import chip
from espalier.models.weight_formats.sharded import Unsummed, over_ranks

# The output of a block, which the next norm adds to the stream.
Delta: TypeAlias = "Tensor | Unsummed | Normed | None"


def is_rounded_before(x: Tensor, size: int, rounding: InputScales | None) -> bool:
    """Whether the launch that makes `size` columns of rows like x also rounds them, for one product."""
    if rounding is None or not x.is_cuda or len(x) > kernel_rows(rounding, chip(x)):
        return False
    return rounds_norm(size, rounding)


class RMSNorm:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension, in float32 at least.

    The weight has x's dtype, or float32.

    On a CPU, for float32 and float64, constants are computed once: computing them costs as much as norming a row.
    """

    __slots__ = ("weight", "eps", "_constants")

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps
        has_constants = weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.float64)
        self._constants = length_constants(weight, eps) if has_constants else None

    def __call__(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        if self._constants is not None and x.dtype == self.weight.dtype:
            return norm_by_length(x, *self._constants)
        return rms_norm(x, self.weight, self.eps)

    def rounded_after(self, delta: Delta, residual: Tensor, rounding: InputScales) -> tuple[Tensor, Rows]:
        """As `after`, for one reader of the norm that rounds it so (Linear.rounding): it may be rounded already."""
        if isinstance(delta, Normed) or not is_rounded_before(residual, residual.shape[1], rounding):
            return self.after(delta, residual)
        total, _, rounded = rounded_norm.triton(summed(delta), residual, self.weight, self.eps, rounding)
        return total, rounded

    def both_after(self, delta: Delta, residual: Tensor, rounding: InputScales | None) -> tuple[Tensor, Tensor, Rows]:
        """As `after`, and a third value: the norm as `rounding` rounds it, in the same launch; None: the norm again.

        rounding: on a GPU alone, for widths that `rounds_norm` takes.
        """
        if rounding is not None and not isinstance(delta, Normed):
            given = (summed(delta), residual, self.weight, self.eps, rounding)
            total, kept, rounded = rounded_norm.triton(*given, keeps_norm=True)
            assert kept is not None
            return total, kept, rounded
        total, norm = self.after(delta, residual)
        return total, norm, norm

    def after(self, delta: Delta, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(residual + delta, norm of that sum), [N, H] each.

        delta: [N, H], or [parts, N, H] float32 at least (Linear.in_parts, MixtureMLP), which are summed in order; None
        before the first block.  Unsummed: it is summed over the ranks first, in the same launch where there is one.
        Normed: it is normed first, in the same launch on a GPU.
        """
        if isinstance(delta, Normed):
            total, [normed] = delta.added(residual, (self,))
            return total, normed
        if isinstance(delta, Unsummed):
            joined = delta.add_norm(residual, self.weight, self.eps)
            return self.after(delta.summed(), residual) if joined is None else joined
        if delta is None:
            return residual, self(residual)
        if self._constants is not None and residual.dtype == self.weight.dtype:
            total = residual + (delta if delta.ndim == 2 else sum_parts.reference(delta, residual.dtype))
            return total, norm_by_length(total, *self._constants)
        return add_rms_norm(delta, residual, self.weight, self.eps)


class Normed:
    """Outputs of blocks that are normed before they are added: x · scale + norm(the sum of the normed outputs).

    outputs: one or two, each [N, H] or parts of it as RMSNorm.after takes them, and their norms.
    norm: None: the sum is added as it is.
    """

    __slots__ = ("outputs", "norm", "scale")

    def __init__(
        self, *outputs: tuple[Tensor | Unsummed, RMSNorm], norm: RMSNorm | None = None, scale: float = 1.0
    ) -> None:
        self.outputs = outputs
        self.norm = norm
        self.scale = scale

    def added(self, x: Tensor, norms: Sequence[RMSNorm]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """(the sum, up to 3 norms of it), [N, H] each.  On a GPU they are one launch."""
        outputs = [(over_ranks(output), own) for output, own in self.outputs]
        if is_one_launch(x):
            of_outputs = tuple((output, _weight(own)) for output, own in outputs)
            behind = None if self.norm is None else _weight(self.norm)
            return add_normed(of_outputs, behind, x, self.scale, tuple(map(_weight, norms)))
        normed = [own(sum_parts(output, x.dtype)) for output, own in outputs]
        added = sum(normed[1:], normed[0])
        added = added if self.norm is None else self.norm(added)
        total = (x if self.scale == 1 else x * self.scale) + added
        return total, tuple(norm(total) for norm in norms)


def is_one_launch(x: Tensor) -> bool:
    """Whether outputs that are normed are added to rows like these by one kernel."""
    return x.is_cuda


def _weight(norm: RMSNorm) -> NormWeight:
    return NormWeight(norm.weight, norm.eps)


class Unnormed:
    """In the place of a norm before a block, for families that norm only behind it: the sum itself."""

    weight: ClassVar[None] = None

    def rounded_after(self, delta: Delta, residual: Tensor, rounding: InputScales) -> tuple[Tensor, Rows]:
        return self.after(delta, residual)

    def both_after(self, delta: Delta, residual: Tensor, rounding: InputScales | None) -> tuple[Tensor, Tensor, Rows]:
        total, _ = self.after(delta, residual)
        return total, total, total

    def after(self, delta: Delta, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(residual + delta, the same).  delta: as RMSNorm.after takes it."""
        if isinstance(delta, Normed):
            total, _ = delta.added(residual, ())
            return total, total
        own = summed(delta)
        total = residual if own is None else residual + sum_parts(own, residual.dtype)
        return total, total


def summed(delta: Tensor | Unsummed | None) -> Tensor | None:
    """delta, summed over the ranks."""
    return None if delta is None else over_ranks(delta)


AnyNorm = RMSNorm | Unnormed
