"""precompile(): nothing is launched, every kernel is compiled once, and errors are raised."""

import json
from threading import Thread

import pytest
import torch

from tests import warm

pytest.importorskip("triton", reason="needs Triton")

from espalier.kernels.runtime.precompile import precompile

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


class FakeJitFunction:
    """Stands in for Triton's JIT function, and records warm-ups and launches."""

    def __init__(self):
        self.warmed_up, self.launched, self.device_caches = [], [], {}

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.launched.append((grid, args, kwargs))

    def warmup(self, *args, grid, **kwargs):
        self.warmed_up.append((grid, args, kwargs))


@pytest.fixture
def kernel():
    from espalier.kernels.runtime.jit import HookedLaunch

    class FakeKernel(HookedLaunch, FakeJitFunction):
        pass

    return FakeKernel()


def counts(kernel):
    """[number of warm-ups, number of launches]"""
    return [len(kernel.warmed_up), len(kernel.launched)]


def test_kernels_compile_inside_and_launch_outside(kernel):
    with precompile() as compilations:
        kernel[(3, 1)](7, WIDTH=8)
    assert compilations == [] and counts(kernel) == [1, 0]
    kernel[(3, 1)](7, WIDTH=8)
    assert kernel.launched == kernel.warmed_up == [((3, 1), (7,), {"WIDTH": 8})]


@pytest.mark.parametrize("name", EMPTIES)
def test_uninitialised_tensors_are_zeros(name):
    make, filled = EMPTIES[name], torch.utils.deterministic.fill_uninitialized_memory
    # Fill uninitialised memory outside, so that it is not zero by chance.
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


def test_nesting_is_refused(kernel):
    with precompile():
        with pytest.raises(RuntimeError, match="cannot be nested"), precompile():
            pass
        kernel[(1,)]()
    kernel[(1,)]()
    assert counts(kernel) == [1, 1]


def test_an_error_inside_is_raised_and_no_mode_stays_active(kernel):
    with pytest.raises(torch.OutOfMemoryError), precompile():
        raise torch.OutOfMemoryError
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    kernel[(1,)]()
    with precompile():
        kernel[(1,)]()
    assert counts(kernel) == [1, 1]


def test_other_threads_launch(kernel):
    with precompile():
        thread = Thread(target=lambda: kernel[(1,)]())
        thread.start()
        thread.join()
    assert counts(kernel) == [0, 1]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The output of tests/kernels/asked.py, which compiles for Hopper."""
    return json.loads(
        warm.compiler().run("tests.kernels.asked", TRITON_CACHE_DIR=str(tmp_path_factory.mktemp("triton")))
    )


def test_every_kernel_is_compiled_once_before_its_launch(report):
    names = ["_rms_norm_kernel", "_activation_kernel", "_gather_rows_kernel"]
    assert report["first"] == len(names) and report["again"] == 0
    assert report["launched_inside"] == [] and report["launched"] == names
    # True: compiled by a warm-up, not by a launch.
    assert sorted(report["compiled"]) == sorted([name, True] for name in names)
    assert sorted(name for name, _ in report["loaded"]) == sorted(names)


def test_threads_build_launchers_and_one_thread_loads_them(report):
    """Triton 3.6 may give a kernel the launcher of another one if two threads load launchers at once."""
    threads = [thread for _, thread in report["launchers"]]
    assert all(thread.startswith("espalier-compile") for thread in threads[:3])
    assert threads[3:] == ["MainThread"] * 3
    assert [thread for _, thread in report["loaded"]] == ["MainThread"] * 3


def test_errors_are_raised_while_other_kernels_are_in_the_queue(report):
    """A kernel that does not compile raises the same error as its launch."""
    assert report["failures"] == ["CompilationError", "CompilationError", "OutOfMemoryError", "CompilationError"]
    assert report["modes_left"] == [False, False]
    assert report["launched_after_failures"] == 6


def test_pytorchs_compiler_is_not_imported(report):
    assert not report["dynamo_imported"]
