"""Estimates how many tokens a round emits with a given tree, from the results of earlier rounds.

The gain of a round is the number of accepted draft tokens.  The first child of a node is the child that the draft rates
most probable.  This module counts, by depth, how often first children are accepted.  A first child counts only if all
its ancestors are first children too.  Rounds of all trees are counted together.  The resulting rates predict the gain
of any tree.  If a tree has run, its prediction is multiplied by its gain ratio: the real gain of its rounds divided by
the predicted gain.
How often the other children are accepted is not measured.  Their rates are derived from ACCEPT_LENGTHS, and scaled in
proportion to the measured rate of first children."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from operator import mul
from typing import NamedTuple

from espalier.layout import TreeShape

# (number of nodes of a tree, accept length), measured with the draft MEASURED_DRAFT.
ACCEPT_LENGTHS = ((1, 1.0), (2, 1.76), (4, 2.55), (8, 2.85), (16, 3.5), (64, 4.0))
MEASURED_DRAFT = "an EAGLE-3 head of llama-3.1-8b"
# How often that draft's first child is accepted if the child's parent is accepted, by depth.  The last value holds for
# all greater depths.
FIRST_CHILD_RATES = (0.76, 0.64, 0.63)
# The highest estimate of an acceptance rate.  MAX_RATE is below 1: later guesses may fail even if none has failed.
MAX_RATE = 0.98
# The requests of a round may share verify rows (TreeShape.shared_rows): those with more probable nodes get more rows.
# The gain is this many times the gain with an equal number of rows for each request (`python -m lab sharing`).
SHARED_ROWS_GAIN = 1.07
# Estimates start from assumed values.  FIRST_CHILD_RATES weigh as much as PRIOR_SAMPLES measured samples.  A sample is
# the result of one request in one round.  The gain ratio 1 weighs as much as GAIN_PRIOR_TOKENS measured tokens.
PRIOR_SAMPLES, GAIN_PRIOR_TOKENS = 3.0, 12.0
# Each round multiplies the weight of FIRST_CHILD_RATES by PRIOR_DECAY.
PRIOR_DECAY = 0.9
# The text counts as changed if the gain of the last RECENT_SAMPLES samples differs from the expected gain by more than
# MAX_DEVIATIONS standard deviations.  The variance of the gain is taken as VARIANCE_PER_TOKEN times the expected gain.
RECENT_SAMPLES, MAX_DEVIATIONS, VARIANCE_PER_TOKEN = 32, 4.0, 1.5


class AcceptanceSample(NamedTuple):
    """The result of one request in one round.  It may also be the result that the round would have had without a draft.

    max_depth: the greatest depth at which the request may accept nodes.
    sibling_ranks: for each accepted node its rank among its siblings, 0 for the most probable.
    is_leaf: whether the last accepted node has no child in the tree.
    lacks_guesses: whether the draft had fewer guesses than the tree has room for."""

    max_depth: int
    sibling_ranks: tuple[int, ...]
    is_leaf: bool
    lacks_guesses: bool


def assumed_accept_length(tree: TreeShape) -> float:
    """Returns a tree's assumed accept length.  ACCEPT_LENGTHS is interpolated over the logarithm of the node count."""
    nodes = min(tree.rows, ACCEPT_LENGTHS[-1][0])
    low, high = next((low, high) for low, high in pairwise(ACCEPT_LENGTHS) if nodes <= high[0])
    share = math.log2(nodes / low[0]) / math.log2(high[0] / low[0])
    return min(low[1] + share * (high[1] - low[1]), tree.steps + 1)


def assumed_rate(depth: int) -> float:
    """Returns the value of FIRST_CHILD_RATES for a depth.  The first depth is 1."""
    return FIRST_CHILD_RATES[min(depth, len(FIRST_CHILD_RATES)) - 1]


def depth_of(tree: TreeShape) -> int:
    """Returns the greatest depth that a node of the tree can have.  The root has depth 0."""
    return min(tree.steps, tree.num_draft_tokens - 1)


def gains(tree: TreeShape, first_child_rates: Sequence[float]) -> list[float]:
    """Returns a list: entry d is the expected number of accepted draft tokens if nodes down to depth d may be accepted.

    first_child_rates: how often a first child is accepted at depths 1, 2, ..."""
    other_child_rate = _other_child_rate(tree)
    reached, gain_to_depth = 1.0, [0.0]
    for depth in range(1, depth_of(tree) + 1):
        first_rate = first_child_rates[depth - 1]
        other_rate = min(other_child_rate * first_rate / assumed_rate(depth), 1.0)
        reached *= first_rate + (1 - first_rate) * other_rate
        gain_to_depth.append(gain_to_depth[-1] + reached)
    return [SHARED_ROWS_GAIN * gain for gain in gain_to_depth] if tree.shared_rows else gain_to_depth


@cache
def _other_child_rate(tree: TreeShape) -> float:
    """Returns the assumed probability that one of the other children is accepted if the first child is not.

    It is the value with which the tree's expected accept length equals `assumed_accept_length`."""
    if tree.topk == 1:
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        reached, length = 1.0, 1.0
        for depth in range(1, depth_of(tree) + 1):
            reached *= assumed_rate(depth) + (1 - assumed_rate(depth)) * middle
            length += reached
        low, high = (middle, high) if length < assumed_accept_length(tree) else (low, middle)
    return low


def scaled_first_child_rates(rate_at_depth_1: float, steps: int) -> list[float]:
    """Returns FIRST_CHILD_RATES for depths 1 to `steps`, scaled so that the rate at depth 1 is `rate_at_depth_1`."""
    return [min(rate_at_depth_1 * assumed_rate(depth) / assumed_rate(1), MAX_RATE) for depth in range(1, steps + 1)]


@dataclass
class DecayingRate:
    """A rate, numerator / denominator.  Both are sums in which older counts weigh less."""

    denominator: float = 0.0
    numerator: float = 0.0

    def decay(self, factor: float) -> None:
        self.denominator *= factor
        self.numerator *= factor

    def rate(self, prior_rate: float, prior_weight: float) -> float:
        """Returns the rate, after adding `prior_weight` assumed counts that have the rate `prior_rate`."""
        return (self.numerator + prior_weight * prior_rate) / (self.denominator + prior_weight)


@dataclass
class TreeCounts:
    """The counted results of the rounds of one tree.

    first_child_counts: entry i: how often the first child was accepted at depth i + 1.
    samples_by_max_depth: entry d: the number of samples whose nodes could be accepted down to depth d.
    num_accepted: the number of draft tokens that were accepted in these samples."""

    first_child_counts: list[DecayingRate]
    samples_by_max_depth: list[float]
    num_accepted: float = 0.0

    def add(self, sample: AcceptanceSample, max_depth: int, num_samples: int) -> None:
        """Counts `num_samples` equal samples.  max_depth: the sample's max_depth, but at most the tree's depth."""
        _count_first_children(self.first_child_counts, sample, max_depth, num_samples)
        self.samples_by_max_depth[max_depth] += num_samples
        self.num_accepted += num_samples * len(sample.sibling_ranks)

    def decay(self, factor: float) -> None:
        """Multiplies all counts by `factor`, below 1, so that older rounds weigh less."""
        for rate in self.first_child_counts:
            rate.decay(factor)
        self.samples_by_max_depth = [factor * count for count in self.samples_by_max_depth]
        self.num_accepted *= factor


@dataclass
class Acceptance:
    """Estimates from the rounds so far how many tokens each tree gives.

    steps: the depth of the deepest tree.
    min_rounds, min_samples: decide how fast older counts lose weight.  The estimates come from about the latest
    `min_rounds` rounds, or from more rounds if these have fewer than `min_samples` samples.
    prior_weight: the current weight of FIRST_CHILD_RATES, in samples.  min_prior: the least value of this weight.
    recent_gain: the real gain (numerator) and the expected gain (denominator) of the latest samples.
    first_child_rates: entry i: the estimated rate at which first children are accepted at depth i + 1.  At a depth with
    few samples, the estimate is close to FIRST_CHILD_RATES, multiplied by (estimate / FIRST_CHILD_RATES) at the depth
    above.
    uncounted_rounds: the samples of the latest rounds, all of `uncounted_tree`.  Counting takes long in comparison with
    a short round, so these rounds are counted together, when an estimate is needed.
    expected_gains: entry d: the expected gain of a request in a round of `uncounted_tree`, if its nodes may be accepted
    down to depth d."""

    steps: int
    min_rounds: int
    min_samples: int
    min_prior: float = PRIOR_SAMPLES
    first_child_counts: list[DecayingRate] = field(init=False)
    first_child_rates: list[float] = field(init=False)
    counts_by_tree: dict[TreeShape, TreeCounts] = field(default_factory=dict)
    recent_gain: DecayingRate = field(default_factory=DecayingRate)
    prior_weight: float = PRIOR_SAMPLES
    uncounted_tree: TreeShape | None = None
    uncounted_rounds: list[Sequence[AcceptanceSample]] = field(default_factory=list)
    expected_gains: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.uncounted_rounds = []
        self.first_child_counts = [DecayingRate() for _ in range(self.steps)]
        self.counts_by_tree, self.recent_gain, self.prior_weight = {}, DecayingRate(), PRIOR_SAMPLES
        self.first_child_rates = [0.0] * self.steps
        self._update_first_child_rates()

    def cap_weight(self, max_samples: float) -> None:
        """Reduces the weight of all rounds so far to at most this many samples."""
        self._count_rounds()
        if self.steps and self.first_child_counts[0].denominator > max_samples:
            self._decay(max_samples / self.first_child_counts[0].denominator)
            self._update_first_child_rates()

    def _decay(self, factor: float) -> None:
        """Multiplies the counts of all trees by `factor`, below 1, so that older rounds weigh less."""
        for rate in self.first_child_counts:
            rate.decay(factor)
        for counts in self.counts_by_tree.values():
            counts.decay(factor)

    def _update_first_child_rates(self) -> None:
        correction = 1.0
        for i, count in enumerate(self.first_child_counts):
            assumed = assumed_rate(i + 1)
            rate = min(count.rate(min(assumed * correction, MAX_RATE), self.prior_weight), MAX_RATE)
            self.first_child_rates[i], correction = rate, rate / assumed

    def accept_length(self, tree: TreeShape) -> float:
        """Returns how many tokens a request is expected to emit in a round of this tree, if no depth is excluded."""
        self._count_rounds()
        return 1 + gains(tree, self.first_child_rates)[-1] * self._gain_ratio(tree)

    def _gain_ratio(self, tree: TreeShape) -> float:
        """Returns the real gain of this tree's rounds, divided by the gain that is predicted from the acceptance of
        first children in these rounds."""
        counts = self.counts_by_tree.get(tree)
        if counts is None:
            return 1.0
        pairs = zip(counts.first_child_counts, self.first_child_rates, strict=False)
        own_rates = [count.rate(pooled, self.prior_weight) for count, pooled in pairs]
        predicted = sum(map(mul, counts.samples_by_max_depth, gains(tree, own_rates)))
        return (counts.num_accepted + GAIN_PRIOR_TOKENS) / (predicted + GAIN_PRIOR_TOKENS)

    def add(self, tree: TreeShape, samples: Sequence[AcceptanceSample]) -> None:
        """Counts a round of this tree.  samples: one for each request that can accept guesses."""
        if not samples or not depth_of(tree):
            return
        if tree != self.uncounted_tree:
            self._count_rounds()
        if not self.uncounted_rounds:
            self._set_expected_gains(tree)
        if self._has_text_changed(samples):
            self.cap_weight(max(RECENT_SAMPLES / 4, len(samples)))
            self.recent_gain = DecayingRate()
            self._set_expected_gains(tree)
        self.uncounted_rounds.append(samples)

    def _set_expected_gains(self, tree: TreeShape) -> None:
        """Sets `expected_gains`: for each depth, the accepted guesses that a round of `tree` is expected to give."""
        ratio = self._gain_ratio(tree)
        by_depth = gains(tree, self.first_child_rates)
        self.uncounted_tree, self.expected_gains = tree, [ratio * gain for gain in by_depth]

    def _has_text_changed(self, samples: Sequence[AcceptanceSample]) -> bool:
        """Adds the samples of a round to `recent_gain`.  Returns whether the real gain of the latest rounds is far from
        the expected gain."""
        depth = len(self.expected_gains) - 1
        self.recent_gain.decay(1 - 1 / max(2, RECENT_SAMPLES / len(samples)))
        self.recent_gain.denominator += sum(self.expected_gains[min(sample.max_depth, depth)] for sample in samples)
        self.recent_gain.numerator += sum(len(sample.sibling_ranks) for sample in samples)
        expected, gained = self.recent_gain.denominator, self.recent_gain.numerator
        return abs(gained - expected) > MAX_DEVIATIONS * math.sqrt(VARIANCE_PER_TOKEN * expected + 1)

    def _count_rounds(self) -> None:
        """Counts the rounds in `uncounted_rounds`, and updates the estimates."""
        rounds, self.uncounted_rounds, tree = self.uncounted_rounds, [], self.uncounted_tree
        if not rounds or tree is None:
            return
        depth, samples, num_rounds = depth_of(tree), [sample for samples in rounds for sample in samples], len(rounds)
        self.prior_weight = max(PRIOR_DECAY**num_rounds * self.prior_weight, self.min_prior)
        self._decay((1 - 1 / max(self.min_rounds, self.min_samples * num_rounds / len(samples))) ** num_rounds)
        if tree not in self.counts_by_tree:
            self.counts_by_tree[tree] = TreeCounts([DecayingRate() for _ in range(depth)], [0.0] * (depth + 1))
        counts = self.counts_by_tree[tree]
        # Equal samples are counted in one call, because many samples of a large batch are equal.
        for sample, num_samples in Counter(samples).items():
            max_depth = min(sample.max_depth, depth)
            _count_first_children(self.first_child_counts, sample, max_depth, num_samples)
            counts.add(sample, max_depth, num_samples)
        self._update_first_child_rates()


def _count_first_children(
    counts_by_depth: Sequence[DecayingRate], sample: AcceptanceSample, max_depth: int, num_samples: int
) -> None:
    """Counts at each depth whether the first child was accepted, until an accepted node is not a first child.

    max_depth: the greatest depth at which a node could be accepted.  num_samples: how many samples equal `sample`."""
    ranks = sample.sibling_ranks
    for depth in range(min(max_depth, len(ranks) + 1)):
        count = counts_by_depth[depth]
        if depth == len(ranks):
            # The tree may have had no room for a child of the last accepted node.  Then no child was rejected.
            count.denominator += num_samples * (not sample.is_leaf or sample.lacks_guesses)
            return
        count.denominator += num_samples
        if ranks[depth]:
            return
        count.numerator += num_samples
