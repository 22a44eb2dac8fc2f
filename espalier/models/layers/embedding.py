"""Token embeddings, and with them the rows that enter a model."""

from torch import Tensor

from espalier.kernels.enter import Beside, Entered, Lookup, enter
from espalier.models.layers.rope import RopeTables


class Embedding:
    """weight [vocab, hidden]."""

    __slots__ = ("weight",)

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, tokens: Tensor, positions: Tensor, rope: RopeTables, beside: Beside | None = None) -> Entered:
        """tokens, positions int64 [B, Q] as rows of a model, with their rotation and what stands beside them."""
        return enter(tokens, positions, Lookup(self.weight, rope.cos, rope.sin), beside)
