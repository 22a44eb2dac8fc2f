"""A gated short convolution as a block (LFM2): the rows' inputs are gated before it, its outputs behind it."""

from dataclasses import dataclass

from torch import Tensor

from espalier.attention import Pass
from espalier.kernels.layers.quantised import Rows
from espalier.kernels.ops.recurrence import ShortConv
from espalier.models.layers.linear import Linear
from espalier.models.layers.mixer import of_kept
from espalier.models.layers.norm import AnyNorm, Delta
from espalier.models.layers.stream import Stream
from espalier.models.weight_formats.sharded import Unsummed


@dataclass(eq=False, slots=True)
class GatedConv:
    """gates: stacked projections of the gate before, the gate behind and the inputs, [3 · hidden, hidden]."""

    gates: Linear
    conv: ShortConv
    out: Linear

    def read(self, norm: AnyNorm, delta: Delta, x: Tensor) -> tuple[Tensor, Rows]:
        """As espalier/models/layers/stream.py:Reader."""
        return self.gates.read(norm, delta, x)

    def __call__(self, layer: int, rows: Rows, s: Stream, p: Pass) -> Tensor | Unsummed:
        """As espalier/models/layers/mixer.py:Mixer."""
        before, behind, inputs = self.gates(rows).chunk(3, -1)
        convolved = p.write(layer, before * inputs, None, self.conv).flatten(0, 1)
        s.keep(p.kept(layer))
        return self.out.for_stream(of_kept(behind, layer, p) * convolved)
