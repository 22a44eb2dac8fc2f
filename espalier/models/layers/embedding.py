"""The token embedding.  The same launch also looks up cos and sin of the rows' positions."""

from torch import Tensor

from espalier.kernels.ops.embedding import DraftHidden, EmbeddedRows, EmbeddingTables, embed_rows
from espalier.models.layers.rope import RopeTables


class Embedding:
    """weight [vocab, hidden]."""

    __slots__ = ("weight",)

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(
        self, tokens: Tensor, positions: Tensor, rope: RopeTables, beside: DraftHidden | None = None
    ) -> EmbeddedRows:
        """The embedded rows of tokens [B, Q] int64 with cos and sin of positions [B, Q] int64.

        beside: for a draft, the hidden states that are concatenated to the embeddings.
        """
        return embed_rows(tokens, positions, EmbeddingTables(self.weight, rope.cos, rope.sin), beside)
