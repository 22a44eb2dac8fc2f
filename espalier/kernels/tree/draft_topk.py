"""The best continuations of the draft's rows, by scores that know the noise the target will draw with.

The reference is Sampler.children in espalier/speculate/sampler.py on a CPU.  First every split of the draft's
vocabulary gives its own best and its part of the softmax's sum, one pass over the logits; then a program a row merges
them. Splits follow from the vocabulary alone, so a row's children depend on nothing else.

Where it differs from the reference, all of which moves what is proposed and never what is emitted: children are ordered
by their exact logits, not by rounded log-probabilities, two of which may tie where the logits do not; ties go to the
lower index of the draft's vocabulary, where the reference goes by target id once parameters shape the draw (the same
order where d2t ascends); what scores -inf (void, or more children asked for than there are) has id 0.  Scores are
within 2**-16 of the reference's in float32: a sum over the vocabulary in another order, exp by tl.exp.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from espalier.kernels.runtime.launch import chip, kernel, power_of_two, require
from espalier.kernels.runtime.pdl import early, pdl_wait_if
from espalier.kernels.sampling.logit_processors import (
    COLUMNS,
    AboveArguments,
    LogitsArguments,
    SlotArguments,
    SlotRows,
    above_arguments,
    divided,
    leaves_logits,
    logits_arguments,
    row_of,
    shaped,
)
from espalier.kernels.sampling.noise import gumbel_at, noise_keys

if TYPE_CHECKING:
    import triton.language as tl

SPLIT = 2048


def draft_topk_triton(
    logits: Tensor,
    d2t: Tensor | None,
    rows: SlotRows,
    first: Tensor,
    offset: int,
    scores: Tensor,
    topk: int,
    above: tuple[Tensor, Tensor] | None = None,
    tau: float = 1.0,
    coupled: bool = True,
) -> tuple[Tensor, Tensor]:
    """The topk best children of each row: target ids [B, Q, K] int64 and path scores [B, Q, K] float32, best first.

    logits: [B, Q, Vd] as pick_triton takes them; d2t: [Vd] int64, their target ids, None where vocabularies are one;
    drawn at positions first [B] + offset; scores: [B, Q] float32 of the rows' own paths; above: (tokens [B, E],
    ancestor_bits [B, Q, W]) of the drafted tokens above each row.  A child's score is its path's plus its
    log-probability, at most 0, in float32; temperature 0: of the shaped logits, else of (shaped logits / T + noise) /
    tau, or not `coupled`, of shaped logits / T.  NaN counts as -inf.
    """
    batch, queries, vocab = logits.shape
    given = logits_arguments(logits, rows.vocab if d2t is None else d2t.shape[0], rows, first)
    require("scores", scores, (batch, queries), torch.float32, logits)
    of_target = rows.ints if d2t is None else d2t.contiguous()
    if d2t is not None:
        require("d2t", of_target, (vocab,), torch.int64, logits)
    hanging = above_arguments(above, 0, queries, rows)
    ids = torch.empty(batch, queries, topk, dtype=torch.int64, device=logits.device)
    best = torch.empty(batch, queries, topk, dtype=torch.float32, device=logits.device)
    if not ids.numel():
        return ids, best
    split = min(SPLIT, power_of_two(vocab))
    places, splits = batch * queries, -(-vocab // split)
    exact = torch.promote_types(logits.dtype, torch.float32)
    values = torch.empty(places, splits, topk, dtype=exact, device=logits.device)
    indices = torch.empty(places, splits, topk, dtype=torch.int32, device=logits.device)
    sums = torch.empty(places, splits, 2, dtype=exact, device=logits.device)
    # A multiply-add rounds once where the reference rounds twice.
    how = {"HAS_D2T": d2t is not None, "TOPK": topk, "enable_fp_fusion": False}
    how |= early(chip(logits))
    of_splits = (values, indices, sums)
    _block_topk_kernel[(places, splits)](
        *(*of_splits, vocab, of_target, offset, given, rows.arguments, hanging, queries, splits),
        COLUMNS=COLUMNS,
        TAU=float(tau),
        COUPLED=coupled,
        SPLIT=split,
        num_warps=4,
        **how,
    )
    candidates = power_of_two(splits * topk)
    _merge_topk_kernel[(places,)](
        *(ids, best, *of_splits, of_target, scores, *scores.stride(), queries, splits),
        SPLITS=power_of_two(splits),
        CANDIDATES=candidates,
        CHILDREN=power_of_two(topk),
        # A step a child, each as long as the warps wait for each other.
        num_warps=min(max(candidates // 256, 1), 4),
        **how,
    )
    return ids, best


@kernel
def _block_topk_kernel(
    values_ptr,
    indices_ptr,
    sums_ptr,
    draft_vocab,
    d2t_ptr,
    offset,
    logits,
    slots,
    above,
    queries,
    splits,
    COLUMNS: tl.constexpr,
    TAU: tl.constexpr,
    COUPLED: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_D2T: tl.constexpr,
    TOPK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A split's TOPK best (value, draft index), its maximum and its sum of exponentials over that."""
    pdl_wait_if(DEPENDENT)
    out = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    logits, slots, above = LogitsArguments(*logits), SlotArguments(*slots), AboveArguments(*above)
    b, logits_ptr, position, row, row_above = row_of(out, queries, offset, logits, slots, above, COLUMNS)
    index = split * SPLIT + tl.arange(0, SPLIT)
    inside = index < draft_vocab
    exact: tl.constexpr = values_ptr.dtype.element_ty
    x = tl.load(logits_ptr + index, mask=inside, other=float("-inf")).to(exact)
    ids = index
    if HAS_D2T:
        # Who asks for nothing needs no ids, which are more bytes than the logits.
        ids = tl.load(d2t_ptr + index, mask=inside & ~leaves_logits(row), other=0).to(tl.int32)
    x = shaped(x, ids, inside, row, row_above)
    if COUPLED and row.temperature > 0:
        k0, k1 = noise_keys(tl.load(slots.ints_ptr + b * COLUMNS.num_ints + COLUMNS.seed), position)
        x = x + gumbel_at(ids, k0, k1, exact)
        if TAU != 1.0:
            x = divided(x, tl.zeros_like(x) + TAU)
    nan = tl.max((x != x).to(tl.int32), 0)
    x = tl.where(x != x, float("-inf"), x)
    top = tl.max(x, 0)
    total = tl.sum(tl.exp(x - tl.where(top == float("-inf"), 0.0, top)), 0)
    part = out * splits + split
    tl.store(sums_ptr + part * 2, top)
    tl.store(sums_ptr + part * 2 + 1, tl.where(nan != 0, float("nan"), total))
    for k in range(TOPK):
        best = tl.max(x, 0)
        at = tl.min(tl.where(x == best, index, 2147483647), 0)
        tl.store(values_ptr + part * TOPK + k, best)
        tl.store(indices_ptr + part * TOPK + k, at)
        x = tl.where(index == at, float("-inf"), x)


@kernel
def _merge_topk_kernel(
    ids_ptr,
    best_ptr,
    values_ptr,
    indices_ptr,
    sums_ptr,
    d2t_ptr,
    scores_ptr,
    scores_batch_stride,
    scores_query_stride,
    queries,
    splits,
    SPLITS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    CHILDREN: tl.constexpr,
    HAS_D2T: tl.constexpr,
    TOPK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A row's TOPK best of its splits' best.  Equal candidates lie in draft order, so the first is the lowest."""
    pdl_wait_if(DEPENDENT)
    out = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    part = out * splits + split
    tops = tl.load(sums_ptr + part * 2, mask=split < splits, other=float("-inf"))
    totals = tl.load(sums_ptr + part * 2 + 1, mask=split < splits, other=0.0)
    top = tl.max(tops, 0)
    total = tl.sum(totals * tl.exp(tops - tl.where(top == float("-inf"), 0.0, top)), 0)
    candidate = tl.arange(0, CANDIDATES)
    there = candidate < splits * TOPK
    values = tl.load(values_ptr + out * splits * TOPK + candidate, mask=there, other=float("-inf"))
    child = tl.arange(0, CHILDREN)
    kept = tl.full([CHILDREN], float("-inf"), values.dtype)
    chosen = tl.zeros([CHILDREN], tl.int32)
    for k in range(TOPK):
        best = tl.max(values, 0)
        at = tl.min(tl.where(values == best, candidate, 2147483647), 0)
        kept = tl.where(child == k, best, kept)
        chosen = tl.where(child == k, at, chosen)
        values = tl.where(candidate == at, float("-inf"), values)
    logp = (kept - top) - tl.log(total)
    # NaN is not over -inf.
    real = (child < TOPK) & (logp > float("-inf"))
    ids = tl.load(indices_ptr + out * splits * TOPK + chosen, mask=real, other=0).to(tl.int64)
    if HAS_D2T:
        ids = tl.load(d2t_ptr + ids, mask=real, other=0)
    own = tl.load(scores_ptr + out // queries * scores_batch_stride + out % queries * scores_query_stride)
    path = own + tl.where(real, tl.minimum(logp.to(tl.float32), 0.0), float("-inf"))
    tl.store(ids_ptr + out * TOPK + child, tl.where(real, ids, 0), mask=child < TOPK)
    tl.store(best_ptr + out * TOPK + child, path, mask=child < TOPK)
