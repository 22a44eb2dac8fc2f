"""Measures with CUDA graphs: the GPU time of functions and of all matrix products of a pass, and the memory bandwidth.

In the engine, a layer's weights are not in the L2 cache when the layer begins.  The measurements keep this true: the
layers of a pass have different weights, and a single shape is measured with many different weights.
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

from espalier.bench.linears import ProductGroup, Shape
from espalier.kernels.layers.linear_plans import DENSE, LINEAR_TUNING, plans_for_dense_weight
from espalier.kernels.layers.quantised import InputRows, InputScales, QuantisedMatrix, RoundedRows
from espalier.kernels.layers.scaled_product import max_kernel_rows
from espalier.kernels.ops.linear import linear, linear_quantised, quantise_rows
from espalier.kernels.runtime.launch import chip
from espalier.models.layers.mlp import rounding_in_norm
from espalier.models.quantisers import QUANTISERS

# The bytes that the bandwidth test reads, many times the size of any L2 cache.
BANDWIDTH_BYTES = 4 * 2**30
# How long a measurement lasts, so that the GPU's clocks settle.  At its power limit, a GPU slows down after 0.2 s, and
# recovers after 0.4 s (docs/log.md).
MEASUREMENT_SECONDS = 1.0
DEFAULT_REPEATS = 8
# A graph that takes less time is replayed several times between two CUDA events, because events take time too.
MIN_TIMED_MS = 0.2
MAX_REPLAYS = 50
# The last words of the names of layers that follow a norm.  For up to `max_kernel_rows` rows, the norm's kernel also
# quantises the input of such a layer, so the time of quantising is not measured with the layer.  It is also not
# measured for the qkv of an EAGLE head, where another kernel quantises the input.
LAYERS_AFTER_NORM = ("qkv", "q and kv", "gate_up")

# The products with one name and shape have at least so many different weights, with at least so many bytes together,
# but at most one weight for each layer.
MIN_WEIGHT_COPIES, MIN_WEIGHT_BYTES = 4, 2**30

Matrix = Tensor | QuantisedMatrix
# (inputs, weight) -> their product
Multiply = Callable[[InputRows, Matrix], Tensor]
Product = Callable[[], object]
# Random inputs by (heads, rows, columns).
InputsBySize = dict[tuple[int, int, int], Tensor]


class GraphTimer:
    """Times functions as CUDA graphs.  All graphs share a memory pool, which the first graph keeps alive."""

    def __init__(self) -> None:
        self._first_graph: torch.cuda.CUDAGraph | None = None

    def median_ms(
        self, functions: Sequence[Callable[[], Any]], repeats: int = DEFAULT_REPEATS, seconds: float = 0.0
    ) -> list[float]:
        """Returns the median ms of each function.  The functions take turns, so that all run on an equally warm GPU.

        All functions together run for `seconds`, and each function at least `repeats` times.  Only the second half of
        the times counts, because a GPU at its power limit slows down after some tenths of a second, and a server runs
        much longer."""
        return median_graph_ms([self.capture(body) for body in functions], repeats, seconds)

    def memory_bandwidth(self, device: torch.device) -> float:
        """Returns the bandwidth, in bytes a second, of a kernel that reads each byte once and writes almost nothing."""
        data = torch.randn(BANDWIDTH_BYTES // torch.float32.itemsize, device=device)
        (read,) = self.median_ms([data.sum], seconds=MEASUREMENT_SECONDS)
        return BANDWIDTH_BYTES / read * 1e3

    def capture(self, function: Callable[[], Any]) -> torch.cuda.CUDAGraph:
        # The first call may set up libraries, which is not allowed during a capture.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        pool = self._first_graph.pool() if self._first_graph else None
        # In the other capture modes, the capture would fail when a thread of NCCL queries an event.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            function()
        self._first_graph = self._first_graph or graph
        return graph


def median_graph_ms(graphs: Sequence[torch.cuda.CUDAGraph], repeats: int, seconds: float) -> list[float]:
    """Returns the median ms of each graph.  See GraphTimer.median_ms."""
    first_ms = [times[-1] for times in _replay_times(graphs, 2, [1] * len(graphs))]
    num_replays = [max(1, min(MAX_REPLAYS, int(MIN_TIMED_MS / max(ms, 1e-3)))) for ms in first_ms]
    times_by_graph: list[list[float]] = [[] for _ in graphs]
    started_at = time.perf_counter()
    while not times_by_graph[0] or time.perf_counter() - started_at < seconds:
        for times, new_times in zip(times_by_graph, _replay_times(graphs, repeats, num_replays), strict=True):
            times += new_times
    return [statistics.median(times[len(times) // 2 :]) for times in times_by_graph]


def _replay_times(
    graphs: Sequence[torch.cuda.CUDAGraph], repeats: int, num_replays: Sequence[int]
) -> list[list[float]]:
    """Returns a list for each graph: the mean ms of a replay, in each of its `repeats` turns.  The graphs take turns.
    num_replays: how often each graph is replayed in one of its turns."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats * len(graphs) + 1)]
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
    """Random weights on a GPU, shared by all passes.  The products with one name and shape have different weights in
    the first layers: at least MIN_WEIGHT_COPIES weights, and at least MIN_WEIGHT_BYTES, which fit in no cache.  Further
    layers use these weights again, to save memory."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._weights_by_shape: dict[tuple[str, Shape], list[Matrix]] = {}

    def weights_of(self, group: ProductGroup) -> list[Matrix]:
        """Returns the weight of each product of the group."""
        weights = self._weights_by_shape.setdefault((group.name, group.shape), [])
        num_copies = max(MIN_WEIGHT_COPIES, math.ceil(MIN_WEIGHT_BYTES * group.num_weights / group.weight_bytes))
        while len(weights) < min(group.first_weight + group.num_weights, num_copies):
            shape = group.shape if group.num_heads == 1 else (group.num_heads, *group.shape)
            weights.append(self.random_weight(shape, group.weight_format))
        end = group.first_weight + group.num_weights
        return [weights[index % num_copies] for index in range(group.first_weight, end)]

    def random_weight(self, shape: tuple[int, ...], weight_format: str = DENSE) -> Matrix:
        """Returns a random weight with a trained weight's magnitude, because products with zeros would be faster."""
        dense = torch.empty(shape, dtype=self.dtype, device=self.device).normal_(std=shape[-1] ** -0.5)
        return dense if weight_format == DENSE else QUANTISERS[weight_format].quantise_matrix(dense)

    def make_pass(self, groups: Sequence[ProductGroup], multiply: Multiply) -> Callable[[], None]:
        """Returns a function that runs all products of a pass, in the order of `groups`, layer by layer."""
        inputs: InputsBySize = {}
        layers = ((group, layer) for group in group_by_count(groups) for layer in range(group[0].num_weights))
        steps = [(run, layer) for group, layer in layers for run in group]
        return run_in_order([self.make_product(run, layer, inputs, multiply) for run, layer in steps])

    def make_product(self, group: ProductGroup, layer: int, inputs: InputsBySize, multiply: Multiply) -> Product:
        """Returns one product of `group`.  layer: the index of the product's layer in the group.  inputs: the random
        inputs of the pass; an input of a new size is added."""
        key = group.num_heads, group.num_rows, group.shape[1]
        if key not in inputs:
            # [rows, in], or [heads, rows, in] for a batched product.
            inputs[key] = torch.randn(key[group.num_heads == 1 :], dtype=self.dtype, device=self.device)
        return _bind_product(group, inputs[key], self.weights_of(group)[layer], multiply)


def run_in_order(products: Sequence[Product]) -> Callable[[], None]:
    """Returns a function that runs the products one after another."""

    def run_products() -> None:
        for product in products:
            product()

    return run_products


def _bind_product(group: ProductGroup, x: Tensor, weight: Matrix, multiply: Multiply) -> Product:
    """Returns a function without arguments that multiplies x with the weight."""
    if isinstance(weight, Tensor):
        return partial(torch.bmm, x, weight.transpose(1, 2)) if weight.ndim == 3 else partial(multiply, x, weight)
    rounding = rounding_in_norm(weight, x)
    if rounding is not None and group.name.endswith(LAYERS_AFTER_NORM) and len(x) <= max_kernel_rows(rounding, chip(x)):
        return partial(multiply, RoundedRows(*quantise_rows(x, rounding), x.dtype), weight)
    return partial(multiply, x, weight)


def group_by_count(product_groups: Sequence[ProductGroup]) -> list[list[ProductGroup]]:
    """Returns lists of successive groups with equal num_weights, which are products of the same layers."""
    groups: list[list[ProductGroup]] = []
    for run in product_groups:
        if groups and groups[-1][0].num_weights == run.num_weights:
            groups[-1].append(run)
        else:
            groups.append([run])
    return groups


def multiply_by_library(x: InputRows, weight: Matrix) -> Tensor:
    """Multiplies with PyTorch's product if it supports the weight: dense, or FP8 with a scale for each row.  For other
    quantised weights, multiplies with our kernels."""
    if isinstance(weight, Tensor):
        assert isinstance(x, Tensor)
        return F.linear(x, weight)
    scale_per_row = InputScales()
    if (
        weight.code == "fp8"
        and weight.rows_per_scale == 1
        and weight.group_size >= weight.shape[1]
        and weight.input_scales == scale_per_row
    ):
        values, scales = (x.values, x.scales) if isinstance(x, RoundedRows) else quantise_rows(x, scale_per_row)
        return torch._scaled_mm(values, weight.codes.T, scales, weight.scales.T.contiguous(), out_dtype=x.dtype)
    return linear_quantised(x, weight, None)


def multiply_like_engine(x: InputRows, weight: Matrix) -> Tensor:
    """Multiply as the engine does on this GPU."""
    if not isinstance(weight, Tensor):
        return linear_quantised(x, weight, None)
    assert isinstance(x, Tensor)
    plans = plans_for_dense_weight(weight)
    return (
        multiply_by_library(x, weight)
        if plans is None
        else linear(x, weight, None, LINEAR_TUNING.plan_for_count(plans, len(x)))
    )
