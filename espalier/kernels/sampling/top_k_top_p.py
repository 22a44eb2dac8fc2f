"""Top-k, top-p and min-p without sorting a row, and the sampling from the remaining tokens.

The reference is `apply_filters` in espalier/sampling/pick.py.  The cutoff is the smallest logit that stays.  Bisection
finds the cutoff.  Each pass over the row computes an exact sum over the tokens above a pivot: their number, or their
probability mass as an integer.  Then one end of the search interval moves to a logit of the row.  A row of a thousand
distinct values takes about ten passes, and no row takes more than a hundred.  Of equal logits at the cutoff, the lower
ids stay.

A token's mass is exp(logit - largest logit), by tl.exp.  In float32 the relative error of a mass is at most 2**-19,
unless the mass is too small to count.  So kernel and reference may differ on a token whose cumulative mass is this
close to top_p: one keeps the token, and the other drops it.  The kernel itself always decides in the same way.
"""

from __future__ import annotations

import triton.language as tl

from espalier.kernels.runtime.jit import float_to_key, kernel, key_to_float
from espalier.kernels.sampling.logit_processors import process_logits
from espalier.kernels.sampling.noise import gumbel_noise


@kernel
def load_processed_block(logits_ptr, start, vocab, dtype: tl.constexpr, row, drafted, BLOCK: tl.constexpr):
    """Returns (x, ids) of a block of a row: logits after process_logits (-inf past the vocabulary), and token ids.
    row, drafted: RowParams, DraftedRow."""
    ids = start + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + ids, mask=ids < vocab, other=float("-inf"))
    return process_logits(x.to(dtype), ids, ids < vocab, row, drafted), ids


@kernel
def probability_mass(x, max_logit):
    """Returns a token's mass in units of 2**-40 of the largest mass.  Integers have the same sum in any order."""
    return (tl.exp(x - max_logit) * 1099511627776.0).to(tl.int64)


@kernel
def next_pivot(low, high, step):
    """Returns a value in [low, high).

    Before step 24 the pivot is the middle of low and high, which needs few steps for usual logits.  From step 24 on,
    the pivot is the median of all floats between low and high, which limits the number of steps for any logits."""
    low_key = float_to_key(low)
    high_key = float_to_key(high)
    median_float = key_to_float((low_key & high_key) + ((low_key ^ high_key) >> 1))
    middle = tl.where(low == float("-inf"), high - 16.0, low + (high - low) * 0.5)
    pivot = tl.where(step < 24, middle, median_float)
    return tl.where((pivot >= low) & (pivot < high), pivot, low)


@kernel
def find_cutoff(
    logits_ptr, vocab, row, drafted, max_logit, min_cutoff, target_sum, BY_MASS: tl.constexpr, BLOCK: tl.constexpr
):
    """Returns (cutoff, sum over the tokens above the cutoff).  A sum is a number of tokens; with BY_MASS, their mass.

    The cutoff is the largest value for which the sum over the tokens at or above the cutoff is at least `target_sum`,
    but at least min_cutoff.  max_logit: the row's largest logit, which must be finite."""
    exact: tl.constexpr = max_logit.dtype
    low = min_cutoff
    high = max_logit
    sum_above = target_sum * 0
    step = 0
    while low < high:
        pivot = next_pivot(low, high, step)
        sums = tl.zeros([BLOCK], tl.int64)
        min_above = tl.full([BLOCK], float("inf"), exact)
        max_below = tl.full([BLOCK], float("-inf"), exact)
        for start in range(0, vocab, BLOCK):
            x, _ids = load_processed_block(logits_ptr, start, vocab, exact, row, drafted, BLOCK)
            if BY_MASS:
                sums += tl.where(x > pivot, probability_mass(x, max_logit), 0)
            else:
                sums += (x > pivot).to(tl.int64)
            min_above = tl.minimum(min_above, tl.where(x > pivot, x, float("inf")))
            max_below = tl.maximum(max_below, tl.where(x > pivot, float("-inf"), x))
        sum_above_pivot = tl.sum(sums, 0)
        if sum_above_pivot >= target_sum:
            low = tl.min(min_above, 0)
        else:
            high = tl.max(max_below, 0)
            sum_above = sum_above_pivot
        step += 1
    return high, sum_above


@kernel
def remaining_mass(logits_ptr, vocab, row, drafted, max_logit, cutoff, num_ties, BLOCK: tl.constexpr):
    """Returns the mass of the tokens above `cutoff` and of the `num_ties` tokens at `cutoff` that stay."""
    masses = tl.zeros([BLOCK], tl.int64)
    for start in range(0, vocab, BLOCK):
        x, _ids = load_processed_block(logits_ptr, start, vocab, max_logit.dtype, row, drafted, BLOCK)
        masses += tl.where(x > cutoff, probability_mass(x, max_logit), 0)
    return tl.sum(masses, 0) + num_ties * mass_of_value(cutoff, max_logit, BLOCK)


@kernel
def mass_of_value(logit, max_logit, BLOCK: tl.constexpr):
    """Returns probability_mass of a single logit."""
    # The mass is computed for a whole block, because Triton's interpreter may round exp of a single number differently.
    return tl.max(probability_mass(tl.zeros([BLOCK], max_logit.dtype) + logit, max_logit), 0)


@kernel
def filter_cutoff(logits_ptr, vocab, row, drafted, max_logit, top_k, top_p, BLOCK: tl.constexpr):
    """Returns (cutoff, number of tokens at the cutoff that stay: the lowest ids).  top_k: int64; 0 for no top-k."""
    cutoff = max_logit - float("inf")
    num_ties = top_k * 0 + vocab
    if top_k > 0:
        cutoff, above = find_cutoff(logits_ptr, vocab, row, drafted, max_logit, cutoff, top_k, False, BLOCK)
        num_ties = top_k - above
    if top_p < 1:
        remaining = remaining_mass(logits_ptr, vocab, row, drafted, max_logit, cutoff, num_ties, BLOCK)
        target_mass = tl.ceil(remaining.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64)
        # exp(-28) is less than one unit of 2**-40, so the mass of lower logits is 0.
        min_cutoff = tl.maximum(cutoff, max_logit - 28.0)
        value, above = find_cutoff(logits_ptr, vocab, row, drafted, max_logit, min_cutoff, target_mass, True, BLOCK)
        mass_of_tie = tl.maximum(mass_of_value(value, max_logit, BLOCK), 1)
        # target_mass is at most `remaining`, so the new num_ties is never above the number of ids that top-k kept.
        num_ties = (target_mass - above + mass_of_tie - 1) // mass_of_tie
        cutoff = value
    return cutoff, num_ties


@kernel
def draw_filtered(logits_ptr, vocab, row, drafted, max_logit, filters, k0, k1, BLOCK: tl.constexpr):
    """Returns the id with the largest logit plus noise, among the tokens that filters (top_k, top_p, min_p) leave.
    Among equal values, the lower id wins.  k0, k1: the noise keys, from noise_keys."""
    exact: tl.constexpr = max_logit.dtype
    top_k, top_p, min_p = filters
    cutoff, num_ties = filter_cutoff(logits_ptr, vocab, row, drafted, max_logit, top_k, top_p, BLOCK)
    best = tl.full([BLOCK], float("-inf"), exact)
    best_ids = tl.arange(0, BLOCK)
    num_ties_before = num_ties * 0
    for start in range(0, vocab, BLOCK):
        x, ids = load_processed_block(logits_ptr, start, vocab, exact, row, drafted, BLOCK)
        is_tie = (x == cutoff).to(tl.int64)
        rank = num_ties_before + tl.cumsum(is_tie, 0) - is_tie
        is_kept = (x > cutoff) | ((is_tie != 0) & (rank < num_ties))
        is_kept = is_kept & (tl.exp(x - max_logit) >= min_p.to(exact))
        num_ties_before += tl.sum(is_tie, 0)
        if tl.max(is_kept.to(tl.int32), 0) > 0:
            drawn = tl.where(is_kept, x + gumbel_noise(ids, k0, k1, exact), float("-inf"))
            best_ids = tl.where(drawn > best, ids, best_ids)
            best = tl.maximum(best, drawn)
    value = tl.max(best, 0)
    return tl.min(tl.where(best == value, best_ids, vocab), 0)
