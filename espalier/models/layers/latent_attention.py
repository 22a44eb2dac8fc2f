"""The attention block of layers that keep a latent row (MLA).  Queries are compared with the latent itself.

The key of a head is k_up · latent, so q · key = (k_upᵀ · q) · latent: each query is multiplied by k_up once, and no key
is ever computed.  In the same way a head's output is v_up · (the weighted sum of latents).  So all heads read the same
row of the cache, once (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1.2).
"""

from torch import Tensor

from espalier.attention.staged import LatentProjections
from espalier.kernels.layers.quantised import Rows
from espalier.kernels.ops.rope import LatentRopeAndNorm, RopeAndNorm
from espalier.models.base import Attend
from espalier.models.layers.linear import Linear
from espalier.models.layers.norm import RMSNorm

# eps of the norms of both latents.  The publishers' code fixes it; rms_norm_eps of config.json is for the other norms.
NORM_EPS = 1e-6


class LatentAttention:
    """down: hidden state -> the queries' latent [q_rank], then the row to keep [kv_rank + rope], in one product.

    q_norm, q: the queries' latent -> [heads · (nope + rope)]; both None if `down` projects the queries themselves.
    kv_norm: [kv_rank], weight of the norm of the row's first part.
    k_up: [heads, nope, kv_rank]; v_up: [heads, v_size, kv_rank].
    row_size: kv_rank + rope.  interleaved: as in espalier/kernels/ops/rope.py:LatentRopeAndNorm.
    """

    __slots__ = ("down", "q_norm", "q", "kv_norm", "k_up", "v_up", "out", "row_size", "interleaved")

    def __init__(
        self,
        down: Linear,
        q_norm: RMSNorm | None,
        q: Linear | None,
        kv_norm: Tensor,
        k_up: Tensor,
        v_up: Tensor,
        out: Linear,
        row_size: int,
        interleaved: bool,
    ) -> None:
        self.down = down
        self.q_norm = q_norm
        self.q = q
        self.kv_norm = kv_norm
        self.k_up = k_up
        self.v_up = v_up
        self.out = out
        self.row_size = row_size
        self.interleaved = interleaved

    @property
    def reads(self) -> Linear:
        """The layer that reads the block's input."""
        return self.down

    def __call__(
        self, x: Rows, rope_and_norm: RopeAndNorm, attend: Attend, layer: int, shape: tuple[int, int]
    ) -> Tensor:
        """As espalier/models/layers/attention.py:Attention."""
        down = self.down(x)
        q, latent = down[:, : -self.row_size], down[:, -self.row_size :].unflatten(0, shape).unsqueeze(2)
        if self.q_norm is not None and self.q is not None:
            q = self.q(self.q_norm(q))
        q = q.unflatten(1, (self.k_up.shape[0], -1)).unflatten(0, shape)
        with_norm = LatentRopeAndNorm(rope_and_norm.cos, rope_and_norm.sin, self.kv_norm, NORM_EPS, self.interleaved)
        values = attend(layer, LatentProjections(q, latent, with_norm, self.k_up, self.v_up))
        return self.out.in_parts(values.flatten(2).flatten(0, 1))
