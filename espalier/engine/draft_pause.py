"""Leaves guesses out of rounds while they cost more than they bring.

On a CPU a row of a round takes time, so a guess that is not accepted has a price.  DraftPause keeps the balance of the
rounds with guesses: tokens that were accepted, less the time of the rows.  It decides by counts, not by clocks, so that
equal requests run equal rounds.
"""

from collections.abc import Sequence

from espalier.engine.launch_input import LaunchInput, RequestResult
from espalier.request import Request

# The unit is the time of a round of one row.  A guess takes about so much of it, and to look for guesses so much, as
# measured on one core with models of 135M and less.
ROW = 0.03
LOOKUP = 0.05
# The balance is never more than MOST.  Below the limit guesses pause: -TRIAL where nothing is known, then -RETRY.
MOST, TRIAL, RETRY = 2.0, 1.0, 0.5
# Rounds of the first pause.  Each one that follows is twice as long as the one before, up to LONGEST.
SHORTEST, LONGEST = 16, 256


class DraftPause:
    """balance: what guesses have brought since they were tried last, in rounds; left: rounds of the pause."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Try guesses, because a new request comes in, whose text may repeat itself."""
        self.balance, self.limit, self.left, self.length = 0.0, -TRIAL, 0, SHORTEST

    def next_drafts(self) -> bool:
        """Whether the next round has guesses."""
        self.left = max(0, self.left - 1)
        return not self.left

    def add(self, batch: int, rows: int, accepted: int) -> None:
        """Count a round with guesses.  rows: beyond one a request; accepted: tokens, of all requests."""
        plain = 1 + ROW * (batch - 1)
        self.balance = min(MOST, self.balance + accepted / batch - (LOOKUP + ROW * rows) / plain)
        if self.balance == MOST:
            self.length = SHORTEST
        elif self.balance < self.limit:
            self.balance, self.limit, self.left = 0.0, -RETRY, 1 + self.length
            self.length = min(2 * self.length, LONGEST)


class Drafting:
    """Which rounds have guesses: those with a request that speculates, and where `pauses`, while guesses pay."""

    def __init__(self, steps: int, pauses: bool):
        self.steps = steps
        self.pause = DraftPause() if pauses else None

    def restart(self) -> None:
        if self.pause is not None:
            self.pause.restart()

    def next_drafts(self, batch: Sequence[Request]) -> bool:
        """Whether the next round, of these requests, has guesses."""
        can_draft = any(request.params.depth_limit(self.steps) for request in batch)
        return can_draft and (self.pause is None or self.pause.next_drafts())

    def read(self, launch_input: LaunchInput, rows: Sequence[RequestResult]) -> None:
        """Count a launch.  rows: its results."""
        if self.pause is not None and launch_input.drafts and not launch_input.is_prefill:
            guesses = max(sum(row.tree_size.at_depth) for row in rows)
            accepted = sum(len(row.tokens) - 1 for row in rows if row.tokens)
            self.pause.add(len(rows), guesses * len(rows), accepted)
