"""The routing of a mixture of experts: the best K of E experts for each row, and their weights.

Grid: one program a row.  Computed in float32 (float64 for float64).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.layers.linear import load_sum, sum_parts_reference
from espalier.kernels.runtime.launch import chip, exact_type, kernel, power_of_two, require
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger_and_wait

if TYPE_CHECKING:
    import triton.language as tl

SCORINGS = ("softmax", "sigmoid", "topk_softmax")
GROUP_SCORES = ("max", "top2_sum")
# Added to the sum that weights are divided by, as DeepSeek-V3 does: sigmoid scores may all be 0.
NORM_EPS = 1e-20
# Experts that a warp holds.  Within a warp, reductions need no shared memory.
WARP_EXPERTS = 512


@dataclass(frozen=True)
class Routing:
    """How the router chooses top_k of num_experts experts for a row, and how it weights them.

    scoring: softmax or sigmoid of all logits; topk_softmax: logits choose, and softmax is over the chosen ones.
    norm_topk_prob: divide the weights by their sum.  routed_scaling_factor: of the weights, after that.
    n_group, topk_group: experts are chosen from the best topk_group of n_group groups of neighbours (DeepSeek-V2, V3).
    group_score: a group's score, from the scores of its experts.
    correction_bias: a bias [E] is added to the scores that choose, not to the weights.
    logit_bias: a bias [E] is added to the logits, so it also changes the weights.  Only one of the two can be set.
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
    logit_bias: bool = False

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
        if self.correction_bias and self.logit_bias:
            raise EspalierError("routing with biases of both scores and logits is not supported; use another model")
        if not isinstance(self.routed_scaling_factor, int | float):
            raise EspalierError(
                f"routing with routed_scaling_factor = {self.routed_scaling_factor!r}, but a number is needed; correct "
                "the config"
            )
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

    logits: [N, E], float32 or float64, or [parts, N, E], which are added in order; weights have its dtype.
    bias: [E], added as `routing` says, or None.
    Among equal scores the lower id is chosen.  Sums have the same order whatever the number of rows.
    """
    return (route_triton if logits.is_cuda else route_reference)(logits, bias, routing)


@kernel
def _route_kernel(
    logits_ptr, bias_ptr, ids_ptr, weights_ptr, part_stride, row_stride,
    PARTS: tl.constexpr, NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SCORING: tl.constexpr,
    HAS_BIAS: tl.constexpr, LOGIT_BIAS: tl.constexpr,
    NORM: tl.constexpr, NORM_EPS: tl.constexpr, SCALE: tl.constexpr, N_GROUP: tl.constexpr, TOPK_GROUP: tl.constexpr,
    TOP2_SUM: tl.constexpr, EXACT: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program a row, which holds all logits."""
    pdl_trigger_and_wait(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    inside = expert < NUM_EXPERTS
    logits = load_sum(logits_ptr + row * row_stride + expert, part_stride, inside, PARTS, EXACT, EXACT)
    logits = tl.where(inside, logits, -float("inf"))
    if HAS_BIAS and LOGIT_BIAS:
        logits += tl.load(bias_ptr + expert, mask=inside, other=0.0).to(EXACT)
    if SCORING == "softmax":
        exps = tl.exp(logits - tl.max(logits, 0))
        scores = exps / tl.sum(exps, 0)
    elif SCORING == "sigmoid":
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        scores = logits
    choosing = scores
    if HAS_BIAS and not LOGIT_BIAS:
        choosing += tl.load(bias_ptr + expert, mask=inside, other=0.0).to(EXACT)
    # As a sort does: NaN is above all.  Every comparison with NaN would be false, and no expert be chosen.
    choosing = tl.where(choosing == choosing, choosing, float("inf"))
    left = inside
    if N_GROUP > 1:
        left = inside & best_groups(choosing, expert, inside, NUM_EXPERTS // N_GROUP, N_GROUP, TOPK_GROUP, TOP2_SUM)
    # Below every value that `ordered` gives.
    LEAST: tl.constexpr = -(1 << (EXACT.primitive_bitwidth - 1))
    order = tl.where(left, ordered(choosing), LEAST)
    chosen = expert < 0
    for _ in tl.static_range(TOP_K):
        best = tl.min(tl.where(order == tl.max(order, 0), expert, BLOCK), 0)
        chosen = chosen | (expert == best)
        order = tl.where(expert == best, LEAST, order)
    weights = tl.where(chosen, scores, 0.0)
    if SCORING == "topk_softmax":
        exps = tl.where(chosen, tl.exp(logits - tl.max(tl.where(chosen, logits, -float("inf")), 0)), 0.0)
        weights = exps / tl.sum(exps, 0)
    if NORM:
        weights = weights / (tl.sum(weights, 0) + NORM_EPS)
    place = row * TOP_K + tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(ids_ptr + place, expert.to(tl.int64), mask=chosen)
    tl.store(weights_ptr + place, weights * SCALE, mask=chosen)


@kernel
def ordered(values):
    """Integers in the order of float values without NaN.  A warp finds the largest of 32 bits in one instruction."""
    BITS: tl.constexpr = values.dtype.primitive_bitwidth
    # The sum turns -0 into 0.  Bits of negative values are in reverse order.
    bits = (values + 0.0).to(tl.int64 if BITS == 64 else tl.int32, bitcast=True)
    return bits ^ ((bits >> (BITS - 1)) & ((1 << (BITS - 1)) - 1))


@kernel
def best_groups(
    choosing, expert, inside, SIZE: tl.constexpr, N_GROUP: tl.constexpr, TOPK_GROUP: tl.constexpr,
    TOP2_SUM: tl.constexpr,
):  # fmt: skip
    """[BLOCK] bool: whether an expert's group, SIZE neighbours, is one of the best TOPK_GROUP."""
    group = expert // SIZE
    group_scores = tl.full(choosing.shape, -float("inf"), choosing.dtype)
    for one in tl.static_range(N_GROUP):
        members = inside & (group == one)
        score = tl.max(tl.where(members, choosing, -float("inf")), 0)
        if TOP2_SUM:
            first = tl.min(tl.where(members & (choosing == score), expert, choosing.shape[0]), 0)
            score += tl.max(tl.where(members & (expert != first), choosing, -float("inf")), 0)
        # A sum of infinities may be NaN.
        group_scores = tl.where(members, tl.where(score == score, score, float("inf")), group_scores)
    found = expert < 0
    for _ in tl.static_range(TOPK_GROUP):
        left = inside & ~found
        best = tl.max(tl.where(left, group_scores, -float("inf")), 0)
        first = tl.min(tl.where(left & (group_scores == best), group, N_GROUP), 0)
        found = found | (group == first)
    return found


def route_triton(logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """The ids are the reference's, but for scores that differ by a rounding; tolerance of the weights: 1e-5 of each."""
    parts = logits if logits.ndim == 3 else logits[None]
    num_parts, num_rows, top_k = parts.shape[0], parts.shape[1], routing.top_k
    require("route: logits", parts, (num_parts, num_rows, routing.num_experts), None, parts)
    if bias is not None:
        require("route: bias", bias, (routing.num_experts,), None, logits)
    parts, block = parts if parts.stride(2) == 1 else parts.contiguous(), power_of_two(routing.num_experts)
    ids = torch.empty(num_rows, top_k, dtype=torch.int64, device=logits.device)
    weights = logits.new_empty(num_rows, top_k)
    if num_rows:
        _route_kernel[(num_rows,)](
            *(parts, parts if bias is None else bias.contiguous(), ids, weights, *parts.stride()[:2]),
            PARTS=num_parts,
            NUM_EXPERTS=routing.num_experts,
            TOP_K=top_k,
            SCORING=routing.scoring,
            HAS_BIAS=bias is not None,
            LOGIT_BIAS=routing.logit_bias,
            NORM=routing.norm_topk_prob,
            # constexpr: as a run-time argument it would be rounded to float32.
            NORM_EPS=NORM_EPS,
            SCALE=routing.routed_scaling_factor,
            N_GROUP=routing.n_group,
            TOPK_GROUP=routing.topk_group,
            TOP2_SUM=routing.group_score == "top2_sum",
            EXACT=exact_type(logits.dtype),
            BLOCK=block,
            num_warps=max(block // WARP_EXPERTS, 1),
            **pdl_arguments(chip(logits)),
        )
    return ids, weights


def route_reference(logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    if logits.ndim == 3:
        logits = sum_parts_reference(logits, logits.dtype)
    if routing.logit_bias and bias is not None:
        logits, bias = logits + bias, None
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
