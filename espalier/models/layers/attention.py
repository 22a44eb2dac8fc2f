"""The attention block of layers that keep K and V heads: the merged qkv projection and the output projection.

All work between the two (norms, RoPE, the write of K and V, attention) is done by the caller's `attend`
(espalier/models/base.py).
"""

from dataclasses import replace

from torch import Tensor

from espalier.attention.staged import HeadProjections
from espalier.kernels.layers.quantised import Rows
from espalier.kernels.ops.rope import RopeAndNorm
from espalier.models.base import Attend
from espalier.models.layers.linear import Linear
from espalier.models.layers.norm import RMSNorm


class Attention:
    """qkv: stacked weights of q, k and v, [num_heads·head_size, in]; num_heads: heads + 2·kv_heads.

    q_norm, k_norm: both, or None for both.  sink: as espalier/attention/base.py:Attention.attend takes it.
    """

    __slots__ = ("qkv", "out", "q_norm", "k_norm", "num_heads", "sink")

    def __init__(
        self,
        qkv: Linear,
        out: Linear,
        num_heads: int,
        q_norm: RMSNorm | None,
        k_norm: RMSNorm | None,
        sink: Tensor | None = None,
    ) -> None:
        self.qkv = qkv
        self.out = out
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.num_heads = num_heads
        self.sink = sink

    @property
    def reads(self) -> Linear:
        """The layer that reads the block's input."""
        return self.qkv

    def __call__(
        self, x: Rows, rope_and_norm: RopeAndNorm, attend: Attend, layer: int, shape: tuple[int, int]
    ) -> Tensor:
        """x [B·Q, in] -> [B·Q, hidden], or parts of it as RMSNorm.after takes them.

        rope_and_norm: cos and sin of the rows; shape: (B, Q), the shape of the rows for `attend`.
        """
        if self.q_norm is not None and self.k_norm is not None:
            rope_and_norm = replace(
                rope_and_norm, q_norm=self.q_norm.weight, k_norm=self.k_norm.weight, eps=self.q_norm.eps
            )
        qkv = self.qkv.in_parts(x)
        qkv = qkv.view(*qkv.shape[:-2], *shape, self.num_heads, qkv.shape[-1] // self.num_heads)
        attended = attend(layer, HeadProjections(qkv, rope_and_norm, self.sink))
        return self.out.in_parts(attended.reshape(-1, self.out.shape[1]))
