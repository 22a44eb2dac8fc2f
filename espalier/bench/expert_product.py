"""Chains of expert products on a GPU, to be timed.

Each call of a chain goes to experts of its own, drawn as if routing were uniform, so that no weights are in the L2
cache.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from espalier.bench.timing import Stopwatch
from espalier.kernels.layers.experts import grouped_experts_triton
from espalier.kernels.layers.experts_plan import ExpertsShape

# Different calls of a chain, and FLOPs and bytes after which a chain is long enough.
MAX_CALLS = 16
MIN_CALLS = 3
CHAIN_BYTES = 500 * 10**6
CHAIN_FLOPS = 200 * 10**9


def experts_drawn(shape: ExpertsShape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Random gate_up and down of one layer.  Its experts together are larger than any L2 cache."""
    gate_up = torch.empty(shape.num_experts, 2 * shape.inner, shape.hidden, dtype=dtype, device=device)
    down = torch.empty(shape.num_experts, shape.hidden, shape.inner, dtype=dtype, device=device)
    return gate_up.normal_(std=shape.hidden**-0.5), down.normal_(std=shape.inner**-0.5)


class Calls:
    """Inputs of a chain of calls: `rows` rows each, routed as if at random, each call to other experts."""

    def __init__(self, shape: ExpertsShape, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.rows = shape, rows
        touched = min(shape.num_experts, rows * shape.top_k) * shape.expert_bytes
        enough = max(-(-CHAIN_BYTES // touched), -(-CHAIN_FLOPS // shape.flops(rows)))
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


class ExpertProduct:
    """The experts of one layer, multiplied as the engine does.  gate_up, down: as in grouped_experts."""

    def __init__(self, shape: ExpertsShape, gate_up: Tensor, down: Tensor, stopwatch: Stopwatch) -> None:
        self.shape, self.gate_up, self.down, self.stopwatch = shape, gate_up, down, stopwatch

    def us(self, rows: int, turns: int) -> tuple[float, float]:
        """(us of one call, experts that it touches), means over the calls of a chain."""
        calls = Calls(self.shape, rows, self.down.dtype, self.down.device)
        [ms] = self.stopwatch.ms([self._chain(calls)], turns)
        return 1e3 * ms / calls.num, calls.touched

    def _chain(self, calls: Calls) -> Callable[[], None]:
        def body() -> None:
            for ids in calls.ids:
                grouped_experts_triton(calls.x, self.gate_up, self.down, ids, calls.weights)

        return body
