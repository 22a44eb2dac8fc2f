"""`kernel` and `gluon_kernel`: triton.jit and gluon.jit with a launch hook.  If a hook is set, launches call the hook.

A module with kernels imports Triton, which a machine without a GPU may lack.  So in this package, only modules with
kernels import such a module at the top.  Other modules import it inside a function (such as kernels/runtime/op.py).
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


class HookedLaunch:
    """A kernel.  `kernel[grid](arguments)` launches it, or calls the launch hook if one is set."""

    def __getitem__(self, grid: Any) -> Any:
        hook = launch_hook.get()
        return super().__getitem__(grid) if hook is None else partial(hook, self, grid)  # type: ignore[misc]


class KernelFunction(HookedLaunch, JITFunction):
    pass


class GluonKernelFunction(HookedLaunch, GluonJITFunction):
    pass


def kernel(function: Callable[..., Any] | None = None, *, do_not_specialize: Sequence[str] = ()) -> Any:
    """A decorator for a function in Triton's language.  With TRITON_INTERPRET set, Triton's interpreter runs it.

    do_not_specialize: names of integer arguments for which one compiled kernel serves all values.  For other integers,
    Triton compiles a separate kernel if the value is 1, and another if the value is divisible by 16.  A separate kernel
    computes addresses and divisions faster.  For a loop bound, such as the batch size, a separate kernel gains nothing,
    and requests would wait for its compilation.
    """
    if function is None:
        return partial(kernel, do_not_specialize=do_not_specialize)
    if triton.knobs.runtime.interpret:
        return triton.jit(function, do_not_specialize=do_not_specialize)
    return KernelFunction(function, do_not_specialize=do_not_specialize)


def gluon_kernel(function: Callable[..., Any] | None = None, *, do_not_specialize: Sequence[str] = ()) -> Any:
    """A decorator for a function in Gluon, Triton's language with explicit layouts, shared memory and warps.

    A Gluon kernel may call a `kernel` that computes with scalars or element by element, because such a `kernel` makes
    no new tensor, which would need a layout.  A `kernel` may not call a Gluon kernel.  Triton's interpreter
    does not run Gluon.  For each Gluon kernel there is a `kernel` that gives the same bits; tests/gpu and tests/kernels
    compare the two.
    """
    if function is None:
        return partial(gluon_kernel, do_not_specialize=do_not_specialize)
    return GluonKernelFunction(function, do_not_specialize=do_not_specialize)


@kernel
def load_sum(pointer, split_stride, mask, SPLITS: tl.constexpr, DTYPE: tl.constexpr, ACC_DTYPE: tl.constexpr):
    """Load SPLITS partial sums and add them in order.  The sum is rounded to DTYPE, as `linear` does, and returned as
    ACC_DTYPE."""
    total = tl.load(pointer, mask=mask, other=0.0).to(ACC_DTYPE)
    for _ in tl.static_range(1, SPLITS):
        # The pointer advances by one stride, because the product stride · SPLITS may be above 2^31.
        pointer += split_stride
        total += tl.load(pointer, mask=mask, other=0.0).to(ACC_DTYPE)
    return total.to(DTYPE).to(ACC_DTYPE)


@kernel
def from_fp8(values, dtype: tl.constexpr):
    """Convert FP8 values to dtype, exactly.  Values that already have dtype stay as they are.

    The conversion to bfloat16 goes through float32.  Triton's direct conversion takes one F2F instruction per value,
    and F2F runs at an eighth of the rate of other instructions.  An H200 reads memory faster than that (docs/log.md).
    To float16, one instruction converts two values.
    """
    if values.dtype != dtype and dtype == tl.bfloat16:
        values = values.to(tl.float32)
    return values.to(dtype)


@kernel
def divide_and_clamp_to_fp8(values, scale, FP8_MAX: tl.constexpr):
    """Returns values / scale, clamped to FP8's range, in float32.  Infinite quotients become NaN.

    values, scale: float32 or float64, of shapes that broadcast."""
    # The division is IEEE, so that the bytes equal the reference's.
    if values.dtype == tl.float32:
        quotient = tl.div_rn(values, tl.zeros_like(values) + scale)
    else:
        quotient = values / scale
    clamped = tl.where(quotient > FP8_MAX, FP8_MAX, tl.where(quotient < -FP8_MAX, -FP8_MAX, quotient))
    # NaN stays NaN, because both comparisons are false for NaN.
    # A GPU cannot convert float64 to FP8 directly.  PyTorch also goes through float32.
    return tl.where(tl.abs(quotient) == float("inf"), float("nan"), clamped).to(tl.float32)


@kernel
def float_to_key(x):
    """Convert floats to integers that have the same order as the floats.  -0.0 is below 0.0.  key_to_float is the
    inverse."""
    if x.dtype == tl.float32:
        bits = x.to(tl.int32, bitcast=True)
        key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    else:
        bits = x.to(tl.int64, bitcast=True)
        key = bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)
    return key


@kernel
def key_to_float(key):
    """Convert keys of float_to_key to the floats."""
    if key.dtype == tl.int32:
        x = (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    else:
        x = (key ^ ((key >> 63) & 0x7FFFFFFFFFFFFFFF)).to(tl.float64, bitcast=True)
    return x
