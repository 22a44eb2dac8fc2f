"""`espalier doctor --tune experts`: measure the expert product on this GPU, and write the fastest plans for the engine.

Each of the two products is measured alone.  Then the fastest plans of both are measured together, with the sort.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from pathlib import Path
from typing import TypeVar

import torch
from rich.text import Text
from torch import Tensor

from espalier.bench.expert_product import ChainInputs, random_experts
from espalier.bench.linears import ModelShape
from espalier.bench.timing import Stopwatch
from espalier.errors import EspalierError
from espalier.kernels.layers.experts_plan import (
    ROWS_OF_BUCKET,
    ExpertsPlan,
    ExpertsShape,
    ProductPlan,
    candidates,
    rule,
)
from espalier.kernels.layers.experts_tuning import ExpertsTable, write
from espalier.kernels.ops.experts import grouped_experts
from espalier.kernels.runtime.launch import Chip, chip
from espalier.kernels.runtime.precompile import precompile
from espalier.terminal.console import print_header, print_table, progress, stdout
from espalier.terminal.machine import installed, require_gpu

ROWS = (1, 4, 8, 16, 32, 64, 128, 512, 2048)
# The fastest plans of each product that are measured together with those of the other.
FINALISTS = 2
# How often each plan is timed: alone, and together with the other product.
QUICK_TURNS, TURNS = 3, 10
COLUMNS = ["experts", "rows", "touched", "tile", "gate and up", "down", "us", "by rule, us", "of memory's", "TFLOP/s"]

Plan = TypeVar("Plan", ProductPlan, ExpertsPlan)
# (calls, plan, num_calls) -> a function that runs the first num_calls calls with the plan.
Chain = Callable[[ChainInputs, Plan, int], Callable[[], None]]


@dataclass(frozen=True)
class MeasuredExperts:
    """The expert product of one layer at a number of rows.

    touched: experts with rows, the mean over calls.  us: of all launches, with `plan`; rule_us: with the rule's plan.
    """

    shape: ExpertsShape
    rows: int
    touched: float
    plan: ExpertsPlan
    us: float
    rule_us: float

    @property
    def bytes_per_second(self) -> float:
        """Bytes of the touched experts, read once, per second."""
        return self.touched * self.shape.expert_bytes / self.us * 1e6

    @property
    def flops_per_second(self) -> float:
        return self.shape.flops(self.rows) / self.us * 1e6


class ExpertsTuner:
    """Measures on the GPU of this machine, in one dtype."""

    def __init__(self, dtype: torch.dtype, stopwatch: Stopwatch | None = None) -> None:
        self.device = require_gpu("--tune")
        self.dtype = dtype
        self.stopwatch = stopwatch or Stopwatch()
        self.chip: Chip = chip(torch.empty(0, device=self.device))

    def measure(self, shape: ExpertsShape, rows: Sequence[int] = ROWS) -> Iterator[list[MeasuredExperts]]:
        """Measure at each number of rows.  Yields the figures of one bucket (ExpertsShape.bucket) at a time."""
        gate_up, down = random_experts(shape, self.dtype, self.device)
        for bucket, group in groupby(rows, shape.bucket):
            calls = [ChainInputs(shape, count, self.dtype, self.device) for count in group]
            yield self._bucket(bucket, calls, gate_up, down)

    def _bucket(
        self, bucket: int, calls: Sequence[ChainInputs], gate_up: Tensor, down: Tensor
    ) -> list[MeasuredExperts]:
        """The figures of one bucket, with the plan that is fastest over all its numbers of rows (`relative_time`)."""
        [shape] = {each.shape for each in calls}
        plans: list[ExpertsPlan] = []
        for tile_rows in ROWS_OF_BUCKET[bucket][1]:
            best = []
            for matrices in (2, 1):
                of_product = candidates(tile_rows, matrices, self.chip)
                times = self._alone(calls, tile_rows, matrices, of_product, gate_up if matrices == 2 else down)
                best.append(sorted(times, key=lambda plan: relative_time(times, plan))[:FINALISTS])
            plans += [ExpertsPlan(tile_rows, *pair) for pair in product(*best)]
        whole = self._whole(calls, plans, gate_up, down)
        plan = min(whole, key=lambda each: relative_time(whole, each))
        rules = self._whole(calls, [rule(shape, each.rows, self.dtype, self.chip) for each in calls], gate_up, down)
        return [
            MeasuredExperts(
                shape,
                each.rows,
                each.touched,
                plan,
                whole[plan][i],
                rules[rule(shape, each.rows, self.dtype, self.chip)][i],
            )
            for i, each in enumerate(calls)
        ]

    def _alone(
        self, calls: Sequence[ChainInputs], tile_rows: int, matrices: int, plans: Sequence[ProductPlan], weight: Tensor
    ) -> dict[ProductPlan, list[float]]:
        """µs of one product at each row count, without the sort.  matrices: 2 for gate and up, 1 for down."""
        from espalier.kernels.layers.experts import down_triton, gated_triton
        from espalier.kernels.layers.experts_tiles import tiles_of

        tiles = {each: [tiles_of(ids, None, each.shape.num_experts, tile_rows) for ids in each.ids] for each in calls}

        def chain(each: ChainInputs, plan: ProductPlan, num_calls: int) -> Callable[[], None]:
            top_k = each.shape.top_k

            def body() -> None:
                for one in tiles[each][:num_calls]:
                    if matrices == 2:
                        gated_triton(each.x, weight, one, top_k, plan)
                    else:
                        down_triton(each.gated, weight, each.weights, one, plan)

            return body

        return self._us(calls, plans, chain, QUICK_TURNS)

    def _whole(
        self, calls: Sequence[ChainInputs], plans: Sequence[ExpertsPlan], gate_up: Tensor, down: Tensor
    ) -> dict[ExpertsPlan, list[float]]:
        """µs of all three launches at each row count."""

        def chain(each: ChainInputs, plan: ExpertsPlan, num_calls: int) -> Callable[[], None]:
            def body() -> None:
                for ids in each.ids[:num_calls]:
                    grouped_experts.triton(each.x, gate_up, down, ids, each.weights, plan=plan)

            return body

        return self._us(calls, list(dict.fromkeys(plans)), chain, TURNS)

    def _us(
        self, calls: Sequence[ChainInputs], plans: Sequence[Plan], chain: Chain[Plan], turns: int
    ) -> dict[Plan, list[float]]:
        """µs of a call with each plan, at each row count.  The plans take turns."""
        with precompile():
            for each in calls:
                for plan in plans:
                    chain(each, plan, 1)()
        times = [
            [1e3 * ms / each.num for ms in self.stopwatch.ms([chain(each, plan, each.num) for plan in plans], turns)]
            for each in calls
        ]
        return {plan: list(of_plan) for plan, of_plan in zip(plans, zip(*times, strict=True), strict=True)}


def relative_time(times: Mapping[Plan, Sequence[float]], plan: Plan) -> float:
    """The sum over row counts of: a plan's time, divided by the time of the fastest plan at that count."""
    fastest = [min(of_count) for of_count in zip(*times.values(), strict=True)]
    return sum(mine / least for mine, least in zip(times[plan], fastest, strict=True))


def versions() -> dict[str, str]:
    """The GPU and versions that a table was measured with."""
    return {"gpu": torch.cuda.get_device_name(), "torch": str(torch.__version__), "triton": installed("triton")}


def run(models: Sequence[ModelShape], dtype: torch.dtype, path: Path) -> None:
    """Measure the experts of models, write their plans and print.  Raises EspalierError for a model without experts."""
    if any(model.experts is None for model in models):
        raise EspalierError("--tune experts is for mixtures of experts, but a given model is dense; leave it out")
    shapes = tuple(dict.fromkeys(model.experts.shape for model in models if model.experts is not None))
    print_header()
    tuner = ExpertsTuner(dtype)
    bandwidth = tuner.stopwatch.bandwidth(tuner.device)
    rows = [COLUMNS]
    with progress("measuring", len(shapes)) as advance:
        for shape in shapes:
            measured = list(tuner.measure(shape))
            plans = tuple(bucket[0].plan for bucket in measured)
            table = ExpertsTable(tuner.chip, str(dtype).removeprefix("torch."), {shape.size: plans}, versions())
            write(path, table)
            rows += [_row(each, bandwidth) for bucket in measured for each in bucket]
            advance()
    print_table(rows)
    stdout().print(Text(f"written to {path}"))


def _row(measured: MeasuredExperts, bandwidth: float) -> list[str]:
    shape, plan = measured.shape, measured.plan
    return [
        f"{shape.num_experts} x {shape.hidden} x {shape.inner}, {shape.top_k}",
        f"{measured.rows}",
        f"{measured.touched:.1f}",
        f"{plan.rows}",
        *(f"{each.block_out}x{each.block_in}, {each.stages}, {each.warps}" for each in (plan.gated, plan.down)),
        f"{measured.us:.1f}",
        f"{measured.rule_us:.1f}",
        f"{measured.bytes_per_second / bandwidth:.1%}",
        f"{measured.flops_per_second / 1e12:.0f}",
    ]
