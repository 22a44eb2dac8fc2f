"""`python -m lab linears`: each linear layer of a named shape on a GPU, and its experts, format by format.

The calls of a chain have different weights, so that no weight is in the L2 cache.  The table shows the bytes of stored
weights per second as a share of the read bandwidth.
"""

from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from rich.text import Text

from espalier.bench.linears import ModelShape, shape_named
from espalier.bench.timing import GraphTimer, Matrix, Weights, run_in_order
from espalier.kernels.layers.linear_dequantised import uses_dequantised_product
from espalier.kernels.layers.linear_plans import DENSE, LINEAR_TUNING, plans_for_dense_weight
from espalier.kernels.layers.quantised import InputRows, QuantisedMatrix
from espalier.kernels.layers.quantised_plans import quantised_plan_for
from espalier.kernels.layers.scaled_product import library_supports_product
from espalier.kernels.ops.linear import linear, linear_gated, linear_quantised, linear_quantised_gated
from espalier.models.quantisers import QUANTISERS
from espalier.terminal.console import (
    DIM_STYLE,
    print_header,
    print_table,
    require_gpu,
    require_writable,
    stdout,
    write_json,
)
from lab.bench.cases import KernelCase, TimedCase, time_cases, timing_table
from lab.bench.checks import positive_numbers
from lab.bench.experts import expert_case, stored_experts
from lab.synthetic.quantised import find_quantiser

DTYPE = torch.bfloat16
# The bytes of all weights of a chain.  The L2 cache holds only a fraction of them.
CHAIN_BYTES = 600 * 10**6
GATED_LAYER = "gate_up"


COLUMN_NAMES = ("layer", "out x in", "weights", "rows")


def run(args: Namespace) -> int:
    all_rows = positive_numbers("--rows", args.rows, "1,4,16,64")
    formats = args.weights.split(",")
    for name in formats:
        if name != DENSE:
            find_quantiser(name)
    require_writable("--json", args.json)
    device = require_gpu("linears")
    print_header()
    timer = GraphTimer()
    bandwidth = timer.memory_bandwidth(device)
    shape = shape_named(args.shape)
    times: list[TimedCase] = []
    for name in formats:
        times += time_cases(layer_cases(shape, name, all_rows, device), timer, bandwidth)
        times += time_cases(expert_cases(shape, name, all_rows, device), timer, bandwidth)
    write_json(args.json, {"bytes_per_second": bandwidth, "layers": [time.as_dict(COLUMN_NAMES) for time in times]})
    stdout().print(Text(f"bfloat16 inputs; memory reads {bandwidth / 1e12:.2f} TB/s", DIM_STYLE))
    print_table(timing_table(COLUMN_NAMES, times))
    return 0


def layer_cases(shape: ModelShape, weights: str, all_rows: Sequence[int], device: torch.device) -> Iterator[KernelCase]:
    """Yields a case for each linear layer that can have this format, without routers and the head.

    A case's note is the plan of its kernel; None if the library computes the product."""
    made = Weights(DTYPE, device)
    # Layers with and without experts have some layers in common.
    for run in {(run.name, run.shape): run for run in shape.target_pass(1)}.values():
        if run.num_heads > 1 or "router" in run.name or run.name[-4:] == "gate" or run.name == "lm_head":
            continue
        if weights != DENSE and run.shape[1] % QUANTISERS[weights].group_sizes[0]:
            continue
        first = made.random_weight(run.shape, weights)
        copies = [first, *(made.random_weight(run.shape, weights) for _ in range(CHAIN_BYTES // first.nbytes))]
        for rows in all_rows:
            x = torch.randn(rows, run.shape[1], dtype=DTYPE, device=device)
            calls = run_in_order([partial(engine_product, x, weight, run.name == GATED_LAYER) for weight in copies])
            names = run.name, f"{run.shape[0]} x {run.shape[1]}", weights, f"{rows}"
            flops = 2 * rows * run.shape[0] * run.shape[1]
            yield KernelCase(names, first.nbytes, flops, calls, len(copies), note=_plan_note(first, x))


def expert_cases(
    shape: ModelShape, weights: str, all_rows: Sequence[int], device: torch.device
) -> Iterator[KernelCase]:
    """The product with the experts of a layer."""
    if shape.experts is None or not (weights == DENSE or QUANTISERS[weights].quantises_only_experts):
        return
    sizes = shape.experts.shape
    experts = stored_experts(sizes, weights, DTYPE, device)
    for rows in all_rows:
        names = "experts", f"{sizes.hidden_size} x {sizes.inner_size}", weights, f"{rows}"
        yield expert_case(names, sizes, *experts, DTYPE, rows)


def engine_product(x: torch.Tensor, weight: Matrix, gated: bool) -> InputRows:
    """Returns the product, computed like in the engine."""
    if isinstance(weight, QuantisedMatrix):
        return (linear_quantised_gated if gated else linear_quantised)(x, weight, None)
    plans = plans_for_dense_weight(weight)
    return (linear_gated if gated else linear)(
        x, weight, None, None if plans is None else LINEAR_TUNING.plan_for_count(plans, len(x))
    )


def _plan_note(weight: Matrix, x: torch.Tensor) -> str:
    if isinstance(weight, QuantisedMatrix):
        is_library = library_supports_product(x, weight) or uses_dequantised_product(x, weight)
        return str(None if is_library else quantised_plan_for(weight, x))
    plans = plans_for_dense_weight(weight)
    return str(None if plans is None else LINEAR_TUNING.plan_for_count(plans, len(x)))
