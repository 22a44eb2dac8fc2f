"""Predicts the time of a round of any tree, and corrects the predictions by the times of the rounds that have run.

On a GPU, a clock measures these times.  On a CPU, they are computed from the number of rows of a round, so that equal
requests always run equal rounds."""

from collections import deque
from dataclasses import dataclass
from statistics import fmean, median

from espalier.config import RoundCosts
from espalier.layout import TreeShape

# The correction of a tree comes from its last CORRECTION_ROUNDS rounds.
CORRECTION_ROUNDS = 9
# Real times are at most this many times the predicted times (startup/tree_cost.py).
MAX_PREDICTION_ERROR = 1.15


@dataclass(frozen=True)
class CpuCosts:
    """RoundCosts on a CPU.  The unit of all times is the time of a round with one row.

    row_cost: the time of one more row.  lookup_cost: the time to look for guesses.  draft_cost: the time of a draft
    pass; 0 for a drafter without a model.  The defaults were measured on one core, with models of at most 135M
    parameters."""

    row_cost: float = 0.03
    lookup_cost: float = 0.05
    draft_cost: float = 0.0
    uses_clock: bool = False

    def seconds(self, tree: TreeShape, batch: int, context: float) -> float:
        """Returns the time of a round of `batch` requests.  context, the tokens of a request, has no effect."""
        return self.seconds_for_rows(tree, batch, batch * tree.rows)

    def seconds_for_rows(self, tree: TreeShape, batch: int, rows: int) -> float:
        """Returns the time of a round whose verify pass has `rows` rows in all."""
        # A draft with depth d runs d - 1 passes over beams, and one pass over the decided tokens.
        passes = tree.extends + (tree.steps - 1 if tree.drafts and tree.steps else 0)
        return 1 + self.row_cost * (rows - 1) + self.lookup_cost * (tree.steps > 0) + self.draft_cost * passes


class RoundTimes:
    """Predicts the time of a round, and corrects the predictions.

    latest_ratios: by (batch, tree): the real time divided by the predicted time, for each of the latest rounds.
    corrections: by (batch, tree): the median of these ratios if a clock measures the times, else their mean."""

    def __init__(self, costs: RoundCosts) -> None:
        self.costs = costs
        self.latest_ratios: dict[tuple[int, TreeShape], deque[float]] = {}
        self.corrections: dict[tuple[int, TreeShape], float] = {}

    def seconds(self, tree: TreeShape, batch: int, context: float) -> float:
        """Returns the expected time of a round.  context: the mean number of tokens of a request."""
        predicted, correction = self.costs.seconds(tree, batch, context), self.corrections.get((batch, tree))
        if correction is not None:
            return predicted * correction
        near = [
            (max(batch / size, size / batch), ratio)
            for (size, shape), ratio in self.corrections.items()
            if shape == tree
        ]
        if near:
            return predicted * min(near)[1]
        return self._seconds_of_new_tree(predicted, batch, context) if self.costs.uses_clock else predicted

    def _seconds_of_new_tree(self, predicted: float, batch: int, context: float) -> float:
        """Returns the expected time of a tree that has not run, from the rounds of the batch that is nearest in size.

        If those rounds take more than MAX_PREDICTION_ERROR times their predicted time, the host is slower than the GPU.
        Then the new tree takes the same additional time.  If those rounds take less than their predicted time divided
        by MAX_PREDICTION_ERROR, the prediction for the new tree is lowered too."""
        others = (
            (max(batch / size, size / batch), ratio, self.costs.seconds(shape, size, context))
            for (size, shape), ratio in self.corrections.items()
        )
        _, ratio, seconds = min(others, default=(0.0, 1.0, 0.0))
        return predicted * min(ratio * MAX_PREDICTION_ERROR, 1.0) + max(ratio - MAX_PREDICTION_ERROR, 0.0) * seconds

    def add(self, tree: TreeShape, batch: int, context: float, seconds: float) -> None:
        """Counts `seconds`, the real time of a round.  context: the mean number of tokens of a request."""
        predicted = self.costs.seconds(tree, batch, context)
        if (batch, tree) not in self.latest_ratios:
            # The expected time counts as two rounds, so that one late round does not rule the tree out.
            expected = self.seconds(tree, batch, context) / predicted
            self.latest_ratios[batch, tree] = deque([expected] * 2, CORRECTION_ROUNDS)
        latest = self.latest_ratios[batch, tree]
        latest.append(seconds / predicted)
        # A pause of the host makes a clocked round several times as long, so clocked rounds need the median.
        self.corrections[batch, tree] = median(latest) if self.costs.uses_clock else fmean(latest)
