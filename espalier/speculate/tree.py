"""A token tree: how candidates grow into a pool, and how the best of them become the tree that is verified.

Beams, candidates and nodes are three different indices.  A beam is a draft row at some depth, a candidate is a scored
continuation in the pool, a node is a member of the tree.  Node 0 is the root; a parent comes before its children; rows
without a candidate are void: token -1, ancestor of nothing, never matched, never committed.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.kernels.attention.ancestor_bits import unpack
from espalier.kernels.tree.select_beams import ordered_topk
from espalier.kernels.tree.select_tree import VOID, select

__all__ = ["VOID", "Pool", "Tree", "ordered_topk", "root_only"]


@dataclass(frozen=True)
class Tree:
    """[B, D] each: tokens, parents (the root its own), depths (void nodes 1), scores float32 (log-probability of the
    path; void -inf, root 0); ancestors [B, D, W] words."""

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    scores: Tensor
    ancestors: Tensor

    def mask(self) -> Tensor:
        """[B, D, D] bool: node j is an ancestor of node i, or i itself."""
        return unpack(self.ancestors, self.tokens.shape[1])

    def positions(self, prefix_len: Tensor) -> Tensor:
        """[B, D] positions of the nodes in the target."""
        return prefix_len[:, None] + self.depths


def root_only(root: Tensor) -> Tree:
    """The tree of plain decoding."""
    zeros = torch.zeros_like(root[:, None])
    return Tree(root[:, None], zeros, zeros, zeros.float(), zeros[..., None] + 1)


class Pool:
    """Candidates of a batch in the order they were scored: level by level, so that a parent precedes its children.

    topk: of the layout.  Level 1 has topk candidates, a later one topk for each of its topk beams, in their order.
    """

    def __init__(self, topk: int) -> None:
        self.topk = topk
        self.tokens: list[Tensor] = []
        self.scores: list[Tensor] = []
        self.beams: list[Tensor] = []

    def add(self, tokens: Tensor, scores: Tensor) -> None:
        """Append a level: the children [B, rows, topk] of the root, or of the beams."""
        self.tokens.append(tokens.flatten(1))
        self.scores.append(scores.flatten(1))

    def keep(self, places: Tensor) -> None:
        """Candidates [B, topk] of the level added last, by their place in it, that become the beams of the next."""
        self.beams.append(places)

    def select(self, root: Tensor, nodes: int) -> Tree:
        """The best nodes - 1 candidates under the root [B], by (score, level, place in the level)."""
        beams = torch.cat(self.beams, 1) if self.beams else root.new_empty(root.shape[0], 0)
        tokens, scores = torch.cat(self.tokens, 1), torch.cat(self.scores, 1)
        return Tree(*select(root, tokens, scores, beams, self.topk, nodes))
