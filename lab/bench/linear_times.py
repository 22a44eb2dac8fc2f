"""`python -m lab linears`: each linear layer of a named shape on a GPU, and its experts, format by format.

Weights of a chain of calls differ, so that none is found in the L2 cache.  What is printed is the share of the read
bandwidth that the bytes of the stored weights make up.
"""

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from rich.text import Text

from espalier.bench.chains import Matrix, Weights
from espalier.bench.expert_product import ExpertProduct, stored_experts
from espalier.bench.linears import ModelShape, Shape, shape_named
from espalier.bench.timing import Stopwatch
from espalier.kernels.layers.linear_tuning import plans_for
from espalier.kernels.layers.quantised import QuantisedMatrix
from espalier.kernels.layers.quantised_plans import plan_of
from espalier.kernels.layers.scaled_product import is_scaled_product
from espalier.kernels.layers.tuning_table import DENSE
from espalier.kernels.ops.linear import linear, linear_gated, linear_quantised, linear_quantised_gated
from espalier.models.quantisers import QUANTISERS, find_quantiser
from espalier.terminal.console import QUIET, print_header, print_table, require_writable, stdout, write_json
from espalier.terminal.flags import positive_numbers
from espalier.terminal.machine import require_gpu

DTYPE = torch.bfloat16
# Weights of a chain together; the L2 cache holds a fraction.
CHAIN_BYTES = 600 * 10**6
TURNS = 20
GATED = "gate_up"


@dataclass(frozen=True)
class LayerTime:
    """A product with `rows` rows.  us: of a call; bandwidth_share: bytes of the weight over it, over the measured rate.

    plan: of the kernel, None: the library's; for experts the number of them that have rows.
    """

    layer: str
    shape: Shape
    weights: str
    rows: int
    us: float
    bandwidth_share: float
    plan: str


def run(args: Namespace) -> int:
    all_rows = positive_numbers("--rows", args.rows, "1,4,16,64")
    formats = args.weights.split(",")
    for name in formats:
        if name != DENSE:
            find_quantiser(name)
    require_writable("--json", args.json)
    device = require_gpu("linears")
    print_header()
    stopwatch = Stopwatch()
    bandwidth = stopwatch.bandwidth(device)
    shape, times = shape_named(args.shape), []
    for name in formats:
        times += layer_times(shape, name, all_rows, bandwidth, device, stopwatch)
        times += expert_times(shape, name, all_rows, bandwidth, device, stopwatch)
    write_json(args.json, {"bytes_per_second": bandwidth, "layers": [asdict(time) for time in times]})
    stdout().print(Text(f"bfloat16 inputs; memory reads {bandwidth / 1e12:.2f} TB/s", QUIET))
    print_table(table(times))
    return 0


def layer_times(
    shape: ModelShape, weights: str, all_rows: Sequence[int], bandwidth: float, device: torch.device, timer: Stopwatch
) -> list[LayerTime]:
    """The linear layers that the format takes, without routers and the head."""
    times, made = [], Weights(DTYPE, device)
    # Layers with and without experts have some layers in common.
    for run in {(run.name, run.shape): run for run in shape.target_pass(1)}.values():
        if run.heads > 1 or "router" in run.name or run.name[-4:] == "gate" or run.name == "lm_head":
            continue
        if weights != DENSE and run.shape[1] % QUANTISERS[weights].groups[0]:
            continue
        first = made.drawn(run.shape, weights)
        copies = [first, *(made.drawn(run.shape, weights) for _ in range(CHAIN_BYTES // first.nbytes))]
        for rows in all_rows:
            x = torch.randn(rows, run.shape[1], dtype=DTYPE, device=device)
            [ms] = timer.ms([_chain(x, copies, run.name == GATED)], TURNS)
            us = 1e3 * ms / len(copies)
            share = first.nbytes / us * 1e6 / bandwidth
            times.append(LayerTime(run.name, run.shape, weights, rows, us, share, _plan(first, x)))
    return times


def expert_times(
    shape: ModelShape, weights: str, all_rows: Sequence[int], bandwidth: float, device: torch.device, timer: Stopwatch
) -> list[LayerTime]:
    """The product with the experts of a layer, whose bytes are those of the experts that have rows."""
    takes = weights == DENSE or QUANTISERS[weights].experts
    if shape.experts is None or not takes:
        return []
    sizes = shape.experts.shape
    gate_up, down = stored_experts(sizes, weights, DTYPE, device)
    expert_bytes = (gate_up.nbytes + down.nbytes) / sizes.num_experts
    product = ExpertProduct(sizes, gate_up, down, DTYPE, timer)
    times = []
    for rows in all_rows:
        us, touched = product.us(rows, TURNS)
        share = touched * expert_bytes / us * 1e6 / bandwidth
        times.append(LayerTime("experts", sizes.size, weights, rows, us, share, f"{touched:.1f} of them touched"))
    return times


def _chain(x: torch.Tensor, weights: Sequence[Matrix], gated: bool) -> Callable[[], None]:
    def body() -> None:
        for weight in weights:
            product(x, weight, gated)

    return body


def product(x: torch.Tensor, weight: Matrix, gated: bool) -> torch.Tensor:
    """As the engine computes it."""
    if isinstance(weight, QuantisedMatrix):
        return (linear_quantised_gated if gated else linear_quantised)(x, weight, None)
    plans = plans_for((weight.shape[0], weight.shape[1]), DENSE, x.dtype, weight)
    return (linear_gated if gated else linear)(x, weight, None, None if plans is None else plans.at(len(x)))


def _plan(weight: Matrix, x: torch.Tensor) -> str:
    if isinstance(weight, QuantisedMatrix):
        return str(None if is_scaled_product(x, weight) else plan_of(weight, x))
    plans = plans_for((weight.shape[0], weight.shape[1]), DENSE, x.dtype, weight)
    return str(None if plans is None else plans.at(len(x)))


def table(times: Sequence[LayerTime]) -> list[list[str]]:
    rows = [["layer", "out x in", "weights", "rows", "us", "of memory's", "plan"]]
    for time in times:
        size, share = f"{time.shape[0]} x {time.shape[1]}", f"{time.bandwidth_share:.1%}"
        rows.append([time.layer, size, time.weights, f"{time.rows}", f"{time.us:.1f}", share, time.plan])
    return rows
