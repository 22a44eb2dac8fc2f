"""Conversions between dtypes inside a kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from espalier.kernels.runtime.launch import kernel

if TYPE_CHECKING:
    import triton.language as tl


@kernel
def from_fp8(values, TYPE: tl.constexpr):
    """FP8 values in TYPE, exactly; values of TYPE as they are.

    To float16 a pair is one instruction.  To bfloat16 it is four, by way of float32: directly, Triton takes one F2F
    instruction for each value, which runs at an eighth of the rate of others (docs/log.md).
    """
    if values.dtype != TYPE and tl.float16 != TYPE:
        values = values.to(tl.float32)
    return values.to(TYPE)


@kernel
def beside(values, ROWS: tl.constexpr):
    """What is multiplied with rows of dtype ROWS: beside FP8, bfloat16 becomes float16, as rows do (`from_fp8`).

    A value that float16 does not reach is cut off.  One below 2^-17 may lose low bits, 2^-25 at most.
    """
    if values.dtype == tl.bfloat16 and tl.bfloat16 != ROWS:
        exact = values.to(tl.float32)
        exact = tl.where(exact > 65504.0, 65504.0, tl.where(exact < -65504.0, -65504.0, exact))
        values = exact.to(tl.float16)
    return values
