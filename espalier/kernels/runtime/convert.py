"""Conversions between dtypes inside a kernel."""

from __future__ import annotations

import triton.language as tl

from espalier.kernels.runtime.jit import kernel


@kernel
def from_fp8(values, dtype: tl.constexpr):
    """FP8 values in dtype, exactly; values of dtype as they are.

    To bfloat16 by way of float32.  Triton's own conversion takes one F2F instruction for each value, which runs at an
    eighth of the rate of others: on an H200 that is less than memory delivers (docs/log.md).  To float16 one
    instruction converts two values.
    """
    if values.dtype != dtype and dtype == tl.bfloat16:
        values = values.to(tl.float32)
    return values.to(dtype)


@kernel
def rounded_values(values, scale, MOST: tl.constexpr):
    """The clamped quotient, in float32: kv_scales.py:rounded without the conversion to FP8, which does the rounding.

    values, scale: float32 or float64, of shapes that broadcast.
    """
    # An IEEE quotient, so that the bytes equal the reference's.
    if values.dtype == tl.float32:
        quotient = tl.div_rn(values, tl.zeros_like(values) + scale)
    else:
        quotient = values / scale
    clamped = tl.where(quotient > MOST, MOST, tl.where(quotient < -MOST, -MOST, quotient))
    # NaN fails both comparisons, and stays NaN.
    # PyTorch converts float64 to FP8 by way of float32 too.  A GPU has no direct conversion.
    return tl.where(tl.abs(quotient) == float("inf"), float("nan"), clamped).to(tl.float32)
