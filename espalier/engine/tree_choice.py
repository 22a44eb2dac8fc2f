"""Chooses the tree of each round while the engine runs: the tree with the most expected tokens a second.

RoundLayout.choices has the trees that may be chosen.  acceptance.py estimates the tokens that a round emits, and
round_times.py the seconds that it takes.  To keep the estimates true, the engine explores now and then: for a few
rounds it runs another tree that is nearly as good.  Tokens never depend on the choice."""

import logging
from bisect import bisect
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

from espalier.config import RoundCosts
from espalier.engine.acceptance import GAIN_PRIOR_TOKENS, Acceptance, AcceptanceSample, DecayingRate
from espalier.engine.round_times import RoundTimes
from espalier.layout import PLAIN_TREE, RoundLayout, TreeShape, next_bucket

# A tree replaces the current one if its expected tokens a second are at least MIN_SPEEDUP times as many.
MIN_SPEEDUP = 1.02
# Rounds from a change of the tree to the first exploration.  Each later interval is twice as long, up to MAX_INTERVAL.
MIN_INTERVAL, MAX_INTERVAL = 16, 256
# A tree is explored if its expected tokens a second, divided by the best tree's, are at least MIN_RIVAL_RATE.  Two
# kinds of trees have the lower bound MIN_UNKNOWN_RATE.  Trees that have not run: predicted times have errors of up to
# 15% (tree_cost.py).  Trees deeper than the current tree: its rounds do not show how often deeper tokens are accepted.
MIN_RIVAL_RATE, MIN_UNKNOWN_RATE = 0.85, 0.75
# Plain decoding and trees without a draft pass do not show how often the draft's tokens are accepted.  So when an
# exploration starts, older rounds lose weight: together they weigh OLD_ROUNDS_WEIGHT times as much as the exploration.
OLD_ROUNDS_WEIGHT = 0.5
# If plain decoding replaces a tree that ran for more than LASTING_ROUNDS rounds, the tree was no mistake, so the next
# exploration comes soon.  A tree that has run for LOGGED_ROUNDS rounds is logged.
LASTING_ROUNDS, LOGGED_ROUNDS = 12, 64
# The tokens per unit of time are averaged over TOKEN_RATE_ROUNDS rounds.  The expected gains of looked-up guesses are
# uncertain, so a round without the draft must be expected to beat a round with the draft by MIN_LOOKUP_GAIN tokens.
TOKEN_RATE_ROUNDS, MIN_LOOKUP_GAIN = 16, 0.15
# Where looked-up guesses are likely to be right, the draft's guesses are too.  So the tokens of rounds with a draft are
# counted separately for several ranges (classes) of LookupGain.tokens.  GAIN_BOUNDS are the bounds between the classes.
# Counts are averaged over GAIN_CLASS_ROUNDS rounds.
GAIN_BOUNDS, GAIN_CLASS_ROUNDS = (0.3, 0.6, 1.0, 2.0), 64
log = logging.getLogger("espalier")


class ChoicePace(NamedTuple):
    """How fast the choice of the tree follows the text.

    min_rounds, min_samples: estimates come from at least so many rounds and samples.  min_prior: the least weight of
    the assumed acceptance rates, in samples.
    exploration_rounds: the rounds of an exploration.  single_request_rounds: the additional rounds of an exploration
    with a batch of one request, because such a round shows less.  rounds_before_change: how long a chosen tree runs
    before another may replace it.  rounds_per_choice: the rounds from one comparison of trees to the next.  Comparing
    takes long in comparison with a short round."""

    min_rounds: int
    min_samples: int
    exploration_rounds: int
    single_request_rounds: int
    rounds_before_change: int
    rounds_per_choice: int
    min_prior: float


# Guesses of a draft model succeed about equally everywhere.  The success of guesses looked up in the text varies with
# the place in the text.
DRAFT_PACE = ChoicePace(
    24, 400, exploration_rounds=4, single_request_rounds=4, rounds_before_change=8, rounds_per_choice=4, min_prior=0.25
)
LOOKUP_PACE = ChoicePace(
    16, 24, exploration_rounds=2, single_request_rounds=0, rounds_before_change=2, rounds_per_choice=1, min_prior=1.0
)


class LookupGain(NamedTuple):
    """The expected gain of the next round if it verifies the guesses of all sources except the draft.

    tokens: the expected number of accepted guessed tokens of a request, as the mean over the batch.
    rows: the rows of the verify pass."""

    tokens: float
    rows: int


class TreeChooser:
    """Decides the tree of each round.  This base class runs the layout's tree in every round and ignores results.

    num_changes: how often the chosen tree has changed."""

    num_changes = 0

    def choose(
        self, batch: int, num_drafting: int, context: float, lookup_gain: LookupGain | None = None
    ) -> TreeShape | None:
        """Returns the tree of the next round; None for the layout's tree.

        batch: the number of requests.  num_drafting: how many of them can accept guesses.  context: the mean number of
        tokens of a request.  lookup_gain: None if the host does not know the guesses before the round."""
        return None

    def record(
        self, samples: Sequence[AcceptanceSample], num_rows: int, lookup_samples: Sequence[AcceptanceSample]
    ) -> None:
        """Counts the result of a round.  Rounds are counted in the order in which `choose` chose their trees.

        samples: one for each request that can accept guesses.  num_rows: the number of verified rows, without void
        rows.  lookup_samples: the samples that the round would have had without the draft."""

    def prefill_launched(self) -> None:
        """Called when a prefill pass was launched."""

    def restart(self) -> None:
        """Called when a prompt has entered the batch."""


@dataclass(frozen=True)
class RoundInFlight:
    """A launched round.

    context: the mean number of tokens of a request.  chosen_at: the clock's time when the tree was chosen, in seconds.
    lookup_gain: the expected gain of the looked-up guesses; None if it was unknown when the tree was chosen.
    expected_tokens: how many tokens a request was expected to emit with this tree, estimated from earlier rounds and
    not from the guesses of this round; 1 if lookup_gain is None.
    num_prefill_passes: how many prefill passes were launched before this round."""

    tree: TreeShape
    batch: int
    context: float
    chosen_at: float
    lookup_gain: LookupGain | None
    expected_tokens: float
    num_prefill_passes: int


@dataclass
class BucketState:
    """The state of the choice for one bucket, a range of batch sizes (layout.next_bucket).

    size: the bucket's largest batch size.  trees: the trees to choose from.  tree: the chosen tree.
    rounds_since_change: the rounds since this tree was chosen.
    rounds_to_choice: the rounds until trees are compared again.
    exploration_interval: the rounds between explorations.  plain_interval: exploration_interval in plain decoding.
    rounds_to_exploration: the rounds until the next exploration.
    explored_tree, exploring_rounds: the tree and the remaining rounds of an exploration.
    last_round: the number of the last round of each tree.  logged_tree: the tree that was logged last."""

    size: int
    trees: tuple[TreeShape, ...]
    tree: TreeShape
    rounds_since_change: int = 0
    rounds_to_choice: int = 0
    exploration_interval: int = MIN_INTERVAL
    rounds_to_exploration: int = MIN_INTERVAL
    plain_interval: int = MIN_INTERVAL
    explored_tree: TreeShape | None = None
    exploring_rounds: int = 0
    last_round: dict[TreeShape, int] = field(default_factory=dict)
    logged_tree: TreeShape | None = None

    @property
    def lookup_tree(self) -> TreeShape | None:
        """The tree for rounds without a draft pass, made of looked-up guesses; None if there is none to choose."""
        return next((tree for tree in self.trees if not tree.drafts), None)


class MeasuredTreeChooser(TreeChooser):
    """Chooses by measurement.  clock: returns the time in seconds.  is_lookup: whether the drafter is n-gram lookup."""

    def __init__(
        self, layout: RoundLayout, costs: RoundCosts, is_lookup: bool, clock: Callable[[], float] = perf_counter
    ) -> None:
        self.layout = layout
        self.costs = costs
        self.clock = clock
        self.times = RoundTimes(costs)
        self.pace = LOOKUP_PACE if is_lookup else DRAFT_PACE
        self.acceptance, self.lookup_acceptance = (
            Acceptance(layout.steps, pace.min_rounds, pace.min_samples, pace.min_prior)
            for pace in (self.pace, LOOKUP_PACE)
        )
        self.buckets: dict[int, BucketState] = {}
        self.num_choices = self.num_changes = 0
        # Of the latest rounds: the tokens that a request got (numerator) and the rounds' time (denominator).
        self.token_rate = DecayingRate()
        # One entry for each class of LookupGain.tokens (GAIN_BOUNDS): the tokens that rounds with a draft gave
        # (numerator), and the tokens that were expected of these rounds (denominator).
        self.draft_tokens_by_gain_class = [DecayingRate() for _ in range(len(GAIN_BOUNDS) + 1)]
        self._in_flight: deque[RoundInFlight] = deque()
        self._num_prefill_passes = 0
        # The last round whose result was read: its tree, its batch and num_prefill_passes, and when it was read.
        self._last_read_round: tuple[tuple[TreeShape, int, int], float] | None = None

    def prefill_launched(self) -> None:
        self._num_prefill_passes += 1

    def restart(self) -> None:
        """With n-gram lookup on a CPU, forgets all estimates, because a new text may repeat itself more or less.

        Estimates of a draft model are kept, because it is about equally good in every text.  On a GPU they are kept,
        because prompts enter the batch too often."""
        if not self.costs.uses_clock and self.pace is LOOKUP_PACE:
            self.acceptance.reset()
            self.lookup_acceptance.reset()
            self.buckets.clear()

    def choose(
        self, batch: int, num_drafting: int, context: float, lookup_gain: LookupGain | None = None
    ) -> TreeShape | None:
        """num_drafting: how many requests can accept guesses.  context: the mean number of tokens of a request."""
        bucket = self._bucket(next_bucket(batch))
        lookup_tree = bucket.lookup_tree
        if lookup_tree is None or self.costs.uses_clock:
            lookup_gain = None
        if not num_drafting:
            tree = self.layout.tree_without_draft
        elif lookup_tree is not None and lookup_gain is not None:
            tree = self._choose_with_known_guesses(
                bucket, batch, num_drafting / batch, context, lookup_tree, lookup_gain
            )
        else:
            tree = self._choose(bucket, num_drafting / batch, context, bucket.trees)
        expected = self._expected_tokens(tree, num_drafting / batch) if lookup_gain is not None else 1.0
        launched = RoundInFlight(
            tree, bucket.size, context, self.clock(), lookup_gain, expected, self._num_prefill_passes
        )
        self._in_flight.append(launched)
        return tree

    def _choose_with_known_guesses(
        self,
        bucket: BucketState,
        batch: int,
        drafting_share: float,
        context: float,
        lookup_tree: TreeShape,
        gain: LookupGain,
    ) -> TreeShape:
        """Returns `lookup_tree`, which needs no draft pass, if it is expected to be faster; else a tree with a draft.

        The time that `lookup_tree` saves is worth the tokens that recent rounds emitted in as much time."""
        draft_tree = self._choose(bucket, drafting_share, context, [tree for tree in bucket.trees if tree.drafts])
        seconds = self.times.seconds(draft_tree, bucket.size, context)
        # For a tree that is explored or new, assume the most tokens that it can give, so that it runs and is measured.
        tokens = 1.0 + draft_tree.steps
        if draft_tree == bucket.tree and self._is_tried(bucket):
            tokens = self._expected_tokens(draft_tree, drafting_share)
            tokens *= self._draft_ratio(gain) if draft_tree.steps else 1.0
        saved_time = seconds - self.costs.seconds_for_rows(lookup_tree, batch, gain.rows)
        tokens_per_time = self.token_rate.rate(tokens / seconds, 1.0)
        lookup_tokens = 1 + gain.tokens + saved_time * tokens_per_time
        return lookup_tree if lookup_tokens > tokens + MIN_LOOKUP_GAIN else draft_tree

    def _draft_ratio(self, gain: LookupGain) -> float:
        """Returns the real tokens of a round with a draft, divided by the expected tokens, for guesses with this gain.

        The ratio is counted separately for several ranges of the gain (GAIN_BOUNDS).  It is at least 1, and at least
        the ratio in every lower range.  So if the draft failed a few times by chance, it is tried again."""
        ratio = 1.0
        for counts in self.draft_tokens_by_gain_class[: bisect(GAIN_BOUNDS, gain.tokens) + 1]:
            ratio = max(ratio, counts.rate(ratio, GAIN_PRIOR_TOKENS))
        return ratio

    def record(
        self, samples: Sequence[AcceptanceSample], num_rows: int, lookup_samples: Sequence[AcceptanceSample]
    ) -> None:
        """num_rows: the number of verified rows.  lookup_samples: the samples that a round without draft would give."""
        in_flight = self._in_flight.popleft()
        self._count_time(in_flight, num_rows)
        if in_flight.lookup_gain is not None:
            self._count_tokens(in_flight, in_flight.lookup_gain, samples, num_rows)
            return
        self._acceptance_of(in_flight.tree).add(in_flight.tree, samples)
        lookup_tree = self._bucket(in_flight.batch).lookup_tree
        if lookup_tree is not None and in_flight.tree.drafts and in_flight.tree.steps:
            # Other sources guessed in this round too, so it is known how many of their tokens would be accepted.
            self.lookup_acceptance.add(lookup_tree, lookup_samples)

    def _count_tokens(
        self, in_flight: RoundInFlight, gain: LookupGain, samples: Sequence[AcceptanceSample], num_rows: int
    ) -> None:
        """Counts the emitted tokens of a round in token_rate and draft_tokens_by_gain_class.  gain: see LookupGain."""
        tokens = 1 + sum(len(sample.sibling_ranks) for sample in samples) / in_flight.batch
        self.token_rate.decay(1 - 1 / TOKEN_RATE_ROUNDS)
        self.token_rate.denominator += self.costs.seconds_for_rows(in_flight.tree, in_flight.batch, num_rows)
        self.token_rate.numerator += tokens
        if not in_flight.tree.drafts:
            return
        self.acceptance.add(in_flight.tree, samples)
        if in_flight.tree.steps:
            for counts in self.draft_tokens_by_gain_class:
                counts.decay(1 - 1 / GAIN_CLASS_ROUNDS)
            counts = self.draft_tokens_by_gain_class[bisect(GAIN_BOUNDS, gain.tokens)]
            counts.numerator += tokens
            counts.denominator += in_flight.expected_tokens

    def _acceptance_of(self, tree: TreeShape) -> Acceptance:
        """Returns the estimates for rounds with a draft pass, or for those without one."""
        return self.acceptance if tree.drafts else self.lookup_acceptance

    def _count_time(self, in_flight: RoundInFlight, num_rows: int) -> None:
        """Counts the time of a round for its tree.  num_rows: the number of verified rows."""
        tree, batch, context = in_flight.tree, in_flight.batch, in_flight.context
        if not self.costs.uses_clock:
            self.times.add(tree, batch, context, self.costs.seconds_for_rows(tree, batch, num_rows))
            return
        now, last, num_passes = self.clock(), self._last_read_round, in_flight.num_prefill_passes
        self._last_read_round = (tree, batch, num_passes), now
        # The time is not counted if another tree or a prefill pass ran just before, because the round may have waited
        # for it.  It is not counted either if a prefill pass was launched since, because the host, which takes long to
        # launch a pass, may have read the result late.
        if last is not None and last[0] == (tree, batch, num_passes) and num_passes == self._num_prefill_passes:
            self.times.add(tree, batch, context, now - max(last[1], in_flight.chosen_at))

    def _bucket(self, size: int) -> BucketState:
        """Returns the state of a bucket.  size: the largest batch size of the bucket."""
        if size not in self.buckets:
            trees = self.layout.tree_choices_for(size)
            self.buckets[size] = BucketState(size, trees, trees[0])
        return self.buckets[size]

    def _choose(
        self, bucket: BucketState, drafting_share: float, context: float, trees: Sequence[TreeShape]
    ) -> TreeShape:
        """Returns the tree to run, one of `trees`.  drafting_share: the share of requests that can accept guesses."""
        self.num_choices += 1
        if bucket.exploring_rounds:
            bucket.exploring_rounds -= 1
            assert bucket.explored_tree is not None
            tree = bucket.explored_tree
        else:
            tree = self._chosen_or_explored(bucket, drafting_share, context, trees)
        bucket.last_round[tree] = self.num_choices
        return tree

    def _chosen_or_explored(
        self, bucket: BucketState, drafting_share: float, context: float, trees: Sequence[TreeShape]
    ) -> TreeShape:
        """Compares the trees if it is time to.  Returns the chosen tree, or another tree to explore."""
        bucket.rounds_since_change += 1
        bucket.rounds_to_exploration -= 1
        bucket.rounds_to_choice -= 1
        if bucket.rounds_to_choice > 0:
            return bucket.tree
        bucket.rounds_to_choice = self.pace.rounds_per_choice
        rates = {each: self.rate(each, bucket.size, drafting_share, context) for each in trees}
        self._switch_if_better(bucket, rates)
        tree = self._explore_if_due(bucket, rates, drafting_share) or bucket.tree
        self._log_if_settled(bucket, context)
        return tree

    def rate(self, tree: TreeShape, bucket_size: int, drafting_share: float, context: float) -> float:
        """Returns the expected tokens a second of one request.

        drafting_share: the share of the batch's requests that can accept guesses.  context: the mean number of
        tokens."""
        return self._expected_tokens(tree, drafting_share) / self.times.seconds(tree, bucket_size, context)

    def _expected_tokens(self, tree: TreeShape, drafting_share: float) -> float:
        """Returns the expected tokens of a request in a round, as the mean over the batch.

        drafting_share: the share of the batch's requests that can accept guesses.  The others get one token."""
        return 1 + drafting_share * (self._acceptance_of(tree).accept_length(tree) - 1)

    def _switch_if_better(self, bucket: BucketState, rates: dict[TreeShape, float]) -> None:
        """Replaces the chosen tree if another tree is better.  rates: the expected tokens a second of each tree."""
        best = max(rates, key=lambda tree: rates[tree])
        if self._is_tried(bucket) and rates[best] > MIN_SPEEDUP * rates[bucket.tree]:
            if best == PLAIN_TREE:
                # Guesses that paid for a while may soon pay again.
                was_lasting = bucket.rounds_since_change > LASTING_ROUNDS
                bucket.plain_interval = MIN_INTERVAL if was_lasting else min(2 * bucket.plain_interval, MAX_INTERVAL)
            bucket.tree, bucket.rounds_since_change = best, 0
            bucket.exploration_interval = bucket.plain_interval if best == PLAIN_TREE else MIN_INTERVAL
            bucket.rounds_to_exploration = bucket.exploration_interval
            self.num_changes += 1

    def _is_tried(self, bucket: BucketState) -> bool:
        """Whether the chosen tree has run long enough to be replaced.  In a small batch, a tree must run longer."""
        added = 4 * self.pace.single_request_rounds // bucket.size if bucket.tree != PLAIN_TREE else 0
        return bucket.rounds_since_change > self.pace.rounds_before_change + added

    def _explore_if_due(
        self, bucket: BucketState, rates: dict[TreeShape, float], drafting_share: float
    ) -> TreeShape | None:
        """Returns the tree that is explored from this round on; None if no exploration is due.

        rates: the expected tokens a second of each tree.  drafting_share: the share of requests that can accept
        guesses."""
        if bucket.rounds_to_exploration > 0:
            return None
        bucket.exploration_interval = bucket.rounds_to_exploration = min(2 * bucket.exploration_interval, MAX_INTERVAL)
        bucket.plain_interval = bucket.exploration_interval if bucket.tree == PLAIN_TREE else bucket.plain_interval
        # Without a clock, the time of plain decoding is computed, so it need not be explored.
        others = [tree for tree in rates if tree != bucket.tree and (self.costs.uses_clock or tree != PLAIN_TREE)]
        best = max(rates.values())
        rivals = [tree for tree in others if rates[tree] >= best * self._min_rival_rate(bucket, tree)]
        if (bucket.tree == PLAIN_TREE or not bucket.tree.drafts) and others:
            for acceptance in (self.acceptance, self.lookup_acceptance)[: 2 if bucket.tree == PLAIN_TREE else 1]:
                acceptance.cap_weight(
                    OLD_ROUNDS_WEIGHT * self.pace.exploration_rounds * max(drafting_share * bucket.size, 1.0)
                )
            rivals = rivals or [max(others, key=lambda tree: rates[tree])]
        if not rivals:
            return None
        bucket.explored_tree = min(rivals, key=lambda tree: bucket.last_round.get(tree, 0))
        bucket.exploring_rounds = self.pace.exploration_rounds + self.pace.single_request_rounds // bucket.size - 1
        return bucket.explored_tree

    def _min_rival_rate(self, bucket: BucketState, tree: TreeShape) -> float:
        """Returns the least expected tokens a second with which this tree is explored, divided by the best tree's."""
        is_known = (bucket.size, tree) in self.times.corrections and tree.steps <= bucket.tree.steps
        return MIN_RIVAL_RATE if is_known else MIN_UNKNOWN_RATE

    def _log_if_settled(self, bucket: BucketState, context: float) -> None:
        """Logs the tree, once, when it has run for LOGGED_ROUNDS rounds.  context: the mean tokens of a request."""
        tree = bucket.tree
        if bucket.rounds_since_change < LOGGED_ROUNDS or bucket.logged_tree == tree or not self.costs.uses_clock:
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
