"""The measured limits of a GPU."""

from dataclasses import dataclass

import torch

from espalier.bench.timing import DEFAULT_REPEATS, MEASUREMENT_SECONDS, GraphTimer, median_graph_ms

PEAK_MATRIX_SIZE = 8192


@dataclass(frozen=True)
class GpuCeilings:
    """Measured limits of a GPU.  bandwidth: bytes/s read; peak: FLOP/s of a large bf16 matrix product."""

    bandwidth: float
    peak: float


def measure_ceilings(timer: GraphTimer, device: torch.device) -> GpuCeilings:
    return GpuCeilings(timer.memory_bandwidth(device), PeakMeter(timer, device).measure())


class PeakMeter:
    """Measures the FLOP/s of a bf16 matrix product, again and again.

    Make one meter for all measurements, because a hot GPU cools down while a meter is made."""

    def __init__(self, timer: GraphTimer, device: torch.device) -> None:
        a, b = (torch.randn(PEAK_MATRIX_SIZE, PEAK_MATRIX_SIZE, device=device, dtype=torch.bfloat16) for _ in range(2))
        # The graph reads them, and does not keep them.
        self._inputs = (a, b)
        self._graph = timer.capture(lambda: a @ b)

    def measure(self) -> float:
        (ms,) = median_graph_ms([self._graph], DEFAULT_REPEATS, MEASUREMENT_SECONDS)
        return 2 * PEAK_MATRIX_SIZE**3 / ms * 1e3
