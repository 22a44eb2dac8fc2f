"""`espalier doctor --tune experts`: measure the expert product on this GPU, and write the fastest plans for the engine.

Each call of a chain has experts of its own, drawn as if routing were uniform, so that no weights are in the L2 cache.
The two products are measured apart; then the best of each are measured together, sort included.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from typing import TypeVar

import torch
from torch import Tensor

from espalier.bench.timing import Stopwatch
from espalier.kernels.layers.experts import down_triton, gated_triton, grouped_experts_triton, tiles_of
from espalier.kernels.layers.experts_plan import (
    ROWS_OF_BUCKET,
    ExpertsPlan,
    ExpertsShape,
    ProductPlan,
    candidates,
    rule,
)
from espalier.kernels.runtime.launch import Chip, chip
from espalier.kernels.runtime.precompile import precompile
from espalier.terminal.machine import require_gpu

ROWS = (1, 4, 8, 16, 32, 64, 128, 512, 2048)
# Different calls of a chain, and FLOPs and bytes after which a chain is long enough.
MAX_CALLS = 16
MIN_CALLS = 3
CHAIN_BYTES = 500 * 10**6
CHAIN_FLOPS = 200 * 10**9
# Plans of each product that are measured together with those of the other.
FINALISTS = 2
QUICK_TURNS, TURNS = 3, 10

Plan = TypeVar("Plan", ProductPlan, ExpertsPlan)
# A function that makes a body which runs a plan over the ids of some calls.
Chain = Callable[["Calls", Plan, Sequence[Tensor]], Callable[[], None]]


@dataclass(frozen=True)
class MeasuredExperts:
    """One layer's experts at a number of rows.

    touched: experts with rows, the mean over calls; us: of the whole product with `plan`; rule_us: with the rule's
    plan; gated_us, down_us: of the two products alone.
    """

    shape: ExpertsShape
    rows: int
    touched: float
    plan: ExpertsPlan
    us: float
    rule_us: float
    gated_us: float
    down_us: float

    @property
    def bytes_per_second(self) -> float:
        """Read of the touched experts."""
        return self.touched * expert_bytes(self.shape) / self.us * 1e6

    @property
    def flops_per_second(self) -> float:
        return product_flops(self.shape, self.rows) / self.us * 1e6


def expert_bytes(shape: ExpertsShape) -> int:
    """Bytes of one expert, at two bytes a number."""
    return 2 * 3 * shape.hidden * shape.inner


def product_flops(shape: ExpertsShape, rows: int) -> int:
    return 2 * 3 * shape.hidden * shape.inner * shape.top_k * rows


class Calls:
    """Inputs of a chain of calls: `rows` rows each, routed as if at random, each call to other experts."""

    def __init__(self, shape: ExpertsShape, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.rows = shape, rows
        touched = min(shape.num_experts, rows * shape.top_k) * expert_bytes(shape)
        enough = max(-(-CHAIN_BYTES // touched), -(-CHAIN_FLOPS // product_flops(shape, rows)))
        self.num = max(MIN_CALLS, min(MAX_CALLS, enough)) if rows > 1 else MAX_CALLS
        self.x = torch.randn(rows, shape.hidden, dtype=dtype, device=device)
        self.gated = torch.randn(rows * shape.top_k, shape.inner, dtype=dtype, device=device)
        self.weights = torch.rand(rows, shape.top_k, device=device)
        self.ids = [ids.to(device) for ids in drawn_ids(shape, rows, self.num)]

    @property
    def touched(self) -> float:
        return sum(len(ids.unique()) for ids in self.ids) / self.num


def drawn_ids(shape: ExpertsShape, rows: int, num_calls: int) -> list[Tensor]:
    """ids [rows, K] of each call.  Rows are independent; from call to call a row goes through all experts in turn."""
    generator = torch.Generator().manual_seed(rows)
    per_deal = shape.num_experts // shape.top_k
    calls: list[Tensor] = []
    while len(calls) < num_calls:
        dealt = torch.rand(rows, shape.num_experts, generator=generator).argsort(1)[:, : per_deal * shape.top_k]
        calls += dealt.view(rows, per_deal, shape.top_k).sort(-1).values.unbind(1)
    return [ids.contiguous() for ids in calls[:num_calls]]


class ExpertsTuner:
    """Measures on the GPU of this machine, in one dtype."""

    def __init__(self, dtype: torch.dtype, stopwatch: Stopwatch | None = None) -> None:
        self.device = require_gpu("--tune")
        self.dtype = dtype
        self.stopwatch = stopwatch or Stopwatch()
        self.chip: Chip = chip(torch.empty(0, device=self.device))

    def weights(self, shape: ExpertsShape) -> tuple[Tensor, Tensor]:
        """Random gate_up and down of one layer.  Its experts together are larger than any L2 cache."""
        sizes = (2 * shape.inner, shape.hidden), (shape.hidden, shape.inner)
        return tuple(  # type: ignore[return-value]
            torch.empty(shape.num_experts, *size, dtype=self.dtype, device=self.device).normal_(std=size[1] ** -0.5)
            for size in sizes
        )

    def measure(self, shape: ExpertsShape, rows: Sequence[int] = ROWS) -> Iterator[list[MeasuredExperts]]:
        """Measure the buckets that `rows` are in, bucket by bucket."""
        gate_up, down = self.weights(shape)
        for bucket, group in groupby(rows, shape.bucket):
            calls = [Calls(shape, count, self.dtype, self.device) for count in group]
            yield self._bucket(bucket, calls, gate_up, down)

    def _bucket(self, bucket: int, calls: Sequence[Calls], gate_up: Tensor, down: Tensor) -> list[MeasuredExperts]:
        """All row counts of a bucket take the plan that is fastest over them."""
        [shape] = {each.shape for each in calls}
        plans: list[ExpertsPlan] = []
        alone: dict[tuple[int, ProductPlan, int], list[float]] = {}
        for tile_rows in ROWS_OF_BUCKET[bucket][1]:
            best = []
            for matrices in (2, 1):
                of_product = candidates(tile_rows, matrices, self.chip)
                times = self._alone(calls, tile_rows, matrices, of_product, gate_up if matrices == 2 else down)
                alone |= {(tile_rows, plan, matrices): found for plan, found in times.items()}
                best.append(sorted(times, key=lambda plan: relative(times, plan))[:FINALISTS])
            plans += [ExpertsPlan(tile_rows, *pair) for pair in product(*best)]
        whole = self._whole(calls, plans, gate_up, down)
        plan = min(whole, key=lambda each: relative(whole, each))
        rules = self._whole(calls, [rule(shape, each.rows, self.dtype, self.chip) for each in calls], gate_up, down)
        return [
            MeasuredExperts(
                shape,
                each.rows,
                each.touched,
                plan,
                whole[plan][i],
                rules[rule(shape, each.rows, self.dtype, self.chip)][i],
                alone[plan.rows, plan.gated, 2][i],
                alone[plan.rows, plan.down, 1][i],
            )
            for i, each in enumerate(calls)
        ]

    def _alone(
        self, calls: Sequence[Calls], tile_rows: int, matrices: int, plans: Sequence[ProductPlan], weight: Tensor
    ) -> dict[ProductPlan, list[float]]:
        """µs of one product at each row count, without the sort."""

        def chain(each: Calls, plan: ProductPlan, ids: Sequence[Tensor]) -> Callable[[], None]:
            experts, top_k = each.shape.num_experts, each.shape.top_k
            tiles = [tiles_of(of_call, None, experts, tile_rows) for of_call in ids]

            def body() -> None:
                for one in tiles:
                    if matrices == 2:
                        gated_triton(each.x, weight, one, top_k, plan)
                    else:
                        down_triton(each.gated, weight, each.weights, one, plan)

            return body

        return self._us(calls, plans, chain, QUICK_TURNS)

    def _whole(
        self, calls: Sequence[Calls], plans: Sequence[ExpertsPlan], gate_up: Tensor, down: Tensor
    ) -> dict[ExpertsPlan, list[float]]:
        """µs of the whole product at each row count, sort included."""

        def chain(each: Calls, plan: ExpertsPlan, ids: Sequence[Tensor]) -> Callable[[], None]:
            def body() -> None:
                for of_call in ids:
                    grouped_experts_triton(each.x, gate_up, down, of_call, each.weights, None, plan)

            return body

        return self._us(calls, list(dict.fromkeys(plans)), chain, TURNS)

    def _us(
        self, calls: Sequence[Calls], plans: Sequence[Plan], chain: "Chain[Plan]", turns: int
    ) -> dict[Plan, list[float]]:
        """µs a call of each plan at each row count; the plans take turns."""
        with precompile():
            for each in calls:
                for plan in plans:
                    chain(each, plan, each.ids[:1])()
        times = [
            [1e3 * ms / each.num for ms in self.stopwatch.ms([chain(each, plan, each.ids) for plan in plans], turns)]
            for each in calls
        ]
        return {plan: list(of_plan) for plan, of_plan in zip(plans, zip(*times, strict=True), strict=True)}


def relative(times: Mapping[Plan, Sequence[float]], plan: Plan) -> float:
    """A plan's times, summed over row counts, each relative to the fastest plan of that count."""
    fastest = [min(of_count) for of_count in zip(*times.values(), strict=True)]
    return sum(mine / least for mine, least in zip(times[plan], fastest, strict=True))
