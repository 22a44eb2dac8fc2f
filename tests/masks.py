"""Masks over the vocabulary, packed as a grammar packs them."""

import torch
from torch import Tensor

from espalier.sampling.mask import WORD_BITS, mask_words


def pack_mask(allowed: Tensor) -> Tensor:
    """[..., vocab_size] bool, True where the token is allowed -> [..., words] int32."""
    vocab_size = allowed.shape[-1]
    padded = torch.nn.functional.pad(allowed, (0, mask_words(vocab_size) * WORD_BITS - vocab_size))
    weights = torch.ones(WORD_BITS, dtype=torch.int64, device=allowed.device) << torch.arange(
        WORD_BITS, device=allowed.device
    )
    return (padded.unflatten(-1, (-1, WORD_BITS)).long() * weights).sum(-1).to(torch.int32)
