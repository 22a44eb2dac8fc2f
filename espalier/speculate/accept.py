"""Which part of a tree is kept: the longest path that the target would have produced itself."""

from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.speculate.tree import Tree


@dataclass(frozen=True)
class Path:
    """rows: [B, S+1] nodes from the root down, zeros past length; length: [B], tokens emitted (0 for padding);
    tokens: [B, S+1], what is emitted: accepted draft tokens, then the target's own, zeros past length."""

    rows: Tensor
    length: Tensor
    tokens: Tensor


def accept(tree: Tree, picks: Tensor, depth_limit: Tensor, real: Tensor, steps: int) -> Path:
    """Keep the longest path that the target would have produced itself; greedy and sampled alike.

    picks: [B, D], the target's token at every node; depth_limit: [B], deeper nodes never match; real: [B] bool.
    Among equally deep paths (siblings are distinct, so there are none with one parent) the lowest node wins.
    """
    match = (tree.tokens == picks.gather(1, tree.parents)) & (tree.depths <= depth_limit[:, None])
    match[:, 0] = True
    kept = tree.every_ancestor(match)
    last = deepest(kept, tree.depths)
    rows = path_rows(tree, last, steps)
    depth = tree.depths.gather(1, last[:, None])
    bonus = picks.gather(1, last[:, None])
    level = torch.arange(steps + 1, device=rows.device)
    drafted = torch.nn.functional.pad(tree.tokens.gather(1, rows)[:, 1:], (0, 1))
    tokens = torch.where(level < depth, drafted, torch.where(level == depth, bonus, 0))
    return Path(rows, torch.where(real, depth[:, 0] + 1, 0), tokens)


def deepest(kept: Tensor, depths: Tensor) -> Tensor:
    """[B]: the kept node of greatest depth, the lowest among equals."""
    nodes = depths.shape[1]
    rank = torch.arange(nodes - 1, -1, -1, device=depths.device)
    return torch.where(kept, depths * nodes + rank, -1).argmax(1)


def path_rows(tree: Tree, last: Tensor, steps: int) -> Tensor:
    """[B, S+1]: the nodes from the root to `last`, by depth; zeros below it."""
    nodes = tree.tokens.shape[1]
    on_path = tree.mask().gather(1, last[:, None, None].expand(-1, 1, nodes))[:, 0]
    past_the_end = steps + 1
    depth = torch.where(on_path, tree.depths, past_the_end)
    rows = torch.zeros(tree.tokens.shape[0], past_the_end + 1, dtype=torch.int64, device=last.device)
    return rows.scatter_(1, depth, torch.arange(nodes, device=last.device).expand_as(depth))[:, :past_the_end]
