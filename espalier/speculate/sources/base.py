"""The contract of a source: it proposes paths of tokens that may follow a request's text, and rates how well each path
matches the text.

A source on the device makes Paths from the slot table (text.py).  A source on the host makes Guesses, which are paths
as plain values.  A launch sends the guesses to the device, where sent.py turns them into Paths.  merge_paths.py joins
all paths with the draft's tree."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from espalier.request import Request
from espalier.slots import MATCH_STRENGTHS, SOURCES, Guess

# At most this many tokens before a place in a text are compared with the last tokens of the request.
MAX_MATCHING = 16


def path_kind(source: str, strength: int) -> int:
    """Returns the kind, a number from 1 on that stands for a source and a match strength (1 to MATCH_STRENGTHS)."""
    return 1 + SOURCES.index(source) * MATCH_STRENGTHS + strength - 1


def match_strength(num_matching: int) -> int:
    """Returns the match strength of a guess, from 1 to MATCH_STRENGTHS.

    num_matching: how many tokens right before the place from which the guess was copied are equal to the last tokens of
    the request's text."""
    return min(MATCH_STRENGTHS, max(num_matching, 1).bit_length())


class Paths(NamedTuple):
    """Paths below the roots of a batch.

    tokens: [B, P, S] int64, a path's tokens at depths 1 to S; a VOID token ends the path.
    kinds: [B, P] int64, from `path_kind`; 0: no path."""

    tokens: Tensor
    kinds: Tensor

    @staticmethod
    def join(paths: Sequence["Paths"]) -> "Paths":
        """Returns the paths of several sources as one: [B, sum of their P, S]."""
        return paths[0] if len(paths) == 1 else Paths(*(torch.cat(parts, 1) for parts in zip(*paths, strict=True)))


class HostSource:
    """A source on the host.  The target checks every guess, so a source may guess anything."""

    def add_request(self, request: Request) -> None:
        """Called when a request has got a slot."""

    def add_tokens(self, request: Request, tokens: Sequence[int]) -> None:
        """Called when tokens were appended to a request."""

    def guesses(self, request: Request, max_length: int) -> list[Guess]:
        """Returns guesses of at most `max_length` tokens for the text after the request's last known token, the best
        first."""
        raise NotImplementedError

    def remove_request(self, request: Request) -> None:
        """Called when a request has ended."""
