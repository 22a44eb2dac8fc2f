"""CUDA as the GPU executor sees it, on the CPU: streams run at once, and a graph repeats the operations of its capture.

A repeated operation reads the tensors of the capture and writes its results into the tensors of the capture, as a CUDA
graph does.  So values that the host computed during the capture stay what they were.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from espalier.engine import cuda
from espalier.engine.cuda import CudaExecutor, HostEntry
from espalier.engine.engine import Engine
from tests.harness import Setup

UNINITIALISED = ("empty", "new_empty")


class Capture(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        self.operations.append((func, args, kwargs or {}, result))
        return result


class FakeGraph:
    captured = 0
    replayed = 0

    def __init__(self, keep_graph: bool = False) -> None:
        self.capture = Capture()

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        type(self).captured += 1
        assert not gc.isenabled(), "a garbage collection would end the capture"
        self.capture.__enter__()

    def capture_end(self) -> None:
        self.capture.__exit__(None, None, None)

    def replay(self) -> None:
        type(self).replayed += 1
        for func, args, kwargs, result in self.capture.operations:
            if func.overloadpacket.__name__.startswith(UNINITIALISED):
                continue
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class FakeStream:
    def __init__(self, device: Any = None) -> None: ...

    def wait_stream(self, other: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...


class FakeEvent:
    def record(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...


@contextmanager
def fake_graph(graph: FakeGraph, pool: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
    graph.capture_begin(pool)
    yield
    graph.capture_end()


def without_pinning(make: Any) -> Any:
    return lambda *args, pin_memory=False, **kwargs: make(*args, **kwargs)


def fake_cuda(patch: pytest.MonkeyPatch) -> None:
    for name, fake in {
        "Stream": FakeStream,
        "CUDAGraph": FakeGraph,
        "graph": fake_graph,
        "stream": lambda stream: nullcontext(),
        "set_stream": lambda stream: None,
        "device": lambda device: nullcontext(),
        "current_stream": FakeStream,
        "synchronize": lambda device=None: None,
        "graph_pool_handle": lambda: None,
        "memory_reserved": lambda device: 0,
    }.items():
        patch.setattr(torch.cuda, name, fake)
    for name in ("zeros", "empty"):
        patch.setattr(torch, name, without_pinning(getattr(torch, name)))
    # A copy, so that a buffer on the host that is written too early is seen.
    patch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    patch.setattr(cuda, "HostEntry", lambda *args: HostEntry(*args, FakeEvent(), FakeEvent()))
    patch.setattr(cuda, "precompile", lambda: nullcontext(()))
    FakeGraph.captured = FakeGraph.replayed = 0


def engine_on_fake_cuda(setup: Setup, graph_batch: int) -> Engine:
    """graph_batch: as in CudaExecutor."""
    runner = setup.engine().executor.runner
    executor = CudaExecutor(runner, graph_batch, overlap=setup.overlap, capture_stages=True)
    return Engine(executor, setup.overlap, setup.prefix_cache)
