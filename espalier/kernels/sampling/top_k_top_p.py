"""Top-k, top-p and min-p without sorting a row, and the draw from the remaining tokens.

The reference is `filtered` in espalier/sampling/pick.py.  The cutoff is the smallest logit that stays.  Bisection
finds the cutoff.  Each pass over the row computes an exact sum over the tokens above a pivot: their count, or their
mass as integers.  Then one end of the searched interval moves to a value of the row.  A row of a thousand distinct
values takes about ten passes, and no row takes more than a hundred.  Of equal logits at the cutoff, the lower ids stay.

A token's mass is exp(logit - largest logit) by tl.exp.  In float32 its relative error is at most 2**-19, unless the
mass is too small to count.  So a token whose cumulative mass is that close to top_p may be on the other side of the
cutoff than in the reference.  In this kernel the side is always the same.
"""

from __future__ import annotations

import triton.language as tl

from espalier.kernels.runtime.jit import float_to_key, kernel, key_to_float
from espalier.kernels.sampling.logit_processors import process_logits
from espalier.kernels.sampling.noise import gumbel_noise


@kernel
def load_processed_block(logits_ptr, start, vocab, dtype: tl.constexpr, row, drafted, BLOCK: tl.constexpr):
    """Returns (x, ids) of a block of a row: its logits after process_logits; -inf past the vocabulary."""
    ids = start + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + ids, mask=ids < vocab, other=float("-inf"))
    return process_logits(x.to(dtype), ids, ids < vocab, row, drafted), ids


@kernel
def probability_mass(x, max_logit):
    """A token's mass in units of 2**-40 of the likeliest token's mass.  Integer sums are the same in any order."""
    return (tl.exp(x - max_logit) * 1099511627776.0).to(tl.int64)


@kernel
def next_pivot(low, high, step):
    """Returns a value in [low, high).

    Before step 24 the value is the middle, which is fast for usual logits.  Then it is the median of all floats between
    low and high, which bounds the number of steps for any values.
    """
    low_key = float_to_key(low)
    high_key = float_to_key(high)
    among_floats = key_to_float((low_key & high_key) + ((low_key ^ high_key) >> 1))
    middle = tl.where(low == float("-inf"), high - 16.0, low + (high - low) * 0.5)
    pivot = tl.where(step < 24, middle, among_floats)
    return tl.where((pivot >= low) & (pivot < high), pivot, low)


@kernel
def find_cutoff(
    logits_ptr, vocab, row, drafted, max_logit, min_cutoff, target_sum, BY_MASS: tl.constexpr, BLOCK: tl.constexpr
):
    """Returns (cutoff, sum of the tokens above the cutoff).  A sum is a number of tokens, or with BY_MASS their mass.

    The cutoff is the largest value for which the tokens at or above it sum to at least `target_sum`.  It is in
    [min_cutoff, max_logit].  max_logit: the row's maximum, which must be finite.
    """
    exact: tl.constexpr = max_logit.dtype
    low = min_cutoff
    high = max_logit
    over = target_sum * 0
    step = 0
    while low < high:
        pivot = next_pivot(low, high, step)
        weight = tl.zeros([BLOCK], tl.int64)
        larger = tl.full([BLOCK], float("inf"), exact)
        rest = tl.full([BLOCK], float("-inf"), exact)
        for start in range(0, vocab, BLOCK):
            x, _ids = load_processed_block(logits_ptr, start, vocab, exact, row, drafted, BLOCK)
            if BY_MASS:
                weight += tl.where(x > pivot, probability_mass(x, max_logit), 0)
            else:
                weight += (x > pivot).to(tl.int64)
            larger = tl.minimum(larger, tl.where(x > pivot, x, float("inf")))
            rest = tl.maximum(rest, tl.where(x > pivot, float("-inf"), x))
        total = tl.sum(weight, 0)
        if total >= target_sum:
            low = tl.min(larger, 0)
        else:
            high = tl.max(rest, 0)
            over = total
        step += 1
    return high, over


@kernel
def remaining_mass(logits_ptr, vocab, row, drafted, max_logit, cut, num_ties, BLOCK: tl.constexpr):
    """Returns the mass of the tokens above `cut` and of the `num_ties` tokens at `cut` that stay."""
    weight = tl.zeros([BLOCK], tl.int64)
    for start in range(0, vocab, BLOCK):
        x, _ids = load_processed_block(logits_ptr, start, vocab, max_logit.dtype, row, drafted, BLOCK)
        weight += tl.where(x > cut, probability_mass(x, max_logit), 0)
    return tl.sum(weight, 0) + num_ties * mass_of_value(cut, max_logit, BLOCK)


@kernel
def mass_of_value(value, max_logit, BLOCK: tl.constexpr):
    # The mass is computed for a whole block, because the interpreter's library may round a single number differently.
    return tl.max(probability_mass(tl.zeros([BLOCK], max_logit.dtype) + value, max_logit), 0)


@kernel
def filter_cutoff(logits_ptr, vocab, row, drafted, max_logit, top_k, top_p, BLOCK: tl.constexpr):
    """Returns (cutoff, number of tokens at the cutoff that stay: the lowest ids).  top_k: int64, 0 for no top-k."""
    cut = max_logit - float("inf")
    ties = top_k * 0 + vocab
    if top_k > 0:
        cut, over = find_cutoff(logits_ptr, vocab, row, drafted, max_logit, cut, top_k, False, BLOCK)
        ties = top_k - over
    if top_p < 1:
        left = remaining_mass(logits_ptr, vocab, row, drafted, max_logit, cut, ties, BLOCK)
        enough = tl.ceil(left.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64)
        # exp(-28) is less than one unit of 2**-40.
        lowest = tl.maximum(cut, max_logit - 28.0)
        tail, over = find_cutoff(logits_ptr, vocab, row, drafted, max_logit, lowest, enough, True, BLOCK)
        mass_of_tie = tl.maximum(mass_of_value(tail, max_logit, BLOCK), 1)
        # `enough` is at most `left`.  So the new `ties` never exceeds the ids of this value that top-k kept.
        ties = (enough - over + mass_of_tie - 1) // mass_of_tie
        cut = tail
    return cut, ties


@kernel
def draw_filtered(logits_ptr, vocab, row, drafted, max_logit, filters, k0, k1, BLOCK: tl.constexpr):
    """Returns the id with the largest logit plus noise among the tokens that filters (top_k, top_p, min_p) leave.
    Ties go to the lower id."""
    exact: tl.constexpr = max_logit.dtype
    top_k, top_p, min_p = filters
    cut, ties = filter_cutoff(logits_ptr, vocab, row, drafted, max_logit, top_k, top_p, BLOCK)
    best = tl.full([BLOCK], float("-inf"), exact)
    at = tl.arange(0, BLOCK)
    before = ties * 0
    for start in range(0, vocab, BLOCK):
        x, ids = load_processed_block(logits_ptr, start, vocab, exact, row, drafted, BLOCK)
        equal = (x == cut).to(tl.int64)
        rank = before + tl.cumsum(equal, 0) - equal
        kept = (x > cut) | ((equal != 0) & (rank < ties))
        kept = kept & (tl.exp(x - max_logit) >= min_p.to(exact))
        before += tl.sum(equal, 0)
        if tl.max(kept.to(tl.int32), 0) > 0:
            drawn = tl.where(kept, x + gumbel_noise(ids, k0, k1, exact), float("-inf"))
            at = tl.where(drawn > best, ids, at)
            best = tl.maximum(best, drawn)
    value = tl.max(best, 0)
    return tl.min(tl.where(best == value, at, vocab), 0)
