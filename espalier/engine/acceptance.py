"""Estimates how many tokens a round of any tree emits, from the rounds that the host has read.

Trees of every form (TreeShape) show how often the first child is accepted at each depth, along paths of first children.
These rates predict the gain of a form: its tokens beyond the first.  A form that ran also has a factor, its real gain
over the predicted gain.  For the other children of a node, two things are assumed: they are accepted in proportion to
the first child (FIRST_CHILD), and ACCEPT_LENGTHS says how much they add.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import NamedTuple

from espalier.layout import TreeShape

# (nodes, accept length), measured with the draft ACCEPTED_BY.
ACCEPT_LENGTHS = ((1, 1.0), (2, 1.76), (4, 2.55), (8, 2.85), (16, 3.5), (64, 4.0))
ACCEPTED_BY = "an EAGLE-3 head of llama-3.1-8b"
# How often that head's first child is accepted if its parent is, by depth.  The last value holds for all deeper levels.
FIRST_CHILD = (0.76, 0.64, 0.63)
# The highest estimate of a rate: even if every guess at a depth was accepted, later guesses may fail.
MOST = 0.98
# The gain of a tree whose rows are shared over the batch, over that of a tree with as many rows for each request
# (`python -m lab sharing`).
SHARING = 1.07
# Assumptions count as samples until rounds replace them: FIRST_CHILD as PRIOR samples (one request in one round), and a
# form's factor of 1 as FORM_PRIOR tokens.
PRIOR, FORM_PRIOR = 3.0, 12.0
# Each round multiplies the weight of the prior by FADING.
FADING = 0.9
# The text has changed if the gain of the last RECENT samples differs from the expected one by SURPRISE standard
# deviations.  The variance is SPREAD for each expected token.
RECENT, SURPRISE, SPREAD = 32, 4.0, 1.5


class Sample(NamedTuple):
    """The result of one request in one round, or the result that the round would have had without a draft.

    allowed: the greatest depth at which the request may accept nodes; ranks: for each accepted node its rank among its
    siblings, 0 for the most probable; is_leaf: whether the last accepted node has no child in the tree; is_short:
    whether the draft had fewer guesses than the tree has room for.
    """

    allowed: int
    ranks: tuple[int, ...]
    is_leaf: bool
    is_short: bool


def accept_length(tree: TreeShape) -> float:
    """The assumed accept length of a tree: ACCEPT_LENGTHS, interpolated over the logarithm of the number of nodes."""
    nodes = min(tree.rows, ACCEPT_LENGTHS[-1][0])
    low, high = next((low, high) for low, high in pairwise(ACCEPT_LENGTHS) if nodes <= high[0])
    share = math.log2(nodes / low[0]) / math.log2(high[0] / low[0])
    return min(low[1] + share * (high[1] - low[1]), tree.steps + 1)


def assumed(depth: int) -> float:
    """The value of FIRST_CHILD for a depth, from 1 on."""
    return FIRST_CHILD[min(depth, len(FIRST_CHILD)) - 1]


def depth_of(tree: TreeShape) -> int:
    return min(tree.steps, tree.num_draft_tokens - 1)


def gains(tree: TreeShape, first_child: Sequence[float]) -> list[float]:
    """[depth + 1]: the tokens beyond the first that a round emits if it may accept nodes down to depth 0, 1, 2, ...

    first_child: how often the first child is accepted, by depth from 1 on.
    """
    others = _other_child_rate(tree)
    reached, summed = 1.0, [0.0]
    for depth in range(1, depth_of(tree) + 1):
        first = first_child[depth - 1]
        reached *= first + (1 - first) * min(others * first / assumed(depth), 1.0)
        summed.append(summed[-1] + reached)
    return [SHARING * gain for gain in summed] if tree.shared_rows else summed


@cache
def _other_child_rate(tree: TreeShape) -> float:
    """How often another child is accepted if the first child is not: the rate that gives `accept_length`."""
    if tree.topk == 1:
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        reached, length = 1.0, 1.0
        for depth in range(1, depth_of(tree) + 1):
            reached *= assumed(depth) + (1 - assumed(depth)) * middle
            length += reached
        low, high = (middle, high) if length < accept_length(tree) else (low, middle)
    return low


def at_level(level: float, steps: int) -> list[float]:
    """How often first children are accepted, by depth: FIRST_CHILD, scaled so that depth 1 has the rate `level`."""
    return [min(level * assumed(depth) / assumed(1), MOST) for depth in range(1, steps + 1)]


@dataclass
class Count:
    """A rate from counts: how often something was tried, and how often it succeeded.  Older tries count less."""

    tried: float = 0.0
    found: float = 0.0

    def fade(self, factor: float) -> None:
        self.tried *= factor
        self.found *= factor

    def share(self, prior: float, weight: float) -> float:
        return (self.found + weight * prior) / (self.tried + weight)


@dataclass
class Acceptance:
    """What the rounds so far say of acceptance.

    steps: depth of the deepest tree; least_rounds, least_samples: an estimate remembers so many rounds and so many
    samples, whichever takes longer; least_prior: the least weight of the assumptions.
    """

    steps: int
    least_rounds: int
    least_samples: int
    least_prior: float = PRIOR
    depths: list[Count] = field(init=False)
    forms: dict[TreeShape, Count] = field(default_factory=dict)
    recent: Count = field(default_factory=Count)
    prior: float = PRIOR

    def __post_init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.depths = [Count() for _ in range(self.steps)]
        self.forms, self.recent, self.prior = {}, Count(), PRIOR

    def doubt(self, samples: float) -> None:
        """Reduce the weight of all rounds so far to at most this many samples."""
        if self.steps and self.depths[0].tried > samples:
            factor = samples / self.depths[0].tried
            for each in (*self.depths, *self.forms.values()):
                each.fade(factor)

    @property
    def first_child(self) -> list[float]:
        """How often the first child is accepted, by depth.

        A depth that was rarely tried has the assumed rate, corrected as much as the depth above was.
        """
        found: list[float] = []
        follows = 1.0
        for depth, count in enumerate(self.depths, 1):
            found.append(min(count.share(min(assumed(depth) * follows, MOST), self.prior), MOST))
            follows = found[-1] / assumed(depth)
        return found

    def length(self, tree: TreeShape) -> float:
        """The expected tokens of a round of this tree, for a request that may accept nodes at any depth."""
        return 1 + gains(tree, self.first_child)[-1] * self._form_factor(tree)

    def _form_factor(self, tree: TreeShape) -> float:
        """The real gain of the form, divided by the predicted gain."""
        count = self.forms.get(tree)
        return 1.0 if count is None else (count.found + FORM_PRIOR) / (count.tried + FORM_PRIOR)

    def add(self, tree: TreeShape, samples: Sequence[Sample]) -> None:
        """Count a round of this tree."""
        depth = depth_of(tree)
        if not samples or not depth:
            return
        factor = 1 - 1 / max(self.least_rounds, self.least_samples / len(samples))
        form = self.forms.setdefault(tree, Count())
        expected = gains(tree, self.first_child)
        predicted = sum(expected[min(sample.allowed, depth)] for sample in samples)
        self._doubt_if_surprised(predicted * self._form_factor(tree), samples)
        self.prior = max(FADING * self.prior, self.least_prior)
        for count in (*self.depths, *self.forms.values()):
            count.fade(factor)
        # In a large batch, many samples are equal.
        for sample, weight in Counter(samples).items():
            self._count_first_children(sample, min(sample.allowed, depth), weight)
            form.tried += weight * expected[min(sample.allowed, depth)]
            form.found += weight * len(sample.ranks)

    def _doubt_if_surprised(self, expected: float, samples: Sequence[Sample]) -> None:
        """Doubt the older rounds if the latest ones gain much more or less than expected."""
        self.recent.fade(1 - 1 / max(2, RECENT / len(samples)))
        self.recent.tried += expected
        self.recent.found += sum(len(sample.ranks) for sample in samples)
        tried, found = self.recent.tried, self.recent.found
        if abs(found - tried) > SURPRISE * math.sqrt(SPREAD * tried + 1):
            self.doubt(max(RECENT / 4, len(samples)))
            self.recent = Count()

    def _count_first_children(self, sample: Sample, allowed: int, weight: int) -> None:
        """Count at each depth whether the first child was accepted, as long as the path follows first children."""
        ranks = sample.ranks
        for depth in range(min(allowed, len(ranks) + 1)):
            count = self.depths[depth]
            if depth == len(ranks):
                # A leaf may have no child because other nodes were more probable.  Then the count learns nothing.
                count.tried += weight * (not sample.is_leaf or sample.is_short)
                return
            count.tried += weight
            if ranks[depth]:
                return
            count.found += weight
