"""The attention block of layers with K and V heads: the stacked projection of q, k and v, and the output projection."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from espalier.attention import Pass
from espalier.kernels.layers.quantised import InputRows
from espalier.kernels.ops.rope import HeadNorms
from espalier.kernels.ops.states import OutputGate as HeadGate
from espalier.models.layers.decoder import select_kept_rows
from espalier.models.layers.gated import gate_for_projection
from espalier.models.layers.linear import Linear
from espalier.models.layers.norm import AnyNorm, BlockOutput, RMSNorm
from espalier.models.layers.residual import Residual
from espalier.models.rope import RopeTables
from espalier.models.weight_formats.sharded import UnsummedOutput
from espalier.shards import SINGLE_RANK, Shards


class AllHeadsNorms(NamedTuple):
    """RMS norms of q and of k, each over all heads.  Each rank has an equal part of the heads."""

    q: RMSNorm
    k: RMSNorm
    shards: Shards = SINGLE_RANK

    def norm_q_and_k(self, qkv: Tensor) -> Tensor:
        """Returns a tensor like qkv [N, q + k + v columns], in which q and k are normed."""
        sizes = len(self.q.weight), len(self.k.weight)
        q, k, v = qkv.split((*sizes, qkv.shape[1] - sum(sizes)), 1)
        if self.shards.count == 1:
            return torch.cat((self.q(q), self.k(k), v), 1)
        exact = torch.promote_types(qkv.dtype, torch.float32)
        squares = torch.stack([part.to(exact).square().mean(1) for part in (q, k)], 1)
        q_mean, k_mean = (self.shards.all_reduce(squares) / self.shards.count).split(1, 1)
        return torch.cat((_norm_by_mean_square(self.q, q, q_mean), _norm_by_mean_square(self.k, k, k_mean), v), 1)


def _norm_by_mean_square(norm: RMSNorm, x: Tensor, mean_square: Tensor) -> Tensor:
    """Norms x, this rank's part of the columns.  mean_square: [N, 1], the mean of the squares over all ranks."""
    return (x * (mean_square + norm.eps).rsqrt() * norm.weight).to(x.dtype)


class OutputGate(NamedTuple):
    """The gates of the attention's output: a gate for each head, or for each value of a head.
    project: the projection from the attention's input to the gates, before the activation."""

    project: Linear
    activation: Callable[[Tensor], Tensor]


class AttentionBlock:
    """The base class of attention blocks: a Mixer (espalier/models/layers/decoder.py) whose rows attend to other rows.
    sink: [heads], the logits of the attention sinks; None if there are no sinks."""

    __slots__ = ()
    sink: Tensor | None = None

    def write_kv(self, layer: int, rows: InputRows, p: Pass) -> Tensor:
        """Writes K and V, or latents, of rows [N, in] to the cache of layer number `layer`.  Returns the queries."""
        raise NotImplementedError

    def gate(self, rows: InputRows, kept_rows: Tensor | None) -> Tensor | None:
        """Returns the gates of the attention's output, [N, heads] or [N, heads · size]; None if the block has no gates.
        rows: [N, in].  kept_rows: the indices of the rows that the layer keeps; None if it keeps all rows."""
        return None

    def project(self, attention_output: Tensor) -> Tensor | UnsummedOutput:
        """Projects the attention's output [B, Q, heads, size] to [B · Q, hidden].  The result may be partial sums."""
        raise NotImplementedError

    def __call__(self, layer: int, rows: InputRows, s: Residual, p: Pass) -> Tensor | UnsummedOutput:
        """Returns the block's output for the rows that the layer keeps (Pass.kept_rows).  See Mixer."""
        q, kept = self.write_kv(layer, rows, p), p.kept_rows(layer)
        gate = self.gate(rows, kept)
        if kept is not None:
            s.keep_rows(kept)
        attention_output = p.attend(layer, q, self.sink)
        return self.project(
            attention_output if gate is None else attention_output * gate.view(*attention_output.shape[:3], -1)
        )


@dataclass(eq=False, slots=True)
class Attention(AttentionBlock):
    """The attention block with K and V heads.
    qkv: the stacked weights of q, k and v, [num_heads·head_size, in].  num_heads: heads + 2·kv_heads.
    norms: the norms of single q and k heads.  all_heads_norms: the norms over all q heads and over all k heads.  At
    least one of `norms` and `all_heads_norms` is None.  output_gate: None if there is no gate."""

    qkv: Linear
    out: Linear
    num_heads: int
    rope: RopeTables
    norms: HeadNorms | None = None
    sink: Tensor | None = None
    all_heads_norms: AllHeadsNorms | None = None
    output_gate: OutputGate | None = None

    def norm_input(self, norm: AnyNorm, delta: BlockOutput, residual: Tensor) -> tuple[Tensor, InputRows]:
        """Returns (residual + delta, the norm of that sum as qkv's input).  delta: the previous block's output."""
        if self.output_gate is None:
            return self.qkv.norm_input(norm, delta, residual)
        # With a gate, the normed rows are not quantised: the gate may have another storage format than q, k and v.
        return norm.add_and_norm(delta, residual)

    def write_kv(self, layer: int, rows: InputRows, p: Pass) -> Tensor:
        """Writes K and V of rows [N, in] to the cache of layer number `layer`.  Returns the queries."""
        qkv = (
            self.qkv.partial_sums(rows)
            if self.all_heads_norms is None
            else self.all_heads_norms.norm_q_and_k(self.qkv(rows))
        )
        heads = qkv.view(*qkv.shape[:-1], self.num_heads, qkv.shape[-1] // self.num_heads)
        q, scales = p.write(layer, heads, p.rotation(self.rope), self.norms), self.rope.query_scales
        return q if scales is None else q * p.table_at_positions(layer, scales)

    def gate(self, rows: InputRows, kept_rows: Tensor | None) -> Tensor | None:
        """Returns the activated gates of the kept rows; None without output_gate.  rows: [N, in]."""
        if self.output_gate is None:
            return None
        assert isinstance(rows, Tensor)
        return self.output_gate.activation(self.output_gate.project(rows if kept_rows is None else rows[kept_rows]))

    def project(self, attention_output: Tensor) -> Tensor | UnsummedOutput:
        return self.out.residual_delta(attention_output.reshape(-1, self.out.shape[1]))


@dataclass(eq=False, slots=True)
class GatedAttention:
    """The attention block of Qwen3-Next, in which the projection of the gate is stacked with that of q.
    qkv: the stacked weights: q and gate of each q head, then k, then v.  norms: the norms of single q and k heads."""

    qkv: Linear
    out: Linear
    head_size: int
    rope: RopeTables
    norms: HeadNorms

    def norm_input(self, norm: AnyNorm, delta: BlockOutput, residual: Tensor) -> tuple[Tensor, InputRows]:
        """Returns (residual + delta, the norm of that sum as qkv's input).  delta: the previous block's output."""
        return self.qkv.norm_input(norm, delta, residual)

    def __call__(self, layer: int, rows: InputRows, s: Residual, p: Pass) -> Tensor | UnsummedOutput:
        """Returns the block's output for the rows that the layer keeps (Pass.kept_rows).  See decoder.py:Mixer."""
        qkv = self.qkv.partial_sums(rows)
        q = p.write(layer, qkv.unflatten(-1, (-1, self.head_size)), p.rotation(self.rope), self.norms)
        s.keep_rows(p.kept_rows(layer))
        attention_output = p.attend(layer, q).flatten(0, 1)
        gate = HeadGate(select_kept_rows(qkv, layer, p)[..., self.head_size :], 1, 2 * self.head_size, False)
        return self.out.residual_delta(gate_for_projection(self.out, attention_output, gate, None))
