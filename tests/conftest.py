"""What holds for every test: one thread, reproducible examples, and no GPU test where there is no GPU."""

import ctypes
import gc
import logging
import os
import signal
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import compress
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Read where Triton is first imported, which may be by the next conftest.py: kernels then run in its interpreter, on the
# CPU.  To ask PyTorch for a GPU would take seconds here, also in a controller of several workers.
try:
    ctypes.CDLL("libcuda.so.1")
except OSError:
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from hypothesis import HealthCheck, settings

from tests.folders import under

if TYPE_CHECKING:
    import torch

# Named here because a controller of several workers collects no tests, and so sees no conftest further down.
pytest_plugins = ["tests.properties.summary"]

# A running engine has no deadline, and a failure in CI must be the failure at one's desk.
settings.register_profile(
    "ci",
    max_examples=50,
    derandomize=True,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
# `pytest --hypothesis-profile explore`: other examples at every run, and many more of them.
settings.register_profile("explore", settings.get_profile("ci"), derandomize=False, max_examples=1000)
settings.load_profile("ci")


def pytest_configure(config: pytest.Config) -> None:
    """A controller of several workers runs no test: it is spared PyTorch."""
    if config.getoption("tx", None) and not hasattr(config, "workerinput"):
        return
    import torch

    # Workers share the cores, and matrices of a tiny model are quicker on one thread than on two.
    torch.set_num_threads(1)
    if not has_gpu():
        os.environ.setdefault("TRITON_INTERPRET", "1")


@cache
def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What collecting makes stays to the end: garbage collections need not search it, then or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        # A tiny model's pass makes and drops thousands of objects without a cycle: a search after each 700 finds none.
        gc.set_threshold(20_000, 10, 10)
        gc.enable()
        # Six times a test pytest hands its handlers to every logger that does not propagate: PyTorch has forty.
        for logger in logging.root.manager.loggerDict.values():
            if isinstance(logger, logging.Logger):
                logger.propagate = True


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Cells that will be left out are not made: there are ten thousand.  Of a test that is left out there is one."""
    names = left_out(metafunc.config)
    is_left_out = any(mark.name in names for mark in metafunc.definition.iter_markers())
    parametrize = metafunc.parametrize

    def of_some(arguments: Any, values: Iterable[Any], *more: Any, ids: Any = None, **named: Any) -> None:
        values = list(values)
        kept = [not i if is_left_out else not has_mark(each, names) for i, each in enumerate(values)]
        if any(kept):
            values = list(compress(values, kept))
            # A function names each value by itself; any others are names in the order of the values.
            ids = ids if ids is None or callable(ids) else list(compress(ids, kept))
        parametrize(arguments, values, *more, ids=ids, **named)

    metafunc.parametrize = of_some  # type: ignore[method-assign]


def left_out(config: pytest.Config) -> set[str]:
    """Markers of tests that this run leaves out."""
    wanted = config.option.markexpr
    names = {"full"} if wanted == "not full" else set()
    return names if has_gpu() or "gpu" in wanted else {*names, "gpu"}


def has_mark(value: Any, names: set[str]) -> bool:
    return isinstance(value, type(pytest.param())) and any(mark.name in names for mark in value.marks)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a GPU its tests are left out: to skip two thousand takes seconds.  `-m gpu` skips each by name."""
    if has_gpu():
        for item in items:
            if "kernel_device" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.gpu)
        return
    of_gpus = [item for item in items if item.get_closest_marker("gpu")]
    if "gpu" in config.option.markexpr:
        for item in of_gpus:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    elif of_gpus:
        config.hook.pytest_deselected(items=of_gpus)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


@pytest.fixture(scope="session", autouse=True)
def folders_of_the_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with under(tmp_path_factory.mktemp("run")):
        yield


@pytest.fixture
def kernel_device() -> "Iterator[torch.device]":
    """Where Triton kernels run: the GPU where there is one, else the CPU, in Triton's interpreter, every address
    checked."""
    pytest.importorskip("triton", reason="needs Triton")
    import torch

    from tests.interpreter import adapt_interpreter
    from tests.kernels.bounds import checked

    if has_gpu():
        yield torch.device("cuda")
        # Tests run in several processes on one GPU: what one of them caches, another lacks.
        torch.cuda.empty_cache()
        return
    adapt_interpreter()
    with checked():
        yield torch.device("cpu")


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell's background job, as of `make test &`, begins with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
