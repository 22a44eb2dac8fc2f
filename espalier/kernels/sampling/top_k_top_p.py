"""Top-k, top-p and min-p without sorting a row, and the draw from the remaining tokens.

The reference is `filtered` in espalier/sampling/pick.py.  The cut is the smallest logit that stays, and bisection finds
it.  Each pass over the row sums, exactly, the tokens above a pivot: their count, or their mass as integers.  Then it
moves one end of the interval to a value of the row.  A row of a thousand distinct values takes about ten passes, and no
row takes more than a hundred.  Among equal logits at the cut, the lower ids stay.

A token's mass is exp(logit - largest logit) by tl.exp.  In float32 its relative error is at most 2**-19, unless the
mass is too small to count.  So a token whose cumulative mass is that close to top_p may be on the other side of the cut
than in the reference.  In this kernel it is always on the same side.
"""

from __future__ import annotations

import triton.language as tl

from espalier.kernels.runtime.jit import float_to_key, kernel, key_to_float
from espalier.kernels.sampling.logit_processors import process_logits
from espalier.kernels.sampling.noise import gumbel_at


@kernel
def load_processed_block(logits_ptr, start, vocab, exact: tl.constexpr, row, above, BLOCK: tl.constexpr):
    """(x, ids) of a block of a row: its logits after shaped(); -inf past the vocabulary."""
    ids = start + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + ids, mask=ids < vocab, other=float("-inf"))
    return process_logits(x.to(exact), ids, ids < vocab, row, above), ids


@kernel
def probability_mass(x, top):
    """A token's mass as an integer, in units of 2**-40 of the likeliest token's mass.  Sums depend on no order."""
    return (tl.exp(x - top) * 1099511627776.0).to(tl.int64)


@kernel
def pivot_of(low, high, step):
    """A value in [low, high).

    It is the middle, which is fast for usual logits.  From step 24 on it is the median of all floats between low and
    high, whose number of steps does not depend on the values.
    """
    low_key = float_to_key(low)
    high_key = float_to_key(high)
    among_floats = key_to_float((low_key & high_key) + ((low_key ^ high_key) >> 1))
    middle = tl.where(low == float("-inf"), high - 16.0, low + (high - low) * 0.5)
    pivot = tl.where(step < 24, middle, among_floats)
    return tl.where((pivot >= low) & (pivot < high), pivot, low)


@kernel
def find_cut(logits_ptr, vocab, row, above, top, lowest, target, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """(cut, over).  cut: the largest value for which the tokens at or above it sum to at least `target`; over: the sum
    of the tokens above the cut, which is less than target.

    A sum is the number of tokens, or with BY_MASS their mass.  The cut is in [lowest, top].  top: the row's maximum,
    which must be finite.
    """
    exact: tl.constexpr = top.dtype
    low = lowest
    high = top
    over = target * 0
    step = 0
    while low < high:
        pivot = pivot_of(low, high, step)
        weight = tl.zeros([BLOCK], tl.int64)
        larger = tl.full([BLOCK], float("inf"), exact)
        rest = tl.full([BLOCK], float("-inf"), exact)
        for start in range(0, vocab, BLOCK):
            x, _ids = load_processed_block(logits_ptr, start, vocab, exact, row, above, BLOCK)
            if BY_MASS:
                weight += tl.where(x > pivot, probability_mass(x, top), 0)
            else:
                weight += (x > pivot).to(tl.int64)
            larger = tl.minimum(larger, tl.where(x > pivot, x, float("inf")))
            rest = tl.maximum(rest, tl.where(x > pivot, float("-inf"), x))
        total = tl.sum(weight, 0)
        if total >= target:
            low = tl.min(larger, 0)
        else:
            high = tl.max(rest, 0)
            over = total
        step += 1
    return high, over


@kernel
def remaining_mass(logits_ptr, vocab, row, above, top, cut, ties, BLOCK: tl.constexpr):
    """The mass of all tokens above the cut and of the `ties` tokens at the cut that stay."""
    weight = tl.zeros([BLOCK], tl.int64)
    for start in range(0, vocab, BLOCK):
        x, _ids = load_processed_block(logits_ptr, start, vocab, top.dtype, row, above, BLOCK)
        weight += tl.where(x > cut, probability_mass(x, top), 0)
    return tl.sum(weight, 0) + ties * mass_of_value(cut, top, BLOCK)


@kernel
def mass_of_value(value, top, BLOCK: tl.constexpr):
    # It is computed for a whole block, because the interpreter's library may round a single number differently.
    return tl.max(probability_mass(tl.zeros([BLOCK], top.dtype) + value, top), 0)


@kernel
def filter_cut(logits_ptr, vocab, row, above, top, top_k, top_p, BLOCK: tl.constexpr):
    """(cut, ties): tokens above the cut stay, and at the cut the `ties` lowest ids.  top_k: int64, 0 for no top-k."""
    cut = top - float("inf")
    ties = top_k * 0 + vocab
    if top_k > 0:
        cut, over = find_cut(logits_ptr, vocab, row, above, top, cut, top_k, False, BLOCK)
        ties = top_k - over
    if top_p < 1:
        left = remaining_mass(logits_ptr, vocab, row, above, top, cut, ties, BLOCK)
        enough = tl.ceil(left.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64)
        # exp(-28) is less than one unit of 2**-40.
        lowest = tl.maximum(cut, top - 28.0)
        tail, over = find_cut(logits_ptr, vocab, row, above, top, lowest, enough, True, BLOCK)
        each = tl.maximum(mass_of_value(tail, top, BLOCK), 1)
        # There are never more ids than top-k left at this value, because `enough` is at most `left`.
        ties = (enough - over + each - 1) // each
        cut = tail
    return cut, ties


@kernel
def draw_filtered(logits_ptr, vocab, row, above, top, filters, k0, k1, BLOCK: tl.constexpr):
    """The id with the largest logit plus noise among the tokens that filters (top_k, top_p, min_p) leave.

    Ties go to the lower id.
    """
    exact: tl.constexpr = top.dtype
    top_k, top_p, min_p = filters
    cut, ties = filter_cut(logits_ptr, vocab, row, above, top, top_k, top_p, BLOCK)
    best = tl.full([BLOCK], float("-inf"), exact)
    at = tl.arange(0, BLOCK)
    before = ties * 0
    for start in range(0, vocab, BLOCK):
        x, ids = load_processed_block(logits_ptr, start, vocab, exact, row, above, BLOCK)
        equal = (x == cut).to(tl.int64)
        rank = before + tl.cumsum(equal, 0) - equal
        kept = (x > cut) | ((equal != 0) & (rank < ties))
        kept = kept & (tl.exp(x - top) >= min_p.to(exact))
        before += tl.sum(equal, 0)
        if tl.max(kept.to(tl.int32), 0) > 0:
            drawn = tl.where(kept, x + gumbel_at(ids, k0, k1, exact), float("-inf"))
            at = tl.where(drawn > best, ids, at)
            best = tl.maximum(best, drawn)
    value = tl.max(best, 0)
    return tl.min(tl.where(best == value, at, vocab), 0)
