"""Selects, exactly, each query's rows with the topk largest (score, position), in order of position.

One program selects the rows of one query.  It first lists the topk groups with the highest scores, or a few more.  They
hold all chosen rows: a row of any other group has topk rows above it, the highest of each listed group.  Then it
selects among the rows of these groups that are not below all of these highest scores.

Both steps search for a threshold.  With its sign turned, a score's bit pattern is in the order of scores.  Each turn of
the search divides the patterns between which the threshold lies into 32 bins, and counts the scores per bin.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.ops.selection import GROUP, MAX_TOPK, IndexScores, SelectedRows
from espalier.kernels.runtime.jit import kernel
from espalier.kernels.runtime.launch import chip, power_of_two, require
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger_and_wait
from espalier.layout import ANCESTOR_BITS

# Scores that a program holds at once.
CHUNK = 4096
# The time of tl.histogram grows with the number of bins, and it needs one for each thread of a warp.
BINS = 32
NUM_WARPS = 16
# Groups that are listed beyond topk, as a part of topk.  A few more groups take less time than a longer search.
SPARE = 4
# Bits of a bin of patterns in the first turn, if any score may be the threshold.  It is seldom far below the highest
# score.  So two bins hold the scores between a power of two and the next, and the last bin holds all lower scores.
FIRST_BITS = tl.constexpr(22)
# The pattern of the lowest score of a row that is seen: unseen rows have -inf.
LEAST = tl.constexpr(0x00800000)


@kernel
def _pattern(score):
    """uint32 numbers in the order of float32 scores.  Both zeros are equal."""
    score = tl.where(score == 0.0, 0.0, score)
    bits = score.to(tl.uint32, bitcast=True)
    return bits ^ tl.where(bits >> 31 != 0, 0xFFFFFFFF, 0x80000000).to(tl.uint32)


@kernel
def _load(values, columns, chunk, count, split, skipped, CHUNK: tl.constexpr):
    """(columns, whether they hold a seen score, patterns) of a chunk of `count` values.

    columns: a list of columns.  None: the columns before `split`, and after it those `skipped` further on.
    """
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    exists = i < count
    if columns is None:
        column = i + tl.where(i >= split, skipped, 0)
    else:
        column = tl.load(columns + i, mask=exists, other=0)
    pattern = _pattern(tl.load(values + column, mask=exists, other=float("-inf")))
    return column, exists & (pattern >= LEAST), pattern


@kernel
def _num_bits(x):
    """The number of bits of a uint32, without leading zeros."""
    bits = tl.zeros([], tl.uint32)
    for i in tl.static_range(5):
        has_more = x >> (16 >> i) > 0
        bits += tl.where(has_more, 16 >> i, 0).to(tl.uint32)
        x = tl.where(has_more, x >> (16 >> i), x)
    return bits + tl.where(x > 0, 1, 0).to(tl.uint32)


@kernel
def _highest(values, count, split, skipped, CHUNK: tl.constexpr):
    """The highest pattern of `count` values, at least LEAST."""
    high = tl.full([], LEAST, tl.uint32)
    for chunk in range((count + CHUNK - 1) // CHUNK):
        _column, seen, pattern = _load(values, None, chunk, count, split, skipped, CHUNK)
        high = tl.maximum(high, tl.max(tl.where(seen, pattern, LEAST).to(tl.uint32), 0))
    return high


@kernel
def _threshold(
    values, columns, count, split, skipped, low, high, topk, spare, first_bits,
    CHUNK: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Search for the threshold of the topk highest of `count` values (`_load`).  No pattern is below low or above high.

    first_bits: the most bits of a bin of the first turn.  Returns (high, span, left_out).  Patterns above the new
    `high` are chosen.  Of the values at the threshold, which have patterns from high - span to high, all but the first
    `left_out` are chosen.  So topk values are chosen, or all if there are fewer, or up to `spare` more.
    """
    span, equal, wanted, most_bits = high - low, count, tl.minimum(topk, count), tl.full([], first_bits, tl.uint32)
    place = tl.arange(0, BINS)
    while (equal - wanted > spare) & (span > 0):
        bits = tl.minimum(_num_bits(span // BINS), most_bits)
        most_bits = tl.full([], 32, tl.uint32)
        counts = tl.zeros([BINS], tl.int32)
        for chunk in range((count + CHUNK - 1) // CHUNK):
            _column, seen, pattern = _load(values, columns, chunk, count, split, skipped, CHUNK)
            is_between = seen & (pattern <= high) & (high - pattern <= span)
            bin_of = tl.minimum((high - pattern) >> bits, BINS - 1)
            counts += tl.histogram(bin_of.to(tl.int32), BINS, mask=is_between)
        upto = tl.cumsum(counts, 0)
        # Fewer than `wanted` in the first turn only, where `count` includes values that are not seen.
        wanted = tl.minimum(wanted, tl.max(upto, 0))
        is_it = (upto >= wanted) & (upto - counts < wanted)
        wanted -= tl.sum(tl.where(is_it, upto - counts, 0), 0)
        equal = tl.sum(tl.where(is_it, counts, 0), 0)
        found = tl.sum(tl.where(is_it, place, 0), 0)
        skipped_span = found.to(tl.uint32) << bits
        high -= skipped_span
        span = tl.where(found == BINS - 1, span - skipped_span, (tl.full([], 1, tl.uint32) << bits) - 1)
    return high, span, tl.where(equal - wanted > spare, equal - wanted, 0)


@kernel
def _places(seen, pattern, high, span, left_out, above_before, equal_before):
    """(taken, places, scores above the threshold, scores at it) of a chunk (see `_threshold`).

    above_before, equal_before: in earlier chunks.
    """
    above = seen & (pattern > high)
    equal = seen & (pattern <= high) & (high - pattern <= span)
    # Both are counted at once: a chunk has fewer than 2^16 scores.
    both = above.to(tl.int32) | (equal.to(tl.int32) << 16)
    upto, total = tl.cumsum(both, 0), tl.sum(both, 0)
    equal_upto = equal_before + (upto >> 16)
    taken = above | (equal & (equal_upto > left_out))
    place = above_before + (upto & 0xFFFF) + tl.maximum(equal_upto - left_out, 0) - 1
    return taken, place, total & 0xFFFF, total >> 16


@kernel
def _list_groups(groups, list_ptr, count, split, skipped, topk, spare, CHUNK: tl.constexpr, BINS: tl.constexpr):
    """List the columns of the topk highest groups, and of up to `spare` more.

    Returns (their number, a pattern below which no row is chosen, the highest pattern).
    """
    highest = _highest(groups, count, split, skipped, CHUNK)
    high, span, left_out = _threshold(
        groups,
        None,
        count,
        split,
        skipped,
        tl.full([], LEAST, tl.uint32),
        highest,
        topk,
        spare,
        FIRST_BITS,
        CHUNK,
        BINS,
    )
    above_before, equal_before = 0, 0
    for chunk in range((count + CHUNK - 1) // CHUNK):
        column, seen, pattern = _load(groups, None, chunk, count, split, skipped, CHUNK)
        taken, place, above, equals = _places(seen, pattern, high, span, left_out, above_before, equal_before)
        tl.store(list_ptr + place, column, mask=taken)
        above_before += above
        equal_before += equals
    listed = above_before + equal_before - left_out
    # With fewer groups than topk, the rows of each are chosen, whatever their scores.
    return listed, tl.where(listed >= topk, high - span, LEAST).to(tl.uint32), highest


@kernel
def _list_rows(
    scores, group_list, row_list, listed, least, length, capacity, rows, GROUP: tl.constexpr, CHUNK: tl.constexpr
):
    """List the columns of the rows of the listed groups, without those below `least`.  Returns their number."""
    GROUPS: tl.constexpr = CHUNK // GROUP
    of_capacity = (capacity + GROUP - 1) // GROUP
    count = 0
    for chunk in range((listed + GROUPS - 1) // GROUPS):
        i = chunk * GROUPS + tl.arange(0, GROUPS)
        group = tl.load(group_list + i, mask=i < listed, other=0)
        is_staged = group >= of_capacity
        at = ((group - tl.where(is_staged, of_capacity, 0)) * GROUP)[:, None] + tl.arange(0, GROUP)[None, :]
        exists = at < tl.where(i < listed, tl.where(is_staged, rows, length), 0)[:, None]
        column = at + tl.where(is_staged, capacity, 0)[:, None]
        kept = exists & (_pattern(tl.load(scores + column, mask=exists, other=float("-inf"))) >= least)
        upto, of_group = tl.cumsum(kept.to(tl.int32), 1), tl.sum(kept.to(tl.int32), 1)
        before = count + tl.cumsum(of_group, 0) - of_group
        tl.store(row_list + (before[:, None] + upto - 1), column, mask=kept)
        count += tl.sum(of_group, 0)
    return count


@kernel
def _write_rows(
    scores, row_list, table, to, count, capacity, high, span, left_out, PAGE_SIZE: tl.constexpr, CHUNK: tl.constexpr
):
    """Write the chosen committed rows.  Returns (their number, how many of all rows at the threshold are chosen)."""
    above_before, equal_before, written = 0, 0, tl.zeros([], tl.int32)
    for chunk in range((count + CHUNK - 1) // CHUNK):
        column, seen, pattern = _load(scores, row_list, chunk, count, 0, 0, CHUNK)
        taken, place, above, equals = _places(seen, pattern, high, span, left_out, above_before, equal_before)
        taken = taken & (column < capacity)
        page = tl.load(table + column // PAGE_SIZE, mask=taken, other=0)
        tl.store(to + place, page * PAGE_SIZE + column % PAGE_SIZE, mask=taken)
        written += tl.sum(taken.to(tl.int32), 0)
        above_before += above
        equal_before += equals
    return written, equal_before - left_out


@kernel
def _write_bits(scores, words, rows, high, span, wanted, WORDS: tl.constexpr, WORD: tl.constexpr):
    """Write the bits of the chosen staged rows.  They come last, so the last `wanted` of them at the threshold are."""
    at = tl.arange(0, WORDS * WORD)
    exists = at < rows
    pattern = _pattern(tl.load(scores + at, mask=exists, other=float("-inf")))
    above = exists & (pattern > high)
    equal = exists & (pattern <= high) & (high - pattern <= span)
    taken = above | (equal & (tl.cumsum(equal.to(tl.int32), 0, reverse=True) <= wanted))
    bits = tl.reshape(taken.to(tl.int64) << (at % WORD).to(tl.int64), [WORDS, WORD])
    word = tl.arange(0, WORDS)
    tl.store(words + word, tl.sum(bits, 1), mask=word < (rows + WORD - 1) // WORD)


@kernel
def _select_rows_kernel(
    score_ptr, group_ptr, length_ptr, table_ptr, row_ptr, count_ptr, word_ptr, group_list_ptr, row_list_ptr,
    queries, capacity, rows, topk, spare, width, score_b, score_q, group_b, group_q, length_b, table_b, group_list_q,
    row_list_q,
    GROUP: tl.constexpr, PAGE_SIZE: tl.constexpr, WORDS: tl.constexpr, WORD: tl.constexpr, CHUNK: tl.constexpr,
    BINS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: (B · Q).  The lists are memory that a query's program alone uses."""
    pdl_trigger_and_wait(DEPENDENT)
    query = tl.program_id(0).to(tl.int64)
    request = query // queries
    length = tl.load(length_ptr + request * length_b).to(tl.int32)
    scores = score_ptr + request * score_b + query % queries * score_q
    table, to = table_ptr + request * table_b, row_ptr + query * width
    # A request with at most topk rows has no chosen rows, and all staged rows that its queries see.
    high, span = tl.full([], LEAST - 1, tl.uint32), tl.zeros([], tl.uint32)
    written, wanted = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    if length + rows > topk:
        groups = group_ptr + request * group_b + query % queries * group_q
        group_list, row_list = group_list_ptr + query * group_list_q, row_list_ptr + query * row_list_q
        split = (length + GROUP - 1) // GROUP
        skipped = (capacity + GROUP - 1) // GROUP - split
        listed, least, highest = _list_groups(
            groups, group_list, split + (rows + GROUP - 1) // GROUP, split, skipped, topk, spare, CHUNK, BINS
        )
        # A list is read by other threads than those that write it.
        tl.debug_barrier()
        count = _list_rows(scores, group_list, row_list, listed, least, length, capacity, rows, GROUP, CHUNK)
        tl.debug_barrier()
        high, span, left_out = _threshold(scores, row_list, count, 0, 0, least, highest, topk, 0, 32, CHUNK, BINS)
        written, wanted = _write_rows(
            scores, row_list, table, to, count, capacity, high, span, left_out, PAGE_SIZE, CHUNK
        )
    tl.store(count_ptr + query, written.to(tl.int64))
    for chunk in range(written // CHUNK, (width + CHUNK - 1) // CHUNK):
        place = chunk * CHUNK + tl.arange(0, CHUNK)
        tl.store(to + place, tl.zeros([CHUNK], tl.int32), mask=(place >= written) & (place < width))
    words = word_ptr + query * ((rows + WORD - 1) // WORD)
    _write_bits(scores + capacity, words, rows, high, span, wanted, WORDS, WORD)


def select_rows(scores: IndexScores, length: Tensor, page_table: Tensor, page_size: int, topk: int) -> SelectedRows:
    """See ops/selection.py.  Raises EspalierError for sizes that do not agree, and for a topk over MAX_TOPK."""
    (of_rows, of_groups), capacity = scores, page_table.shape[1] * page_size
    (batch, queries, columns), device = of_rows.shape, of_rows.device
    rows, groups = columns - capacity, -(-capacity // GROUP) + -(-(columns - capacity) // GROUP)
    require("selected rows: scores", of_rows, (batch, queries, columns), torch.float32, of_rows)
    require("selected rows: groups of scores", of_groups, (batch, queries, groups), torch.float32, of_rows)
    require("selected rows: length", length, (batch,), torch.int64, of_rows)
    require("selected rows: page_table", page_table, (batch, -1), torch.int32, of_rows)
    if topk > MAX_TOPK or rows < 1 or of_rows.stride(2) != 1 or of_groups.stride(2) != 1:
        raise EspalierError(
            f"the kernels select {MAX_TOPK} rows at most, and {topk} are asked for, of {rows} staged rows, which must "
            "be 1 or more: use attention='reference'"
        )
    width, num_words = min(topk, capacity), -(-rows // ANCESTOR_BITS)
    chosen = torch.empty(batch, queries, width, dtype=torch.int32, device=device)
    count = torch.empty(batch, queries, dtype=torch.int64, device=device)
    bits = torch.empty(batch, queries, num_words, dtype=torch.int64, device=device)
    if not batch * queries:
        return SelectedRows(chosen, count, bits)
    spare = topk // SPARE
    group_list, row_list = (
        torch.empty(batch * queries, most, dtype=torch.int32, device=device)
        for most in (min(topk + spare, groups), min((topk + spare) * GROUP, columns))
    )
    _select_rows_kernel[(batch * queries,)](
        *(of_rows, of_groups, length, page_table, chosen, count, bits, group_list, row_list),
        *(queries, capacity, rows, topk, spare, width, *of_rows.stride()[:2], *of_groups.stride()[:2]),
        *(length.stride(0), page_table.stride(0), group_list.stride(0), row_list.stride(0)),
        GROUP=GROUP,
        PAGE_SIZE=page_size,
        WORDS=power_of_two(num_words),
        WORD=ANCESTOR_BITS,
        CHUNK=CHUNK,
        BINS=BINS,
        num_warps=NUM_WARPS,
        **pdl_arguments(chip(of_rows)),
    )
    return SelectedRows(chosen, count, bits)
