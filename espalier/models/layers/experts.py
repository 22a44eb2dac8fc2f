"""The mixture-of-experts block: a router chooses K experts for each row, and their results are weighted and summed.

The product with the experts is one operation (espalier/kernels/layers/experts.py); this file has the routing.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.layers.experts import grouped_experts
from espalier.kernels.layers.linear import sum_parts_reference
from espalier.models.layers.linear import Linear
from espalier.models.layers.mlp import GatedMLP

SCORINGS = ("softmax", "sigmoid", "topk_softmax")
GROUP_SCORES = ("max", "top2_sum")
# Added to the sum that weights are divided by, as DeepSeek-V3 does: sigmoid scores may all be 0.
NORM_EPS = 1e-20


@dataclass(frozen=True)
class Routing:
    """How the router chooses top_k of num_experts experts for a row, and how it weights them.

    scoring: softmax or sigmoid of all logits; topk_softmax: logits choose, and softmax is over the chosen ones.
    norm_topk_prob: divide the weights by their sum.  routed_scaling_factor: of the weights, after that.
    n_group, topk_group: experts are chosen from the best topk_group of n_group groups of neighbours (DeepSeek-V2, V3).
    group_score: a group's score, from the scores of its experts.
    correction_bias: a bias [E] is added to the scores that choose, not to the weights.
    Raises EspalierError for values that do not go together.
    """

    num_experts: int
    top_k: int
    scoring: Literal["softmax", "sigmoid", "topk_softmax"] = "softmax"
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    group_score: Literal["max", "top2_sum"] = "max"
    correction_bias: bool = False

    def __post_init__(self) -> None:
        for name, supported in (("scoring", SCORINGS), ("group_score", GROUP_SCORES)):
            if (value := getattr(self, name)) not in supported:
                raise EspalierError(
                    f"routing with {name} = {value!r} is not supported, only {', '.join(map(repr, supported))}; "
                    "use another model"
                )
        for name, most in (
            ("num_experts", self.num_experts),
            ("n_group", self.num_experts),
            ("topk_group", self.n_group),
            ("top_k", self.num_experts),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or not 1 <= value <= most:
                raise EspalierError(f"routing with {name} = {value!r}, but 1 to {most} is needed; correct the config")
        size = self.group_size
        if size * self.n_group != self.num_experts or size * self.topk_group < self.top_k:
            raise EspalierError(
                f"routing cannot choose {self.top_k} experts from {self.topk_group} of {self.n_group} equal groups of "
                f"{self.num_experts} experts; correct the config"
            )
        if self.group_score == "top2_sum" and self.n_group > 1 and size < 2:
            raise EspalierError("routing with group_score = 'top2_sum' needs groups of 2 experts; correct the config")

    @property
    def group_size(self) -> int:
        return self.num_experts // self.n_group


def route(logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """The experts of each row, and their weights: ids [N, K] int64, ascending in each row, and weights [N, K].

    logits: [N, E], float32 or float64; weights have its dtype.  bias: [E], the correction bias, or None.
    Among equal scores the lower id is chosen.  Sums have the same order whatever the number of rows.
    """
    if routing.scoring == "softmax":
        scores = logits.softmax(-1)
    else:
        scores = logits.sigmoid() if routing.scoring == "sigmoid" else logits
    choosing = scores if bias is None else scores + bias
    if routing.n_group > 1:
        choosing = choosing.masked_fill(~_in_best_groups(choosing, routing), -torch.inf)
    ids = _top(choosing, routing.top_k).sort(-1).values
    weights = scores.gather(1, ids)
    if routing.scoring == "topk_softmax":
        weights = weights.softmax(-1)
    if routing.norm_topk_prob:
        # cumsum adds in order; the order of sum may follow from the number of rows.
        weights = weights / (weights.cumsum(-1)[:, -1:] + NORM_EPS)
    if routing.routed_scaling_factor != 1.0:
        weights = weights * routing.routed_scaling_factor
    return ids, weights


def _in_best_groups(choosing: Tensor, routing: Routing) -> Tensor:
    """[N, E] bool: whether an expert's group is one of the row's best topk_group."""
    grouped = choosing.unflatten(-1, (routing.n_group, routing.group_size))
    group_scores = grouped.amax(-1) if routing.group_score == "max" else grouped.topk(2, dim=-1).values.sum(-1)
    best = torch.zeros_like(group_scores, dtype=torch.bool)
    best.scatter_(1, _top(group_scores, routing.topk_group), True)
    return best.repeat_interleave(routing.group_size, dim=-1)


def _top(scores: Tensor, count: int) -> Tensor:
    """[N, count] int64, the indices of the largest scores; among equal scores the lower index.  topk is not stable."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]


class MixtureMLP:
    """The weighted sum of each row's experts, and of the shared experts if there are any.

    router: [E, H].  bias: [E], the correction bias, or None.  gate_up: [E, 2·I, H].  down: [E, H, I].
    shared: an MLP that every row goes through.  shared_gate: [1, H], the sigmoid of its product scales `shared`.
    """

    __slots__ = ("routing", "router", "bias", "gate_up", "down", "shared", "shared_gate")

    def __init__(
        self,
        routing: Routing,
        router: Tensor,
        bias: Tensor | None,
        gate_up: Tensor,
        down: Tensor,
        shared: GatedMLP | None = None,
        shared_gate: Linear | None = None,
    ) -> None:
        self.routing = routing
        self.router = router
        self.bias = bias
        self.gate_up = gate_up
        self.down = down
        self.shared = shared
        self.shared_gate = shared_gate

    def __call__(self, x: Tensor, live: Tensor | None = None) -> Tensor:
        """[N, hidden] -> [parts, N, hidden], float32 at least, as RMSNorm.after takes them.

        live: [N] bool; other rows go to no expert.  None: all rows do.
        """
        ids, weights = route(router_logits(x, self.router), self.bias, self.routing)
        parts = grouped_experts(x, self.gate_up, self.down, ids, weights, live)
        return parts if self.shared is None else torch.cat((parts, self._shared(x, parts.dtype)[None]))

    def _shared(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """[N, hidden]: the output of the shared experts."""
        assert self.shared is not None
        out = self.shared(x)
        out = sum_parts_reference(out, x.dtype) if out.ndim == 3 else out
        return out.to(dtype) if self.shared_gate is None else out.to(dtype) * self.shared_gate(x).to(dtype).sigmoid()


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """x [N, H] · weightᵀ [E, H] -> [N, E], computed and returned in float32 (float64 for float64)."""
    exact = torch.promote_types(x.dtype, torch.float32)
    if x.is_cuda and x.dtype != exact:
        return torch.mm(x, weight.T, out_dtype=exact)
    return F.linear(x.to(exact), weight.to(exact))
