"""Attention of a wide prompt chunk over latent rows (MLA), with keys and values computed from the latents.

With queries in the latent space (absorbed), a pair of query and row costs size + v_size multiplications a head: 576 +
512 for DeepSeek-V3.  With computed keys it costs 192 + 128, but each row's keys and values must be computed first, for
every pass and layer.  So wide chunks compute keys, and narrow ones absorb.

The prefix is taken in pieces, whose keys and values fit the workspace that the layout bounds.  The results of the
pieces are merged by their log-sum-exps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from espalier.cache.kv import PagedKV
from espalier.kernels.attention.kv_splits import KVSplitPolicy, kv_splits_triton
from espalier.kernels.attention.merge import Part, merge
from espalier.kernels.attention.tree_attention import Committed, Staged, tree_attention_triton
from espalier.layout import COMPUTED_PAGE, computed_rows

if TYPE_CHECKING:
    from espalier.attention.base import Nodes, Prefix

# From this width of a chunk on, keys are computed.
COMPUTED_KEYS_WIDTH = 256


@dataclass(frozen=True, slots=True)
class LatentUp:
    """k: [heads, nope, rank], so that a head's key without its rotated part is k · latent; v: [heads, v_size, rank]."""

    k: Tensor
    v: Tensor

    @property
    def nope_size(self) -> int:
        return self.k.shape[1]

    def keys_and_values(self, latents: Tensor, k: Tensor, v: Tensor) -> None:
        """Write the keys [N, heads, nope + rope] and values [N, heads, v_size] of latents [N, rank + rope] to k and v.

        All heads share the rotated part of a key.
        """
        heads, nope, rank = self.k.shape
        content = latents[:, :rank].expand(heads, -1, -1)
        torch.bmm(content, self.k.transpose(1, 2), out=k[..., :nope].transpose(0, 1))
        torch.bmm(content, self.v.transpose(1, 2), out=v.transpose(0, 1))
        k[..., nope:] = latents[:, None, rank:]


@dataclass(frozen=True)
class ComputedKeys:
    """Computes keys and values for the layers of one pass.

    longest: committed rows of the longest request, or more.
    """

    pages: PagedKV
    prefix: Prefix
    nodes: Nodes
    longest: int

    def attend(self, q: Tensor, plane: Tensor, latents: Tensor, up: LatentUp, scale: float) -> Tensor:
        """Attention of q [B, Q, heads, key size] over the committed rows of `plane` [R, 1, size] and over the staged
        latents [B, Q, 1, size], a chain.

        Returns out [B, Q, heads, v_size].
        """
        (batch, queries, heads, k_size), v_size = q.shape, up.v.shape[1]
        rows = computed_rows(batch, heads * (k_size + v_size) * q.dtype.itemsize)
        k, v = (q.new_empty(batch * rows, heads, size) for size in (k_size, v_size))
        own_k, own_v = (q.new_empty(batch * queries, heads, size) for size in (k_size, v_size))
        up.keys_and_values(latents.flatten(0, 2), own_k, own_v)
        staged_k, staged_v = (own.unflatten(0, (batch, queries)) for own in (own_k, own_v))
        staged = Staged(staged_k, staged_v, self.nodes.row_positions, None)
        policy = KVSplitPolicy.of(batch, queries, heads, 1, rows, v_size)
        table = torch.arange(batch * rows // COMPUTED_PAGE, dtype=torch.int32, device=q.device).view(batch, -1)

        def attend_piece(at: int, staged: Staged | None) -> Part:
            if at < self.longest:
                up.keys_and_values(self._latents(plane, at, rows), k, v)
            length = (self.prefix.length - at).clamp(0, rows)
            first = self.prefix.first if at == 0 else 0
            committed = Committed(k, v, table, length, COMPUTED_PAGE, first)
            splits = kv_splits_triton(length, first, policy)
            return tree_attention_triton(q, committed, staged, self.nodes.positions, splits, scale)

        out, lse = attend_piece(0, staged)
        for at in range(rows, self.longest, rows):
            piece = attend_piece(at, None)
            # A piece past a request's end has lse -inf and changes no bit of its result.
            out, lse = merge((out, lse), piece), torch.logaddexp(lse, piece[1])
        return out

    def _latents(self, plane: Tensor, at: int, rows: int) -> Tensor:
        """[B · rows, size]: the committed rows at .. at + rows - 1 of each request; the dummy row where none exists."""
        prefix = self.prefix
        positions = torch.arange(at, at + rows, device=plane.device).expand(len(prefix.length), -1)
        kept = self.pages.rows(prefix.page_table, positions, prefix.holds(positions))
        return plane[:, 0].index_select(0, kept.flatten())
