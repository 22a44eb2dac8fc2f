"""Token masks as packed bits: the tokens of the vocabulary that may follow a node.

Bit t % 32 of word t // 32 is set if token t is allowed, as in xgrammar's token bitmasks.  A request's masks come from
its TokenMasker (espalier/grammar/token_masker.py).  If no request of the batch has a masker, no masking code runs.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# A function that asks which tokens may follow each of Q draft rows.  Arguments: the tokens [B, E] drafted so far, and
# ancestor bits [B, Q, W], whose bit e says whether token e is on the path to the row.  Returns (tokens [B, Q], masks
# [B, Q, words]): if only one token may follow a row, this token, else -1; and the mask of all tokens that may follow.
AskAllowedTokens = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
WORD_BITS = 32
ALL_ALLOWED = -1


def mask_words(vocab_size: int) -> int:
    """Returns the number of int32 words in a mask."""
    return -(-vocab_size // WORD_BITS)


def unpack_mask(mask: Tensor, vocab_size: int) -> Tensor:
    """Unpacks mask [..., words] int32 into [..., vocab_size] bool, True for allowed tokens."""
    bits = (mask[..., None] >> torch.arange(WORD_BITS, device=mask.device, dtype=torch.int32)) & 1
    return bits.flatten(-2)[..., :vocab_size].bool()


def apply_mask(logits: Tensor, mask: Tensor | None) -> Tensor:
    """Returns logits [..., V] with -inf for tokens that the mask [..., words] forbids; None allows all tokens."""
    if mask is None:
        return logits
    return logits.masked_fill(~unpack_mask(mask, logits.shape[-1]), -torch.inf)


def only_token(mask: np.ndarray) -> int | None:
    """Returns the one token that a mask [words] allows; None if it allows several or none."""
    if np.count_nonzero(mask) != 1:
        return None
    word = int(mask.nonzero()[0][0])
    bits = int(mask[word]) & 0xFFFFFFFF
    return None if bits & (bits - 1) else word * WORD_BITS + bits.bit_length() - 1


def allows(mask: Tensor, tokens: Tensor) -> Tensor:
    """Returns [B, K] bool: whether the mask [B, words] allows each of the tokens [B, K]."""
    return (mask.gather(1, tokens // WORD_BITS) >> (tokens % WORD_BITS).int()) & 1 != 0


@dataclass(frozen=True)
class DraftGuide:
    """The tokens that grammars allow next, as far as they are known before the draft runs.  They limit what the draft
    proposes; emitted tokens are masked elsewhere.

    forced_tokens: [B, S] int64, the only token allowed at each level, from level 1 on; -1 from the first level that is
    not forced.
    level: [B] int64, the tree level after the forced tokens.  mask: [B, words] int32, the tokens allowed at this level.
    If the mask is not known, the level is 0.
    ask_allowed_tokens: called to ask the host at each level after the first; None if the host is not asked."""

    forced_tokens: Tensor
    mask: Tensor
    level: Tensor
    ask_allowed_tokens: AskAllowedTokens | None = None

    @property
    def num_forced(self) -> Tensor:
        """[B]: the number of forced tokens."""
        return (self.forced_tokens >= 0).sum(1)

    def allowed_children(
        self, level: int, tokens: Tensor | None, ancestor_bits: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Returns (only allowed token [B, Q], -1 if several are allowed; masks [B, Q, words]) for the children at
        `level`.

        tokens: [B, E], the tokens of the rows above `level`.  ancestor_bits: [B, Q, W], the ancestors of the children's
        Q parents.  Both are None at level 1.  If the answer is the same for all parents, the results have Q = 1."""
        only_tokens = self.forced_tokens[:, level - 1, None]
        mask = torch.where((self.level == level)[:, None], self.mask, ALL_ALLOWED)[:, None]
        if self.ask_allowed_tokens is None or tokens is None or ancestor_bits is None:
            return only_tokens, mask
        host_tokens, host_mask = self.ask_allowed_tokens(tokens, ancestor_bits)
        return torch.where(host_tokens >= 0, host_tokens, only_tokens), host_mask & mask

    def allowed_at_levels(self, first_level: int, num_levels: int) -> tuple[Tensor, Tensor]:
        """Returns `allowed_children` of several levels, without asking the host: tokens [B, num_levels] and masks
        [B, num_levels, words]."""
        levels = torch.arange(first_level, first_level + num_levels, device=self.level.device)
        mask = torch.where((self.level[:, None] == levels)[..., None], self.mask[:, None], ALL_ALLOWED)
        return self.forced_tokens[:, first_level - 1 : first_level - 1 + num_levels], mask


def force_only_children(
    only_tokens: Tensor, tokens: Tensor, scores: Tensor, row_scores: Tensor
) -> tuple[Tensor, Tensor]:
    """If only one token is allowed after a row, makes this token the row's only child, with the row's own score.

    only_tokens: [B, Q] int64, the only allowed token, -1 if several are allowed.  tokens, scores: [B, Q, K], the
    drafted children.  row_scores: [B, Q], the scores of the rows.  Returns (tokens, scores) of the children."""
    forced_scores = torch.full_like(scores, -torch.inf)
    forced_scores[..., 0] = row_scores
    is_forced = (only_tokens >= 0)[..., None]
    return torch.where(is_forced, only_tokens[..., None], tokens), torch.where(is_forced, forced_scores, scores)
