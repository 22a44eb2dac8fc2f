"""Looks at launches from in front of an engine's executor: what ran, how long the host waited, how long the GPU."""

import ctypes
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch

from espalier.engine.cuda import CudaExecutor, CudaHandle
from espalier.engine.engine import Engine
from espalier.engine.executor import Executor, Handle, StagedHandle
from espalier.engine.launch_input import LaunchInput, Row
from espalier.speculate.round import ModelRunner

KERNEL_NODE = 0


@dataclass
class Seen:
    """What was noted since the last reset.

    waited: seconds in which the host waited for results; prefills: (requests, width) of prefill passes; rounds: batch
    of each round launched; replays: events before and after each graph that was replayed.
    """

    waited: float = 0.0
    prefills: list[tuple[int, int]] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    replays: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    def gpu(self) -> tuple[float, float]:
        """Of the rounds replayed: ms of one, in the mean, and the share of the time between first and last in which
        the GPU waited for the next."""
        torch.cuda.synchronize()
        busy = [start.elapsed_time(end) for start, end in self.replays]
        gaps = [before[1].elapsed_time(after[0]) for before, after in pairwise(self.replays)]
        whole = self.replays[0][0].elapsed_time(self.replays[-1][1])
        return sum(busy) / len(busy), sum(gaps) / whole


class Watched:
    """An executor, watched.  Put in an engine's place for its own by `watch`."""

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self.seen = Seen()
        if isinstance(inner, CudaExecutor):
            for batch, graph in inner.graphs.items():
                timed: Any = _TimedGraph(graph.graph, self)
                inner.graphs[batch] = replace(graph, graph=timed)

    @property
    def runner(self) -> ModelRunner:
        return self.inner.runner

    def launch(self, launch_input: LaunchInput) -> Handle:
        if launch_input.is_prefill:
            self.seen.prefills.append((len(launch_input.slots), launch_input.width))
        else:
            self.seen.rounds.append(len(launch_input.slots))
        return _Waiting(self.inner.launch(launch_input), self)

    def launch_staged(self, launch_input: LaunchInput) -> StagedHandle:
        self.seen.rounds.append(len(launch_input.slots))
        return self.inner.launch_staged(launch_input)

    def reset(self) -> None:
        self.seen = Seen()

    def close(self) -> None:
        self.inner.close()


def watch(engine: Engine) -> Watched:
    """From now on every launch of this engine is seen."""
    watched = Watched(engine.executor)
    engine.executor = watched
    return watched


@dataclass(frozen=True)
class _Waiting:
    """A launch on its way, whose waiting is counted and whose reading is not."""

    handle: Handle
    watched: Watched

    def result(self) -> list[Row]:
        begun = perf_counter()
        if isinstance(self.handle, CudaHandle):
            self.handle.place.copied.synchronize()
        elif isinstance(self.handle, Future):
            wait_for((self.handle,))
        self.watched.seen.waited += perf_counter() - begun
        return self.handle.result()


class _TimedGraph:
    """A CUDA graph between two events on the stream that it is replayed on.  All else is the graph's own."""

    def __init__(self, graph: torch.cuda.CUDAGraph, watched: Watched) -> None:
        self.graph = graph
        self.watched = watched

    def replay(self) -> None:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.graph.replay()
        end.record()
        self.watched.seen.replays.append((start, end))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.graph, name)


@contextmanager
def graphs_kept() -> Iterator[None]:
    """Graphs captured here can be counted, as PyTorch otherwise forgets what a graph was made of.  Whoever captures
    calls their `instantiate`."""
    own = torch.cuda.CUDAGraph
    torch.cuda.CUDAGraph = partial(own, keep_graph=True)  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        torch.cuda.CUDAGraph = own  # type: ignore[misc]


def count_kernels(graph: torch.cuda.CUDAGraph) -> int:
    """Kernels of a graph captured under `graphs_kept`."""
    cuda = ctypes.CDLL("libcuda.so.1")
    raw, count = ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t()
    cuda.cuGraphGetNodes(raw, None, ctypes.byref(count))
    nodes = (ctypes.c_void_p * count.value)()
    cuda.cuGraphGetNodes(raw, nodes, ctypes.byref(count))
    kernels = 0
    for node in nodes:
        kind = ctypes.c_int(-1)
        cuda.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind))
        kernels += kind.value == KERNEL_NODE
    return kernels
