"""Mamba-2 as a block (Dao and Gu 2024, arXiv:2405.21060), as Granite 4 has it.

Its state takes in a row by `S = exp(-exp(A_log) · dt) · S + dt · B ⊗ x`, and is read by C; dt follows from the row.
"""

from dataclasses import dataclass, field
from math import inf

from torch import Tensor

from espalier.attention import Pass
from espalier.cache.layer_spec import RecurrentState
from espalier.kernels.layers.quantised import Rows
from espalier.kernels.ops.recurrence import ShortConv
from espalier.kernels.ops.states import Columns, GateInputs, OutputGate, gated_norm
from espalier.models.layers.linear import Linear
from espalier.models.layers.mixer import of_kept
from espalier.models.layers.norm import AnyNorm, Delta, RMSNorm
from espalier.models.layers.stream import Stream
from espalier.models.weight_formats.sharded import Unsummed


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
    columns: Columns = field(init=False)

    def __post_init__(self) -> None:
        keeps = self.keeps
        inner, shared = keeps.heads * keeps.v_size, keeps.k_heads * keeps.k_size
        # The stored order is the gate, x, B, C, dt.
        self.columns = keeps.columns._replace(q=2 * inner + shared, k=2 * inner, v=inner)

    def read(self, norm: AnyNorm, delta: Delta, x: Tensor) -> tuple[Tensor, Rows]:
        """As espalier/models/layers/stream.py:Reader."""
        return self.inputs.read(norm, delta, x)

    def __call__(self, layer: int, rows: Rows, s: Stream, p: Pass) -> Tensor | Unsummed:
        """As espalier/models/layers/mixer.py:Mixer."""
        inputs, keeps = self.inputs(rows), self.keeps
        low, high = self.limits
        bounds = low if low > 0 else None, high if high < inf else None
        share = keeps.heads // keeps.k_heads
        dt = GateInputs(inputs[:, -keeps.heads :], None, self.A_log, self.dt_bias, share, share, bounds)
        q = p.write(layer, inputs, dt, self.conv, self.columns)
        s.keep(p.kept(layer))
        read = p.attend(layer, q, self.skip).flatten(2).view(-1, keeps.k_heads, share * keeps.v_size)
        gate = OutputGate(of_kept(inputs, layer, p), 1, share * keeps.v_size, True)
        return self.out.for_stream(gated_norm(read, gate, self.norm.weight, self.norm.eps))
