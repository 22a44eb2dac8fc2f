"""What shared experts cost beside the routed ones, on a GPU: `python -m scripts.shared_experts --rows 1,4,16`.

Times blocks of norm, router, routing and experts, of DeepSeek-V2-Lite's sizes, one after another: without shared
experts, with shared experts that run apart, and with shared experts as tiles, in other plans and with other prefetches.
The variants take turns.  One block's weights do not fit the L2 cache, and two blocks take turns too.
"""

from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from espalier.bench.timing import GraphTimer
from espalier.kernels.layers import experts
from espalier.kernels.layers.experts_plan import ExpertsPlan, ProductPlan
from espalier.kernels.ops.experts import Routing
from espalier.models.layers.linear import Linear
from espalier.models.layers.mlp import GatedMLP, MixtureMLP
from espalier.models.layers.norm import RMSNorm
from espalier.models.weight_formats.dense import dense_weight
from espalier.models.weight_formats.sharded import UnsummedOutput

CALLS, TURNS = 8, 20


@dataclass(frozen=True)
class Sizes:
    """shared: how many experts wide the shared MLP is."""

    num_experts: int = 64
    top_k: int = 6
    hidden: int = 2048
    inner: int = 1408
    shared: int = 2


@dataclass(frozen=True)
class Variant:
    """steps: experts_shared.py:PREFETCHED_STEPS.  gated, down: plans in place of those that the engine takes."""

    name: str
    steps: int = 1
    gated: ProductPlan | None = None
    down: ProductPlan | None = None

    @contextmanager
    def chosen(self) -> Iterator[None]:
        engines_choice = experts.choose_experts_plan

        def choose_experts_plan(*args: Any) -> ExpertsPlan:
            plan = engines_choice(*args)
            return replace(plan, gated=self.gated or plan.gated, down=self.down or plan.down)

        with (
            patch.object(experts, "choose_experts_plan", choose_experts_plan),
            patch.object(experts, "PREFETCHED_STEPS", self.steps),
        ):
            yield


NONE, APART = Variant("no shared experts"), Variant("apart")
PLANS = [ProductPlan(*plan) for plan in ((64, 128, 4, 4), (32, 128, 4, 4), (32, 256, 4, 3), (128, 64, 4, 6))]
VARIANTS = (
    NONE,
    APART,
    *(Variant(f"tiles, {steps} steps prefetched", steps) for steps in (1, 2, 4, 8)),
    *(Variant(f"tiles, gate and up in {plan}", gated=plan) for plan in PLANS),
    *(Variant(f"tiles, down in {plan}", down=plan) for plan in PLANS),
)


def block(sizes: Sizes, variant: Variant, drawn: Sequence[Tensor]) -> MixtureMLP:
    router, gate_up, down, shared_gate_up, shared_down = drawn
    shared = GatedMLP(Linear(dense_weight(shared_gate_up)), Linear(dense_weight(shared_down)))
    routing = Routing(sizes.num_experts, sizes.top_k)
    made = MixtureMLP(routing, router, None, gate_up, down, None if variant is NONE else shared)
    if variant is APART:
        made.shared_expert_tiles = None
    return made


def draw(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """The weights of a block: router, gate_up and down of the experts, and of the shared MLP."""
    wide, hidden = sizes.shared * sizes.inner, sizes.hidden
    shapes = (
        (sizes.num_experts, hidden),
        (sizes.num_experts, 2 * sizes.inner, hidden),
        (sizes.num_experts, hidden, sizes.inner),
        (2 * wide, hidden),
        (hidden, wide),
    )
    return [torch.empty(s, dtype=dtype, device=device).normal_(std=s[-1] ** -0.5) for s in shapes]


def chain(blocks: Sequence[MixtureMLP], variant: Variant, norm: RMSNorm, x: Tensor) -> Callable[[], object]:
    def body() -> object:
        delta: Tensor | UnsummedOutput = x
        with variant.chosen():
            for call in range(CALLS):
                block = blocks[call % len(blocks)]
                delta = block(block.norm_input(norm, delta, x)[1])
        return delta

    return body


def main(arguments: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__, prog="python -m scripts.shared_experts")
    parser.add_argument("--rows", default="1,2,4,16", help="numbers of rows, with commas (1,2,4,16)")
    rows = [int(count) for count in parser.parse_args(arguments).rows.split(",")]
    sizes, device, timer = Sizes(), torch.device("cuda"), GraphTimer()
    drawn = [draw(sizes, torch.bfloat16, device) for _ in range(2)]
    norm = RMSNorm(torch.ones(sizes.hidden, dtype=torch.bfloat16, device=device), 1e-6)
    for count in rows:
        x = torch.randn(count, sizes.hidden, dtype=torch.bfloat16, device=device)
        bodies = [chain([block(sizes, each, one) for one in drawn], each, norm, x) for each in VARIANTS]
        print(f"{count} rows, us a block")
        for variant, ms in zip(VARIANTS, timer.median_ms(bodies, TURNS), strict=True):
            print(f"  {variant.name:70}{1e3 * ms / CALLS:8.2f}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
