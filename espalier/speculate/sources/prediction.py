"""A source for `prediction`, a text that the client expects as the output.  It tracks how far the output has come."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from espalier.request import Request
from espalier.slots import Guess
from espalier.speculate.sources.base import kind_of, strength_of

# Once the output has left the prediction, the output's last REJOIN tokens are looked up to find its place again.
REJOIN = 3


@dataclass
class PredictionProgress:
    """A prediction and how far the output has followed it.

    tokens: of the prediction; places: for each run of REJOIN tokens, the positions where the run ends, in order;
    next: the position of the expected token; matching: how many tokens before `next` agreed in a row; appeared: for
    each token of the prediction, whether the output has contained it.
    """

    tokens: Sequence[int]
    places: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    next: int = 0
    matching: int = 0
    appeared: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        self.appeared = bytearray(len(self.tokens))
        for end in range(REJOIN, len(self.tokens) + 1):
            self.places.setdefault(tuple(self.tokens[end - REJOIN : end]), []).append(end)

    def push(self, last: Sequence[int]) -> None:
        """Take in a new token of the output.  last: the last 1 to REJOIN tokens of the output, the new one included."""
        if self.next < len(self.tokens) and self.tokens[self.next] == last[-1]:
            self.appeared[self.next] = True
            self.next += 1
            self.matching += 1
            return
        self.matching = 0
        places = self.places.get(tuple(last), ())
        if places:
            # Edits go forward, so take the first place behind `next`, or else the last place.
            self.next = next((end for end in places if end > self.next), places[-1])
            self.matching = REJOIN
            self.appeared[self.next - REJOIN : self.next] = b"\1" * REJOIN


class PredictionSource:
    def __init__(self) -> None:
        self.progress: dict[str, PredictionProgress] = {}

    def enter(self, request: Request) -> None:
        if request.id not in self.progress and request.params.prediction:
            self.progress[request.id] = PredictionProgress(request.params.prediction)
            self.read(request, request.output)

    def read(self, request: Request, tokens: Sequence[int]) -> None:
        progress = self.progress.get(request.id)
        if progress is not None:
            first = len(request.output) - len(tokens)
            for at in range(first + 1, len(request.output) + 1):
                progress.push(request.output[max(0, at - REJOIN) : at])
            request.num_predicted = sum(progress.appeared)

    def guesses(self, request: Request, width: int) -> list[Guess]:
        progress = self.progress.get(request.id)
        # While the output does not agree with the prediction, there is nothing to guess.
        if progress is None or (request.output and not progress.matching):
            return []
        ahead = tuple(progress.tokens[progress.next : progress.next + width])
        kind = kind_of("prediction", strength_of(progress.matching))
        return [Guess(request.num_tokens - 1, kind, ahead)] if ahead else []

    def leave(self, request: Request) -> None:
        self.progress.pop(request.id, None)
