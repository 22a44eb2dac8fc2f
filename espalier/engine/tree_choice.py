"""Chooses the tree of each round while the engine runs: the one with the most expected tokens a second.

The forms among which it chooses are those of RoundLayout.choices.  What a round emits is estimated by acceptance.py,
what it takes by round_times.py.  Forms that nearly compete are tried for a few rounds now and then, and while plain
decoding runs, a small tree is, so that the estimates stay true.  Tokens never depend on the choice.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple, Protocol

from espalier.engine.acceptance import Acceptance, Sample
from espalier.engine.round_times import RoundTimes
from espalier.layout import PLAIN, RoundCosts, RoundLayout, TreeShape, next_bucket

# A form replaces another if it is expected to emit so many times the tokens a second.
WORTH_A_CHANGE = 1.02
# The first trial of a form comes SHORTEST rounds after another was chosen; then twice as many pass, up to LONGEST.
SHORTEST, LONGEST = 16, 256
# A form is tried if its expected rate is that share of the best one: predicted times are within 15% (tree_cost.py).
COMPETES = 0.75
# While plain decoding runs, nothing is found; a trial then weighs more than all before it.
DOUBT = 0.5
# Rounds after which a choice was no mistake, and after which it is logged.
LASTING, SETTLED = 12, 64
log = logging.getLogger("espalier")


class Pace(NamedTuple):
    """How fast the choice follows the text.

    rounds, samples: what estimates of acceptance remember (acceptance.py); trial: rounds of a trial; alone: how many
    more a single request needs, because each of its rounds says less; dwell: rounds after which a choice may change;
    least_prior: as in acceptance.py.
    """

    rounds: int
    samples: int
    trial: int
    alone: int
    dwell: int
    least_prior: float


# Of a draft model; and of guesses that are looked up in the text, which depend on the place in it.
DRAFTED = Pace(48, 400, trial=4, alone=4, dwell=8, least_prior=0.25)
LOOKED_UP = Pace(16, 24, trial=2, alone=0, dwell=2, least_prior=3.0)


class TreeChooser(Protocol):
    """Decides the tree of each round.  Rounds are read in the order in which they were picked."""

    def pick(self, batch: int, drafting: int, context: float) -> TreeShape | None:
        """The tree of the next round; None for the layout's.

        batch: requests; drafting: how many of them can accept guesses; context: tokens of each, the mean.
        """
        ...

    def read(self, samples: Sequence[Sample], guesses: int) -> None:
        """Count the result of a round for which `pick` named a tree.

        samples: of its requests that can accept guesses; guesses: of the largest tree.
        """
        ...

    def restart(self) -> None:
        """A prompt has entered."""
        ...


class FixedTrees:
    """The layout's tree in every round, of which nothing is to be read."""

    def pick(self, batch: int, drafting: int, context: float) -> TreeShape | None:
        return None

    def read(self, samples: Sequence[Sample], guesses: int) -> None:
        pass

    def restart(self) -> None:
        pass


@dataclass(frozen=True)
class Picked:
    """A round in flight.  at: when it was picked."""

    tree: TreeShape
    batch: int
    context: float
    at: float


@dataclass
class Bucket:
    """The choice for the batches of one bucket.

    held: rounds since `current` was chosen; switches: of `current`; pause: rounds until the next trial, length: of the
    pauses now, plain_pause: of those while plain decoding runs; trying, left: the form on trial and its rounds; tried:
    when each form ran last; said: the form that was logged.
    """

    forms: tuple[TreeShape, ...]
    current: TreeShape
    held: int = 0
    length: int = SHORTEST
    pause: int = SHORTEST
    plain_pause: int = SHORTEST
    switches: int = 0
    trying: TreeShape | None = None
    left: int = 0
    tried: dict[TreeShape, int] = field(default_factory=dict)
    said: TreeShape | None = None


class TreeChoice:
    """clock: seconds.  is_lookup: whether guesses are looked up in the text."""

    def __init__(
        self, layout: RoundLayout, costs: RoundCosts, is_lookup: bool, clock: Callable[[], float] = perf_counter
    ) -> None:
        self.layout = layout
        self.costs = costs
        self.clock = clock
        self.times = RoundTimes(costs)
        self.pace = LOOKED_UP if is_lookup else DRAFTED
        self.acceptance = Acceptance(layout.steps, self.pace.rounds, self.pace.samples, self.pace.least_prior)
        self.buckets: dict[int, Bucket] = {}
        self.rounds = 0
        self._in_flight: deque[Picked] = deque()
        self._last: tuple[TreeShape, int, float] | None = None

    def restart(self) -> None:
        """On a CPU, a prompt brings another text, which may repeat itself.  On a GPU prompts enter all the time."""
        self._last = None
        if not self.costs.by_clock:
            self.acceptance.forget()
            self.buckets.clear()

    def pick(self, batch: int, drafting: int, context: float) -> TreeShape | None:
        at = next_bucket(batch)
        bucket = self._bucket(at)
        if drafting or PLAIN not in bucket.forms:
            tree = self._choose(bucket, at, drafting / batch, context)
        else:
            tree = PLAIN
        self._in_flight.append(Picked(tree, at, context, self.clock()))
        return tree

    def read(self, samples: Sequence[Sample], guesses: int) -> None:
        picked = self._in_flight.popleft()
        self._time(picked, guesses)
        self.acceptance.add(picked.tree, samples)

    def _time(self, picked: Picked, guesses: int) -> None:
        tree, batch, context = picked.tree, picked.batch, picked.context
        if not self.costs.by_clock:
            seconds = self.costs.of_guesses(batch, None if tree == PLAIN else guesses)
            self.times.add(tree, batch, context, seconds)
            return
        now, last, self._last = self.clock(), self._last, None
        # A round that follows one of another form, or a prefill pass, may have waited for it.
        if last is not None and last[:2] == (tree, batch):
            self.times.add(tree, batch, context, now - max(last[2], picked.at))
        self._last = tree, batch, now

    def _bucket(self, at: int) -> Bucket:
        if at not in self.buckets:
            forms = self.layout.choices_at(at)
            self.buckets[at] = Bucket(forms, forms[0])
        return self.buckets[at]

    def _choose(self, bucket: Bucket, at: int, share: float, context: float) -> TreeShape:
        """share: of the requests, those that can accept guesses."""
        self.rounds += 1
        if bucket.left:
            bucket.left -= 1
            assert bucket.trying is not None
            tree = bucket.trying
        else:
            rates = {form: self.rate(form, at, share, context) for form in bucket.forms}
            self._switch(bucket, rates)
            tree = self._trial(bucket, at, rates, share) or bucket.current
            self._say(bucket, at, context)
        bucket.tried[tree] = self.rounds
        return tree

    def rate(self, tree: TreeShape, at: int, share: float, context: float) -> float:
        """Expected tokens of a request a second."""
        gained = share * (self.acceptance.length(tree) - 1)
        return (1 + gained) / self.times.seconds(tree, at, context)

    def _switch(self, bucket: Bucket, rates: dict[TreeShape, float]) -> None:
        bucket.held += 1
        best = max(bucket.forms, key=lambda form: rates[form])
        if bucket.held > self.pace.dwell and rates[best] > WORTH_A_CHANGE * rates[bucket.current]:
            if best == PLAIN:
                # Guesses that paid for a while may soon pay again.
                bucket.plain_pause = SHORTEST if bucket.held > LASTING else min(2 * bucket.plain_pause, LONGEST)
            bucket.length = bucket.pause = bucket.plain_pause if best == PLAIN else SHORTEST
            bucket.current, bucket.held, bucket.switches = best, 0, bucket.switches + 1

    def _trial(self, bucket: Bucket, at: int, rates: dict[TreeShape, float], share: float) -> TreeShape | None:
        """The form that is tried from this round on, if a trial is due."""
        bucket.pause -= 1
        if bucket.pause > 0:
            return None
        bucket.length = bucket.pause = min(2 * bucket.length, LONGEST)
        bucket.plain_pause = bucket.length if bucket.current == PLAIN else bucket.plain_pause
        # Without a clock, the time of plain decoding is known.
        others = [form for form in bucket.forms if form != bucket.current and (self.costs.by_clock or form != PLAIN)]
        rivals = [form for form in others if rates[form] >= COMPETES * max(rates.values())]
        if bucket.current == PLAIN and others:
            self.acceptance.doubt(DOUBT * self.pace.trial * max(share * at, 1.0))
            rivals = rivals or [max(others, key=lambda form: rates[form])]
        if not rivals:
            return None
        bucket.trying = min(rivals, key=lambda form: bucket.tried.get(form, 0))
        bucket.left = self.pace.trial + self.pace.alone // at - 1
        return bucket.trying

    def _say(self, bucket: Bucket, at: int, context: float) -> None:
        """Log a choice that has lasted."""
        tree = bucket.current
        if bucket.held != SETTLED or bucket.said == tree or not self.costs.by_clock:
            return
        bucket.said = tree
        log.info(
            "trees: rounds of up to %d requests run %s: %.2f tokens in %.2f ms (predicted: %.2f in %.2f ms)",
            at,
            tree,
            self.acceptance.length(tree),
            1e3 * self.times.seconds(tree, at, context),
            Acceptance(self.layout.steps, 1, 1).length(tree),
            1e3 * self.costs.seconds(tree, at, context),
        )
