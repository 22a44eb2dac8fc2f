"""The time of a round of any tree: a prediction, corrected by the rounds that have run.

On a GPU a clock measures the times that correct the prediction.  On a CPU the time is computed from the rows of a
round, so that equal requests run equal rounds.
"""

from collections import deque
from dataclasses import dataclass
from statistics import fmean, median

from espalier.config import RoundCosts
from espalier.layout import TreeShape

# The correction of a tree is an average over its last CORRECTION_ROUNDS rounds.
CORRECTION_ROUNDS = 9
# Real times are at most this many times the predicted times (startup/tree_cost.py).
MAX_PREDICTION_ERROR = 1.15


@dataclass(frozen=True)
class CpuCosts:
    """RoundCosts on a CPU, in units of the time of a round with one row.

    row_cost: the cost of one more row; lookup_cost: the cost of looking for guesses; draft_cost: the cost of a draft
    pass, 0 for drafts that run none.  The values were measured on one core with models of at most 135M parameters.
    """

    row_cost: float = 0.03
    lookup_cost: float = 0.05
    draft_cost: float = 0.0
    uses_clock: bool = False

    def seconds(self, tree: TreeShape, batch: int, context: float) -> float:
        return self.seconds_for_rows(tree, batch, batch * tree.rows)

    def seconds_for_rows(self, tree: TreeShape, batch: int, rows: int) -> float:
        # A draft also runs once over the decided tokens.
        passes = tree.extends + (tree.steps - 1 if tree.drafts and tree.steps else 0)
        return 1 + self.row_cost * (rows - 1) + self.lookup_cost * (tree.steps > 0) + self.draft_cost * passes


class RoundTimes:
    """The corrected time of rounds.

    latest: by batch and tree, the latest times, each divided by the predicted time; corrections: their averages.
    """

    def __init__(self, costs: RoundCosts) -> None:
        self.costs = costs
        self.latest: dict[tuple[int, TreeShape], deque[float]] = {}
        self.corrections: dict[tuple[int, TreeShape], float] = {}

    def seconds(self, tree: TreeShape, batch: int, context: float) -> float:
        """The expected time of a round.  context: the mean number of tokens of a request."""
        predicted, own = self.costs.seconds(tree, batch, context), self.corrections.get((batch, tree))
        if own is not None:
            return predicted * own
        near = [(max(batch / at, at / batch), found) for (at, ran), found in self.corrections.items() if ran == tree]
        if near:
            return predicted * min(near)[1]
        return self._seconds_of_new_tree(predicted, batch, context) if self.costs.uses_clock else predicted

    def _seconds_of_new_tree(self, predicted: float, batch: int, context: float) -> float:
        """The expected time of a tree that has not run.

        Where the trees that ran take longer than any error of a prediction explains, the host is slower than the GPU,
        and this tree waits as long.  Where they take less, all predictions are as much too long.
        """
        others = (
            (max(batch / at, at / batch), found, self.costs.seconds(ran, at, context))
            for (at, ran), found in self.corrections.items()
        )
        _, found, seconds = min(others, default=(0.0, 1.0, 0.0))
        return predicted * min(found * MAX_PREDICTION_ERROR, 1.0) + max(found - MAX_PREDICTION_ERROR, 0.0) * seconds

    def add(self, tree: TreeShape, batch: int, context: float, seconds: float) -> None:
        """Count the time of a round."""
        predicted = self.costs.seconds(tree, batch, context)
        if (batch, tree) not in self.latest:
            # What was expected counts as two rounds, so that one late round does not rule the tree out.
            expected = self.seconds(tree, batch, context) / predicted
            self.latest[batch, tree] = deque([expected] * 2, CORRECTION_ROUNDS)
        latest = self.latest[batch, tree]
        latest.append(seconds / predicted)
        # A pause of the host makes a clocked round several times as long, so clocked rounds need the median.
        self.corrections[batch, tree] = median(latest) if self.costs.uses_clock else fmean(latest)
