"""How rows enter a model, in one launch: their tokens' embeddings and their positions' rotation; for an EAGLE draft the
hidden state that each row stands on as well, both normed and side by side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.layers.norm import rms_norm_reference
from espalier.kernels.runtime.launch import chip, exact_type, kernel, power_of_two, require
from espalier.kernels.runtime.pdl import early, pdl_wait_if

if TYPE_CHECKING:
    import triton.language as tl


@dataclass(frozen=True)
class EmbeddingTables:
    """Tables of a model: embed [V, H] by token; cos, sin [P, size] by position, float32 (float64 for float64)."""

    embed: Tensor
    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class DraftHidden:
    """What stands beside the embeddings.  hidden [B, R, H]; parents [B, Q] int64, which of these each row continues,
    None where R is Q and each continues its own; embed_norm, hidden_norm: [H] weights of RMS norms, with their eps;
    normed_residual: whether the residual stream begins with the normed hidden."""

    hidden: Tensor
    parents: Tensor | None
    embed_norm: Tensor
    embed_eps: float
    hidden_norm: Tensor
    hidden_eps: float
    normed_residual: bool


class EmbeddedRows(NamedTuple):
    """Of N = B · Q rows.  x [N, H], or [N, 2 · H] where something stands beside; residual [N, H], what the layer adds
    to; cos, sin [N, size]."""

    x: Tensor
    residual: Tensor
    cos: Tensor
    sin: Tensor


def embed_rows(
    tokens: Tensor, positions: Tensor, tables: EmbeddingTables, beside: DraftHidden | None = None
) -> EmbeddedRows:
    """tokens, positions int64 [B, Q], of any strides; a token below 0, a void node's, enters as its request's first.

    Raises EspalierError if sizes do not agree.  Exact but for the norms, which are kernels/layers/norm.py's.
    """
    make = embed_rows_triton if tokens.is_cuda else embed_rows_reference
    return make(tokens, positions, tables, beside)


def embed_rows_triton(
    tokens: Tensor, positions: Tensor, tables: EmbeddingTables, beside: DraftHidden | None = None
) -> EmbeddedRows:
    batch, queries = tokens.shape
    embed, cos = tables.embed, tables.cos
    (size, rotary), count = (embed.shape[1], cos.shape[1]), batch * queries
    _check(tokens, positions, tables, beside)
    x = embed.new_empty(count, size if beside is None else 2 * size)
    residual = x if beside is None else embed.new_empty(count, size)
    entered = EmbeddedRows(x, residual, cos.new_empty(count, rotary), cos.new_empty(count, rotary))
    if not count:
        return entered
    parents = None if beside is None else beside.parents
    hidden = embed[None] if beside is None else beside.hidden
    block = power_of_two(size)
    _embed_rows_kernel[(count, 1 if beside is None else 2)](
        *(tokens, positions, embed, cos, tables.sin, *entered),
        *(hidden, parents, embed if beside is None else beside.embed_norm),
        embed if beside is None else beside.hidden_norm,
        queries,
        *(*tokens.stride(), *positions.stride(), *hidden.stride()[:2]),
        *((0, 0) if parents is None else parents.stride()),
        # Constants, since as arguments they would be float32.
        EMBED_EPS=0.0 if beside is None else beside.embed_eps,
        HIDDEN_EPS=0.0 if beside is None else beside.hidden_eps,
        SIZE=size,
        ROTARY=rotary,
        BESIDE=beside is not None,
        NORMED_RESIDUAL=beside is not None and beside.normed_residual,
        EXACT=exact_type(embed.dtype),
        BLOCK=block,
        BLOCK_R=power_of_two(rotary),
        num_warps=min(max(block // 512, 1), 16),
        **early(chip(tokens)),
    )
    return entered


def _check(tokens: Tensor, positions: Tensor, tables: EmbeddingTables, beside: DraftHidden | None) -> None:
    (batch, queries), (_, size) = tokens.shape, tables.embed.shape
    require("enter: tokens", tokens, (-1, -1), torch.int64, tokens)
    require("enter: positions", positions, (batch, queries), torch.int64, tokens)
    require("enter: embed", tables.embed, (-1, size), None, tokens)
    exact = torch.promote_types(tables.embed.dtype, torch.float32)
    require("enter: cos", tables.cos, (-1, -1), exact, tokens)
    require("enter: sin", tables.sin, tuple(tables.cos.shape), exact, tokens)
    dense = [tables.embed, tables.cos, tables.sin]
    if beside is not None:
        rows = queries if beside.parents is None else -1
        require("enter: hidden", beside.hidden, (batch, rows, size), tables.embed.dtype, tokens)
        require("enter: embed_norm", beside.embed_norm, (size,), None, tokens)
        require("enter: hidden_norm", beside.hidden_norm, (size,), None, tokens)
        if beside.parents is not None:
            require("enter: parents", beside.parents, (batch, queries), torch.int64, tokens)
        dense += [beside.embed_norm, beside.hidden_norm]
    if any(not table.is_contiguous() for table in dense) or (beside is not None and beside.hidden.stride(2) != 1):
        raise EspalierError("enter: tables and norms must be contiguous, and hidden dense in its last dimension")


def embed_rows_reference(
    tokens: Tensor, positions: Tensor, tables: EmbeddingTables, beside: DraftHidden | None = None
) -> EmbeddedRows:
    tokens = torch.where(tokens < 0, tokens[:, :1], tokens).flatten()
    cos, sin = (table.index_select(0, positions.flatten()) for table in (tables.cos, tables.sin))
    x = torch.nn.functional.embedding(tokens, tables.embed)
    if beside is None:
        return EmbeddedRows(x, x, cos, sin)
    hidden = beside.hidden
    if beside.parents is not None:
        hidden = hidden.gather(1, beside.parents[..., None].expand(-1, -1, hidden.shape[2]))
    hidden = hidden.flatten(0, 1)
    normed = rms_norm_reference(hidden, beside.hidden_norm, beside.hidden_eps)
    x = torch.cat((rms_norm_reference(x, beside.embed_norm, beside.embed_eps), normed), 1)
    return EmbeddedRows(x, normed if beside.normed_residual else hidden, cos, sin)


@kernel
def _normed(x, weight_ptr, at, real, EPS: tl.constexpr, SIZE: tl.constexpr, EXACT: tl.constexpr):
    exact = x.to(EXACT)
    scale = 1.0 / tl.sqrt(tl.sum(exact * exact, 0) / SIZE + EPS)
    return (exact * scale * tl.load(weight_ptr + at, mask=real, other=0.0).to(EXACT)).to(x.dtype)


@kernel
def _embed_rows_kernel(
    tokens_ptr, positions_ptr, embed_ptr, cos_ptr, sin_ptr,
    x_ptr, residual_ptr, out_cos_ptr, out_sin_ptr,
    hidden_ptr, parents_ptr, embed_norm_ptr, hidden_norm_ptr,
    queries, tokens_b, tokens_q, positions_b, positions_q, hidden_b, hidden_r, parents_b, parents_q,
    EMBED_EPS: tl.constexpr, HIDDEN_EPS: tl.constexpr, SIZE: tl.constexpr, ROTARY: tl.constexpr,
    BESIDE: tl.constexpr, NORMED_RESIDUAL: tl.constexpr, EXACT: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_R: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """A program a row for what its token and position say, and another for what stands beside."""
    pdl_wait_if(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    b, q = row // queries, row % queries
    at = tl.arange(0, BLOCK)
    real = at < SIZE
    out = row * (SIZE + SIZE * BESIDE) + at
    if tl.program_id(1) == 0:
        position = tl.load(positions_ptr + b * positions_b + q * positions_q)
        token = tl.load(tokens_ptr + b * tokens_b + q * tokens_q)
        token = tl.where(token < 0, tl.load(tokens_ptr + b * tokens_b), token)
        x = tl.load(embed_ptr + token * SIZE + at, mask=real, other=0.0)
        if BESIDE:
            x = _normed(x, embed_norm_ptr, at, real, EMBED_EPS, SIZE, EXACT)
        tl.store(x_ptr + out, x, mask=real)
        rope_and_norm = tl.arange(0, BLOCK_R)
        inside = rope_and_norm < ROTARY
        cos = tl.load(cos_ptr + position * ROTARY + rope_and_norm, mask=inside, other=0.0)
        sin = tl.load(sin_ptr + position * ROTARY + rope_and_norm, mask=inside, other=0.0)
        tl.store(out_cos_ptr + row * ROTARY + rope_and_norm, cos, mask=inside)
        tl.store(out_sin_ptr + row * ROTARY + rope_and_norm, sin, mask=inside)
    else:
        parent = q.to(tl.int64)
        if parents_ptr is not None:
            parent = tl.load(parents_ptr + b * parents_b + q * parents_q)
        hidden = tl.load(hidden_ptr + b * hidden_b + parent * hidden_r + at, mask=real, other=0.0)
        normed = _normed(hidden, hidden_norm_ptr, at, real, HIDDEN_EPS, SIZE, EXACT)
        tl.store(x_ptr + out + SIZE, normed, mask=real)
        tl.store(residual_ptr + row * SIZE + at, normed if NORMED_RESIDUAL else hidden, mask=real)
