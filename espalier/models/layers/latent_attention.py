"""The attention block of layers that keep a latent row (MLA).  Queries are compared with the latent itself.

The key of a head is k_up · latent, so q · key = (k_upᵀ · q) · latent: each query is multiplied by k_up once, and no key
is ever computed.  In the same way a head's output is v_up · (the weighted sum of latents).  So all heads read the same
row of the cache, once (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1.2).
"""

from dataclasses import dataclass

from torch import Tensor

from espalier.attention import Pass
from espalier.kernels.layers.quantised import Rows
from espalier.kernels.ops.rope import LatentForm, head_product
from espalier.models.layers.attention import AttentionBlock
from espalier.models.layers.indexer import IndexedRows, Indexer, read_indexed
from espalier.models.layers.linear import Linear
from espalier.models.layers.norm import AnyNorm, Delta, RMSNorm
from espalier.models.rope import RopeTables
from espalier.models.weight_formats.sharded import Unsummed

# eps of the norms of both latents.  The publishers' code fixes it; rms_norm_eps of config.json is for the other norms.
NORM_EPS = 1e-6


@dataclass(eq=False, slots=True)
class LatentAttention(AttentionBlock):
    """down: hidden state -> the queries' latent [q_rank], then the row to keep [kv_rank + rope], in one product.

    q_norm, q: the queries' latent -> [heads · (nope + rope)]; both None if `down` projects the queries themselves.
    form: of the row to keep.  k_up: [heads, nope, kv_rank]; v_up: [heads, v_size, kv_rank].
    row_size: kv_rank + rope.
    indexer: chooses the rows that queries attend to; None: they attend to all, or to what a layer before chose.
    """

    down: Linear
    q_norm: RMSNorm | None
    q: Linear | None
    form: LatentForm
    k_up: Tensor
    v_up: Tensor
    out: Linear
    row_size: int
    rope: RopeTables
    indexer: Indexer | None = None

    def read(self, norm: AnyNorm, delta: Delta, x: Tensor) -> tuple[Tensor, Rows | IndexedRows]:
        """As espalier/models/layers/stream.py:Reader."""
        if self.indexer is None:
            return self.down.read(norm, delta, x)
        return read_indexed(self.down, self.indexer, norm, delta, x)

    def write(self, layer: int, rows: Rows | IndexedRows, p: Pass) -> Tensor:
        down = self.down(rows.of_products if isinstance(rows, IndexedRows) else rows)
        q, latent = down[:, : -self.row_size], down[:, -self.row_size :].unsqueeze(1)
        q_latent = q if self.q_norm is None else self.q_norm(q)
        q = q_latent if self.q is None else self.q(q_latent)
        q, rotation = q.unflatten(1, (self.k_up.shape[0], -1)), p.rotation(self.rope)
        values = q, latent, rotation, self.form, self.k_up
        if self.indexer is None or not isinstance(rows, IndexedRows):
            return p.write(layer, *values)
        return p.write(layer, *values, index=self.indexer(rows, q_latent, rotation))

    def project(self, attended: Tensor) -> Tensor | Unsummed:
        """attended: weighted sums of latents."""
        latents = attended.flatten(0, 1)
        values = latents.new_empty(*latents.shape[:2], self.v_up.shape[1])
        head_product(latents, self.v_up.transpose(1, 2), values)
        return self.out.for_stream(values.flatten(1))
