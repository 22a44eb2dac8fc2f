"""Measures GPU times with CUDA graphs: the times of bodies, the bandwidth, and chains of the products of a pass.

A timed body should find in the L2 cache only the data that it would find there in use.  So in a chain, each layer of a
pass has its own weights.  A single shape is measured over more copies of its weight than the cache holds.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from espalier.bench.linears import ProductRun, Shape
from espalier.kernels.layers.linear_plans import DENSE, LINEAR_TUNING, dense_plans_for
from espalier.kernels.layers.quantised import InputRows, InputScales, QuantisedMatrix, RoundedRows
from espalier.kernels.layers.scaled_product import max_kernel_rows
from espalier.kernels.ops.linear import linear, linear_quantised, quantise_rows
from espalier.kernels.runtime.launch import chip
from espalier.models.layers.mlp import rounding_in_norm
from espalier.models.quantisers import QUANTISERS

# Several times the size of any L2 cache.
BANDWIDTH_BYTES = 4 * 2**30
# Seconds of a measurement: long enough for the GPU's clocks to settle under load.  At its power limit a GPU slows down
# after 0.2 s, and recovers after 0.4 s (docs/log.md).
SECONDS = 1.0
TURNS = 8
# A shorter body is replayed several times between two events, so that the time of an event does not count.
MIN_MS = 0.2
MAX_REPLAYS = 50
# Suffixes of the names of layers that read a norm's output.  Up to `max_kernel_rows`, the norm's launch rounds for
# them.  The qkv of an EAGLE head reads two norms in one launch, which does not round, but the floor leaves out the
# rounding there too.
BEHIND_A_NORM = ("qkv", "q and kv", "gate_up")

# The least copies of a weight (one name and shape), and the least bytes of all its copies.
MIN_COPIES, MIN_BYTES = 4, 2**30

Matrix = Tensor | QuantisedMatrix
Multiply = Callable[[InputRows, Matrix], Tensor]
Product = Callable[[], object]
# Random inputs, by (heads, rows, columns).
Inputs = dict[tuple[int, int, int], Tensor]


class GraphTimer:
    """Times bodies as CUDA graphs.  The graphs share one memory pool, which the first graph keeps alive."""

    def __init__(self) -> None:
        self._first: torch.cuda.CUDAGraph | None = None

    def ms(self, bodies: Sequence[Callable[[], Any]], turns: int = TURNS, seconds: float = 0.0) -> list[float]:
        """The median ms of each body.  The bodies take turns, so that none runs on a cooler GPU.

        They run for `seconds`, and at least `turns` times.  Only the later half counts: a GPU at its power limit slows
        down within tenths of a second, and a server runs much longer than that.
        """
        return timed([self.capture(body) for body in bodies], turns, seconds)

    def bandwidth(self, device: torch.device) -> float:
        """The bytes a second of a kernel that reads each byte once and writes almost nothing."""
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
        # With another mode, a query of events by NCCL's threads would break the capture.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            body()
        self._first = self._first or graph
        return graph


def timed(graphs: Sequence[torch.cuda.CUDAGraph], turns: int, seconds: float) -> list[float]:
    """The median ms of each graph, as in `GraphTimer.ms`."""
    first_ms = [times[-1] for times in _replay_times(graphs, 2, [1] * len(graphs))]
    num_replays = [max(1, min(MAX_REPLAYS, int(MIN_MS / max(ms, 1e-3)))) for ms in first_ms]
    times_of: list[list[float]] = [[] for _ in graphs]
    begun = time.perf_counter()
    while not times_of[0] or time.perf_counter() - begun < seconds:
        for times, new in zip(times_of, _replay_times(graphs, turns, num_replays), strict=True):
            times += new
    return [statistics.median(times[len(times) // 2 :]) for times in times_of]


def _replay_times(graphs: Sequence[torch.cuda.CUDAGraph], turns: int, num_replays: Sequence[int]) -> list[list[float]]:
    """The ms of one replay, [graphs][turns].  num_replays: replays of each graph in a turn.  Waits only at the end."""
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


class Weights:
    """Random weights on a GPU: for each name and shape, one weight for each layer.  All passes share them.

    Layers share weights too, as long as MIN_COPIES weights of MIN_BYTES in all remain, which no cache holds.  So a
    model and its floor fit in memory together.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._made: dict[tuple[str, Shape], list[Matrix]] = {}

    def of(self, run: ProductRun) -> list[Matrix]:
        made = self._made.setdefault((run.name, run.shape), [])
        copies = max(MIN_COPIES, math.ceil(MIN_BYTES * run.count / run.weight_bytes))
        while len(made) < min(run.first + run.count, copies):
            made.append(self.drawn(run.shape if run.heads == 1 else (run.heads, *run.shape), run.weights))
        return [made[at % copies] for at in range(run.first, run.first + run.count)]

    def drawn(self, shape: tuple[int, ...], weights: str = DENSE) -> Matrix:
        """A random weight as large as a trained one.  Zeros would be multiplied faster, with less power."""
        dense = torch.empty(shape, dtype=self.dtype, device=self.device).normal_(std=shape[-1] ** -0.5)
        return dense if weights == DENSE else QUANTISERS[weights].quantise_matrix(dense)

    def chain(self, runs: Sequence[ProductRun], multiply: Multiply) -> Callable[[], None]:
        """A function that runs all products of a pass, layer by layer, and then the products outside of layers."""
        inputs: Inputs = {}
        steps = [(run, layer) for group in by_layer(runs) for layer in range(group[0].count) for run in group]
        return in_turn([self.product(run, layer, inputs, multiply) for run, layer in steps])

    def product(self, run: ProductRun, layer: int, inputs: Inputs, multiply: Multiply) -> Product:
        """The product with weight `layer` of a run.  inputs: of the chain; runs of the same size share an input."""
        key = run.heads, run.rows, run.shape[1]
        if key not in inputs:
            # [rows, in], or [heads, rows, in] for a batched product.
            inputs[key] = torch.randn(key[run.heads == 1 :], dtype=self.dtype, device=self.device)
        return _product(run, inputs[key], self.of(run)[layer], multiply)


def in_turn(products: Sequence[Product]) -> Callable[[], None]:
    def body() -> None:
        for product in products:
            product()

    return body


def _product(run: ProductRun, x: Tensor, weight: Matrix, multiply: Multiply) -> Product:
    if isinstance(weight, Tensor):
        return partial(torch.bmm, x, weight.transpose(1, 2)) if weight.ndim == 3 else partial(multiply, x, weight)
    rounding = rounding_in_norm(weight, x)
    if rounding is not None and run.name.endswith(BEHIND_A_NORM) and len(x) <= max_kernel_rows(rounding, chip(x)):
        return partial(multiply, RoundedRows(*quantise_rows(x, rounding), x.dtype), weight)
    return partial(multiply, x, weight)


def by_layer(runs: Sequence[ProductRun]) -> list[list[ProductRun]]:
    """The runs in groups of neighbours with the same count."""
    groups: list[list[ProductRun]] = []
    for run in runs:
        if groups and groups[-1][0].count == run.count:
            groups[-1].append(run)
        else:
            groups.append([run])
    return groups


def plain(x: InputRows, weight: Matrix) -> Tensor:
    """Multiply with the library's product, if it takes the weight: a dense one, or FP8 with scales of whole rows.

    Other quantised weights are multiplied by our kernels.
    """
    if isinstance(weight, Tensor):
        assert isinstance(x, Tensor)
        return F.linear(x, weight)
    by_row = InputScales()
    if weight.code == "fp8" and weight.row_block == 1 and weight.group >= weight.shape[1] and weight.inputs == by_row:
        values, scales = (x.values, x.scales) if isinstance(x, RoundedRows) else quantise_rows(x, by_row)
        return torch._scaled_mm(values, weight.codes.T, scales, weight.scales.T.contiguous(), out_dtype=x.dtype)
    return linear_quantised(x, weight, None)


def as_engine(x: InputRows, weight: Matrix) -> Tensor:
    """Multiply as the engine does on this GPU."""
    if not isinstance(weight, Tensor):
        return linear_quantised(x, weight, None)
    assert isinstance(x, Tensor)
    plans = dense_plans_for(weight)
    return plain(x, weight) if plans is None else linear(x, weight, None, LINEAR_TUNING.plan_at(plans, len(x)))
