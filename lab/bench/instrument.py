"""Records an engine's launches: what ran, how long the host waited, and how long the GPU worked.

It uses the engine's own hooks: Engine.observer, CudaExecutor.replay_events and CudaExecutor.keep_graphs.
"""

import ctypes
from collections.abc import Sequence
from itertools import pairwise
from time import perf_counter

import torch

from espalier.engine.cuda import CudaExecutor
from espalier.engine.engine import Engine
from espalier.engine.executor import LaunchHandle
from espalier.engine.launch_input import LaunchInput
from espalier.engine.lead import LeadExecutor
from espalier.layout import LaunchForm

# CU_GRAPH_NODE_TYPE_KERNEL of CUDA's driver API.
KERNEL_NODE = 0


class LaunchRecord:
    """What was recorded since the last reset; a LaunchObserver.

    captured_passes: see Executor.
    waited_seconds: how long the host waited for results; prefills: (pieces, width) of each prefill pass, padding
    included; rounds: the batch of each round; replays: the events before and after each CUDA graph that was replayed.
    """

    def __init__(self, captured_passes: Sequence[LaunchForm]) -> None:
        self.captured_passes = captured_passes
        self.waited_seconds = 0.0
        self.prefills: list[tuple[int, int]] = []
        self.rounds: list[int] = []
        self.replays: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def on_launch(self, launch_input: LaunchInput) -> None:
        if launch_input.is_prefill:
            form = launch_input.form(self.captured_passes)
            self.prefills.append((form.pieces or form.batch, form.width))
        else:
            self.rounds.append(len(launch_input.slots))

    def before_result(self, handle: LaunchHandle) -> None:
        begun = perf_counter()
        handle.wait()
        self.waited_seconds += perf_counter() - begun

    def reset(self) -> None:
        self.waited_seconds = 0.0
        # The executor appends to this list of replays.
        for recorded in (self.prefills, self.rounds, self.replays):
            recorded.clear()

    def gpu_times(self) -> tuple[float, float]:
        """(mean ms of a replay, share of the time from the first replay to the last in which the GPU was idle)"""
        torch.cuda.synchronize()
        busy = [start.elapsed_time(end) for start, end in self.replays]
        gaps = [before[1].elapsed_time(after[0]) for before, after in pairwise(self.replays)]
        whole = self.replays[0][0].elapsed_time(self.replays[-1][1])
        return sum(busy) / len(busy), sum(gaps) / whole


def record_launches(engine: Engine) -> LaunchRecord:
    record = LaunchRecord(engine.executor.captured_passes)
    engine.observer = record
    executor = engine.executor
    executor = executor.own_executor if isinstance(executor, LeadExecutor) else executor
    if isinstance(executor, CudaExecutor):
        executor.replay_events = record.replays
    return record


def count_kernels(graph: torch.cuda.CUDAGraph) -> int:
    """The kernels of a graph that was captured with keep_graph."""
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
