"""Select the nodes of the tree to verify from the pool of draft candidates.

The best candidates become nodes, in pool order, so a parent comes before its children.  A candidate's index in the pool
tells its level and the beam that is its parent.  A pool therefore stores only tokens and scores, and, for each beam,
the index of the candidate from which it was made.

Grid: one program per request, which holds all candidates in registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.attention.ancestor_bits import ancestor_mask, pack, unpack
from espalier.kernels.runtime.launch import chip, kernel, power_of_two, require
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger_and_wait
from espalier.kernels.tree.select_beams import order_of, usable, usable_score
from espalier.layout import ANCESTOR_BITS

if TYPE_CHECKING:
    import triton.language as tl

VOID = -1
# The most parts of a pool that the kernel reads each from its own tensor.
MOST_PARTS = 16
# A pool's values [B, n], whole or as one tensor for each level.
Parts = Sequence[Tensor]


class Tree(NamedTuple):
    """The trees of a batch.

    tokens: [B, D] int64; -1 for void nodes.
    parents: [B, D] int64, index of the parent node; the root is its own parent.
    depths: [B, D] int64, distance from the root; 1 for void nodes.
    scores: [B, D] float32, log-probability of the path; 0 for the root, -inf for void nodes.
    ancestors: [B, D, W] int64, bit j of a node: node j is its ancestor, or the node itself.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    scores: Tensor
    ancestors: Tensor

    @classmethod
    def empty(cls, root: Tensor, nodes: int) -> Tree:
        """Trees of the roots [B] int64, for a kernel to write."""
        batch, num_words = root.shape[0], -(-nodes // ANCESTOR_BITS)
        tokens, parents, depths = (root.new_empty(batch, nodes) for _ in range(3))
        scores = root.new_empty(batch, nodes, dtype=torch.float32)
        return cls(tokens, parents, depths, scores, root.new_empty(batch, nodes, num_words))

    @property
    def num_words(self) -> int:
        return self.ancestors.shape[2]

    def mask(self) -> Tensor:
        """[B, D, D] bool: node j is an ancestor of node i, or i itself."""
        return unpack(self.ancestors, self.tokens.shape[1])

    def positions(self, prefix_len: Tensor) -> Tensor:
        """[B, D]: position of each node in the target."""
        # The root's depth is 0.
        return prefix_len[:, None] if self.tokens.shape[1] == 1 else prefix_len[:, None] + self.depths


def select(root: Tensor, tokens: Parts, scores: Parts, beams: Parts, topk: int, nodes: int) -> Tree:
    """The root and the best nodes - 1 of n candidates, by descending score, then by index in the pool.

    root: [B] int64, the root's token.  tokens: [B, n] int64 and scores: [B, n] float32, the pool: topk candidates of
    level 1, then topk² candidates per level, topk for each beam of the level before.  beams: [B, n / topk - 1] int64:
    for each beam, topk per level, its index among its level's candidates.  All three are whole, or in levels.

    A child must not score above its parent, and it comes after its parent in the pool.  So the ancestors of a selected
    candidate are selected too.  A score of -inf or NaN is no candidate.  If there are too few candidates, the remaining
    nodes are void: token -1, parent 0, depth 1, no ancestor but themselves.  Raises EspalierError if sizes do not
    agree.  Exact.
    """
    return (select_tree_triton if root.is_cuda else select_tree_reference)(root, tokens, scores, beams, topk, nodes)


def select_tree_triton(root: Tensor, tokens: Parts, scores: Parts, beams: Parts, topk: int, nodes: int) -> Tree:
    if len(tokens) > MOST_PARTS:
        tokens, scores, beams = ([torch.cat(list(parts), 1)] for parts in (tokens, scores, beams))
    batch, size, steps = _require(root, tokens, scores, beams, topk, nodes)
    tree = Tree.empty(root, nodes)
    if batch:
        block, word_block = power_of_two(size), power_of_two(tree.num_words)
        _select_tree_kernel[(batch,)](
            root.contiguous(),
            # Without beams, anything that is not read.
            *(tuple(part.contiguous() for part in parts) for parts in (tokens, scores, beams or tokens)),
            *tree,
            topk,
            SIZE=size,
            PARTS=len(tokens),
            TOPK=topk,
            STEPS=steps,
            NODES=nodes,
            WORDS=tree.num_words,
            BLOCK=block,
            BLOCK_WORDS=word_block,
            # At most 32 int64 words of ancestor bits per thread.
            num_warps=min(max(block * word_block // 1024, 4), 16),
            **pdl_arguments(chip(root)),
        )
    return tree


def select_tree_reference(
    root: Tensor, of_tokens: Parts, of_scores: Parts, of_beams: Parts, topk: int, nodes: int
) -> Tree:
    _, _, steps = _require(root, of_tokens, of_scores, of_beams, topk, nodes)
    tokens, scores = torch.cat(list(of_tokens), 1), usable(torch.cat(list(of_scores), 1))
    beams = torch.cat([tokens[:, :0], *of_beams], 1)
    best = torch.sort(scores, dim=1, descending=True, stable=True).indices[:, : nodes - 1].sort(1).values
    void = scores.gather(1, best) == -torch.inf
    node_of = torch.zeros_like(tokens).scatter_(1, best, torch.arange(1, nodes, device=best.device).expand_as(best))
    # Candidates of level 1 continue the root, which is node 0.
    parent_node = torch.nn.functional.pad(
        node_of.gather(1, beams + _level_starts(beams.shape[1], topk, beams)), (1, 0)
    ).gather(1, best // topk)
    level = torch.where(best < topk, 1, 2 + (best - topk) // topk**2)
    # Prepend the root: node 0, depth 0, score 0, never void.
    parents, depths, void = (
        torch.nn.functional.pad(value, (1, 0))
        for value in (parent_node.masked_fill(void, 0), level.masked_fill(void, 1), void)
    )
    drafted = torch.cat((root[:, None], tokens.gather(1, best)), 1).masked_fill(void, VOID)
    ancestor_bits = pack(ancestor_mask(parents, void, steps))
    return Tree(drafted, parents, depths, torch.nn.functional.pad(scores.gather(1, best), (1, 0)), ancestor_bits)


def _level_starts(count: int, topk: int, like: Tensor) -> Tensor:
    """[count]: for each beam, the pool index of the first candidate of its level."""
    level = torch.arange(count, device=like.device) // topk
    return torch.where(level > 0, topk + (level - 1) * topk**2, 0)


def _require(root: Tensor, tokens: Parts, scores: Parts, beams: Parts, topk: int, nodes: int) -> tuple[int, int, int]:
    """Check the arguments of select; returns the batch, the size of the pool and its number of levels."""
    batch, size, in_levels = root.shape[0], sum(part.shape[1] for part in tokens), len(tokens) > 1
    for level, (of_tokens, of_scores) in enumerate(zip(tokens, scores, strict=True)):
        count = size if not in_levels else topk**2 if level else topk
        require("select_tree: tokens", of_tokens, (batch, count), torch.int64, root)
        require("select_tree: scores", of_scores, (batch, count), torch.float32, root)
    num_beams = size // topk - 1
    if sum(part.shape[1] for part in beams) != num_beams or (in_levels and len(beams) != len(tokens) - 1):
        raise EspalierError(f"select_tree: beams of {size} candidates at topk={topk} must be {num_beams}, by level")
    for part in beams:
        require("select_tree: beams", part, (batch, topk if in_levels else num_beams), torch.int64, root)
    steps, excess = 1 + (size - topk) // topk**2, (size - topk) % topk**2
    if excess or not 1 <= nodes <= size + 1:
        raise EspalierError(
            f"select_tree: {size} candidates at topk={topk} are not whole levels, or too few for {nodes} nodes with "
            "the root: draft and select with the same layout"
        )
    return batch, size, steps


@kernel
def _load_of_pool(parts, PARTS: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, request, i, mask, other):
    """Values i of a request's pool.  The first part has FIRST values of a request, the others REST."""
    for part in tl.static_range(PARTS):
        if part == 0:
            value = tl.load(parts[part] + request * FIRST + i, mask=mask & (i < FIRST), other=other)
        else:
            at = i - (FIRST + (part - 1) * REST)
            inside = mask & (at >= 0) & (at < REST)
            value = tl.where(inside, tl.load(parts[part] + request * REST + at, mask=inside, other=other), value)
    return value


@kernel
def _select_tree_kernel(
    root_ptr, tokens, scores, beams,
    out_tokens_ptr, out_parents_ptr, out_depths_ptr, out_scores_ptr, out_words_ptr,
    topk,
    SIZE: tl.constexpr, PARTS: tl.constexpr, TOPK: tl.constexpr, STEPS: tl.constexpr, NODES: tl.constexpr,
    WORDS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_WORDS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Finds the lowest selected score by binary search over its bits: the work is linear in the pool size.

    topk equals TOPK and is used for divisions.  Dividing a small number by a constant compiles to 16-bit arithmetic, in
    which ptxas 12.8 drops an addition (docs/log.md).
    """
    pdl_trigger_and_wait(DEPENDENT)
    request = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    exists = i < SIZE
    FIRST: tl.constexpr = SIZE if PARTS == 1 else TOPK
    REST: tl.constexpr = TOPK * TOPK
    score = usable_score(_load_of_pool(scores, PARTS, FIRST, REST, request, i, exists, float("-inf")))
    # Keys are at least 0.  Padding gets 0, below the key of every score, -inf included.
    key = tl.where(exists, order_of(score).to(tl.int64) + 2147483648, 0)
    lowest = tl.zeros([], tl.int64)
    for step in range(32):
        trial = lowest | (tl.full([], 2147483648, tl.int64) >> step)
        lowest = tl.where(tl.sum((key >= trial).to(tl.int32), 0) >= NODES - 1, trial, lowest)
    better = key > lowest
    tied = key == lowest
    num_tied = NODES - 1 - tl.sum(better.to(tl.int32), 0)
    selected = better | (tied & (tl.cumsum(tied.to(tl.int32), 0) <= num_tied))
    # The node of each candidate; 0, the root, if it is not selected.
    node = tl.where(selected, tl.cumsum(selected.to(tl.int32), 0), 0)
    void = score == float("-inf")
    # The pool index of each candidate's parent beam; level 1 has none.
    has_beam = exists & (i >= TOPK)
    beam_index = (i - TOPK) // topk
    # One level less than the candidates.
    BEAM_PARTS: tl.constexpr = PARTS - 1 if PARTS > 1 else 1
    BEAMS: tl.constexpr = SIZE // TOPK - 1 if PARTS == 1 else TOPK
    beam = _load_of_pool(beams, BEAM_PARTS, BEAMS, TOPK, request, beam_index, has_beam, 0).to(tl.int32)
    beam += tl.where(has_beam & (beam_index >= TOPK), topk + (beam_index // topk - 1) * (topk * topk), 0)
    parent = tl.where(has_beam & (void == 0), tl.gather(node, beam, 0), 0)
    level = tl.where((i < TOPK) | void, 1, 2 + (i - TOPK) // (topk * topk))
    token = _load_of_pool(tokens, PARTS, FIRST, REST, request, i, selected, 0)
    out = request * NODES + node
    tl.store(out_tokens_ptr + out, tl.where(void, -1, token), mask=selected)
    tl.store(out_parents_ptr + out, parent.to(tl.int64), mask=selected)
    tl.store(out_depths_ptr + out, level.to(tl.int64), mask=selected)
    tl.store(out_scores_ptr + out, score, mask=selected)
    tl.store(out_tokens_ptr + request * NODES, tl.load(root_ptr + request))
    tl.store(out_parents_ptr + request * NODES, tl.full([], 0, tl.int64))
    tl.store(out_depths_ptr + request * NODES, tl.full([], 0, tl.int64))
    tl.store(out_scores_ptr + request * NODES, 0.0)

    # Each candidate walks up the tree and sets one bit per step.  A child of the root stays at its own node.
    word = tl.arange(0, BLOCK_WORDS)[None, :]
    one = tl.full([BLOCK, BLOCK_WORDS], 1, tl.int64)
    bits = tl.where((word == 0) & (void[:, None] == 0), one, 0)
    next_ancestor = tl.where(parent > 0, beam, i)
    ancestor = i
    for _ in range(STEPS):
        ancestor_node = tl.gather(node, ancestor, 0)[:, None]
        bits |= tl.where(word == ancestor_node // 64, one << (ancestor_node % 64).to(tl.int64), 0)
        ancestor = tl.gather(next_ancestor, ancestor, 0)
    word_mask = selected[:, None] & (word < WORDS)
    tl.store(out_words_ptr + out[:, None] * WORDS + word, bits, mask=word_mask)
    root_word = tl.arange(0, BLOCK_WORDS)
    root_words_ptrs = out_words_ptr + request * NODES * WORDS + root_word
    tl.store(root_words_ptrs, (root_word == 0).to(tl.int64), mask=root_word < WORDS)
