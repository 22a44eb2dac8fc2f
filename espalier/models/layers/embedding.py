"""Token embeddings."""

import torch.nn.functional as F
from torch import Tensor


class Embedding:
    """weight [vocab, hidden].  Ids must lie in 0 .. vocab-1: a caller with void nodes clamps them."""

    __slots__ = ("weight",)

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight)
