"""Masks over the vocabulary as packed bits: the tokens that may follow a node.

Bit t % 32 of word t // 32 is set where token t is allowed, as in xgrammar's token bitmasks.  A request's masks come
from its TokenMasker (espalier/grammar/token_masker.py).  Without a masker in the batch no masking code runs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

BITS = 32
ALL_ALLOWED = -1


def mask_words(vocab_size: int) -> int:
    """int32 words of a mask."""
    return -(-vocab_size // BITS)


def unpack_mask(mask: Tensor, vocab_size: int) -> Tensor:
    """[..., words] int32 -> [..., vocab_size] bool, True where the token is allowed."""
    bits = (mask[..., None] >> torch.arange(BITS, device=mask.device, dtype=torch.int32)) & 1
    return bits.flatten(-2)[..., :vocab_size].bool()


def pack_mask(allowed: Tensor) -> Tensor:
    """[..., vocab_size] bool, True where the token is allowed -> [..., words] int32."""
    vocab_size = allowed.shape[-1]
    padded = torch.nn.functional.pad(allowed, (0, mask_words(vocab_size) * BITS - vocab_size))
    weights = torch.ones(BITS, dtype=torch.int64, device=allowed.device) << torch.arange(BITS, device=allowed.device)
    return (padded.unflatten(-1, (-1, BITS)).long() * weights).sum(-1).to(torch.int32)


def masked(logits: Tensor, mask: Tensor | None) -> Tensor:
    """Logits [..., V] with -inf for tokens that the mask [..., words] does not allow; a mask of None allows all."""
    if mask is None:
        return logits
    return logits.masked_fill(~unpack_mask(mask, logits.shape[-1]), -torch.inf)


def allows(mask: Tensor, tokens: Tensor) -> Tensor:
    """Whether the mask [B, words] allows each of the tokens [B, K]: [B, K] bool."""
    return (mask.gather(1, tokens // BITS) >> (tokens % BITS).int()) & 1 != 0


@dataclass(frozen=True)
class DraftGuide:
    """What grammars say of a batch's next tokens before they are drafted.  It decides what is drafted, never what is
    emitted.

    forced: [B, S] int64, the only token that may come at each level, from level 1 on; -1 from the first level on that
    is not forced.
    mask: [B, words] int32, the tokens that may come at level `level` [B] int64, behind the forced ones; 0: not known.
    """

    forced: Tensor
    mask: Tensor
    level: Tensor

    @property
    def num_forced(self) -> Tensor:
        """[B]"""
        return (self.forced >= 0).sum(1)

    def mask_at(self, level: int) -> Tensor:
        """[B, 1, words]: the mask of a level, all allowed where it is not known."""
        return torch.where((self.level == level)[:, None], self.mask, ALL_ALLOWED)[:, None]

    def force(self, level: int, tokens: Tensor, scores: Tensor, above: Tensor) -> tuple[Tensor, Tensor]:
        """Replace the children of a level by the forced token, as sure as the row above it.

        tokens, scores: [B, Q, K], the drafted children; above: [B, Q], path scores of the rows.
        """
        forced = self.forced[:, level - 1, None, None]
        only = torch.full_like(scores, -torch.inf)
        only[..., 0] = above
        return torch.where(forced >= 0, forced, tokens), torch.where(forced >= 0, only, scores)
