"""Weights that are divided among ranks.

A rank's `SummedWeight` has a part of the columns, and its products are summed over the ranks.  A rank's
`GatheredWeight` has a part of the rows, and its products are concatenated.  Both return the product of the whole
matrix.  A product may also be returned as `UnsummedOutput`.  One kernel then sums it over the ranks, adds it to the
residual and computes the norm."""

import torch
from torch import Tensor

from espalier.kernels.layers.quantised import InputRows, InputScales
from espalier.kernels.ops.linear import add_partial_sums
from espalier.models.weight_formats.base import Weight
from espalier.shards import Shards


class ShardedWeight(Weight):
    """A weight that is divided among ranks.  own_weight: the part of the weight on this rank.
    shape: (the number of outputs of the whole product, the number of inputs on this rank)."""

    __slots__ = ("format", "own_weight", "shards")

    def __init__(self, own_weight: Weight, shards: Shards, out: int) -> None:
        super().__init__((out, own_weight.shape[1]), own_weight.nbytes)
        self.format = own_weight.format
        self.own_weight = own_weight
        self.shards = shards

    @property
    def rounding(self) -> InputScales | None:
        return self.own_weight.rounding

    def apply(self, x: InputRows, bias: Tensor | None) -> Tensor:
        return self.join_ranks(self.own_weight.apply(x, None), bias)

    def join_ranks(self, own_output: Tensor, bias: Tensor | None) -> Tensor:
        """Returns the whole product [rows, out].  own_weight: this rank's product."""
        raise NotImplementedError


class SummedWeight(ShardedWeight):
    """A weight whose columns are divided among ranks."""

    __slots__ = ()

    def join_ranks(self, own_output: Tensor, bias: Tensor | None) -> Tensor:
        total = self.shards.all_reduce(own_output)
        return total if bias is None else total + bias

    def residual_delta(self, x: InputRows, bias: Tensor | None) -> "UnsummedOutput":
        """Returns the product before the sum over the ranks.
        Only one rank adds the bias."""
        once = bias if bias is None or self.shards.rank == 0 else torch.zeros_like(bias)
        return UnsummedOutput(self.own_weight.partial_sums(x, once), self.shards, x.dtype)


class UnsummedOutput:
    """A block's output on one rank, which the next norm must sum over the ranks.
    parts: [N, H] in `dtype`, or partial sums [parts, N, H], float32 at least, which are added in order."""

    __slots__ = ("partial_sums", "shards", "dtype")

    def __init__(self, parts: Tensor, shards: Shards, dtype: torch.dtype) -> None:
        self.partial_sums = parts
        self.shards = shards
        self.dtype = dtype

    def summed(self) -> Tensor:
        """Returns the sum over the ranks, [N, H] in `dtype`."""
        return self.shards.all_reduce(add_partial_sums(self.partial_sums, self.dtype))

    def add_norm(self, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor] | None:
        """Returns (residual + the sum over the ranks, the norm of this total), computed by one kernel; None if there is
        no such kernel.
        See Collectives.all_reduce_add_norm."""
        joined = self.shards.collectives
        return None if joined is None else joined.all_reduce_add_norm(self.partial_sums, residual, weight, eps)


def sum_over_ranks(output: Tensor | UnsummedOutput) -> Tensor:
    """Returns a block's output.  An UnsummedOutput output is first summed over the ranks."""
    return output.summed() if isinstance(output, UnsummedOutput) else output


class GatheredWeight(ShardedWeight):
    """A weight whose rows are divided among ranks: each rank has a part of the vocabulary (`Shards.tokens`).

    All logits are gathered, even for greedy requests.  On two H100s, it took longer to gather only the largest of each
    2,048 logits and its index: 6.2 µs instead of 5.4 for one row, 43 instead of 40 for 64, 183 instead of 164 for 256.
    """

    __slots__ = ()

    def join_ranks(self, own_output: Tensor, bias: Tensor | None) -> Tensor:
        whole = self.shards.gather_tokens(own_output, self.shape[0])
        return whole if bias is None else whole + bias
