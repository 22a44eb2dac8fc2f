"""The contract of a source: paths of tokens that may follow a request's text, and how well each matches the text.

A source on the device makes Paths of the slots (text.py).  A source on the host makes a Guess, which crosses with a
launch as data and becomes a path on the device (sent.py).  graft.py joins all paths with the draft's tree.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from espalier.request import Request
from espalier.slots import SOURCES, STRENGTHS, Guess


def kind_of(source: str, strength: int) -> int:
    """The kind of a path.  strength: from 1 to STRENGTHS."""
    return 1 + SOURCES.index(source) * STRENGTHS + strength - 1


def strength_of(matching: int) -> int:
    """The strength of a guess whose source has the text's last `matching` tokens too."""
    return min(STRENGTHS, max(matching, 1).bit_length())


class Paths(NamedTuple):
    """Paths under the roots of a batch.

    tokens: [B, P, S] int64, of depths 1 to S; a VOID token ends its path.  kinds: [B, P] int64.
    """

    tokens: Tensor
    kinds: Tensor

    @staticmethod
    def join(paths: Sequence["Paths"]) -> "Paths":
        return paths[0] if len(paths) == 1 else Paths(*(torch.cat(parts, 1) for parts in zip(*paths, strict=True)))


class HostSource(Protocol):
    """A source that the host asks.  It never decides a token, so it may guess anything."""

    def enter(self, request: Request) -> None:
        """The request has a slot."""
        ...

    def read(self, request: Request, tokens: Sequence[int]) -> None:
        """These tokens were appended to the request."""
        ...

    def guesses(self, request: Request, width: int) -> list[Guess]:
        """Guesses of at most `width` tokens behind the request's last known token, the best first."""
        ...

    def leave(self, request: Request) -> None:
        """The request is done."""
        ...
