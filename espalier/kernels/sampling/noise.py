"""Device functions for noise.  The reference is espalier/sampling/noise.py, which also gives the formulas.

The random bits equal the reference's exactly.  The logarithms are tl.log, which Triton lowers to libdevice's accurate
__nv_logf and __nv_log (error of one ulp; not lg2.approx).  So in float32 the noise is within 2**-22 of the reference's:
a relative error where the noise is above 1, else an absolute one, because the outer logarithm turns the inner one's
relative error into an absolute error.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from espalier.kernels.runtime.jit import kernel
from espalier.kernels.runtime.launch import power_of_two, require


@kernel
def mix(x):
    """A bijection of 32-bit patterns.  x: uint32, so shifts bring in zeros and products wrap."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@kernel
def noise_keys(seed, position):
    """(k0, k1) uint32 of a seed and a position, int64 each."""
    low = seed.to(tl.uint32)
    high = (seed >> 32).to(tl.uint32)
    at = position.to(tl.uint32)
    k0 = mix(low ^ mix(high ^ mix(at + 0x9E3779B9)))
    k1 = mix(high ^ mix(low ^ mix(at + 0x85EBCA6B)))
    return k0, k1


@kernel
def random_bits_at(ids, k0, k1):
    """32 random bits per token id, as uint32.  ids: int32 of any shape."""
    return mix(mix(ids.to(tl.uint32) ^ k0) + k1)


@kernel
def gumbel_at(ids, k0, k1, exact: tl.constexpr):
    """Standard Gumbel noise of token ids in dtype `exact`.  k0, k1: as noise_keys gives them."""
    uniform = ((random_bits_at(ids, k0, k1) >> 9).to(exact) + 0.5) * 1.1920928955078125e-07  # 2**-23
    return -tl.log(-tl.log(uniform))


@kernel
def _noise_kernel(bits_ptr, gumbel_ptr, seeds_ptr, positions_ptr, num_positions, vocab, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    k0, k1 = noise_keys(tl.load(seeds_ptr + place // num_positions), tl.load(positions_ptr + place))
    at = place * vocab + ids
    tl.store(bits_ptr + at, random_bits_at(ids, k0, k1).to(tl.int32, bitcast=True), mask=ids < vocab)
    tl.store(gumbel_ptr + at, gumbel_at(ids, k0, k1, gumbel_ptr.dtype.element_ty), mask=ids < vocab)


def noise_triton(seeds: Tensor, positions: Tensor, vocab: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(bits int32, Gumbel noise in `dtype`), [B, P, vocab] each, for seeds [B] and positions [B, P] int64.

    Only the tests call this, to compare the device functions with random_bits and gumbel.
    """
    batch, places = positions.shape
    require("seeds", seeds, (batch,), torch.int64, positions)
    require("positions", positions, (batch, places), torch.int64, seeds)
    bits = torch.empty(batch, places, vocab, dtype=torch.int32, device=seeds.device)
    drawn = torch.empty(batch, places, vocab, dtype=dtype, device=seeds.device)
    if bits.numel():
        block = min(1024, power_of_two(vocab))
        grid = (batch * places, -(-vocab // block))
        _noise_kernel[grid](bits, drawn, seeds.contiguous(), positions.contiguous(), places, vocab, BLOCK=block)
    return bits, drawn
