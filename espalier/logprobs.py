"""Log-probabilities of tokens: a row of numbers for each token, and the objects that users read.

A round may emit hundreds of tokens, and a row costs less than an object.  Objects are built when the user reads them.

A row consists of int64 words: the token's id, rank and log-probability, then the id and log-probability of each of the
likeliest tokens at the same position.  A log-probability is stored as the bits of a float64.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, overload

import numpy as np

# Columns of a row: the token's id, rank and log-probability, and the first column of the likeliest tokens.
TOKEN, RANK, CHOSEN, TOP = range(4)


def row_words(num_top: int) -> int:
    """Returns the length, in int64 words, of a row that lists the `num_top` likeliest tokens."""
    return TOP + 2 * num_top


@dataclass(frozen=True)
class TokenLogprob:
    """The target's log-probability of a token, before temperature and masks.

    top: the likeliest tokens at the token's position, as (token id, log-probability).  rank: 1 for the likeliest token
    of the vocabulary; tokens with equal logits have the same rank.
    """

    token_id: int
    logprob: float
    top: list[tuple[int, float]]
    rank: int


# The type of an entry: TokenLogprob for an output, TokenLogprob | None for a prompt.
Entry = TypeVar("Entry")


class TokenLogprobs(Sequence[Entry], Generic[Entry]):
    """The log-probabilities of several tokens, in order.  Reads like a list, and equals a list of the same entries.

    rows: arrays [n, words] of equal width, in the format that the module describes.
    of_prompt: whether there is a first entry None, for the first prompt token, which has no log-probability."""

    __slots__ = ("rows", "of_prompt", "_entries")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, rows: Iterable[np.ndarray] = (), of_prompt: bool = False):
        self.rows = list(rows)
        self.of_prompt = of_prompt
        self._entries: list[Any] | None = None

    def add(self, rows: np.ndarray) -> "TokenLogprobs[Entry]":
        """Append `rows`, which the caller must not change afterwards.  Returns an object with only the new entries."""
        self.rows.append(rows)
        self._entries = None
        return TokenLogprobs((rows,))

    @property
    def has_nan(self) -> bool:
        """Whether a token's log-probability is NaN."""
        return any(np.isnan(rows.view(np.float64)[:, CHOSEN]).any() for rows in self.rows)

    def joined(self) -> np.ndarray:
        """Returns all rows as one array [n, words]."""
        return np.concatenate(self.rows) if self.rows else np.zeros((0, TOP), np.int64)

    def _read_entries(self) -> list[Any]:
        entries = self._entries
        if entries is None:
            entries = self._entries = [None] * self.of_prompt + _make_entries(self.joined())
        return entries

    def __len__(self) -> int:
        return sum(map(len, self.rows)) + self.of_prompt

    @overload
    def __getitem__(self, index: int) -> Entry: ...
    @overload
    def __getitem__(self, index: slice) -> list[Entry]: ...
    def __getitem__(self, index: int | slice) -> Entry | list[Entry]:
        return self._read_entries()[index]

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._read_entries())

    def __add__(self, other: Sequence[Entry]) -> list[Entry]:
        return [*self, *other]

    def __radd__(self, other: Sequence[Entry]) -> list[Entry]:
        return [*other, *self]

    def __eq__(self, other: object) -> bool:
        return self._read_entries() == list(other) if isinstance(other, TokenLogprobs | list) else NotImplemented

    def __repr__(self) -> str:
        return repr(self._read_entries())


# One entry per prompt token.  No token comes before the first one, so the first entry is None.
PromptLogprobs = TokenLogprobs[TokenLogprob | None]


def _make_entries(rows: np.ndarray) -> list[TokenLogprob]:
    """rows: [n, words], in the format that the module describes."""
    int_and_float_rows = zip(rows.tolist(), rows.view(np.float64).tolist(), strict=True)
    return [
        TokenLogprob(
            ints[TOKEN], floats[CHOSEN], list(zip(ints[TOP::2], floats[TOP + 1 :: 2], strict=True)), ints[RANK]
        )
        for ints, floats in int_and_float_rows
    ]
