"""A program that runs precompile() with a fake GPU driver and prints, as JSON, what was compiled, loaded and launched.

It is a separate process because the tests run Triton's interpreter, which does not compile.  Compiling needs no GPU.
TRITON_CACHE_DIR must be empty.
"""

import json
import sys
import threading
from types import SimpleNamespace

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import _async_compile, driver

import espalier.kernels.runtime.precompile as precompile_module
from espalier.kernels.ops.activation import gated_activation
from espalier.kernels.ops.norm import rms_norm
from espalier.kernels.ops.tree import gather_rows
from espalier.kernels.runtime.jit import kernel
from espalier.kernels.runtime.launch import launch_hook
from espalier.kernels.runtime.precompile import precompile


class Driver(SimpleNamespace):
    """A fake of Triton's CUDA driver for one Hopper GPU.  loaded, launchers: (kernel name, thread name) pairs;
    launched: kernel names; all in order."""

    def __init__(self):
        utils = {"load_binary": self._load, "get_device_properties": lambda device: {"max_shared_mem": 227 * 1024}}
        super().__init__(loaded=[], launchers=[], launched=[], utils=SimpleNamespace(**utils))

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
        self.launchers.append((metadata.name, threading.current_thread().name))
        return lambda *args: self.launched.append(metadata.name)


@kernel
def _broken_kernel(x_ptr):
    tl.store(x_ptr, tl.load(x_ptr) + undefined_name)  # noqa: F821


def launch_three_kernels(width):
    x = torch.ones(4, 2 * width)
    normed = rms_norm.triton(x, torch.ones(2 * width), 1e-5)
    return gather_rows.triton(torch.empty(1, 2, dtype=torch.int64), gated_activation.triton(normed)[None])


def error_name(function):
    try:
        function()
    except Exception as error:
        return type(error).__name__
    return None


def launch_broken():
    _broken_kernel[(1,)](torch.ones(1))


def precompile_broken():
    """Other kernels are in the queue behind the broken one."""
    with precompile():
        launch_broken()
        launch_three_kernels(192)


def precompile_out_of_memory():
    with precompile():
        launch_three_kernels(192)
        raise torch.OutOfMemoryError


def precompile_thirty_times(width):
    """Returns the number of compilations."""
    with precompile() as compilations:
        for _ in range(30):
            launch_three_kernels(width)
    return len(compilations)


def main():
    fake, compiled = Driver(), []
    driver.set_active(fake)
    triton.knobs.runtime.jit_post_compile_hook = lambda is_manual_warmup, fn, **_: compiled.append(
        [fn.name.rpartition(".")[2], is_manual_warmup]
    )
    report = {"first": precompile_thirty_times(64), "again": precompile_thirty_times(64)}
    report["launched_inside"] = list(fake.launched)
    launch_three_kernels(64)
    report |= {"launched": list(fake.launched), "compiled": list(compiled)}
    report |= {"loaded": list(fake.loaded), "launchers": list(fake.launchers)}
    # One thread, so that later compilations wait in the queue.
    precompile_module.available_cores = lambda: 1
    failing = (launch_broken, precompile_broken, precompile_out_of_memory, launch_broken)
    report["failures"] = [error_name(function) for function in failing]
    report["modes_left"] = [_async_compile.active_mode.get() is not None, launch_hook.get() is not None]
    # A new width must compile: a mode left active would submit it to threads that have ended.
    launch_three_kernels(96)
    # This width was requested in the contexts that failed.
    launch_three_kernels(192)
    report["launched_after_failures"] = len(fake.launched) - len(report["launched"])
    report["dynamo_imported"] = "torch._dynamo" in sys.modules
    print(json.dumps(report))


if __name__ == "__main__":
    main()
