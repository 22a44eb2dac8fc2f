"""A pytest plugin: tests of kernels compile them for Hopper in place of running them.  No GPU is needed.

    PYTHONPATH=tests/kernels python -m pytest -p compile_only tests/kernels/test_kv_splits.py

Triton's interpreter accepts programs that its compiler refuses.  Results mean nothing here: a test fails only where a
kernel does not compile, or where its machine code reads a register that is never written (machine_code.py).  Of each
kernel the first variants are compiled, `MAX_VARIANTS` of them.
"""

import os
from collections import Counter
from contextlib import nullcontext

import pytest

MAX_VARIANTS = 4
os.environ["TRITON_INTERPRET"] = "0"
compiled: Counter[str] = Counter()
refused: list[str] = []


def pytest_collection_finish(session):
    from asked import Driver
    from triton.runtime import driver

    from espalier.kernels.runtime.launch import launch_hook
    from tests import interpreter
    from tests.kernels import bounds

    driver.set_active(Driver())
    launch_hook.set(_compile)
    # What the fixture kernel_device imports at each test.
    interpreter.adapt_interpreter = lambda: None
    bounds.checked = nullcontext


def _compile(function, grid, *args, **options):
    name = function.fn.__name__
    if compiled[name] >= MAX_VARIANTS:
        return
    before = sum(len(cache[0]) for cache in function.device_caches.values())
    from tests.kernels.machine_code import unwritten_registers

    try:
        made = function.warmup(*args, grid=grid, **options)
        if lost := unwritten_registers(made.asm["cubin"]):
            raise AssertionError(f"reads registers that are never written: {lost[:2]}")
    except Exception as error:
        refused.append(f"{name}: {type(error).__name__}: {error}")
        raise
    compiled[name] += sum(len(cache[0]) for cache in function.device_caches.values()) - before


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    from espalier.kernels.runtime.launch import launch_hook

    launch_hook.set(_compile)
    known = len(refused)
    try:
        yield
    except Exception:
        if len(refused) > known:
            raise


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"compiled: {dict(compiled)}")
    for line in dict.fromkeys(refused):
        terminalreporter.write_line(f"refused: {line}")
