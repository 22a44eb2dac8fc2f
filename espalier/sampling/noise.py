"""Noise that depends on nothing but seed, position and token id, so that any batch, tree or order draws the same.

Integers, all modulo 2**32, as a kernel repeats them (mix is lowbias32, Wellons 2018, "Prospecting for hash functions"):

    mix(x):  x ^= x >> 16;  x *= 0x7feb352d;  x ^= x >> 15;  x *= 0x846ca68b;  x ^= x >> 16
    k0 = mix(low32(seed) ^ mix(high32(seed) ^ mix(low32(position) + 0x9e3779b9)))
    k1 = mix(k0 + 0x85ebca6b)
    r  = mix(mix(id ^ k0) + k1)
"""

import torch
from torch import Tensor

MASK = 0xFFFFFFFF


def mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit integers held in int64, every output bit depending on every input bit."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & MASK
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & MASK
    return x ^ (x >> 16)


def random_bits(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """seeds [B], positions [B, P] int64 -> r [B, P, vocab] int64 in 0 .. 2**32 - 1."""
    low, high = seeds[:, None] & MASK, (seeds[:, None] >> 32) & MASK
    k0 = mix(low ^ mix(high ^ mix((positions + 0x9E3779B9) & MASK)))
    k1 = mix((k0 + 0x85EBCA6B) & MASK)
    ids = torch.arange(vocab, device=seeds.device)
    return mix((mix(ids ^ k0[..., None]) + k1[..., None]) & MASK)


def gumbel(seeds: Tensor, positions: Tensor, vocab: int, dtype: torch.dtype) -> Tensor:
    """Standard Gumbel noise [B, P, vocab] for the tokens drawn at positions [B, P] under seeds [B].

    From 23-bit uniforms: with 24 bits or more the largest rounds to 1.0 in float32, and a large vocabulary would draw a
    random token now and then.
    """
    uniform = ((random_bits(seeds, positions, vocab) >> 9).to(dtype) + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))
