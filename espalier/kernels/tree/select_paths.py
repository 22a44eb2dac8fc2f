"""Selects the tree of a block draft: the best paths among all paths that the draft's single pass proposes.

A block draft gives candidates for every depth at once (`Candidates`); a path takes one candidate per depth.  The best
paths become nodes, best first (DDTree: Ringel and Romano 2026).  A path's score is the sum of its candidates'
log-probabilities, so a parent comes before its children, and a better sibling before a worse one.

Grid: one program per request, with one warp for trees of up to MAX_ONE_WARP_KEYS nodes.  Each step selects one node.
For each selected node, the frontier (the set of nodes that may come next) has the node's next sibling and first child
as entries.  An entry is a score and 32 bits that break ties.  So a step takes a maximum and a minimum over the entries,
in registers.  The reads of a step depend on one another, so they should hit the L1.  Therefore the first
MAX_PREFETCHED_CANDIDATES candidates are read before the first step.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from espalier.kernels.ops.drafts import Candidates, check_path_sizes
from espalier.kernels.ops.tree import Tree
from espalier.kernels.runtime.jit import float_to_key, kernel, key_to_float
from espalier.kernels.runtime.launch import chip, next_power_of_2
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger_and_wait

# The most keys (one per node) that one warp holds in registers.
MAX_ONE_WARP_KEYS = 256
# The most candidates that are read before the first step: as many as fit in registers, and at least MAX_CANDIDATES.
MAX_PREFETCHED_CANDIDATES = 2048


def select_paths(root: Tensor, candidates: Candidates, num_nodes: int) -> Tree:
    """The launcher of ops/drafts.py:select_paths.  root: [B], tokens of the roots.  num_nodes: nodes of a tree."""
    batch, steps, rows, topk = check_path_sizes(root, candidates, num_nodes)
    tree = Tree.empty(root, num_nodes)
    if batch:
        # At least one entry per lane of a warp, because a maximum over fewer lanes takes several instructions.
        block = max(next_power_of_2(num_nodes), 32)
        # A path has at most steps + 1 nodes, which limits NUM_DOUBLINGS (_write_tree).
        _select_paths_kernel[(batch,)](
            root.contiguous(),
            *(value.contiguous() for value in candidates),
            *tree,
            NODES=num_nodes, STEPS=steps, ROWS=rows, TOPK=topk, WORDS=tree.num_ancestor_words, BLOCK=block,
            NUM_PREFETCHED=min(next_power_of_2(steps * rows * topk), MAX_PREFETCHED_CANDIDATES),
            NUM_DOUBLINGS=steps.bit_length(), num_warps=1 if block <= MAX_ONE_WARP_KEYS else 4,
            **pdl_arguments(chip(root)),
        )  # fmt: skip
    return tree


@kernel
def _pack_tie_break(depth, parent, sibling, row):
    """Returns a uint32 that orders paths of equal score: lower depth first, then lower parent, then lower sibling."""
    return ((depth << 26) | (parent << 16) | (sibling << 8) | row).to(tl.uint32, bitcast=True)


@kernel
def _unpack_tie_break(tie_break):
    """Returns (depth, parent, sibling, row): the inverse of _pack_tie_break."""
    depth, parent = (tie_break >> 26).to(tl.int32), ((tie_break >> 16) & 1023).to(tl.int32)
    return depth, parent, ((tie_break >> 8) & 255).to(tl.int32), (tie_break & 255).to(tl.int32)


@kernel
def _path_key(parent_score, logp):
    """Returns the integer key of a path's score; if there is no path, a key below the key of -inf.

    parent_score: the score of the path's parent.  parent_score is not -0.0, so the sum is not -0.0."""
    score = parent_score + logp
    # The comparison is also False for NaN.
    return tl.where(score > float("-inf"), float_to_key(score), -2147483648)


@kernel
def _select_paths_kernel(
    root_ptr, tokens_ptr, scores_ptr, next_rows_ptr,
    out_tokens_ptr, out_parents_ptr, out_depths_ptr, out_scores_ptr, out_words_ptr,
    NODES: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr, TOPK: tl.constexpr, WORDS: tl.constexpr,
    NUM_DOUBLINGS: tl.constexpr, BLOCK: tl.constexpr, NUM_PREFETCHED: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Select node i in step i.  The next sibling replaces the node in its entry, and the first child becomes entry i.

    WORDS: the int64 words of a node's ancestor bits.
    Keys, tie breaks and scores are integers, because the maximum of integers over a warp is one instruction."""
    pdl_trigger_and_wait(USE_PDL)
    request = tl.program_id(0).to(tl.int64)
    scores_ptr += request * (STEPS * ROWS * TOPK)
    next_rows_ptr += request * (STEPS * ROWS * TOPK)
    has_paths, deepest = _prefetch_candidates(scores_ptr, next_rows_ptr, STEPS, STEPS * ROWS * TOPK, NUM_PREFETCHED)
    i = tl.arange(0, BLOCK)
    # no_path is below the key of every score, also below that of -inf.
    no_path = tl.full([], -2147483648, tl.int32)
    zero = tl.full([], 0, tl.int32)
    first_key = _path_key(0.0, tl.load(scores_ptr))
    keys = tl.where((i == 0) & has_paths, first_key, no_path)
    tie_breaks = tl.zeros([BLOCK], tl.uint32) + _pack_tie_break(zero + 1, zero, zero, zero)
    parent_scores = tl.zeros([BLOCK], tl.int32)
    selected_keys, selected_tie_breaks = tl.zeros([BLOCK], tl.int32) + no_path, tl.zeros([BLOCK], tl.uint32)
    for node in range(1, NODES):
        best = tl.max(keys, 0)
        is_path = best > no_path
        tie_break = tl.min(tl.where(keys == best, tie_breaks, 0xFFFFFFFF), 0)
        is_best = (keys == best) & (tie_breaks == tie_break)
        score = key_to_float(best)
        depth, parent, sibling, row = _unpack_tie_break(tie_break)
        parent_score = tl.sum(tl.where(is_best, parent_scores, 0), 0).to(tl.float32, bitcast=True)
        selected_keys = tl.where(i == node, best, selected_keys)
        selected_tie_breaks = tl.where(i == node, tie_break, selected_tie_breaks)
        index = ((depth - 1) * ROWS + row) * TOPK + sibling
        sibling_logp = tl.load(scores_ptr + index + 1, mask=is_path & (sibling + 1 < TOPK), other=float("-inf"))
        next_row = tl.load(next_rows_ptr + index, mask=is_path & (depth < deepest), other=-1)
        child_index = (depth * ROWS + next_row) * TOPK
        child_logp = tl.load(scores_ptr + child_index, mask=next_row >= 0, other=float("-inf"))
        keys = tl.where(is_best, _path_key(parent_score, sibling_logp), keys)
        tie_breaks = tl.where(is_best, _pack_tie_break(depth, parent, sibling + 1, row), tie_breaks)
        keys = tl.where(i == node, _path_key(score, child_logp), keys)
        tie_breaks = tl.where(i == node, _pack_tie_break(depth + 1, zero + node, zero, next_row), tie_breaks)
        parent_scores = tl.where(i == node, score.to(tl.int32, bitcast=True), parent_scores)
    _write_tree(
        *(root_ptr, tokens_ptr, out_tokens_ptr, out_parents_ptr, out_depths_ptr, out_scores_ptr, out_words_ptr),
        *(request, selected_keys, selected_tie_breaks, i, NODES, STEPS, ROWS, TOPK, WORDS, NUM_DOUBLINGS, BLOCK),
    )


@kernel
def _prefetch_candidates(
    scores_ptr, next_rows_ptr, STEPS: tl.constexpr, NUM_CANDIDATES: tl.constexpr, NUM_PREFETCHED: tl.constexpr
):
    """Read the first NUM_PREFETCHED candidates into the L1.  All candidates of depth 1 are among them.

    The compiler would drop a read whose value is not used, so the values are used.  Returns (whether any of these
    candidates exists, the deepest depth: STEPS, or 1 if none of these candidates has children)."""
    i = tl.arange(0, NUM_PREFETCHED)
    score = tl.load(scores_ptr + i, mask=i < NUM_CANDIDATES, other=float("-inf"))
    next_row = tl.load(next_rows_ptr + i, mask=i < NUM_CANDIDATES, other=-1)
    exists = tl.max((score > float("-inf")).to(tl.int32), 0) > 0
    return exists, tl.where(tl.max(next_row, 0) >= 0, STEPS, 1)


@kernel
def _write_tree(
    root_ptr, tokens_ptr, out_tokens_ptr, out_parents_ptr, out_depths_ptr, out_scores_ptr, out_words_ptr,
    request, selected_keys, tie_breaks, node,
    NODES: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr, TOPK: tl.constexpr, WORDS: tl.constexpr,
    NUM_DOUBLINGS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the tree.  Node 0 is the root.  Node i is the path of selected_keys[i] and tie_breaks[i], or void."""
    score = key_to_float(selected_keys)
    depth, parent, sibling, row = _unpack_tie_break(tie_breaks)
    is_root = node == 0
    is_void = (selected_keys == -2147483648) & (node > 0)
    is_drafted = (selected_keys != -2147483648) & (node < NODES)
    index = request * (STEPS * ROWS * TOPK) + ((depth - 1) * ROWS + row) * TOPK + sibling
    token = tl.load(tokens_ptr + index, mask=is_drafted, other=-1)
    token = tl.where(is_root, tl.load(root_ptr + request), token)
    parent = tl.where(is_drafted, parent, 0)
    out = request * NODES + node
    exists = node < NODES
    tl.store(out_tokens_ptr + out, token, mask=exists)
    tl.store(out_parents_ptr + out, parent.to(tl.int64), mask=exists)
    tl.store(out_depths_ptr + out, tl.where(is_root, 0, tl.where(is_void, 1, depth)).to(tl.int64), mask=exists)
    tl.store(out_scores_ptr + out, tl.where(is_root, 0.0, tl.where(is_void, float("-inf"), score)), mask=exists)
    one = tl.full([BLOCK], 1, tl.int64)
    for word in tl.static_range(WORDS):
        bits = tl.where(node // 64 == word, one << (node % 64).to(tl.int64), 0)
        # A void node has no other ancestor, so it points to itself.
        ancestor = tl.where(is_void, node, parent)
        # Each iteration doubles the number of known ancestors of each node.
        for _ in range(NUM_DOUBLINGS):
            bits |= tl.gather(bits, ancestor, 0)
            ancestor = tl.gather(ancestor, ancestor, 0)
        tl.store(out_words_ptr + out * WORDS + word, bits, mask=exists)
