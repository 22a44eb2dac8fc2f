"""The attention block of layers that keep K and V heads: the merged qkv projection and the output projection."""

from torch import Tensor

from espalier.attention import Pass
from espalier.kernels.layers.quantised import Rows
from espalier.kernels.ops.rope import HeadNorms
from espalier.models.layers.linear import Linear
from espalier.models.layers.norm import RMSNorm
from espalier.models.rope import RopeTables


class Attention:
    """qkv: stacked weights of q, k and v, [num_heads·head_size, in]; num_heads: heads + 2·kv_heads.

    norms: of q and k heads; None: these are not normed.  sink: as espalier/attention/base.py:Attention.attend takes it.
    """

    __slots__ = ("qkv", "out", "num_heads", "rope", "norms", "sink")

    def __init__(
        self,
        qkv: Linear,
        out: Linear,
        num_heads: int,
        rope: RopeTables,
        norms: HeadNorms | None = None,
        sink: Tensor | None = None,
    ) -> None:
        self.qkv = qkv
        self.out = out
        self.num_heads = num_heads
        self.rope = rope
        self.norms = norms
        self.sink = sink

    def read(self, norm: RMSNorm, delta: Tensor | None, x: Tensor) -> tuple[Tensor, Rows]:
        """As espalier/models/layers/stream.py:Reader."""
        return self.qkv.read(norm, delta, x)

    def write(self, layer: int, rows: Rows, p: Pass) -> Tensor:
        """Write K and V of rows [N, in].  Returns the queries as Pass.write does."""
        qkv = self.qkv.in_parts(rows)
        heads = qkv.view(*qkv.shape[:-1], self.num_heads, qkv.shape[-1] // self.num_heads)
        q, scales = p.write(layer, heads, p.rotation(self.rope), self.norms), self.rope.query_scales
        return q if scales is None else q * p.at_positions(layer, scales)

    def project(self, attended: Tensor) -> Tensor:
        """[B, Q, heads, size] -> [B · Q, hidden], or parts of it as RMSNorm.after takes them."""
        return self.out.in_parts(attended.reshape(-1, self.out.shape[1]))
