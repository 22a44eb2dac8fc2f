"""The activation of an expert: silu(gate) · up, or the clamped form of GPT-OSS (arXiv:2508.10925)."""

from __future__ import annotations

import triton.language as tl

from espalier.kernels.runtime.jit import kernel


@kernel
def apply_activation(gate, up, ALPHA: tl.constexpr, UP_OFFSET: tl.constexpr, LIMIT: tl.constexpr):
    """Computed in the dtype of gate and up.  NaN stays NaN; tl.minimum and tl.maximum would replace it by the limit."""
    if LIMIT is not None:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    if UP_OFFSET != 0:
        up += UP_OFFSET
    return gate / (1.0 + tl.exp(-ALPHA * gate)) * up
