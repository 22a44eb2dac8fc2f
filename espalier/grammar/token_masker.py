"""The interface between the engine and a request's grammar, token by token."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class ForcedTokens:
    """What a grammar allows for the next tokens, known before they are drafted.

    forced: tokens that must come next, one after another.  mask: [words] int32, the tokens that may follow the forced
    ones (espalier/sampling/mask.py); None if not known.
    """

    forced: list[int]
    mask: np.ndarray | None


class TokenMasker(Protocol):
    """Decides which tokens may follow in one request, token by token: a grammar (espalier/masking/masker.py).

    All methods but `push` may take long.  The engine calls them in threads, one at a time, and gives up slow calls.
    """

    def push(self, token_id: int) -> None:
        """Record that the request has emitted this token.  It returns at once; the grammar reads the token later."""

    def root_mask(self) -> np.ndarray:
        """[words] int32: the tokens that may follow the last token that was pushed; all zero if none may."""

    def node_masks(self, tokens: Sequence[int], parents: Sequence[int], out: np.ndarray) -> None:
        """Write the tokens that may follow each node of a tree to `out` [D, words] int32, which allows all tokens.

        Node 0 is the root, the last token that was pushed.  A parent comes before its children.  Void nodes have token
        -1.  Rows of void nodes, and of nodes at or below a token that is not allowed, are never read: they may hold
        anything.
        """

    def forced_tokens(self, max_tokens: int) -> ForcedTokens:
        """The tokens that must follow the root, `max_tokens` at most, and the mask after them."""

    def mask_after(self, path: Sequence[int]) -> np.ndarray | None:
        """[words] int32: the tokens that may follow the root and `path`; None if `path` is not allowed or ends."""

    @property
    def is_stuck(self) -> bool:
        """Whether no token may follow."""
