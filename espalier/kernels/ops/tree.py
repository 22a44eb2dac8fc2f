"""Operations on a round's draft tree: select the beams of a level, select the tree's nodes, and accept a path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.attention.ancestor_bits import (
    ancestor_mask,
    pack_bits,
    self_only_bits,
    true_for_all_ancestors,
    unpack_bits,
)
from espalier.kernels.runtime.launch import require
from espalier.kernels.runtime.op import op
from espalier.layout import ANCESTOR_BITS

# The token of a void node.  Void nodes fill up a tree that has fewer nodes than its layout.
VOID = -1
# One value for each of the n candidates of a draft, which are called the pool: one tensor [B, n], or one tensor for
# each level.
Pool = Sequence[Tensor]
# The most scores that ordered_topk sorts.  For more scores it uses torch.topk.
MAX_SORTED = 64


class Tree(NamedTuple):
    """The draft trees of a batch, with D nodes each.  Node 0 is the root.

    tokens: [B, D] int64, the token of each node; -1 for void nodes.
    parents: [B, D] int64, the index of the parent node; 0 for the root and for void nodes.
    depths: [B, D] int64, the distance from the root; 1 for void nodes.
    scores: [B, D] float32, the log-probability of the path; 0 for the root, -inf for void nodes.
    ancestors: [B, D, W] int64, W words of bits per node.  Bit j of node i is set if node j is an ancestor of node i, or
    node i itself."""

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    scores: Tensor
    ancestors: Tensor

    @classmethod
    def empty(cls, root: Tensor, num_nodes: int) -> Tree:
        """Returns uninitialised trees for a kernel to write.  root: [B] int64."""
        batch, num_ancestor_words = root.shape[0], -(-num_nodes // ANCESTOR_BITS)
        tokens, parents, depths = (root.new_empty(batch, num_nodes) for _ in range(3))
        scores = root.new_empty(batch, num_nodes, dtype=torch.float32)
        return cls(tokens, parents, depths, scores, root.new_empty(batch, num_nodes, num_ancestor_words))

    @property
    def num_ancestor_words(self) -> int:
        return self.ancestors.shape[2]

    def first_nodes(self, num_nodes: int) -> Tree:
        """Returns the trees of the first `num_nodes` nodes."""
        first = Tree(*(values[:, :num_nodes].contiguous() for values in self))
        return first._replace(ancestors=first.ancestors[..., : -(-num_nodes // ANCESTOR_BITS)].contiguous())

    def best_nodes(self, num_kept: int) -> Tensor:
        """Returns the flat indices [num_kept], ascending, of the nodes with the highest scores among all B · D nodes.

        All B roots are kept, so num_kept must be at least B.  The ancestors of a kept node are also kept, because their
        scores are not lower, and among equal scores the lower index is kept."""
        scores = comparable_scores(self.scores)
        scores[:, 0] = torch.inf
        return torch.sort(scores.flatten(), descending=True, stable=True).indices[:num_kept].sort().values

    def keep_nodes(self, kept_nodes: Tensor) -> Tree:
        """Returns trees whose nodes outside `kept_nodes` (from best_nodes) are void.  Nodes keep their indices."""
        is_dropped = torch.ones_like(self.tokens, dtype=torch.bool).flatten().index_fill(0, kept_nodes, False)
        return self._void_nodes(is_dropped.view_as(self.tokens))

    def limit_depth(self, max_depth: Tensor) -> Tree:
        """Returns trees whose nodes deeper than `max_depth` [B] are void.  The root always stays."""
        return self._void_nodes(self.depths > max_depth.clamp(min=0)[:, None])

    def _void_nodes(self, is_void: Tensor) -> Tree:
        """Returns trees in which the nodes where is_void [B, D] is True are void."""
        itself = self_only_bits(0, self.tokens.shape[1], self.num_ancestor_words, self.tokens.device)
        return Tree(
            self.tokens.masked_fill(is_void, VOID),
            self.parents.masked_fill(is_void, 0),
            self.depths.masked_fill(is_void, 1),
            self.scores.masked_fill(is_void, -torch.inf),
            torch.where(is_void[..., None], itself, self.ancestors),
        )

    def ancestor_mask(self) -> Tensor:
        """Returns [B, D, D] bool: entry [b, i, j] says whether node j is an ancestor of node i, or node i itself."""
        return unpack_bits(self.ancestors, self.tokens.shape[1])

    def positions(self, prefix_len: Tensor) -> Tensor:
        """Returns [B, D]: the position of each node's token in its request.  prefix_len: [B], the root's position."""
        # A tree of one node is only a root, whose depth is 0.
        return prefix_len[:, None] if self.tokens.shape[1] == 1 else prefix_len[:, None] + self.depths


def check_pool_sizes(
    root: Tensor, tokens: Pool, scores: Pool, beams: Pool, topk: int, num_nodes: int
) -> tuple[int, int, int]:
    """Check the arguments of `select_tree`.  Returns (batch size, candidates per request, levels of candidates)."""
    batch, size, by_level = root.shape[0], sum(part.shape[1] for part in tokens), len(tokens) > 1
    for level, (level_tokens, level_scores) in enumerate(zip(tokens, scores, strict=True)):
        num_values = size if not by_level else topk**2 if level else topk
        require("select_tree: tokens", level_tokens, (batch, num_values), torch.int64, root)
        require("select_tree: scores", level_scores, (batch, num_values), torch.float32, root)
    num_beams = size // topk - 1
    if sum(part.shape[1] for part in beams) != num_beams or (by_level and len(beams) != len(tokens) - 1):
        raise EspalierError(f"select_tree: beams of {size} candidates at topk={topk} must be {num_beams}, by level")
    for part in beams:
        require("select_tree: beams", part, (batch, topk if by_level else num_beams), torch.int64, root)
    steps, excess = 1 + (size - topk) // topk**2, (size - topk) % topk**2
    if excess or not 1 <= num_nodes <= size + 1:
        raise EspalierError(
            f"select_tree: {size} candidates at topk={topk} are not whole levels, or too few for {num_nodes} nodes "
            "with the root: draft and select with the same layout"
        )
    return batch, size, steps


class SelectedBeams(NamedTuple):
    """The beams of a level, best first: the K best of the P · K candidates of `select_beams` (K children of each of P
    parents).

    scores: [B, K] float32, path scores.  candidate_indices: [B, K] int64, the index of each beam among the candidates.
    parents: [B, K] int64, the index of each beam's parent, 0 to P - 1.  ancestor_bits: [B, K, W] int64, the bits of the
    draft rows that each beam attends to: its ancestors and itself."""

    scores: Tensor
    candidate_indices: Tensor
    parents: Tensor
    ancestor_bits: Tensor


def comparable_scores(scores: Tensor) -> Tensor:
    """Returns the scores in a form that can be compared: NaN becomes -inf, -0.0 becomes 0.0."""
    return scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).add_(0.0)


def ordered_topk(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Returns (values, indices) of the k best scores along the last dimension.  Of equal scores, the lower index wins.

    torch.topk alone does not define the order of equal scores.  scores: float32; NaN counts as -inf.  If there are
    fewer than k scores, the remaining values are -inf with index 0."""
    width = scores.shape[-1]
    scores = comparable_scores(scores)
    indices = (
        scores.sort(dim=-1, descending=True, stable=True).indices
        if width <= MAX_SORTED
        else _topk_by_integer_keys(scores, k)
    )
    indices = indices[..., :k]
    values = scores.gather(-1, indices)
    num_missing = max(k - width, 0)
    if num_missing:
        values = torch.nn.functional.pad(values, (0, num_missing), value=-torch.inf)
        indices = torch.nn.functional.pad(indices, (0, num_missing))
    return values, indices


def _topk_by_integer_keys(scores: Tensor, k: int) -> Tensor:
    """Returns the indices of ordered_topk, by torch.topk of integers that are all different.
    For a vocabulary, a sort would take 3 to 15 times as long.  For up to MAX_SORTED scores, a sort takes less time."""
    width, bits = scores.shape[-1], scores.contiguous().view(torch.int32)
    # Integers in the order of the floats, computed in place, because allocating tensors would take most of the time.
    ordered = (bits >> 31).bitwise_and_(0x7FFFFFFF).bitwise_xor_(bits)
    # The low half of a key breaks ties by index.
    keys = torch.arange(width - 1, -1, -1, device=scores.device).add(ordered, alpha=1 << 32)
    return keys.topk(min(k, width), -1).indices


class AcceptedPath(NamedTuple):
    """The accepted path of each request.  All tensors are int64.  S: the steps, which are the greatest depth.

    rows: [B, S+1], the indices of the path's nodes from the root down; 0 after the last node.
    length: [B], the number of emitted tokens (the accept length); 0 for entries that pad the batch.
    tokens: [B, S+1], the emitted tokens: the accepted draft tokens, then one token of the target; then zeros.
    num_finite: [B], the number of emitted tokens before the first token that was sampled from NaN or infinite logits.
    """

    rows: Tensor
    length: Tensor
    tokens: Tensor
    num_finite: Tensor


def deepest_node(is_kept: Tensor, depths: Tensor) -> Tensor:
    """Returns the index [B] of each request's deepest kept node; among equally deep nodes, the lowest index."""
    nodes = depths.shape[1]
    rank = torch.arange(nodes - 1, -1, -1, device=depths.device)
    return torch.where(is_kept, depths * nodes + rank, -1).argmax(1)


def path_nodes(ancestors: Tensor, depths: Tensor, last_node: Tensor, steps: int) -> Tensor:
    """Returns the nodes [B, S+1] from the root to node `last_node` [B], indexed by depth; zeros at greater depths."""
    batch, nodes = depths.shape
    path_bits = ancestors.gather(1, last_node[:, None, None].expand(-1, 1, ancestors.shape[2]))[:, 0]
    # Nodes off the path are written to an extra column, which is dropped.
    extra_column = steps + 1
    depth = torch.where(unpack_bits(path_bits, nodes), depths, extra_column)
    by_depth = torch.zeros(batch, extra_column + 1, dtype=torch.int64, device=last_node.device)
    return by_depth.scatter_(1, depth, torch.arange(nodes, device=last_node.device).expand_as(depth))[:, :extra_column]


@op("espalier.kernels.tree.select_tree")
def select_tree(root: Tensor, tokens: Pool, scores: Pool, beams: Pool, topk: int, num_nodes: int) -> Tree:
    """Returns the trees of the root and the best num_nodes - 1 candidates.  Of equal scores, the lower index is better.

    root: [B] int64, the root's token.  tokens: [B, n] int64 and scores: [B, n] float32, the pool of n candidates.
    Level 1 has topk candidates.  Each later level has topk² candidates: topk for each beam of the level before.  A
    level has topk beams.  beams: [B, n / topk - 1] int64, for each beam its index among the candidates of its level.

    A child must not score above its parent, and comes after its parent in the pool.  So the ancestors of a selected
    candidate are selected too.  A candidate with score -inf or NaN does not exist.  If there are too few candidates,
    the remaining nodes are void: token -1, parent 0, depth 1, and only the node's own ancestor bit.  Raises
    EspalierError for wrong sizes.  Kernel and reference agree exactly."""
    _, _, steps = check_pool_sizes(root, tokens, scores, beams, topk, num_nodes)
    pool, path_scores = torch.cat(list(tokens), 1), comparable_scores(torch.cat(list(scores), 1))
    beam_indices = torch.cat([pool[:, :0], *beams], 1)
    chosen = torch.sort(path_scores, dim=1, descending=True, stable=True).indices[:, : num_nodes - 1].sort(1).values
    void = path_scores.gather(1, chosen) == -torch.inf
    nodes = torch.arange(1, num_nodes, device=chosen.device).expand_as(chosen)
    node_of = torch.zeros_like(pool).scatter_(1, chosen, nodes)
    # For each beam, the pool index of the first candidate of the beam's level.
    beam_level = torch.arange(beam_indices.shape[1], device=chosen.device) // topk
    first_candidates = torch.where(beam_level > 0, topk + (beam_level - 1) * topk**2, 0)
    # The parent of the candidates of level 1 is the root, node 0.
    parent_node = torch.nn.functional.pad(node_of.gather(1, beam_indices + first_candidates), (1, 0)).gather(
        1, chosen // topk
    )
    level = torch.where(chosen < topk, 1, 2 + (chosen - topk) // topk**2)
    # Prepend the root: node 0, depth 0, score 0, never void.
    parents, depths, void = (
        torch.nn.functional.pad(value, (1, 0))
        for value in (parent_node.masked_fill(void, 0), level.masked_fill(void, 1), void)
    )
    drafted = torch.cat((root[:, None], pool.gather(1, chosen)), 1).masked_fill(void, VOID)
    ancestor_bits = pack_bits(ancestor_mask(parents, void, steps))
    return Tree(drafted, parents, depths, torch.nn.functional.pad(path_scores.gather(1, chosen), (1, 0)), ancestor_bits)


@op("espalier.kernels.tree.select_tree")
def select_beams(
    tokens: Tensor, scores: Tensor, ancestor_bits: Tensor | None, path: Tensor, first_row: int, num_ancestor_words: int
) -> SelectedBeams:
    """Selects the beams of a level: the K best of P · K candidates, which are K children of each of P parents.

    The draft model runs over the beams next, as its rows first_row .. first_row + K - 1 of this round (draft rows).
    tokens: [B, P, K] int64.  scores: [B, P, K] float32, path scores.  ancestor_bits: [B, P, W] int64, the bits of the
    draft rows that each parent attends to; None: the only parent is the root, which is not a draft row.
    path: [B, rows] int64, the tokens of all draft rows; the beams' tokens are written here.  num_ancestor_words: W.
    Raises EspalierError for wrong sizes.  Kernel and reference agree exactly."""
    topk = tokens.shape[2]
    best, index = ordered_topk(scores.flatten(1), topk)
    parents = index // topk
    bits = self_only_bits(first_row, topk, num_ancestor_words, tokens.device).expand(tokens.shape[0], -1, -1)
    if ancestor_bits is not None:
        bits = bits | ancestor_bits.gather(1, parents[..., None].expand(-1, -1, num_ancestor_words))
    path[:, first_row : first_row + topk] = tokens.flatten(1).gather(1, index)
    return SelectedBeams(best, index, parents, bits)


@op("espalier.kernels.tree.accept", tensor="target_tokens")
def accept(
    tree: Tree, target_tokens: Tensor, is_finite: Tensor, max_accept_depth: Tensor, is_real: Tensor, steps: int
) -> AcceptedPath:
    """Returns the longest path that the target would have produced without a draft, for greedy and sampled requests.

    tree: its depths are at most `steps`.  target_tokens: [B, D] int64, the token that the target sampled after each
    node.  is_finite: [B, D] bool, whether this token was sampled from finite logits.  max_accept_depth: [B] int64;
    deeper nodes are never accepted.  is_real: [B] bool, False for entries that only pad the batch.
    Siblings have distinct tokens, so at most one child of a node matches.  Of equally deep paths, the path with the
    lower last node wins.  Raises EspalierError for wrong sizes.  Kernel and reference agree exactly."""
    tokens, parents, depths, _, ancestors = tree
    matches = (tokens == target_tokens.gather(1, parents)) & (depths <= max_accept_depth[:, None]) | (depths == 0)
    last = deepest_node(true_for_all_ancestors(ancestors, matches), depths)
    rows = path_nodes(ancestors, depths, last, steps)
    depth = depths.gather(1, last[:, None])
    last_token = target_tokens.gather(1, last[:, None])
    level = torch.arange(steps + 1, device=rows.device)
    draft_tokens = torch.nn.functional.pad(tokens.gather(1, rows)[:, 1:], (0, 1))
    emitted = torch.where(level < depth, draft_tokens, torch.where(level == depth, last_token, 0))
    length = torch.where(is_real, depth[:, 0] + 1, 0)
    num_finite = (is_finite.gather(1, rows) & (level < length[:, None])).cumprod(1).sum(1)
    return AcceptedPath(rows, length, emitted, num_finite)


@op("espalier.kernels.tree.accept")
def gather_rows(rows: Tensor, *parts: Tensor) -> Tensor:
    """Returns out [B, W, p·n] with out[b, w] = values[b, rows[b, w]], an exact copy.

    rows: [B, W] int64.  parts: `values` [B, D, p·n], cut into p tensors [B, D, n] with the same strides."""
    return torch.cat([part.gather(1, rows[..., None].expand(-1, -1, part.shape[2])) for part in parts], 2)
