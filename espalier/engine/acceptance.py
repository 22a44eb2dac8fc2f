"""Estimates how many tokens a round of any tree emits, from the rounds that the host has read.

What is learned: by depth, how often the first child of a path of first children is accepted, from trees of any form;
and for each form, by how much it gains more or less than follows from that.  What is assumed of a form that did not
run: the other children of a node together are accepted more often where the first is, in the proportion of
FIRST_CHILD; how much they add follows from ACCEPT_LENGTHS.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import NamedTuple

from espalier.layout import TreeShape

# Accept length by number of nodes, and whose they are.
ACCEPT_LENGTHS = ((1, 1.0), (2, 1.76), (4, 2.55), (8, 2.85), (16, 3.5), (64, 4.0))
ACCEPTED_BY = "an EAGLE-3 head of llama-3.1-8b"
# How often that head's first child is accepted after its parent, by depth; the last holds for all deeper ones.
FIRST_CHILD = (0.76, 0.64, 0.63)
# No estimate is above it: a depth at which every guess was accepted says little of the next.
MOST = 0.98
# What is assumed before anything was found counts as so many requests of a round; that a form gains what follows from
# the acceptance of first children, as so many tokens.
PRIOR, FORM_PRIOR = 3.0, 12.0
# With each round the former weighs so much of what it did.
FADING = 0.9
# Another text is noticed in so many requests of rounds: what they gained differs from what was expected by so many
# standard deviations.  A token that a round gains counts as SPREAD of variance.
RECENT, SURPRISE, SPREAD = 32, 4.0, 1.5


class Sample(NamedTuple):
    """One request of a round.

    allowed: depth down to which it may accept nodes; ranks: of each accepted node among its siblings, 0 for the most
    probable; is_leaf: whether the last accepted node has no child in the tree; is_short: whether the draft had fewer
    guesses than the tree has nodes.
    """

    allowed: int
    ranks: Sequence[int]
    is_leaf: bool
    is_short: bool


def accept_length(tree: TreeShape) -> float:
    """The accept length of a tree: ACCEPT_LENGTHS, interpolated over the logarithm of the number of nodes."""
    nodes = min(tree.num_draft_tokens, ACCEPT_LENGTHS[-1][0])
    low, high = next((low, high) for low, high in pairwise(ACCEPT_LENGTHS) if nodes <= high[0])
    share = math.log2(nodes / low[0]) / math.log2(high[0] / low[0])
    return min(low[1] + share * (high[1] - low[1]), tree.steps + 1)


def assumed(depth: int) -> float:
    """FIRST_CHILD at a depth, from 1 on."""
    return FIRST_CHILD[min(depth, len(FIRST_CHILD)) - 1]


def depth_of(tree: TreeShape) -> int:
    return min(tree.steps, tree.num_draft_tokens - 1)


def gains(tree: TreeShape, first_child: Sequence[float]) -> list[float]:
    """[depth + 1]: tokens beyond the first that a round emits down to each depth, from 0 on.

    first_child: how often the first child is accepted, by depth from 1 on.
    """
    others = _others(tree)
    reached, summed = 1.0, [0.0]
    for depth in range(1, depth_of(tree) + 1):
        first = first_child[depth - 1]
        reached *= first + (1 - first) * min(others * first / assumed(depth), 1.0)
        summed.append(summed[-1] + reached)
    return summed


@cache
def _others(tree: TreeShape) -> float:
    """How often another child is accepted where the first is not, so that the tree has its `accept_length`."""
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
    """First children's acceptance by depth, in the proportion of FIRST_CHILD, with `level` at depth 1."""
    return [min(level * assumed(depth) / assumed(1), MOST) for depth in range(1, steps + 1)]


@dataclass
class Count:
    """Sums in which what is older counts less."""

    tried: float = 0.0
    found: float = 0.0

    def fade(self, factor: float) -> None:
        self.tried *= factor
        self.found *= factor

    def share(self, prior: float, weight: float) -> float:
        return (self.found + weight * prior) / (self.tried + weight)


@dataclass
class Acceptance:
    """steps: of the deepest tree; least_rounds, least_samples: what an estimate remembers, the longer of both;
    least_prior: down to which what is assumed fades, so that it does not take the place of findings that are doubted.
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
        """Let all that was found so far count as so many samples at most."""
        if self.steps and self.depths[0].tried > samples:
            factor = samples / self.depths[0].tried
            for each in (*self.depths, *self.forms.values()):
                each.fade(factor)

    @property
    def first_child(self) -> list[float]:
        """By depth.  A depth that was rarely tried follows the one above it."""
        found: list[float] = []
        follows = 1.0
        for depth, count in enumerate(self.depths, 1):
            found.append(min(count.share(min(assumed(depth) * follows, MOST), self.prior), MOST))
            follows = found[-1] / assumed(depth)
        return found

    def length(self, tree: TreeShape) -> float:
        """Tokens that a round of this tree is expected to emit for a request without limits."""
        return 1 + gains(tree, self.first_child)[-1] * self._lift(tree)

    def _lift(self, tree: TreeShape) -> float:
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
        self._watch(sum(expected[min(each.allowed, depth)] for each in samples) * self._lift(tree), samples)
        self.prior = max(FADING * self.prior, self.least_prior)
        for each in (*self.depths, *self.forms.values()):
            each.fade(factor)
        for sample in samples:
            self._add_path(sample, min(sample.allowed, depth))
            form.tried += expected[min(sample.allowed, depth)]
            form.found += len(sample.ranks)

    def _watch(self, expected: float, samples: Sequence[Sample]) -> None:
        """Doubt what is old if a round gains otherwise than expected."""
        self.recent.fade(1 - 1 / max(2, RECENT / len(samples)))
        self.recent.tried += expected
        self.recent.found += sum(len(each.ranks) for each in samples)
        tried, found = self.recent.tried, self.recent.found
        if abs(found - tried) > SURPRISE * math.sqrt(SPREAD * tried + 1):
            self.doubt(max(RECENT / 4, len(samples)))
            self.recent = Count()

    def _add_path(self, sample: Sample, allowed: int) -> None:
        """Count the first children of a path of first children, and the child where that path ends."""
        ranks = sample.ranks
        for depth in range(min(allowed, len(ranks) + 1)):
            count = self.depths[depth]
            if depth == len(ranks):
                # A leaf may have no child because others were more probable; then nothing is known.
                count.tried += not sample.is_leaf or sample.is_short
                return
            count.tried += 1
            if ranks[depth]:
                return
            count.found += 1
