"""Accepts the longest path of a tree that the target would have produced itself."""

from dataclasses import dataclass

from torch import Tensor

from espalier.kernels.tree import accept as kernel
from espalier.sampling.pick import SampledTokens
from espalier.speculate.tree import Tree


@dataclass(frozen=True)
class Path:
    """An accepted path.

    rows: [B, S+1], its nodes from the root down; zeros past length.
    length: [B], tokens emitted (the accept length); 0 for padding.
    tokens: [B, S+1], the emitted tokens: the accepted draft tokens, then one token of the target; zeros past length.
    num_finite: [B], how many of these tokens, from the first, were sampled from finite logits.
    """

    rows: Tensor
    length: Tensor
    tokens: Tensor
    num_finite: Tensor


def accept(tree: Tree, picked: SampledTokens, depth_limit: Tensor, real: Tensor, steps: int) -> Path:
    """Keep the longest path that the target would have produced itself, for greedy and for sampled requests.

    picked: [B, D], the target's token at every node; depth_limit: [B], deeper nodes never match; real: [B] bool, False
    for padding.  Siblings have distinct tokens, so at most one child of a node matches; should two paths be equally
    deep, the one with the lowest node index wins.
    """
    nodes = (tree.tokens, tree.parents, tree.depths, tree.ancestors)
    return Path(*kernel.accept(*nodes, *picked, depth_limit, real, steps))
