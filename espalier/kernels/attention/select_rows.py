"""Selects, exactly, each query's rows with the topk largest (score, position), in order of position.

With its sign turned, a score's bit pattern is in the order of scores.  For each group of eight bits one launch counts
the scores per bin.  Together the counts give the threshold: the lowest chosen score, whatever the scores are.  A
further launch counts, per chunk of positions, the scores above the threshold and at it.  The last launch writes the
chosen rows.  From the counts a chunk knows where its rows begin, and how many equal scores in later chunks are taken.
Programs of chunks past a request's length end at once, so a captured launch does only the work of the actual length.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.ops.selection import MAX_TOPK, SelectedRows
from espalier.kernels.runtime.jit import kernel
from espalier.kernels.runtime.launch import chip, power_of_two, require
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger_and_wait
from espalier.layout import ANCESTOR_BITS

CHUNK = 4096
# Each level counts eight bits of a score, from the highest on.  The time of tl.histogram grows with the number of bins:
# for 128 queries of 32k scores, three levels of 2,048 bins took 0.5 ms.
LEVELS = 4
BINS = 256
NUM_WARPS = 8


@kernel
def _ordered(score):
    """uint32 numbers in the order of float32 scores.  Both zeros are equal."""
    score = tl.where(score == 0.0, 0.0, score)
    bits = score.to(tl.uint32, bitcast=True)
    return bits ^ tl.where(bits >> 31 != 0, 0xFFFFFFFF, 0x80000000).to(tl.uint32)


@kernel
def _chunk_of(score_ptr, chunk, length, capacity, rows, CHUNK: tl.constexpr):
    """(columns, whether they exist, ordered scores) of a chunk.

    Chunks of committed rows come before chunks of staged rows.
    """
    num_committed = (capacity + CHUNK - 1) // CHUNK
    is_staged = chunk >= num_committed
    at = (chunk - tl.where(is_staged, num_committed, 0)) * CHUNK + tl.arange(0, CHUNK)
    exists = at < tl.where(is_staged, rows, length)
    ordered = _ordered(tl.load(score_ptr + tl.where(is_staged, capacity, 0) + at, mask=exists, other=float("-inf")))
    # Scores of -inf are not counted.
    return at, exists & (ordered > 0x007FFFFF), ordered


@kernel
def _find_bin(bin_ptr, wanted, BINS: tl.constexpr):
    """(bin of the `wanted`-th largest score, how many scores of this bin are wanted); bin 0 if there are too few."""
    place = tl.arange(0, BINS)
    count = tl.load(bin_ptr + place)
    upto = tl.cumsum(count, 0, reverse=True)
    is_it = (upto >= wanted) & (upto - count < wanted)
    found = tl.sum(tl.where(is_it, place, 0), 0)
    return found, wanted - tl.sum(tl.where(is_it, upto - count, 0), 0)


@kernel
def _threshold(bin_ptr, wanted, LEVEL: tl.constexpr, BINS: tl.constexpr):
    """(leading bits of the threshold after LEVEL levels, how many scores with these leading bits are wanted)."""
    found = tl.zeros([], tl.uint32)
    for level in tl.static_range(LEVEL):
        place, wanted = _find_bin(bin_ptr + level * BINS, wanted, BINS)
        found = (found << 8) | place.to(tl.uint32)
    return found, wanted


@kernel
def _count_bins_kernel(
    score_ptr, length_ptr, bin_ptr, queries, capacity, rows, topk, score_b, score_q, length_b,
    LEVEL: tl.constexpr, LEVELS: tl.constexpr, CHUNK: tl.constexpr, BINS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Count the scores per bin of one level.  Grid: (chunks, B · Q).  bin_ptr: [B · Q, LEVELS, BINS]."""
    pdl_trigger_and_wait(DEPENDENT)
    chunk, query = tl.program_id(0), tl.program_id(1).to(tl.int64)
    request = query // queries
    length = tl.load(length_ptr + request * length_b).to(tl.int32)
    num_committed = (capacity + CHUNK - 1) // CHUNK
    if (chunk * CHUNK < length) | (chunk >= num_committed):
        scores = score_ptr + request * score_b + query % queries * score_q
        _at, exists, ordered = _chunk_of(scores, chunk, length, capacity, rows, CHUNK)
        bins = bin_ptr + query * LEVELS * BINS
        if LEVEL > 0:
            found, _wanted = _threshold(bins, topk, LEVEL, BINS)
            exists = exists & (ordered >> (32 - 8 * LEVEL) == found)
        place = (ordered >> (24 - 8 * LEVEL)) & 0xFF
        counts = tl.histogram(place.to(tl.int32), BINS, mask=exists)
        tl.atomic_add(bins + LEVEL * BINS + tl.arange(0, BINS), counts, mask=counts > 0, sem="relaxed")


@kernel
def _count_chunks_kernel(
    score_ptr, length_ptr, bin_ptr, count_ptr, queries, capacity, rows, topk, score_b, score_q, length_b,
    LEVELS: tl.constexpr, CHUNK: tl.constexpr, BINS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Count each chunk's scores.  Grid: (chunks, B · Q).  count_ptr: [B · Q, chunks, 2], above and at the threshold."""
    pdl_trigger_and_wait(DEPENDENT)
    chunk, query = tl.program_id(0), tl.program_id(1).to(tl.int64)
    request = query // queries
    length = tl.load(length_ptr + request * length_b).to(tl.int32)
    scores = score_ptr + request * score_b + query % queries * score_q
    above, equal = 0, 0
    if (chunk * CHUNK < length) | (chunk >= (capacity + CHUNK - 1) // CHUNK):
        least, _wanted = _threshold(bin_ptr + query * LEVELS * BINS, topk, LEVELS, BINS)
        _at, exists, ordered = _chunk_of(scores, chunk, length, capacity, rows, CHUNK)
        above = tl.sum((exists & (ordered > least)).to(tl.int32), 0)
        equal = tl.sum((exists & (ordered == least)).to(tl.int32), 0)
    to = count_ptr + (query * tl.num_programs(0) + chunk) * 2
    tl.store(to, above)
    tl.store(to + 1, equal)


@kernel
def _write_chunk(
    scores, table, row_ptr, chunk, length, capacity, rows, width, least, wanted, before, above_before, equal_behind,
    PAGE_SIZE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the chosen rows of a committed chunk.

    before: scores equal to the threshold in earlier chunks; equal_behind: in later chunks; above_before: scores above
    the threshold in earlier chunks.
    """
    at, exists, ordered = _chunk_of(scores, chunk, length, capacity, rows, CHUNK)
    is_equal = (exists & (ordered == least)).to(tl.int32)
    # Among scores equal to the threshold, the last rows are taken.
    behind = equal_behind + tl.cumsum(is_equal, 0, reverse=True)
    taken = (exists & (ordered > least)) | ((is_equal > 0) & (behind <= wanted))
    taken_before = tl.minimum(tl.maximum(wanted - equal_behind - tl.sum(is_equal, 0), 0), before)
    place = above_before + taken_before + tl.cumsum(taken.to(tl.int32), 0) - 1
    page = tl.load(table + at // PAGE_SIZE, mask=taken, other=0)
    tl.store(row_ptr + place, page * PAGE_SIZE + at % PAGE_SIZE, mask=taken & (place < width))


@kernel
def _write_bits(scores, words, rows, least, wanted, WORDS: tl.constexpr, WORD: tl.constexpr):
    """Write the bits of the chosen staged rows.  Returns the number of staged rows at the threshold."""
    at = tl.arange(0, WORDS * WORD)
    exists = at < rows
    ordered = _ordered(tl.load(scores + at, mask=exists, other=float("-inf")))
    exists = exists & (ordered > 0x007FFFFF)
    is_equal = (exists & (ordered == least)).to(tl.int32)
    taken = (exists & (ordered > least)) | ((is_equal > 0) & (tl.cumsum(is_equal, 0, reverse=True) <= wanted))
    bits = tl.reshape(taken.to(tl.int64) << (at % WORD).to(tl.int64), [WORDS, WORD])
    word = tl.arange(0, WORDS)
    tl.store(words + word, tl.sum(bits, 1), mask=word < (rows + WORD - 1) // WORD)
    return tl.sum(is_equal, 0)


@kernel
def _write_rows_kernel(
    score_ptr, length_ptr, bin_ptr, count_ptr, table_ptr, row_ptr, chosen_ptr, word_ptr,
    queries, capacity, rows, topk, width, chunks, score_b, score_q, length_b, table_b,
    PAGE_SIZE: tl.constexpr, LEVELS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, BINS: tl.constexpr,
    WORDS: tl.constexpr, WORD: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Write chosen rows.  Grid: (committed chunks + 1, B · Q).  A query's last program writes its bits and count."""
    pdl_trigger_and_wait(DEPENDENT)
    chunk, query = tl.program_id(0), tl.program_id(1).to(tl.int64)
    request = query // queries
    length = tl.load(length_ptr + request * length_b).to(tl.int32)
    num_committed = tl.num_programs(0) - 1
    scores = score_ptr + request * score_b + query % queries * score_q
    is_long = length + rows > topk
    if (chunk == num_committed) | (is_long & (chunk * CHUNK < length)):
        least, wanted = _threshold(bin_ptr + query * LEVELS * BINS, topk, LEVELS, BINS)
        other = tl.arange(0, CHUNKS)
        counts = count_ptr + (query * chunks + other) * 2
        above = tl.load(counts, mask=other < chunks, other=0)
        equal = tl.load(counts + 1, mask=other < chunks, other=0)
        above_before = tl.sum(tl.where(other < chunk, above, 0), 0)
        equal_before = tl.sum(tl.where(other < chunk, equal, 0), 0)
        if chunk < num_committed:
            equal_behind = tl.sum(tl.where(other > chunk, equal, 0), 0)
            _write_chunk(
                scores, table_ptr + request * table_b, row_ptr + query * width, chunk, length, capacity, rows, width,
                least, wanted, equal_before, above_before, equal_behind, PAGE_SIZE, CHUNK,
            )  # fmt: skip
        else:
            words = word_ptr + query * ((rows + WORD - 1) // WORD)
            equal_staged = _write_bits(scores + capacity, words, rows, least, wanted, WORDS, WORD)
            count = above_before + tl.minimum(tl.maximum(wanted - equal_staged, 0), equal_before)
            tl.store(chosen_ptr + query, tl.where(is_long, count, 0).to(tl.int64))


def select_rows(scores: Tensor, length: Tensor, page_table: Tensor, page_size: int, topk: int) -> SelectedRows:
    """See ops/selection.py.  Raises EspalierError for sizes that do not agree, and for a topk over MAX_TOPK."""
    (batch, queries, columns), capacity = scores.shape, page_table.shape[1] * page_size
    rows, device = columns - capacity, scores.device
    require("selected rows: scores", scores, (batch, queries, columns), torch.float32, scores)
    require("selected rows: length", length, (batch,), torch.int64, scores)
    require("selected rows: page_table", page_table, (batch, -1), torch.int32, scores)
    if topk > MAX_TOPK or rows < 1 or scores.stride(2) != 1:
        raise EspalierError(
            f"the kernels select {MAX_TOPK} rows at most, and {topk} are asked for, of {rows} staged rows, which must "
            "be 1 or more: use attention='reference'"
        )
    width, num_words = min(topk, capacity), -(-rows // ANCESTOR_BITS)
    chosen = torch.zeros(batch, queries, width, dtype=torch.int32, device=device)
    count = torch.empty(batch, queries, dtype=torch.int64, device=device)
    bits = torch.empty(batch, queries, num_words, dtype=torch.int64, device=device)
    if not batch * queries:
        return SelectedRows(chosen, count, bits)
    num_committed = -(-capacity // CHUNK)
    chunks = num_committed + -(-rows // CHUNK)
    bins = torch.zeros(batch * queries, LEVELS, BINS, dtype=torch.int32, device=device)
    counts = torch.empty(batch * queries, chunks, 2, dtype=torch.int32, device=device)
    strides = *scores.stride()[:2], length.stride(0)
    sizes = queries, capacity, rows, topk
    constants = {"LEVELS": LEVELS, "CHUNK": CHUNK, "BINS": BINS}
    how: dict[str, Any] = {**constants, "num_warps": NUM_WARPS, **pdl_arguments(chip(scores))}
    grid = chunks, batch * queries
    for level in range(LEVELS):
        _count_bins_kernel[grid](scores, length, bins, *sizes, *strides, LEVEL=level, **how)
    _count_chunks_kernel[grid](scores, length, bins, counts, *sizes, *strides, **how)
    _write_rows_kernel[(num_committed + 1, batch * queries)](
        *(scores, length, bins, counts, page_table, chosen, count, bits),
        *(*sizes, width, chunks, *strides, page_table.stride(0)),
        PAGE_SIZE=page_size,
        CHUNKS=power_of_two(chunks),
        WORDS=power_of_two(num_words),
        WORD=ANCESTOR_BITS,
        **how,
    )
    return SelectedRows(chosen, count, bits)
