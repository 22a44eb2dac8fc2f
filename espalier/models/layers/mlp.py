"""The gated feed-forward block all families use: down(silu(gate(x)) * up(x))."""

import torch.nn.functional as F
from torch import Tensor

from espalier.models.layers.linear import Linear


class GatedMLP:
    """gate_up stacks gate over up: [2·intermediate, hidden]."""

    __slots__ = ("gate_up", "down")

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self.gate_up = gate_up
        self.down = down

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual + mlp(x), [B·Q, hidden]."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down.plus(F.silu(gate).mul_(up), residual)
