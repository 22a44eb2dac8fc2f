"""Conversions between dtypes inside a kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from espalier.kernels.runtime.launch import kernel

if TYPE_CHECKING:
    import triton.language as tl


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
