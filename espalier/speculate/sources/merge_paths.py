"""Joins paths of tokens with a draft's trees: the best nodes of both become the tree to verify.

Nodes with the same tokens from the root down become one node, with the higher of their scores.  All sizes follow from
the layout, so a CUDA graph captures this.
"""

import torch
from torch import Tensor

from espalier.kernels.attention.ancestor_bits import ancestor_mask, pack_bits, unpack_bits
from espalier.kernels.ops.tree import VOID, Tree, comparable_scores
from espalier.slots import UNDRAFTED_OFFSET
from espalier.speculate.sources.base import Paths

# Pads the token sequence of a node to the greatest depth.  This number differs from every token and from VOID.
SEQUENCE_PADDING = -2


def merge_paths(
    tree: Tree, node_kinds: Tensor, paths: Paths, survival: Tensor, steps: int, is_drafted: bool = True
) -> tuple[Tree, Tensor]:
    """Makes trees from the best nodes of the draft's trees and of the paths.  Returns (trees, kinds of their nodes).

    node_kinds: [B, D], the kinds of the draft's nodes (calibrate.py).  survival: [NODE_KINDS, S] float32, the
    log-probability that a node of a kind is accepted at a depth if its parent is accepted.  steps: the greatest depth.
    is_drafted: whether `tree` comes from a draft pass, and is not only a root.
    Nodes are ordered by score.  Among equal scores, the draft's nodes come first, then the paths' nodes, in their
    order.  So a parent comes before its children."""
    sequences = torch.cat((tree_sequences(tree, steps), path_sequences(paths.tokens[..., :steps])), 1)
    exists = _existing_nodes(tree, paths, steps)
    size = exists.shape[1]
    same = (sequences[:, :, None] == sequences[:, None]).all(-1) & exists[:, :, None] & exists[:, None]
    # Among nodes with the same tokens, only the first stays.
    order = torch.arange(size, device=exists.device)
    first_equal = torch.where(same, order, size - 1).amin(-1)
    num_drafted = tree.tokens.shape[1]
    path_kinds = paths.kinds[..., None].expand(paths.tokens[..., :steps].shape)
    if is_drafted:
        is_undrafted = (first_equal[:, num_drafted:] >= num_drafted).view(path_kinds.shape)
        path_kinds = path_kinds + UNDRAFTED_OFFSET * (is_undrafted & (path_kinds > 0))
    depths = torch.arange(steps, device=exists.device)
    path_scores = survival[path_kinds, depths].cumsum(-1).flatten(1)
    scores = comparable_scores(torch.cat((tree.scores, path_scores), 1)).masked_fill(~exists, -torch.inf)
    best_scores = torch.where(same, scores[:, None], -torch.inf).amax(-1)
    best_scores = best_scores.masked_fill(first_equal != order, -torch.inf)
    # The root always stays.
    best_scores[:, 0] = torch.inf
    chosen = torch.sort(best_scores, dim=1, descending=True, stable=True).indices[:, :num_drafted]
    node_kinds = torch.cat((node_kinds, path_kinds.flatten(1)), 1)
    return _build_tree(tree, paths, chosen, first_equal, best_scores, steps), node_kinds.gather(1, chosen)


def tree_sequences(tree: Tree, steps: int) -> Tensor:
    """Returns [B, D, S]: for each node the tokens on its path from depth 1 to the node, then SEQUENCE_PADDING."""
    nodes = tree.tokens.shape[1]
    lineage = unpack_bits(tree.ancestors, nodes)
    at = torch.where(lineage, tree.depths[:, None], 0)
    sequences = tree.tokens.new_full((*tree.tokens.shape, steps + 1), SEQUENCE_PADDING)
    return sequences.scatter_(2, at, torch.where(lineage, tree.tokens[:, None], SEQUENCE_PADDING))[..., 1:]


def path_sequences(tokens: Tensor) -> Tensor:
    """Returns [B, P · S, S]: for each node of the paths with tokens [B, P, S], the tokens of the path from depth 1 to
    the node, then SEQUENCE_PADDING."""
    steps = tokens.shape[2]
    above = torch.ones(steps, steps, dtype=torch.bool, device=tokens.device).tril()
    return torch.where(above, tokens[:, :, None], SEQUENCE_PADDING).flatten(1, 2)


def _existing_nodes(tree: Tree, paths: Paths, steps: int) -> Tensor:
    """Returns [B, D + P · S] bool: whether a node of the trees, or of the paths, is not void.  All nodes of a path of
    kind 0 are void."""
    drafted = tree.tokens != VOID
    # The root exists, whatever its token.
    drafted[:, 0] = True
    is_guessed = (paths.tokens[..., :steps] != VOID) & (paths.kinds > 0)[..., None]
    return torch.cat((drafted, is_guessed.cumprod(2).bool().flatten(1)), 1)


def _build_tree(tree: Tree, paths: Paths, chosen: Tensor, first_equal: Tensor, best_scores: Tensor, steps: int) -> Tree:
    """Returns the tree of the nodes `chosen` [B, D], in this order.  Parents come before their children.

    first_equal: for each node, the first node with the same token sequence.  best_scores: -inf for dropped nodes."""
    (batch, size), drafted = best_scores.shape, tree.tokens.shape[1]
    device = best_scores.device
    order = torch.arange(size - drafted, device=device)
    # For each node of a path, its parent: the node before it in the path, or the root for the first node.
    before = torch.where(order % steps == 0, 0, drafted + order - 1).expand(batch, -1)
    parents = first_equal.gather(1, torch.cat((tree.parents, before), 1))
    place = torch.zeros_like(first_equal).scatter_(
        1, chosen, torch.arange(chosen.shape[1], device=device).expand_as(chosen)
    )
    place[:, 0] = 0
    scores = best_scores.gather(1, chosen)
    void = scores == -torch.inf
    tokens = torch.cat((tree.tokens, paths.tokens[..., :steps].flatten(1)), 1).gather(1, chosen)
    depths = torch.cat((tree.depths, (order % steps + 1).expand(batch, -1)), 1).gather(1, chosen)
    scores[:, 0] = 0
    parents = place.gather(1, parents.gather(1, chosen)).masked_fill(void, 0)
    ancestors = pack_bits(ancestor_mask(parents, void, steps))
    return Tree(tokens.masked_fill(void, VOID), parents, depths.masked_fill(void, 1), scores, ancestors)
