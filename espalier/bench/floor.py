"""The floor of a round: what its linear layers and its K/V cost where nothing else costs anything.

    floor = fastest linear layers found for those rows, as one CUDA graph
            + max(K/V bytes / measured bandwidth, attention FLOPs / measured bf16 peak)

All of it is measured on the device in the same run.  DraftHidden it stands weight bytes / bandwidth, which no kernel
reaches.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from espalier.bench.linears import ModelShape, Run, Weights, plain
from espalier.bench.machine import require_gpu
from espalier.bench.timing import SECONDS, TURNS, Ceilings, Stopwatch
from espalier.kernels.layers.linear import linear
from espalier.kernels.layers.linear_tuning import DENSE, plans_for

# cuBLAS alone, ms, by shape, GPU and rows: what a run is held against, printed and never asserted.
KNOWN_MS = MappingProxyType(
    {
        ("llama-3.1-8b", "H200"): MappingProxyType(
            {1: 3.89, 16: 4.00, 32: 4.09, 64: 4.24, 128: 4.62, 256: 6.96, 512: 12.07}
        )
    }
)


@dataclass(frozen=True)
class LinearTimes:
    """ms of a chain of linear layers: PyTorch's alone, and the fastest found (ours where the table says so)."""

    rows: int
    cublas_ms: float
    fastest_ms: float
    weight_bytes: int


@dataclass(frozen=True)
class RoundFloor:
    """ms: of a round; of its linear layers alone; weight bytes / bandwidth."""

    ms: float
    linear_ms: float
    weight_bytes_ms: float


def floor(linear_ms: float, kv_bytes: float, attention_flops: float, ceilings: Ceilings) -> float:
    """ms.  kv_bytes: K and V that the passes read, each request's prefix once a pass; attention_flops likewise."""
    return linear_ms + 1e3 * max(kv_bytes / ceilings.bandwidth, attention_flops / ceilings.peak)


def known_ms(shape: str, gpu: str) -> Mapping[int, float]:
    """By rows, of a named shape on a GPU of this name; empty where nothing is known."""
    return next((known for (of, chip), known in KNOWN_MS.items() if of == shape and chip in gpu), {})


def round_runs(
    shape: ModelShape, batch: int, steps: int, topk: int, num_draft_tokens: int, drafts: bool = True
) -> tuple[tuple[Run, ...], tuple[Run, ...]]:
    """The target's pass over the tree, and the draft's: steps - 1 levels of beams and the extend, whose lm_head is
    needed at the roots alone.  steps 0: plain decoding, with extend; without it where nothing drafts."""
    target = shape.target_pass(batch * num_draft_tokens)
    if not drafts:
        return target, ()
    extended = batch * (steps + 1)
    level = shape.draft_pass(batch * topk)
    draft = (*(run for _ in range(1, steps) for run in level), *shape.draft_pass(extended, batch, extended))
    return target, draft


@dataclass(frozen=True)
class AttentionCost:
    """What attention reads and computes in some passes, two bytes a number."""

    kv_bytes: float
    flops: float


def round_attention(
    shape: ModelShape, batch: int, context: float, steps: int, topk: int, num_draft_tokens: int, drafts: bool = True
) -> AttentionCost:
    """Of the same passes as `round_runs`, each reading a request's prefix of `context` tokens once; the nodes
    themselves are left out, a few among thousands."""
    levels = max(steps - 1, 0)
    # (layers, passes, queries a request)
    draft = ((1, levels, topk), (1, 1, steps + 1)) if drafts else ()
    passes = ((shape.layers, 1, num_draft_tokens), *draft)
    size = batch * context * shape.head_size
    kv_bytes = sum(layers * count * 4 * shape.kv_heads * size for layers, count, _ in passes)
    flops = sum(layers * count * queries * 4 * shape.heads * size for layers, count, queries in passes)
    return AttentionCost(kv_bytes, flops)


class FloorBench:
    """Holds one set of weights of a shape, target's and draft's, and measures passes over them."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype = torch.bfloat16) -> None:
        self.shape = shape
        self.device = require_gpu("the floor")
        self.weights = Weights(dtype, self.device)
        self.watch = Stopwatch()
        # Neither context nor pages change a round's linear layers.
        self._linears: dict[tuple[int, tuple[int, int, int, bool]], LinearTimes] = {}

    def ceilings(self) -> Ceilings:
        return self.watch.ceilings(self.device)

    def target(self, rows: int) -> LinearTimes:
        return self.linears(self.shape.target_pass(rows), rows)

    def linears(self, runs: Sequence[Run], rows: int) -> LinearTimes:
        """The runs as one graph, both ways."""
        chains = [self.weights.chain(runs, multiply) for multiply in (plain, in_force)]
        cublas, ours = self.watch.ms(chains, TURNS, SECONDS)
        return LinearTimes(rows, cublas, min(cublas, ours), sum(run.weight_bytes for run in runs))

    def round(
        self,
        batch: int,
        context: float,
        steps: int,
        topk: int,
        num_draft_tokens: int,
        ceilings: Ceilings,
        drafts: bool = True,
    ) -> RoundFloor:
        """The floor of a round of this layout.  context: tokens of a request, in the mean; ceilings: measured in the
        same run; drafts: False where no draft runs at all."""
        layout = (steps, topk, num_draft_tokens, drafts)
        target, draft = round_runs(self.shape, batch, *layout)
        if (batch, layout) not in self._linears:
            self._linears[batch, layout] = self.linears((*draft, *target), batch * num_draft_tokens)
        times = self._linears[batch, layout]
        cost = round_attention(self.shape, batch, context, *layout)
        total = floor(times.fastest_ms, cost.kv_bytes, cost.flops, ceilings)
        return RoundFloor(total, times.fastest_ms, 1e3 * times.weight_bytes / ceilings.bandwidth)


def in_force(x: Tensor, weight: Tensor) -> Tensor:
    """As the engine multiplies here."""
    choices = plans_for((weight.shape[0], weight.shape[1]), DENSE, weight.dtype, weight)
    return plain(x, weight) if choices is None else linear(x, weight, None, choices.at(len(x)))
