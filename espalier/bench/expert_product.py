"""Random experts, and chains of calls that go to them.

Each call of a chain goes to other experts, so that no weights are in the L2 cache.
"""

import torch
from torch import Tensor

from espalier.kernels.layers.experts_plan import ExpertsShape

# Limits of the number of calls in a chain.
MAX_CALLS = 16
MIN_CALLS = 3
# A chain that reads as many bytes and computes as many FLOPs is long enough to time.
CHAIN_BYTES = 500 * 10**6
CHAIN_FLOPS = 200 * 10**9


def random_experts(shape: ExpertsShape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Random gate_up and down of one layer, as in grouped_experts."""
    gate_up = torch.empty(shape.num_experts, shape.halves * shape.inner, shape.hidden, dtype=dtype, device=device)
    down = torch.empty(shape.num_experts, shape.hidden, shape.inner, dtype=dtype, device=device)
    return gate_up.normal_(std=shape.hidden**-0.5), down.normal_(std=shape.inner**-0.5)


class ChainInputs:
    """Inputs of a chain of `num` calls with `rows` rows each.  Each call goes to other experts.

    num: None: as many as take long enough to time.  touched: as for random_ids.
    """

    def __init__(
        self,
        shape: ExpertsShape,
        rows: int,
        dtype: torch.dtype,
        device: torch.device,
        num: int | None = None,
        touched: int | None = None,
    ) -> None:
        self.shape, self.rows = shape, rows
        self.num = _enough_calls(shape, rows) if num is None else num
        self.x = torch.randn(rows, shape.hidden, dtype=dtype, device=device)
        self.gated = torch.randn(rows * shape.top_k, shape.inner, dtype=dtype, device=device)
        self.weights = torch.rand(rows, shape.top_k, device=device)
        self.ids = [ids.to(device) for ids in random_ids(shape, rows, self.num, touched)]

    @property
    def touched(self) -> float:
        """Experts with rows, the mean over calls."""
        return sum(len(ids.unique()) for ids in self.ids) / self.num


def _enough_calls(shape: ExpertsShape, rows: int) -> int:
    touched = min(shape.num_experts, rows * shape.top_k) * shape.expert_bytes
    enough = max(-(-CHAIN_BYTES // touched), -(-CHAIN_FLOPS // shape.flops(rows)))
    return max(MIN_CALLS, min(MAX_CALLS, enough)) if rows > 1 else MAX_CALLS


def random_ids(shape: ExpertsShape, rows: int, num_calls: int, touched: int | None = None) -> list[Tensor]:
    """ids [rows, K] of each call.

    touched: None: routing is uniform.  Rows are independent, and a row meets no expert again before it has gone to all
    of them (but for a rest below K).  Else exactly so many experts have rows in each call, and calls go to other
    experts for as long as these last.
    """
    generator = torch.Generator().manual_seed(rows)
    if touched is None:
        return _dealt(rows, shape.num_experts, shape.top_k, num_calls, generator)
    of_calls = _dealt(1, shape.num_experts, touched, num_calls, generator)
    return [_spread(experts, rows, shape.top_k, generator) for [experts] in of_calls]


def _dealt(rows: int, num_experts: int, size: int, num_calls: int, generator: torch.Generator) -> list[Tensor]:
    """For each call [rows, size]: each row's experts, which differ from call to call for as long as they last."""
    calls_per_deal = num_experts // size
    calls: list[Tensor] = []
    while len(calls) < num_calls:
        dealt = torch.rand(rows, num_experts, generator=generator).argsort(1)[:, : calls_per_deal * size]
        calls += dealt.view(rows, calls_per_deal, size).sort(-1).values.unbind(1)
    return [ids.contiguous() for ids in calls[:num_calls]]


def _spread(experts: Tensor, rows: int, top_k: int, generator: torch.Generator) -> Tensor:
    """ids [rows, K]: a row goes to random ones of `experts`, and each of them has a row."""
    choices = torch.rand(rows, len(experts), generator=generator).argsort(1)[:, :top_k]
    # The first rows take all in turn.
    in_turn = torch.arange(-(-len(experts) // top_k) * top_k) % len(experts)
    choices[: len(in_turn) // top_k] = in_turn.view(-1, top_k)
    return experts[choices].sort(-1).values
