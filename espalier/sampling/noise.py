"""Noise that depends only on seed, position and token id, so that any batch, tree or order draws the same token.

The random bits r of a token id, all integers modulo 2**32 (mix is lowbias32, Wellons 2018, "Prospecting for hash
functions").  espalier/kernels/sampling/noise.py computes the same:

    mix(x):  x ^= x >> 16;  x *= 0x7feb352d;  x ^= x >> 15;  x *= 0x846ca68b;  x ^= x >> 16
    low, high = the seed's 32-bit halves;  p = low32(position)
    k0 = mix(low ^ mix(high ^ mix(p + 0x9e3779b9)))
    k1 = mix(high ^ mix(low ^ mix(p + 0x85ebca6b)))
    r  = mix(mix(id ^ k0) + k1)

There are two keys, each made of the whole seed.  So two (seed, position) pairs have the same noise with probability
2**-64, not 2**-32.
"""

import torch
from torch import Tensor


def mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit patterns; every output bit depends on every input bit.  x: int32, overwritten.

    int32 needs half the memory traffic of int64, and its products wrap.  Its >> copies the sign bit; the masks remove
    the copies.
    """
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= 0x7FEB352D
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x *= 0x846CA68B - 2**32
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    return x


def random_bits(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """seeds [B], positions [B, P] int64 -> r [B, P, vocab], the 32 bits as int32."""
    halves = torch.stack((seeds, seeds >> 32)).to(torch.int32)[..., None]
    position = positions.to(torch.int32)
    # Both keys at once, [2, B, P].
    begun = mix(torch.stack((position + (0x9E3779B9 - 2**32), position + (0x85EBCA6B - 2**32))))
    k0, k1 = mix(halves ^ mix(halves.flip(0) ^ begun))
    ids = torch.arange(vocab, dtype=torch.int32, device=seeds.device)
    return mix(mix(ids ^ k0[..., None]).add_(k1[..., None]))


def gumbel(seeds: Tensor, positions: Tensor, vocab: int, dtype: torch.dtype) -> Tensor:
    """Standard Gumbel noise [B, P, vocab] for tokens drawn at positions [B, P] with seeds [B], both int64.

    It is -log(-log(u)) with u = ((r >> 9) + 0.5) * 2**-23.  With 24 bits or more the largest u would round to 1.0 in
    float32, and its noise would be infinite: a large vocabulary would draw a random token now and then.
    """
    uniform = ((random_bits(seeds, positions, vocab) >> 9) & 0x7FFFFF).to(dtype).add_(0.5).mul_(2.0**-23)
    return uniform.log_().neg_().log_().neg_()
