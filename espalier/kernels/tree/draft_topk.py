"""The top-k children of each draft row, scored with the Gumbel noise that the target will sample with.

The reference is Sampler.children in espalier/speculate/sampler.py on a CPU.  The first kernel has one program per (row,
split of the draft vocabulary): it reads the logits once and writes the split's top k, maximum and sum of exponentials.
The second kernel merges the splits, one program per row.  The splits depend only on the vocabulary size, so a row's
children do not depend on the batch.

Differences from the reference (they can change which tokens are drafted, never which tokens are emitted):
- Children are ordered by exact logits.  The reference orders by rounded log-probabilities, which may tie when the
  logits do not.
- Ties go to the lower draft index.  With sampling parameters the reference breaks ties by the lower target id, which is
  the same if d2t ascends.
- A child that scores -inf has id 0: the row is void, or has fewer than k children.

Tolerance: 2**-16 of the reference's scores in float32, because the sum over the vocabulary has another reduction order
and exp is tl.exp.
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
    coupled: bool = True,
    mask: Tensor | None = None,
    stride: int = 0,
) -> tuple[Tensor, Tensor]:
    """The topk best children of each row: target ids [B, Q, K] int64 and path scores [B, Q, K] float32, best first.

    logits: [B, Q, Vd], in the form that pick_triton takes.  d2t: [Vd] int64, the target id of each draft id; None: the
    vocabularies are the same.  rows: the sampling parameters of each request.  first [B] + offset + row · stride: the
    position of the children of a row.  scores: [B, Q] float32, the path scores of the rows.  above: (tokens [B, E],
    ancestor_bits [B, Q, W]): the drafted tokens and, for each row, the bits of those on its path.  mask: [B, Q,
    ceil(V / 32)] int32, the bits of target ids that may be drafted (sampling/mask.py); None allows all.

    A child's score is its parent row's score plus the child's log-probability (at most 0), in float32.  The
    log-probability is the log_softmax of: the processed logits at temperature 0; processed logits / T + noise if
    coupled; processed logits / T if not.  NaN counts as -inf.
    """
    batch, queries, vocab = logits.shape
    given = logits_arguments(logits, rows.vocab if d2t is None else d2t.shape[0], rows, first)
    require("draft_topk: scores", scores, (batch, queries), torch.float32, logits)
    # A placeholder pointer if there is no d2t; the kernel does not read it.
    of_target = rows.ints if d2t is None else d2t.contiguous()
    if d2t is not None:
        require("draft_topk: d2t", of_target, (vocab,), torch.int64, logits)
    hanging = above_arguments(above, 0, queries, rows, mask)
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
    # A fused multiply-add rounds once; the reference rounds twice.
    options = {"HAS_D2T": d2t is not None, "TOPK": topk, "enable_fp_fusion": False}
    options |= early(chip(logits))
    of_splits = (values, indices, sums)
    _block_topk_kernel[(places, splits)](
        *(*of_splits, vocab, of_target, offset, stride, given, rows.arguments, hanging, queries, splits),
        COLUMNS=COLUMNS,
        COUPLED=coupled,
        SPLIT=split,
        num_warps=4,
        **options,
    )
    candidates = power_of_two(splits * topk)
    _merge_topk_kernel[(places,)](
        *(ids, best, *of_splits, of_target, scores, *scores.stride(), queries, splits),
        SPLITS=power_of_two(splits),
        CANDIDATES=candidates,
        CHILDREN=power_of_two(topk),
        # Few warps: each child is one step, and its time is mostly the warps' synchronisation.
        num_warps=min(max(candidates // 256, 1), 4),
        **options,
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
    stride,
    logits,
    slots,
    above,
    queries,
    splits,
    COLUMNS: tl.constexpr,
    COUPLED: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_D2T: tl.constexpr,
    TOPK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One split: its TOPK best (value, draft index), its maximum, and the sum of exp(value - maximum)."""
    pdl_wait_if(DEPENDENT)
    out = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    logits, slots, above = LogitsArguments(*logits), SlotArguments(*slots), AboveArguments(*above)
    b, logits_ptr, position, row, row_above = row_of(
        out, queries, offset + out % queries * stride, logits, slots, above, COLUMNS
    )
    index = split * SPLIT + tl.arange(0, SPLIT)
    inside = index < draft_vocab
    exact: tl.constexpr = values_ptr.dtype.element_ty
    x = tl.load(logits_ptr + index, mask=inside, other=float("-inf")).to(exact)
    ids = index
    if HAS_D2T:
        # Who asks for nothing needs no ids, which are more bytes than the logits.
        needs_ids = ~leaves_logits(row) | (above.mask_words > 0)
        ids = tl.load(d2t_ptr + index, mask=inside & needs_ids, other=0).to(tl.int32)
    x = shaped_with_noise(x, ids, inside, b, position, slots, row, row_above, COLUMNS, COUPLED)
    nan = tl.max((x != x).to(tl.int32), 0)
    x = tl.where(x != x, float("-inf"), x)
    top = tl.max(x, 0)
    total = tl.sum(tl.exp(x - tl.where(top == float("-inf"), 0.0, top)), 0)
    split_index = out * splits + split
    tl.store(sums_ptr + split_index * 2, top)
    tl.store(sums_ptr + split_index * 2 + 1, tl.where(nan != 0, float("nan"), total))
    for k in range(TOPK):
        best = tl.max(x, 0)
        best_index = tl.min(tl.where(x == best, index, 2147483647), 0)
        tl.store(values_ptr + split_index * TOPK + k, best)
        tl.store(indices_ptr + split_index * TOPK + k, best_index)
        x = tl.where(index == best_index, float("-inf"), x)


@kernel
def shaped_with_noise(
    x, ids, inside, b, position, slots, row, above, COLUMNS: tl.constexpr, COUPLED: tl.constexpr,
):  # fmt: skip
    """`shaped` logits of row b of the batch; if COUPLED, plus the noise of a request that samples."""
    x = shaped(x, ids, inside, row, above)
    if COUPLED and row.temperature > 0:
        k0, k1 = noise_keys(tl.load(slots.ints_ptr + b * COLUMNS.num_ints + COLUMNS.seed), position)
        x = x + gumbel_at(ids, k0, k1, x.dtype)
    return x


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
    """Merge a row's splits.  Equal candidates are in the order of draft indices, so the first one has the lowest."""
    pdl_wait_if(DEPENDENT)
    out = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    split_index = out * splits + split
    tops = tl.load(sums_ptr + split_index * 2, mask=split < splits, other=float("-inf"))
    totals = tl.load(sums_ptr + split_index * 2 + 1, mask=split < splits, other=0.0)
    top = tl.max(tops, 0)
    total = tl.sum(totals * tl.exp(tops - tl.where(top == float("-inf"), 0.0, top)), 0)
    candidate = tl.arange(0, CANDIDATES)
    mask = candidate < splits * TOPK
    values = tl.load(values_ptr + out * splits * TOPK + candidate, mask=mask, other=float("-inf"))
    child = tl.arange(0, CHILDREN)
    child_value = tl.full([CHILDREN], float("-inf"), values.dtype)
    child_candidate = tl.zeros([CHILDREN], tl.int32)
    for k in range(TOPK):
        best = tl.max(values, 0)
        best_candidate = tl.min(tl.where(values == best, candidate, 2147483647), 0)
        child_value = tl.where(child == k, best, child_value)
        child_candidate = tl.where(child == k, best_candidate, child_candidate)
        values = tl.where(candidate == best_candidate, float("-inf"), values)
    logp = (child_value - top) - tl.log(total)
    # False for NaN as well.
    valid = (child < TOPK) & (logp > float("-inf"))
    ids = tl.load(indices_ptr + out * splits * TOPK + child_candidate, mask=valid, other=0).to(tl.int64)
    if HAS_D2T:
        ids = tl.load(d2t_ptr + ids, mask=valid, other=0)
    row_score = tl.load(scores_ptr + out // queries * scores_batch_stride + out % queries * scores_query_stride)
    path_score = row_score + tl.where(valid, tl.minimum(logp.to(tl.float32), 0.0), float("-inf"))
    tl.store(ids_ptr + out * TOPK + child, tl.where(valid, ids, 0), mask=child < TOPK)
    tl.store(best_ptr + out * TOPK + child, path_score, mask=child < TOPK)
