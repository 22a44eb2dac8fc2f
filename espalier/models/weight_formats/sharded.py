"""Weights of which each rank holds a part.

`SummedWeight` has a part of the columns: its products are summed over the ranks.  `GatheredWeight` has a part of the
rows: its products are joined.  Both give the product of the whole matrix, in each of a weight's forms, because those
follow from `apply`.
"""

import torch.nn.functional as F
from torch import Tensor

from espalier.kernels.layers.quantised import InputScales, Rows
from espalier.models.weight_formats.base import Weight
from espalier.shards import Shards


class ShardedWeight(Weight):
    """own: the rank's part of a matrix [out, in]; shape: of the product's result and of its inputs on this rank."""

    __slots__ = ("format", "own", "shards")

    def __init__(self, own: Weight, shards: Shards, out: int) -> None:
        super().__init__((out, own.shape[1]), own.nbytes)
        self.format = own.format
        self.own = own
        self.shards = shards

    @property
    def rounding(self) -> InputScales | None:
        return self.own.rounding

    def apply(self, x: Rows, bias: Tensor | None) -> Tensor:
        return self.joined(self.own.apply(x, None), bias)

    def joined(self, own: Tensor, bias: Tensor | None) -> Tensor:
        """The product [rows, out] from the rank's own."""
        raise NotImplementedError


class SummedWeight(ShardedWeight):
    """A part of the columns."""

    __slots__ = ()

    def joined(self, own: Tensor, bias: Tensor | None) -> Tensor:
        total = self.shards.all_reduce(own)
        return total if bias is None else total + bias


class GatheredWeight(ShardedWeight):
    """A part of the rows: `Shards.tokens` of the vocabulary.

    All logits are gathered.  Where a request asks for no filter and no log-probabilities, each rank's best token and
    its logit would suffice.
    """

    __slots__ = ()

    def joined(self, own: Tensor, bias: Tensor | None) -> Tensor:
        out = self.shape[0]
        padded = F.pad(own, (0, self.shards.tokens_each(out) - own.shape[1]))
        whole = self.shards.all_gather(padded).transpose(0, 1).flatten(1)[:, :out]
        return whole.contiguous() if bias is None else whole + bias
