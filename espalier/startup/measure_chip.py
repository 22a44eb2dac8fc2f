"""Measures what a GPU can do, in some 20 ms at the start: the figures that trees are predicted from."""

import statistics
from collections.abc import Callable
from functools import cache

import torch

from espalier.startup.tree_cost import ChipFigures

# Bytes of a copy that is too large for a cache, and the size of a square product that fills a chip.
COPIED_BYTES, PRODUCT_SIZE = 2**27, 4096
REPEATS = 7


@cache
def measure_chip(device: torch.device) -> ChipFigures:
    """The bandwidth of a copy, bytes read and written, and the rate of a product in bfloat16."""
    with torch.cuda.device(device):
        source = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=device)
        matrix = torch.randn(PRODUCT_SIZE, PRODUCT_SIZE, dtype=torch.bfloat16, device=device)
        into, product = torch.empty_like(source), torch.empty_like(matrix)
        bandwidth = 2 * COPIED_BYTES / _seconds(lambda: into.copy_(source))
        peak = 2 * PRODUCT_SIZE**3 / _seconds(lambda: torch.mm(matrix, matrix, out=product))
    return ChipFigures(torch.cuda.get_device_name(device), bandwidth, peak)


def _seconds(work: Callable[[], object]) -> float:
    """The median time of some work, once it is warm."""
    times = []
    for _ in range(3 + REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return statistics.median(times[-REPEATS:])
