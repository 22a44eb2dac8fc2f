"""Chooses the rows that a query attends to in layers with an indexer: the rows whose index keys have the highest
scores.

A query has several index heads, each with a weight.  The score of a row is the sum over heads of weight · max(q · k, 0)
(DeepSeek-AI 2025, "DeepSeek-V3.2", section 2.1).  Among equal scores the later position comes first, so a selection
follows only from scores and positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from espalier.kernels.attention.ancestor_bits import pack
from espalier.kernels.ops.rope import Rotation, rotate
from espalier.kernels.ops.state import page_rows
from espalier.kernels.runtime.op import op

# The most products of queries and keys that the reference holds at once.
MAX_PRODUCTS = 2**25
# Limits of the kernels: values of a key, and chosen rows.
MAX_INDEX_SIZE = 256
MAX_TOPK = 8192


class IndexNorm(NamedTuple):
    """The LayerNorm of index keys: weight and bias [size], eps."""

    weight: Tensor
    bias: Tensor
    eps: float


class IndexRows(NamedTuple):
    """The indexer's values for new rows.

    q: [N, heads, size]; k: [N, size], not normed; weights: [N, heads] float32 (float64 for float64), the scale of
    scores included.  rotation: of the first values of q and k.
    interleaved: whether q and k have the two values of a rotated pair side by side, as LatentForm.interleaved.
    """

    q: Tensor
    k: Tensor
    weights: Tensor
    norm: IndexNorm
    rotation: Rotation
    interleaved: bool


class IndexQueries(NamedTuple):
    """q: [.., heads, size], rotated; weights: [.., heads]."""

    q: Tensor
    weights: Tensor


@dataclass(frozen=True)
class IndexKeys:
    """The index keys that queries are compared with.

    committed: [rows, 1, size], the plane of the pages; page_table: [B, T] int32; length: [B] int64, of which rows below
    `first` do not exist.  staged: [B, R, 1, size].
    """

    committed: Tensor
    page_table: Tensor
    length: Tensor
    page_size: int
    first: int
    staged: Tensor


class SelectedRows(NamedTuple):
    """The rows that each query attends to.

    rows: [B, Q, K] int32, committed rows of the pages in order of position, of which the first `counts` [B, Q] int64
    exist; the others are the dummy row.  A count is 0 if a request has at most topk committed and staged rows: its
    queries attend to all rows that they see.  bits: [B, Q, W] int64, the staged rows, as ancestor bits.
    """

    rows: Tensor
    counts: Tensor
    bits: Tensor


def top_rows(scores: Tensor, topk: int) -> Tensor:
    """[..., N] bool: the topk highest of scores [..., N]; if fewer are above -inf, all of these.

    The columns are in order of position.  Among equal scores the later ones are taken.
    """
    exists = scores > -torch.inf
    if scores.shape[-1] <= topk:
        return exists
    least = scores.topk(topk, -1).values[..., -1:]
    above = scores > least
    equal = (scores == least) & exists
    wanted = topk - above.sum(-1, keepdim=True)
    return above | equal & (equal.flip(-1).cumsum(-1).flip(-1) <= wanted)


def scores_of(queries: IndexQueries, keys: Tensor) -> Tensor:
    """[B, Q, N] float32 (float64 for float64): the scores of keys [B, N, size] for queries [B, Q, ...]."""
    q, weights = queries
    exact = torch.promote_types(q.dtype, torch.float32)
    batch, rows, heads = q.shape[:3]
    scores = torch.empty(batch, rows, keys.shape[1], dtype=exact, device=q.device)
    keys = keys.to(exact).transpose(1, 2)
    step = max(MAX_PRODUCTS // max(batch * heads * keys.shape[2], 1), 1)
    for begin in range(0, rows, step):
        some = slice(begin, begin + step)
        products = (q[:, some].to(exact).flatten(1, 2) @ keys).relu_().unflatten(1, (-1, heads))
        scores[:, some] = (weights[:, some].to(exact)[:, :, None] @ products)[:, :, 0]
    return scores


@op("espalier.kernels.layers.index_rows", on="index.q")
def rotate_and_store_index(index: IndexRows, rows: Tensor, plane: Tensor) -> Tensor:
    """Norm and rotate the keys, and store them in rows [N] of plane [R, 1, size].  Returns q, rotated."""
    norm, rotary = index.norm, index.rotation.cos.shape[1]
    size = index.k.shape[-1]
    k = F.layer_norm(index.k, (size,), norm.weight, norm.bias, norm.eps)[:, None]
    q, k = (_rotated(x, index.rotation, rotary, index.interleaved) for x in (index.q, k))
    plane.index_copy_(0, rows, k)
    return q


def _rotated(x: Tensor, rotation: Rotation, rotary: int, interleaved: bool) -> Tensor:
    if interleaved:
        paired = x[..., :rotary].unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        x = torch.cat((paired, x[..., rotary:]), -1)
    return rotate(x, *rotation)


@op("espalier.kernels.attention.index_scores", on="queries.q")
def index_scores(queries: IndexQueries, keys: IndexKeys, ancestor_bits: Tensor) -> Tensor:
    """[B, Q, C + R] float32: scores of the C positions of the page table, then of the staged rows.

    Scores of positions past a request's length are undefined.  -inf for other rows that a query does not see: below
    `first`, and staged rows whose bit is not in ancestor_bits [B, Q, W].
    """
    batch, num_staged = keys.staged.shape[:2]
    capacity = keys.page_table.shape[1] * keys.page_size
    positions = torch.arange(capacity, device=keys.length.device).expand(batch, -1)
    exists = (positions >= keys.first) & (positions < keys.length[:, None])
    committed = keys.committed[page_rows(keys.page_table, positions, keys.page_size, exists), 0]
    scores = scores_of(queries, torch.cat((committed, keys.staged[:, :, 0]), 1))
    bits = torch.arange(num_staged, device=scores.device)
    seen = (ancestor_bits[..., bits // 64] >> bits % 64 & 1).bool()
    seen = torch.cat((exists[:, None].expand(-1, seen.shape[1], -1), seen), 2)
    return scores.masked_fill_(~seen, -torch.inf)


@op("espalier.kernels.attention.select_rows")
def select_rows(scores: Tensor, length: Tensor, page_table: Tensor, page_size: int, topk: int) -> SelectedRows:
    """The rows with the topk highest scores [B, Q, C + R], as index_scores gives them.  Exact.

    length: [B] int64, of the committed rows; page_table: [B, T] int32, of C = T · page_size positions.
    """
    capacity = page_table.shape[1] * page_size
    num_staged = scores.shape[2] - capacity
    past = torch.arange(scores.shape[2], device=scores.device).expand(len(length), -1)
    past = (past >= length[:, None]) & (past < capacity)
    chosen = top_rows(scores.masked_fill(past[:, None], -torch.inf), topk)
    committed, staged = chosen.split((capacity, num_staged), 2)
    width = min(topk, capacity)
    count = committed.sum(2).where((length + num_staged > topk)[:, None], 0)
    # The chosen positions in order, then the others.
    order = committed.logical_not().to(torch.uint8).argsort(dim=2, stable=True)[..., :width]
    keep = torch.arange(width, device=scores.device) < count[..., None]
    rows = page_rows(page_table, order.flatten(1), page_size, keep.flatten(1)).view(order.shape)
    return SelectedRows(rows.int(), count, pack(staged))
