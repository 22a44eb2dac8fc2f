"""Estimates the time of a round of any tree: the predicted time, corrected by the times of rounds that ran.

On a GPU the times of rounds are measured with a clock.  On a CPU they are computed from the rows of a round, so that
equal requests run equal rounds.
"""

from collections import deque
from dataclasses import dataclass
from statistics import fmean, median

from espalier.config import RoundCosts
from espalier.layout import TreeShape

# A form's correction is made from its last MEMORY rounds.
MEMORY = 9
# A real time is at most this many times the predicted time, unless the host is slow (startup/tree_cost.py).
LARGEST_ERROR = 1.15


@dataclass(frozen=True)
class CpuCosts:
    """RoundCosts on a CPU.  The unit is the time of a round of one row.

    row: the cost of one more row; lookup: the cost of looking up guesses; draft: the cost of a draft pass, 0 for
    drafters without a model.  Measured on one core with models of at most 135M parameters.
    """

    row: float = 0.03
    lookup: float = 0.05
    draft: float = 0.0
    by_clock: bool = False

    def seconds(self, tree: TreeShape, batch: int, context: float) -> float:
        return self.of_rows(tree, batch, batch * tree.rows)

    def of_rows(self, tree: TreeShape, batch: int, rows: int) -> float:
        # A draft also runs over the tokens that were decided.
        passes = tree.extends + (tree.steps - 1 if tree.drafts and tree.steps else 0)
        return 1 + self.row * (rows - 1) + self.lookup * (tree.steps > 0) + self.draft * passes


class RoundTimes:
    """The measured times of rounds.

    latest: for each batch and tree, the last measured times divided by the predicted times; corrections: the averages
    of these ratios.
    """

    def __init__(self, costs: RoundCosts) -> None:
        self.costs = costs
        self.latest: dict[tuple[int, TreeShape], deque[float]] = {}
        self.corrections: dict[tuple[int, TreeShape], float] = {}

    def seconds(self, tree: TreeShape, batch: int, context: float) -> float:
        """Returns the expected time of a round.  context: tokens of a request, the mean over the batch.

        Without a measured ratio for this batch and tree, the ratio of the nearest batch with the same tree is used.
        """
        predicted, own = self.costs.seconds(tree, batch, context), self.corrections.get((batch, tree))
        if own is not None:
            return predicted * own
        near = [(max(batch / at, at / batch), found) for (at, form), found in self.corrections.items() if form == tree]
        if near:
            return predicted * min(near)[1]
        return predicted + (self._waits(batch, context) if self.costs.by_clock else 0.0)

    def _waits(self, batch: int, context: float) -> float:
        """Returns the seconds by which all rounds are longer than predicted because the host is slower than the GPU."""
        waits = (
            (max(batch / at, at / batch), (found - LARGEST_ERROR) * self.costs.seconds(form, at, context))
            for (at, form), found in self.corrections.items()
        )
        return max(min(waits, default=(0.0, 0.0))[1], 0.0)

    def add(self, tree: TreeShape, batch: int, context: float, seconds: float) -> None:
        """Counts the measured time of a round."""
        latest = self.latest.setdefault((batch, tree), deque(maxlen=MEMORY))
        latest.append(seconds / self.costs.seconds(tree, batch, context))
        # A pause of the host makes a measured round several times as long, so the median is taken.
        self.corrections[batch, tree] = median(latest) if self.costs.by_clock else fmean(latest)
