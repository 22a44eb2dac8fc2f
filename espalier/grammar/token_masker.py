"""The interface TokenMasker: which tokens a request's grammar allows next."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class ForcedTokens:
    """The tokens that a grammar forces next, and the mask of the token after them.

    tokens: the tokens that must come next, in order.  mask: [words] int32, a bit for each token of the vocabulary
    (espalier/sampling/mask.py), for the position after `tokens`; None if unknown.
    """

    tokens: list[int]
    mask: np.ndarray | None


class TokenMasker(Protocol):
    """Makes the token masks of one request from its grammar.  espalier/masking/masker.py implements this interface.

    All methods except `push` may be slow.  The engine calls these methods in threads, one at a time, and
    abandons slow calls.
    """

    def push(self, token_id: int) -> None:
        """Records an emitted token.  Returns at once; the grammar processes the token later."""

    def root_mask(self) -> np.ndarray:
        """Returns the mask after the last pushed token, [words] int32.  All bits are 0 if no token may follow."""

    def node_masks(self, tokens: Sequence[int], parents: Sequence[int], out: np.ndarray) -> None:
        """Writes the mask after each node of a tree to `out` [D, words] int32.  All bits of `out` must be 1 at first.

        Node 0 is the root, the last pushed token.  A parent comes before its children.  Void nodes have token -1 and
        are not part of the tree.  The rows of void nodes, of nodes with a forbidden token, and of nodes below
        them may have any value.
        """

    def forced_tokens(self, max_tokens: int) -> ForcedTokens:
        """Returns the tokens that must follow the root, `max_tokens` at most, and the mask after them."""

    def mask_after(self, path: Sequence[int]) -> np.ndarray | None:
        """Returns the mask after the root and `path`, [words] int32; None if `path` is forbidden or ends the text."""

    @property
    def is_stuck(self) -> bool:
        """Returns whether the grammar allows no further token."""
