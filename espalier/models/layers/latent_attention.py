"""The attention block of layers that keep a latent row (MLA).  Queries are compared with the latent itself.

The key of a head is k_up · latent, so q · key = (k_upᵀ · q) · latent: each query is multiplied by k_up once, and no key
is ever computed.  In the same way a head's output is v_up · (the weighted sum of latents).  So all heads read the same
row of the cache, once (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1.2).
"""

from torch import Tensor

from espalier.attention.staged import LatentProjections
from espalier.kernels.layers.latent import LatentRopeAndNorm
from espalier.kernels.layers.rope import RopeAndNorm
from espalier.models.base import Attend
from espalier.models.layers.linear import Linear
from espalier.models.layers.norm import RMSNorm

# eps of the norms of both latents.  The publishers' code fixes it; rms_norm_eps of config.json is for the other norms.
NORM_EPS = 1e-6


class LatentAttention:
    """q_down, q_norm: hidden state -> the queries' latent; both None if q projects the hidden state itself.

    q: -> [heads · (nope + rope)].
    kv_down: hidden state -> [kv_rank + rope]; kv_norm: [kv_rank], weight of the norm of its first part.
    k_up: [heads, nope, kv_rank]; v_up: [heads, v_size, kv_rank].
    interleaved: as in espalier/kernels/layers/latent.py:LatentRopeAndNorm.
    """

    __slots__ = ("q_down", "q_norm", "q", "kv_down", "kv_norm", "k_up", "v_up", "out", "interleaved")

    def __init__(
        self,
        q_down: Linear | None,
        q_norm: RMSNorm | None,
        q: Linear,
        kv_down: Linear,
        kv_norm: Tensor,
        k_up: Tensor,
        v_up: Tensor,
        out: Linear,
        interleaved: bool,
    ) -> None:
        self.q_down = q_down
        self.q_norm = q_norm
        self.q = q
        self.kv_down = kv_down
        self.kv_norm = kv_norm
        self.k_up = k_up
        self.v_up = v_up
        self.out = out
        self.interleaved = interleaved

    def __call__(
        self, x: Tensor, rope_and_norm: RopeAndNorm, attend: Attend, layer: int, shape: tuple[int, int]
    ) -> Tensor:
        """As espalier/models/layers/attention.py:Attention."""
        latent = self.kv_down(x).unflatten(0, shape).unsqueeze(2)
        if self.q_down is not None and self.q_norm is not None:
            x = self.q_norm(self.q_down(x))
        q = self.q(x).unflatten(1, (self.k_up.shape[0], -1)).unflatten(0, shape)
        with_norm = LatentRopeAndNorm(rope_and_norm.cos, rope_and_norm.sin, self.kv_norm, NORM_EPS, self.interleaved)
        values = attend(layer, LatentProjections(q, latent, with_norm, self.k_up, self.v_up))
        return self.out.in_parts(values.flatten(2).flatten(0, 1))
