"""The interface by which the engine asks a request's grammar which tokens may follow."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class ForcedTokens:
    """The tokens that a grammar forces next, and the mask of the token after them.

    tokens: the tokens that must come next, in order.  mask: [words] int32, the tokens that may follow the forced tokens
    (espalier/sampling/mask.py); None if unknown.
    """

    tokens: list[int]
    mask: np.ndarray | None


class TokenMasker(Protocol):
    """Returns the masks of the tokens that may follow in one request, by its grammar (espalier/masking/masker.py).

    All methods except `push` may take long.  The engine calls them in threads, one at a time, and abandons slow calls.
    """

    def push(self, token_id: int) -> None:
        """Record an emitted token.  Returns at once; the grammar processes the token later."""

    def root_mask(self) -> np.ndarray:
        """Returns the mask after the last pushed token: [words] int32, all zero if no token may follow."""

    def node_masks(self, tokens: Sequence[int], parents: Sequence[int], out: np.ndarray) -> None:
        """Write the mask after each node of a tree to `out` [D, words] int32.  Before, `out` must allow all tokens.

        Node 0 is the root, the last pushed token.  A parent comes before its children.  Void nodes have token -1.  The
        rows of void nodes, of forbidden tokens, and of nodes below forbidden tokens are never read, and may have any
        value.
        """

    def forced_tokens(self, max_tokens: int) -> ForcedTokens:
        """Returns the tokens that must follow the root, `max_tokens` at most, and the mask after them."""

    def mask_after(self, path: Sequence[int]) -> np.ndarray | None:
        """Returns the mask after the root and `path`, [words] int32; None if `path` is forbidden or ends the text."""

    @property
    def is_stuck(self) -> bool:
        """Returns whether the grammar allows no further token."""
