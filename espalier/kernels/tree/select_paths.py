"""Select the tree of a block draft: the best paths among all that its one pass proposes.

A block draft gives candidates for every depth at once (`Candidates`); a path takes one candidate of each depth.  The
best paths become nodes, best first (DDTree: Ringel and Romano 2026).  A path's score is the sum of its candidates'
log-probabilities, so a parent comes before its children, and a better sibling before a worse one.

Grid: one program of one warp per request.  The search selects one node a step.  The frontier has two entries for each
selected node: its next sibling and its first child.  An entry is one 64-bit key, so a step is one maximum over at most
`nodes` keys in registers.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.attention.ancestor_bits import ancestor_mask, pack
from espalier.kernels.runtime.launch import chip, kernel, power_of_two, require
from espalier.kernels.runtime.pdl import early, pdl_wait_if
from espalier.kernels.tree.select_beams import order_of, score_of, usable, usable_score
from espalier.kernels.tree.select_tree import VOID, Tree

if TYPE_CHECKING:
    import triton.language as tl

# A key holds a depth, a node, a candidate's place and a row in 6, 10, 8 and 8 bits.
MAX_STEPS, MAX_NODES, MAX_CANDIDATES = 63, 1024, 256
# The largest number of keys that one warp holds in registers.
ONE_WARP = 256


class Candidates(NamedTuple):
    """The candidates of each depth, in rows: those of one row continue the same tokens.

    tokens: [B, S, R, K] int64; scores: [B, S, R, K] float32, log-probabilities, at most 0, best first; -inf: none.
    next_rows: [B, S, R, K] int32, the row of the next depth that continues a candidate; -1: nothing does.
    Depth 1 has one row, row 0.  R is 1 for a draft whose candidates do not depend on the token before.  Rows that
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


def select_paths(root: Tensor, candidates: Candidates, nodes: int) -> Tree:
    """The tree of the root [B] int64 and the best nodes - 1 paths, best first.

    Equal scores: the path of lower depth first, then the one whose parent was selected first, then the candidate that
    comes first in its row.  If there are too few paths, the remaining nodes are void, as in select_tree.select.
    Raises EspalierError if sizes do not agree.  Exact.
    """
    return (select_paths_triton if root.is_cuda else select_paths_reference)(root, candidates, nodes)


def select_paths_triton(root: Tensor, candidates: Candidates, nodes: int) -> Tree:
    batch, steps, rows, topk = _require(root, candidates, nodes)
    tree = Tree.empty(root, nodes)
    if batch:
        block = power_of_two(nodes)
        _select_paths_kernel[(batch,)](
            root.contiguous(),
            *(value.contiguous() for value in candidates),
            *tree,
            NODES=nodes,
            STEPS=steps,
            ROWS=rows,
            TOPK=topk,
            WORDS=tree.num_words,
            BLOCK=block,
            num_warps=1 if block <= ONE_WARP else 4,
            **early(chip(root)),
        )
    return tree


def select_paths_reference(root: Tensor, candidates: Candidates, nodes: int) -> Tree:
    _, steps, _, _ = _require(root, candidates, nodes)
    tokens, next_rows = candidates.tokens.tolist(), candidates.next_rows.tolist()
    scores = usable(candidates.scores).tolist()
    trees = [_best_paths(*of_request, nodes) for of_request in zip(tokens, scores, next_rows, strict=True)]
    made = torch.tensor([tree for tree, _ in trees], dtype=torch.int64).view(len(trees), nodes, 3)
    made[:, 0, 0] = root
    path_scores = torch.tensor([scored for _, scored in trees], dtype=torch.float32).view(len(trees), nodes)
    drafted, parents, depths = made.unbind(-1)
    return Tree(drafted, parents, depths, path_scores, pack(ancestor_mask(parents, drafted == VOID, steps)))


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


def _require(root: Tensor, candidates: Candidates, nodes: int) -> tuple[int, int, int, int]:
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


@kernel
def _key_of(score, depth, parent, place, row):
    """int64: higher for a better score; of equal scores, for the lower depth, parent and place."""
    rest = (depth << 26) | (parent << 16) | (place << 8) | row
    return (order_of(score).to(tl.int64) << 32) | (0xFFFFFFFF - rest.to(tl.int64))


@kernel
def _parts_of(key):
    """(score, depth, parent, place, row) of a key."""
    score = score_of((key >> 32).to(tl.int32))
    rest = 0xFFFFFFFF - (key & 0xFFFFFFFF)
    depth, parent = (rest >> 26).to(tl.int32), ((rest >> 16) & 1023).to(tl.int32)
    return score, depth, parent, ((rest >> 8) & 255).to(tl.int32), (rest & 255).to(tl.int32)


@kernel
def _select_paths_kernel(
    root_ptr, tokens_ptr, scores_ptr, next_rows_ptr,
    out_tokens_ptr, out_parents_ptr, out_depths_ptr, out_scores_ptr, out_words_ptr,
    NODES: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr, TOPK: tl.constexpr, WORDS: tl.constexpr,
    BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Node i is selected in step i.  Its entry's place in the frontier gets its sibling, and place i its first child.

    above: the score of each entry's parent.
    """
    pdl_wait_if(DEPENDENT)
    request = tl.program_id(0).to(tl.int64)
    of_request = request * (STEPS * ROWS * TOPK)
    i = tl.arange(0, BLOCK)
    # Below the key of every score, -inf included.
    empty = tl.full([], -9223372036854775808, tl.int64)
    zero = tl.full([], 0, tl.int32)
    first = usable_score(tl.load(scores_ptr + of_request))
    first_key = tl.where(first > float("-inf"), _key_of(first, zero + 1, zero, zero, zero), empty)
    keys = tl.where(i == 0, first_key, empty)
    above = tl.zeros([BLOCK], tl.float32)
    selected = tl.full([BLOCK], -9223372036854775808, tl.int64)
    for node in range(1, NODES):
        best = tl.max(keys, 0)
        found = best > empty
        score, depth, parent, place, row = _parts_of(best)
        parent_score = tl.sum(tl.where(keys == best, above, 0.0), 0)
        selected = tl.where(i == node, best, selected)
        at = of_request + ((depth - 1) * ROWS + row) * TOPK + place
        beside = tl.load(scores_ptr + at + 1, mask=found & (place + 1 < TOPK), other=float("-inf"))
        beside = usable_score(parent_score + usable_score(beside))
        beside_key = tl.where(beside > float("-inf"), _key_of(beside, depth, parent, place + 1, row), empty)
        next_row = tl.load(next_rows_ptr + at, mask=found & (depth < STEPS), other=-1)
        child_at = of_request + (depth * ROWS + next_row) * TOPK
        child = tl.load(scores_ptr + child_at, mask=next_row >= 0, other=float("-inf"))
        child = usable_score(score + usable_score(child))
        child_key = tl.where(child > float("-inf"), _key_of(child, depth + 1, zero + node, zero, next_row), empty)
        keys = tl.where(keys == best, beside_key, keys)
        keys = tl.where(i == node, child_key, keys)
        above = tl.where(i == node, score, above)
    _write_tree(
        *(root_ptr, tokens_ptr, out_tokens_ptr, out_parents_ptr, out_depths_ptr, out_scores_ptr, out_words_ptr),
        *(request, selected, i, NODES, STEPS, ROWS, TOPK, WORDS, BLOCK),
    )


@kernel
def _write_tree(
    root_ptr, tokens_ptr, out_tokens_ptr, out_parents_ptr, out_depths_ptr, out_scores_ptr, out_words_ptr,
    request, selected, i,
    NODES: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr, TOPK: tl.constexpr, WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Node i has the key selected[i]; without one it is void, except for node 0, the root."""
    score, depth, parent, place, row = _parts_of(selected)
    is_root = i == 0
    void = (selected == -9223372036854775808) & (i > 0)
    drafted = (selected != -9223372036854775808) & (i < NODES)
    at = request * (STEPS * ROWS * TOPK) + ((depth - 1) * ROWS + row) * TOPK + place
    token = tl.load(tokens_ptr + at, mask=drafted, other=-1)
    token = tl.where(is_root, tl.load(root_ptr + request), token)
    parent = tl.where(drafted, parent, 0)
    out = request * NODES + i
    exists = i < NODES
    tl.store(out_tokens_ptr + out, token, mask=exists)
    tl.store(out_parents_ptr + out, parent.to(tl.int64), mask=exists)
    tl.store(out_depths_ptr + out, tl.where(is_root, 0, tl.where(void, 1, depth)).to(tl.int64), mask=exists)
    tl.store(out_scores_ptr + out, tl.where(is_root, 0.0, tl.where(void, float("-inf"), score)), mask=exists)
    one = tl.full([BLOCK], 1, tl.int64)
    for word in tl.static_range(WORDS):
        bits = tl.zeros([BLOCK], tl.int64)
        ancestor = i
        for _ in range(STEPS + 1):
            bits |= tl.where(ancestor // 64 == word, one << (ancestor % 64).to(tl.int64), 0)
            # A void node's ancestor is itself.
            ancestor = tl.where(void, i, tl.gather(parent, ancestor, 0))
        tl.store(out_words_ptr + out * WORDS + word, bits, mask=exists)
