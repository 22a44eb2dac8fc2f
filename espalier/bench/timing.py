"""How times on a GPU are taken, one way for all: replays of CUDA graphs between events; and what the chip does at most.

Whoever times a body sees to it that it finds nothing in the L2 that it would not find in use.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

# Several times any L2.
BANDWIDTH_BYTES = 4 * 2**30
PEAK_SIDE = 8192
# Long enough for the chip's clocks to settle under the load.
SECONDS = 0.3
TURNS = 8
# What is shorter is replayed several times between two events, or an event's own time would count.
LEAST_MS = 0.2
MOST_AGAIN = 50


@dataclass(frozen=True)
class Ceilings:
    """Measured: bytes a second that are read, and floating-point operations a second of a large bf16 product."""

    bandwidth: float
    peak: float


class Stopwatch:
    """Times what CUDA graphs replay.  Graphs share one pool of memory, which the first of them keeps."""

    def __init__(self) -> None:
        self._first: torch.cuda.CUDAGraph | None = None

    def ms(self, bodies: Sequence[Callable[[], Any]], turns: int = TURNS, seconds: float = 0.0) -> list[float]:
        """Median of each body, all taking turns, so that none has the cooler chip.

        For `seconds`, and `turns` at least; the later half counts: a chip at its power limit slows down within tenths
        of a second, and serving is what goes on.
        """
        graphs = [self._capture(body) for body in bodies]
        again = [_again(times[-1]) for times in _replayed(graphs, 2, [1] * len(graphs))]
        found: list[list[float]] = [[] for _ in bodies]
        begun = time.perf_counter()
        while not found[0] or time.perf_counter() - begun < seconds:
            for times, new in zip(found, _replayed(graphs, turns, again), strict=True):
                times += new
        return [statistics.median(times[len(times) // 2 :]) for times in found]

    def ceilings(self, device: torch.device) -> Ceilings:
        return Ceilings(self.bandwidth(device), self.peak(device))

    def bandwidth(self, device: torch.device) -> float:
        """Bytes a second that memory delivers to a kernel that only reads, each byte once."""
        data = torch.randn(BANDWIDTH_BYTES // torch.float32.itemsize, device=device)
        (read,) = self.ms([data.sum], seconds=SECONDS)
        return BANDWIDTH_BYTES / read * 1e3

    def peak(self, device: torch.device) -> float:
        a, b = (torch.randn(PEAK_SIDE, PEAK_SIDE, device=device, dtype=torch.bfloat16) for _ in range(2))
        (product,) = self.ms([lambda: a @ b], seconds=SECONDS)
        return 2 * PEAK_SIDE**3 / product * 1e3

    def _capture(self, body: Callable[[], Any]) -> torch.cuda.CUDAGraph:
        # On another stream than a capture's: what a library sets up for it is then there.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            body()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._first.pool() if self._first else None):
            body()
        self._first = self._first or graph
        return graph


def _again(ms: float) -> int:
    return max(1, min(MOST_AGAIN, int(LEAST_MS / max(ms, 1e-3))))


def _replayed(graphs: Sequence[torch.cuda.CUDAGraph], turns: int, again: Sequence[int]) -> list[list[float]]:
    """ms of a replay of each graph at each turn, so many of them a turn; nobody waits in between."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(turns * len(graphs) + 1)]
    graphs[-1].replay()
    events[0].record()
    for turn, event in enumerate(events[1:]):
        for _ in range(again[turn % len(graphs)]):
            graphs[turn % len(graphs)].replay()
        event.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in pairwise(events)]
    return [[ms / again[first] for ms in times[first :: len(graphs)]] for first in range(len(graphs))]
