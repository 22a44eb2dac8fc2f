"""Selects, among a draft's candidates, the beams of the next level (select_beams), and the nodes of the tree
(select_tree).

All candidates of all levels are the pool.  The best candidates become nodes, in the order of the pool, so a parent
comes before its children.  A candidate's index in the pool shows its level and the beam that is its parent.  So the
pool needs only tokens and scores, and for each beam the index of the candidate that became this beam.

Grid of both kernels: one program per request, which holds all candidates in registers.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.ops.tree import Pool, SelectedBeams, Tree, check_pool_sizes
from espalier.kernels.runtime.jit import float_to_key, kernel
from espalier.kernels.runtime.launch import chip, next_power_of_2, require
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger_and_wait
from espalier.layout import ANCESTOR_BITS

# Pairs of candidates that select_beams compares in one step.  The results of a step stay in registers.
COMPARISONS_PER_STEP = 16384


def select_beams(
    tokens: Tensor, scores: Tensor, ancestor_bits: Tensor | None, path: Tensor, first_row: int, num_ancestor_words: int
) -> SelectedBeams:
    """The launcher of ops/tree.py:select_beams.  path: gets the beams' tokens, in columns from first_row on."""
    batch, rows, topk = tokens.shape
    require("select_beams: tokens", tokens, (-1, -1, -1), torch.int64, tokens)
    require("select_beams: scores", scores, (batch, rows, topk), torch.float32, tokens)
    if ancestor_bits is not None:
        require("select_beams: ancestor_bits", ancestor_bits, (batch, rows, num_ancestor_words), torch.int64, tokens)
        ancestor_bits = ancestor_bits.contiguous()
    require("select_beams: path", path, (batch, -1), torch.int64, tokens)
    if first_row + topk > min(num_ancestor_words * ANCESTOR_BITS, path.shape[1]) or path.stride(1) != 1:
        raise EspalierError(
            f"select_beams: row {first_row + topk - 1} does not fit into a contiguous path of {path.shape[1]} rows and "
            f"{num_ancestor_words} words of {ANCESTOR_BITS} ancestor bits: take both sizes from the layout"
        )
    beams = SelectedBeams(
        scores.new_empty(batch, topk),
        tokens.new_empty(batch, topk),
        tokens.new_empty(batch, topk),
        tokens.new_empty(batch, topk, num_ancestor_words),
    )
    if batch:
        block = next_power_of_2(rows * topk)
        _select_beams_kernel[(batch,)](
            *(tokens.contiguous(), scores.contiguous(), ancestor_bits, path, *beams, path.stride(0), first_row, topk),
            ROWS=rows, TOPK=topk, WORDS=num_ancestor_words, BLOCK_WORDS=next_power_of_2(num_ancestor_words),
            BLOCK=block, COMPARED_CANDIDATES=max(min(block, COMPARISONS_PER_STEP // block), 1),
            num_warps=4 if block <= 256 else 8, **pdl_arguments(chip(tokens)),
        )  # fmt: skip
    return beams


@kernel
def comparable_score(score):
    """Returns the score for comparisons: NaN becomes -inf, and -0.0 becomes 0.0."""
    score = tl.where(score == score, score, float("-inf"))
    return tl.where(score == 0, 0.0, score)


@kernel
def _select_beams_kernel(
    tokens_ptr, scores_ptr, words_ptr, path_ptr, out_scores_ptr, out_index_ptr, out_parents_ptr, out_words_ptr,
    path_stride, first_row, topk,
    ROWS: tl.constexpr, TOPK: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr, COMPARED_CANDIDATES: tl.constexpr,
    BLOCK_WORDS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Rank candidates.  A rank is the number of better candidates; ranks below TOPK are beams, stored at their rank."""
    pdl_trigger_and_wait(USE_PDL)
    request = tl.program_id(0).to(tl.int64)
    candidates = request * (ROWS * TOPK)
    i = tl.arange(0, BLOCK)
    score = comparable_score(tl.load(scores_ptr + candidates + i, mask=i < ROWS * TOPK, other=float("-inf")))
    key = float_to_key(score)
    rank = tl.zeros([BLOCK], tl.int32)
    for start in range(0, BLOCK, COMPARED_CANDIDATES):
        j = start + tl.arange(0, COMPARED_CANDIDATES)
        other_key = tl.load(scores_ptr + candidates + j, mask=j < ROWS * TOPK, other=float("-inf"))
        other_key = float_to_key(comparable_score(other_key))
        is_tie = (other_key[None, :] == key[:, None]) & (j[None, :] < i[:, None])
        rank += tl.sum(((other_key[None, :] > key[:, None]) | is_tie).to(tl.int32), 1)
    # The padding of a block has score -inf and the highest indices, so the ranks of padding are at least TOPK.
    is_beam = rank < TOPK
    # The divisor is the argument topk, not the constant TOPK, for the reason in _select_tree_kernel.
    parent = i // topk
    beam = request * TOPK + rank
    token = tl.load(tokens_ptr + candidates + i, mask=is_beam, other=0)
    tl.store(path_ptr + request * path_stride + first_row + rank, token, mask=is_beam)
    tl.store(out_scores_ptr + beam, score, mask=is_beam)
    tl.store(out_index_ptr + beam, i.to(tl.int64), mask=is_beam)
    tl.store(out_parents_ptr + beam, parent.to(tl.int64), mask=is_beam)
    word = tl.arange(0, BLOCK_WORDS)[None, :]
    row = first_row + rank[:, None]
    bits = tl.where(word == row // 64, tl.full([BLOCK, BLOCK_WORDS], 1, tl.int64) << (row % 64).to(tl.int64), 0)
    mask = is_beam[:, None] & (word < WORDS)
    if words_ptr is not None:
        parent_words = (request * ROWS + parent)[:, None] * WORDS + word
        bits |= tl.load(words_ptr + parent_words, mask=mask, other=0)
    tl.store(out_words_ptr + beam[:, None] * WORDS + word, bits, mask=mask)


# The most tensors, one per level, from which the kernel reads the tokens or the scores of candidates.
MAX_CANDIDATE_TENSORS = 16


def select_tree(root: Tensor, tokens: Pool, scores: Pool, beams: Pool, topk: int, num_nodes: int) -> Tree:
    """The launcher of ops/tree.py:select_tree.  tokens, scores: the candidates.  beams: indices of candidates."""
    if len(tokens) > MAX_CANDIDATE_TENSORS:
        tokens, scores, beams = ([torch.cat(list(parts), 1)] for parts in (tokens, scores, beams))
    batch, size, steps = check_pool_sizes(root, tokens, scores, beams, topk, num_nodes)
    tree = Tree.empty(root, num_nodes)
    if batch:
        block, word_block = next_power_of_2(size), next_power_of_2(tree.num_ancestor_words)
        # Without beams, the kernel gets placeholder tensors, which it does not read.
        # num_warps: so many that a thread holds at most 32 int64 words of ancestor bits, up to 16 warps.
        _select_tree_kernel[(batch,)](
            root.contiguous(),
            *(tuple(part.contiguous() for part in parts) for parts in (tokens, scores, beams or tokens)),
            *tree,
            topk, SIZE=size, PARTS=len(tokens), TOPK=topk, STEPS=steps, NODES=num_nodes, WORDS=tree.num_ancestor_words,
            BLOCK=block, BLOCK_WORDS=word_block, num_warps=min(max(block * word_block // 1024, 4), 16),
            **pdl_arguments(chip(root)),
        )  # fmt: skip
    return tree


@kernel
def _load_from_pool(
    parts, PARTS: tl.constexpr, FIRST_PART_SIZE: tl.constexpr, LATER_PART_SIZE: tl.constexpr, request, index, mask,
    default,
):  # fmt: skip
    """Load the values at `index` of a request's pool, which is `parts` one after another."""
    for part in tl.static_range(PARTS):
        if part == 0:
            value = tl.load(
                parts[part] + request * FIRST_PART_SIZE + index, mask=mask & (index < FIRST_PART_SIZE), other=default
            )
        else:
            at = index - (FIRST_PART_SIZE + (part - 1) * LATER_PART_SIZE)
            inside = mask & (at >= 0) & (at < LATER_PART_SIZE)
            value = tl.where(
                inside, tl.load(parts[part] + request * LATER_PART_SIZE + at, mask=inside, other=default), value
            )
    return value


@kernel
def _select_tree_kernel(
    root_ptr, tokens, scores, beams,
    out_tokens_ptr, out_parents_ptr, out_depths_ptr, out_scores_ptr, out_words_ptr, topk,
    SIZE: tl.constexpr, PARTS: tl.constexpr, TOPK: tl.constexpr, STEPS: tl.constexpr, NODES: tl.constexpr,
    WORDS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_WORDS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Find the lowest selected score by a binary search over the bits of its key, in 32 passes over the pool.

    topk: equal to TOPK, and used as divisor instead of the constant.  Division of a small number by a constant compiles
    to 16-bit arithmetic, in which ptxas 12.8 drops an addition (docs/log.md)."""
    pdl_trigger_and_wait(USE_PDL)
    request = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    exists = i < SIZE
    FIRST_PART_SIZE: tl.constexpr = SIZE if PARTS == 1 else TOPK
    LATER_PART_SIZE: tl.constexpr = TOPK * TOPK
    score = comparable_score(
        _load_from_pool(scores, PARTS, FIRST_PART_SIZE, LATER_PART_SIZE, request, i, exists, float("-inf"))
    )
    # Keys are at least 0.  Padding gets 0, below the key of every score, -inf included.
    key = tl.where(exists, float_to_key(score).to(tl.int64) + 2147483648, 0)
    lowest = tl.zeros([], tl.int64)
    for step in range(32):
        higher = lowest | (tl.full([], 2147483648, tl.int64) >> step)
        lowest = tl.where(tl.sum((key >= higher).to(tl.int32), 0) >= NODES - 1, higher, lowest)
    is_better = key > lowest
    is_tie = key == lowest
    num_tied = NODES - 1 - tl.sum(is_better.to(tl.int32), 0)
    selected = is_better | (is_tie & (tl.cumsum(is_tie.to(tl.int32), 0) <= num_tied))
    # The node of each candidate; 0 (the root) for a candidate that is not selected.
    node = tl.where(selected, tl.cumsum(selected.to(tl.int32), 0), 0)
    is_void = score == float("-inf")
    # The pool index of each candidate's parent beam; candidates of level 1 have no parent beam.
    has_beam = exists & (i >= TOPK)
    beam_index = (i - TOPK) // topk
    # `beams` has one part less than the candidates, because the last level has no beams.
    BEAM_PARTS: tl.constexpr = PARTS - 1 if PARTS > 1 else 1
    BEAMS: tl.constexpr = SIZE // TOPK - 1 if PARTS == 1 else TOPK
    beam = _load_from_pool(beams, BEAM_PARTS, BEAMS, TOPK, request, beam_index, has_beam, 0).to(tl.int32)
    beam += tl.where(has_beam & (beam_index >= TOPK), topk + (beam_index // topk - 1) * (topk * topk), 0)
    parent = tl.where(has_beam & (is_void == 0), tl.gather(node, beam, 0), 0)
    level = tl.where((i < TOPK) | is_void, 1, 2 + (i - TOPK) // (topk * topk))
    token = _load_from_pool(tokens, PARTS, FIRST_PART_SIZE, LATER_PART_SIZE, request, i, selected, 0)
    out = request * NODES + node
    tl.store(out_tokens_ptr + out, tl.where(is_void, -1, token), mask=selected)
    tl.store(out_parents_ptr + out, parent.to(tl.int64), mask=selected)
    tl.store(out_depths_ptr + out, level.to(tl.int64), mask=selected)
    tl.store(out_scores_ptr + out, score, mask=selected)
    tl.store(out_tokens_ptr + request * NODES, tl.load(root_ptr + request))
    tl.store(out_parents_ptr + request * NODES, tl.full([], 0, tl.int64))
    tl.store(out_depths_ptr + request * NODES, tl.full([], 0, tl.int64))
    tl.store(out_scores_ptr + request * NODES, 0.0)

    # Each candidate walks up the tree and sets one bit per step.  The walk ends at the child of the root.
    word = tl.arange(0, BLOCK_WORDS)[None, :]
    one = tl.full([BLOCK, BLOCK_WORDS], 1, tl.int64)
    bits = tl.where((word == 0) & (is_void[:, None] == 0), one, 0)
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
