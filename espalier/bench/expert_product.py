"""Times the expert product on a GPU, in chains of calls.

Routing is uniform.  Each call of a chain goes to other experts, so that no weights are in the L2 cache.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from espalier.bench.timing import Stopwatch
from espalier.kernels.layers.experts import ExpertMatrix, grouped_experts_triton
from espalier.kernels.layers.experts_plan import ExpertsShape

# Limits of the number of calls in a chain.
MAX_CALLS = 16
MIN_CALLS = 3
# A chain that reads as many bytes and computes as many FLOPs is long enough to time.
CHAIN_BYTES = 500 * 10**6
CHAIN_FLOPS = 200 * 10**9


def random_experts(shape: ExpertsShape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Random gate_up and down of one layer, as in grouped_experts."""
    gate_up = torch.empty(shape.num_experts, 2 * shape.inner, shape.hidden, dtype=dtype, device=device)
    down = torch.empty(shape.num_experts, shape.hidden, shape.inner, dtype=dtype, device=device)
    return gate_up.normal_(std=shape.hidden**-0.5), down.normal_(std=shape.inner**-0.5)


class ChainInputs:
    """Inputs of a chain of `num` calls with `rows` rows each.  Each call goes to other experts."""

    def __init__(self, shape: ExpertsShape, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.rows = shape, rows
        touched = min(shape.num_experts, rows * shape.top_k) * shape.expert_bytes
        enough = max(-(-CHAIN_BYTES // touched), -(-CHAIN_FLOPS // shape.flops(rows)))
        self.num = max(MIN_CALLS, min(MAX_CALLS, enough)) if rows > 1 else MAX_CALLS
        self.x = torch.randn(rows, shape.hidden, dtype=dtype, device=device)
        self.gated = torch.randn(rows * shape.top_k, shape.inner, dtype=dtype, device=device)
        self.weights = torch.rand(rows, shape.top_k, device=device)
        self.ids = [ids.to(device) for ids in random_ids(shape, rows, self.num)]

    @property
    def touched(self) -> float:
        """Experts with rows, the mean over calls."""
        return sum(len(ids.unique()) for ids in self.ids) / self.num


def random_ids(shape: ExpertsShape, rows: int, num_calls: int) -> list[Tensor]:
    """ids [rows, K] of each call, of uniform routing.

    Rows are independent.  A row meets no expert again before it has gone to all of them (but for a rest below K).
    """
    generator = torch.Generator().manual_seed(rows)
    calls_per_deal = shape.num_experts // shape.top_k
    calls: list[Tensor] = []
    while len(calls) < num_calls:
        dealt = torch.rand(rows, shape.num_experts, generator=generator).argsort(1)[:, : calls_per_deal * shape.top_k]
        calls += dealt.view(rows, calls_per_deal, shape.top_k).sort(-1).values.unbind(1)
    return [ids.contiguous() for ids in calls[:num_calls]]


class ExpertProduct:
    """Times the expert product of one layer, with the engine's kernels.

    gate_up, down: as in grouped_experts, dense or quantised.  dtype: of the rows.
    """

    def __init__(
        self, shape: ExpertsShape, gate_up: ExpertMatrix, down: ExpertMatrix, dtype: torch.dtype, stopwatch: Stopwatch
    ) -> None:
        self.shape, self.gate_up, self.down, self.dtype, self.stopwatch = shape, gate_up, down, dtype, stopwatch

    def us(self, rows: int, turns: int) -> tuple[float, float]:
        """(us of a call, experts that a call touches), means over a chain.  turns: how often the chain is timed."""
        calls = ChainInputs(self.shape, rows, self.dtype, self.down.device)
        [ms] = self.stopwatch.ms([self._chain(calls)], turns)
        return 1e3 * ms / calls.num, calls.touched

    def _chain(self, calls: ChainInputs) -> Callable[[], None]:
        def body() -> None:
            for ids in calls.ids:
                grouped_experts_triton(calls.x, self.gate_up, self.down, ids, calls.weights)

        return body
