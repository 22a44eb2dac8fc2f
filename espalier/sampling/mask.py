"""Masks over the vocabulary as packed bits: which tokens may follow a node.

Bit t % 32 of word t // 32 stands for token t and is set where the token is allowed.  That is the form of xgrammar's
token bitmasks.  A request brings its masks through a TokenMasker (espalier/request.py); where no request has one,
nothing is masked and nothing runs.
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
    """The reverse: [..., vocab_size] bool -> [..., words] int32."""
    vocab_size = allowed.shape[-1]
    padded = torch.nn.functional.pad(allowed, (0, mask_words(vocab_size) * BITS - vocab_size))
    weights = torch.ones(BITS, dtype=torch.int64, device=allowed.device) << torch.arange(BITS, device=allowed.device)
    return (padded.unflatten(-1, (-1, BITS)).long() * weights).sum(-1).to(torch.int32)


def masked(logits: Tensor, mask: Tensor | None) -> Tensor:
    """Logits [..., V] with -inf where the mask [..., words] does not allow a token; None changes nothing."""
    if mask is None:
        return logits
    return logits.masked_fill(~unpack_mask(mask, logits.shape[-1]), -torch.inf)
