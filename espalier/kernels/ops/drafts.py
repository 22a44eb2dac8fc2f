"""Drafts that no tree of beams makes: the best paths of a block draft, and the matches of n-grams."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.attention.ancestor_bits import ancestor_mask, pack
from espalier.kernels.ops.tree import VOID, Tree, usable
from espalier.kernels.runtime.launch import require
from espalier.kernels.runtime.op import op

# 32 bits hold a depth, a node, a candidate's place and a row in 6, 10, 8 and 8 bits.
MAX_STEPS, MAX_NODES, MAX_CANDIDATES = 63, 1024, 256
MAX_NGRAM = 4


class Candidates(NamedTuple):
    """The candidates of each depth, in rows: those of one row continue the same tokens.

    tokens: [B, S, R, K] int64; scores: [B, S, R, K] float32, log-probabilities, at most 0, best first; -inf: none.
    next_rows: [B, S, R, K] int32, the row of the next depth that continues a candidate; -1: nothing does.
    Depth 1 has one row, row 0.  R is 1 for a draft whose candidates do not depend on the tokens before.  Rows that
    nothing leads to may hold anything.
    """

    tokens: Tensor
    scores: Tensor
    next_rows: Tensor

    @classmethod
    def empty(cls, root: Tensor, steps: int, topk: int) -> Candidates:
        """topk rows a depth, to be written."""
        shape, on = (len(root), steps, topk, topk), root.device
        types = (torch.int64, torch.float32, torch.int32)
        return cls(*(torch.empty(shape, dtype=dtype, device=on) for dtype in types))

    def of_rows(self, depth: int, rows: int) -> Candidates:
        """Views [B, rows, K] of the first rows at `depth`, from 0."""
        return Candidates(*(value[:, depth, :rows] for value in self))


def _best_paths(
    tokens: list, scores: list, next_rows: list, nodes: int
) -> tuple[list[tuple[int, int, int]], list[float]]:
    """(token, parent, depth) of each node and its score, of one request.  The root's token is left out."""
    tree, selected = [(VOID, 0, 0)], [0.0]
    # Of each entry: its key, and its parent's score.
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
    """Check the arguments of select_paths; returns the sizes of the candidates."""
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
    """[B, K] int64 each, best first.  length: the number of matching tokens; ends: the position of the last matching
    token.  Both are 0 for no match."""

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
    """The number of tokens of the longest request.  For CPU tensors: on a GPU this would synchronise."""
    return int(root.max()) + 1 if root.numel() else 1


@op("espalier.kernels.tree.select_paths")
def select_paths(root: Tensor, candidates: Candidates, nodes: int) -> Tree:
    """The tree of the root [B] int64 and the best nodes - 1 paths, best first.

    Equal scores: the path of lower depth first, then the one whose parent was selected first, then the candidate that
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
    """The topk best earlier occurrences of each request's last tokens.  The tokens after them are all distinct.

    history: [slots, W] int64, contiguous rows of tokens; index: [B] int64, each request's row of history; root: [B]
    int64, below W, the position of the last token.  Position j < root matches m tokens if history[j-m+1 .. j] equals
    history[root-m+1 .. root]; m is at most MAX_NGRAM.  Longest match first, then latest.  Exact.
    """
    width = longest_known(root)
    known = history[:, :width].index_select(0, index)
    length = match_lengths(known, root)
    next_tokens = torch.roll(known, -1, 1)
    # One key orders by length, then by position; 0 is no match.
    key = torch.where(length > 0, length * width + torch.arange(width, device=root.device), 0)
    best = []
    for _ in range(topk):
        best.append(key.amax(1, keepdim=True))
        next_token = next_tokens.gather(1, best[-1] % width)
        key = key.masked_fill(next_tokens == next_token, 0)
    keys = torch.cat(best, 1)
    return Matches(keys // width, keys % width)
