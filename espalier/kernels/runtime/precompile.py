"""Compile kernels in parallel before their first launch.

A first start needs 100 to 200 kernels.  Triton compiles each one on a single thread, mostly outside of Python, so
threads compile in parallel.  Inside `precompile()` the launchers run unchanged except for the launch itself, so exactly
the kernels that will be launched are compiled.
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
UNINITIALISED = frozenset(
    getattr(torch.ops.aten, name)
    for name in ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
)


@contextmanager
def precompile() -> Iterator[Sequence[Future[Any]]]:
    """Inside this context `kernel[grid](arguments)` compiles the kernel and does not launch it.  At the end of the
    context every kernel is compiled and loaded.  Yields the compilations, without kernels that were in memory before.

    Torch's operations do run.  Tensors that kernels would have filled hold zeros, so ids and row numbers in them are
    valid.  Affects the calling thread only.  Raises what the launch would raise, at the latest at the end; RuntimeError
    if nested.
    """
    if launch_hook.get() is not None:
        raise RuntimeError("precompile() cannot be nested: this thread is inside a precompile() context already")
    triton = require_triton()
    compiler = KernelCompiler()
    # ignore_errors: we raise them ourselves below.  Without it, Triton 3.6 leaves the mode active after an error.
    mode = triton.AsyncCompileMode(compiler, ignore_errors=True)
    token = launch_hook.set(compiler.request)
    try:
        with compiler.threads, mode, ZeroedAllocations():
            try:
                yield compiler.submitted
                compiler.load()
            except BaseException:
                compiler.cancel()
                # At its exit the mode waits for its futures.  The cancelled ones never finish; a Ctrl-C while it waits
                # for the running ones would leave the mode active.
                mode.raw_futures.clear()
                raise
    finally:
        launch_hook.reset(token)


class KernelCompiler:
    """The executor given to Triton's AsyncCompileMode: its threads compile kernels.

    submitted: one future per compilation; jit_functions: by id, the functions whose kernels were requested.
    """

    def __init__(self) -> None:
        self.threads = ThreadPoolExecutor(min(available_cores(), MAX_THREADS), "espalier-compile")
        self.submitted: list[Future[Any]] = []
        self.jit_functions: dict[int, Any] = {}

    def request(self, jit_function: Any, grid: Any, *args: Any, **kwargs: Any) -> None:
        """Compile instead of launching: the launch hook."""
        self.jit_functions[id(jit_function)] = jit_function
        kernel = jit_function.warmup(*args, grid=grid, **kwargs)
        future = getattr(kernel, "future", None)
        if future is not None and future.done():
            # Moves the kernel into Triton's in-memory cache.  Each layer of a model requests the same kernels, and a
            # cache hit is cheaper than another request.
            kernel.result()

    def submit(self, compile_kernel: Callable[[], Any]) -> Future[Any]:
        """Called by Triton, as on any executor."""
        from triton.runtime import driver

        active = driver.active
        future = self.threads.submit(_compile, compile_kernel, active, active.get_current_device())
        self.submitted.append(future)
        return future

    def load(self) -> None:
        """Wait for every compilation, then load the kernels and their launchers, all on this thread.

        Triton 3.6 gives every launcher the same module name.  CPython keeps one module of that name, and loading a
        launcher again overwrites what it holds.  With two threads, a kernel may so get the launcher of another one.
        """
        for kernel in [future.result() for future in self.submitted]:
            kernel._init_handles()

    def cancel(self) -> None:
        """Start no further compilation, and remove the cancelled ones from Triton's cache, so that later launches
        compile them."""
        self.threads.shutdown(wait=False, cancel_futures=True)
        for jit_function in self.jit_functions.values():
            for kernels, *_ in jit_function.device_caches.values():
                # Since Triton 3.7 the in-memory cache also holds kernels whose compilation has not finished.
                for key, kernel in list(kernels.items()):
                    if (future := getattr(kernel, "future", None)) is not None and future.cancelled():
                        del kernels[key]


def _compile(compile_kernel: Callable[[], Any], driver: Any, device: int) -> Any:
    # The current device is a property of the thread.
    driver.set_current_device(device)
    kernel = compile_kernel()
    # Builds the launcher with a C compiler, into Triton's cache on disk.  This object is dropped (KernelCompiler.load).
    driver.launcher_cls(kernel.src, kernel.metadata)
    return kernel


class ZeroedAllocations(TorchDispatchMode):
    """Uninitialised allocations (torch.empty and the like) are filled with zeros; their strides stay the same."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True, the default, makes PyTorch import its compiler, a second at every start, only to disable it here.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.zero_() if func.overloadpacket in UNINITIALISED else result
