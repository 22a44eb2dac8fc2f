"""Selects exactly the topk rows with the highest scores for each query, in order of position.  Of equal scores, the row
at the later position ranks higher.

One program selects the rows of one query.  The score of a group of adjacent rows is the score of its best row.  First
the program lists the topk groups with the highest scores, or a few more.  All chosen rows are in these groups, because
a row of another group ranks after the best row of each listed group.  Then the program selects among the rows of the
listed groups.  It skips rows that score below the lowest score of a listed group.

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

# The number of scores that a program holds at once.
SCORES_PER_CHUNK = 4096
# The time of tl.histogram grows with the number of bins.  A histogram needs a bin for each thread of a warp.
NUM_BINS = 32
NUM_WARPS = 16
# Up to topk / EXTRA_GROUPS_DIVISOR more groups than topk may be listed, because reading them takes less time than a
# longer search.
EXTRA_GROUPS_DIVISOR = 4
# In the first iteration of _find_threshold, a bin has at most 2^22 keys (_score_key), half of the 2^23 float32 numbers
# between two powers of two.  The last bin holds all lower scores, as the threshold is seldom far below the best score.
FIRST_BIN_BITS = tl.constexpr(22)
# The lowest key of a visible row.  Rows that are not visible have the score -inf, whose key is lower.
LOWEST_VISIBLE_KEY = tl.constexpr(0x00800000)


@kernel
def _score_key(score):
    """Returns uint32 keys in the order of float32 scores.  0.0 and -0.0 have the same key."""
    score = tl.where(score == 0.0, 0.0, score)
    bits = score.to(tl.uint32, bitcast=True)
    return bits ^ tl.where(bits >> 31 != 0, 0xFFFFFFFF, 0x80000000).to(tl.uint32)


@kernel
def _load_chunk(scores, columns, chunk, num_scores, gap_begin, gap_size, SCORES_PER_CHUNK: tl.constexpr):
    """Returns (columns, whether their rows are visible, keys of their scores) for the `chunk`-th part of the scores.

    num_scores: the number of scores in all chunks.  columns: the list of columns to load; None: columns 0 ..
    gap_begin-1, then the columns from gap_begin+gap_size on."""
    i = chunk * SCORES_PER_CHUNK + tl.arange(0, SCORES_PER_CHUNK)
    exists = i < num_scores
    if columns is None:
        column = i + tl.where(i >= gap_begin, gap_size, 0)
    else:
        column = tl.load(columns + i, mask=exists, other=0)
    key = _score_key(tl.load(scores + column, mask=exists, other=float("-inf")))
    return column, exists & (key >= LOWEST_VISIBLE_KEY), key


@kernel
def _num_bits(number):
    """Returns the number of bits of a uint32 without its leading zeros."""
    bits = tl.zeros([], tl.uint32)
    for i in tl.static_range(5):
        has_more = number >> (16 >> i) > 0
        bits += tl.where(has_more, 16 >> i, 0).to(tl.uint32)
        number = tl.where(has_more, number >> (16 >> i), number)
    return bits + tl.where(number > 0, 1, 0).to(tl.uint32)


@kernel
def _max_visible_key(scores, num_scores, gap_begin, gap_size, SCORES_PER_CHUNK: tl.constexpr):
    """Returns the highest key of `num_scores` scores, at least LOWEST_VISIBLE_KEY."""
    high = tl.full([], LOWEST_VISIBLE_KEY, tl.uint32)
    for chunk in range((num_scores + SCORES_PER_CHUNK - 1) // SCORES_PER_CHUNK):
        _column, seen, key = _load_chunk(scores, None, chunk, num_scores, gap_begin, gap_size, SCORES_PER_CHUNK)
        high = tl.maximum(high, tl.max(tl.where(seen, key, LOWEST_VISIBLE_KEY).to(tl.uint32), 0))
    return high


@kernel
def _find_threshold(
    scores, columns, num_scores, gap_begin, gap_size, min_key, max_key, topk, num_extra, max_first_bin_bits,
    SCORES_PER_CHUNK: tl.constexpr, NUM_BINS: tl.constexpr,
):  # fmt: skip
    """Search for the key that separates the topk highest of `num_scores` scores from the others.

    All keys are from min_key to max_key.  max_first_bin_bits: a bin of the first iteration, except the last bin, holds
    at most 2^max_first_bin_bits keys.
    Returns (max_key, span, num_skipped_ties).  Values with keys above the returned max_key are selected.  Values with
    keys from max_key - span to max_key are ties at the threshold, of which the first num_skipped_ties are not selected.
    So topk values are selected, or up to `num_extra` more; all values if there are fewer than topk."""
    span, num_in_bin, num_wanted = max_key - min_key, num_scores, tl.minimum(topk, num_scores)
    max_bin_bits = tl.full([], max_first_bin_bits, tl.uint32)
    bin_index = tl.arange(0, NUM_BINS)
    while (num_in_bin - num_wanted > num_extra) & (span > 0):
        bin_bits = tl.minimum(_num_bits(span // NUM_BINS), max_bin_bits)
        max_bin_bits = tl.full([], 32, tl.uint32)
        counts = tl.zeros([NUM_BINS], tl.int32)
        for chunk in range((num_scores + SCORES_PER_CHUNK - 1) // SCORES_PER_CHUNK):
            _column, seen, key = _load_chunk(scores, columns, chunk, num_scores, gap_begin, gap_size, SCORES_PER_CHUNK)
            is_between = seen & (key <= max_key) & (max_key - key <= span)
            bin_of_key = tl.minimum((max_key - key) >> bin_bits, NUM_BINS - 1)
            counts += tl.histogram(bin_of_key.to(tl.int32), NUM_BINS, mask=is_between)
        num_upto_bin = tl.cumsum(counts, 0)
        # In the first iteration fewer values than wanted may be visible, because `num_scores` includes invisible rows.
        num_wanted = tl.minimum(num_wanted, tl.max(num_upto_bin, 0))
        is_threshold_bin = (num_upto_bin >= num_wanted) & (num_upto_bin - counts < num_wanted)
        num_wanted -= tl.sum(tl.where(is_threshold_bin, num_upto_bin - counts, 0), 0)
        num_in_bin = tl.sum(tl.where(is_threshold_bin, counts, 0), 0)
        threshold_bin = tl.sum(tl.where(is_threshold_bin, bin_index, 0), 0)
        skipped_span = threshold_bin.to(tl.uint32) << bin_bits
        max_key -= skipped_span
        span = tl.where(threshold_bin == NUM_BINS - 1, span - skipped_span, (tl.full([], 1, tl.uint32) << bin_bits) - 1)
    return max_key, span, tl.where(num_in_bin - num_wanted > num_extra, num_in_bin - num_wanted, 0)


@kernel
def _place_selected(is_visible, key, max_key, key_span, num_skipped_ties, num_earlier_above, num_earlier_equal):
    """Returns for a chunk: (whether each score is selected, its output index, number above the threshold, number of
    ties).

    num_earlier_above, num_earlier_equal: the numbers of scores above the threshold and of ties in earlier chunks."""
    is_above = is_visible & (key > max_key)
    is_tie = is_visible & (key <= max_key) & (max_key - key <= key_span)
    # One sum counts scores above in its low 16 bits and ties in its high 16 bits: a chunk has fewer than 2^16 scores.
    packed_counts = is_above.to(tl.int32) | (is_tie.to(tl.int32) << 16)
    packed_upto, packed_total = tl.cumsum(packed_counts, 0), tl.sum(packed_counts, 0)
    equal_upto = num_earlier_equal + (packed_upto >> 16)
    is_selected = is_above | (is_tie & (equal_upto > num_skipped_ties))
    out_index = num_earlier_above + (packed_upto & 0xFFFF) + tl.maximum(equal_upto - num_skipped_ties, 0) - 1
    return is_selected, out_index, packed_total & 0xFFFF, packed_total >> 16


@kernel
def _list_candidate_groups(
    group_scores,
    list_ptr,
    num_groups,
    gap_begin,
    gap_size,
    topk,
    num_extra,
    SCORES_PER_CHUNK: tl.constexpr,
    NUM_BINS: tl.constexpr,
):
    """List the columns of the topk groups with the highest scores, and of up to `num_extra` more.  A group's score is
    the highest score of its adjacent rows, so only rows of these groups can be selected.

    Returns (number of listed groups, a key below which no row is selected, the highest key of all groups)."""
    max_key = _max_visible_key(group_scores, num_groups, gap_begin, gap_size, SCORES_PER_CHUNK)
    high, span, skipped_ties = _find_threshold(
        group_scores, None, num_groups, gap_begin, gap_size, tl.full([], LOWEST_VISIBLE_KEY, tl.uint32), max_key,
        topk, num_extra, FIRST_BIN_BITS, SCORES_PER_CHUNK, NUM_BINS,
    )  # fmt: skip
    num_above, num_ties = 0, 0
    for chunk in range((num_groups + SCORES_PER_CHUNK - 1) // SCORES_PER_CHUNK):
        column, seen, key = _load_chunk(group_scores, None, chunk, num_groups, gap_begin, gap_size, SCORES_PER_CHUNK)
        is_selected, place, above, ties = _place_selected(seen, key, high, span, skipped_ties, num_above, num_ties)
        tl.store(list_ptr + place, column, mask=is_selected)
        num_above += above
        num_ties += ties
    num_listed = num_above + num_ties - skipped_ties
    # If fewer than topk groups are listed, no visible row may be left out.
    return num_listed, tl.where(num_listed >= topk, high - span, LOWEST_VISIBLE_KEY).to(tl.uint32), max_key


@kernel
def _list_candidate_rows(
    scores, group_list, row_list, num_groups, min_key, length, num_positions, num_staged_rows,
    GROUP_SIZE: tl.constexpr, SCORES_PER_CHUNK: tl.constexpr,
):  # fmt: skip
    """List the columns of those rows in the listed groups whose key is at least `min_key`.  Returns their number."""
    GROUPS: tl.constexpr = SCORES_PER_CHUNK // GROUP_SIZE
    num_before_staged = (num_positions + GROUP_SIZE - 1) // GROUP_SIZE
    count = 0
    for chunk in range((num_groups + GROUPS - 1) // GROUPS):
        i = chunk * GROUPS + tl.arange(0, GROUPS)
        group = tl.load(group_list + i, mask=i < num_groups, other=0)
        is_staged = group >= num_before_staged
        first_row = (group - tl.where(is_staged, num_before_staged, 0)) * GROUP_SIZE
        row = first_row[:, None] + tl.arange(0, GROUP_SIZE)[None, :]
        exists = row < tl.where(i < num_groups, tl.where(is_staged, num_staged_rows, length), 0)[:, None]
        column = row + tl.where(is_staged, num_positions, 0)[:, None]
        is_listed = exists & (_score_key(tl.load(scores + column, mask=exists, other=float("-inf"))) >= min_key)
        num_upto_row, in_group = tl.cumsum(is_listed.to(tl.int32), 1), tl.sum(is_listed.to(tl.int32), 1)
        num_before = count + tl.cumsum(in_group, 0) - in_group
        tl.store(row_list + (num_before[:, None] + num_upto_row - 1), column, mask=is_listed)
        count += tl.sum(in_group, 0)
    return count


@kernel
def _write_selected_rows(
    scores, row_list, page_ids_ptr, out_ptr, num_listed, num_positions, max_key, key_span, num_skipped_ties,
    PAGE_SIZE: tl.constexpr, SCORES_PER_CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the selected committed rows.  Returns (number of written rows, number of selected ties among all rows)."""
    num_above, num_ties, num_written = 0, 0, tl.zeros([], tl.int32)
    for chunk in range((num_listed + SCORES_PER_CHUNK - 1) // SCORES_PER_CHUNK):
        column, seen, key = _load_chunk(scores, row_list, chunk, num_listed, 0, 0, SCORES_PER_CHUNK)
        is_selected, out_index, above, ties = _place_selected(
            seen, key, max_key, key_span, num_skipped_ties, num_above, num_ties
        )
        is_selected = is_selected & (column < num_positions)
        page = tl.load(page_ids_ptr + column // PAGE_SIZE, mask=is_selected, other=0)
        tl.store(out_ptr + out_index, page * PAGE_SIZE + column % PAGE_SIZE, mask=is_selected)
        num_written += tl.sum(is_selected.to(tl.int32), 0)
        num_above += above
        num_ties += ties
    return num_written, num_ties - num_skipped_ties


@kernel
def _write_selected_bits(
    scores,
    words_ptr,
    num_staged_rows,
    max_key,
    key_span,
    num_selected_ties,
    WORDS: tl.constexpr,
    WORD_BITS: tl.constexpr,
):
    """Write the bits of the selected staged rows.  Of all ties, the last num_selected_ties are selected.  Staged rows
    have the last positions, so ties are counted from the last staged row on backwards."""
    row = tl.arange(0, WORDS * WORD_BITS)
    exists = row < num_staged_rows
    key = _score_key(tl.load(scores + row, mask=exists, other=float("-inf")))
    is_above = exists & (key > max_key)
    is_tie = exists & (key <= max_key) & (max_key - key <= key_span)
    is_selected = is_above | (is_tie & (tl.cumsum(is_tie.to(tl.int32), 0, reverse=True) <= num_selected_ties))
    bits = tl.reshape(is_selected.to(tl.int64) << (row % WORD_BITS).to(tl.int64), [WORDS, WORD_BITS])
    word = tl.arange(0, WORDS)
    tl.store(words_ptr + word, tl.sum(bits, 1), mask=word < (num_staged_rows + WORD_BITS - 1) // WORD_BITS)


@kernel
def _select_rows_kernel(
    score_ptr, group_ptr, length_ptr, page_table_ptr, row_ptr, count_ptr, word_ptr, group_list_ptr, row_list_ptr,
    num_queries, num_positions, num_staged_rows, topk, num_extra, num_columns, score_stride_b, score_stride_q,
    group_stride_b, group_stride_q, length_stride_b, page_table_stride_b, group_list_stride_q, row_list_stride_q,
    GROUP_SIZE: tl.constexpr, PAGE_SIZE: tl.constexpr, WORDS: tl.constexpr, WORD_BITS: tl.constexpr,
    SCORES_PER_CHUNK: tl.constexpr, NUM_BINS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (B · Q).  A program has its own part of group_list and row_list.  num_extra: see _find_threshold."""
    pdl_trigger_and_wait(USE_PDL)
    query = tl.program_id(0).to(tl.int64)
    request = query // num_queries
    length = tl.load(length_ptr + request * length_stride_b).to(tl.int32)
    scores = score_ptr + request * score_stride_b + query % num_queries * score_stride_q
    page_ids_ptr, out = page_table_ptr + request * page_table_stride_b, row_ptr + query * num_columns
    # For a request with at most topk rows, no committed row is listed, and all visible staged rows are selected.
    max_key, span = tl.full([], LOWEST_VISIBLE_KEY - 1, tl.uint32), tl.zeros([], tl.uint32)
    num_rows, num_selected_ties = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    if length + num_staged_rows > topk:
        groups = group_ptr + request * group_stride_b + query % num_queries * group_stride_q
        group_list, row_list = group_list_ptr + query * group_list_stride_q, row_list_ptr + query * row_list_stride_q
        gap_begin = (length + GROUP_SIZE - 1) // GROUP_SIZE
        gap_size = (num_positions + GROUP_SIZE - 1) // GROUP_SIZE - gap_begin
        num_listed, min_key, max_group_key = _list_candidate_groups(
            groups, group_list, gap_begin + (num_staged_rows + GROUP_SIZE - 1) // GROUP_SIZE, gap_begin, gap_size,
            topk, num_extra, SCORES_PER_CHUNK, NUM_BINS,
        )  # fmt: skip
        # The barrier is needed because a thread reads entries of the list that other threads wrote.
        tl.debug_barrier()
        count = _list_candidate_rows(
            scores, group_list, row_list, num_listed, min_key, length, num_positions, num_staged_rows, GROUP_SIZE,
            SCORES_PER_CHUNK,
        )  # fmt: skip
        tl.debug_barrier()
        max_key, span, num_skipped_ties = _find_threshold(
            scores, row_list, count, 0, 0, min_key, max_group_key, topk, 0, 32, SCORES_PER_CHUNK, NUM_BINS
        )
        num_rows, num_selected_ties = _write_selected_rows(
            scores, row_list, page_ids_ptr, out, count, num_positions, max_key, span, num_skipped_ties, PAGE_SIZE,
            SCORES_PER_CHUNK,
        )  # fmt: skip
    tl.store(count_ptr + query, num_rows.to(tl.int64))
    for chunk in range(num_rows // SCORES_PER_CHUNK, (num_columns + SCORES_PER_CHUNK - 1) // SCORES_PER_CHUNK):
        place = chunk * SCORES_PER_CHUNK + tl.arange(0, SCORES_PER_CHUNK)
        tl.store(out + place, tl.zeros([SCORES_PER_CHUNK], tl.int32), mask=(place >= num_rows) & (place < num_columns))
    words = word_ptr + query * ((num_staged_rows + WORD_BITS - 1) // WORD_BITS)
    _write_selected_bits(
        scores + num_positions, words, num_staged_rows, max_key, span, num_selected_ties, WORDS, WORD_BITS
    )


def select_rows(scores: IndexerScores, length: Tensor, page_table: Tensor, page_size: int, topk: int) -> SelectedRows:
    """Returns the rows with the topk highest scores, see ops/selection.py.  length: [B].
    Raises EspalierError for shapes that do not agree, and for a topk over MAX_TOPK."""
    (row_scores, group_scores), capacity = scores, page_table.shape[1] * page_size
    (batch, queries, columns), device = row_scores.shape, row_scores.device
    rows, groups = columns - capacity, -(-capacity // SCORE_GROUP_SIZE) + -(-(columns - capacity) // SCORE_GROUP_SIZE)
    require("selected rows: scores", row_scores, (batch, queries, columns), torch.float32, row_scores)
    require("selected rows: groups of scores", group_scores, (batch, queries, groups), torch.float32, row_scores)
    require("selected rows: length", length, (batch,), torch.int64, row_scores)
    require("selected rows: page_table", page_table, (batch, -1), torch.int32, row_scores)
    if topk > MAX_TOPK or rows < 1 or row_scores.stride(2) != 1 or group_scores.stride(2) != 1:
        raise EspalierError(
            f"the kernels select {MAX_TOPK} rows at most, and {topk} are asked for, of {rows} staged rows, which must "
            "be 1 or more: use attention='reference'"
        )
    width, num_ancestor_words = min(topk, capacity), -(-rows // ANCESTOR_BITS)
    selected_rows = torch.empty(batch, queries, width, dtype=torch.int32, device=device)
    count = torch.empty(batch, queries, dtype=torch.int64, device=device)
    bits = torch.empty(batch, queries, num_ancestor_words, dtype=torch.int64, device=device)
    if not batch * queries:
        return SelectedRows(selected_rows, count, bits)
    num_extra = topk // EXTRA_GROUPS_DIVISOR
    group_list, row_list = (
        torch.empty(batch * queries, size, dtype=torch.int32, device=device)
        for size in (min(topk + num_extra, groups), min((topk + num_extra) * SCORE_GROUP_SIZE, columns))
    )
    _select_rows_kernel[(batch * queries,)](
        *(row_scores, group_scores, length, page_table, selected_rows, count, bits, group_list, row_list),
        *(queries, capacity, rows, topk, num_extra, width, *row_scores.stride()[:2], *group_scores.stride()[:2]),
        *(length.stride(0), page_table.stride(0), group_list.stride(0), row_list.stride(0)),
        GROUP_SIZE=SCORE_GROUP_SIZE, PAGE_SIZE=page_size, WORDS=next_power_of_2(num_ancestor_words),
        WORD_BITS=ANCESTOR_BITS, SCORES_PER_CHUNK=SCORES_PER_CHUNK, NUM_BINS=NUM_BINS, num_warps=NUM_WARPS,
        **pdl_arguments(chip(row_scores)),
    )  # fmt: skip
    return SelectedRows(selected_rows, count, bits)
