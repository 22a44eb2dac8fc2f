"""Makes the input rows of a model in one launch: looks up token embeddings, and cos and sin of the positions.

For an EAGLE draft model, a row of x is the normed embedding, then the normed hidden state of the parent row.  Grid:
(rows, 1 or 2).  The first program of a row looks up embedding, cos and sin.  For a draft, a second program norms the
hidden state.
"""

import torch
import triton.language as tl
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.layers.norm import norm_row
from espalier.kernels.ops.drafts import DraftHidden, EmbeddingTables
from espalier.kernels.ops.rope import Rotation
from espalier.kernels.runtime.jit import kernel
from espalier.kernels.runtime.launch import acc_dtype, chip, next_power_of_2, require, warps_for
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger_and_wait


def embed_rows(
    tokens: Tensor, positions: Tensor, tables: EmbeddingTables, draft: DraftHidden | None = None
) -> tuple[Tensor, Tensor, Rotation, Tensor]:
    """The launcher of ops/drafts.py:embed_rows.  draft: the hidden states that the rows read; None for a target."""
    batch, queries = tokens.shape
    embed, cos = tables.embed, tables.cos
    (size, rotary), count = (embed.shape[1], cos.shape[1]), batch * queries
    _check_arguments(tokens, positions, tables, draft)
    x = embed.new_empty(count, size if draft is None else 2 * size)
    residual = x if draft is None else embed.new_empty(count, size)
    live = torch.empty(count, dtype=torch.bool, device=x.device)
    rotation = Rotation(cos.new_empty(count, rotary), cos.new_empty(count, rotary))
    if not count:
        return x, residual, rotation, live
    # Without a draft, the kernel gets placeholder tensors, which it does not read.
    hidden_inputs = draft or DraftHidden(embed[None], None, embed, 0.0, embed, 0.0, False)
    block = next_power_of_2(size)
    _embed_rows_kernel[(count, 1 if draft is None else 2)](
        *(tokens, positions, embed, cos, tables.sin, x, residual, *rotation, live),
        *(hidden_inputs.hidden, hidden_inputs.parents, hidden_inputs.embed_norm, hidden_inputs.hidden_norm, queries),
        *(*tokens.stride(), *positions.stride(), *hidden_inputs.hidden.stride()[:2]),
        *((0, 0) if hidden_inputs.parents is None else hidden_inputs.parents.stride()),
        EMBED_EPS=hidden_inputs.embed_eps, HIDDEN_EPS=hidden_inputs.hidden_eps, HIDDEN_SIZE=size, ROTARY=rotary,
        HAS_DRAFT=draft is not None, NORMED_RESIDUAL=hidden_inputs.normed_residual, ACC_DTYPE=acc_dtype(embed.dtype),
        BLOCK=block, BLOCK_R=next_power_of_2(rotary), num_warps=warps_for(block, 512), **pdl_arguments(chip(tokens)),
    )  # fmt: skip
    return x, residual, rotation, live


def _check_arguments(tokens: Tensor, positions: Tensor, tables: EmbeddingTables, draft: DraftHidden | None) -> None:
    (batch, queries), (_, size) = tokens.shape, tables.embed.shape
    require("embed_rows: tokens", tokens, (-1, -1), torch.int64, tokens)
    require("embed_rows: positions", positions, (batch, queries), torch.int64, tokens)
    require("embed_rows: embed", tables.embed, (-1, size), None, tokens)
    wide_dtype = torch.promote_types(tables.embed.dtype, torch.float32)
    require("embed_rows: cos", tables.cos, (-1, -1), wide_dtype, tokens)
    require("embed_rows: sin", tables.sin, tuple(tables.cos.shape), wide_dtype, tokens)
    dense = [tables.embed, tables.cos, tables.sin]
    if draft is not None:
        rows = queries if draft.parents is None else -1
        require("embed_rows: hidden", draft.hidden, (batch, rows, size), tables.embed.dtype, tokens)
        require("embed_rows: embed_norm", draft.embed_norm, (size,), None, tokens)
        require("embed_rows: hidden_norm", draft.hidden_norm, (size,), None, tokens)
        if draft.parents is not None:
            require("embed_rows: parents", draft.parents, (batch, queries), torch.int64, tokens)
        dense += [draft.embed_norm, draft.hidden_norm]
    if any(not table.is_contiguous() for table in dense) or (draft is not None and draft.hidden.stride(2) != 1):
        raise EspalierError("embed_rows: tables and norms must be contiguous, and hidden in its last dimension")


@kernel
def _embed_rows_kernel(
    tokens_ptr, positions_ptr, embed_ptr, cos_ptr, sin_ptr,
    x_ptr, residual_ptr, out_cos_ptr, out_sin_ptr, live_ptr,
    hidden_ptr, parents_ptr, embed_norm_ptr, hidden_norm_ptr,
    queries, tokens_stride_b, tokens_stride_q, positions_stride_b, positions_stride_q, hidden_stride_b, hidden_stride_r,
    parents_stride_b, parents_stride_q,
    EMBED_EPS: tl.constexpr, HIDDEN_EPS: tl.constexpr, HIDDEN_SIZE: tl.constexpr, ROTARY: tl.constexpr,
    HAS_DRAFT: tl.constexpr, NORMED_RESIDUAL: tl.constexpr, ACC_DTYPE: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_R: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """queries: rows per request.  parents_ptr: the row of `hidden` for each row.  live_ptr: gets whether token >= 0."""
    pdl_trigger_and_wait(USE_PDL)
    row = tl.program_id(0).to(tl.int64)
    b, q = row // queries, row % queries
    column = tl.arange(0, BLOCK)
    mask = column < HIDDEN_SIZE
    out = row * (HIDDEN_SIZE + HIDDEN_SIZE * HAS_DRAFT) + column
    if tl.program_id(1) == 0:
        position = tl.load(positions_ptr + b * positions_stride_b + q * positions_stride_q)
        token = tl.load(tokens_ptr + b * tokens_stride_b + q * tokens_stride_q)
        tl.store(live_ptr + row, token >= 0)
        token = tl.where(token < 0, tl.maximum(tl.load(tokens_ptr + b * tokens_stride_b), 0), token)
        x = tl.load(embed_ptr + token * HIDDEN_SIZE + column, mask=mask, other=0.0)
        if HAS_DRAFT:
            weight = tl.load(embed_norm_ptr + column, mask=mask, other=0.0)
            x = norm_row(x.to(ACC_DTYPE), weight, EMBED_EPS, HIDDEN_SIZE, ACC_DTYPE).to(x.dtype)
        tl.store(x_ptr + out, x, mask=mask)
        angle = tl.arange(0, BLOCK_R)
        angle_mask = angle < ROTARY
        cos = tl.load(cos_ptr + position * ROTARY + angle, mask=angle_mask, other=0.0)
        sin = tl.load(sin_ptr + position * ROTARY + angle, mask=angle_mask, other=0.0)
        tl.store(out_cos_ptr + row * ROTARY + angle, cos, mask=angle_mask)
        tl.store(out_sin_ptr + row * ROTARY + angle, sin, mask=angle_mask)
    else:
        parent = q.to(tl.int64)
        if parents_ptr is not None:
            parent = tl.load(parents_ptr + b * parents_stride_b + q * parents_stride_q)
        hidden = tl.load(hidden_ptr + b * hidden_stride_b + parent * hidden_stride_r + column, mask=mask, other=0.0)
        weight = tl.load(hidden_norm_ptr + column, mask=mask, other=0.0)
        normed = norm_row(hidden.to(ACC_DTYPE), weight, HIDDEN_EPS, HIDDEN_SIZE, ACC_DTYPE).to(hidden.dtype)
        tl.store(x_ptr + out + HIDDEN_SIZE, normed, mask=mask)
        tl.store(residual_ptr + row * HIDDEN_SIZE + column, normed if NORMED_RESIDUAL else hidden, mask=mask)
