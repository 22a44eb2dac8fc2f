"""`kernel` and `gluon_kernel`: triton.jit and gluon.jit, whose launches go to the launch hook where there is one.

Modules that hold kernels import Triton, so only the dispatch of an op (kernels/runtime/op.py), other such modules and
tests import them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import triton
import triton.language as tl
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime.jit import JITFunction

from espalier.kernels.runtime.launch import launch_hook


class Hooked:
    """`kernel[grid](arguments)` is a launch, or a call of the hook."""

    def __getitem__(self, grid: Any) -> Any:
        hook = launch_hook.get()
        return super().__getitem__(grid) if hook is None else partial(hook, self, grid)  # type: ignore[misc]


class KernelFunction(Hooked, JITFunction):
    pass


class GluonKernelFunction(Hooked, GluonJITFunction):
    pass


def kernel(function: Callable[..., Any] | None = None, *, do_not_specialize: Sequence[str] = ()) -> Any:
    """A decorator for a function in Triton's language.  With TRITON_INTERPRET set, Triton's interpreter runs it.

    do_not_specialize: integers of which one code serves all values.  Triton compiles another code where an integer is
    1, and where 16 divides it.  That helps addresses and divisions, but not a bound that is read once, such as the
    batch.  There it would only compile kernels while requests wait.
    """
    if function is None:
        return partial(kernel, do_not_specialize=do_not_specialize)
    if triton.knobs.runtime.interpret:
        return triton.jit(function, do_not_specialize=do_not_specialize)
    return KernelFunction(function, do_not_specialize=do_not_specialize)


def gluon_kernel(function: Callable[..., Any] | None = None, *, do_not_specialize: Sequence[str] = ()) -> Any:
    """A decorator for a function in Gluon, Triton's language with explicit layouts, shared memory and warps.

    It may call a `kernel` that computes with scalars, or value by value: that makes no tensor, which would need a
    layout.  A `kernel` may not call it.  Triton's interpreter does not run Gluon.  A `kernel` computes the same result,
    bit for bit; tests/gpu and tests/kernels compare the two.
    """
    if function is None:
        return partial(gluon_kernel, do_not_specialize=do_not_specialize)
    return GluonKernelFunction(function, do_not_specialize=do_not_specialize)


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
