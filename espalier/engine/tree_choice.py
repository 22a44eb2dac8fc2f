"""Chooses the tree of each round while the engine runs: the one with the most expected tokens a second.

The trees that may be chosen (called forms here) stand in RoundLayout.choices.  acceptance.py estimates the tokens that
a round emits, round_times.py the seconds that it takes.  To keep the estimates true, now and then a form that is nearly
as good runs for a few rounds, and a small tree runs during plain decoding.  Tokens never depend on the choice.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple, Protocol

from espalier.config import RoundCosts
from espalier.engine.acceptance import Acceptance, Count, Sample
from espalier.engine.round_times import RoundTimes
from espalier.layout import PLAIN, RoundLayout, TreeShape, next_bucket

# A form replaces the current one if its expected tokens a second are at least WORTH_A_CHANGE times as many.
WORTH_A_CHANGE = 1.02
# The first pause before a trial, in rounds.  Each later pause is twice as long as the one before, up to LONGEST.
SHORTEST, LONGEST = 16, 256
# A form is tried if its expected tokens a second are at least this share of the best form's.  Predicted times have
# errors of up to 15% (tree_cost.py).
COMPETES = 0.75
# Plain decoding and trees without a draft pass do not measure acceptance.  So at a trial, all older rounds together
# weigh DOUBT times as much as the trial.
DOUBT = 0.5
# A choice that lasted LASTING rounds counts as no mistake.  A choice that lasted SETTLED rounds is logged.
LASTING, SETTLED = 12, 64
# The tokens that a unit of time yields are averaged over LATELY rounds.  Expected gains of looked-up guesses are
# uncertain, so they must be worth LEAST_GAIN tokens.
LATELY, LEAST_GAIN = 16, 0.15
log = logging.getLogger("espalier")


class Pace(NamedTuple):
    """How fast the choice of the tree follows the text.

    rounds, samples: least_rounds and least_samples of Acceptance; trial: rounds of a trial; alone: how many more rounds
    a trial has for a single request, because one request shows less in a round; dwell: rounds before a choice may
    change; least_prior: as in Acceptance.
    """

    rounds: int
    samples: int
    trial: int
    alone: int
    dwell: int
    least_prior: float


# Guesses of a draft model succeed about equally everywhere.  The success of guesses looked up in the text varies with
# the place in the text.
DRAFTED = Pace(48, 400, trial=4, alone=4, dwell=8, least_prior=0.25)
LOOKED_UP = Pace(16, 24, trial=2, alone=0, dwell=2, least_prior=1.0)


class LookedUp(NamedTuple):
    """The expected gain in the next round of the guesses of all sources but the draft.

    tokens: a request's expected tokens beyond the first, the mean over the batch; rows: of the verify pass.
    """

    tokens: float
    rows: int


class TreeChooser(Protocol):
    """Decides the tree of each round.  Rounds are read in the order in which they were picked.

    num_changes: how often the chosen tree has changed.
    """

    num_changes: int

    def pick(self, batch: int, drafting: int, context: float, looked_up: LookedUp | None = None) -> TreeShape | None:
        """The tree of the next round; None for the layout's.

        batch: requests; drafting: how many of them can accept guesses; context: the mean number of tokens of a request;
        looked_up: None if the host does not know these guesses before the round.
        """
        ...

    def read(self, samples: Sequence[Sample], rows: int, looked_up: Sequence[Sample]) -> None:
        """Count the result of a round for which `pick` named a tree.

        samples: one for each request that can accept guesses; rows: of the verify pass, without void rows; looked_up:
        the samples that the round would have had without the draft.
        """
        ...

    def restart(self) -> None:
        """Called when a prompt has entered the batch."""
        ...


class FixedTrees:
    """Runs the layout's tree in every round and ignores results."""

    num_changes = 0

    def pick(self, batch: int, drafting: int, context: float, looked_up: LookedUp | None = None) -> TreeShape | None:
        return None

    def read(self, samples: Sequence[Sample], rows: int, looked_up: Sequence[Sample]) -> None:
        pass

    def restart(self) -> None:
        pass


@dataclass(frozen=True)
class Picked:
    """A round in flight.

    at: when its tree was picked, in seconds of the clock; by_guesses: whether the guesses of the round were known then.
    """

    tree: TreeShape
    batch: int
    context: float
    at: float
    by_guesses: bool


@dataclass
class Bucket:
    """The state of the choice for batches of one bucket.

    held: rounds since `current` was chosen; switches: how often `current` changed; pause: rounds until the next trial;
    length: rounds of the present pause; plain_pause: rounds of a pause during plain decoding; trying, left: the form on
    trial and its remaining rounds; tried: the round in which each form ran last; logged: the form logged last.
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
    logged: TreeShape | None = None


class TreeChoice:
    """The TreeChooser that measures.  clock: in seconds.  is_lookup: whether guesses are looked up in the text."""

    def __init__(
        self, layout: RoundLayout, costs: RoundCosts, is_lookup: bool, clock: Callable[[], float] = perf_counter
    ) -> None:
        self.layout = layout
        self.costs = costs
        self.clock = clock
        self.times = RoundTimes(costs)
        self.pace = LOOKED_UP if is_lookup else DRAFTED
        self.acceptance, self.of_lookup = (
            Acceptance(layout.steps, pace.rounds, pace.samples, pace.least_prior) for pace in (self.pace, LOOKED_UP)
        )
        self.buckets: dict[int, Bucket] = {}
        self.rounds = self.num_changes = 0
        # The time of the latest rounds, and the tokens of a request in that time.
        self.lately = Count()
        self._in_flight: deque[Picked] = deque()
        self._last: tuple[TreeShape, int, float] | None = None

    def restart(self) -> None:
        """Forget all estimates where guesses are looked up on a CPU, since a new text may repeat itself more or less.

        A draft model is about equally good everywhere.  And on a GPU prompts enter all the time.
        """
        self._last = None
        if not self.costs.by_clock and self.pace is LOOKED_UP:
            self.acceptance.forget()
            self.of_lookup.forget()
            self.buckets.clear()

    def pick(self, batch: int, drafting: int, context: float, looked_up: LookedUp | None = None) -> TreeShape | None:
        at = next_bucket(batch)
        bucket = self._bucket(at)
        alone = next((form for form in bucket.forms if not form.drafts), None)
        by_guesses = looked_up is not None and alone is not None and not self.costs.by_clock
        if not drafting:
            tree = self.layout.without_draft
        elif by_guesses and alone is not None and looked_up is not None:
            tree = self._choose_by_guesses(bucket, batch, drafting / batch, context, alone, looked_up)
        else:
            tree = self._choose(bucket, at, drafting / batch, context, bucket.forms)
        self._in_flight.append(Picked(tree, at, context, self.clock(), by_guesses))
        return tree

    def _choose_by_guesses(
        self, bucket: Bucket, batch: int, share: float, context: float, alone: TreeShape, looked_up: LookedUp
    ) -> TreeShape:
        """The tree `alone`, without a draft pass, if it is expected to be faster; else a form with a draft.

        The time that `alone` saves is valued at the tokens that recent rounds made in such a time.
        """
        at = next_bucket(batch)
        other = self._choose(bucket, at, share, context, [form for form in bucket.forms if form.drafts])
        seconds = self.times.seconds(other, at, context)
        # A trial ends early only if `alone` beats every token that the form on trial could give.
        tokens = self.rate(other, at, share, context) * seconds if other == bucket.current else 1 + other.steps
        saved = seconds - self.costs.of_rows(alone, batch, looked_up.rows)
        worth = self.lately.share(tokens / seconds, 1.0)
        return alone if 1 + looked_up.tokens + saved * worth > tokens + LEAST_GAIN else other

    def read(self, samples: Sequence[Sample], rows: int, looked_up: Sequence[Sample]) -> None:
        picked = self._in_flight.popleft()
        self._count_time(picked, rows)
        if picked.by_guesses:
            self.lately.fade(1 - 1 / LATELY)
            self.lately.tried += self.costs.of_rows(picked.tree, picked.batch, rows)
            self.lately.found += 1 + sum(len(sample.ranks) for sample in samples) / picked.batch
            if picked.tree.drafts:
                self.acceptance.add(picked.tree, samples)
            return
        self._acceptance_of(picked.tree).add(picked.tree, samples)
        without = next((form for form in self._bucket(picked.batch).forms if not form.drafts), None)
        if without is not None and picked.tree.drafts and picked.tree.steps:
            # The other sources were asked too, so their acceptance is known.
            self.of_lookup.add(without, looked_up)

    def _acceptance_of(self, tree: TreeShape) -> Acceptance:
        return self.acceptance if tree.drafts else self.of_lookup

    def _count_time(self, picked: Picked, rows: int) -> None:
        tree, batch, context = picked.tree, picked.batch, picked.context
        if not self.costs.by_clock:
            self.times.add(tree, batch, context, self.costs.of_rows(tree, batch, rows))
            return
        now, last, self._last = self.clock(), self._last, None
        # A round after another form or after a prefill pass may have waited for that, so its time is not counted.
        if last is not None and last[:2] == (tree, batch):
            self.times.add(tree, batch, context, now - max(last[2], picked.at))
        self._last = tree, batch, now

    def _bucket(self, at: int) -> Bucket:
        if at not in self.buckets:
            forms = self.layout.choices_at(at)
            self.buckets[at] = Bucket(forms, forms[0])
        return self.buckets[at]

    def _choose(self, bucket: Bucket, at: int, share: float, context: float, forms: Sequence[TreeShape]) -> TreeShape:
        """The form to run, one of `forms`.  share: the share of the batch's requests that can accept guesses."""
        self.rounds += 1
        if bucket.left:
            bucket.left -= 1
            assert bucket.trying is not None
            tree = bucket.trying
        else:
            rates = {form: self.rate(form, at, share, context) for form in forms}
            self._switch_if_better(bucket, rates)
            tree = self._start_trial_if_due(bucket, at, rates, share) or bucket.current
            self._log_if_settled(bucket, at, context)
        bucket.tried[tree] = self.rounds
        return tree

    def rate(self, tree: TreeShape, at: int, share: float, context: float) -> float:
        """The expected tokens a second of one request."""
        gained = share * (self._acceptance_of(tree).length(tree) - 1)
        return (1 + gained) / self.times.seconds(tree, at, context)

    def _switch_if_better(self, bucket: Bucket, rates: dict[TreeShape, float]) -> None:
        bucket.held += 1
        best = max(rates, key=lambda form: rates[form])
        if bucket.held > self.pace.dwell and rates[best] > WORTH_A_CHANGE * rates[bucket.current]:
            if best == PLAIN:
                # Guesses that paid for a while may soon pay again.
                bucket.plain_pause = SHORTEST if bucket.held > LASTING else min(2 * bucket.plain_pause, LONGEST)
            bucket.length = bucket.pause = bucket.plain_pause if best == PLAIN else SHORTEST
            bucket.current, bucket.held, bucket.switches = best, 0, bucket.switches + 1
            self.num_changes += 1

    def _start_trial_if_due(
        self, bucket: Bucket, at: int, rates: dict[TreeShape, float], share: float
    ) -> TreeShape | None:
        """The form that is tried from this round on; None if no trial is due."""
        bucket.pause -= 1
        if bucket.pause > 0:
            return None
        bucket.length = bucket.pause = min(2 * bucket.length, LONGEST)
        bucket.plain_pause = bucket.length if bucket.current == PLAIN else bucket.plain_pause
        # Without a clock, the time of plain decoding is computed, so it needs no trial.
        others = [form for form in rates if form != bucket.current and (self.costs.by_clock or form != PLAIN)]
        rivals = [form for form in others if rates[form] >= COMPETES * max(rates.values())]
        if (bucket.current == PLAIN or not bucket.current.drafts) and others:
            for acceptance in (self.acceptance, self.of_lookup)[: 2 if bucket.current == PLAIN else 1]:
                acceptance.doubt(DOUBT * self.pace.trial * max(share * at, 1.0))
            rivals = rivals or [max(others, key=lambda form: rates[form])]
        if not rivals:
            return None
        bucket.trying = min(rivals, key=lambda form: bucket.tried.get(form, 0))
        bucket.left = self.pace.trial + self.pace.alone // at - 1
        return bucket.trying

    def _log_if_settled(self, bucket: Bucket, at: int, context: float) -> None:
        tree = bucket.current
        if bucket.held != SETTLED or bucket.logged == tree or not self.costs.by_clock:
            return
        bucket.logged = tree
        log.info(
            "trees: rounds of up to %d requests run %s: %.2f tokens in %.2f ms (predicted: %.2f in %.2f ms)",
            at,
            tree,
            self._acceptance_of(tree).length(tree),
            1e3 * self.times.seconds(tree, at, context),
            Acceptance(self.layout.steps, 1, 1).length(tree),
            1e3 * self.costs.seconds(tree, at, context),
        )
