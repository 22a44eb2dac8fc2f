"""The input rows of a model: token embeddings, and the cos and sin of their positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.kernels.ops.norm import rms_norm
from espalier.kernels.ops.rope import Rotation
from espalier.kernels.runtime.op import op


@dataclass(frozen=True)
class EmbeddingTables:
    """A model's tables: embed [V, H] by token; cos, sin [P, rotary] by position, float32 (float64 for float64)."""

    embed: Tensor
    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class DraftHidden:
    """The hidden states that a draft model's rows take in.  hidden: [B, R, H].

    parents: [B, Q] int64, the row of `hidden` for each input row; None: R is Q, and input row q takes hidden row q.
    embed_norm, hidden_norm: [H], weights of RMS norms, each with its eps.
    normed_residual: whether the residual stream starts with the normed hidden state.
    """

    hidden: Tensor
    parents: Tensor | None
    embed_norm: Tensor
    embed_eps: float
    hidden_norm: Tensor
    hidden_eps: float
    normed_residual: bool


@op("espalier.kernels.layers.embed_rows")
def embed_rows(
    tokens: Tensor, positions: Tensor, tables: EmbeddingTables, draft: DraftHidden | None = None
) -> tuple[Tensor, Tensor, Rotation, Tensor]:
    """(x, residual, rotation, live) of the N = B · Q rows of tokens, positions [B, Q] int64, of any strides.

    x: [N, H], or [N, 2 · H] with hidden states; residual: [N, H], the start of the residual stream; rotation: of the
    positions; live: [N] bool, whether the token is at least 0.

    A token below 0 (a void node) is replaced by its request's first token, or by 0 if that is void too.
    draft: None for a target model.
    Raises EspalierError if sizes do not agree.  Exact, except for the norms: see kernels/layers/norm.py.
    """
    live = (tokens >= 0).flatten()
    tokens = torch.where(tokens < 0, tokens[:, :1], tokens).clamp_(min=0).flatten()
    cos, sin = (table.index_select(0, positions.flatten()) for table in (tables.cos, tables.sin))
    x = torch.nn.functional.embedding(tokens, tables.embed)
    if draft is None:
        return x, x, Rotation(cos, sin), live
    hidden = draft.hidden
    if draft.parents is not None:
        hidden = hidden.gather(1, draft.parents[..., None].expand(-1, -1, hidden.shape[2]))
    hidden = hidden.flatten(0, 1)
    normed = rms_norm.reference(hidden, draft.hidden_norm, draft.hidden_eps)
    x = torch.cat((rms_norm.reference(x, draft.embed_norm, draft.embed_eps), normed), 1)
    return x, normed if draft.normed_residual else hidden, Rotation(cos, sin), live
