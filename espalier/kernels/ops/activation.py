"""The activation of a gated MLP (arXiv:2002.05202)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.runtime.op import op


@dataclass(frozen=True)
class Activation:
    """gate · sigmoid(alpha · gate) · (up + up_offset).  The defaults are silu(gate) · up.

    limit: gate is first limited to at most `limit`, and up to -limit .. limit; None: no limits.
    """

    alpha: float = 1.0
    up_offset: float = 0.0
    limit: float | None = None


SILU = Activation()


def apply_activation_reference(gate_up: Tensor, activation: Activation) -> Tensor:
    """gate_up [N, 2·I], gate first -> [N, I].  Rounded once, at the end, as the kernel does."""
    gate, up = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, dim=-1)
    if activation.limit is not None:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    out = gate * torch.sigmoid(activation.alpha * gate) * (up + activation.up_offset)
    return out.to(gate_up.dtype)


def require_gated(size: int) -> int:
    """Returns `size`, the number of columns of gate and up together.  Raises EspalierError if it is odd."""
    if size % 2:
        raise EspalierError(f"gate_up holds gate and then up, so it needs an even number of columns, but has {size}")
    return size


@op("espalier.kernels.layers.silu")
def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [N, 2·I], gate first -> silu(gate) · up [N, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
