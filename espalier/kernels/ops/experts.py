"""Operations of a mixture of experts: the choice of each row's experts, and the products with these experts."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.layers.experts_plan import ExpertsPlan
from espalier.kernels.layers.linear_plans import MIN_BLOCK_ROWS
from espalier.kernels.layers.quantised import InputRows, QuantisedMatrix
from espalier.kernels.ops.activation import SILU, Activation, activation_rounded_once
from espalier.kernels.ops.linear import add_partial_sums, linear_quantised
from espalier.kernels.runtime.op import op

SCORINGS = ("softmax", "sigmoid", "topk_softmax")
GROUP_SCORES = ("max", "top2_sum")
# The most rows for which the kernel of the routed experts also computes the shared experts: up to here, each piece of
# the shared experts is one tile.
MAX_SHARED_ROWS = MIN_BLOCK_ROWS
# The matrices of experts, [E, out, in].
ExpertMatrix = Tensor | QuantisedMatrix


@dataclass(frozen=True)
class Routing:
    """How the router chooses top_k of num_experts experts for a row, and how it weights them.

    scoring: how logits become scores.  softmax, sigmoid: the scores are this function of all logits.  topk_softmax: the
    scores are the logits, and the weights are the softmax of the chosen logits.
    norm_topk_prob: whether the weights are divided by their sum plus norm_eps, because the sum of sigmoids may be 0.
    routed_scaling_factor: a factor of the weights, applied after this division.
    n_group, topk_group: neighbouring experts form n_group groups.  Experts are chosen from the best topk_group groups
    (DeepSeek-V2, V3).  group_score: a group's score is the highest score of its experts, or the sum of the highest two.
    correction_bias: whether a bias [E] is added to the scores for the choice of experts.  The weights do not change.
    logit_bias: whether a bias [E] is added to the logits, which also changes the weights.  At most one of the biases
    can be set.  Raises EspalierError for values that do not go together."""

    num_experts: int
    top_k: int
    scoring: Literal["softmax", "sigmoid", "topk_softmax"] = "softmax"
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    group_score: Literal["max", "top2_sum"] = "max"
    correction_bias: bool = False
    logit_bias: bool = False
    norm_eps: float = 1e-20

    def __post_init__(self) -> None:
        for name, supported in (("scoring", SCORINGS), ("group_score", GROUP_SCORES)):
            if (value := getattr(self, name)) not in supported:
                raise EspalierError(
                    f"routing with {name} = {value!r} is not supported, only {', '.join(map(repr, supported))}; "
                    "use another model"
                )
        for name, limit in (
            ("num_experts", self.num_experts),
            ("n_group", self.num_experts),
            ("topk_group", self.n_group),
            ("top_k", self.num_experts),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or not 1 <= value <= limit:
                raise EspalierError(f"routing with {name} = {value!r}, but 1 to {limit} is needed; correct the config")
        if self.correction_bias and self.logit_bias:
            raise EspalierError("routing with biases of both scores and logits is not supported; use another model")
        if not isinstance(self.routed_scaling_factor, int | float):
            raise EspalierError(
                f"routing with routed_scaling_factor = {self.routed_scaling_factor!r}, but a number is needed; correct "
                "the config"
            )
        group_size = self.group_size
        if group_size * self.n_group != self.num_experts or group_size * self.topk_group < self.top_k:
            raise EspalierError(
                f"routing cannot choose {self.top_k} experts from {self.topk_group} of {self.n_group} equal groups of "
                f"{self.num_experts} experts; correct the config"
            )
        if self.group_score == "top2_sum" and self.n_group > 1 and group_size < 2:
            raise EspalierError("routing with group_score = 'top2_sum' needs groups of 2 experts; correct the config")

    @property
    def group_size(self) -> int:
        return self.num_experts // self.n_group


def _in_best_groups(selection_scores: Tensor, routing: Routing) -> Tensor:
    """Returns [N, E] bool: whether an expert's group is one of the row's topk_group best groups."""
    grouped = selection_scores.unflatten(-1, (routing.n_group, routing.group_size))
    group_scores = grouped.amax(-1) if routing.group_score == "max" else grouped.topk(2, dim=-1).values.sum(-1)
    best = torch.zeros_like(group_scores, dtype=torch.bool)
    best.scatter_(1, _stable_topk(group_scores, routing.topk_group), True)
    return best.repeat_interleave(routing.group_size, dim=-1)


def _stable_topk(scores: Tensor, k: int) -> Tensor:
    """Returns [N, k] int64, the indices of the k largest scores.  Among equal scores, lower indices are chosen.
    The scores are sorted, because torch.topk does not define the order of equal scores."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :k]


@dataclass(frozen=True)
class SharedExperts:
    """The MLP of the shared experts, which every row takes with weight 1.

    gate_up: [2 · S · I, H], the rows of gate, then the rows of up.  down: [H, S · I].  I is the width of a routed
    expert.  The MLP is cut into S pieces of this width.  Piece p has rows p · I .. (p + 1) · I - 1 of gate and of up,
    and the same columns of down.  Both matrices have x's dtype and are contiguous."""

    gate_up: Tensor
    down: Tensor

    def num_pieces(self, inner_size: int) -> int:
        """Returns the number of pieces S, for routed experts of width `inner_size`."""
        return self.down.shape[1] // inner_size


@dataclass(frozen=True)
class ExpertBiases:
    """Biases of E experts, in x's dtype.  gate_up: [E, 2·I], gate first, or [E, I] without a gate.  down: [E, H]."""

    gate_up: Tensor
    down: Tensor


def _linear_product(x: Tensor, weight: ExpertMatrix, bias: Tensor | None) -> Tensor:
    """Returns x · weightᵀ + bias for the matrix [out, in] of one expert."""
    return F.linear(x, weight, bias) if isinstance(weight, Tensor) else linear_quantised.reference(x, weight, bias)


@op("espalier.kernels.layers.experts_tiles")
def route(logits: Tensor, bias: Tensor | None, routing: Routing, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Chooses the experts of each row.  Returns ids [N, K] int64, ascending in each row, and weights [N, K].

    logits: [N, E] float32 or float64, or partial sums [parts, N, E], which are added in order.  The weights have the
    dtype of the logits.  bias: [E], added as `routing` says, or None.  scale: [E], a factor of each expert's weight, or
    None.  Among equal scores, lower ids are chosen.  The order of summation is the same for any number of rows."""
    if logits.ndim == 3:
        logits = add_partial_sums.reference(logits, logits.dtype)
    if routing.logit_bias and bias is not None:
        logits, bias = logits + bias, None
    if routing.scoring == "softmax":
        scores = logits.softmax(-1)
    else:
        scores = logits.sigmoid() if routing.scoring == "sigmoid" else logits
    selection_scores = scores if bias is None else scores + bias
    if routing.n_group > 1:
        selection_scores = selection_scores.masked_fill(~_in_best_groups(selection_scores, routing), -torch.inf)
    ids = _stable_topk(selection_scores, routing.top_k).sort(-1).values
    weights = scores.gather(1, ids)
    if routing.scoring == "topk_softmax":
        weights = weights.softmax(-1)
    if routing.norm_topk_prob:
        # cumsum adds in order.  The order of `sum` may depend on the number of rows.
        weights = weights / (weights.cumsum(-1)[:, -1:] + routing.norm_eps)
    if routing.routed_scaling_factor != 1.0:
        weights = weights * routing.routed_scaling_factor
    return ids, weights if scale is None else weights * scale[ids]


@op("espalier.kernels.layers.shared_gate", tensor="x")
def scale_by_gate(result: Tensor, x: Tensor, gate: Tensor, out: Tensor) -> None:
    """Write a shared expert's result, times the sigmoid of its gate, to out [N, H], in float32 or float64.

    result: [N, H] in x's dtype, or partial sums [parts, N, H] in float32 or float64, which are added in order and
    rounded to x's dtype.  x: [N, in], the expert's input rows.  gate: [1, in].  The product x · gateᵀ is rounded to x's
    dtype before the sigmoid."""
    result = add_partial_sums.reference(result, x.dtype)
    torch.mul(result, F.linear(x, gate).to(out.dtype).sigmoid(), out=out)


@op("espalier.kernels.layers.experts", tensor="expert_ids")
def grouped_experts(
    x: InputRows,
    gate_up: ExpertMatrix,
    down: ExpertMatrix,
    expert_ids: Tensor,
    routing_weights: Tensor,
    live_rows: Tensor | None = None,
    biases: ExpertBiases | None = None,
    activation: Activation = SILU,
    num_extra_parts: int = 0,
    shared_experts: SharedExperts | None = None,
    plan: ExpertsPlan | None = None,
) -> Tensor:
    """Returns the weighted results of each row's K experts: parts [K + S + num_extra_parts, N, H], to be added up.

    x: [N, H]; if x is RoundedRows, it must be rounded as gate_up.input_scales says.  gate_up: [E, 2·I, H], the rows of
    gate, then the rows of up; [E, I, H] if the activation has no gate.  down: [E, H, I].
    expert_ids: [N, K] int64, distinct in each row.  Part k is the result of expert_ids[:, k].
    routing_weights: [N, K], float32 (float64 for float64), the dtype of the parts.  The bias of `down` is weighted too.
    live_rows: [N] bool, the rows that go to experts.  The first K parts of other rows are 0.  None: all rows are live.
    num_extra_parts: the number of further parts at the end, which the caller writes.
    shared_experts: S pieces, for at most MAX_SHARED_ROWS rows and dense experts without biases, all with SILU.  The S
    parts after the first K are the results of the pieces, for all rows, live or not.  None: S is 0.
    plan: launch parameters; None: experts_plan.py chooses them."""
    # The reference loops over the experts that have rows, so the host reads the number of pairs of each expert.
    assert isinstance(x, Tensor)
    top_k, inner = expert_ids.shape[1], down.shape[2]
    gate_up_bias, down_bias = (None, None) if biases is None else (biases.gate_up, biases.down)
    pieces = 0 if shared_experts is None else shared_experts.num_pieces(inner)
    parts = x.new_zeros(top_k + pieces + num_extra_parts, len(x), down.shape[1], dtype=routing_weights.dtype)
    if shared_experts is not None:
        gated = activation_rounded_once(F.linear(x, shared_experts.gate_up), activation)
        for piece, columns in enumerate(gated.split(inner, dim=1)):
            parts[top_k + piece] = F.linear(columns, shared_experts.down[:, piece * inner : (piece + 1) * inner])
    if live_rows is not None:
        expert_ids = expert_ids.masked_fill(~live_rows[:, None], len(gate_up))
    counts = expert_ids.flatten().bincount(minlength=len(gate_up) + 1).tolist()
    pairs = expert_ids.flatten().argsort(stable=True).split(counts)
    for expert, own in enumerate(pairs[: len(gate_up)]):
        if len(own):
            rows, choices = own // top_k, own % top_k
            gated = _linear_product(x[rows], gate_up[expert], None if gate_up_bias is None else gate_up_bias[expert])
            gated = activation_rounded_once(gated, activation)
            result = _linear_product(gated, down[expert], None if down_bias is None else down_bias[expert])
            parts[choices, rows] = result.to(parts.dtype) * routing_weights[rows, choices, None]
    return parts
