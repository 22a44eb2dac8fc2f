"""Kernels compiled side by side, before they are launched: a first start needs some fifty of them, and a compiler,
most of whose work is outside of Python, takes one thread.

Under `together` launchers do all that they do but launch, so that what is asked for is what will be launched.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from espalier.cores import available_cores
from espalier.kernels.runtime.launch import asking, require_triton

MOST_THREADS = 16
UNINITIALISED = frozenset(
    getattr(torch.ops.aten, name)
    for name in ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
)


@contextmanager
def precompile() -> Iterator[Sequence[Future[Any]]]:
    """In it `kernel[grid](arguments)` launches nothing and asks for the kernel; at its end all are there, compiled and
    loaded.  Gives those that had to be asked for: what is in memory already need not be.

    Torch's operations run, and what they would read of kernels is zeros, so that ids and rows among it exist.  Holds
    for this thread alone.  Raises what a launch would raise, at the latest at its end; RuntimeError within itself.
    """
    if asking.get() is not None:
        raise RuntimeError("kernels are being asked for already: together() cannot stand within itself")
    triton = require_triton()
    making = Making()
    # Told to pass over errors, which we raise: it would stay in force after one (Triton 3.6).
    mode = triton.AsyncCompileMode(making, ignore_errors=True)
    before = asking.set(making.ask)
    try:
        with making.threads, mode, Zeros():
            try:
                yield making.asked
                for kernel in making.asked:
                    kernel.result()
            except BaseException:
                making.cancel()
                # It would wait for those that are cancelled, which nobody makes, and for those under way, while an
                # impatient Ctrl-C would leave it in force.
                mode.raw_futures.clear()
                raise
    finally:
        asking.reset(before)


class Making:
    """What Triton's mode takes for an executor: threads that make kernels whole.  asked: what they were given;
    functions: whose kernels."""

    def __init__(self) -> None:
        self.threads = ThreadPoolExecutor(min(available_cores(), MOST_THREADS), "espalier-compile")
        self.asked: list[Future[Any]] = []
        self.functions: dict[int, Any] = {}

    def ask(self, compiled: Any, grid: Any, *args: Any, **kwargs: Any) -> None:
        self.functions[id(compiled)] = compiled
        kernel = compiled.warmup(*args, grid=grid, **kwargs)
        future = getattr(kernel, "future", None)
        if future is not None and future.done():
            # From now on it is found in memory, which takes less than to ask again, as each layer of a model would.
            kernel.result()

    def submit(self, compiling: Callable[[], Any]) -> Future[Any]:
        from triton.runtime import driver

        made = self.threads.submit(_make, compiling, driver.active, driver.active.get_current_device())
        self.asked.append(made)
        return made

    def cancel(self) -> None:
        """Make no more than is under way, and leave of the others nothing: they were never asked for."""
        self.threads.shutdown(wait=False, cancel_futures=True)
        for compiled in self.functions.values():
            for kernels, *_ in compiled.device_caches.values():
                # From Triton 3.7 on its memory holds what is asked for, too.
                for key, kernel in list(kernels.items()):
                    if (future := getattr(kernel, "future", None)) is not None and future.cancelled():
                        del kernels[key]


def _make(compiling: Callable[[], Any], driver: Any, device: int) -> Any:
    # Of a thread, and where it loads what it has made.
    driver.set_current_device(device)
    kernel = compiling()
    # A first launch would do this: it builds the launcher, with a C compiler, and loads the kernel.
    kernel._init_handles()
    return kernel


class Zeros(TorchDispatchMode):
    """Every new tensor that would be uninitialised is zeros, in the strides that it would have."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # PyTorch would import its compiler, a second of every start, to keep it away from what nobody gives to it.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func.overloadpacket in UNINITIALISED else made
