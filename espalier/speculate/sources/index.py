"""Texts that the engine has served as a source: what followed the same tokens there.

The texts stand in a ring, and tables say where runs of tokens ended last.  Both have a fixed size.  A table may name a
place that something else was written to since, so tokens are compared before they are believed.  Requests of one client
see only texts of that client.
"""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from espalier.request import Request
from espalier.slots import Guess
from espalier.speculate.sources.base import kind_of, strength_of

# The lengths of the runs that are looked up, the longest first.
RUNS = (12, 6, 3)
# Of a token: its id, its text and a place in each table.
BYTES_A_TOKEN = 4 + 8 + 8 * len(RUNS)
# The most tokens that are compared to find how well a place matches.
MOST_MATCHING = 16
ODD = np.uint64(0x9E3779B97F4A7C15)


class IndexSource:
    """num_bytes: of the ring and its tables."""

    def __init__(self, num_bytes: int) -> None:
        self.size = max(num_bytes // BYTES_A_TOKEN, 1)
        self.tokens = np.full(self.size, -1, dtype=np.int32)
        # Of each token: the number of its text, and the salt of the text by number.
        self.texts = np.zeros(self.size, dtype=np.int64)
        self.tables = {run: np.full(self.size, -1, dtype=np.int64) for run in RUNS}
        self.end = 0
        self.num_texts = 0

    def enter(self, request: Request) -> None:
        pass

    def read(self, request: Request, tokens: Sequence[int]) -> None:
        pass

    def leave(self, request: Request) -> None:
        if request.error is None and request.output:
            self.add(request.tokens, salt_of(request.client))

    def add(self, tokens: Sequence[int], salt: int) -> None:
        """Append a text, of which the last tokens stay if it is longer than the ring."""
        text = np.array(tokens[-self.size :], dtype=np.int64)
        places = (self.end + np.arange(len(text))) % self.size
        self.num_texts += 1
        self.tokens[places] = text
        # A text is known by its salt and its number: no run goes over from one to the next.
        self.texts[places] = _text(salt, self.num_texts)
        self.end = (self.end + len(text)) % self.size
        for run, table in self.tables.items():
            if len(text) >= run:
                table[_hashes(text, run, salt) % np.uint64(self.size)] = places[run - 1 :]

    def guesses(self, request: Request, width: int) -> list[Guess]:
        last = (request.prompt[-MOST_MATCHING:] + request.output[-MOST_MATCHING:])[-MOST_MATCHING:]
        start = request.num_tokens - 1
        return [
            Guess(start, kind_of("index", strength_of(matching // 2)), ahead)
            for matching, ahead in self.find(last, salt_of(request.client), width)
        ]

    def find(self, last: Sequence[int], salt: int, width: int) -> list[tuple[int, tuple[int, ...]]]:
        """(tokens that match, the tokens that followed) of places where the last tokens stand, longest runs first."""
        text, made, seen = np.array(last, dtype=np.int64), [], set()
        for run, table in self.tables.items():
            if len(text) < run:
                continue
            place = int(table[int(_hashes(text[-run:], run, salt)[0] % np.uint64(self.size))])
            if place < 0 or place in seen:
                continue
            seen.add(place)
            matching = self._matching(text, place, salt)
            ahead = self._ahead(place, width)
            if matching >= run and ahead:
                made.append((matching, ahead))
        return made

    def _matching(self, text: np.ndarray, place: int, salt: int) -> int:
        """How many of the last tokens of `text` end at `place`, in one text of this salt."""
        if self.texts[place] >> NUMBER_BITS != salt:
            return 0
        places = (place - np.arange(len(text))) % self.size
        equal = (self.tokens[places] == text[::-1]) & (self.texts[places] == self.texts[place])
        return int(equal.cumprod().sum())

    def _ahead(self, place: int, width: int) -> tuple[int, ...]:
        places = (place + 1 + np.arange(min(width, self.size - 1))) % self.size
        inside = (self.texts[places] == self.texts[place]).cumprod().sum()
        return tuple(self.tokens[places[:inside]].tolist())


# A text's number has the low bits, so that a text is told from the one before it; its salt has the others.
NUMBER_BITS = 16


def salt_of(client: str) -> int:
    """47 bits that tell clients apart."""
    return int.from_bytes(blake2b(client.encode(), digest_size=8).digest()) >> (NUMBER_BITS + 1)


def _text(salt: int, number: int) -> int:
    return salt << NUMBER_BITS | number % (1 << NUMBER_BITS)


def _hashes(text: np.ndarray, run: int, salt: int) -> np.ndarray:
    """[n - run + 1] uint64: of each run of tokens, in order."""
    made = np.full(len(text) - run + 1, salt, dtype=np.uint64)
    for at in range(run):
        made = (made ^ text[at : at + len(made)].astype(np.uint64)) * ODD
        made ^= made >> np.uint64(29)
    return made
