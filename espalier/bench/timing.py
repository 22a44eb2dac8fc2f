"""Measures GPU times by replaying CUDA graphs between events, and measures the GPU's bandwidth.

The caller makes sure that a body finds in the L2 cache only the data that it would find there in use.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

# Several times the size of any L2 cache.
BANDWIDTH_BYTES = 4 * 2**30
# Long enough for the GPU's clocks to settle under load: at its power limit a GPU slows down after 0.2 s, and recovers
# after 0.4 s (docs/log.md).
SECONDS = 1.0
TURNS = 8
# A shorter body is replayed several times between two events, so that the time of an event does not count.
MIN_MS = 0.2
MAX_REPLAYS = 50


class Stopwatch:
    """Times bodies as CUDA graphs.  The graphs share one memory pool, which the first graph keeps."""

    def __init__(self) -> None:
        self._first: torch.cuda.CUDAGraph | None = None

    def ms(self, bodies: Sequence[Callable[[], Any]], turns: int = TURNS, seconds: float = 0.0) -> list[float]:
        """Median ms of each body.  The bodies take turns, so that none runs on a cooler GPU.

        They run for `seconds`, and at least `turns` times.  Only the later half counts: a GPU at its power limit slows
        down within tenths of a second, and a server runs much longer than that.
        """
        return timed([self.capture(body) for body in bodies], turns, seconds)

    def bandwidth(self, device: torch.device) -> float:
        """Bytes/s of a kernel that reads each byte once and writes almost nothing."""
        data = torch.randn(BANDWIDTH_BYTES // torch.float32.itemsize, device=device)
        (read,) = self.ms([data.sum], seconds=SECONDS)
        return BANDWIDTH_BYTES / read * 1e3

    def capture(self, body: Callable[[], Any]) -> torch.cuda.CUDAGraph:
        # The first call of a body may set up libraries, which a capture does not allow.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            body()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        pool = self._first.pool() if self._first else None
        # NCCL's threads may ask for events meanwhile.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            body()
        self._first = self._first or graph
        return graph


def timed(graphs: Sequence[torch.cuda.CUDAGraph], turns: int, seconds: float) -> list[float]:
    """Median ms of each graph, as `Stopwatch.ms`."""
    num_replays = [_num_replays(times[-1]) for times in _replay_times(graphs, 2, [1] * len(graphs))]
    times_of: list[list[float]] = [[] for _ in graphs]
    begun = time.perf_counter()
    while not times_of[0] or time.perf_counter() - begun < seconds:
        for times, new in zip(times_of, _replay_times(graphs, turns, num_replays), strict=True):
            times += new
    return [statistics.median(times[len(times) // 2 :]) for times in times_of]


def _num_replays(ms: float) -> int:
    """How often a body of `ms` is replayed between two events."""
    return max(1, min(MAX_REPLAYS, int(MIN_MS / max(ms, 1e-3))))


def _replay_times(graphs: Sequence[torch.cuda.CUDAGraph], turns: int, num_replays: Sequence[int]) -> list[list[float]]:
    """ms of one replay of each graph, [graphs][turns].  num_replays: replays of each graph a turn.  No synchronisation
    in between."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(turns * len(graphs) + 1)]
    graphs[-1].replay()
    events[0].record()
    for turn, event in enumerate(events[1:]):
        for _ in range(num_replays[turn % len(graphs)]):
            graphs[turn % len(graphs)].replay()
        event.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in pairwise(events)]
    return [[ms / num_replays[i] for ms in times[i :: len(graphs)]] for i in range(len(graphs))]
