"""The activation of an expert: silu(gate) · up, or the clamped form of GPT-OSS (arXiv:2508.10925)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from espalier.kernels.runtime.launch import kernel

if TYPE_CHECKING:
    import triton.language as tl


@dataclass(frozen=True)
class Activation:
    """gate · sigmoid(alpha · gate) · (up + up_offset).  The defaults are silu(gate) · up.

    limit: gate is first limited to at most `limit`, and up to -limit .. limit; None: no limits.
    """

    alpha: float = 1.0
    up_offset: float = 0.0
    limit: float | None = None


SILU = Activation()


@kernel
def apply_activation(gate, up, ALPHA: tl.constexpr, UP_OFFSET: tl.constexpr, LIMIT: tl.constexpr):
    """Computed in the dtype of gate and up.  NaN stays NaN; tl.minimum and tl.maximum would replace it by the limit."""
    if LIMIT is not None:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    if UP_OFFSET != 0:
        up += UP_OFFSET
    return gate / (1.0 + tl.exp(-ALPHA * gate)) * up


def apply_activation_reference(gate_up: Tensor, activation: Activation) -> Tensor:
    """gate_up [N, 2·I], gate first -> [N, I].  Rounded once, at the end, as the kernel does."""
    gate, up = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, dim=-1)
    if activation.limit is not None:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    out = gate * torch.sigmoid(activation.alpha * gate) * (up + activation.up_offset)
    return out.to(gate_up.dtype)
