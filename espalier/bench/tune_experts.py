"""`espalier doctor --tune experts`: measures the experts' products on this GPU, and writes the fastest kernel plans.

First, each of the two products (gate and up, down) is measured alone.  Then their fastest plans are measured together,
with the launch that sorts the rows by expert.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, product
from pathlib import Path
from typing import TypeVar

import torch
from rich.text import Text
from torch import Tensor

from espalier.bench.linears import ModelShape
from espalier.bench.timing import GraphTimer
from espalier.errors import EspalierError
from espalier.kernels.layers.experts_plan import (
    EXPERTS_TUNING,
    TILE_ROWS_BY_PAIRS,
    ExpertsPlan,
    ExpertsShape,
    ProductPlan,
    candidate_plans,
    experts_plan_by_rule,
)
from espalier.kernels.layers.linear_plans import TuningTable
from espalier.kernels.ops.activation import RELU2, SILU, Activation
from espalier.kernels.ops.experts import grouped_experts
from espalier.kernels.runtime.launch import Chip, chip
from espalier.kernels.runtime.precompile import precompile
from espalier.terminal.console import installed_version, print_header, print_table, progress, require_gpu, stdout

# A chain is a series of calls that is timed as one CUDA graph.  It has MIN_CALLS to MAX_CALLS calls.
MAX_CALLS = 16
MIN_CALLS = 3
# A chain that reads so many bytes, or computes so many FLOPs, takes long enough to be timed.
CHAIN_BYTES = 500 * 10**6
CHAIN_FLOPS = 200 * 10**9
MEASURED_ROWS = (1, 4, 8, 16, 32, 64, 128, 512, 2048)
# How many of the fastest plans of each product are combined with those of the other product.
NUM_COMBINED = 2
# How many times a plan is timed: for one product alone, and for both products together.
REPEATS_ALONE, REPEATS_TOGETHER = 3, 10
TABLE_COLUMNS = "experts|rows|touched|tile|gate and up|down|us|by rule, us|of memory's|TFLOP/s".split("|")

Plan = TypeVar("Plan", ProductPlan, ExpertsPlan)
# (inputs, plan, num_calls) -> a function that runs the first num_calls calls of the chain with the plan
MakeChain = Callable[["ChainInputs", Plan, int], Callable[[], None]]


def random_experts(shape: ExpertsShape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns random (gate_up, down) weights of one layer, as grouped_experts takes them."""
    gate_up = torch.empty(
        shape.num_experts, shape.num_matrices * shape.inner_size, shape.hidden_size, dtype=dtype, device=device
    )
    down = torch.empty(shape.num_experts, shape.hidden_size, shape.inner_size, dtype=dtype, device=device)
    return gate_up.normal_(std=shape.hidden_size**-0.5), down.normal_(std=shape.inner_size**-0.5)


def activation_of(shape: ExpertsShape) -> Activation:
    """Returns an activation for experts with shape.num_matrices input matrices: 2 with a gate matrix, 1 without."""
    return SILU if shape.num_matrices == SILU.num_matrices else RELU2


class ChainInputs:
    """The inputs of a chain of calls of an expert layer, each with `num_rows` rows.  Calls use different experts while
    unused experts remain.  num_calls: None for as many as take long enough to be timed.  active_experts: see
    random_expert_ids."""

    def __init__(
        self,
        shape: ExpertsShape,
        num_rows: int,
        dtype: torch.dtype,
        device: torch.device,
        num_calls: int | None = None,
        active_experts: int | None = None,
    ) -> None:
        self.shape, self.num_rows = shape, num_rows
        self.num_calls = _num_timed_calls(shape, num_rows) if num_calls is None else num_calls
        self.x = torch.randn(num_rows, shape.hidden_size, dtype=dtype, device=device)
        self.gated_inputs = torch.randn(num_rows * shape.top_k, shape.inner_size, dtype=dtype, device=device)
        self.router_weights = torch.rand(num_rows, shape.top_k, device=device)
        self.expert_ids = [ids.to(device) for ids in random_expert_ids(shape, num_rows, self.num_calls, active_experts)]

    @property
    def mean_active_experts(self) -> float:
        """The mean number of experts with rows in a call."""
        return sum(len(ids.unique()) for ids in self.expert_ids) / self.num_calls


def _num_timed_calls(shape: ExpertsShape, num_rows: int) -> int:
    """Returns how many calls a chain needs to take long enough to be timed."""
    bytes_per_call = min(shape.num_experts, num_rows * shape.top_k) * shape.expert_bytes
    num_enough = max(-(-CHAIN_BYTES // bytes_per_call), -(-CHAIN_FLOPS // shape.flops(num_rows)))
    return max(MIN_CALLS, min(MAX_CALLS, num_enough)) if num_rows > 1 else MAX_CALLS


def random_expert_ids(
    shape: ExpertsShape, num_rows: int, num_calls: int, active_experts: int | None = None
) -> list[Tensor]:
    """Returns the expert ids [rows, K] of each call.

    active_experts: how many experts get rows in each call.  Calls use different experts while unused experts remain.
    None: each row of a call gets random experts, independently of the other rows.  In later calls, a row of the
    same index gets experts that it has not had, while such experts remain."""
    generator = torch.Generator().manual_seed(num_rows)
    if active_experts is None:
        return _draw_experts(num_rows, shape.num_experts, shape.top_k, num_calls, generator)
    of_calls = _draw_experts(1, shape.num_experts, active_experts, num_calls, generator)
    return [_spread_over_rows(experts, num_rows, shape.top_k, generator) for [experts] in of_calls]


def _draw_experts(
    num_rows: int, num_experts: int, experts_per_row: int, num_calls: int, generator: torch.Generator
) -> list[Tensor]:
    """Returns the expert ids [num_rows, experts_per_row] of each call.  In later calls, a row gets
    experts that it has not had, while such experts remain."""
    calls_per_draw = num_experts // experts_per_row
    ids_by_call: list[Tensor] = []
    while len(ids_by_call) < num_calls:
        drawn = torch.rand(num_rows, num_experts, generator=generator).argsort(1)[:, : calls_per_draw * experts_per_row]
        ids_by_call += drawn.view(num_rows, calls_per_draw, experts_per_row).sort(-1).values.unbind(1)
    return [ids.contiguous() for ids in ids_by_call[:num_calls]]


def _spread_over_rows(experts: Tensor, num_rows: int, top_k: int, generator: torch.Generator) -> Tensor:
    """Returns the expert ids [num_rows, top_k] of one call.  Each row gets random experts, and each expert of `experts`
    gets a row."""
    choices = torch.rand(num_rows, len(experts), generator=generator).argsort(1)[:, :top_k]
    # The first rows together get all experts.
    in_turn = torch.arange(-(-len(experts) // top_k) * top_k) % len(experts)
    choices[: len(in_turn) // top_k] = in_turn.view(-1, top_k)
    return experts[choices].sort(-1).values


@dataclass(frozen=True)
class MeasuredExperts:
    """The measured times of one layer's experts at a number of rows.

    mean_active_experts: the mean number of experts with rows.  measured_us: the time of all launches with `plan`.
    rule_us: their time with the plan that the engine takes without measurements (experts_plan_by_rule)."""

    shape: ExpertsShape
    num_rows: int
    mean_active_experts: float
    plan: ExpertsPlan
    measured_us: float
    rule_us: float

    @property
    def bytes_per_second(self) -> float:
        """Bytes a second, if each expert with rows is read once."""
        return self.mean_active_experts * self.shape.expert_bytes / self.measured_us * 1e6

    @property
    def flops_per_second(self) -> float:
        return self.shape.flops(self.num_rows) / self.measured_us * 1e6


class ExpertsTuner:
    """Measures experts on the GPU of this machine, in one dtype."""

    def __init__(self, dtype: torch.dtype, timer: GraphTimer | None = None) -> None:
        self.device = require_gpu("--tune")
        self.dtype = dtype
        self.timer = timer or GraphTimer()
        self.chip: Chip = chip(torch.empty(0, device=self.device))

    def measure(
        self, shape: ExpertsShape, row_counts: Sequence[int] = MEASURED_ROWS
    ) -> Iterator[list[MeasuredExperts]]:
        """Measures at each number of rows.  Yields the measurements of each bucket (ExpertsShape.pairs_bucket)."""
        gate_up, down = random_experts(shape, self.dtype, self.device)
        for bucket, group in groupby(row_counts, shape.pairs_bucket):
            chains = [ChainInputs(shape, count, self.dtype, self.device) for count in group]
            yield self._measure_bucket(bucket, chains, gate_up, down)

    def _measure_bucket(
        self, bucket: int, chains: Sequence[ChainInputs], gate_up: Tensor, down: Tensor
    ) -> list[MeasuredExperts]:
        """Returns the measurements of one bucket, all with one plan: the fastest over the chains' numbers of rows."""
        [shape] = {chain.shape for chain in chains}
        plans: list[ExpertsPlan] = []
        for tile_rows in TILE_ROWS_BY_PAIRS[bucket][1]:
            best_plans = []
            for matrices in (2, 1):
                product_plans = candidate_plans(tile_rows, matrices, self.chip)
                weight = gate_up if matrices == 2 else down
                times = self._measure_alone(chains, tile_rows, matrices, product_plans, weight)
                best_plans.append(sorted(times, key=lambda plan: sum_of_relative_times(times, plan))[:NUM_COMBINED])
            plans += [ExpertsPlan(tile_rows, *pair) for pair in product(*best_plans)]
        times_together = self._measure_together(chains, plans, gate_up, down)
        plan = min(times_together, key=lambda plan: sum_of_relative_times(times_together, plan))
        rule_plans = [experts_plan_by_rule(shape, chain.num_rows, self.dtype, self.chip) for chain in chains]
        rule_times = self._measure_together(chains, rule_plans, gate_up, down)
        return [
            MeasuredExperts(shape, chain.num_rows, chain.mean_active_experts, plan, plan_us, rule_times[rule_plan][i])
            for i, (chain, plan_us, rule_plan) in enumerate(zip(chains, times_together[plan], rule_plans, strict=True))
        ]

    def _measure_alone(
        self,
        chains: Sequence[ChainInputs],
        tile_rows: int,
        num_matrices: int,
        plans: Sequence[ProductPlan],
        weight: Tensor,
    ) -> dict[ProductPlan, list[float]]:
        """Returns {plan: the µs of one product in each chain}.  num_matrices: 1 for down, 2 for gate and up."""
        from espalier.kernels.layers.experts import launch_down, launch_gate_and_up
        from espalier.kernels.layers.experts_tiles import make_expert_tiles

        tiles = {
            each: [make_expert_tiles(ids, None, each.shape.num_experts, tile_rows) for ids in each.expert_ids]
            for each in chains
        }

        def make_chain(chain_inputs: ChainInputs, plan: ProductPlan, num_calls: int) -> Callable[[], None]:
            top_k, activation = chain_inputs.shape.top_k, activation_of(chain_inputs.shape)

            def run_calls() -> None:
                for one in tiles[chain_inputs][:num_calls]:
                    if num_matrices == 2:
                        launch_gate_and_up(chain_inputs.x, weight, one, top_k, plan, activation=activation)
                    else:
                        launch_down(chain_inputs.gated_inputs, weight, chain_inputs.router_weights, one, plan)

            return run_calls

        return self._us_by_plan(chains, plans, make_chain, REPEATS_ALONE)

    def _measure_together(
        self, chains: Sequence[ChainInputs], plans: Sequence[ExpertsPlan], gate_up: Tensor, down: Tensor
    ) -> dict[ExpertsPlan, list[float]]:
        """Returns {plan: the µs of sort, gate and up, and down together, in each chain}."""

        def make_chain(chain_inputs: ChainInputs, plan: ExpertsPlan, num_calls: int) -> Callable[[], None]:
            activation = activation_of(chain_inputs.shape)
            triton_product = partial(
                grouped_experts.triton, chain_inputs.x, gate_up, down, plan=plan, activation=activation
            )

            def run_calls() -> None:
                for ids in chain_inputs.expert_ids[:num_calls]:
                    triton_product(ids, chain_inputs.router_weights)

            return run_calls

        return self._us_by_plan(chains, list(dict.fromkeys(plans)), make_chain, REPEATS_TOGETHER)

    def _us_by_plan(
        self, chains: Sequence[ChainInputs], plans: Sequence[Plan], make_chain: MakeChain[Plan], repeats: int
    ) -> dict[Plan, list[float]]:
        """Returns {plan: the µs of a call in each chain}.  The plans take turns.  make_chain: returns what is timed."""
        with precompile():
            for each in chains:
                for plan in plans:
                    make_chain(each, plan, 1)()
        times_by_chain = []
        for each in chains:
            bodies = [make_chain(each, plan, each.num_calls) for plan in plans]
            times_by_chain.append([1e3 * ms / each.num_calls for ms in self.timer.median_ms(bodies, repeats)])
        return {plan: list(of_plan) for plan, of_plan in zip(plans, zip(*times_by_chain, strict=True), strict=True)}


def sum_of_relative_times(times: Mapping[Plan, Sequence[float]], plan: Plan) -> float:
    """Returns the plan's time divided by the fastest plan's time, summed over the numbers of rows.  times: {plan: its
    time at each number of rows}."""
    fastest = [min(of_count) for of_count in zip(*times.values(), strict=True)]
    return sum(us / shortest_us for us, shortest_us in zip(times[plan], fastest, strict=True))


def gpu_versions() -> dict[str, str]:
    """Returns the GPU and the library versions with which a table is measured."""
    return {"gpu": torch.cuda.get_device_name(), "torch": str(torch.__version__), "triton": installed_version("triton")}


def run(models: Sequence[ModelShape], dtype: torch.dtype, path: Path) -> None:
    """Measure the models' experts; write and print the plans.  Raises EspalierError for a model without experts."""
    if any(model.experts is None for model in models):
        raise EspalierError("--tune experts is for mixtures of experts, but a given model is dense; leave it out")
    shapes = tuple(dict.fromkeys(model.experts.shape for model in models if model.experts is not None))
    print_header()
    tuner = ExpertsTuner(dtype)
    bandwidth = tuner.timer.memory_bandwidth(tuner.device)
    rows = [TABLE_COLUMNS]
    with progress("measuring", len(shapes)) as advance:
        for shape in shapes:
            measured = list(tuner.measure(shape))
            plans = tuple(bucket[0].plan for bucket in measured)
            table = TuningTable(
                tuner.chip, str(dtype).removeprefix("torch."), {shape.matrix_size: plans}, gpu_versions()
            )
            EXPERTS_TUNING.write_table(path, table)
            rows += [_table_row(each, bandwidth) for bucket in measured for each in bucket]
            advance()
    print_table(rows)
    stdout().print(Text(f"written to {path}"))


def _table_row(measured: MeasuredExperts, bandwidth: float) -> list[str]:
    """Returns a row of the printed table.  bandwidth: of the GPU's memory, in bytes a second."""
    shape, plan = measured.shape, measured.plan
    return [
        f"{shape.num_experts} x {shape.hidden_size} x {shape.inner_size}, {shape.top_k}",
        f"{measured.num_rows}",
        f"{measured.mean_active_experts:.1f}",
        f"{plan.tile_rows}",
        *(f"{each.block_out}x{each.block_in}, {each.stages}, {each.warps}" for each in (plan.gated, plan.down)),
        f"{measured.measured_us:.1f}",
        f"{measured.rule_us:.1f}",
        f"{measured.bytes_per_second / bandwidth:.1%}",
        f"{measured.flops_per_second / 1e12:.0f}",
    ]
