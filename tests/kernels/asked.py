"""Precompiles kernels with a fake GPU driver and prints, as JSON, what was compiled, loaded and launched.

It runs as its own process, because a process with TRITON_INTERPRET set does not compile.  Compiling needs no GPU.
TRITON_CACHE_DIR must be empty.
"""

import json
import sys
import threading
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import _async_compile, driver

import espalier.kernels.runtime.precompile as precompile_module
from espalier.kernels.layers.norm import rms_norm_triton
from espalier.kernels.layers.silu import silu_mul_triton
from espalier.kernels.runtime.launch import asking, kernel
from espalier.kernels.runtime.precompile import precompile
from espalier.kernels.tree.gather_rows import gather_rows_triton


class Driver(SimpleNamespace):
    """A Triton driver without a GPU.  loaded: (kernel, thread) pairs; launched: kernels, in order."""

    def __init__(self):
        utils = {"load_binary": self._load, "get_device_properties": lambda device: {"max_shared_mem": 227 * 1024}}
        super().__init__(loaded=[], launched=[], utils=SimpleNamespace(**utils))

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
def _broken_kernel(x_ptr):
    tl.store(x_ptr, tl.load(x_ptr) + undefined)  # noqa: F821


def launches(width):
    """The launches of one layer."""
    x = torch.ones(4, 2 * width)
    normed = rms_norm_triton(x, torch.ones(2 * width), 1e-5)
    return gather_rows_triton(silu_mul_triton(normed)[None], torch.empty(1, 2, dtype=torch.int64))


def failure(action):
    """The name of the error that `action` raises, or None."""
    try:
        action()
    except Exception as error:
        return type(error).__name__
    return None


def launch_broken():
    _broken_kernel[(1,)](torch.ones(1))


def precompile_broken():
    """Other kernels wait behind the broken one."""
    with precompile():
        launch_broken()
        launches(192)


def precompile_out_of_memory():
    with precompile():
        launches(192)
        raise torch.OutOfMemoryError


def precompile_thirty_times(width):
    """The number of kernels that were compiled."""
    with precompile() as compiled:
        for _ in range(30):
            launches(width)
    return len(compiled)


def main():
    fake, compiled = Driver(), []
    driver.set_active(fake)
    triton.knobs.runtime.jit_post_compile_hook = lambda is_manual_warmup, fn, **_: compiled.append(
        [fn.name.rpartition(".")[2], is_manual_warmup]
    )
    report = {"first": precompile_thirty_times(64), "again": precompile_thirty_times(64)}
    report["launched_inside"] = list(fake.launched)
    launches(64)
    report["launched"], report["compiled"], report["loaded"] = map(list, (fake.launched, compiled, fake.loaded))
    # One thread, so that other kernels wait behind the broken one.
    precompile_module.available_cores = lambda: 1
    report["failures"] = [
        failure(action) for action in (launch_broken, precompile_broken, precompile_out_of_memory, launch_broken)
    ]
    report["modes_left"] = [_async_compile.active_mode.get() is not None, asking.get() is not None]
    # A new kernel: it must not be sent to the threads of a finished precompile.
    launches(96)
    # Was requested together with the kernels that failed.
    launches(192)
    report["launched_after_failures"] = len(fake.launched) - len(report["launched"])
    report["is_dynamo_there"] = "torch._dynamo" in sys.modules
    print(json.dumps(report))


if __name__ == "__main__":
    main()
