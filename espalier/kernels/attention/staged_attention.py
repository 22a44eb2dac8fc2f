"""Attention over the staged rows of a pass only, for backends that attend only to committed rows."""

from __future__ import annotations

from torch import Tensor

from espalier.kernels.ops.attention import (
    Committed,
    Inputs,
    NoPrefix,
    Staged,
    is_wide_latent,
    latent_attention,
    tree_attention,
)
from espalier.kernels.state.kv_scales import KVScales


def staged_attention(
    q: Tensor,
    staged: Staged,
    positions: Tensor,
    scale: float,
    window: int | None,
    no_prefix: NoPrefix,
    scales: KVScales | None = None,
) -> tuple[Tensor, Tensor]:
    # The kernel needs a pool to check shapes, but reads nothing from it: one staged row serves.
    pool = (staged.k[:1, 0], staged.v[:1, 0])
    committed = Committed(*pool, no_prefix.page_table, no_prefix.length, page_size=1, scales=scales)
    inputs = Inputs(q, committed, staged, positions, no_prefix.splits, scale, window)
    return (latent_attention.triton if is_wide_latent(staged) else tree_attention.triton)(inputs)
