"""Functions that kernels call for sampling noise.  The reference and the formulas are in espalier/sampling/pick.py.

The random bits are exactly those of the reference.  The logarithms are tl.log, which Triton lowers to libdevice's
accurate __nv_logf and __nv_log (error of one ulp; not lg2.approx).  So in float32 the noise is within 2**-22 of the
reference's.  This is a relative error for noise above 1 and an absolute error for noise below 1, because the outer
logarithm turns a relative error of the inner logarithm into an absolute error.
"""

from __future__ import annotations

import triton.language as tl

from espalier.kernels.runtime.jit import kernel


@kernel
def hash_uint32(x):
    """Returns the hash of x, a uint32: different x have different hashes.  uint32 products wrap around."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@kernel
def noise_keys(seed, position):
    """Returns (k0, k1), uint32: the two keys of the noise, from a seed and a position, int64 each."""
    low = seed.to(tl.uint32)
    high = (seed >> 32).to(tl.uint32)
    position_bits = position.to(tl.uint32)
    k0 = hash_uint32(low ^ hash_uint32(high ^ hash_uint32(position_bits + 0x9E3779B9)))
    k1 = hash_uint32(high ^ hash_uint32(low ^ hash_uint32(position_bits + 0x85EBCA6B)))
    return k0, k1


@kernel
def random_bits_of_ids(ids, k0, k1):
    """Returns 32 random bits per token id, as uint32.  ids: int32 of any shape.  k0, k1: from noise_keys."""
    return hash_uint32(hash_uint32(ids.to(tl.uint32) ^ k0) + k1)


@kernel
def gumbel_noise(ids, k0, k1, dtype: tl.constexpr):
    """Returns standard Gumbel noise of token ids, in dtype `dtype`.  k0, k1: the noise keys, from noise_keys."""
    uniform = ((random_bits_of_ids(ids, k0, k1) >> 9).to(dtype) + 0.5) * 1.1920928955078125e-07  # 2**-23
    return -tl.log(-tl.log(uniform))
