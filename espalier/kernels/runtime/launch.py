"""Triton, imported when a kernel first runs, and what a launcher must know of its device.

`import espalier` and every CPU path work without Triton.  A file of kernels/ holds an operation in three: the kernel,
its launcher (`..._triton`), its plain-torch reference (`..._reference`); the operation itself calls the launcher for
tensors on a GPU and the reference for others.  Who is for GPUs alone calls the launcher.
"""

import os
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from espalier.errors import EspalierError

# Lowers the shared memory that launchers reckon with, in bytes: how the tests stand in for a smaller card.
SHARED_MEMORY_CAP = "ESPALIER_SHARED_MEMORY"
# What the interpreter stands in for: the smallest card that is supported.
SMALLEST_SHARED_MEMORY = 99 * 1024
# More small programs than that wait for each other's start.
PROGRAMS_A_PROCESSOR = 12

# (compiled, grid, *arguments), called in place of a launch; None: launches are launches
# (kernels/runtime/precompile.py).
asking: ContextVar[Callable[..., None] | None] = ContextVar("asking", default=None)


class Kernel:
    """A function in Triton's language, compiled at its first launch: `kernel[grid](arguments)`.

    Its module's globals get `tl` and `libdevice` then, and other kernels that it calls become Triton's own functions
    there, which is what Triton looks for.
    """

    def __init__(self, function: Callable[..., None]):
        self.function = function
        self._compiled: Any = None

    @property
    def compiled(self) -> Any:
        if self._compiled is None:
            jit, language = self._language()
            scope = self.function.__globals__
            scope.update(language)
            for name in self.function.__code__.co_names:
                called = scope.get(name)
                if isinstance(called, Kernel):
                    scope[name] = called.compiled
            self._compiled = jit(self.function)
        return self._compiled

    def _language(self) -> tuple[Callable[..., Any], dict[str, Any]]:
        """What compiles the function, and the names that it finds in its globals."""
        triton = require_triton()
        return triton.jit, {"tl": triton.language, "libdevice": triton.language.extra.libdevice}

    def __getitem__(self, grid: Any) -> Any:
        ask = asking.get()
        return self.compiled[grid] if ask is None else partial(ask, self.compiled, grid)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Only from another kernel, where Triton reads the call and never makes it."""
        raise TypeError(f"{self.function.__name__} runs on a GPU: launch it with a grid, or call it from a kernel")


class GluonKernel(Kernel):
    """A function in Gluon, Triton's language of explicit layouts, shared memory and warps: `gl`, and of Hopper's own
    instructions, `hopper`.  It may call a Kernel of numbers alone, never the other way about.

    Not interpreted: what it computes, a Kernel computes too, to the bit (tests/gpu and tests/kernels compare them).
    """

    def _language(self) -> tuple[Callable[..., Any], dict[str, Any]]:
        require_triton()
        from triton.experimental import gluon
        from triton.experimental.gluon import language
        from triton.experimental.gluon.language.nvidia import hopper

        return gluon.jit, {"gl": language, "hopper": hopper}


def kernel(function: Callable[..., Any]) -> Kernel:
    return Kernel(function)


def gluon_kernel(function: Callable[..., Any]) -> Kernel:
    return GluonKernel(function)


def require_triton() -> Any:
    """The triton module.  Raises EspalierError naming the remedy where it is not installed."""
    try:
        import triton
        import triton.language.extra.libdevice
    except ImportError:
        raise EspalierError(
            "device=cuda needs Triton, and it is not installed; pip install triton, in the version that your PyTorch "
            "names, or use device=cpu"
        ) from None
    return triton


@dataclass(frozen=True)
class Chip:
    """What launch choices follow from, never a name.  shared_memory: bytes that one block may use; processors: how many
    multiprocessors; capability: (9, 0) for Hopper."""

    shared_memory: int
    processors: int
    capability: tuple[int, int]


def chip(tensor: Tensor) -> Chip:
    """The chip that holds a tensor; for the interpreter, on a CPU, the smallest supported."""
    return _chip(tensor.device, int(os.environ.get(SHARED_MEMORY_CAP, 2**31)))


@cache
def _chip(device: torch.device, cap: int) -> Chip:
    if device.type != "cuda":
        return Chip(min(SMALLEST_SHARED_MEMORY, cap), 4, (8, 0))
    # Not in the annotations of every PyTorch that is supported.
    facts: Any = torch.cuda.get_device_properties(device)
    return Chip(min(facts.shared_memory_per_block_optin, cap), facts.multi_processor_count, (facts.major, facts.minor))


def oversubscribed(programs: int, on: Chip) -> bool:
    """Whether so many programs do better as fewer and larger ones: a chip starts about one a nanosecond (measured on an
    H200, docs/log.md), whatever they do."""
    return programs > PROGRAMS_A_PROCESSOR * on.processors


def require(what: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None, like: Tensor) -> None:
    """Check, on the host, a launcher's argument: shape (-1 leaves a dimension free), dtype, and device of `like`.

    Raises EspalierError naming the argument, what it needs and what it is.
    """
    fits = tensor.ndim == len(shape) and all(need in (-1, have) for need, have in zip(shape, tensor.shape, strict=True))
    if not fits or (dtype is not None and tensor.dtype != dtype) or tensor.device != like.device:
        raise EspalierError(
            f"{what} needs shape {list(shape)}, {dtype or tensor.dtype} on {like.device} and is {list(tensor.shape)}, "
            f"{tensor.dtype} on {tensor.device}: allocate and launch from the same layout"
        )


def exact_type(dtype: torch.dtype) -> object:
    """What a kernel computes in: float32, or float64 for float64."""
    import triton.language as tl

    return tl.float64 if dtype == torch.float64 else tl.float32


def power_of_two(count: int) -> int:
    """The least power of two that is `count` or more: the size of a kernel's block."""
    return 1 << max(count - 1, 0).bit_length()
