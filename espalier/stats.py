"""What speculation brought: counts of a request, or of all of them.  Values only."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class SpeculationStats:
    """What rounds brought.  The prompt pass's token and a discarded last round are not counted.

    histogram[i]: rounds that emitted i tokens; drafted: draft tokens verified;
    reached[d-1], taken[d-1]: rounds in which depth d was tried (its parent accepted, its depth allowed), and accepted.
    """

    drafted: int = 0
    histogram: list[int] = field(default_factory=list)
    reached: list[int] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)

    @property
    def rounds(self) -> int:
        return sum(self.histogram)

    @property
    def emitted(self) -> int:
        return sum(length * rounds for length, rounds in enumerate(self.histogram))

    @property
    def accepted(self) -> int:
        """Draft tokens that were emitted."""
        return sum(self.taken)

    @property
    def accept_length(self) -> float:
        """Tokens a round, 1.0 being plain decoding; 0.0 before the first round."""
        return self.emitted / self.rounds if self.rounds else 0.0

    @property
    def acceptance_by_depth(self) -> list[tuple[int, int]]:
        """(tried, accepted) rounds for each depth from 1."""
        return list(zip(self.reached, self.taken, strict=True))

    def add(self, emitted: int, accepted: int, drafted: int, depth: int) -> None:
        """Count one round of one request.

        emitted: tokens it kept, `accepted` of them from the draft (all of them where an end token cut the round short);
        depth: of the deepest node that it could have accepted.
        """
        self.drafted += drafted
        _count(self.histogram, [emitted])
        _count(self.reached, range(min(emitted, depth)))
        _count(self.taken, range(accepted))
        self.taken += [0] * (len(self.reached) - len(self.taken))

    def merge(self, other: "SpeculationStats") -> None:
        """Add another's counts to these."""
        self.drafted += other.drafted
        for mine, theirs in (
            (self.histogram, other.histogram),
            (self.reached, other.reached),
            (self.taken, other.taken),
        ):
            mine += [0] * (len(theirs) - len(mine))
            mine[: len(theirs)] = [a + b for a, b in zip(mine, theirs, strict=False)]

    def as_dict(self) -> dict[str, Any]:
        """Counts and what follows from them, as JSON takes them."""
        names = ("rounds", "drafted", "accepted", "accept_length", "histogram", "acceptance_by_depth")
        return {name: getattr(self, name) for name in names}


def _count(counters: list[int], indices: Iterable[int]) -> None:
    for index in indices:
        counters += [0] * (index + 1 - len(counters))
        counters[index] += 1
