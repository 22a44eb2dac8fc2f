"""The activation of an MLP, with a gate (arXiv:2002.05202) or without, for dense layers and experts."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.runtime.op import op


@dataclass(frozen=True)
class Activation:
    """The activation act(gate) · (up + up_offset).  The defaults are silu(gate) · up.

    limit: if not None, `gate` is at most limit, and `up` is clamped to -limit .. limit (GPT-OSS, arXiv:2508.10925).
    kind: which function `act` is.  silu: gate · sigmoid(alpha · gate).  gelu_tanh: the approximation of GELU by tanh.
    relu2: there is no gate, and the activation is relu(up)²."""

    alpha: float = 1.0
    up_offset: float = 0.0
    limit: float | None = None
    kind: Literal["silu", "gelu_tanh", "relu2"] = "silu"

    @property
    def is_silu(self) -> bool:
        """Whether the activation is silu(gate) · up, which matrix product kernels can compute in their epilogue."""
        return self is SILU or self == SILU

    @property
    def num_matrices(self) -> int:
        """The number of matrices whose products are the activation's inputs: 2 for gate and up, 1 for up alone."""
        return 1 if self.kind == "relu2" else 2

    @property
    def constexpr_arguments(self) -> dict[str, object]:
        """The arguments of layers/activation.py:apply_activation for a kernel.
        They are constexpr, because Triton rounds other float arguments to float32."""
        return {"ACTIVATION_KIND": self.kind, "ALPHA": self.alpha, "UP_OFFSET": self.up_offset, "LIMIT": self.limit}


SILU, GELU_TANH, RELU2 = Activation(), Activation(kind="gelu_tanh"), Activation(kind="relu2")


@op("espalier.kernels.layers.activation")
def gated_activation(gate_up: Tensor, activation: Activation = SILU) -> Tensor:
    """Apply the activation to gate_up: [N, 2·I], gate first, or [N, I] if there is no gate.  Returns [N, I].

    Raises EspalierError for an odd number of columns if there is a gate."""
    if gate_up.shape[1] % 2:
        num_up_columns(gate_up.shape[1], activation)
    if activation is SILU or activation.is_silu:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)
    return activation_rounded_once(gate_up, activation)


def activation_rounded_once(gate_up: Tensor, activation: Activation) -> Tensor:
    """Returns the result of `gated_activation`, rounded only once, at the end, as in the kernels.
    PyTorch's F.silu rounds silu(gate) to the dtype of gate_up before the product with `up`."""
    wide_gate_up = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32))
    if activation.num_matrices == 1:
        return F.relu(wide_gate_up).square().to(gate_up.dtype)
    gate, up = wide_gate_up.chunk(2, dim=-1)
    if activation.limit is not None:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    if activation.kind == "gelu_tanh":
        act_of_gate = F.gelu(gate, approximate="tanh")
    else:
        act_of_gate = gate * torch.sigmoid(activation.alpha * gate)
    return (act_of_gate * (up + activation.up_offset)).to(gate_up.dtype)


def num_up_columns(num_columns: int, activation: Activation) -> int:
    """Returns the number of columns of up.  num_columns: the columns of gate and up together; without a gate, of up
    alone.  Raises EspalierError if gate and up have an odd number of columns."""
    if num_columns % activation.num_matrices:
        raise EspalierError(f"gate_up holds gate and then up: it needs an even number of columns, not {num_columns}")
    return num_columns // activation.num_matrices
