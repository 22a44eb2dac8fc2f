"""The trees among which the engine chooses while it runs: for each bucket of batch sizes a few, because each one that a
GPU runs is a CUDA graph.

Acceptance is not known at the start.  So the set of a bucket is the one that loses least against all trees, over drafts
from those that guess noise to those that are nearly always right.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from espalier.engine.acceptance import FIRST_CHILD, at_level, gains
from espalier.layout import PLAIN, TreeShape, next_bucket
from espalier.startup.tree_cost import CONTEXT, ChipFigures, PassWeights, smaller_trees

# Trees of a bucket, plain decoding included.
MOST_TREES = 4
# How often the first child is accepted at depth 1.
LEVELS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
# How much faster than predicted any one tree may be.
UNSURE = 1.1

Choices = tuple[tuple[int, tuple[TreeShape, ...]], ...]


@dataclass(frozen=True)
class PredictedCosts:
    """RoundCosts of a GPU."""

    weights: PassWeights
    chip: ChipFigures
    by_clock: bool = True

    def seconds(self, tree: TreeShape, batch: int, context: float) -> float:
        return self.weights.round_seconds(tree, batch, self.chip, context)

    def of_guesses(self, batch: int, guesses: int | None) -> float:
        raise NotImplementedError


def tree_sets(configured: TreeShape, costs: PredictedCosts, max_batch: int, most_rows: int) -> Choices:
    """For RoundLayout.choices: the sets by the least batch of their bucket, the tree that is predicted to be fastest
    first.

    most_rows: nodes that all trees of a batch may have together.
    """
    trees = [configured, *smaller_trees(configured, costs.weights)]
    halved = configured
    sets: dict[int, tuple[TreeShape, ...]] = {}
    least = 1
    for bucket in sorted({next_bucket(batch) for batch in range(1, max_batch + 1)}):
        while halved.num_draft_tokens * min(bucket, max_batch) > most_rows:
            halved = replace(halved, num_draft_tokens=halved.num_draft_tokens // 2)
        fitting = [tree for tree in dict.fromkeys((halved, *trees)) if tree.num_draft_tokens <= halved.num_draft_tokens]
        shapes = best_set([tree for tree in fitting if tree != PLAIN], costs, bucket)
        if shapes != next(reversed(sets.values()), None):
            sets[least] = shapes
        least = bucket + 1
    return tuple(sets.items())


def best_set(trees: Sequence[TreeShape], costs: PredictedCosts, batch: int) -> tuple[TreeShape, ...]:
    """Plain decoding and those of the trees that lose least, the one that is predicted to be fastest first."""
    every = (*trees, PLAIN)
    known, *supposed = (_rates(every, costs, batch, level) for level in (FIRST_CHILD[0], *LEVELS))
    supposed += [{**rates, tree: rates[tree] * UNSURE} for rates in supposed for tree in trees]

    def shares(kept: Sequence[TreeShape]) -> list[float]:
        return [max(rates[tree] for tree in (*kept, PLAIN)) / max(rates.values()) for rates in supposed]

    sets = combinations(trees, min(MOST_TREES - 1, len(trees)))
    kept = max(sets, key=lambda each: (min(shares(each)), sum(shares(each))))
    return tuple(sorted((*kept, PLAIN), key=lambda tree: -known[tree]))


def _rates(trees: Sequence[TreeShape], costs: PredictedCosts, batch: int, level: float) -> dict[TreeShape, float]:
    """Tokens of a request a second.  level: how often the first child is accepted at depth 1."""
    first_child = at_level(level, max(tree.steps for tree in trees))
    return {tree: (1 + gains(tree, first_child)[-1]) / costs.seconds(tree, batch, CONTEXT) for tree in trees}
