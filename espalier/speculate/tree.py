"""The token tree: drafted candidates are collected in a CandidatePool, and the best become the tree to verify.

A candidate is a drafted token with a score, in the pool.  A beam is a candidate from which the draft drafts further
candidates.  A node is a member of the tree.  Each of the three has its own index.  Node 0 is the root, and a parent
comes before its children.  If there are fewer candidates than nodes, the remaining nodes are void: they have token -1,
are no ancestor of another node, and are never accepted."""

import torch
from torch import Tensor

from espalier.kernels.ops.tree import VOID, Tree, ordered_topk, select_tree

__all__ = ["VOID", "CandidatePool", "RootTrees", "Tree", "ordered_topk"]


class RootTrees:
    """Makes the trees of plain decoding, which have only a root.  All tensors except the tokens are made once.

    scores: [max_batch, 1], the score of each root: 0, which is log 1."""

    def __init__(self, max_batch: int, device: torch.device) -> None:
        self.zeros = torch.zeros(max_batch, 1, dtype=torch.int64, device=device)
        self.scores = self.zeros.float()
        self.ancestors = self.zeros[..., None] + 1

    def __call__(self, root: Tensor) -> Tree:
        """Returns a tree for each root.  root: [B] int64, tokens."""
        zeros, scores, ancestors = (part[: len(root)] for part in (self.zeros, self.scores, self.ancestors))
        return Tree(root[:, None], zeros, zeros, scores, ancestors)


class CandidatePool:
    """The candidates of a batch, level by level, so a parent comes before its children.

    Level 1 has topk candidates.  Each later level has topk children of each of the topk beams, in the order of beams.
    """

    def __init__(self, topk: int) -> None:
        self.topk = topk
        self.tokens: list[Tensor] = []
        self.scores: list[Tensor] = []
        self.beams: list[Tensor] = []

    def add_level(self, tokens: Tensor, scores: Tensor) -> None:
        """Appends a level of candidates: tokens and scores [B, Q, topk], for the root (Q = 1) or for Q beams."""
        self.tokens.append(tokens.flatten(1))
        self.scores.append(scores.flatten(1))

    def set_beams(self, candidate_indices: Tensor) -> None:
        """Sets the beams whose children are the next level.  candidate_indices: [B, topk], the indices of the beams
        among the candidates of the level that was added last."""
        self.beams.append(candidate_indices)

    def select(self, root: Tensor, num_nodes: int) -> Tree:
        """Returns the tree of the root [B] and the best num_nodes - 1 candidates, sorted by (score, level, index in the
        level)."""
        return select_tree(root, self.tokens, self.scores, self.beams, self.topk, num_nodes)
