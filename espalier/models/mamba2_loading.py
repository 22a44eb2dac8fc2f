"""Loads a Mamba-2 block."""

from collections.abc import Sequence

import torch

from espalier.cache.layer_spec import RecurrentState
from espalier.kernels.ops.recurrence import ShortConv
from espalier.models.layers.mamba2 import Mamba2
from espalier.models.weights import Weights


def load_mamba2(
    weights: Weights,
    prefix: str,
    keeps: RecurrentState,
    hidden: int,
    eps: float,
    *,
    bias: bool,
    conv_bias: bool,
    limits: Sequence[float],
) -> Mamba2:
    """The block under `prefix`.  bias: of its projections; limits: of dt, two numbers."""
    inner, shared, channels = keeps.heads * keeps.v_size, keeps.k_heads * keeps.k_size, keeps.channels
    conv = weights.take(f"{prefix}conv1d.weight", channels, 1, keeps.taps)[:, 0]
    # The stored order of the channels is x, B, C.
    x, b, c = torch.arange(channels, device=conv.device).split((inner, shared, shared))
    order = torch.cat((c, b, x))
    of_channels = weights.take(f"{prefix}conv1d.bias", channels)[order] if conv_bias else None
    low, high = limits
    return Mamba2(
        keeps,
        weights.linear(prefix, ("in_proj",), (inner + channels + keeps.heads,), hidden, bias),
        ShortConv(conv[order].contiguous(), of_channels),
        weights.take_exact(f"{prefix}A_log", keeps.heads),
        weights.take_exact(f"{prefix}dt_bias", keeps.heads),
        weights.take_exact(f"{prefix}D", keeps.heads),
        (float(low), float(high)),
        weights.norm(f"{prefix}norm", inner, eps),
        weights.linear(prefix, ("out_proj",), (hidden,), inner, bias),
    )
