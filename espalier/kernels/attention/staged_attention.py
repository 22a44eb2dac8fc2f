"""Attention over the staged rows of a pass only, for backends that attend only to committed rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.kernels.attention.ancestor_bits import seen_rows
from espalier.kernels.attention.kv_splits import COLUMNS, KVSplitPolicy, KVSplits
from espalier.kernels.attention.latent_attention import MAX_ROW_SIZE, MAX_V_SIZE, latent_attention_triton
from espalier.kernels.attention.masked_attention import masked_attention
from espalier.kernels.attention.rows import Committed, Inputs, Staged
from espalier.kernels.attention.tree_attention import DTYPES, MAX_HEAD_SIZE, tree_attention_triton
from espalier.kernels.state.kv_scales import KVScales


@dataclass(frozen=True)
class NoPrefix:
    """Empty prefixes, for the kernel that takes committed and staged rows; made once per pass.

    page_table: [B, 1]; length: [B], zeros; splits: one empty split per request.
    """

    page_table: Tensor
    length: Tensor
    splits: KVSplits

    @classmethod
    def of(cls, batch: int, device: torch.device) -> NoPrefix:
        requests = torch.arange(batch + 1, dtype=torch.int32, device=device)
        table = torch.zeros(batch, COLUMNS, dtype=torch.int32, device=device)
        table[:, 0] = requests[:batch]
        table[:, COLUMNS - 1] = 1
        length = torch.zeros(batch, dtype=torch.int64, device=device)
        return cls(table[:, 1:2], length, KVSplits(table, requests, KVSplitPolicy(1, 1)))


def staged_attention(
    q: Tensor,
    staged: Staged,
    positions: Tensor,
    scale: float,
    window: int | None,
    no_prefix: NoPrefix,
    scales: KVScales | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of q [B, Q, heads, k_size] at positions [B, Q] over the staged rows that each query sees.

    scales: of staged rows in FP8.
    Returns out [B, Q, heads, v_size] in q's dtype and lse [B, Q, heads], natural log.  A query that sees no rows gets
    zeros and lse -inf.
    """
    fits = max(staged.k.shape[3], staged.v.shape[3]) <= MAX_HEAD_SIZE or (_is_wide_latent(staged) and window is None)
    on_gpu = q.is_cuda and q.dtype in DTYPES and fits
    return (staged_attention_triton if on_gpu else staged_attention_reference)(
        q, staged, positions, scale, window, no_prefix, scales
    )


def _is_wide_latent(staged: Staged) -> bool:
    """Whether K and V are views of one latent row, too wide for tree_attention."""
    (heads, size), v_size = staged.k.shape[2:], staged.v.shape[3]
    is_latent = heads == 1 and staged.k.data_ptr() == staged.v.data_ptr()
    return is_latent and MAX_HEAD_SIZE < size <= MAX_ROW_SIZE and v_size <= MAX_V_SIZE


def staged_attention_triton(
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
    return (latent_attention_triton if _is_wide_latent(staged) else tree_attention_triton)(inputs)


def staged_attention_reference(
    q: Tensor,
    staged: Staged,
    positions: Tensor,
    scale: float,
    window: int | None,
    no_prefix: NoPrefix,
    scales: KVScales | None = None,
) -> tuple[Tensor, Tensor]:
    seen = seen_rows(staged.ancestor_bits, positions, staged.row_positions, window)
    return masked_attention(q, staged.k, staged.v, seen, scale, scales)
