"""The attention block of layers that keep K and V heads: the merged qkv projection and the output projection."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from espalier.attention import Pass
from espalier.kernels.layers.quantised import Rows
from espalier.kernels.ops.rope import HeadNorms
from espalier.models.layers.linear import Linear
from espalier.models.layers.norm import AnyNorm, Delta, RMSNorm
from espalier.models.rope import RopeTables
from espalier.models.weight_formats.sharded import Unsummed


class WideNorms(NamedTuple):
    """q, k: norms of the whole projections, over all heads."""

    q: RMSNorm
    k: RMSNorm

    def of(self, qkv: Tensor) -> Tensor:
        """[N, q + k + v columns] -> the same, q and k normed."""
        sizes = len(self.q.weight), len(self.k.weight)
        q, k, v = qkv.split((*sizes, qkv.shape[1] - sum(sizes)), 1)
        return torch.cat((self.q(q), self.k(k), v), 1)


class OutputGate(NamedTuple):
    """A gate of each head, or of each of its values.  project: of the attention's input."""

    project: Linear
    activation: Callable[[Tensor], Tensor]


class Attention:
    """qkv: stacked weights of q, k and v, [num_heads·head_size, in]; num_heads: heads + 2·kv_heads.

    norms: of q and k heads; wide_norms: of all of q and all of k; None: these are not normed.
    sink: as espalier/attention/base.py:Attention.attend takes it.
    output_gate: of the attended values; None: they are as they are.
    """

    __slots__ = ("qkv", "out", "num_heads", "rope", "norms", "sink", "wide_norms", "output_gate")

    def __init__(
        self,
        qkv: Linear,
        out: Linear,
        num_heads: int,
        rope: RopeTables,
        norms: HeadNorms | None = None,
        sink: Tensor | None = None,
        wide_norms: WideNorms | None = None,
        output_gate: OutputGate | None = None,
    ) -> None:
        self.qkv = qkv
        self.out = out
        self.num_heads = num_heads
        self.rope = rope
        self.norms = norms
        self.sink = sink
        self.wide_norms = wide_norms
        self.output_gate = output_gate

    def read(self, norm: AnyNorm, delta: Delta, x: Tensor) -> tuple[Tensor, Rows]:
        """As espalier/models/layers/stream.py:Reader."""
        # The gate may be stored in another format than q, k and v, so it may not take rows that are rounded for them.
        return self.qkv.read(norm, delta, x) if self.output_gate is None else norm.after(delta, x)

    def write(self, layer: int, rows: Rows, p: Pass) -> Tensor:
        """Write K and V of rows [N, in].  Returns the queries as Pass.write does."""
        qkv = self.qkv.in_parts(rows) if self.wide_norms is None else self.wide_norms.of(self.qkv(rows))
        heads = qkv.view(*qkv.shape[:-1], self.num_heads, qkv.shape[-1] // self.num_heads)
        q, scales = p.write(layer, heads, p.rotation(self.rope), self.norms), self.rope.query_scales
        return q if scales is None else q * p.at_positions(layer, scales)

    def gate(self, rows: Rows, kept: Tensor | None) -> Tensor | None:
        """The factors of the attended values of rows [N, in], or of those kept: [N, heads], or [N, heads · size]."""
        if self.output_gate is None:
            return None
        assert isinstance(rows, Tensor)
        return self.output_gate.activation(self.output_gate.project(rows if kept is None else rows[kept]))

    def project(self, attended: Tensor) -> Tensor | Unsummed:
        """[B, Q, heads, size] -> [B · Q, hidden], or parts of it as RMSNorm.after takes them."""
        return self.out.for_stream(attended.reshape(-1, self.out.shape[1]))
