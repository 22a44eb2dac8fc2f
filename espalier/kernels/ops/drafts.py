"""Operations of draft models: input rows, paths of block drafts and their convolutions, matches of n-grams."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.attention.ancestor_bits import ancestor_mask, pack
from espalier.kernels.ops.linear import sum_parts
from espalier.kernels.ops.norm import add_rms_norm, rms_norm
from espalier.kernels.ops.rope import Rotation
from espalier.kernels.ops.tree import VOID, Tree, usable
from espalier.kernels.runtime.launch import require
from espalier.kernels.runtime.op import op

# A key's 32 tie-breaking bits hold a depth, a node, a candidate's index and a row in 6, 10, 8 and 8 bits.
MAX_STEPS, MAX_NODES, MAX_CANDIDATES = 63, 1024, 256
MAX_NGRAM = 4


class Candidates(NamedTuple):
    """The candidates of each depth.  Candidates in one row continue the same tokens.

    tokens: [B, S, R, K] int64; scores: [B, S, R, K] float32, log-probabilities, at most 0, best first; -inf: no
    candidate.
    next_rows: [B, S, R, K] int32, the row of the next depth that continues a candidate; -1: no row does.
    Depth 1 has one row, row 0.  R is 1 for a draft whose candidates do not depend on earlier tokens.  Rows that no
    candidate leads to may hold anything.
    """

    tokens: Tensor
    scores: Tensor
    next_rows: Tensor

    @classmethod
    def empty(cls, root: Tensor, steps: int, topk: int) -> Candidates:
        """Allocate topk rows per depth, not yet written."""
        shape, on = (len(root), steps, topk, topk), root.device
        types = (torch.int64, torch.float32, torch.int32)
        return cls(*(torch.empty(shape, dtype=dtype, device=on) for dtype in types))

    def of_rows(self, depth: int, rows: int) -> Candidates:
        """Views [B, rows, K] of the first rows at `depth`, counted from 0."""
        return Candidates(*(value[:, depth, :rows] for value in self))


def _best_paths(
    tokens: list, scores: list, next_rows: list, nodes: int
) -> tuple[list[tuple[int, int, int]], list[float]]:
    """For one request: (token, parent, depth) of each node but the root, and the nodes' scores."""
    tree, selected = [(VOID, 0, 0)], [0.0]
    # An entry is (its key, its parent's score).
    frontier = [((-scores[0][0][0], 1, 0, 0, 0), 0.0)]
    while len(tree) < nodes and frontier:
        (negated, depth, parent, place, row), above = heappop(frontier)
        if negated == np.inf:
            break
        at, node = depth - 1, len(tree)
        tree.append((tokens[at][row][place], parent, depth))
        selected.append(-negated)
        if place + 1 < len(tokens[at][row]):
            beside = _float32_sum(above, scores[at][row][place + 1])
            heappush(frontier, ((-beside, depth, parent, place + 1, row), above))
        below = next_rows[at][row][place]
        if depth < len(tokens) and below >= 0:
            child = _float32_sum(-negated, scores[depth][below][0])
            heappush(frontier, ((-child, depth + 1, node, 0, below), -negated))
    missing = nodes - len(tree)
    return tree + [(VOID, 0, 1)] * missing, selected + [-np.inf] * missing


def _float32_sum(score: float, logp: float) -> float:
    """The sum of two float32 values, rounded to float32."""
    return float(np.float32(score + logp))


def require_paths(root: Tensor, candidates: Candidates, nodes: int) -> tuple[int, int, int, int]:
    """Check the arguments of select_paths.  Returns the sizes of the candidates.  Raises EspalierError."""
    tokens, scores, next_rows = candidates
    require("select_paths: tokens", tokens, (root.shape[0], -1, -1, -1), torch.int64, root)
    require("select_paths: scores", scores, tuple(tokens.shape), torch.float32, root)
    require("select_paths: next_rows", next_rows, tuple(tokens.shape), torch.int32, root)
    batch, steps, rows, topk = tokens.shape
    if steps > MAX_STEPS or max(rows, topk) > MAX_CANDIDATES or not 1 <= nodes <= MAX_NODES:
        raise EspalierError(
            f"a tree of {nodes} nodes, {steps} steps and {max(rows, topk)} candidates a step is not supported for a "
            f"block draft; use at most {MAX_NODES} nodes, {MAX_STEPS} steps and topk {MAX_CANDIDATES}"
        )
    return batch, steps, rows, topk


class Matches(NamedTuple):
    """Matches of n-grams, [B, K] int64 each, best first.  length: the number of matching tokens; ends: the position of
    the last matching token.  Both are 0 if there is no match."""

    length: Tensor
    ends: Tensor


def match_lengths(known: Tensor, root: Tensor) -> Tensor:
    """[B, W]: the match length at each position of `known` [B, W]."""
    positions = torch.arange(known.shape[1], device=known.device).expand_as(known)
    matching = positions < root[:, None]
    length = torch.zeros_like(known)
    for back in range(MAX_NGRAM):
        root_token = known.gather(1, (root - back).clamp(min=0)[:, None])
        token = torch.roll(known, back, 1)
        matching = matching & (token == root_token) & (positions >= back) & (root >= back)[:, None]
        length = length + matching
    return length


def longest_known(root: Tensor) -> int:
    """The number of tokens of the longest request.  Only for CPU tensors, because a GPU would have to synchronise."""
    return int(root.max()) + 1 if root.numel() else 1


@op("espalier.kernels.tree.select_paths")
def select_paths(root: Tensor, candidates: Candidates, nodes: int) -> Tree:
    """Select the tree of the root [B] int64 and the best nodes - 1 paths, best first.

    Among equal scores: lower depth first, then the path whose parent was selected first, then the candidate that
    comes first in its row.  If there are too few paths, the remaining nodes are void, as in select_tree.select.
    Raises EspalierError if sizes do not agree.  Exact.
    """
    _, steps, _, _ = require_paths(root, candidates, nodes)
    tokens, next_rows = candidates.tokens.tolist(), candidates.next_rows.tolist()
    scores = usable(candidates.scores).tolist()
    trees = [_best_paths(*of_request, nodes) for of_request in zip(tokens, scores, next_rows, strict=True)]
    made = torch.tensor([tree for tree, _ in trees], dtype=torch.int64).view(len(trees), nodes, 3)
    made[:, 0, 0] = root
    path_scores = torch.tensor([scored for _, scored in trees], dtype=torch.float32).view(len(trees), nodes)
    drafted, parents, depths = made.unbind(-1)
    return Tree(drafted, parents, depths, path_scores, pack(ancestor_mask(parents, drafted == VOID, steps)))


@op("espalier.kernels.tree.ngram")
def find_matches(history: Tensor, index: Tensor, root: Tensor, topk: int) -> Matches:
    """Find the topk best earlier occurrences of each request's last tokens.  Each is followed by a different token.

    history: [slots, W] int64, contiguous rows of tokens; index: [B] int64, each request's row of history; root: [B]
    int64, below W, the position of the last token.  Position j < root matches m tokens if history[j-m+1 .. j] equals
    history[root-m+1 .. root]; m is at most MAX_NGRAM.  Longest match first, then latest.  Exact.
    """
    width = longest_known(root)
    known = history[:, :width].index_select(0, index)
    length = match_lengths(known, root)
    next_tokens = torch.roll(known, -1, 1)
    # The key orders matches by length, then by position.  0 means no match.
    key = torch.where(length > 0, length * width + torch.arange(width, device=root.device), 0)
    best = []
    for _ in range(topk):
        best.append(key.amax(1, keepdim=True))
        next_token = next_tokens.gather(1, best[-1] % width)
        key = key.masked_fill(next_tokens == next_token, 0)
    keys = torch.cat(best, 1)
    return Matches(keys // width, keys % width)


def convolved(x: Tensor, delta: Tensor, base: Tensor, width: int) -> Tensor:
    """Convolve x [N, H], blocks of `width` rows, with base [T, H] + delta [N, T, G] of the channel's group."""
    exact = torch.promote_types(x.dtype, torch.float32)
    group = x.shape[1] // delta.shape[2]
    coefficients = base.to(exact) + delta.to(exact).repeat_interleave(group, 2)
    blocks = x.to(exact).unflatten(0, (-1, width))
    total = torch.zeros_like(blocks)
    for tap in range(base.shape[0]):
        behind = F.pad(blocks, (0, 0, tap, 0))[:, :width]
        total += behind * coefficients[:, tap].unflatten(0, (-1, width))
    return total.flatten(0, 1).to(x.dtype)


def require_block_conv(x: Tensor, weight: Tensor, base: Tensor, width: int) -> tuple[int, int]:
    """Check the sizes.  Returns (taps, groups).  Raises EspalierError."""
    taps, size = base.shape
    groups = weight.shape[0] // (2 * taps)
    require("block_conv: x", x, (-1, size), None, x)
    require("block_conv: weight", weight, (2 * taps * groups, size), x.dtype, x)
    require("block_conv: base", base, (taps, size), x.dtype, x)
    if not groups or size % groups or width < 1 or len(x) % width:
        raise EspalierError(
            f"block_conv: {size} channels in {groups} groups, and {len(x)} rows in blocks of {width}, do not divide: "
            "allocate and launch from the same layout"
        )
    return taps, groups


@op("espalier.kernels.layers.block_conv")
def block_conv(x: Tensor, weight: Tensor, base: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """(the convolved rows [N, H], the coefficients of the output's convolution [N, T, G]) in x's dtype.

    x: [N, H], normed rows in blocks of `width` rows; weight: [2 · T · G, H] for T taps and G groups, first the half for
    the input; base: [T, H].  Raises EspalierError if sizes do not agree.
    """
    taps, groups = require_block_conv(x, weight, base, width)
    delta = F.linear(x, weight).view(len(x), 2, taps, groups)
    return convolved(x, delta[:, 0], base, width), delta[:, 1]


@op("espalier.kernels.layers.block_conv", on="residual")
def block_conv_norm(
    delta: Tensor, coefficients: Tensor, base: Tensor, residual: Tensor, weight: Tensor, eps: float, width: int
) -> tuple[Tensor, Tensor]:
    """(sum, norm) with sum = residual + conv(delta), each [N, H] in residual's dtype.

    delta: [N, H] in residual's dtype, or partial sums [parts, N, H] in float32 at least, in blocks of `width` rows;
    coefficients: [N, T, G], from block_conv; base: [T, H]; weight: [H], of the norm.
    Raises EspalierError if sizes do not agree.
    """
    if delta.ndim == 3:
        delta = sum_parts.reference(delta, residual.dtype)
    return add_rms_norm.reference(convolved(delta, coefficients, base, width), residual, weight, eps)


@dataclass(frozen=True)
class EmbeddingTables:
    """A model's tables: embed [V, H] by token; cos, sin [P, rotary] by position, float32 (float64 for float64)."""

    embed: Tensor
    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class DraftHidden:
    """The hidden states that a draft model's rows read.  hidden: [B, R, H].

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
    """(x, residual, rotation, live) of the N = B · Q rows of tokens and positions [B, Q] int64, of any strides.

    x: [N, H], or [N, 2 · H] with hidden states; residual: [N, H], the first value of the residual stream; rotation: of
    the positions; live: [N] bool, whether the token is at least 0.

    A token below 0 (a void node) is replaced by its request's first token, or by 0 if the first token is void too.
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
