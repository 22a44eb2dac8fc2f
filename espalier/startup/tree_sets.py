"""Selects the trees from which the engine chooses while it runs.  Each bucket of batch sizes has only a few, because a
GPU needs a CUDA graph for each tree.

Acceptance is not known at the start.  So many drafts are supposed, from one that guesses noise to one that is nearly
always right.  A bucket gets the set of trees whose worst loss against the best tree is least.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from espalier.engine.acceptance import FIRST_CHILD, at_level, gains
from espalier.layout import PLAIN, TreeShape, next_bucket
from espalier.startup.tree_cost import CONTEXT, ChipFigures, PassWeights, smaller_trees

# The most trees of a bucket, plain decoding included, the tree without a draft pass aside.
MOST_TREES = 4
# Rows a request of the trees whose rows are shared out.  At 8 they gain at most 2%, at 16 nothing (docs/log.md).
SHARED_ROWS = 4
# The supposed drafts: how often the first child is accepted at depth 1.
LEVELS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
# Any single tree may be this many times as fast as predicted.
UNSURE = 1.1

Choices = tuple[tuple[int, tuple[TreeShape, ...]], ...]


@dataclass(frozen=True)
class PredictedCosts:
    """RoundCosts of a GPU, predicted from the sizes of the models and the chip's figures."""

    weights: PassWeights
    chip: ChipFigures
    by_clock: bool = True

    def seconds(self, tree: TreeShape, batch: int, context: float) -> float:
        return self.weights.round_seconds(tree, batch, self.chip, context)

    def of_rows(self, tree: TreeShape, batch: int, rows: int) -> float:
        raise NotImplementedError


def tree_sets(
    configured: TreeShape, costs: PredictedCosts, max_batch: int, most_rows: int, shares: bool, looks_up: bool
) -> Choices:
    """The value of RoundLayout.choices: (least batch of a bucket, its trees), the trees in order of predicted speed.

    most_rows: the most nodes that the trees of a batch may have together; shares: whether rows may be shared out;
    looks_up: whether there are sources beside a draft.
    """
    trees = [configured, *smaller_trees(configured, costs.weights)]
    halved = configured
    sets: dict[int, tuple[TreeShape, ...]] = {}
    least = 1
    for bucket in sorted({next_bucket(batch) for batch in range(1, max_batch + 1)}):
        while halved.num_draft_tokens * min(bucket, max_batch) > most_rows:
            halved = replace(halved, num_draft_tokens=halved.num_draft_tokens // 2)
        fitting = [tree for tree in dict.fromkeys((halved, *trees)) if tree.num_draft_tokens <= halved.num_draft_tokens]
        trees_of_bucket = [tree for tree in fitting if tree != PLAIN]
        if shares and bucket > 1:
            trees_of_bucket += [shared for tree in trees_of_bucket for shared in sharing(tree)]
        shapes = best_set(trees_of_bucket, costs, bucket)
        if looks_up:
            shapes += (replace(halved, drafts=False),)
        if shapes != next(reversed(sets.values()), None):
            sets[least] = shapes
        least = bucket + 1
    return tuple(sets.items())


def sharing(tree: TreeShape) -> list[TreeShape]:
    """The tree with its rows shared out, if it has enough nodes for that."""
    return [replace(tree, shared_rows=SHARED_ROWS)] if tree.num_draft_tokens >= 2 * SHARED_ROWS else []


def best_set(trees: Sequence[TreeShape], costs: PredictedCosts, batch: int) -> tuple[TreeShape, ...]:
    """Plain decoding and the trees that lose least beside it, in order of predicted speed.  At most one of them shares
    out its rows: such trees differ little."""
    every = (*trees, PLAIN)
    known, *supposed = (_rates(every, costs, batch, level) for level in (FIRST_CHILD[0], *LEVELS))
    supposed += [{**rates, tree: rates[tree] * UNSURE} for rates in supposed for tree in trees]

    def shares(kept: Sequence[TreeShape]) -> list[float]:
        return [max(rates[tree] for tree in (*kept, PLAIN)) / max(rates.values()) for rates in supposed]

    fixed = sum(not tree.shared_rows for tree in trees)
    sets = (
        each
        for each in combinations(trees, min(MOST_TREES - 1, fixed + (fixed < len(trees))))
        if sum(tree.shared_rows > 0 for tree in each) <= 1
    )
    kept = max(sets, key=lambda each: (min(shares(each)), sum(shares(each))))
    return tuple(sorted((*kept, PLAIN), key=lambda tree: -known[tree]))


def _rates(trees: Sequence[TreeShape], costs: PredictedCosts, batch: int, level: float) -> dict[TreeShape, float]:
    """A request's tokens a second, by tree.  level: how often the first child is accepted at depth 1."""
    first_child = at_level(level, max(tree.steps for tree in trees))
    return {tree: (1 + gains(tree, first_child)[-1]) / costs.seconds(tree, batch, CONTEXT) for tree in trees}
