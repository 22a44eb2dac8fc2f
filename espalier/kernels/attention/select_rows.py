"""Selects, exactly, each query's rows with the topk largest (score, position), in order of position.

One program selects the rows of one query.  First it lists the topk groups with the highest scores, or a few more.  All
chosen rows are in these groups: a row of another group scores below the best row of each listed group.  Then the
program selects among the rows of the listed groups.  Rows below the lowest score of the listed groups are skipped.

Both steps search for a threshold.  Scores are mapped to integers (keys) in the same order.  Each iteration divides
the range of keys that contains the threshold into 32 bins, and counts the scores per bin.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.ops.selection import MAX_TOPK, SCORE_GROUP_SIZE, IndexerScores, SelectedRows
from espalier.kernels.runtime.jit import kernel
from espalier.kernels.runtime.launch import chip, next_power_of_2, require
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger_and_wait
from espalier.layout import ANCESTOR_BITS

# Scores that a program holds at once.
SCORES_PER_CHUNK = 4096
# The time of tl.histogram grows with the number of bins, and it needs one for each thread of a warp.
NUM_BINS = 32
NUM_WARPS = 16
# topk / EXTRA_GROUPS_DIVISOR more groups may be listed, because a few more groups take less time than a longer search.
EXTRA_GROUPS_DIVISOR = 4
# Bits of a bin in the first iteration.  Two bins then hold the scores between a power of two and the next.  The last
# bin holds all lower scores, because the threshold is seldom far below the highest score.
FIRST_BIN_BITS = tl.constexpr(22)
# The lowest key of a visible row; other rows have -inf.
LOWEST_VISIBLE_KEY = tl.constexpr(0x00800000)


@kernel
def _score_key(score):
    """Returns uint32 keys in the order of float32 scores.  0.0 and -0.0 have the same key."""
    score = tl.where(score == 0.0, 0.0, score)
    bits = score.to(tl.uint32, bitcast=True)
    return bits ^ tl.where(bits >> 31 != 0, 0xFFFFFFFF, 0x80000000).to(tl.uint32)


@kernel
def _load_chunk(values, columns, chunk, count, gap_begin, gap_size, SCORES_PER_CHUNK: tl.constexpr):
    """Returns (columns, whether their rows are visible, keys of their scores) of one chunk of `count` values.

    columns: a list of columns; None: columns 0 to gap_begin - 1, then the columns from gap_begin + gap_size on.
    """
    i = chunk * SCORES_PER_CHUNK + tl.arange(0, SCORES_PER_CHUNK)
    exists = i < count
    if columns is None:
        column = i + tl.where(i >= gap_begin, gap_size, 0)
    else:
        column = tl.load(columns + i, mask=exists, other=0)
    key = _score_key(tl.load(values + column, mask=exists, other=float("-inf")))
    return column, exists & (key >= LOWEST_VISIBLE_KEY), key


@kernel
def _num_bits(x):
    """Returns the number of bits of a uint32, without leading zeros."""
    bits = tl.zeros([], tl.uint32)
    for i in tl.static_range(5):
        has_more = x >> (16 >> i) > 0
        bits += tl.where(has_more, 16 >> i, 0).to(tl.uint32)
        x = tl.where(has_more, x >> (16 >> i), x)
    return bits + tl.where(x > 0, 1, 0).to(tl.uint32)


@kernel
def _max_visible_key(values, count, gap_begin, gap_size, SCORES_PER_CHUNK: tl.constexpr):
    """Returns the highest key of `count` values, at least LOWEST_VISIBLE_KEY."""
    high = tl.full([], LOWEST_VISIBLE_KEY, tl.uint32)
    for chunk in range((count + SCORES_PER_CHUNK - 1) // SCORES_PER_CHUNK):
        _column, seen, key = _load_chunk(values, None, chunk, count, gap_begin, gap_size, SCORES_PER_CHUNK)
        high = tl.maximum(high, tl.max(tl.where(seen, key, LOWEST_VISIBLE_KEY).to(tl.uint32), 0))
    return high


@kernel
def _find_threshold(
    values, columns, count, gap_begin, gap_size, min_key, max_key, topk, num_extra, max_first_bin_bits,
    SCORES_PER_CHUNK: tl.constexpr, NUM_BINS: tl.constexpr,
):  # fmt: skip
    """Search for the threshold of the topk highest of `count` values (see _load_chunk).

    All keys are from min_key to max_key.  max_first_bin_bits: the most bits of a bin in the first iteration.
    Returns (max_key, span, num_skipped_ties).  Values above the new max_key are selected.  Values with keys from
    max_key - span to max_key are ties at the threshold: all but the first num_skipped_ties of them are selected.  So
    topk values are selected, or all if there are fewer, or up to `num_extra` more.
    """
    span, equal, wanted = max_key - min_key, count, tl.minimum(topk, count)
    most_bits = tl.full([], max_first_bin_bits, tl.uint32)
    place = tl.arange(0, NUM_BINS)
    while (equal - wanted > num_extra) & (span > 0):
        bits = tl.minimum(_num_bits(span // NUM_BINS), most_bits)
        most_bits = tl.full([], 32, tl.uint32)
        counts = tl.zeros([NUM_BINS], tl.int32)
        for chunk in range((count + SCORES_PER_CHUNK - 1) // SCORES_PER_CHUNK):
            _column, seen, key = _load_chunk(values, columns, chunk, count, gap_begin, gap_size, SCORES_PER_CHUNK)
            is_between = seen & (key <= max_key) & (max_key - key <= span)
            bin_of = tl.minimum((max_key - key) >> bits, NUM_BINS - 1)
            counts += tl.histogram(bin_of.to(tl.int32), NUM_BINS, mask=is_between)
        upto = tl.cumsum(counts, 0)
        # In the first iteration there may be fewer, because `count` includes values of invisible rows.
        wanted = tl.minimum(wanted, tl.max(upto, 0))
        is_it = (upto >= wanted) & (upto - counts < wanted)
        wanted -= tl.sum(tl.where(is_it, upto - counts, 0), 0)
        equal = tl.sum(tl.where(is_it, counts, 0), 0)
        found = tl.sum(tl.where(is_it, place, 0), 0)
        skipped_span = found.to(tl.uint32) << bits
        max_key -= skipped_span
        span = tl.where(found == NUM_BINS - 1, span - skipped_span, (tl.full([], 1, tl.uint32) << bits) - 1)
    return max_key, span, tl.where(equal - wanted > num_extra, equal - wanted, 0)


@kernel
def _place_selected(is_visible, key, max_key, key_span, num_skipped_ties, num_earlier_above, num_earlier_equal):
    """Returns (is selected, output index, number of scores above the threshold, number at it) of a chunk.

    num_earlier_above, num_earlier_equal: the same two numbers of all earlier chunks.  See _find_threshold.
    """
    above = is_visible & (key > max_key)
    equal = is_visible & (key <= max_key) & (max_key - key <= key_span)
    # One sum counts both in its low and high 16 bits, because a chunk has fewer than 2^16 scores.
    both = above.to(tl.int32) | (equal.to(tl.int32) << 16)
    upto, total = tl.cumsum(both, 0), tl.sum(both, 0)
    equal_upto = num_earlier_equal + (upto >> 16)
    taken = above | (equal & (equal_upto > num_skipped_ties))
    place = num_earlier_above + (upto & 0xFFFF) + tl.maximum(equal_upto - num_skipped_ties, 0) - 1
    return taken, place, total & 0xFFFF, total >> 16


@kernel
def _list_candidate_groups(
    groups,
    list_ptr,
    count,
    gap_begin,
    gap_size,
    topk,
    num_extra,
    SCORES_PER_CHUNK: tl.constexpr,
    NUM_BINS: tl.constexpr,
):
    """List the columns of the topk highest groups, and of up to `num_extra` more.

    Returns (number of listed groups, a key below which no row is selected, the highest key).
    """
    highest = _max_visible_key(groups, count, gap_begin, gap_size, SCORES_PER_CHUNK)
    high, span, left_out = _find_threshold(
        groups, None, count, gap_begin, gap_size, tl.full([], LOWEST_VISIBLE_KEY, tl.uint32), highest, topk, num_extra,
        FIRST_BIN_BITS, SCORES_PER_CHUNK, NUM_BINS,
    )  # fmt: skip
    above_before, equal_before = 0, 0
    for chunk in range((count + SCORES_PER_CHUNK - 1) // SCORES_PER_CHUNK):
        column, seen, key = _load_chunk(groups, None, chunk, count, gap_begin, gap_size, SCORES_PER_CHUNK)
        taken, place, above, equals = _place_selected(seen, key, high, span, left_out, above_before, equal_before)
        tl.store(list_ptr + place, column, mask=taken)
        above_before += above
        equal_before += equals
    listed = above_before + equal_before - left_out
    # With fewer groups than topk, no row is too low.
    return listed, tl.where(listed >= topk, high - span, LOWEST_VISIBLE_KEY).to(tl.uint32), highest


@kernel
def _list_candidate_rows(
    scores, group_list, row_list, num_groups, min_key, length, capacity, rows,
    GROUP_SIZE: tl.constexpr, SCORES_PER_CHUNK: tl.constexpr,
):  # fmt: skip
    """List the columns of those rows in the listed groups whose key is at least `min_key`.  Returns their number."""
    GROUPS: tl.constexpr = SCORES_PER_CHUNK // GROUP_SIZE
    of_capacity = (capacity + GROUP_SIZE - 1) // GROUP_SIZE
    count = 0
    for chunk in range((num_groups + GROUPS - 1) // GROUPS):
        i = chunk * GROUPS + tl.arange(0, GROUPS)
        group = tl.load(group_list + i, mask=i < num_groups, other=0)
        is_staged = group >= of_capacity
        at = ((group - tl.where(is_staged, of_capacity, 0)) * GROUP_SIZE)[:, None] + tl.arange(0, GROUP_SIZE)[None, :]
        exists = at < tl.where(i < num_groups, tl.where(is_staged, rows, length), 0)[:, None]
        column = at + tl.where(is_staged, capacity, 0)[:, None]
        kept = exists & (_score_key(tl.load(scores + column, mask=exists, other=float("-inf"))) >= min_key)
        upto, of_group = tl.cumsum(kept.to(tl.int32), 1), tl.sum(kept.to(tl.int32), 1)
        before = count + tl.cumsum(of_group, 0) - of_group
        tl.store(row_list + (before[:, None] + upto - 1), column, mask=kept)
        count += tl.sum(of_group, 0)
    return count


@kernel
def _write_selected_rows(
    scores, row_list, table, out_ptr, count, capacity, max_key, key_span, num_skipped_ties,
    PAGE_SIZE: tl.constexpr, SCORES_PER_CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the selected committed rows.  Returns (their number, number of all selected rows at the threshold)."""
    above_before, equal_before, written = 0, 0, tl.zeros([], tl.int32)
    for chunk in range((count + SCORES_PER_CHUNK - 1) // SCORES_PER_CHUNK):
        column, seen, key = _load_chunk(scores, row_list, chunk, count, 0, 0, SCORES_PER_CHUNK)
        taken, place, above, equals = _place_selected(
            seen, key, max_key, key_span, num_skipped_ties, above_before, equal_before
        )
        taken = taken & (column < capacity)
        page = tl.load(table + column // PAGE_SIZE, mask=taken, other=0)
        tl.store(out_ptr + place, page * PAGE_SIZE + column % PAGE_SIZE, mask=taken)
        written += tl.sum(taken.to(tl.int32), 0)
        above_before += above
        equal_before += equals
    return written, equal_before - num_skipped_ties


@kernel
def _write_selected_bits(
    scores, words, rows, max_key, key_span, num_selected_ties, WORDS: tl.constexpr, WORD_BITS: tl.constexpr
):
    """Write the bits of the selected staged rows.  Staged rows have the last positions, so of the rows at the threshold
    the last `num_selected_ties` are selected."""
    at = tl.arange(0, WORDS * WORD_BITS)
    exists = at < rows
    key = _score_key(tl.load(scores + at, mask=exists, other=float("-inf")))
    above = exists & (key > max_key)
    equal = exists & (key <= max_key) & (max_key - key <= key_span)
    taken = above | (equal & (tl.cumsum(equal.to(tl.int32), 0, reverse=True) <= num_selected_ties))
    bits = tl.reshape(taken.to(tl.int64) << (at % WORD_BITS).to(tl.int64), [WORDS, WORD_BITS])
    word = tl.arange(0, WORDS)
    tl.store(words + word, tl.sum(bits, 1), mask=word < (rows + WORD_BITS - 1) // WORD_BITS)


@kernel
def _select_rows_kernel(
    score_ptr, group_ptr, length_ptr, table_ptr, row_ptr, count_ptr, word_ptr, group_list_ptr, row_list_ptr,
    queries, capacity, rows, topk, num_extra, width, score_stride_b, score_stride_q, group_stride_b, group_stride_q,
    length_stride_b, table_stride_b, group_list_stride_q, row_list_stride_q,
    GROUP_SIZE: tl.constexpr, PAGE_SIZE: tl.constexpr, WORDS: tl.constexpr, WORD_BITS: tl.constexpr,
    SCORES_PER_CHUNK: tl.constexpr, NUM_BINS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (B · Q).  Each program has its own part of the list buffers."""
    pdl_trigger_and_wait(USE_PDL)
    query = tl.program_id(0).to(tl.int64)
    request = query // queries
    length = tl.load(length_ptr + request * length_stride_b).to(tl.int32)
    scores = score_ptr + request * score_stride_b + query % queries * score_stride_q
    table, to = table_ptr + request * table_stride_b, row_ptr + query * width
    # For a request with at most topk rows, no committed row is listed, and all visible staged rows are selected.
    high, span = tl.full([], LOWEST_VISIBLE_KEY - 1, tl.uint32), tl.zeros([], tl.uint32)
    written, wanted = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    if length + rows > topk:
        groups = group_ptr + request * group_stride_b + query % queries * group_stride_q
        group_list, row_list = group_list_ptr + query * group_list_stride_q, row_list_ptr + query * row_list_stride_q
        split = (length + GROUP_SIZE - 1) // GROUP_SIZE
        skipped = (capacity + GROUP_SIZE - 1) // GROUP_SIZE - split
        listed, least, highest = _list_candidate_groups(
            groups, group_list, split + (rows + GROUP_SIZE - 1) // GROUP_SIZE, split, skipped, topk, num_extra,
            SCORES_PER_CHUNK, NUM_BINS,
        )  # fmt: skip
        # The threads that read the list are not the threads that wrote it.
        tl.debug_barrier()
        count = _list_candidate_rows(
            scores, group_list, row_list, listed, least, length, capacity, rows, GROUP_SIZE, SCORES_PER_CHUNK
        )
        tl.debug_barrier()
        high, span, left_out = _find_threshold(
            scores, row_list, count, 0, 0, least, highest, topk, 0, 32, SCORES_PER_CHUNK, NUM_BINS
        )
        written, wanted = _write_selected_rows(
            scores, row_list, table, to, count, capacity, high, span, left_out, PAGE_SIZE, SCORES_PER_CHUNK
        )
    tl.store(count_ptr + query, written.to(tl.int64))
    for chunk in range(written // SCORES_PER_CHUNK, (width + SCORES_PER_CHUNK - 1) // SCORES_PER_CHUNK):
        place = chunk * SCORES_PER_CHUNK + tl.arange(0, SCORES_PER_CHUNK)
        tl.store(to + place, tl.zeros([SCORES_PER_CHUNK], tl.int32), mask=(place >= written) & (place < width))
    words = word_ptr + query * ((rows + WORD_BITS - 1) // WORD_BITS)
    _write_selected_bits(scores + capacity, words, rows, high, span, wanted, WORDS, WORD_BITS)


def select_rows(scores: IndexerScores, length: Tensor, page_table: Tensor, page_size: int, topk: int) -> SelectedRows:
    """See ops/selection.py.  Raises EspalierError for sizes that do not agree, and for a topk over MAX_TOPK."""
    (of_rows, of_groups), capacity = scores, page_table.shape[1] * page_size
    (batch, queries, columns), device = of_rows.shape, of_rows.device
    rows, groups = columns - capacity, -(-capacity // SCORE_GROUP_SIZE) + -(-(columns - capacity) // SCORE_GROUP_SIZE)
    require("selected rows: scores", of_rows, (batch, queries, columns), torch.float32, of_rows)
    require("selected rows: groups of scores", of_groups, (batch, queries, groups), torch.float32, of_rows)
    require("selected rows: length", length, (batch,), torch.int64, of_rows)
    require("selected rows: page_table", page_table, (batch, -1), torch.int32, of_rows)
    if topk > MAX_TOPK or rows < 1 or of_rows.stride(2) != 1 or of_groups.stride(2) != 1:
        raise EspalierError(
            f"the kernels select {MAX_TOPK} rows at most, and {topk} are asked for, of {rows} staged rows, which must "
            "be 1 or more: use attention='reference'"
        )
    width, num_ancestor_words = min(topk, capacity), -(-rows // ANCESTOR_BITS)
    chosen = torch.empty(batch, queries, width, dtype=torch.int32, device=device)
    count = torch.empty(batch, queries, dtype=torch.int64, device=device)
    bits = torch.empty(batch, queries, num_ancestor_words, dtype=torch.int64, device=device)
    if not batch * queries:
        return SelectedRows(chosen, count, bits)
    spare = topk // EXTRA_GROUPS_DIVISOR
    group_list, row_list = (
        torch.empty(batch * queries, most, dtype=torch.int32, device=device)
        for most in (min(topk + spare, groups), min((topk + spare) * SCORE_GROUP_SIZE, columns))
    )
    _select_rows_kernel[(batch * queries,)](
        *(of_rows, of_groups, length, page_table, chosen, count, bits, group_list, row_list),
        *(queries, capacity, rows, topk, spare, width, *of_rows.stride()[:2], *of_groups.stride()[:2]),
        *(length.stride(0), page_table.stride(0), group_list.stride(0), row_list.stride(0)),
        GROUP_SIZE=SCORE_GROUP_SIZE, PAGE_SIZE=page_size, WORDS=next_power_of_2(num_ancestor_words),
        WORD_BITS=ANCESTOR_BITS, SCORES_PER_CHUNK=SCORES_PER_CHUNK, NUM_BINS=NUM_BINS, num_warps=NUM_WARPS,
        **pdl_arguments(chip(of_rows)),
    )  # fmt: skip
    return SelectedRows(chosen, count, bits)
