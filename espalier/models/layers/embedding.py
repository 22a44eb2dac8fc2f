"""Token embeddings, and with them the rows that enter a model."""

from torch import Tensor

from espalier.kernels.layers.embed_rows import DraftHidden, EmbeddedRows, EmbeddingTables, embed_rows
from espalier.models.layers.rope import RopeTables


class Embedding:
    """weight [vocab, hidden]."""

    __slots__ = ("weight",)

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(
        self, tokens: Tensor, positions: Tensor, rope: RopeTables, beside: DraftHidden | None = None
    ) -> EmbeddedRows:
        """tokens, positions int64 [B, Q] as rows of a model, with their rotation and what stands beside them."""
        return embed_rows(tokens, positions, EmbeddingTables(self.weight, rope.cos, rope.sin), beside)
