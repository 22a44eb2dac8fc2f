"""Mamba-2 as a block (Dao and Gu 2024, arXiv:2405.21060), as Granite 4 has it.

Its state takes in a row by `S = exp(-exp(A_log) · dt) · S + dt · B ⊗ x`, and is read by C; dt follows from the row.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from espalier.attention import Pass
from espalier.cache.layer_spec import RecurrentState
from espalier.kernels.layers.quantised import Rows
from espalier.kernels.ops.recurrence import ShortConv
from espalier.models.layers.linear import Linear
from espalier.models.layers.mixer import of_kept
from espalier.models.layers.norm import AnyNorm, RMSNorm
from espalier.models.layers.stream import Stream


@dataclass(eq=False, slots=True)
class Mamba2:
    """inputs: stacked projections of the gate, x, B and C, and dt.  conv: of the channels of C, B and x, in this order.

    A_log, dt_bias, skip: [heads], float32 at least; skip: the factor of x that is added to the output.
    limits: of dt.  norm: of the gated output, for each group of heads that share B and C.
    """

    keeps: RecurrentState
    inputs: Linear
    conv: ShortConv
    A_log: Tensor
    dt_bias: Tensor
    skip: Tensor
    limits: tuple[float, float]
    norm: RMSNorm
    out: Linear

    def read(self, norm: AnyNorm, delta: Tensor | None, x: Tensor) -> tuple[Tensor, Rows]:
        """As espalier/models/layers/stream.py:Reader."""
        return self.inputs.read(norm, delta, x)

    def __call__(self, layer: int, rows: Rows, s: Stream, p: Pass) -> Tensor:
        """As espalier/models/layers/mixer.py:Mixer."""
        inner, shared = self.keeps.heads * self.keeps.v_size, self.keeps.k_heads * self.keeps.k_size
        gate, x, b, c, dt = self.inputs(rows).split((inner, inner, shared, shared, self.keeps.heads), 1)
        dt = F.softplus(dt.to(self.A_log.dtype) + self.dt_bias).clamp(*self.limits)
        gates = torch.stack((-self.A_log.exp() * dt, dt), 1)
        q = p.write(layer, torch.cat((c, b, x), 1), gates, self.conv)
        s.keep(p.kept(layer))
        read = p.attend(layer, q, self.skip).flatten(0, 1).flatten(1)
        return self.out.in_parts(self._normed(read, of_kept(gate, layer, p)))

    def _normed(self, read: Tensor, gate: Tensor) -> Tensor:
        exact = self.A_log.dtype
        gated = (read.to(exact) * F.silu(gate.to(exact))).unflatten(1, (self.keeps.k_heads, -1))
        normed = gated * torch.rsqrt(gated.pow(2).mean(-1, keepdim=True) + self.norm.eps)
        return normed.flatten(1).to(read.dtype) * self.norm.weight
