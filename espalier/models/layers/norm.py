"""RMS norms, alone or fused with the preceding residual addition, and NoNorm for blocks that have no norm."""

from collections.abc import Sequence
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from espalier.kernels.layers.quantised import InputRows, InputScales
from espalier.kernels.layers.scaled_product import max_kernel_rows
from espalier.kernels.ops.linear import add_partial_sums
from espalier.kernels.ops.norm import (
    NormWeight,
    add_normed,
    add_rms_norm,
    can_round_norm,
    rms_norm,
    rms_norm_by_length,
    rms_norm_by_length_constants,
    rounded_norm,
)
from espalier.kernels.runtime.launch import chip
from espalier.models.weight_formats.sharded import UnsummedOutput, sum_over_ranks

# The types of a block's output, which the next norm adds to the residual.  None: there is no block before the norm.
BlockOutput: TypeAlias = "Tensor | UnsummedOutput | NormedOutputs | None"


def is_rounded_in_launch(x: Tensor, size: int, rounding: InputScales | None) -> bool:
    """Whether the kernel of a norm over rows [len(x), size] also quantises the normed rows, as `rounding` says."""
    if rounding is None or not x.is_cuda or len(x) > max_kernel_rows(rounding, chip(x)):
        return False
    return can_round_norm(size, rounding)


class RMSNorm:
    """RMS norm: x / sqrt(mean(x²) + eps) · weight over the last dimension, computed in float32 or float64.

    The weight has x's dtype, or float32.

    On a CPU, for float32 and float64, the constants that depend on weight and eps are computed once, because computing
    the constants takes as long as the norm of a row."""

    __slots__ = ("weight", "eps", "_constants")

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps
        has_constants = weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.float64)
        self._constants = rms_norm_by_length_constants(weight, eps) if has_constants else None

    def __call__(self, x: Tensor) -> Tensor:
        """Returns the norm of x [..., H], in the same shape."""
        if self._constants is not None and x.dtype == self.weight.dtype:
            return rms_norm_by_length(x, *self._constants)
        return rms_norm(x, self.weight, self.eps)

    def add_and_round(self, delta: BlockOutput, residual: Tensor, rounding: InputScales) -> tuple[Tensor, InputRows]:
        """Returns the results of add_and_norm.  The normed rows are quantised (RoundedRows) if a kernel can.
        rounding: how the layer that reads the norm quantises its input (Linear.rounding)."""
        if isinstance(delta, NormedOutputs) or not is_rounded_in_launch(residual, residual.shape[1], rounding):
            return self.add_and_norm(delta, residual)
        total, _, rounded = rounded_norm.triton(sum_if_unsummed(delta), residual, self.weight, self.eps, rounding)
        return total, rounded

    def add_norm_and_round(
        self, delta: BlockOutput, residual: Tensor, rounding: InputScales | None
    ) -> tuple[Tensor, Tensor, InputRows]:
        """Returns the results of add_and_norm, and the normed rows as quantised by the same kernel.
        rounding: how the normed rows are quantised.  If None, the third result is the normed rows, not quantised.  If
        set, the residual must be on a GPU, with a width that `can_round_norm` accepts."""
        if rounding is not None and not isinstance(delta, NormedOutputs):
            arguments = (sum_if_unsummed(delta), residual, self.weight, self.eps, rounding)
            total, norm, rounded = rounded_norm.triton(*arguments, return_norm=True)
            assert norm is not None
            return total, norm, rounded
        total, norm = self.add_and_norm(delta, residual)
        return total, norm, norm

    def add_and_norm(self, delta: BlockOutput, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (residual + delta, norm of that sum), [N, H] each.
        delta: a block's output [N, H], or float32 or float64 partial sums [parts, N, H] (Linear.partial_sums,
        MixtureMLP), which are added in order; None before the first block.  An UnsummedOutput is first summed over the
        ranks, if possible by the same kernel.  NormedOutputs are first normed, on a GPU by the same kernel."""
        if isinstance(delta, NormedOutputs):
            total, [normed] = delta.add_and_norms(residual, (self,))
            return total, normed
        if isinstance(delta, UnsummedOutput):
            joined = delta.add_norm(residual, self.weight, self.eps)
            return self.add_and_norm(delta.summed(), residual) if joined is None else joined
        if delta is None:
            return residual, self(residual)
        if self._constants is not None and residual.dtype == self.weight.dtype:
            total = residual + (delta if delta.ndim == 2 else add_partial_sums.reference(delta, residual.dtype))
            return total, rms_norm_by_length(total, *self._constants)
        return add_rms_norm(delta, residual, self.weight, self.eps)


class NormedOutputs:
    """Block outputs that are normed before the residual addition.
    The new residual is x · scale + norm(the sum of the normed outputs), where x is the old residual.
    outputs: one or two pairs (block output, norm of that output).
    norm: the norm of the sum; None to add the sum without another norm."""

    __slots__ = ("outputs", "norm", "scale")

    def __init__(
        self, *outputs: tuple[Tensor | UnsummedOutput, RMSNorm], norm: RMSNorm | None = None, scale: float = 1.0
    ) -> None:
        self.outputs = outputs
        self.norm = norm
        self.scale = scale

    def add_and_norms(self, x: Tensor, norms: Sequence[RMSNorm]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Returns (the new residual, the results of `norms`), [N, H] each.  x: the old residual.
        On a GPU, one kernel computes both."""
        outputs = [(sum_over_ranks(output), output_norm) for output, output_norm in self.outputs]
        if has_fused_add_norm(x):
            with_weights = tuple((output, _norm_weight(output_norm)) for output, output_norm in outputs)
            sum_norm = None if self.norm is None else _norm_weight(self.norm)
            return add_normed(with_weights, sum_norm, x, self.scale, tuple(map(_norm_weight, norms)))
        normed = [output_norm(add_partial_sums(output, x.dtype)) for output, output_norm in outputs]
        added = sum(normed[1:], normed[0])
        added = added if self.norm is None else self.norm(added)
        total = (x if self.scale == 1 else x * self.scale) + added
        return total, tuple(norm(total) for norm in norms)


def has_fused_add_norm(x: Tensor) -> bool:
    """Whether a kernel supports norming block outputs and adding them to x."""
    return x.is_cuda


def _norm_weight(norm: RMSNorm) -> NormWeight:
    return NormWeight(norm.weight, norm.eps)


class NoNorm:
    """Takes the place of the norm before a block, in families that norm only the outputs of blocks."""

    weight: ClassVar[None] = None

    def add_and_round(self, delta: BlockOutput, residual: Tensor, rounding: InputScales) -> tuple[Tensor, InputRows]:
        """Returns (residual + delta, the same sum again).  The sum is not quantised: `rounding` is ignored."""
        return self.add_and_norm(delta, residual)

    def add_norm_and_round(
        self, delta: BlockOutput, residual: Tensor, rounding: InputScales | None
    ) -> tuple[Tensor, Tensor, InputRows]:
        """Returns residual + delta, three times.  The sum is not quantised: `rounding` is ignored."""
        total, _ = self.add_and_norm(delta, residual)
        return total, total, total

    def add_and_norm(self, delta: BlockOutput, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (residual + delta, the same sum again).  delta: see RMSNorm.add_and_norm."""
        if isinstance(delta, NormedOutputs):
            total, _ = delta.add_and_norms(residual, ())
            return total, total
        summed = sum_if_unsummed(delta)
        total = residual if summed is None else residual + add_partial_sums(summed, residual.dtype)
        return total, total


def sum_if_unsummed(block_output: Tensor | UnsummedOutput | None) -> Tensor | None:
    """Returns block_output; an UnsummedOutput is first summed over the ranks."""
    return None if block_output is None else sum_over_ranks(block_output)


AnyNorm = RMSNorm | NoNorm
