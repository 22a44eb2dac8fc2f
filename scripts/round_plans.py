"""Plans of a round's products, compared in rounds: `python -m scripts.round_plans --tree 5,8,64 --rows 64`.

On a GPU.  A product that is timed alone, or in a chain of itself, does not predict a round (docs/log.md).  Here a
variant is a whole round with another plan for one product, captured as the engine captures it.  The requests (--batch)
are dummies without context.  All rounds take turns, so a difference of 0.1% shows.  Last, the plans that gained are
taken together, one after the other.
"""

import random
import statistics
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass, replace
from operator import ne
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import torch

from espalier.bench.flags import DRAFT_WEIGHTS, SHAPE_WEIGHTS, parse_tree_shape
from espalier.bench.timing import Matrix
from espalier.engine.cuda import CapturedLaunch, CudaExecutor
from espalier.engine.launch_input import dummy_launch
from espalier.errors import EspalierError
from espalier.kernels.hopper.plans import supports_format
from espalier.kernels.layers import linear_quantised, quantised_plans
from espalier.kernels.layers.linear_plans import DENSE, LinearPlan, TritonPlan, candidate_plans
from espalier.kernels.layers.quantised import InputRows, QuantisedMatrix
from espalier.kernels.runtime.launch import Chip, chip
from espalier.kernels.runtime.precompile import precompile
from espalier.layout import PLAIN_TREE, LaunchForm
from espalier.models.weight_formats import dense
from espalier.terminal.console import print_header, require_gpu
from lab.bench.engines import ShapeEngines, variant_with_tree
from lab.bench.synthetic_models import recipe_with_accept_length

# The variant that changes nothing.
ENGINES = "the engine's plans"
# Replays of a round in each of its turns, and the gain in ms below which a plan is not taken: noise.
REPLAYS, LEAST_GAIN = 4, 0.003
# As the runs of scripts/gpu_runs.py.
SETTINGS = MappingProxyType({"page_size": 64, "max_context": 33792})
# Functions of dense.py that multiply by a plan.
BY_PLAN = ("linear", "linear_partial_sums", "linear_gated")

# (format, rows, columns) of a weight: in a round, weights of one shape may be stored in two formats.
Product = tuple[str, int, int]
Plans = Mapping[Product, LinearPlan]


@dataclass(frozen=True)
class Met:
    """A product that a round runs.  plan: the engine's; is_gated: its kernel also computes silu(gate) · up."""

    plan: Any
    weight: Matrix
    is_gated: bool = False


@contextmanager
def chosen(plans: Plans, rows: int, met: dict[Product, Met] | None = None) -> Iterator[None]:
    """Products of so many rows take these plans.  met: gets the products of so many rows."""

    def choose(weight: Matrix, count: int, plan: Any, is_gated: bool = False) -> Any:
        if count != rows:
            return plan
        kind = quantised_plans.tuning_format_name(weight) if isinstance(weight, QuantisedMatrix) else DENSE
        product = kind, weight.shape[0], weight.shape[1]
        if met is not None:
            met[product] = Met(plan, weight, is_gated)
        return plans.get(product, plan)

    def by_plan(multiply: Callable[..., Any], is_gated: bool) -> Callable[..., Any]:
        return lambda x, weight, bias, plan: multiply(x, weight, bias, choose(weight, len(x), plan, is_gated))

    plan_of = linear_quantised.quantised_plan_for

    def chosen_plan_of(weight: QuantisedMatrix, x: InputRows) -> Any:
        return choose(weight, len(x), plan_of(weight, x))

    with ExitStack() as stack:
        for name in BY_PLAN:
            changed = by_plan(getattr(dense, name), name == "linear_gated")
            stack.enter_context(patch.object(dense, name, changed))
        stack.enter_context(patch.object(linear_quantised, "quantised_plan_for", chosen_plan_of))
        yield


def neighbours(product: Met, rows: int, gpu: Chip) -> list[LinearPlan]:
    """The candidates of `espalier doctor --tune` near the product's plan.

    Kernels that differ from it in one or two fields; if the library runs it, each kernel with its most stages.  And the
    library's other plans.
    """
    plan, weight = product.plan, product.weight
    if isinstance(weight, QuantisedMatrix):
        found: Sequence[Any] = quantised_plans.candidate_plans(rows, weight, gpu)
        if supports_format(weight, torch.bfloat16, rows, gpu):
            # That kernel chooses its stages itself.
            found = [each for each in found if each.stages == plan.stages]
    else:
        found = [None, *candidate_plans(rows, weight.shape[0], weight.shape[1], gpu)]
    kernels = [each for each in found if isinstance(each, TritonPlan) and (each.splits == 1 or not product.is_gated)]
    if isinstance(plan, TritonPlan):
        kernels = [each for each in kernels if 0 < sum(map(ne, astuple(each), astuple(plan))) <= 2]
    else:
        most = {replace(each, stages=0): each for each in sorted(kernels, key=lambda each: each.stages)}
        kernels = list(most.values())
    return [*kernels, *(each for each in found if not isinstance(each, TritonPlan) and each != plan)]


def rounds_of(
    executor: CudaExecutor, variants: Mapping[str, Plans], batch: int, rows: int
) -> dict[str, CapturedLaunch]:
    dummies, pool, graphs = dummy_launch(batch), torch.cuda.graph_pool_handle(), {}
    with torch.inference_mode(), precompile():
        for plans in variants.values():
            with chosen(plans, rows):
                executor.run_eagerly(dummies)
    for name, plans in variants.items():
        with chosen(plans, rows):
            graphs[name] = executor.capture_graph(LaunchForm(batch), pool)
    return graphs


def ms_of(executor: CudaExecutor, graphs: Mapping[str, CapturedLaunch], seconds: float) -> dict[str, float]:
    """Median ms of each round.  They take turns for so many seconds, and at least four times.

    Each turn has another order: a GPU at its power limit is faster after a round that needed less power.
    """
    times: dict[str, list[float]] = {name: [] for name in graphs}
    end, turn, orders = time.perf_counter() + seconds, 0, random.Random(0)
    while turn < 4 or time.perf_counter() < end:
        for name, graph in orders.sample(list(graphs.items()), len(graphs)):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with torch.cuda.stream(executor.stream):
                graph.graph.replay()
                start.record()
                for _ in range(REPLAYS):
                    graph.graph.replay()
                stop.record()
            stop.synchronize()
            times[name].append(start.elapsed_time(stop) / REPLAYS)
        turn += 1
    return {name: statistics.median(of_turns) for name, of_turns in times.items()}


def taken_together(ms: Mapping[str, float], variants: Mapping[str, Plans]) -> dict[str, Plans]:
    """The engine's plans, then the best of each product that gained, one more each time, the largest gain first."""
    together: dict[str, Plans] = {ENGINES: {}}
    plans: dict[Product, LinearPlan] = {}
    for name in sorted(ms, key=lambda name: ms[name]):
        for product, plan in variants[name].items():
            if product not in plans and ms[name] < ms[ENGINES] - LEAST_GAIN:
                plans = {**plans, product: plan}
                together[f"and {name}"] = plans
    return together


def compare(executor: CudaExecutor, batch: int, rows: int, seconds: float) -> None:
    met: dict[Product, Met] = {}
    with torch.inference_mode(), chosen({}, rows, met):
        executor.run_eagerly(dummy_launch(batch))
        executor.stream.synchronize()
    variants: dict[str, Plans] = {ENGINES: {}, "the same again": {}}
    gpu = chip(torch.empty(0, device=executor.device))
    for product, one in met.items():
        print(f"{product}: {one.plan}")
        variants |= {f"{product} {other}": {product: other} for other in neighbours(one, rows, gpu)}
    if not met:
        raise EspalierError(f"no product of this round has {rows} rows; give another --rows")
    ms = ms_of(executor, rounds_of(executor, variants, batch, rows), seconds)
    for name in sorted(ms, key=lambda name: ms[name]):
        print(f"  {ms[name]:8.4f} ms {1e3 * (ms[name] - ms[ENGINES]):+8.1f} us  {name}")
    together = taken_together(ms, variants)
    for name, each in ms_of(executor, rounds_of(executor, together, batch, rows), seconds / 2).items():
        print(f"  {each:8.4f} ms  {name}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__, prog="python -m scripts.round_plans")
    parser.add_argument("--shape", default="llama-3.1-8b", help="a named shape (llama-3.1-8b)")
    parser.add_argument("--weights", choices=SHAPE_WEIGHTS, help="quantised matrices (dense)")
    parser.add_argument("--draft-weights", choices=DRAFT_WEIGHTS, help="quantised matrices of the draft (dense)")
    parser.add_argument("--tree", type=parse_tree_shape, default=PLAIN_TREE, help="such as 5,8,64 (plain decoding)")
    parser.add_argument("--batch", type=int, default=1, help="requests of the round (1)")
    parser.add_argument("--rows", type=int, required=True, help="the products that are varied have so many rows")
    parser.add_argument("--seconds", type=float, default=30, help="for the turns of all variants (30)")
    args = parser.parse_args(arguments)
    try:
        stored = {"weights": args.weights, "draft_weights": args.draft_weights}
        recipe, device = recipe_with_accept_length(args.shape, 0, **stored), require_gpu("scripts.round_plans")
        print_header()
        way = variant_with_tree(args.tree)
        with ShapeEngines(recipe, SETTINGS, device, [way]).open(way) as bench:
            executor = bench.engine.executor
            assert isinstance(executor, CudaExecutor)
            if not 1 <= args.batch <= (most := bench.config.layout.max_batch):
                raise EspalierError(f"--batch={args.batch} is not supported; use 1 to {most}")
            compare(executor, args.batch, args.rows, args.seconds)
    except EspalierError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
