"""Counts how often guesses are correct, by depth and by kind (the source, and how well the guess matched: slots.py).

All requests are counted together, and the draft's guesses also for each request.  The counts come from results that the
host reads anyway.  Each guess is counted once, when the host reads the result of its round, even if the guess was not
verified.  So equal requests in equal order give equal numbers.  Old counts lose weight."""

import math
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

import numpy as np

from espalier.slots import (
    MATCH_STRENGTHS,
    NODE_KINDS,
    NUM_CONFIDENCE_LEVELS,
    NUM_RANKS,
    PATH_KINDS,
    SOURCES,
    UNDRAFTED_OFFSET,
)
from espalier.speculate.sources.calibrate import CandidateNodes, middle_probability

# The assumed share of guesses that are right, for each source, at match strengths 1 to MATCH_STRENGTHS.  After a match
# of m tokens in "text", m / (m + 1) is assumed.  For a draft's nodes, the draft's own probability is assumed.
INITIAL_SURVIVAL = {
    "text": (1 / 2, 2 / 3, 3 / 4, 4 / 5),
    "prediction": (0.6, 0.8, 0.9, 0.95),
    "index": (0.5, 0.7, 0.85, 0.92),
}
# INITIAL_SURVIVAL is multiplied by this for nodes that the draft of the same round does not propose.
UNDRAFTED_FACTOR = 0.4
# INITIAL_SURVIVAL is multiplied by this for a request with a temperature above 0.
SAMPLED_FACTOR = 0.5
# INITIAL_SURVIVAL has the weight of PRIOR_WEIGHT counted guesses.  A guess's weight is halved after GUESS_HALF_LIFE
# later guesses of the same kind.
PRIOR_WEIGHT = 4.0
GUESS_HALF_LIFE = 256.0
# The device gets the probabilities again once one of them has changed by MIN_PROBABILITY_CHANGE.  This is checked after
# every MIN_COUNTS_TO_SEND counts.
MIN_PROBABILITY_CHANGE, MIN_COUNTS_TO_SEND = 0.02, 8
# A request's own counts start with REQUEST_PRIOR_WEIGHT draft nodes, as if all were expected to be right and were
# right.  A node's weight is halved after REQUEST_HALF_LIFE rounds.  The ratio in `draft_skill` is at least 1 /
# MAX_DRAFT_SKILL, and at most MAX_DRAFT_SKILL.
REQUEST_PRIOR_WEIGHT, REQUEST_HALF_LIFE, MAX_DRAFT_SKILL = 2.0, 8.0, 50.0


class SurvivalCounts:
    """The counts of right guesses.

    num_tried: [NODE_KINDS, S], by kind and depth: how many guesses were right at all depths above.
    num_right: [NODE_KINDS, S]: how many of these guesses were right at this depth too.
    path_counts: [2, 2, 1 + UNDRAFTED_OFFSET, S], by (0 for greedy, 1 for sampling requests; 0 for tried, 1 for right;
    kind; depth).  Here the kinds do not say whether the draft proposed the tokens too (UNDRAFTED_OFFSET).
    counts_of_request: by request id: (how many nodes of its draft were expected to be right, how many were right)."""

    def __init__(self, steps: int) -> None:
        by_kind = [
            1.0,
            *(INITIAL_SURVIVAL[source][strength] for source in SOURCES for strength in range(MATCH_STRENGTHS)),
        ]
        by_kind += [UNDRAFTED_FACTOR * first for first in by_kind[1:]]
        by_kind += list(map(middle_probability, range(NUM_CONFIDENCE_LEVELS))) * (2 * NUM_RANKS)
        self.initial_survival = np.array(by_kind)
        self.num_tried = np.zeros((NODE_KINDS, steps))
        self.num_right = np.zeros((NODE_KINDS, steps))
        self.path_counts = np.zeros((2, 2, 1 + UNDRAFTED_OFFSET, steps))
        self.counts_of_request: dict[str, tuple[float, float]] = {}
        self._sent_table: np.ndarray | None = None
        self._num_counted = 0

    @property
    def probabilities(self) -> np.ndarray:
        """[NODE_KINDS, S]: the probability that a guess is right at a depth if it was right at all depths above.

        Few guesses reach a great depth.  So each depth starts from the probability of the depth above, which weighs as
        much as PRIOR_WEIGHT guesses."""
        probabilities = np.empty_like(self.num_tried)
        above = self.initial_survival
        for depth in range(probabilities.shape[1]):
            above = (self.num_right[:, depth] + PRIOR_WEIGHT * above) / (self.num_tried[:, depth] + PRIOR_WEIGHT)
            probabilities[:, depth] = above
        return probabilities

    def count_path(
        self,
        kind: int,
        path: Sequence[int],
        emitted: Sequence[int],
        num_drafted: int | None = None,
        is_sampled: bool = False,
    ) -> int:
        """Counts a path of this kind (path_kind).  Returns how many tokens at the path's start the target picked too.

        emitted: the tokens that the target picked at the depths of the path.  num_drafted: how many of the path's
        tokens the draft proposed too; None without a draft."""
        self._num_counted += 1
        pairs = list(zip(path, emitted, strict=False))[: self.num_tried.shape[1]]
        num_followed = next((at for at, (predicted, got) in enumerate(pairs) if predicted != got), len(pairs))
        decay = 0.5 ** (1 / GUESS_HALF_LIFE)
        num_proposed = len(pairs) if num_drafted is None else min(num_drafted, len(pairs))
        for of_kind, begin, end in ((kind, 0, num_proposed), (kind + UNDRAFTED_OFFSET, num_proposed, len(pairs))):
            tried = min(num_followed + 1, end)
            if begin < tried:
                for counts, last in ((self.num_tried, tried), (self.num_right, min(num_followed, end))):
                    counts[of_kind] *= decay
                    counts[of_kind, begin:last] += 1
        path_counts = self.path_counts[int(is_sampled), :, kind]
        path_counts *= decay
        path_counts[0, : min(num_followed + 1, len(pairs))] += 1
        path_counts[1, :num_followed] += 1
        return num_followed

    def path_probabilities(self, kind: int, is_sampled: bool = False) -> list[float]:
        """Returns, for each depth d, the probability that a path of this kind is right at all depths from 1 to d.

        The draft may or may not propose the same tokens."""
        above, steps = float(self.initial_survival[kind]) * (SAMPLED_FACTOR if is_sampled else 1.0), []
        for num_tried, num_followed in self.path_counts[int(is_sampled), :, kind].T.tolist():
            above = (num_followed + PRIOR_WEIGHT * above) / (num_tried + PRIOR_WEIGHT)
            steps.append(above)
        return list(accumulate(steps, mul))

    def count_draft_nodes(
        self, request_ids: Sequence[str], candidates: np.ndarray, emitted: Sequence[Sequence[int]]
    ) -> None:
        """Counts the draft's nodes of a round.

        request_ids: [B].  candidates: [B, D], the nodes of each request's tree, packed by `pack_nodes`.  emitted: the
        emitted tokens of each request."""
        exists, kinds, depths, parents, tokens = CandidateNodes.unpack(candidates)
        if not (kinds >= PATH_KINDS).any():
            return
        emitted_rows = np.full((len(request_ids), self.num_tried.shape[1]), -2)
        for row, of_request in zip(emitted_rows, emitted, strict=True):
            row[: len(of_request)] = of_request[: len(row)]
        emitted_at_depth = np.take_along_axis(emitted_rows, depths - exists, 1)
        # The root counts as right.
        is_right = exists & (tokens == emitted_at_depth) | ~exists & (np.arange(candidates.shape[1]) == 0)
        # A node was tried if its parent was right and the target picked a token at the node's depth.
        was_tried = exists & (emitted_at_depth >= 0)
        for depth in range(1, self.num_tried.shape[1] + 1):
            at_depth = exists & (depths == depth)
            was_tried &= ~at_depth | np.take_along_axis(is_right, parents, 1)
            is_right &= ~at_depth | was_tried
        was_tried &= kinds >= PATH_KINDS
        self._count_request_draft(request_ids, was_tried, is_right, self.probabilities[kinds, depths - exists])
        at = kinds[was_tried], depths[was_tried] - 1
        decay = 0.5 ** (np.bincount(at[0], minlength=NODE_KINDS) / GUESS_HALF_LIFE)[:, None]
        self.num_tried *= decay
        self.num_right *= decay
        np.add.at(self.num_tried, at, 1)
        np.add.at(self.num_right, at, is_right[was_tried])
        self._num_counted += 1

    def _count_request_draft(
        self, request_ids: Sequence[str], was_tried: np.ndarray, is_right: np.ndarray, predicted: np.ndarray
    ) -> None:
        """Updates counts_of_request.  The arrays are [B, D].  predicted: the probability that a tried node is right."""
        decay = 0.5 ** (1 / REQUEST_HALF_LIFE)
        expected, right = (predicted * was_tried).sum(1).tolist(), (is_right & was_tried).sum(1).tolist()
        for request_id, num_expected, num_right in zip(request_ids, expected, right, strict=True):
            old_expected, old_right = self.counts_of_request.get(request_id, (0.0, 0.0))
            self.counts_of_request[request_id] = old_expected * decay + num_expected, old_right * decay + num_right

    def draft_skill(self, request_id: str) -> float:
        """Returns log(right nodes of this request's draft / nodes that were expected to be right)."""
        num_expected, num_right = self.counts_of_request.get(request_id, (0.0, 0.0))
        ratio = (num_right + REQUEST_PRIOR_WEIGHT) / (num_expected + REQUEST_PRIOR_WEIGHT)
        return math.log(min(max(ratio, 1 / MAX_DRAFT_SKILL), MAX_DRAFT_SKILL))

    def table_to_send(self) -> np.ndarray | None:
        """Returns [NODE_KINDS, S] float32: the log-probabilities to send; None if they have hardly changed since
        they were sent."""
        if self._sent_table is not None and self._num_counted < MIN_COUNTS_TO_SEND:
            return None
        probabilities, self._num_counted = self.probabilities, 0
        if self._sent_table is not None and np.abs(probabilities - self._sent_table).max() < MIN_PROBABILITY_CHANGE:
            return None
        self._sent_table = probabilities
        return np.log(probabilities).astype(np.float32)
