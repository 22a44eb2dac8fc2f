"""The routing of a mixture of experts: the best K of E experts for each row, and their weights.

Grid: one program a row.  Computed in float32 (float64 for float64).
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from espalier.kernels.layers.linear import load_sum
from espalier.kernels.ops.experts import Routing
from espalier.kernels.runtime.jit import kernel
from espalier.kernels.runtime.launch import chip, exact_type, power_of_two, require
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger_and_wait

# Experts that a warp holds.  Within a warp, reductions need no shared memory.
WARP_EXPERTS = 512


@kernel
def _route_kernel(
    logits_ptr, bias_ptr, scale_ptr, ids_ptr, weights_ptr, part_stride, row_stride,
    PARTS: tl.constexpr, NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SCORING: tl.constexpr,
    HAS_BIAS: tl.constexpr, LOGIT_BIAS: tl.constexpr,
    NORM: tl.constexpr, NORM_EPS: tl.constexpr, SCALE: tl.constexpr, N_GROUP: tl.constexpr, TOPK_GROUP: tl.constexpr,
    TOP2_SUM: tl.constexpr, EXACT: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program a row, which holds all logits.  scale_ptr: of each expert's weight, or None."""
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
    weights *= SCALE
    if scale_ptr is not None:
        weights *= tl.load(scale_ptr + expert, mask=inside, other=0.0).to(EXACT)
    tl.store(weights_ptr + place, weights, mask=chosen)


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


def route(logits: Tensor, bias: Tensor | None, routing: Routing, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The ids are the reference's, but for scores that differ by a rounding; tolerance of the weights: 1e-5 of each."""
    parts = logits if logits.ndim == 3 else logits[None]
    num_parts, num_rows, top_k = parts.shape[0], parts.shape[1], routing.top_k
    require("route: logits", parts, (num_parts, num_rows, routing.num_experts), None, parts)
    for name, of_experts in (("bias", bias), ("scale", scale)):
        if of_experts is not None:
            require(f"route: {name}", of_experts, (routing.num_experts,), None, logits)
    parts, block = parts if parts.stride(2) == 1 else parts.contiguous(), power_of_two(routing.num_experts)
    ids = torch.empty(num_rows, top_k, dtype=torch.int64, device=logits.device)
    weights = logits.new_empty(num_rows, top_k)
    if num_rows:
        _route_kernel[(num_rows,)](
            *(parts, parts if bias is None else bias.contiguous(), None if scale is None else scale.contiguous()),
            *(ids, weights, *parts.stride()[:2]),
            PARTS=num_parts,
            NUM_EXPERTS=routing.num_experts,
            TOP_K=top_k,
            SCORING=routing.scoring,
            HAS_BIAS=bias is not None,
            LOGIT_BIAS=routing.logit_bias,
            NORM=routing.norm_topk_prob,
            # constexpr: as a run-time argument it would be rounded to float32.
            NORM_EPS=routing.norm_eps,
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
