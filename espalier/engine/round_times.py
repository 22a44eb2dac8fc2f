"""The time of a round of any tree: as predicted, corrected by the rounds that ran.

A GPU's prediction is corrected by the clock.  On a CPU the time follows from the rows that a round had, so that equal
requests run equal rounds.
"""

from collections import deque
from dataclasses import dataclass
from statistics import fmean, median

from espalier.layout import PLAIN, RoundCosts, TreeShape

# Rounds of a form that its correction remembers.
MEMORY = 9


@dataclass(frozen=True)
class CpuCosts:
    """RoundCosts of n-gram lookup on a CPU, in units of a round of one row.

    row: of a row more; lookup: of looking for guesses.  As measured on one core with models of 135M and less.
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
    """latest: by batch and tree, the times over their predictions; corrections: their averages."""

    def __init__(self, costs: RoundCosts) -> None:
        self.costs = costs
        self.latest: dict[tuple[int, TreeShape], deque[float]] = {}
        self.corrections: dict[tuple[int, TreeShape], float] = {}

    def seconds(self, tree: TreeShape, batch: int, context: float) -> float:
        """context: tokens of a request, the mean over the batch."""
        return self.costs.seconds(tree, batch, context) * self._correction(tree, batch)

    def _correction(self, tree: TreeShape, batch: int) -> float:
        """Where nothing was found at this batch, that of the nearest one."""
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
        # By the clock, a pause of the host makes a round several times as long.
        self.corrections[batch, tree] = median(latest) if self.costs.by_clock else fmean(latest)
