"""The floor of a round: what its linear layers and its K/V cost where nothing else costs anything.

    floor = fastest linear layers found for those rows, as one CUDA graph
            + max(K/V bytes / measured bandwidth, attention FLOPs / measured bf16 peak)

All of it is measured on the device in the same run.  Beside it stands weight bytes / bandwidth, which no kernel
reaches.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.bench.linears import ModelShape, Run, Stopwatch, Weights, plain
from espalier.bench.machine import require_gpu
from espalier.kernels.choices import choices_for
from espalier.kernels.linear import linear

# Several times any L2.
BANDWIDTH_BYTES = 4 * 2**30
PEAK_SIDE = 8192
# Long enough for the chip's clocks to settle under the load.
SECONDS = 0.3
TURNS = 8


@dataclass(frozen=True)
class Ceilings:
    """Measured: bytes a second that are read, and floating-point operations a second of a large bf16 product."""

    bandwidth: float
    peak: float


@dataclass(frozen=True)
class LinearTimes:
    """ms of a chain of linear layers: PyTorch's alone, and the fastest found (ours where the table says so)."""

    rows: int
    cublas_ms: float
    fastest_ms: float
    weight_bytes: int


def floor(linear_ms: float, kv_bytes: float, attention_flops: float, ceilings: Ceilings) -> float:
    """ms.  kv_bytes: K and V that the passes read, each request's prefix once a pass; attention_flops likewise."""
    return linear_ms + 1e3 * max(kv_bytes / ceilings.bandwidth, attention_flops / ceilings.peak)


def round_runs(
    shape: ModelShape, batch: int, steps: int, topk: int, num_draft_tokens: int
) -> tuple[tuple[Run, ...], tuple[Run, ...]]:
    """The target's pass over the tree, and the draft's: steps - 1 levels of beams and the extend, whose lm_head is
    needed at the roots alone.  steps 0: plain decoding, with extend."""
    extended = batch * (steps + 1)
    level = shape.draft_pass(batch * topk)
    draft = (*(run for _ in range(1, steps) for run in level), *shape.draft_pass(extended, batch, extended))
    return shape.target_pass(batch * num_draft_tokens), draft


@dataclass(frozen=True)
class AttentionCost:
    """What attention reads and computes in some passes, two bytes a number."""

    kv_bytes: float
    flops: float


def round_attention(
    shape: ModelShape, batch: int, context: int, steps: int, topk: int, num_draft_tokens: int
) -> AttentionCost:
    """Of the same passes as `round_runs`, each reading a request's prefix of `context` tokens once; the nodes
    themselves are left out, a few among thousands."""
    levels = max(steps - 1, 0)
    # (layers, passes, queries a request)
    passes = ((shape.layers, 1, num_draft_tokens), (1, levels, topk), (1, 1, steps + 1))
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

    def ceilings(self) -> Ceilings:
        data = torch.randn(BANDWIDTH_BYTES // 4, device=self.device)
        a, b = (torch.randn(PEAK_SIDE, PEAK_SIDE, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        (read,) = self.watch.ms([data.sum], TURNS, SECONDS)
        (product,) = self.watch.ms([lambda: a @ b], TURNS, SECONDS)
        return Ceilings(BANDWIDTH_BYTES / read * 1e3, 2 * PEAK_SIDE**3 / product * 1e3)

    def target(self, rows: int) -> LinearTimes:
        return self.linears(self.shape.target_pass(rows), rows)

    def linears(self, runs: Sequence[Run], rows: int) -> LinearTimes:
        """The runs as one graph, both ways."""
        chains = [self.weights.chain(runs, multiply) for multiply in (plain, in_force)]
        cublas, ours = self.watch.ms(chains, TURNS, SECONDS)
        return LinearTimes(rows, cublas, min(cublas, ours), sum(run.weight_bytes for run in runs))

    def round(
        self, batch: int, context: int, steps: int, topk: int, num_draft_tokens: int, ceilings: Ceilings
    ) -> float:
        """ms: the floor of a round of this layout.  ceilings: measured in the same run."""
        target, draft = round_runs(self.shape, batch, steps, topk, num_draft_tokens)
        fastest = self.linears((*draft, *target), batch * num_draft_tokens).fastest_ms
        cost = round_attention(self.shape, batch, context, steps, topk, num_draft_tokens)
        return floor(fastest, cost.kv_bytes, cost.flops, ceilings)


def in_force(x: Tensor, weight: Tensor) -> Tensor:
    """As the engine multiplies here."""
    choices = choices_for(weight)
    return plain(x, weight) if choices is None else linear(x, weight, None, choices.at(len(x)))
