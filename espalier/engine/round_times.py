"""The time of a round of any tree: the predicted time, corrected by the rounds that ran.

On a GPU a clock gives the times that correct the prediction.  On a CPU the time is computed from the rows of a round,
so that equal requests run equal rounds.
"""

from collections import deque
from dataclasses import dataclass
from statistics import fmean, median

from espalier.layout import PLAIN, RoundCosts, TreeShape

# A form's correction is made from its last MEMORY rounds.
MEMORY = 9


@dataclass(frozen=True)
class CpuCosts:
    """RoundCosts of n-gram lookup on a CPU.  The unit is a round of one row.

    row: the cost of one more row; lookup: the cost of looking for guesses.  Measured on one core with models of at most
    135M parameters.
    """

    row: float = 0.03
    lookup: float = 0.05
    by_clock: bool = False

    def seconds(self, tree: TreeShape, batch: int, context: float) -> float:
        return self.of_guesses(batch, None if tree == PLAIN else tree.num_draft_tokens - 1)

    def of_guesses(self, batch: int, guesses: int | None) -> float:
        plain = 1 + self.row * (batch - 1)
        return plain if guesses is None else plain + self.lookup + self.row * batch * guesses


class RoundTimes:
    """latest: for each batch and tree, the last times divided by the predicted ones; corrections: their averages."""

    def __init__(self, costs: RoundCosts) -> None:
        self.costs = costs
        self.latest: dict[tuple[int, TreeShape], deque[float]] = {}
        self.corrections: dict[tuple[int, TreeShape], float] = {}

    def seconds(self, tree: TreeShape, batch: int, context: float) -> float:
        """context: tokens of a request, the mean over the batch."""
        return self.costs.seconds(tree, batch, context) * self._correction(tree, batch)

    def _correction(self, tree: TreeShape, batch: int) -> float:
        """The correction of this batch, else of the nearest batch at which the tree ran, else 1."""
        own = self.corrections.get((batch, tree))
        if own is not None:
            return own
        others = [
            (max(batch / at, at / batch), found) for (at, form), found in self.corrections.items() if form == tree
        ]
        return min(others)[1] if others else 1.0

    def add(self, tree: TreeShape, batch: int, context: float, seconds: float) -> None:
        """Count the time of a round."""
        latest = self.latest.setdefault((batch, tree), deque(maxlen=MEMORY))
        latest.append(seconds / self.costs.seconds(tree, batch, context))
        # A pause of the host makes a clocked round several times as long, so the median is taken there.
        self.corrections[batch, tree] = median(latest) if self.costs.by_clock else fmean(latest)
