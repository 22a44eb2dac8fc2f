"""The interface between the engine and a request's grammar, token by token."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class KnownNext:
    """What a grammar says of the next tokens before they are drafted.

    forced: the only tokens that may come, one after another.  mask: [words] int32, the tokens that may follow them
    (espalier/sampling/mask.py); None if that is not known.
    """

    forced: list[int]
    mask: np.ndarray | None


class TokenMasker(Protocol):
    """Decides which tokens may follow in one request, token by token: a grammar (espalier/masking/masker.py).

    All but `push` may take long.  The engine calls them in threads, one at a time, and gives up what takes too long.
    """

    def push(self, token_id: int) -> None:
        """The request has emitted this token.  Takes no time: what it means is found out later."""
        ...

    def root_mask(self) -> np.ndarray:
        """[words] int32: the tokens that may follow the last token that was pushed."""
        ...

    def node_masks(self, tokens: Sequence[int], parents: Sequence[int], out: np.ndarray) -> None:
        """Write the tokens that may follow each node of a tree to `out` [D, words] int32, which allows all tokens.

        Node 0 is the root, the last token that was pushed.  A parent comes before its children.  Void nodes have token
        -1.  Rows of void nodes, and of nodes at or below a token that is not allowed, are never read: they may hold
        anything.
        """
        ...

    def known_next(self, most: int) -> KnownNext:
        """The tokens that must follow the root, at most `most`, and the mask behind them."""
        ...

    def mask_after(self, path: Sequence[int]) -> np.ndarray | None:
        """[words] int32: the tokens that may follow the root and then `path`; None if `path` may not come, or ends."""
        ...

    @property
    def is_stuck(self) -> bool:
        """Whether no token may follow."""
        ...
