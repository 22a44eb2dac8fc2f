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
from espalier.engine.acceptance import Acceptance, AcceptSample, DecayingRate
from espalier.engine.round_times import RoundTimes
from espalier.layout import PLAIN_TREE, RoundLayout, TreeShape, next_bucket

# A form replaces the current one if its expected tokens a second are at least MIN_SPEEDUP times as many.
MIN_SPEEDUP = 1.02
# Rounds until another form is tried after the tree has changed.  Each later wait is twice as long, up to MAX_PAUSE.
MIN_PAUSE, MAX_PAUSE = 16, 256
# A form is tried if its expected tokens a second are at least this share of the best form's.  MIN_UNKNOWN_RATE holds
# for forms that have not run, because predicted times have errors of up to 15% (tree_cost.py), and for forms deeper
# than the current one, because no round shows what their depths accept now.
MIN_RIVAL_RATE, MIN_UNKNOWN_RATE = 0.85, 0.75
# Plain decoding and trees without a draft pass do not measure acceptance.  So at a trial, all older rounds together
# weigh OLD_ROUNDS_WEIGHT times as much as the trial.
OLD_ROUNDS_WEIGHT = 0.5
# A choice that lasted LASTING_ROUNDS rounds counts as no mistake.  A choice that lasted LOGGED_ROUNDS rounds is
# logged.
LASTING_ROUNDS, LOGGED_ROUNDS = 12, 64
# The tokens that a unit of time yields are averaged over YIELD_ROUNDS rounds.  Expected gains of looked-up guesses are
# uncertain, so they must be worth MIN_LOOKUP_GAIN tokens.
YIELD_ROUNDS, MIN_LOOKUP_GAIN = 16, 0.15
log = logging.getLogger("espalier")


class ChoicePace(NamedTuple):
    """How fast the choice of the tree follows the text.

    rounds, samples: min_rounds and min_samples of Acceptance; trial_rounds: rounds of a trial; single_request_rounds:
    how many more rounds a trial has for a single request, because one request shows less in a round;
    rounds_before_change: rounds before a choice may change; min_prior: as in Acceptance.
    """

    rounds: int
    samples: int
    trial_rounds: int
    single_request_rounds: int
    rounds_before_change: int
    min_prior: float


# Guesses of a draft model succeed about equally everywhere.  The success of guesses looked up in the text varies with
# the place in the text.
DRAFT_PACE = ChoicePace(24, 400, trial_rounds=4, single_request_rounds=4, rounds_before_change=8, min_prior=0.25)
LOOKUP_PACE = ChoicePace(16, 24, trial_rounds=2, single_request_rounds=0, rounds_before_change=2, min_prior=1.0)


class LookupGain(NamedTuple):
    """The expected gain in the next round of the guesses of all sources but the draft.

    tokens: a request's expected tokens beyond the first, the mean over the batch; rows: of the verify pass.
    """

    tokens: float
    rows: int


class TreeChooser(Protocol):
    """Decides the tree of each round.  `read` gets the results of rounds in the order of the
    `pick` calls that chose their trees.

    num_changes: how often the chosen tree has changed.
    """

    num_changes: int

    def pick(self, batch: int, drafting: int, context: float, lookup: LookupGain | None = None) -> TreeShape | None:
        """The tree of the next round; None for the layout's.

        batch: requests; drafting: how many of them can accept guesses; context: the mean number of tokens of a request;
        lookup: None if the host does not know these guesses before the round.
        """
        ...

    def read(self, samples: Sequence[AcceptSample], rows: int, lookup_samples: Sequence[AcceptSample]) -> None:
        """Count the result of a round for which `pick` named a tree.

        samples: one for each request that can accept guesses; rows: of the verify pass, without void rows;
        lookup_samples: the samples that the round would have had without the draft.
        """
        ...

    def restart(self) -> None:
        """Called when a prompt has entered the batch."""
        ...


class FixedTrees:
    """Runs the layout's tree in every round and ignores results."""

    num_changes = 0

    def pick(self, batch: int, drafting: int, context: float, lookup: LookupGain | None = None) -> TreeShape | None:
        return None

    def read(self, samples: Sequence[AcceptSample], rows: int, lookup_samples: Sequence[AcceptSample]) -> None:
        pass

    def restart(self) -> None:
        pass


@dataclass(frozen=True)
class PickedTree:
    """A round in flight.

    picked_at: when its tree was picked, in seconds of the clock; knows_guesses: whether the guesses of the round were
    known then.
    """

    tree: TreeShape
    batch: int
    context: float
    picked_at: float
    knows_guesses: bool


@dataclass
class BucketState:
    """The state of the choice for batches of one bucket.

    rounds_held: rounds since `current` was chosen; switches: how often `current` changed; pause_left: rounds until the
    next trial; pause_length: rounds of the present pause; plain_pause: rounds of a pause during plain decoding;
    trial_tree, trial_rounds_left: the form on trial; last_round: the round in which each form ran last; logged_tree:
    the form that was logged last.
    """

    size: int
    forms: tuple[TreeShape, ...]
    current: TreeShape
    rounds_held: int = 0
    pause_length: int = MIN_PAUSE
    pause_left: int = MIN_PAUSE
    plain_pause: int = MIN_PAUSE
    switches: int = 0
    trial_tree: TreeShape | None = None
    trial_rounds_left: int = 0
    last_round: dict[TreeShape, int] = field(default_factory=dict)
    logged_tree: TreeShape | None = None


class TreeChoice:
    """The TreeChooser that measures.  clock: in seconds.  is_lookup: whether guesses are looked up in the text."""

    def __init__(
        self, layout: RoundLayout, costs: RoundCosts, is_lookup: bool, clock: Callable[[], float] = perf_counter
    ) -> None:
        self.layout = layout
        self.costs = costs
        self.clock = clock
        self.times = RoundTimes(costs)
        self.pace = LOOKUP_PACE if is_lookup else DRAFT_PACE
        self.acceptance, self.lookup_acceptance = (
            Acceptance(layout.steps, pace.rounds, pace.samples, pace.min_prior) for pace in (self.pace, LOOKUP_PACE)
        )
        self.buckets: dict[int, BucketState] = {}
        self.rounds = self.num_changes = 0
        # The time of the latest rounds, and the tokens of a request in that time.
        self.recent_yield = DecayingRate()
        self._in_flight: deque[PickedTree] = deque()
        self._last: tuple[TreeShape, int, float] | None = None

    def restart(self) -> None:
        """Forget all estimates where guesses are looked up on a CPU, since a new text may repeat itself more or less.

        A draft model is about equally good everywhere.  And on a GPU prompts enter all the time.
        """
        self._last = None
        if not self.costs.uses_clock and self.pace is LOOKUP_PACE:
            self.acceptance.reset()
            self.lookup_acceptance.reset()
            self.buckets.clear()

    def pick(self, batch: int, drafting: int, context: float, lookup: LookupGain | None = None) -> TreeShape | None:
        bucket = self._bucket(next_bucket(batch))
        lookup_tree = next((form for form in bucket.forms if not form.drafts), None)
        knows_guesses = lookup is not None and lookup_tree is not None and not self.costs.uses_clock
        if not drafting:
            tree = self.layout.tree_without_draft
        elif knows_guesses and lookup_tree is not None and lookup is not None:
            tree = self._choose_with_known_guesses(bucket, batch, drafting / batch, context, lookup_tree, lookup)
        else:
            tree = self._choose(bucket, drafting / batch, context, bucket.forms)
        self._in_flight.append(PickedTree(tree, bucket.size, context, self.clock(), knows_guesses))
        return tree

    def _choose_with_known_guesses(
        self, bucket: BucketState, batch: int, share: float, context: float, lookup_tree: TreeShape, lookup: LookupGain
    ) -> TreeShape:
        """The tree `lookup_tree`, without a draft pass, if it is expected to be faster; else a form with a draft.

        The time that `lookup_tree` saves is valued at the tokens that recent rounds made in such a time.
        """
        other = self._choose(bucket, share, context, [form for form in bucket.forms if form.drafts])
        seconds = self.times.seconds(other, bucket.size, context)
        # A trial ends early only if `lookup_tree` beats every token that the form on trial could give.
        tokens = self.rate(other, bucket.size, share, context) * seconds if other == bucket.current else 1 + other.steps
        saved = seconds - self.costs.seconds_for_rows(lookup_tree, batch, lookup.rows)
        worth = self.recent_yield.rate(tokens / seconds, 1.0)
        return lookup_tree if 1 + lookup.tokens + saved * worth > tokens + MIN_LOOKUP_GAIN else other

    def read(self, samples: Sequence[AcceptSample], rows: int, lookup_samples: Sequence[AcceptSample]) -> None:
        picked = self._in_flight.popleft()
        self._count_time(picked, rows)
        if picked.knows_guesses:
            self.recent_yield.decay(1 - 1 / YIELD_ROUNDS)
            self.recent_yield.trials += self.costs.seconds_for_rows(picked.tree, picked.batch, rows)
            self.recent_yield.successes += 1 + sum(len(sample.ranks) for sample in samples) / picked.batch
            if picked.tree.drafts:
                self.acceptance.add(picked.tree, samples)
            return
        self._acceptance_of(picked.tree).add(picked.tree, samples)
        without = next((form for form in self._bucket(picked.batch).forms if not form.drafts), None)
        if without is not None and picked.tree.drafts and picked.tree.steps:
            # The other sources were asked too, so their acceptance is known.
            self.lookup_acceptance.add(without, lookup_samples)

    def _acceptance_of(self, tree: TreeShape) -> Acceptance:
        return self.acceptance if tree.drafts else self.lookup_acceptance

    def _count_time(self, picked: PickedTree, rows: int) -> None:
        tree, batch, context = picked.tree, picked.batch, picked.context
        if not self.costs.uses_clock:
            self.times.add(tree, batch, context, self.costs.seconds_for_rows(tree, batch, rows))
            return
        now, last, self._last = self.clock(), self._last, None
        # A round after another form or after a prefill pass may have waited for that, so its time is not counted.
        if last is not None and last[:2] == (tree, batch):
            self.times.add(tree, batch, context, now - max(last[2], picked.picked_at))
        self._last = tree, batch, now

    def _bucket(self, size: int) -> BucketState:
        if size not in self.buckets:
            forms = self.layout.tree_choices_for(size)
            self.buckets[size] = BucketState(size, forms, forms[0])
        return self.buckets[size]

    def _choose(self, bucket: BucketState, share: float, context: float, forms: Sequence[TreeShape]) -> TreeShape:
        """The form to run, one of `forms`.  share: the share of the batch's requests that can accept guesses."""
        self.rounds += 1
        if bucket.trial_rounds_left:
            bucket.trial_rounds_left -= 1
            assert bucket.trial_tree is not None
            tree = bucket.trial_tree
        else:
            rates = {form: self.rate(form, bucket.size, share, context) for form in forms}
            self._switch_if_better(bucket, rates)
            tree = self._start_trial_if_due(bucket, rates, share) or bucket.current
            self._log_if_settled(bucket, context)
        bucket.last_round[tree] = self.rounds
        return tree

    def rate(self, tree: TreeShape, bucket_size: int, share: float, context: float) -> float:
        """The expected tokens a second of one request."""
        gained = share * (self._acceptance_of(tree).accept_length(tree) - 1)
        return (1 + gained) / self.times.seconds(tree, bucket_size, context)

    def _switch_if_better(self, bucket: BucketState, rates: dict[TreeShape, float]) -> None:
        bucket.rounds_held += 1
        best = max(rates, key=lambda form: rates[form])
        if bucket.rounds_held > self.pace.rounds_before_change and rates[best] > MIN_SPEEDUP * rates[bucket.current]:
            if best == PLAIN_TREE:
                # Guesses that paid for a while may soon pay again.
                was_lasting = bucket.rounds_held > LASTING_ROUNDS
                bucket.plain_pause = MIN_PAUSE if was_lasting else min(2 * bucket.plain_pause, MAX_PAUSE)
            bucket.pause_length = bucket.pause_left = bucket.plain_pause if best == PLAIN_TREE else MIN_PAUSE
            bucket.current, bucket.rounds_held, bucket.switches = best, 0, bucket.switches + 1
            self.num_changes += 1

    def _start_trial_if_due(self, bucket: BucketState, rates: dict[TreeShape, float], share: float) -> TreeShape | None:
        """The form that is tried from this round on; None if no trial is due."""
        bucket.pause_left -= 1
        if bucket.pause_left > 0:
            return None
        bucket.pause_length = bucket.pause_left = min(2 * bucket.pause_length, MAX_PAUSE)
        bucket.plain_pause = bucket.pause_length if bucket.current == PLAIN_TREE else bucket.plain_pause
        # Without a clock, the time of plain decoding is computed, so it needs no trial.
        others = [form for form in rates if form != bucket.current and (self.costs.uses_clock or form != PLAIN_TREE)]
        best = max(rates.values())
        rivals = [form for form in others if rates[form] >= best * self._min_rival_rate(bucket, form)]
        if (bucket.current == PLAIN_TREE or not bucket.current.drafts) and others:
            for acceptance in (self.acceptance, self.lookup_acceptance)[: 2 if bucket.current == PLAIN_TREE else 1]:
                acceptance.cap_weight(OLD_ROUNDS_WEIGHT * self.pace.trial_rounds * max(share * bucket.size, 1.0))
            rivals = rivals or [max(others, key=lambda form: rates[form])]
        if not rivals:
            return None
        bucket.trial_tree = min(rivals, key=lambda form: bucket.last_round.get(form, 0))
        bucket.trial_rounds_left = self.pace.trial_rounds + self.pace.single_request_rounds // bucket.size - 1
        return bucket.trial_tree

    def _min_rival_rate(self, bucket: BucketState, form: TreeShape) -> float:
        """The least expected tokens a second of a form that is tried, over the best form's."""
        is_known = (bucket.size, form) in self.times.corrections and form.steps <= bucket.current.steps
        return MIN_RIVAL_RATE if is_known else MIN_UNKNOWN_RATE

    def _log_if_settled(self, bucket: BucketState, context: float) -> None:
        tree = bucket.current
        if bucket.rounds_held != LOGGED_ROUNDS or bucket.logged_tree == tree or not self.costs.uses_clock:
            return
        bucket.logged_tree = tree
        log.info(
            "trees: rounds of up to %d requests run %s: %.2f tokens in %.2f ms (predicted: %.2f in %.2f ms)",
            bucket.size,
            tree,
            self._acceptance_of(tree).accept_length(tree),
            1e3 * self.times.seconds(tree, bucket.size, context),
            Acceptance(self.layout.steps, 1, 1).accept_length(tree),
            1e3 * self.costs.seconds(tree, bucket.size, context),
        )
