"""Kernels that are asked for together: nothing is launched, all are made once, and what goes wrong comes out."""

import json
import os
import subprocess
import sys
from pathlib import Path
from threading import Thread

import pytest
import torch

from espalier.kernels.runtime.launch import Kernel

pytest.importorskip("triton", reason="needs Triton")

from espalier.kernels.runtime.precompile import precompile

ROOT = Path(__file__).parents[2]
EMPTIES = {
    "empty": lambda: torch.empty(3, 4),
    "of a dtype": lambda: torch.empty(5, dtype=torch.int64),
    "bool": lambda: torch.empty(5, dtype=torch.bool),
    "empty_like": lambda: torch.empty_like(torch.ones(2, 3).T),
    "empty_strided": lambda: torch.empty_strided((2, 3), (1, 4)),
    "empty_permuted": lambda: torch.empty_permuted((2, 3, 4), (2, 0, 1)),
    "new_empty": lambda: torch.ones(1).new_empty(2, 3),
    "new_empty_strided": lambda: torch.ones(1).new_empty_strided((2, 2), (2, 1)),
}


class Compiled:
    """What a Kernel compiles to, which notes what becomes of it."""

    def __init__(self):
        self.asked, self.launched, self.device_caches = [], [], {}

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.launched.append((grid, args, kwargs))

    def warmup(self, *args, grid, **kwargs):
        self.asked.append((grid, args, kwargs))


@pytest.fixture
def kernel():
    made = Kernel(lambda: None)
    made._compiled = Compiled()
    return made


def seen(kernel):
    return [len(kernel.compiled.asked), len(kernel.compiled.launched)]


def test_a_launch_asks_and_afterwards_launches(kernel):
    with precompile() as asked:
        kernel[(3, 1)](7, WIDTH=8)
    assert asked == [] and seen(kernel) == [1, 0]
    kernel[(3, 1)](7, WIDTH=8)
    assert kernel.compiled.launched == kernel.compiled.asked == [((3, 1), (7,), {"WIDTH": 8})]


@pytest.mark.parametrize("name", EMPTIES)
def test_what_kernels_would_have_written_is_zeros(name):
    make, filled = EMPTIES[name], torch.utils.deterministic.fill_uninitialized_memory
    # So that what nobody wrote is not zero by chance.
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        outside = make()
        with torch.inference_mode(), precompile():
            inside, ones = make(), torch.ones(2)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = filled
    assert outside.any() and not inside.any() and ones.all()
    assert inside.stride() == outside.stride() and inside.dtype == outside.dtype


def test_it_does_not_stand_in_itself(kernel):
    with precompile():
        with pytest.raises(RuntimeError, match="within itself"), precompile():
            pass
        kernel[(1,)]()
    kernel[(1,)]()
    assert seen(kernel) == [1, 1]


def test_what_goes_wrong_in_it_comes_out_and_nothing_is_left_of_it(kernel):
    with pytest.raises(torch.OutOfMemoryError), precompile():
        raise torch.OutOfMemoryError
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    kernel[(1,)]()
    with precompile():
        kernel[(1,)]()
    assert seen(kernel) == [1, 1]


def test_other_threads_launch(kernel):
    with precompile():
        thread = Thread(target=lambda: kernel[(1,)]())
        thread.start()
        thread.join()
    assert seen(kernel) == [0, 1]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Of a program that really compiles, for Hopper."""
    own = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    own["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    command = [sys.executable, "-m", "tests.kernels.asked"]
    ran = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_every_kernel_is_made_once_before_its_launch(found):
    names = ["_rms_norm_kernel", "_silu_mul_kernel", "_gather_rows_kernel"]
    assert found["first"] == len(names) and found["again"] == 0
    assert found["launched_inside"] == [] and found["launched"] == names
    # A launch that had to compile would say that nobody had asked for the kernel.
    assert sorted(found["compiled"]) == sorted([name, True] for name in names)
    assert sorted(name for name, _ in found["loaded"]) == sorted(names)
    assert all(thread.startswith("espalier-compile") for _, thread in found["loaded"])


def test_what_goes_wrong_comes_out_though_others_wait_to_be_made(found):
    """A kernel that does not compile raises what its launch raises."""
    assert found["failures"] == ["CompilationError", "CompilationError", "OutOfMemoryError", "CompilationError"]
    assert found["modes_left"] == [False, False]
    assert found["launched_after_failures"] == 6


def test_a_start_does_not_pay_for_pytorchs_compiler(found):
    assert not found["is_dynamo_there"]
