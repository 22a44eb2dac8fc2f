"""The top-k child tokens of each row of a draft model.  Scores include the Gumbel noise with which the target will
sample.

The reference is espalier/speculate/sampler.py:TorchSampler._best_allowed_children.  The first kernel has one program
per (row, split of the draft vocabulary).  The first kernel reads the logits once, and writes the top k and the sum of
exponentials of each split.  The second kernel merges the splits, one program per row.  The splits depend only on the
vocabulary size, so a row's children do not depend on the batch.

Differences from the reference (they can change the drafted tokens, but never the emitted tokens):
- Children are ordered by exact logits.  The reference orders by rounded log-probabilities, which may tie when the
  logits do not.
- Among equal logits, the lower draft id comes first.  With sampling parameters, the reference puts the lower target
  id first.  The two rules are the same if the target ids in d2t (the target id of each draft id) ascend.
- A child with score -inf has id 0.  Such a child does not exist: its row is void, or has fewer than k children.

Tolerance: 2**-16 from the reference's scores in float32, because tl.exp and the order of the sum over the vocabulary
differ from the reference.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from espalier.kernels.runtime.jit import kernel
from espalier.kernels.runtime.launch import chip, next_power_of_2, require, warps_for
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger_and_wait
from espalier.kernels.sampling.logit_processors import (
    COLUMNS,
    DraftedArguments,
    GatheredSlots,
    LogitsArguments,
    SlotArguments,
    as_column,
    drafted_arguments,
    leaves_logits_unchanged,
    load_row_arguments,
    logits_arguments,
    process_logits,
)
from espalier.kernels.sampling.noise import gumbel_noise, noise_keys

MAX_SPLIT_SIZE = 2048
# Splits per warp in the second kernel, which finds one child per step.  With few warps, a step needs few barriers.
SPLITS_PER_WARP = 512


def draft_topk_triton(
    logits: Tensor,
    d2t: Tensor | None,
    slots: GatheredSlots,
    first_positions: Tensor,
    position_offset: int,
    scores: Tensor,
    topk: int,
    drafted: tuple[Tensor, Tensor] | None = None,
    adds_noise: bool = True,
    mask: Tensor | None = None,
    position_stride: int = 0,
) -> tuple[Tensor, Tensor]:
    """Find each row's topk best children, best first: target ids [B, Q, K] int64, path scores [B, Q, K] float32.

    logits: [B, Q, Vd], as for sample_triton.  d2t: [Vd] int64, the target id of each draft id; None: the vocabularies
    are the same.  slots: the sampling parameters of each request.  The children of row q have position
    first_positions [B] + position_offset + q · position_stride.  scores: [B, Q] float32, the path scores of the rows.
    drafted: (tokens [B, E], ancestor_bits [B, Q, W]), drafted tokens, and for each row the bits of the tokens on its
    path.  mask: [B, Q, ceil(V / 32)] int32, bits of target ids that may be drafted (sampling/mask.py); None allows all.

    A child's score is its row's score plus the child's log-probability (at most 0), in float32.  The log-probability is
    the log_softmax of the processed logits.  If the temperature is above 0, they are divided by the temperature, and
    with `adds_noise` the noise is added before the log_softmax.  NaN counts as -inf.
    """
    batch, queries, vocab = logits.shape
    logits_args = logits_arguments(logits, slots.vocab if d2t is None else d2t.shape[0], slots, first_positions)
    require("draft_topk: scores", scores, (batch, queries), torch.float32, logits)
    # Without d2t, the kernel gets a placeholder pointer, which it does not read.
    target_ids = slots.ints if d2t is None else d2t.contiguous()
    if d2t is not None:
        require("draft_topk: d2t", target_ids, (vocab,), torch.int64, logits)
    drafted_args = drafted_arguments(drafted, 0, queries, slots, mask)
    ids = torch.empty(batch, queries, topk, dtype=torch.int64, device=logits.device)
    path_scores = torch.empty(batch, queries, topk, dtype=torch.float32, device=logits.device)
    if not ids.numel():
        return ids, path_scores
    split = min(MAX_SPLIT_SIZE, next_power_of_2(vocab))
    places, splits = batch * queries, -(-vocab // split)
    wide_dtype = torch.promote_types(logits.dtype, torch.float32)
    values = torch.empty(places, splits, topk, dtype=wide_dtype, device=logits.device)
    indices = torch.empty(places, splits, topk, dtype=torch.int32, device=logits.device)
    sums = torch.empty(places, splits, dtype=wide_dtype, device=logits.device)
    options = {"HAS_D2T": d2t is not None, "TOPK": topk, "enable_fp_fusion": False}
    options |= pdl_arguments(chip(logits))
    results = (values, indices, sums)
    _block_topk_kernel[(places, splits)](
        *(*results, vocab, target_ids, position_offset, position_stride, logits_args, slots.arguments, drafted_args),
        queries, splits, COLUMNS=COLUMNS, ADDS_NOISE=adds_noise, SPLIT_SIZE=split, num_warps=4, **options,
    )  # fmt: skip
    _merge_topk_kernel[(places,)](
        *(ids, path_scores, *results, target_ids, scores, *scores.stride(), queries, splits),
        SPLITS=next_power_of_2(splits), BLOCK_CHILDREN=next_power_of_2(topk),
        num_warps=warps_for(next_power_of_2(splits), SPLITS_PER_WARP), **options,
    )  # fmt: skip
    return ids, path_scores


@kernel
def _block_topk_kernel(
    values_ptr, indices_ptr, sums_ptr, draft_vocab, d2t_ptr, offset, stride, logits, slots, drafted, queries, splits,
    COLUMNS: tl.constexpr, ADDS_NOISE: tl.constexpr, SPLIT_SIZE: tl.constexpr,
    HAS_D2T: tl.constexpr, TOPK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Find a split's TOPK best (value, draft id), best first, and its sum of exp(value - best value)."""
    pdl_trigger_and_wait(USE_PDL)
    row_index = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    logits, slots, drafted = LogitsArguments(*logits), SlotArguments(*slots), DraftedArguments(*drafted)
    b, logits_ptr, position, row, drafted_row = load_row_arguments(
        row_index, queries, offset + row_index % queries * stride, logits, slots, drafted, COLUMNS
    )
    index = split * SPLIT_SIZE + tl.arange(0, SPLIT_SIZE)
    inside = index < draft_vocab
    exact: tl.constexpr = values_ptr.dtype.element_ty
    x = tl.load(logits_ptr + index, mask=inside, other=float("-inf")).to(exact)
    ids = index
    if HAS_D2T:
        # A row whose logits stay unchanged needs no target ids.  They are not read, because they take more bytes than
        # the logits.
        needs_ids = ~leaves_logits_unchanged(row) | (drafted.mask_words > 0)
        ids = tl.load(d2t_ptr + index, mask=inside & needs_ids, other=0).to(tl.int32)
    x = process_and_add_noise(x, ids, inside, b, position, slots, row, drafted_row, COLUMNS, ADDS_NOISE)
    has_nan = tl.max((x != x).to(tl.int32), 0)
    x = tl.where(x != x, float("-inf"), x)
    max_value = tl.max(x, 0)
    total = tl.sum(tl.exp(x - tl.where(max_value == float("-inf"), 0.0, max_value)), 0)
    split_index = row_index * splits + split
    tl.store(sums_ptr + split_index, tl.where(has_nan != 0, float("nan"), total))
    for k in range(TOPK):
        best_value = tl.max(x, 0)
        best_index = tl.min(tl.where(x == best_value, index, 2147483647), 0)
        tl.store(values_ptr + split_index * TOPK + k, best_value)
        tl.store(indices_ptr + split_index * TOPK + k, best_index)
        x = tl.where(index == best_index, float("-inf"), x)


@kernel
def process_and_add_noise(
    x, ids, is_token, b, position, slots, row, drafted, COLUMNS: tl.constexpr, ADDS_NOISE: tl.constexpr,
):  # fmt: skip
    """Returns the processed logits of row b of the batch.  If ADDS_NOISE and T > 0, the request's noise is added."""
    x = process_logits(x, ids, is_token, row, drafted)
    if ADDS_NOISE and row.temperature > 0:
        k0, k1 = noise_keys(tl.load(slots.ints_ptr + b * COLUMNS.num_ints + COLUMNS.seed), position)
        x = x + as_column(gumbel_noise(ids, k0, k1, x.dtype), x)
    return x


@kernel
def _merge_topk_kernel(
    ids_ptr, best_ptr, values_ptr, indices_ptr, sums_ptr, d2t_ptr,
    scores_ptr, scores_batch_stride, scores_query_stride, queries, splits,
    SPLITS: tl.constexpr, BLOCK_CHILDREN: tl.constexpr, HAS_D2T: tl.constexpr, TOPK: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """Find a row's best children among the best values of its splits.

    first_values: for each split, its best value that is not yet taken.  TOPK times, the best of the first_values is
    taken.  Among equal values the split with the lower index wins, because its draft ids are lower.  A child that does
    not exist has score -inf.
    """
    pdl_trigger_and_wait(USE_PDL)
    row = tl.program_id(0).to(tl.int64)
    split, child = tl.arange(0, SPLITS), tl.arange(0, BLOCK_CHILDREN)
    exists = split < splits
    of_split = row * splits + split
    first_values = tl.load(values_ptr + of_split * TOPK, mask=exists, other=float("-inf"))
    totals = tl.load(sums_ptr + of_split, mask=exists, other=0.0)
    top = tl.max(first_values, 0)
    total = tl.sum(totals * tl.exp(first_values - tl.where(top == float("-inf"), 0.0, top)), 0)
    num_taken = tl.zeros([SPLITS], tl.int32)
    values = tl.full([BLOCK_CHILDREN], float("-inf"), first_values.dtype)
    value_indices = tl.zeros([BLOCK_CHILDREN], tl.int32)
    for k in range(TOPK):
        best, best_split = tl.max(first_values, 0, return_indices=True)
        is_best = split == best_split
        value_index = tl.sum(tl.where(is_best, split * TOPK + num_taken, 0), 0)
        num_taken += is_best.to(tl.int32)
        has_next = exists & is_best & (num_taken < TOPK)
        next_values = tl.load(values_ptr + of_split * TOPK + num_taken, mask=has_next, other=float("-inf"))
        first_values = tl.where(is_best, next_values, first_values)
        values = tl.where(child == k, best, values)
        value_indices = tl.where(child == k, value_index, value_indices)
    logp = (values - top) - tl.log(total)
    # The comparison is also False for NaN.
    is_valid = logp > float("-inf")
    columns = tl.load(indices_ptr + row * splits * TOPK + value_indices, mask=is_valid, other=0)
    logp = tl.where(is_valid, tl.minimum(logp.to(tl.float32), 0.0), float("-inf"))
    ids = columns.to(tl.int64)
    if HAS_D2T:
        ids = tl.load(d2t_ptr + columns, mask=is_valid, other=0)
    row_score = tl.load(scores_ptr + row // queries * scores_batch_stride + row % queries * scores_query_stride)
    tl.store(ids_ptr + row * TOPK + child, tl.where(is_valid, ids, 0), mask=child < TOPK)
    tl.store(best_ptr + row * TOPK + child, row_score + logp, mask=child < TOPK)
