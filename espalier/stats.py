"""Statistics of speculation, for one request or for all requests, and the token counts of one request."""

from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any


@dataclass(frozen=True)
class Usage:
    """Token counts of one request.

    cached_tokens: prompt tokens that were in the prefix cache.  accepted_prediction_tokens: tokens of the request's
    prediction that the output contains.  rejected_prediction_tokens: all other tokens of the prediction.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


@dataclass
class LearnStats:
    """The figures of online learning, which trains the draft from served texts.

    swaps: how often a trained draft replaced the served draft.  trainings: how many trainings ended.  failures: failed
    trainings and failed writes of files.  texts, bytes: number and size of the texts that are kept for training.
    The last training measured three accept lengths, on texts that it did not train on; they are 0 before.
    startup_accept_length: of the draft given at startup.  served_accept_length: of the draft that was served before the
    training.  trained_accept_length: of the draft from the training."""

    swaps: int = 0
    trainings: int = 0
    failures: int = 0
    startup_accept_length: float = 0.0
    served_accept_length: float = 0.0
    trained_accept_length: float = 0.0
    texts: int = 0
    bytes: int = 0


@dataclass
class SpeculationStats:
    """Counts over rounds.  The token that a prefill picks, and rounds from which no token was kept, are not counted.

    drafted: how many draft tokens were verified.  histogram[i]: how many rounds emitted i tokens.
    rounds_tried_by_depth[d-1]: how many rounds tried depth d: they accepted depth d - 1, and depth d was allowed.
    rounds_accepted_by_depth[d-1]: how many rounds accepted depth d."""

    drafted: int = 0
    histogram: list[int] = field(default_factory=list)
    rounds_tried_by_depth: list[int] = field(default_factory=list)
    rounds_accepted_by_depth: list[int] = field(default_factory=list)

    @property
    def rounds(self) -> int:
        return sum(self.histogram)

    @property
    def emitted(self) -> int:
        return sum(length * rounds for length, rounds in enumerate(self.histogram))

    @property
    def accepted(self) -> int:
        """Draft tokens that were accepted and emitted."""
        return sum(self.rounds_accepted_by_depth)

    @property
    def accept_length(self) -> float:
        """The mean number of tokens that a round emitted: 1.0 for plain decoding, 0.0 before the first round."""
        return self.emitted / self.rounds if self.rounds else 0.0

    @property
    def acceptance_by_depth(self) -> list[tuple[int, int]]:
        """For each depth from 1 on, (the number of rounds that tried it, the number of rounds that accepted it)."""
        return list(zip(self.rounds_tried_by_depth, self.rounds_accepted_by_depth, strict=True))

    def add(self, emitted: int, accepted: int, drafted: int, depth: int) -> None:
        """Count one round of one request.

        emitted: how many tokens were kept.  accepted: how many of these were draft tokens: all but the last, or
        all, if a draft token ended the request.  drafted: how many draft tokens were verified.  depth: the greatest
        allowed depth."""
        tried = min(emitted, depth)
        self.drafted += drafted
        tried_by_depth, accepted_by_depth = self.rounds_tried_by_depth, self.rounds_accepted_by_depth
        for counters, size in ((self.histogram, emitted + 1), (tried_by_depth, tried), (accepted_by_depth, tried)):
            if len(counters) < size:
                counters += [0] * (size - len(counters))
        self.histogram[emitted] += 1
        for at in range(tried):
            tried_by_depth[at] += 1
        for at in range(accepted):
            accepted_by_depth[at] += 1

    def merge(self, other: "SpeculationStats") -> None:
        """Add the counts of `other`."""
        self.drafted += other.drafted
        for name in ("histogram", "rounds_tried_by_depth", "rounds_accepted_by_depth"):
            pairs = zip_longest(getattr(self, name), getattr(other, name), fillvalue=0)
            setattr(self, name, [own_count + other_count for own_count, other_count in pairs])

    def as_dict(self) -> dict[str, Any]:
        """Returns the counts, and the values that are computed from the counts, for JSON."""
        names = ("rounds", "drafted", "accepted", "accept_length", "histogram", "acceptance_by_depth")
        return {name: getattr(self, name) for name in names}
