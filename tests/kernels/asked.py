"""Prints, as JSON, what becomes of kernels that are asked for together, with a driver that stands in for a GPU's.

A program of its own: where kernels are interpreted, nothing compiles.  Compiling needs no GPU.  TRITON_CACHE_DIR is to
be empty.
"""

import json
import sys
import threading
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import _async_compile, driver

import espalier.kernels.runtime.precompile as together_module
from espalier.kernels.layers.norm import rms_norm_triton
from espalier.kernels.layers.silu import silu_mul_triton
from espalier.kernels.runtime.launch import asking, kernel
from espalier.kernels.runtime.precompile import precompile
from espalier.kernels.tree.gather_rows import gather_rows_triton


class Driver(SimpleNamespace):
    """What Triton asks of a GPU's driver.  loaded: (kernel, thread); launched: kernels, in order."""

    def __init__(self):
        own = {"load_binary": self._load, "get_device_properties": lambda device: {"max_shared_mem": 227 * 1024}}
        super().__init__(loaded=[], launched=[], utils=SimpleNamespace(**own))

    def get_current_device(self):
        return 0

    def set_current_device(self, device):
        assert device == 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def _load(self, name, binary, shared, device):
        assert binary[:4] == b"\x7fELF"
        self.loaded.append((name, threading.current_thread().name))
        return "module", name, 0, 0, 1024

    def launcher_cls(self, source, metadata):
        return lambda *args: self.launched.append(metadata.name)


@kernel
def _unsound_kernel(x_ptr):
    tl.store(x_ptr, tl.load(x_ptr) + nobody_knows)  # noqa: F821


def launches(width):
    """Of one layer."""
    x = torch.ones(4, 2 * width)
    normed = rms_norm_triton(x, torch.ones(2 * width), 1e-5)
    return gather_rows_triton(silu_mul_triton(normed)[None], torch.empty(1, 2, dtype=torch.int64))


def failure(how):
    try:
        how()
    except Exception as error:
        return type(error).__name__
    return None


def unsound():
    _unsound_kernel[(1,)](torch.ones(1))


def unsound_together():
    """With others that wait for their turn."""
    with precompile():
        unsound()
        launches(192)


def out_of_memory_together():
    with precompile():
        launches(192)
        raise torch.OutOfMemoryError


def together_thirty_times(width):
    with precompile() as asked:
        for _ in range(30):
            launches(width)
    return len(asked)


def main():
    stand_in, compiled = Driver(), []
    driver.set_active(stand_in)
    triton.knobs.runtime.jit_post_compile_hook = lambda is_manual_warmup, fn, **_: compiled.append(
        [fn.name.rpartition(".")[2], is_manual_warmup]
    )
    found = {"first": together_thirty_times(64), "again": together_thirty_times(64)}
    found["launched_inside"] = list(stand_in.launched)
    launches(64)
    found["launched"], found["compiled"], found["loaded"] = map(list, (stand_in.launched, compiled, stand_in.loaded))
    # One thread, so that those behind it wait.
    together_module.available_cores = lambda: 1
    found["failures"] = [failure(unsound), failure(unsound_together), failure(out_of_memory_together), failure(unsound)]
    found["modes_left"] = [_async_compile.active_mode.get() is not None, asking.get() is not None]
    # Not in memory: whoever is still asked to make it would be one whose threads have ended.
    launches(96)
    # Asked for with those that failed.
    launches(192)
    found["launched_after_failures"] = len(stand_in.launched) - len(found["launched"])
    found["is_dynamo_there"] = "torch._dynamo" in sys.modules
    print(json.dumps(found))


if __name__ == "__main__":
    main()
