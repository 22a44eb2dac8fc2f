"""The attention block of layers that keep K and V heads: the merged qkv projection and the output projection."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from espalier.attention import Pass
from espalier.kernels.layers.quantised import Rows
from espalier.kernels.ops.rope import HeadNorms
from espalier.models.layers.decoder import of_kept
from espalier.models.layers.linear import Linear
from espalier.models.layers.norm import AnyNorm, Delta, RMSNorm
from espalier.models.layers.stream import Stream
from espalier.models.rope import RopeTables
from espalier.models.weight_formats.sharded import Unsummed
from espalier.shards import WHOLE, Shards


class WideNorms(NamedTuple):
    """q, k: norms over all heads of the projections.  Each rank has an equal part of the heads."""

    q: RMSNorm
    k: RMSNorm
    shards: Shards = WHOLE

    def of(self, qkv: Tensor) -> Tensor:
        """[N, q + k + v columns] -> the same, q and k normed."""
        sizes = len(self.q.weight), len(self.k.weight)
        q, k, v = qkv.split((*sizes, qkv.shape[1] - sum(sizes)), 1)
        if self.shards.count == 1:
            return torch.cat((self.q(q), self.k(k), v), 1)
        exact = torch.promote_types(qkv.dtype, torch.float32)
        squares = torch.stack([part.to(exact).square().mean(1) for part in (q, k)], 1)
        of_q, of_k = (self.shards.all_reduce(squares) / self.shards.count).split(1, 1)
        return torch.cat((_normed(self.q, q, of_q), _normed(self.k, k, of_k), v), 1)


def _normed(norm: RMSNorm, x: Tensor, mean_square: Tensor) -> Tensor:
    """The norm of x, a part of the columns of some rows; mean_square: [N, 1], over all columns."""
    return (x * (mean_square + norm.eps).rsqrt() * norm.weight).to(x.dtype)


class OutputGate(NamedTuple):
    """A gate of each head, or of each of its values.  project: of the attention's input."""

    project: Linear
    activation: Callable[[Tensor], Tensor]


class AttentionBlock:
    """A Mixer (espalier/models/layers/decoder.py) that attends to rows.

    sink: as espalier/attention/base.py:Attention.attend takes it.
    """

    __slots__ = ()
    sink: Tensor | None = None

    def write(self, layer: int, rows: Rows, p: Pass) -> Tensor:
        """Write what the layer keeps of rows [N, in].  Returns the queries as Pass.write does."""
        raise NotImplementedError

    def gate(self, rows: Rows, kept: Tensor | None) -> Tensor | None:
        """The factors of the attended values of rows [N, in], or of those kept: [N, heads], or [N, heads · size]."""
        return None

    def project(self, attended: Tensor) -> Tensor | Unsummed:
        """[B, Q, heads, size] -> [B · Q, hidden], or parts of it as RMSNorm.after takes them."""
        raise NotImplementedError

    def __call__(self, layer: int, rows: Rows, s: Stream, p: Pass) -> Tensor | Unsummed:
        """As Mixer."""
        q, kept = self.write(layer, rows, p), p.kept(layer)
        gate = self.gate(rows, kept)
        if kept is not None:
            s.keep(kept)
        attended = p.attend(layer, q, self.sink)
        return self.project(attended if gate is None else attended * gate.view(*attended.shape[:3], -1))


@dataclass(eq=False, slots=True)
class Attention(AttentionBlock):
    """qkv: stacked weights of q, k and v, [num_heads·head_size, in]; num_heads: heads + 2·kv_heads.

    norms: of q and k heads; wide_norms: of all of q and all of k; None: these are not normed.
    output_gate: of the attended values; None: they are as they are.
    """

    qkv: Linear
    out: Linear
    num_heads: int
    rope: RopeTables
    norms: HeadNorms | None = None
    sink: Tensor | None = None
    wide_norms: WideNorms | None = None
    output_gate: OutputGate | None = None

    def read(self, norm: AnyNorm, delta: Delta, x: Tensor) -> tuple[Tensor, Rows]:
        """As espalier/models/layers/stream.py:Reader."""
        # The gate may be stored in another format than q, k and v, so it may not take rows that are rounded for them.
        return self.qkv.read(norm, delta, x) if self.output_gate is None else norm.after(delta, x)

    def write(self, layer: int, rows: Rows, p: Pass) -> Tensor:
        qkv = self.qkv.in_parts(rows) if self.wide_norms is None else self.wide_norms.of(self.qkv(rows))
        heads = qkv.view(*qkv.shape[:-1], self.num_heads, qkv.shape[-1] // self.num_heads)
        q, scales = p.write(layer, heads, p.rotation(self.rope), self.norms), self.rope.query_scales
        return q if scales is None else q * p.at_positions(layer, scales)

    def gate(self, rows: Rows, kept: Tensor | None) -> Tensor | None:
        if self.output_gate is None:
            return None
        assert isinstance(rows, Tensor)
        return self.output_gate.activation(self.output_gate.project(rows if kept is None else rows[kept]))

    def project(self, attended: Tensor) -> Tensor | Unsummed:
        return self.out.for_stream(attended.reshape(-1, self.out.shape[1]))


@dataclass(eq=False, slots=True)
class GatedAttention:
    """qkv: stacked weights of q and gate, in turn for each of `heads`, then k and v.  norms: of q and k heads."""

    qkv: Linear
    out: Linear
    heads: int
    head_size: int
    rope: RopeTables
    norms: HeadNorms

    def read(self, norm: AnyNorm, delta: Delta, x: Tensor) -> tuple[Tensor, Rows]:
        """As espalier/models/layers/stream.py:Reader."""
        return self.qkv.read(norm, delta, x)

    def __call__(self, layer: int, rows: Rows, s: Stream, p: Pass) -> Tensor | Unsummed:
        """As espalier/models/layers/decoder.py:Mixer."""
        made = self.qkv(rows).unflatten(1, (-1, self.head_size))
        q, gate = made[:, : 2 * self.heads].unflatten(1, (self.heads, 2)).unbind(2)
        qkv = torch.cat((q, made[:, 2 * self.heads :]), 1)
        q = p.write(layer, qkv, p.rotation(self.rope), self.norms)
        s.keep(p.kept(layer))
        attended = p.attend(layer, q).flatten(0, 1)
        return self.out.for_stream((attended * of_kept(gate, layer, p).sigmoid()).flatten(1))
