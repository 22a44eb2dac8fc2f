"""A token tree: how candidates grow into a pool, and how the best of them become the tree that is verified.

Beams, candidates and nodes are three different indices.  A beam is a draft row at some depth, a candidate is a scored
continuation in the pool, a node is a member of the tree.  Node 0 is the root; a parent comes before its children; rows
without a candidate are void: token -1, ancestor of nothing, never matched, never committed.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.kernels.ancestors import ancestor_mask, pack, unpack

VOID = -1


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

    def every_ancestor(self, holds: Tensor) -> Tensor:
        """[B, D] bool: `holds` is true at the node and at all of its ancestors."""
        return ((self.ancestors & pack(~holds)[:, None]) == 0).all(-1)


def root_only(root: Tensor) -> Tree:
    """The tree of plain decoding."""
    zeros = torch.zeros_like(root[:, None])
    return Tree(root[:, None], zeros, zeros, zeros.float(), zeros[..., None] + 1)


def ordered_topk(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best of the last dimension, ties to the lower index (torch.topk alone promises no order among equals).

    scores: float32, NaN counting as -inf.  Returns (values, indices); where there are fewer than k, -inf and index 0.
    """
    width = scores.shape[-1]
    scores = scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf) + 0.0  # -0.0 is tied with 0.0
    bits = scores.contiguous().view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()  # float order as integer order
    keys = (ordered << 32) + torch.arange(width - 1, -1, -1, device=scores.device)
    best = keys.topk(min(k, width), -1).indices
    values = scores.gather(-1, best)
    missing = max(k - width, 0)
    if missing:
        values = torch.nn.functional.pad(values, (0, missing), value=-torch.inf)
        best = torch.nn.functional.pad(best, (0, missing))
    return values, best


class Pool:
    """Candidates of a batch in the order they were scored: level by level, so that a parent precedes its children.

    After each level, `tokens`, `scores`, `parents` are lists of [B, n]; a parent is a pool index, -1 for children of
    the root.
    """

    def __init__(self) -> None:
        self.tokens: list[Tensor] = []
        self.scores: list[Tensor] = []
        self.parents: list[Tensor] = []
        self.size = 0

    def add(self, tokens: Tensor, scores: Tensor, parents: Tensor) -> int:
        """Append [B, n] candidates, already in their order; returns the pool index of the first."""
        first = self.size
        self.tokens.append(tokens)
        self.scores.append(scores)
        self.parents.append(parents)
        self.size += tokens.shape[1]
        return first

    def select(self, root: Tensor, nodes: int, levels: int) -> Tree:
        """The best nodes - 1 candidates under the root [B].

        Sort key (score, level, index): stable over the pool's own order.  A child scores no more than its parent and
        comes after it, so what is selected is closed under ancestors, and keeping pool order puts parents first.
        """
        tokens, scores, parents = (torch.cat(parts, 1) for parts in (self.tokens, self.scores, self.parents))
        best = torch.sort(scores, dim=1, descending=True, stable=True).indices[:, : nodes - 1].sort(1).values
        void = scores.gather(1, best) == -torch.inf
        node_of = torch.zeros_like(tokens).scatter_(1, best, torch.arange(1, nodes, device=best.device).expand_as(best))
        parent = parents.gather(1, best)
        parent_node = torch.where(void | (parent < 0), 0, node_of.gather(1, parent.clamp(min=0)))
        level = torch.cat([torch.full_like(t, i + 1) for i, t in enumerate(self.tokens)], 1)
        return self._tree(
            root,
            tokens.gather(1, best).masked_fill(void, VOID),
            parent_node,
            level.gather(1, best).masked_fill(void, 1),
            scores.gather(1, best),
            void,
            levels,
        )

    @staticmethod
    def _tree(
        root: Tensor, tokens: Tensor, parents: Tensor, depths: Tensor, scores: Tensor, void: Tensor, levels: int
    ) -> Tree:
        with_root = [torch.nn.functional.pad(value, (1, 0)) for value in (parents, depths, scores, void)]
        parents, depths, scores, void = with_root
        words = pack(ancestor_mask(parents, void, levels))
        return Tree(torch.cat((root[:, None], tokens), 1), parents, depths, scores, words)
