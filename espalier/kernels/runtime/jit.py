"""`kernel` and `gluon_kernel`: triton.jit and gluon.jit, whose launches go to the launch hook where there is one.

Modules that hold kernels import Triton, so only the dispatch of an op (kernels/runtime/op.py), other such modules and
tests import them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import triton
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
