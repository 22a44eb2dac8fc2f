"""Compile kernels in parallel before their first launch.

The first startup needs 100 to 200 kernels.  Triton compiles each kernel on a single thread, mostly outside of Python,
so several threads can compile in parallel.  Inside `precompile()` the launchers run as usual, but each launch
only compiles.  So precompile() compiles exactly the kernels that later launches need.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from espalier.cores import available_cores
from espalier.kernels.runtime.launch import launch_hook, require_triton

MAX_THREADS = 16
UNINITIALISED_ALLOCATIONS = frozenset(
    getattr(torch.ops.aten, name)
    for name in ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
)


@contextmanager
def precompile() -> Iterator[Sequence[Future[Any]]]:
    """Compile kernels instead of launching them: inside this context `kernel[grid](arguments)` only compiles.  When the
    context ends, every kernel is compiled and loaded.  Yields the futures of kernels that were not in memory yet.

    PyTorch's operations do run.  The outputs of kernels are zeros, so ids and row numbers in these outputs are valid.
    Only launches of the calling thread are affected.  Raises the errors of launches, at the latest when the context
    ends.  Raises RuntimeError if nested.
    """
    if launch_hook.get() is not None:
        raise RuntimeError("precompile() cannot be nested: this thread is inside a precompile() context already")
    triton = require_triton()
    compiler = KernelCompiler()
    # load_kernels raises the errors.  Without ignore_errors=True, Triton 3.6 leaves the mode active after an error.
    mode = triton.AsyncCompileMode(compiler, ignore_errors=True)
    token = launch_hook.set(compiler.compile_instead_of_launch)
    try:
        with compiler.thread_pool, mode, ZeroedAllocations():
            try:
                yield compiler.futures
                compiler.load_kernels()
            except BaseException:
                compiler.cancel_compilations()
                # When the mode ends, it waits for its futures.  Cancelled futures never finish, and a Ctrl-C during
                # this wait would leave the mode active.
                mode.raw_futures.clear()
                raise
    finally:
        launch_hook.reset(token)


class KernelCompiler:
    """The executor for Triton's AsyncCompileMode, whose threads compile kernels.

    futures: one future per compilation; jit_functions: the functions whose kernels were requested, by id."""

    def __init__(self) -> None:
        self.thread_pool = ThreadPoolExecutor(min(available_cores(), MAX_THREADS), "espalier-compile")
        self.futures: list[Future[Any]] = []
        self.jit_functions: dict[int, Any] = {}

    def compile_instead_of_launch(self, jit_function: Any, grid: Any, *args: Any, **kwargs: Any) -> None:
        """Compile a kernel instead of launching it.  `precompile` sets this method as the launch hook."""
        self.jit_functions[id(jit_function)] = jit_function
        kernel = jit_function.warmup(*args, grid=grid, **kwargs)
        future = getattr(kernel, "future", None)
        if future is not None and future.done():
            # The result moves into Triton's in-memory cache.  Each layer of a model requests the same kernels, and a
            # cache hit is cheaper than another request.
            kernel.result()

    def submit(self, compile_kernel: Callable[[], Any]) -> Future[Any]:
        """Start a compilation.  Triton calls this method, as it would on any executor."""
        from triton.runtime import driver

        active = driver.active
        future = self.thread_pool.submit(_compile_on_device, compile_kernel, active, active.get_current_device())
        self.futures.append(future)
        return future

    def load_kernels(self) -> None:
        """Wait for every compilation, then load the kernels and their launchers, all on this thread.

        Triton 3.6 gives every launcher the same module name.  CPython keeps one module per name, and loading another
        launcher overwrites the module's contents.  With two threads a kernel could get the launcher of another kernel.
        """
        for kernel in [future.result() for future in self.futures]:
            kernel._init_handles()

    def cancel_compilations(self) -> None:
        """Start no further compilation.  Remove cancelled compilations from Triton's cache, so that later launches
        compile these kernels."""
        self.thread_pool.shutdown(wait=False, cancel_futures=True)
        for jit_function in self.jit_functions.values():
            for kernels, *_ in jit_function.device_caches.values():
                # Since Triton 3.7 the in-memory cache also holds kernels whose compilation has not finished.
                for key, kernel in list(kernels.items()):
                    if (future := getattr(kernel, "future", None)) is not None and future.cancelled():
                        del kernels[key]


def _compile_on_device(compile_kernel: Callable[[], Any], driver: Any, device: int) -> Any:
    """Calls `compile_kernel` in a thread that has no current device yet.  device: the index of the GPU."""
    # The current device is a property of the thread.
    driver.set_current_device(device)
    kernel = compile_kernel()
    # This builds the launcher with a C compiler, into Triton's cache on disk.  The launcher object is dropped
    # (see load_kernels).
    driver.launcher_cls(kernel.src, kernel.metadata)
    return kernel


class ZeroedAllocations(TorchDispatchMode):
    """A mode in which uninitialised allocations (torch.empty and the like) are zeros.  Strides stay the same."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # With True, the default, PyTorch would import its compiler, a second at every startup, only to disable it here.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.zero_() if func.overloadpacket in UNINITIALISED_ALLOCATIONS else result
