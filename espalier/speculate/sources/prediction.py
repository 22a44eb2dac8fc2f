"""A source for `prediction`, a text that the client expects as the output.  The source tracks how far the output has
followed the prediction, and guesses the next tokens of the prediction."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from espalier.request import Request
from espalier.slots import Guess
from espalier.speculate.sources.base import HostSource, match_strength, path_kind

# When the output has left the prediction, the last REJOIN_TOKENS tokens of the output are looked up in the prediction.
REJOIN_TOKENS = 3


@dataclass
class PredictionProgress:
    """A predicted text, and how far the output has followed the text.

    tokens: the prediction.  ngram_ends: for each n-gram of REJOIN_TOKENS tokens, the positions after its occurrences,
    in order.  next_position: the index in `tokens` of the expected next token.  num_matching: how many of the tokens
    right before next_position agree with the output.  has_appeared: for each token, whether the output has contained
    it."""

    tokens: Sequence[int]
    ngram_ends: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    next_position: int = 0
    num_matching: int = 0
    has_appeared: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        self.has_appeared = bytearray(len(self.tokens))
        for end in range(REJOIN_TOKENS, len(self.tokens) + 1):
            self.ngram_ends.setdefault(tuple(self.tokens[end - REJOIN_TOKENS : end]), []).append(end)

    def add_token(self, last_tokens: Sequence[int]) -> None:
        """Follows one more output token.  last_tokens: the output's last REJOIN_TOKENS tokens, including this one."""
        if self.next_position < len(self.tokens) and self.tokens[self.next_position] == last_tokens[-1]:
            self.has_appeared[self.next_position] = True
            self.next_position += 1
            self.num_matching += 1
            return
        self.num_matching = 0
        ngram_ends = self.ngram_ends.get(tuple(last_tokens), ())
        if ngram_ends:
            # Edits go forward, so take the first place after next_position, or else the last place.
            self.next_position = next((end for end in ngram_ends if end > self.next_position), ngram_ends[-1])
            self.num_matching = REJOIN_TOKENS
            self.has_appeared[self.next_position - REJOIN_TOKENS : self.next_position] = b"\1" * REJOIN_TOKENS


class PredictionSource(HostSource):
    def __init__(self) -> None:
        self.progress: dict[str, PredictionProgress] = {}

    def add_request(self, request: Request) -> None:
        if request.id not in self.progress and request.params.prediction:
            self.progress[request.id] = PredictionProgress(request.params.prediction)
            self.add_tokens(request, request.output)

    def add_tokens(self, request: Request, tokens: Sequence[int]) -> None:
        """Called when `tokens` were appended to the output: follows them through the prediction."""
        progress = self.progress.get(request.id)
        if progress is not None:
            first = len(request.output) - len(tokens)
            for at in range(first + 1, len(request.output) + 1):
                progress.add_token(request.output[max(0, at - REJOIN_TOKENS) : at])
            request.num_predicted = sum(progress.has_appeared)

    def guesses(self, request: Request, max_length: int) -> list[Guess]:
        """Returns the next tokens of the prediction, if the last tokens of the output agree with it."""
        progress = self.progress.get(request.id)
        # While the output does not agree with the prediction, there is nothing to guess.
        if progress is None or (request.output and not progress.num_matching):
            return []
        continuation = tuple(progress.tokens[progress.next_position : progress.next_position + max_length])
        kind = path_kind("prediction", match_strength(progress.num_matching))
        return [Guess(request.num_tokens - 1, kind, continuation)] if continuation else []

    def remove_request(self, request: Request) -> None:
        self.progress.pop(request.id, None)
