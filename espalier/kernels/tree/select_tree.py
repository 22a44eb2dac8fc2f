"""From a pool of candidates to the tree that is verified.

The best candidates become nodes in the order they were scored, so that a parent comes before its children.  Where a
candidate stands in the pool says its level and the beam that it continues, so a pool is two rows of numbers and the
beams' own candidates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.attention.ancestor_bits import ancestor_mask, pack
from espalier.kernels.runtime.launch import chip, kernel, power_of_two, require
from espalier.kernels.runtime.pdl import early, pdl_wait_if
from espalier.kernels.tree.select_beams import order_of, usable, usable_score
from espalier.layout import ANCESTOR_BITS

if TYPE_CHECKING:
    import triton.language as tl

VOID = -1


class Selected(NamedTuple):
    """A tree [B, D] and its ancestor words [B, D, W]: the fields of speculate/tree.py, in their order."""

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    scores: Tensor
    ancestor_bits: Tensor


def select(root: Tensor, tokens: Tensor, scores: Tensor, beams: Tensor, topk: int, nodes: int) -> Selected:
    """The best nodes - 1 of n candidates under the root, by (score descending, place in the pool).

    root [B] int64; tokens [B, n] int64, scores [B, n] float32: topk candidates of level 1, then topk² a level, topk for
    each of its beams in turn; beams [B, n / topk - 1] int64: the candidates that became those beams, topk a level, by
    their places in it.  A child scores no more than its parent and comes after it, so what is selected is closed under
    ancestors.  -inf (or NaN) is no candidate: where too few are left, nodes are void (token -1, parent 0, depth 1, only
    their own ancestor).
    Raises EspalierError if sizes do not agree.  Exact.
    """
    return (select_tree_triton if tokens.is_cuda else select_tree_reference)(root, tokens, scores, beams, topk, nodes)


def select_tree_triton(root: Tensor, tokens: Tensor, scores: Tensor, beams: Tensor, topk: int, nodes: int) -> Selected:
    batch, size = tokens.shape
    steps = _require(root, tokens, scores, beams, topk, nodes)
    ancestor_bits = -(-nodes // ANCESTOR_BITS)
    tree = Selected(
        tokens.new_empty(batch, nodes),
        tokens.new_empty(batch, nodes),
        tokens.new_empty(batch, nodes),
        scores.new_empty(batch, nodes),
        tokens.new_empty(batch, nodes, ancestor_bits),
    )
    if batch:
        block, word_block = power_of_two(size), power_of_two(ancestor_bits)
        _select_tree_kernel[(batch,)](
            root.contiguous(),
            tokens.contiguous(),
            scores.contiguous(),
            beams.contiguous(),
            *tree,
            topk,
            SIZE=size,
            TOPK=topk,
            STEPS=steps,
            NODES=nodes,
            WORDS=ancestor_bits,
            N=block,
            W=word_block,
            # A thread holds 64 bits of words for each of at most 32 candidates.
            num_warps=min(max(block * word_block // 1024, 4), 16),
            **early(chip(tokens)),
        )
    return tree


def select_tree_reference(
    root: Tensor, tokens: Tensor, scores: Tensor, beams: Tensor, topk: int, nodes: int
) -> Selected:
    steps = _require(root, tokens, scores, beams, topk, nodes)
    scores = usable(scores)
    best = torch.sort(scores, dim=1, descending=True, stable=True).indices[:, : nodes - 1].sort(1).values
    void = scores.gather(1, best) == -torch.inf
    node_of = torch.zeros_like(tokens).scatter_(1, best, torch.arange(1, nodes, device=best.device).expand_as(best))
    # Candidates of level 1 continue the root, which is node 0.
    parent_node = torch.nn.functional.pad(
        node_of.gather(1, beams + _level_starts(beams.shape[1], topk, beams)), (1, 0)
    ).gather(1, best // topk)
    level = torch.where(best < topk, 1, 2 + (best - topk) // topk**2)
    # A root in front: node 0, at depth 0, of score 0, never void.
    parents, depths, void = (
        torch.nn.functional.pad(value, (1, 0))
        for value in (parent_node.masked_fill(void, 0), level.masked_fill(void, 1), void)
    )
    drafted = torch.cat((root[:, None], tokens.gather(1, best)), 1).masked_fill(void, VOID)
    ancestor_bits = pack(ancestor_mask(parents, void, steps))
    return Selected(drafted, parents, depths, torch.nn.functional.pad(scores.gather(1, best), (1, 0)), ancestor_bits)


def _level_starts(count: int, topk: int, like: Tensor) -> Tensor:
    """[count]: where in the pool the level stands that each beam was a candidate of."""
    level = torch.arange(count, device=like.device) // topk
    return torch.where(level > 0, topk + (level - 1) * topk**2, 0)


def _require(root: Tensor, tokens: Tensor, scores: Tensor, beams: Tensor, topk: int, nodes: int) -> int:
    """Check what select is given; returns how many levels the pool has."""
    batch, size = tokens.shape
    require("select: root", root, (batch,), torch.int64, tokens)
    require("select: tokens", tokens, (-1, -1), torch.int64, tokens)
    require("select: scores", scores, (batch, size), torch.float32, tokens)
    require("select: beams", beams, (batch, size // topk - 1), torch.int64, tokens)
    steps, left = 1 + (size - topk) // topk**2, (size - topk) % topk**2
    if left or not 1 <= nodes <= size + 1:
        raise EspalierError(
            f"select: {size} candidates at topk={topk} are no whole levels, or fewer than the {nodes} nodes that are "
            "wanted with the root: grow and select from the same layout"
        )
    return steps


@kernel
def _select_tree_kernel(
    root_ptr, tokens_ptr, scores_ptr, beams_ptr,
    out_tokens_ptr, out_parents_ptr, out_depths_ptr, out_scores_ptr, out_words_ptr,
    topk,
    SIZE: tl.constexpr, TOPK: tl.constexpr, STEPS: tl.constexpr, NODES: tl.constexpr, WORDS: tl.constexpr,
    N: tl.constexpr, W: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """A program a request, candidates in registers.  The lowest score that is still selected is found bit by bit, so
    that the work grows with the pool and not with its square.

    topk is TOPK, to divide by: by a constant the quotient of a small number is made in 16 bits, and of such ptxas 12.8
    lost an addition (docs/log.md).
    """
    pdl_wait_if(DEPENDENT)
    request = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, N)
    exists = i < SIZE
    score = usable_score(tl.load(scores_ptr + request * SIZE + i, mask=exists, other=float("-inf")))
    # 0 and up; what pads the block lies below every score, -inf included.
    key = tl.where(exists, order_of(score).to(tl.int64) + 2147483648, 0)
    lowest = tl.zeros([], tl.int64)
    for step in range(32):
        trial = lowest | (tl.full([], 2147483648, tl.int64) >> step)
        lowest = tl.where(tl.sum((key >= trial).to(tl.int32), 0) >= NODES - 1, trial, lowest)
    better = key > lowest
    tied = key == lowest
    max_accept_depth = NODES - 1 - tl.sum(better.to(tl.int32), 0)
    chosen = better | (tied & (tl.cumsum(tied.to(tl.int32), 0) <= max_accept_depth))
    # 0, the root, for what is not chosen.
    node = tl.where(chosen, tl.cumsum(chosen.to(tl.int32), 0), 0)
    void = score == float("-inf")
    deeper = exists & (i >= TOPK)
    which = (i - TOPK) // topk
    beam = tl.load(beams_ptr + request * (SIZE // TOPK - 1) + which, mask=deeper, other=0).to(tl.int32)
    beam += tl.where(deeper & (which >= TOPK), topk + (which // topk - 1) * (topk * topk), 0)
    parent = tl.where(deeper & (void == 0), tl.gather(node, beam, 0), 0)
    level = tl.where((i < TOPK) | void, 1, 2 + (i - TOPK) // (topk * topk))
    token = tl.load(tokens_ptr + request * SIZE + i, mask=chosen, other=0)
    out = request * NODES + node
    tl.store(out_tokens_ptr + out, tl.where(void, -1, token), mask=chosen)
    tl.store(out_parents_ptr + out, parent.to(tl.int64), mask=chosen)
    tl.store(out_depths_ptr + out, level.to(tl.int64), mask=chosen)
    tl.store(out_scores_ptr + out, score, mask=chosen)
    tl.store(out_tokens_ptr + request * NODES, tl.load(root_ptr + request))
    tl.store(out_parents_ptr + request * NODES, tl.full([], 0, tl.int64))
    tl.store(out_depths_ptr + request * NODES, tl.full([], 0, tl.int64))
    tl.store(out_scores_ptr + request * NODES, 0.0)

    # Every candidate walks up to the root, each step a bit; who stands under the root waits there.
    word = tl.arange(0, W)[None, :]
    one = tl.full([N, W], 1, tl.int64)
    bits = tl.where((word == 0) & (void[:, None] == 0), one, 0)
    above = tl.where(parent > 0, beam, i)
    at = i
    for _ in range(STEPS):
        here = tl.gather(node, at, 0)[:, None]
        bits |= tl.where(word == here // 64, one << (here % 64).to(tl.int64), 0)
        at = tl.gather(above, at, 0)
    meant = chosen[:, None] & (word < WORDS)
    tl.store(out_words_ptr + out[:, None] * WORDS + word, bits, mask=meant)
    ancestor_bits = tl.arange(0, W)
    tl.store(
        out_words_ptr + request * NODES * WORDS + ancestor_bits,
        (ancestor_bits == 0).to(tl.int64),
        mask=ancestor_bits < WORDS,
    )
