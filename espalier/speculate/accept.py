"""Which part of a tree is kept: the longest path that the target would have produced itself."""

from dataclasses import dataclass

from torch import Tensor

from espalier.kernels.tree import accept as kernel
from espalier.sampling.pick import SampledTokens
from espalier.speculate.tree import Tree


@dataclass(frozen=True)
class Path:
    """rows: [B, S+1] nodes from the root down, zeros past length; length: [B], tokens emitted (0 for padding); tokens:
    [B, S+1], what is emitted: accepted draft tokens, then the target's own, zeros past length; num_finite: [B], how
    many of them, from the first, were picked from finite logits."""

    rows: Tensor
    length: Tensor
    tokens: Tensor
    num_finite: Tensor


def accept(tree: Tree, picked: SampledTokens, depth_limit: Tensor, real: Tensor, steps: int) -> Path:
    """Keep the longest path that the target would have produced itself; greedy and sampled alike.

    picked: [B, D], the target's token at every node; depth_limit: [B], deeper nodes never match; real: [B] bool.
    Among equally deep paths (siblings are distinct, so there are none with one parent) the lowest node wins.
    """
    nodes = (tree.tokens, tree.parents, tree.depths, tree.ancestors)
    return Path(*kernel.accept(*nodes, *picked, depth_limit, real, steps))
