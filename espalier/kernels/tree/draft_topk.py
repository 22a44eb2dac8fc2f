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

Tolerance: 2**-16 of the reference's scores, because the sum over the vocabulary has another reduction order, exp is
tl.exp, and values of float64 logits are rounded to float32 when they are ranked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from espalier.kernels.runtime.launch import chip, exact_type, kernel, power_of_two, require
from espalier.kernels.runtime.pdl import early, pdl_wait_if
from espalier.kernels.sampling.logit_processors import (
    COLUMNS,
    AboveArguments,
    LogitsArguments,
    SlotArguments,
    SlotRows,
    above_arguments,
    beside,
    leaves_logits,
    logits_arguments,
    row_of,
    shaped,
)
from espalier.kernels.sampling.noise import gumbel_at, noise_keys
from espalier.kernels.tree.select_beams import order_of, score_of, usable_score

if TYPE_CHECKING:
    import triton.language as tl

SPLIT = 2048
# Keys that a warp ranks: many, as each child is one step, and its time is mostly the warps' synchronisation.
KEYS_A_WARP = 256


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
    keys = torch.empty(places, splits, topk, dtype=torch.int64, device=logits.device)
    sums = torch.empty(places, splits, dtype=torch.float32, device=logits.device)
    # A fused multiply-add rounds once; the reference rounds twice.
    options = {"HAS_D2T": d2t is not None, "enable_fp_fusion": False, **early(chip(logits))}
    _block_topk_kernel[(places, splits)](
        *(keys, sums, vocab, of_target, offset, stride, given, rows.arguments, hanging, queries, splits),
        COLUMNS=COLUMNS,
        COUPLED=coupled,
        SPLIT=split,
        TOPK=topk,
        EXACT=exact_type(logits.dtype),
        num_warps=4,
        **options,
    )
    _merge_topk_kernel[(places,)](
        *(ids, best, keys, sums, of_target, scores, *scores.stride(), queries, splits, split),
        **merge_constants(splits, topk, topk),
        **options,
    )
    return ids, best


def merge_constants(splits: int, kept: int, topk: int) -> dict[str, int]:
    """Launch arguments for a program that calls `merge_splits`."""
    of_splits, of_split, children = power_of_two(splits), power_of_two(kept), power_of_two(topk)
    warps = max(of_splits, children * of_split) // KEYS_A_WARP
    sizes = {"SPLITS": of_splits, "KEPT": of_split, "CHILDREN": children, "TOPK": topk}
    return {**sizes, "num_warps": min(max(warps, 1), 16)}


@kernel
def _block_topk_kernel(
    keys_ptr, sums_ptr, draft_vocab, d2t_ptr, offset, stride, logits, slots, above, queries, splits,
    COLUMNS: tl.constexpr, COUPLED: tl.constexpr, SPLIT: tl.constexpr, HAS_D2T: tl.constexpr, TOPK: tl.constexpr,
    EXACT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One split: the keys of its TOPK best draft indices, best first, and the sum of exp(value - best value)."""
    pdl_wait_if(DEPENDENT)
    out = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    logits, slots, above = LogitsArguments(*logits), SlotArguments(*slots), AboveArguments(*above)
    b, logits_ptr, position, row, row_above = row_of(
        out, queries, offset + out % queries * stride, logits, slots, above, COLUMNS
    )
    index = split * SPLIT + tl.arange(0, SPLIT)
    inside = index < draft_vocab
    x = tl.load(logits_ptr + index, mask=inside, other=float("-inf")).to(EXACT)
    ids = index
    if HAS_D2T:
        # Who asks for nothing needs no ids, which are more bytes than the logits.
        needs_ids = ~leaves_logits(row) | (above.mask_words > 0)
        ids = tl.load(d2t_ptr + index, mask=inside & needs_ids, other=0).to(tl.int32)
    x = shaped_with_noise(x, ids, inside, b, position, slots, row, row_above, COLUMNS, COUPLED).to(tl.float32)
    split_index = out * splits + split
    tl.store(sums_ptr + split_index, sum_of_exp(x))
    keys, none = keys_of(x, index), no_key()
    for k in range(TOPK):
        best = tl.max(keys, 0)
        tl.store(keys_ptr + split_index * TOPK + k, best)
        keys = tl.where(keys == best, none, keys)


@kernel
def shaped_with_noise(
    x, ids, inside, b, position, slots, row, above, COLUMNS: tl.constexpr, COUPLED: tl.constexpr,
):  # fmt: skip
    """`shaped` logits of row b of the batch; if COUPLED, plus the noise of a request that samples."""
    x = shaped(x, ids, inside, row, above)
    if COUPLED and row.temperature > 0:
        k0, k1 = noise_keys(tl.load(slots.ints_ptr + b * COLUMNS.num_ints + COLUMNS.seed), position)
        x = x + beside(gumbel_at(ids, k0, k1, x.dtype), x)
    return x


@kernel
def _merge_topk_kernel(
    ids_ptr, best_ptr, keys_ptr, sums_ptr, d2t_ptr, scores_ptr, scores_batch_stride, scores_query_stride,
    queries, splits, split_size,
    SPLITS: tl.constexpr, KEPT: tl.constexpr, CHILDREN: tl.constexpr, HAS_D2T: tl.constexpr, TOPK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    pdl_wait_if(DEPENDENT)
    out = tl.program_id(0).to(tl.int64)
    columns, logp = merge_splits(keys_ptr, sums_ptr, out, splits, split_size, TOPK, SPLITS, KEPT, CHILDREN, TOPK)
    child = tl.arange(0, CHILDREN)
    valid = logp > float("-inf")
    ids = columns.to(tl.int64)
    if HAS_D2T:
        ids = tl.load(d2t_ptr + columns, mask=valid, other=0)
    row_score = tl.load(scores_ptr + out // queries * scores_batch_stride + out % queries * scores_query_stride)
    tl.store(ids_ptr + out * TOPK + child, tl.where(valid, ids, 0), mask=child < TOPK)
    tl.store(best_ptr + out * TOPK + child, row_score + logp, mask=child < TOPK)


@kernel
def merge_splits(
    keys_ptr, sums_ptr, row, splits, split_size, kept,
    SPLITS: tl.constexpr, KEPT: tl.constexpr, CHILDREN: tl.constexpr, TOPK: tl.constexpr,
):  # fmt: skip
    """The best children of a row: their columns and log-probabilities, float32 and at most 0, [CHILDREN] each.  Those
    that do not exist have -inf.

    The row has `splits` splits of split_size columns.  Each has the keys of its `kept` best columns, best first, and
    the sum of exp(value - best value).  The best TOPK are in the splits whose heads are the best TOPK.
    """
    split, place, none = tl.arange(0, SPLITS), tl.arange(0, KEPT), no_key()
    of_row = keys_ptr + row * splits * kept
    heads = tl.load(of_row + split * kept, mask=split < splits, other=none)
    totals = tl.load(sums_ptr + row * splits + split, mask=split < splits, other=0.0)
    value, _ = parts_of(heads)
    top = tl.max(value, 0)
    total = tl.sum(totals * tl.exp(value - tl.where(top == float("-inf"), 0.0, top)), 0)
    chosen = _best_keys(heads, CHILDREN, TOPK)
    _, head_columns = parts_of(chosen)
    of_split = of_row + (head_columns // split_size) * kept
    is_key = (chosen != none)[:, None] & (place < kept)[None, :]
    keys = tl.load(of_split[:, None] + place[None, :], mask=is_key, other=none)
    values, columns = parts_of(_best_keys(tl.reshape(keys, [CHILDREN * KEPT]), CHILDREN, TOPK))
    logp = (values - top) - tl.log(total)
    # False for NaN as well.
    valid = logp > float("-inf")
    return tl.where(valid, columns, 0), tl.where(valid, tl.minimum(logp, 0.0), float("-inf"))


@kernel
def _best_keys(keys, CHILDREN: tl.constexpr, TOPK: tl.constexpr):
    """The TOPK best keys, best first: [CHILDREN]."""
    child, none = tl.arange(0, CHILDREN), no_key()
    found = tl.zeros([CHILDREN], tl.int64) + none
    for k in range(TOPK):
        best = tl.max(keys, 0)
        found = tl.where(child == k, best, found)
        keys = tl.where(keys == best, none, keys)
    return found


@kernel
def no_key():
    """The key of no column, below those of all columns; it scores -inf."""
    return tl.full([], -9187343244130779136, tl.int64)


@kernel
def keys_of(x, index):
    """int64: higher for a better score; of equal scores, for the lower index.  x: float32; NaN counts as -inf."""
    return (order_of(usable_score(x)).to(tl.int64) << 32) | (0xFFFFFFFF - index.to(tl.int64))


@kernel
def parts_of(key):
    """(score, index) of a key."""
    return score_of((key >> 32).to(tl.int32)), (0xFFFFFFFF - (key & 0xFFFFFFFF)).to(tl.int32)


@kernel
def sum_of_exp(x):
    """The sum of exp(x - best x) over the first dimension; NaN if an x is NaN or infinite."""
    top = tl.max(tl.where(x == x, x, float("-inf")), 0)
    return tl.sum(tl.exp(x - tl.where(top == float("-inf"), 0.0, top)), 0)
