"""Plans of a round's products, compared in rounds: `python -m tools.round_plans --weights fp8 --tree 5,8,64 --rows 64`.

On a GPU.  A product that is timed alone, or in a chain of products, does not predict a round (docs/log.md, 2026-11-24).
Here a variant is a whole round of a default engine with another plan for one layer, captured as the engine captures it.
Its requests are dummies without context.  All rounds take turns, so a difference of 0.1% shows.  At last the plans that
gained are taken together, one after the other.
"""

import statistics
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from typing import Any
from unittest.mock import patch

import torch

from espalier.bench.engines import OfShape
from espalier.bench.flags.trees import tree_shape
from espalier.bench.linears import Shape
from espalier.bench.synthetic_models import recipe_of
from espalier.config import SpeculationConfig
from espalier.engine.cuda import CudaExecutor
from espalier.engine.launch_input import of_dummies
from espalier.errors import EspalierError
from espalier.kernels.layers import linear_quantised
from espalier.kernels.layers.linear import TritonPlan, block_rows
from espalier.kernels.runtime.launch import Chip, chip
from espalier.kernels.runtime.precompile import precompile
from espalier.layout import PLAIN, LaunchForm
from espalier.models.weight_formats import dense
from espalier.terminal.machine import require_gpu

# The variant that changes nothing.
ENGINES = "the engine's plans"
# Replays of a round in each of its turns, and the gain in ms below which a plan is not taken: noise.
REPLAYS, LEAST_GAIN = 4, 0.003
STAGES, SPLITS, BLOCKS_OUT, BLOCKS_IN, WARPS = range(2, 9), (1, 2, 3, 4, 6, 8), (32, 64, 128), (64, 128, 256), (4, 8)
# Functions of dense.py that multiply by a plan.
BY_PLAN = ("linear", "linear_parts", "linear_gated")

Plans = Mapping[Shape, TritonPlan]


@contextmanager
def chosen(plans: Plans, rows: int, met: dict[Shape, Any] | None = None) -> Iterator[None]:
    """Products of so many rows take these plans.  met: gets the plan that the engine takes for each of their shapes."""

    def choose(shape: Sequence[int], count: int, plan: Any) -> Any:
        key = (shape[0], shape[1])
        if count != rows:
            return plan
        if met is not None:
            met[key] = plan
        return plans.get(key, plan)

    def by_plan(multiply: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, weight, bias, plan: multiply(x, weight, bias, choose(weight.shape, len(x), plan))

    plan_of = linear_quantised.plan_of
    with ExitStack() as stack:
        for name in BY_PLAN:
            stack.enter_context(patch.object(dense, name, by_plan(getattr(dense, name))))
        of_quantised = lambda weight, x: choose(weight.shape, len(x), plan_of(weight, x))  # noqa: E731
        stack.enter_context(patch.object(linear_quantised, "plan_of", of_quantised))
        yield


def neighbours(plan: TritonPlan, rows: int, value_bytes: int, gpu: Chip) -> list[TritonPlan]:
    """The plans that differ from `plan` in one field, or in a block and the stages, and fit the chip."""
    changes: list[dict[str, int]] = [{"stages": stages} for stages in STAGES]
    changes += [{"splits": splits} for splits in SPLITS]
    for name, sizes in (("block_out", BLOCKS_OUT), ("block_in", BLOCKS_IN), ("warps", WARPS)):
        changes += [{name: size, "stages": stages} for size in sizes for stages in (plan.stages, plan.stages // 2, 6)]
    found = dict.fromkeys(replace(plan, **change) for change in changes)
    stage = {each: (each.block_out + block_rows(rows)) * each.block_in * value_bytes for each in found}
    fits = [each for each in found if each.stages >= 2 and each.stages * stage[each] <= gpu.shared_memory - 1024]
    return [each for each in fits if each != plan]


def rounds_of(executor: CudaExecutor, variants: Mapping[str, Plans], rows: int) -> dict[str, torch.cuda.CUDAGraph]:
    """A captured round of each variant."""
    dummies, pool, graphs = of_dummies(1), torch.cuda.graph_pool_handle(), {}
    with torch.inference_mode(), precompile():
        for plans in variants.values():
            with chosen(plans, rows):
                executor.run_eagerly(dummies)
    for name, plans in variants.items():
        with chosen(plans, rows):
            graphs[name] = executor.captured(LaunchForm(1), pool).graph
    return graphs


def ms_of(executor: CudaExecutor, graphs: Mapping[str, torch.cuda.CUDAGraph], seconds: float) -> dict[str, float]:
    """Median ms of each round.  They take turns for so many seconds, and at least four times."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    end, turn = time.perf_counter() + seconds, 0
    while turn < 4 or time.perf_counter() < end:
        for name, graph in graphs.items():
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with torch.cuda.stream(executor.stream):
                graph.replay()
                start.record()
                for _ in range(REPLAYS):
                    graph.replay()
                stop.record()
            stop.synchronize()
            times[name].append(start.elapsed_time(stop) / REPLAYS)
        turn += 1
    return {name: statistics.median(of_turns) for name, of_turns in times.items()}


def taken_together(ms: Mapping[str, float], variants: Mapping[str, Plans]) -> dict[str, Plans]:
    """The engine's plans, then the best plan of each shape that gained, one more each time, the largest gain first."""
    together: dict[str, Plans] = {ENGINES: {}}
    plans: dict[Shape, TritonPlan] = {}
    for name in sorted(ms, key=lambda name: ms[name]):
        for shape, plan in variants[name].items():
            if shape not in plans and ms[name] < ms[ENGINES] - LEAST_GAIN:
                plans = {**plans, shape: plan}
                together[f"and {name}"] = plans
    return together


def compare(executor: CudaExecutor, rows: int, value_bytes: int, seconds: float) -> None:
    met: dict[Shape, Any] = {}
    with torch.inference_mode(), chosen({}, rows, met):
        executor.run_eagerly(of_dummies(1))
        executor.stream.synchronize()
    variants: dict[str, Plans] = {ENGINES: {}, "the same again": {}}
    gpu = chip(torch.empty(0, device=executor.device))
    for shape, plan in met.items():
        print(f"{shape}: {plan}")
        others = neighbours(plan, rows, value_bytes, gpu) if isinstance(plan, TritonPlan) else []
        variants |= {f"{shape} {other}": {shape: other} for other in others}
    if len(variants) == 2:
        raise EspalierError(f"no product of this round has {rows} rows and a plan of ours; give another --rows")
    ms = ms_of(executor, rounds_of(executor, variants, rows), seconds)
    for name in sorted(ms, key=lambda name: ms[name]):
        print(f"  {ms[name]:8.4f} ms {1e3 * (ms[name] - ms[ENGINES]):+8.1f} us  {name}")
    together = taken_together(ms, variants)
    for name, each in ms_of(executor, rounds_of(executor, together, rows), seconds / 2).items():
        print(f"  {each:8.4f} ms  {name}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__, prog="python -m tools.round_plans")
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--weights", help="fp8, fp8-block, int4 or mxfp4 (dense)")
    parser.add_argument("--tree", type=tree_shape, default=PLAIN, help="such as 5,8,64 (plain decoding)")
    parser.add_argument("--rows", type=int, required=True, help="the products that are varied have so many rows")
    parser.add_argument("--seconds", type=float, default=30, help="for the turns of all variants (30)")
    args = parser.parse_args(arguments)
    device = require_gpu("tools.round_plans")
    tree = None if args.tree == PLAIN else SpeculationConfig(**asdict(args.tree), by_batch={})
    settings = {"page_size": 64, "max_context": 33792, "speculation": tree}
    with OfShape(recipe_of(args.shape, 0, weights=args.weights), settings, device).open(tree is not None) as bench:
        executor = bench.engine.executor
        assert isinstance(executor, CudaExecutor)
        compare(executor, args.rows, 1 if (args.weights or "").startswith("fp8") else 2, args.seconds)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
