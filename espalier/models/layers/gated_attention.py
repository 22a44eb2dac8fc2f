"""Attention whose output each head multiplies by a gate of its own (Qwen3-Next)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.attention import Pass
from espalier.kernels.layers.quantised import Rows
from espalier.kernels.ops.rope import HeadNorms
from espalier.models.layers.linear import Linear
from espalier.models.layers.mixer import of_kept
from espalier.models.layers.norm import AnyNorm, Delta
from espalier.models.layers.stream import Stream
from espalier.models.rope import RopeTables
from espalier.models.weight_formats.sharded import Unsummed


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
        """As espalier/models/layers/mixer.py:Mixer."""
        made = self.qkv(rows).unflatten(1, (-1, self.head_size))
        q, gate = made[:, : 2 * self.heads].unflatten(1, (self.heads, 2)).unbind(2)
        qkv = torch.cat((q, made[:, 2 * self.heads :]), 1)
        q = p.write(layer, qkv, p.rotation(self.rope), self.norms)
        s.keep(p.kept(layer))
        attended = p.attend(layer, q).flatten(0, 1)
        return self.out.for_stream((attended * of_kept(gate, layer, p).sigmoid()).flatten(1))
