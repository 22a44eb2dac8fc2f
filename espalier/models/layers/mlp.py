"""The feed-forward block of all families: down(activation(gate(x)) * up(x)), or down(activation(up(x)))."""

from dataclasses import dataclass

from torch import Tensor

from espalier.kernels.layers.quantised import Rows
from espalier.kernels.ops.activation import SILU, Activation
from espalier.models.layers.linear import Linear
from espalier.models.layers.norm import AnyNorm, Delta
from espalier.models.weight_formats.sharded import Unsummed


@dataclass(eq=False, slots=True)
class GatedMLP:
    """gate_up: stacked weights of gate and up, [2·intermediate, hidden], or up alone if the activation has no gate."""

    gate_up: Linear
    down: Linear
    activation: Activation = SILU

    def read(self, norm: AnyNorm, delta: Delta, x: Tensor) -> tuple[Tensor, Rows]:
        """As espalier/models/layers/stream.py:Reader."""
        return self.gate_up.read(norm, delta, x)

    def __call__(self, x: Rows, live: Tensor | None = None) -> Tensor | Unsummed:
        """[B·Q, hidden] -> [B·Q, hidden], or parts of it as RMSNorm.after takes them.

        live: [B·Q] bool, as MixtureMLP takes it.  Here every row is computed.
        """
        return self.down.for_stream(self.gate_up.gated(x, self.activation))

    def num_parts(self, rows: int) -> int:
        """The number of parts that `write_parts` writes."""
        return self.down.weight.num_parts(rows)

    def write_parts(self, x: Tensor, out: Tensor) -> None:
        """[B·Q, hidden] -> out [num_parts, B·Q, hidden], float32 at least; they sum to the result."""
        self.down.write_parts(self.gate_up.gated(x, self.activation), out)

    def summed(self, x: Tensor) -> Tensor:
        """[B·Q, hidden] -> [B·Q, hidden], summed: never in parts."""
        return self.down(self.gate_up.gated(x, self.activation))
