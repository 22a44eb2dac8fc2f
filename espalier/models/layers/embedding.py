"""The token embedding, with which a stream begins.  The same launch looks up cos and sin of the rows' positions."""

from dataclasses import dataclass

from torch import Tensor

from espalier.attention import Pass
from espalier.kernels.ops.embedding import DraftHidden, EmbeddingTables, embed_rows
from espalier.models.layers.norm import RMSNorm
from espalier.models.layers.stream import Stream
from espalier.models.rope import RopeTables


@dataclass(eq=False, slots=True)
class Embedding:
    """weight [vocab, hidden]; scale: factor of every embedding, a number that the model's dtype holds.

    row_norm: of every embedding, before the factor; None: there is none.
    """

    weight: Tensor
    scale: float = 1.0
    row_norm: RMSNorm | None = None

    def __call__(self, p: Pass, rope: RopeTables, beside: DraftHidden | None = None) -> Stream:
        """The stream of the pass's B · Q rows.  rope: the one that most layers use.

        beside: for a draft, the hidden states that are concatenated to the embeddings; then the stream begins with
        them, and `given` holds both, normed: [B · Q, 2 · hidden].
        """
        tables = EmbeddingTables(self.weight, rope.cos, rope.sin)
        x, residual, rotation, live = embed_rows(p.tokens, p.positions, tables, beside)
        p.looked_up(rope, rotation)
        if beside is not None:
            return Stream(residual, live, x)
        x = x if self.row_norm is None else self.row_norm(x)
        return Stream(x if self.scale == 1 else x * self.scale, live)
