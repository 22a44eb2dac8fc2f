"""Operations of draft models: their input rows, the paths and convolutions of block drafts (one pass for all depths),
and n-gram lookup."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.attention.ancestor_bits import ancestor_mask, pack_bits
from espalier.kernels.ops.linear import add_partial_sums
from espalier.kernels.ops.norm import add_rms_norm, rms_norm
from espalier.kernels.ops.rope import Rotation
from espalier.kernels.ops.tree import VOID, Tree, comparable_scores
from espalier.kernels.runtime.launch import require
from espalier.kernels.runtime.op import op

# The limits of select_paths' kernel, which packs depth (6 bits), node (10), candidate index (8) and row (8) in 32 bits.
MAX_STEPS, MAX_NODES, MAX_CANDIDATES = 63, 1024, 256
# The most tokens that an n-gram match compares.
MAX_NGRAM = 4


class Candidates(NamedTuple):
    """The candidate tokens that a block draft proposes: at each of S depths, R rows of K candidates, best first.

    A row holds the children of one candidate of the depth before, or of all candidates with the same token.
    tokens: [B, S, R, K] int64.  scores: [B, S, R, K] float32, log-probabilities (at most 0).  A score of -inf means
    that there is no candidate.  next_rows: [B, S, R, K] int32, the row of the next depth that holds the candidate's
    children; -1 for no children.  Depth 1 has one row, row 0.  If scores do not depend on the parent token, R is 1.
    The values of a row that is in no candidate's next_rows are undefined."""

    tokens: Tensor
    scores: Tensor
    next_rows: Tensor

    @classmethod
    def empty(cls, root: Tensor, steps: int, topk: int) -> Candidates:
        """Returns buffers to be written: `steps` depths with topk rows of topk candidates each.  root: [B]."""
        shape, device = (len(root), steps, topk, topk), root.device
        dtypes = (torch.int64, torch.float32, torch.int32)
        return cls(*(torch.empty(shape, dtype=dtype, device=device) for dtype in dtypes))

    def at_depth(self, depth_index: int, num_rows: int) -> Candidates:
        """Returns views [B, num_rows, K] of the first rows of one depth.  depth_index: the depth minus 1."""
        return Candidates(*(value[:, depth_index, :num_rows] for value in self))


def _search_best_paths(
    tokens: list, scores: list, next_rows: list, num_nodes: int
) -> tuple[list[tuple[int, int, int]], list[float]]:
    """Returns ((token, parent, depth) of each node, path score of each node) for one request's tree.  The root has
    token VOID.

    tokens, scores, next_rows: the request's part of Candidates, as nested lists."""
    tree, path_scores = [(VOID, 0, 0)], [0.0]
    # An entry: ((minus the path's score, depth, parent node, index in the row, row), score of the parent's path).
    frontier = [((-scores[0][0][0], 1, 0, 0, 0), 0.0)]
    while len(tree) < num_nodes and frontier:
        (negated_score, depth, parent, candidate, row), parent_score = heappop(frontier)
        if negated_score == np.inf:
            break
        depth_index, node = depth - 1, len(tree)
        tree.append((tokens[depth_index][row][candidate], parent, depth))
        path_scores.append(-negated_score)
        if candidate + 1 < len(tokens[depth_index][row]):
            sibling_score = _float32_sum(parent_score, scores[depth_index][row][candidate + 1])
            heappush(frontier, ((-sibling_score, depth, parent, candidate + 1, row), parent_score))
        child_row = next_rows[depth_index][row][candidate]
        if depth < len(tokens) and child_row >= 0:
            child_score = _float32_sum(-negated_score, scores[depth][child_row][0])
            heappush(frontier, ((-child_score, depth + 1, node, 0, child_row), -negated_score))
    num_void = num_nodes - len(tree)
    return tree + [(VOID, 0, 1)] * num_void, path_scores + [-np.inf] * num_void


def _float32_sum(score: float, logp: float) -> float:
    """Returns the sum of two float32 values, rounded to float32."""
    return float(np.float32(score + logp))


def check_path_sizes(root: Tensor, candidates: Candidates, num_nodes: int) -> tuple[int, int, int, int]:
    """Check the arguments of select_paths.  Returns the sizes (B, S, R, K) of the candidates."""
    tokens, scores, next_rows = candidates
    require("select_paths: tokens", tokens, (root.shape[0], -1, -1, -1), torch.int64, root)
    require("select_paths: scores", scores, tuple(tokens.shape), torch.float32, root)
    require("select_paths: next_rows", next_rows, tuple(tokens.shape), torch.int32, root)
    batch, steps, rows, topk = tokens.shape
    if steps > MAX_STEPS or max(rows, topk) > MAX_CANDIDATES or not 1 <= num_nodes <= MAX_NODES:
        raise EspalierError(
            f"a tree of {num_nodes} nodes, {steps} steps and {max(rows, topk)} candidates a step is not supported for "
            f"a block draft; use at most {MAX_NODES} nodes, {MAX_STEPS} steps and topk {MAX_CANDIDATES}"
        )
    return batch, steps, rows, topk


class NgramMatches(NamedTuple):
    """The n-gram matches of each request, [B, K] int64 each, best first.  A missing match has two zeros.
    lengths: the number of matching tokens.  end_positions: the position of the last matching token."""

    lengths: Tensor
    end_positions: Tensor


def match_lengths(history: Tensor, root_positions: Tensor) -> Tensor:
    """Returns [B, W]: how many tokens, ending at each position of `history` [B, W], equal the request's last tokens."""
    positions = torch.arange(history.shape[1], device=history.device).expand_as(history)
    matching = positions < root_positions[:, None]
    length = torch.zeros_like(history)
    for back in range(MAX_NGRAM):
        root_token = history.gather(1, (root_positions - back).clamp(min=0)[:, None])
        token = torch.roll(history, back, 1)
        matching = matching & (token == root_token) & (positions >= back) & (root_positions >= back)[:, None]
        length = length + matching
    return length


def max_history_length(root_positions: Tensor) -> int:
    """Returns the number of tokens of the longest request.  root_positions: on the CPU; the host reads the values."""
    return int(root_positions.max()) + 1 if root_positions.numel() else 1


@op("espalier.kernels.tree.select_paths")
def select_paths(root: Tensor, candidates: Candidates, num_nodes: int) -> Tree:
    """Returns trees of num_nodes nodes: the root, and the last candidate of each of the best num_nodes - 1 paths, best
    first.  root: [B] int64, the root's token.

    Among paths of equal score, the order is: lower depth, then the parent that was selected first, then the candidate
    that comes first in its row.  If there are too few paths, the remaining nodes are void (token -1), as in
    ops/tree.py:select_tree.  Raises EspalierError if sizes do not agree."""
    _, steps, _, _ = check_path_sizes(root, candidates, num_nodes)
    tokens, next_rows = candidates.tokens.tolist(), candidates.next_rows.tolist()
    scores = comparable_scores(candidates.scores).tolist()
    trees = [_search_best_paths(*of_request, num_nodes) for of_request in zip(tokens, scores, next_rows, strict=True)]
    nodes = torch.tensor([tree for tree, _ in trees], dtype=torch.int64).view(len(trees), num_nodes, 3)
    nodes[:, 0, 0] = root
    path_scores = torch.tensor([scored for _, scored in trees], dtype=torch.float32).view(len(trees), num_nodes)
    drafted, parents, depths = nodes.unbind(-1)
    return Tree(drafted, parents, depths, path_scores, pack_bits(ancestor_mask(parents, drafted == VOID, steps)))


@op("espalier.kernels.tree.ngram")
def find_matches(history: Tensor, history_rows: Tensor, root_positions: Tensor, topk: int) -> NgramMatches:
    """Returns the topk best earlier occurrences of each request's last tokens, each followed by a different token.

    history: [slots, W] int64, contiguous rows of tokens.  history_rows: [B] int64, the row of each request in history.
    root_positions: [B] int64, below W, the position of the last token.  Position j before the root position r matches m
    tokens if history[j-m+1 .. j] equals history[r-m+1 .. r]; m is at most MAX_NGRAM.  Longer matches come first; among
    equal lengths, later positions come first.  Kernel and reference agree exactly."""
    width = max_history_length(root_positions)
    tokens = history[:, :width].index_select(0, history_rows)
    length = match_lengths(tokens, root_positions)
    next_tokens = torch.roll(tokens, -1, 1)
    # Keys order matches by length, then by position.  A key of 0 means no match.
    key = torch.where(length > 0, length * width + torch.arange(width, device=root_positions.device), 0)
    best = []
    for _ in range(topk):
        best.append(key.amax(1, keepdim=True))
        next_token = next_tokens.gather(1, best[-1] % width)
        key = key.masked_fill(next_tokens == next_token, 0)
    keys = torch.cat(best, 1)
    return NgramMatches(keys // width, keys % width)


def convolve_block(x: Tensor, group_taps: Tensor, base_taps: Tensor, block_width: int) -> Tensor:
    """Convolves x [N, H] over the rows of each block of `block_width` rows.  The coefficients of row i, for T taps, are
    base_taps [T, H] + group_taps[i] [T, G].  A group is H / G adjacent channels."""
    wide_dtype = torch.promote_types(x.dtype, torch.float32)
    group_channels = x.shape[1] // group_taps.shape[2]
    coefficients = base_taps.to(wide_dtype) + group_taps.to(wide_dtype).repeat_interleave(group_channels, 2)
    blocks = x.to(wide_dtype).unflatten(0, (-1, block_width))
    total = torch.zeros_like(blocks)
    for tap in range(base_taps.shape[0]):
        earlier_rows = F.pad(blocks, (0, 0, tap, 0))[:, :block_width]
        total += earlier_rows * coefficients[:, tap].unflatten(0, (-1, block_width))
    return total.flatten(0, 1).to(x.dtype)


def check_block_conv(x: Tensor, weight: Tensor, base_taps: Tensor, block_width: int) -> tuple[int, int]:
    """Check the sizes of block_conv's arguments.  Returns (taps, groups)."""
    taps, size = base_taps.shape
    groups = weight.shape[0] // (2 * taps)
    require("block_conv: x", x, (-1, size), None, x)
    require("block_conv: weight", weight, (2 * taps * groups, size), x.dtype, x)
    require("block_conv: base", base_taps, (taps, size), x.dtype, x)
    if not groups or size % groups or block_width < 1 or len(x) % block_width:
        raise EspalierError(
            f"block_conv: {size} channels in {groups} groups, and {len(x)} rows in blocks of {block_width}, do not "
            "divide: allocate and launch from the same layout"
        )
    return taps, groups


@op("espalier.kernels.layers.block_conv")
def block_conv(x: Tensor, weight: Tensor, base_taps: Tensor, block_width: int) -> tuple[Tensor, Tensor]:
    """Convolves the input of a sublayer of a DFlash 2 draft, in blocks of `block_width` rows.

    Returns (convolved rows [N, H], coefficients [N, T, G]), both in x's dtype.  block_conv_norm uses the coefficients
    to convolve the sublayer's output.  x: [N, H], normed rows.  weight: [2 · T · G, H] for T taps and G groups; the
    rows for the input come before the rows for the output.  base_taps: [T, H].  Raises EspalierError if sizes do not
    agree."""
    taps, groups = check_block_conv(x, weight, base_taps, block_width)
    delta = F.linear(x, weight).view(len(x), 2, taps, groups)
    return convolve_block(x, delta[:, 0], base_taps, block_width), delta[:, 1]


@op("espalier.kernels.layers.block_conv", tensor="residual")
def block_conv_norm(
    delta: Tensor,
    coefficients: Tensor,
    base_taps: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    block_width: int,
) -> tuple[Tensor, Tensor]:
    """Returns (sum, RMS norm of sum) with sum = residual + convolution of delta, each [N, H] in residual's dtype.

    delta: [N, H] in residual's dtype, or partial sums [parts, N, H] in float32 at least, the output of a sublayer.
    coefficients: [N, T, G], from block_conv.  base_taps: [T, H].  norm_weight: [H].
    Raises EspalierError if sizes do not agree."""
    if delta.ndim == 3:
        delta = add_partial_sums.reference(delta, residual.dtype)
    delta = convolve_block(delta, coefficients, base_taps, block_width)
    return add_rms_norm.reference(delta, residual, norm_weight, eps)


@dataclass(frozen=True)
class EmbeddingTables:
    """The tables of a model that embed_rows reads.
    embed: [V, H], by token.  cos, sin: [P, rotary], for RoPE, by position, float32 (float64 for float64)."""

    embed: Tensor
    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class DraftHidden:
    """The hidden states that the rows of a draft model read.  hidden: [B, R, H].

    parents: [B, Q] int64, the row of `hidden` for each input row; None: R is Q, and input row q takes hidden row q.
    embed_norm, hidden_norm: [H], the weights of the RMS norms of embeddings and hidden states.
    normed_residual: whether the residual stream starts with the normed hidden states.  If not, it starts with `hidden`.
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
    """Returns (x, residual, rotation, live) for the N = B · Q rows of tokens and positions [B, Q] int64, any strides.

    x: [N, H], the embeddings; with `draft` [N, 2 · H], the normed embeddings and the normed hidden states.
    residual: [N, H], the residual stream before the first layer.
    rotation: cos and sin of the N positions.  live: [N] bool, False for void nodes (token < 0).
    A void node takes its request's first token, or token 0 if the first is void too.  draft: None for a target.
    Raises EspalierError if sizes do not agree.  Except for the norms, kernel and reference agree exactly."""
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
