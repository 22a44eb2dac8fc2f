"""The activation of an MLP, gated (arXiv:2002.05202) or not, for dense layers and experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.runtime.op import op


@dataclass(frozen=True)
class Activation:
    """act(gate) · (up + up_offset).  The defaults are silu(gate) · up.

    limit: the most that gate may be, and the bound of up, -limit .. limit, before the activation; None: no limits.
    GPT-OSS has such a silu (arXiv:2508.10925).
    kind: for silu, act is gate · sigmoid(alpha · gate); for gelu_tanh, act is GELU in its approximation by tanh.  relu2
    has no gate: it is relu(up)².
    """

    alpha: float = 1.0
    up_offset: float = 0.0
    limit: float | None = None
    kind: Literal["silu", "gelu_tanh", "relu2"] = "silu"

    @property
    def is_silu(self) -> bool:
        """Whether it is silu(gate) · up, which products compute in their epilogue."""
        return self is SILU or self == SILU

    @property
    def halves(self) -> int:
        """The number of matrices before the activation: 2 for gate and up, 1 for up alone."""
        return 1 if self.kind == "relu2" else 2

    @property
    def constants(self) -> dict[str, object]:
        """The constexpr arguments for a kernel that calls layers/activation.py:apply_activation.  As run-time arguments
        the numbers would be rounded to float32."""
        return {"KIND": self.kind, "ALPHA": self.alpha, "UP_OFFSET": self.up_offset, "LIMIT": self.limit}


SILU, GELU_TANH, RELU2 = Activation(), Activation(kind="gelu_tanh"), Activation(kind="relu2")


@op("espalier.kernels.layers.activation")
def gated(gate_up: Tensor, activation: Activation = SILU) -> Tensor:
    """Apply the activation to gate_up [N, 2·I], gate first, or to up [N, I].  Returns [N, I].

    Raises EspalierError for an odd number of columns of gate and up.
    """
    if gate_up.shape[1] % 2:
        require_halves(gate_up.shape[1], activation)
    if activation is SILU or activation.is_silu:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)
    return rounded_once(gate_up, activation)


def rounded_once(gate_up: Tensor, activation: Activation) -> Tensor:
    """`gated`, rounded only once, at the end, as in kernels.  PyTorch's silu would also round silu(gate)."""
    exact = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32))
    if activation.halves == 1:
        return F.relu(exact).square().to(gate_up.dtype)
    gate, up = exact.chunk(2, dim=-1)
    if activation.limit is not None:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    if activation.kind == "gelu_tanh":
        activated = F.gelu(gate, approximate="tanh")
    else:
        activated = gate * torch.sigmoid(activation.alpha * gate)
    return (activated * (up + activation.up_offset)).to(gate_up.dtype)


def require_halves(size: int, activation: Activation) -> int:
    """The columns of up, if there are `size` columns before the activation.  Raises EspalierError if gate and up have
    an odd number of columns."""
    if size % activation.halves:
        raise EspalierError(f"gate_up holds gate and then up, so it needs an even number of columns, but has {size}")
    return size // activation.halves
