"""The token tree: drafted candidates are collected in a pool, and the best of them become the tree to verify.

Beams, candidates and nodes have three different indices.  A beam is a draft row at some depth.  A candidate is a scored
child in the pool.  A node is a member of the tree.  Node 0 is the root, and a parent comes before its children.  If
there are fewer candidates than nodes, the rest are void nodes: token -1, no ancestor of any node, never matched, never
committed.
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
    """The trees of a batch.

    tokens: [B, D]; -1 for void nodes.
    parents: [B, D], index of the parent node; the root is its own parent.
    depths: [B, D], distance from the root; 1 for void nodes.
    scores: [B, D] float32, log-probability of the path; 0 for the root, -inf for void nodes.
    ancestors: [B, D, W] int64, bit j of a node: node j is its ancestor, or the node itself.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    scores: Tensor
    ancestors: Tensor

    def mask(self) -> Tensor:
        """[B, D, D] bool: node j is an ancestor of node i, or i itself."""
        return unpack(self.ancestors, self.tokens.shape[1])

    def positions(self, prefix_len: Tensor) -> Tensor:
        """[B, D]: position of each node in the target."""
        return prefix_len[:, None] + self.depths


def root_only(root: Tensor) -> Tree:
    """The tree of plain decoding: the root [B] alone."""
    zeros = torch.zeros_like(root[:, None])
    return Tree(root[:, None], zeros, zeros, zeros.float(), zeros[..., None] + 1)


class Pool:
    """The candidates of a batch, level by level, so a parent precedes its children.

    Level 1 has topk candidates.  Each later level has topk candidates for each of its topk beams, in beam order.
    """

    def __init__(self, topk: int) -> None:
        self.topk = topk
        self.tokens: list[Tensor] = []
        self.scores: list[Tensor] = []
        self.beams: list[Tensor] = []

    def add(self, tokens: Tensor, scores: Tensor) -> None:
        """Append a level: tokens and scores [B, rows, topk], the children of the root (rows = 1) or of the beams."""
        self.tokens.append(tokens.flatten(1))
        self.scores.append(scores.flatten(1))

    def keep(self, places: Tensor) -> None:
        """Record the beams of the next level.  places: [B, topk], their candidates' indices in the last added level."""
        self.beams.append(places)

    def select(self, root: Tensor, nodes: int) -> Tree:
        """The tree of the root [B] and the best nodes - 1 candidates, sorted by (score, level, index in the level)."""
        beams = torch.cat(self.beams, 1) if self.beams else root.new_empty(root.shape[0], 0)
        tokens, scores = torch.cat(self.tokens, 1), torch.cat(self.scores, 1)
        return Tree(*select(root, tokens, scores, beams, self.topk, nodes))
