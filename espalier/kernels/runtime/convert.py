"""Conversions between dtypes inside a kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from espalier.kernels.runtime.launch import kernel

if TYPE_CHECKING:
    import triton.language as tl


@kernel
def from_fp8(values, TYPE: tl.constexpr):
    """FP8 values in TYPE, exactly; values of TYPE as they are.

    By way of float32.  From FP8 to bfloat16 Triton takes one F2F instruction for each value, which runs at an eighth of
    the rate of others: on an H200 that is less than memory delivers (docs/log.md).
    """
    if values.dtype != TYPE:
        values = values.to(tl.float32)
    return values.to(TYPE)
