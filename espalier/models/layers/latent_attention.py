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

    def read(self, norm: AnyNorm, delta: Delta, x: Tensor) -> tuple[Tensor, Rows]:
        """As espalier/models/layers/stream.py:Reader."""
        return self.down.read(norm, delta, x)

    def write(self, layer: int, rows: Rows, p: Pass) -> Tensor:
        down = self.down(rows)
        q, latent = down[:, : -self.row_size], down[:, -self.row_size :].unsqueeze(1)
        if self.q_norm is not None and self.q is not None:
            q = self.q(self.q_norm(q))
        q = q.unflatten(1, (self.k_up.shape[0], -1))
        return p.write(layer, q, latent, p.rotation(self.rope), self.form, self.k_up)

    def project(self, attended: Tensor) -> Tensor | Unsummed:
        """attended: weighted sums of latents."""
        latents = attended.flatten(0, 1)
        values = latents.new_empty(*latents.shape[:2], self.v_up.shape[1])
        head_product(latents, self.v_up.transpose(1, 2), values)
        return self.out.for_stream(values.flatten(1))
