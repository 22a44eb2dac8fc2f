"""Weights that are divided among ranks.

A `SummedWeight` has this rank's part of the columns, and its products are summed over the ranks.  A `GatheredWeight`
has this rank's part of the rows, and the ranks' products are concatenated.  Both return the product of the whole
matrix.  A SummedWeight can also return an `UnsummedOutput`.  One kernel then sums the output over the ranks, adds the
sum to the residual and computes the next norm."""

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

    def __init__(self, own_weight: Weight, shards: Shards, num_outputs: int) -> None:
        super().__init__((num_outputs, own_weight.shape[1]), own_weight.nbytes)
        self.format = own_weight.format
        self.own_weight = own_weight
        self.shards = shards

    @property
    def rounding(self) -> InputScales | None:
        return self.own_weight.rounding

    def apply(self, x: InputRows, bias: Tensor | None) -> Tensor:
        return self.join_ranks(self.own_weight.apply(x, None), bias)

    def join_ranks(self, own_output: Tensor, bias: Tensor | None) -> Tensor:
        """Returns the product of the whole matrix, [rows, out], plus bias.  own_output: this rank's product."""
        raise NotImplementedError


class SummedWeight(ShardedWeight):
    """A weight whose columns are divided among ranks."""

    __slots__ = ()

    def join_ranks(self, own_output: Tensor, bias: Tensor | None) -> Tensor:
        """Returns the sum of own_output over the ranks, plus bias."""
        total = self.shards.all_reduce(own_output)
        return total if bias is None else total + bias

    def residual_delta(self, x: InputRows, bias: Tensor | None) -> "UnsummedOutput":
        """Returns the product before the sum over the ranks.  Only rank 0 adds the bias."""
        own_bias = bias if bias is None or self.shards.rank == 0 else torch.zeros_like(bias)
        return UnsummedOutput(self.own_weight.partial_sums(x, own_bias), self.shards, x.dtype)


class UnsummedOutput:
    """A block's output on one rank, which the next norm must sum over the ranks.
    partial_sums: [N, H] in `dtype`, or [parts, N, H] in float32 or float64, which are added in order."""

    __slots__ = ("partial_sums", "shards", "dtype")

    def __init__(self, partial_sums: Tensor, shards: Shards, dtype: torch.dtype) -> None:
        self.partial_sums = partial_sums
        self.shards = shards
        self.dtype = dtype

    def summed(self) -> Tensor:
        """Returns the sum over the ranks, [N, H] in `dtype`."""
        return self.shards.all_reduce(add_partial_sums(self.partial_sums, self.dtype))

    def add_norm(self, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor] | None:
        """Returns (residual + the sum over the ranks, the RMS norm of this total with `weight` and `eps`), computed by
        one kernel; None if there is no such kernel.  See Collectives.all_reduce_add_norm."""
        collectives = self.shards.collectives
        return (
            None if collectives is None else collectives.all_reduce_add_norm(self.partial_sums, residual, weight, eps)
        )


def sum_over_ranks(output: Tensor | UnsummedOutput) -> Tensor:
    """Returns a block's output; an UnsummedOutput is first summed over the ranks."""
    return output.summed() if isinstance(output, UnsummedOutput) else output


class GatheredWeight(ShardedWeight):
    """A weight whose rows are divided among ranks: each rank has a part of the vocabulary (`Shards.vocab_part`).

    All logits are gathered, even for greedy requests.  On two H100s, it took longer to gather only the largest of each
    2,048 logits and its index: 6.2 instead of 5.4 µs for 1 row, 43 instead of 40 for 64 rows."""

    __slots__ = ()

    def join_ranks(self, own_output: Tensor, bias: Tensor | None) -> Tensor:
        """Returns the outputs of all ranks side by side, plus bias.  own_output: the outputs of this rank's rows."""
        output = self.shards.gather_tokens(own_output, self.shape[0])
        return output if bias is None else output + bias
