"""Replaces the draft's scores by measured log-probabilities: how often recent nodes of the same kind were accepted.

The kind of a draft's node is a number made of three values: the node's rank among its siblings, its confidence level,
and whether the request has a temperature above 0.  The confidence level is the range (one of NUM_CONFIDENCE_LEVELS)
that contains the draft's probability of the node's token.
The survival of a kind at a depth is the share of such nodes that were accepted, of those whose parent was accepted.
The probability of a node after its parent is the survival of its kind at its depth, times the draft's skill in this
request.  survival.py counts both.  The new score is the sum of the logarithms of these probabilities, from the root
down.  All sizes are static, so that a CUDA graph can capture this."""

import math
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from espalier.kernels.attention.ancestor_bits import self_only_bits, unpack_bits
from espalier.kernels.ops.tree import VOID, Tree
from espalier.slots import (
    MATCH_STRENGTHS,
    NUM_CONFIDENCE_LEVELS,
    NUM_RANKS,
    PATH_KINDS,
    SOURCES,
    UNDRAFTED_OFFSET,
    BatchState,
)

# The highest probability of a node after its parent.  It is below 1, so that a child scores lower than its parent.
MAX_STEP_PROBABILITY = 0.98
# The confidence level of a probability p is CONFIDENCE_SCALE · √(-log p), rounded down.  Level 0 is the surest.  So the
# bounds between the levels are p = 0.92, 0.72, 0.48, 0.27, 0.13, 0.05, 0.02.
CONFIDENCE_SCALE = 3.5
# The weight of the draft's own score, which decides between nodes of the same kind.
TIE_BREAK_WEIGHT = 1e-3
# The bits of a candidate packed into one number: the kind from bit 0, then depth, parent and token.
DEPTH_SHIFT, PARENT_SHIFT, TOKEN_SHIFT = 12, 24, 40


def draft_node_kinds(tree: Tree, is_sampled: Tensor) -> Tensor:
    """Returns [B, D] int64: the kinds of a draft's nodes, from PATH_KINDS on; 0 for roots and void nodes.

    is_sampled: [B] bool, whether the request has a temperature above 0."""
    log_p = _step_log_probability(tree)
    confidence_level = (CONFIDENCE_SCALE * (-log_p).clamp(min=0).sqrt()).clamp(max=NUM_CONFIDENCE_LEVELS - 1).long()
    is_sibling = tree.parents[:, :, None] == tree.parents[:, None]
    # The root is its own parent, but no sibling of its children.
    is_sibling[:, :, 0] = False
    rank = is_sibling.tril(-1).sum(-1).clamp(max=NUM_RANKS - 1)
    kinds = PATH_KINDS + (is_sampled[:, None] * NUM_RANKS + rank) * NUM_CONFIDENCE_LEVELS + confidence_level
    return kinds.masked_fill(_is_root_or_void(tree), 0)


def middle_probability(confidence_level: int) -> float:
    """Returns the probability in the middle of a confidence level, which is a range of the draft's probabilities."""
    return math.exp(-(((confidence_level + 0.5) / CONFIDENCE_SCALE) ** 2))


def calibrate_scores(tree: Tree, kinds: Tensor, survival: Tensor, draft_skill: Tensor) -> Tree:
    """Returns the same trees with calibrated scores.

    kinds: [B, D], from `draft_node_kinds`.  survival: [NODE_KINDS, S] float32, by kind and depth, and
    draft_skill: [B, 1] float32, by request; both are logarithms (survival.py)."""
    is_no_guess = _is_root_or_void(tree)
    step = (survival[kinds, (tree.depths - 1).clamp(min=0)] + draft_skill).clamp(max=math.log(MAX_STEP_PROBABILITY))
    step = (step + TIE_BREAK_WEIGHT * _step_log_probability(tree)).masked_fill(is_no_guess, 0)
    scores = torch.where(unpack_bits(tree.ancestors, tree.tokens.shape[1]), step[:, None], 0).sum(-1)
    return tree._replace(scores=torch.where(tree.scores == -torch.inf, -torch.inf, scores))


def pack_nodes(tree: Tree, kinds: Tensor) -> Tensor:
    """Returns [B, D] int64: each node and its kind as one number, for the host; VOID for roots and void nodes."""
    packed = (tree.tokens << TOKEN_SHIFT) + (tree.parents << PARENT_SHIFT) + (tree.depths << DEPTH_SHIFT) + kinds
    return packed.masked_fill(_is_root_or_void(tree), VOID)


class CandidateNodes(NamedTuple):
    """The nodes that `pack_nodes` holds, unpacked on the host into arrays of the same shape.

    exists: False for roots and void nodes, whose other fields are 0."""

    exists: np.ndarray
    kinds: np.ndarray
    depths: np.ndarray
    parents: np.ndarray
    tokens: np.ndarray

    @classmethod
    def unpack(cls, packed: np.ndarray) -> Self:
        """packed: int64 of any shape, from `pack_nodes`."""
        exists = packed != VOID
        filled = np.where(exists, packed, 0)
        bit_ranges = ((0, DEPTH_SHIFT), (DEPTH_SHIFT, PARENT_SHIFT), (PARENT_SHIFT, TOKEN_SHIFT), (TOKEN_SHIFT, 63))
        columns = [filled >> first & (1 << end - first) - 1 for first, end in bit_ranges]
        return cls(exists, *columns)

    @property
    def sources(self) -> np.ndarray:
        """The index of each node's source in ALL_SOURCES."""
        return np.where(self.kinds < PATH_KINDS, (self.kinds - 1) % UNDRAFTED_OFFSET // MATCH_STRENGTHS, len(SOURCES))

    @property
    def draft_sequences(self) -> set[tuple[int, ...]]:
        """The token sequences, from depth 1 to a node, of all nodes that the draft proposed for one request."""
        sequences: list[tuple[int, ...]] = []
        for exists, parent, token in zip(self.exists, self.parents.tolist(), self.tokens.tolist(), strict=True):
            sequences.append((*sequences[parent], token) if exists else ())
        return {tokens for tokens, kind in zip(sequences, self.kinds.tolist(), strict=True) if kind >= PATH_KINDS}


def requests_that_sample(slots: BatchState) -> Tensor:
    """Returns [B] bool: whether a request has a temperature above 0, so that the draft's scores contain noise."""
    return slots.table.temperature.index_select(0, slots.index) > 0


def root_only_trees(root: Tensor, num_nodes: int, num_ancestor_words: int) -> Tree:
    """Returns trees [B, nodes] that hold the roots [B] and otherwise void nodes."""
    zeros = root.new_zeros(root.shape[0], num_nodes)
    tokens, depths = zeros.masked_fill(zeros == 0, VOID), zeros + 1
    scores = torch.full_like(zeros, -torch.inf, dtype=torch.float32)
    tokens[:, 0], depths[:, 0], scores[:, 0] = root, 0, 0
    own_bits = self_only_bits(0, num_nodes, num_ancestor_words, root.device)
    return Tree(tokens, zeros, depths, scores, own_bits.expand(root.shape[0], -1, -1).contiguous())


def _step_log_probability(tree: Tree) -> Tensor:
    """Returns [B, D]: the draft's log-probability of each node's token, given the parent; -inf for a void node."""
    return (tree.scores - tree.scores.gather(1, tree.parents)).clamp(max=0)


def _is_root_or_void(tree: Tree) -> Tensor:
    return (tree.scores == -torch.inf) | (tree.depths == 0)
