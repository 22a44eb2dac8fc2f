"""The source "text" on the host: finds the request's last tokens in its prompt and output, and guesses what followed.

The source is used if the host knows all tokens of a request before each round.  Tables map each n-gram to the position
after its last occurrence.  Each token enters the tables once, so a round costs the same however long the text is."""

from collections.abc import Sequence

from espalier.request import Request
from espalier.slots import Guess
from espalier.speculate.sources.base import MAX_MATCHING, HostSource, match_strength, path_kind

# The lengths of the n-grams that are looked up, the longest first.
NGRAM_LENGTHS = (4, 2, 1)


class IndexedText:
    """A request's tokens, indexed by n-grams.

    next_positions: for each length of NGRAM_LENGTHS, a map from an n-gram to the position after its last occurrence."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self.next_positions: dict[int, dict[tuple[int, ...], int]] = {length: {} for length in NGRAM_LENGTHS}
        self.add_tokens(tokens)

    def add_tokens(self, tokens: Sequence[int]) -> None:
        """Appends tokens to the text, and maps each n-gram that ends before a token to the position of the token."""
        for token in tokens:
            end = len(self.tokens)
            for length, next_positions in self.next_positions.items():
                if end >= length:
                    next_positions[tuple(self.tokens[end - length :])] = end
            self.tokens.append(token)

    def find_continuations(self, num_tokens: int) -> list[tuple[int, tuple[int, ...]]]:
        """Returns, for each place after tokens that equal the last tokens: (number of equal tokens, the next
        `num_tokens` tokens from the place on).  Places after longer n-grams come first.

        If the text ends before `num_tokens` tokens, the text from the place on is repeated."""
        tokens, end, by_place = self.tokens, len(self.tokens), {}
        for length, next_positions in self.next_positions.items():
            place = next_positions.get(tuple(tokens[-length:])) if end >= length else None
            if place is not None and place not in by_place:
                max_matching = min(MAX_MATCHING, place)
                matching = next(
                    (n for n in range(length, max_matching) if tokens[place - 1 - n] != tokens[-1 - n]), max_matching
                )
                continuation = tuple(tokens[place + at % (end - place)] for at in range(num_tokens))
                by_place[place] = (matching, continuation)
        return list(by_place.values())


class OwnTextSource(HostSource):
    def __init__(self) -> None:
        self.text_by_request: dict[str, IndexedText] = {}

    def add_request(self, request: Request) -> None:
        if request.id not in self.text_by_request:
            self.text_by_request[request.id] = IndexedText(request.tokens)

    def add_tokens(self, request: Request, tokens: Sequence[int]) -> None:
        if request.id in self.text_by_request:
            self.text_by_request[request.id].add_tokens(tokens)

    def guesses(self, request: Request, max_length: int) -> list[Guess]:
        """Returns the continuations, in the request's own text, of its last tokens."""
        start = request.num_tokens - 1
        return [
            Guess(start, path_kind("text", match_strength(matching)), continuation)
            for matching, continuation in self.text_by_request[request.id].find_continuations(max_length)
        ]

    def remove_request(self, request: Request) -> None:
        self.text_by_request.pop(request.id, None)
