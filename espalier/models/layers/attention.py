"""The attention block around `attend`: merged projection, q/k norms, rotation, output projection.

Where keys and values live, and who sees whom, is the caller's: it supplies `attend` (see espalier/models/base.py).
"""

import torch
from torch import Tensor

from espalier.cache.geometry import LayerGeometry
from espalier.models.base import Attend
from espalier.models.layers.linear import Linear
from espalier.models.layers.norm import RMSNorm
from espalier.models.layers.rope import rotate


class Attention:
    """qkv stacks q over k over v: [(heads + 2·kv_heads)·head_size, in].  q_norm and k_norm come as a pair or not."""

    __slots__ = ("qkv", "out", "q_norm", "k_norm", "heads", "num_rotated", "num_heads", "head_size")

    def __init__(
        self, qkv: Linear, out: Linear, geometry: LayerGeometry, q_norm: RMSNorm | None, k_norm: RMSNorm | None
    ) -> None:
        self.qkv = qkv
        self.out = out
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.heads = geometry.heads
        self.num_rotated = geometry.heads + geometry.kv_heads
        self.num_heads = geometry.heads + 2 * geometry.kv_heads
        self.head_size = geometry.k_size

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        rope: tuple[Tensor, Tensor],
        attend: Attend,
        layer: int,
        shape: tuple[int, int],
    ) -> Tensor:
        """residual + attention(x); x [B·Q, in], residual [B·Q, hidden].  rope: cos and sin of the rows; shape: (B,
        Q), which `attend` sees apart.
        """
        qkv = self.qkv(x).view(-1, self.num_heads, self.head_size)
        turned = rotate(self._normed(qkv), *rope).view(*shape, self.num_rotated, self.head_size)
        q, k = turned[:, :, : self.heads], turned[:, :, self.heads :]
        v = qkv[:, self.num_rotated :].unflatten(0, shape)
        return self.out.plus(attend(layer, q, k, v).flatten(2).flatten(0, 1), residual)

    def _normed(self, qkv: Tensor) -> Tensor:
        """The q and k heads of qkv, normed head by head where the family does so."""
        if self.q_norm is None or self.k_norm is None:
            return qkv[:, : self.num_rotated]
        q, k = qkv[:, : self.heads], qkv[:, self.heads : self.num_rotated]
        return torch.cat((self.q_norm(q), self.k_norm(k)), dim=1)
