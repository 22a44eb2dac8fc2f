"""Masks over the vocabulary as packed bits: the tokens that may follow a node.

Bit t % 32 of word t // 32 is set where token t is allowed, as in xgrammar's token bitmasks.  A request's masks come
from its TokenMasker (espalier/request.py).  Without a masker in the batch no masking code runs.
"""

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
