"""Computes index scores, the sum over index heads of weight · max(q · k, 0), for rows in pages and staged rows.

There are few queries and many rows.  A program holds the heads of a few queries, and multiplies block after block of
keys with all these heads.  The programs of a request take the request's blocks in turn.  So a captured launch does no
work for rows that do not exist.  The last blocks hold the staged rows, of which a query sees those in its ancestor
bits.

With 64 heads of 128 values, one query computes 16,384 flops for each key of 256 bytes.  So from 4 queries on, products
take longer than reading the keys.

Tolerance: products and sums are in float32, in another order than the reference's.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.attention.ancestor_bits import require_ancestor_bits
from espalier.kernels.attention.attention_blocks import load_pages_of_block, pool_rows_of_block
from espalier.kernels.ops.attention import KERNEL_DTYPES
from espalier.kernels.ops.selection import MAX_INDEX_SIZE, SCORE_GROUP_SIZE, IndexerKeys, IndexerQueries, IndexerScores
from espalier.kernels.runtime.jit import kernel
from espalier.kernels.runtime.launch import Chip, chip, next_power_of_2, require
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger_and_wait

# Keys of a block, and the most blocks of keys that are loaded at the same time.
BLOCK_N, STAGES = 64, 3
# Programs per multiprocessor: while one program multiplies, another adds up its products.
PROGRAMS_PER_PROCESSOR = 2
NUM_WARPS = 4
# The most columns of a program's product; in float32 fewer, without tensor cores.  A column is a head of a query.
MAX_PRODUCT_COLUMNS, MAX_FLOAT32_PRODUCT_COLUMNS = 256, 64


# Bytes of shared memory through which threads exchange scores.
SCORE_EXCHANGE_BYTES = 4096


class SharedMemoryPlan(NamedTuple):
    """The numbers of queries, heads and key blocks that one program keeps in shared memory.

    num_queries: a power of two.  block_heads: heads of a query, padded to a power of two.  num_stages: blocks of keys.
    """

    num_queries: int
    block_heads: int
    num_stages: int


@kernel
def _score_block(
    keys, q, weight, is_visible, QUERIES: tl.constexpr, BLOCK_HEADS: tl.constexpr, PRECISION: tl.constexpr
):
    """Returns [BLOCK_N, QUERIES] float32: the scores of keys [BLOCK_N, HEAD_SIZE] for queries q [HEAD_SIZE, QUERIES ·
    BLOCK_HEADS].

    The score is -inf where is_visible is false."""
    products = tl.maximum(tl.dot(keys, q, input_precision=PRECISION), 0.0) * weight[None, :]
    score = tl.sum(tl.reshape(products, [keys.shape[0], QUERIES, BLOCK_HEADS]), 2)
    return tl.where(is_visible, score, float("-inf"))


@kernel
def _store_scores(
    score, out_ptr, group_max_ptr, block_index, num_rows, first_column, first_group, query, query_exists,
    out_stride_q, group_max_stride_q, GROUP_SIZE: tl.constexpr,
):  # fmt: skip
    """Store scores [BLOCK_N, QUERIES] of rows below num_rows, and the highest score of each group of rows.

    The rows are either the committed rows or the staged rows.  first_column: the column of out_ptr for their first row.
    first_group: the column of group_max_ptr for their first group."""
    BLOCK_N: tl.constexpr = score.shape[0]
    QUERIES: tl.constexpr = score.shape[1]
    row = block_index * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    tl.store(out_ptr + query * out_stride_q + (first_column + row), score, mask=(row < num_rows) & query_exists)
    top = tl.max(
        tl.reshape(tl.where(row < num_rows, score, float("-inf")), [BLOCK_N // GROUP_SIZE, GROUP_SIZE, QUERIES]), 1
    )
    at = block_index * (BLOCK_N // GROUP_SIZE) + tl.arange(0, BLOCK_N // GROUP_SIZE)[:, None]
    tl.store(
        group_max_ptr + query * group_max_stride_q + (first_group + at),
        top,
        mask=(at * GROUP_SIZE < num_rows) & query_exists,
    )


@kernel
def _index_scores_kernel(
    q_ptr, weight_ptr, key_ptr, staged_ptr, page_table_ptr, length_ptr, ancestor_bits_ptr, out_ptr, group_max_ptr,
    num_queries, num_staged_rows, num_positions, prefix_begin, q_stride_b, q_stride_q, weight_stride_b,
    weight_stride_q, key_stride_row, staged_stride_b, staged_stride_r, page_table_stride_b, length_stride_b,
    bits_stride_b, bits_stride_q, out_stride_b, out_stride_q, group_max_stride_b,
    group_max_stride_q,
    HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, PAGE_SIZE: tl.constexpr, PRECISION: tl.constexpr,
    GROUP_SIZE: tl.constexpr, QUERIES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, STAGES: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of QUERIES queries, programs that share a request's keys, B).  In this order the programs that read
    the same keys run at the same time, so the keys are read from memory once."""
    pdl_trigger_and_wait(USE_PDL)
    program, request = tl.program_id(1), tl.program_id(2).to(tl.int64)
    value, offset = tl.arange(0, BLOCK_SIZE), tl.arange(0, BLOCK_N)
    query = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    q_index = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES * BLOCK_HEADS) // BLOCK_HEADS
    head = tl.arange(0, QUERIES * BLOCK_HEADS) % BLOCK_HEADS
    exists = (q_index < num_queries) & (head < HEADS)
    weight = tl.load(weight_ptr + request * weight_stride_b + q_index * weight_stride_q + head, mask=exists, other=0.0)
    q = tl.load(
        q_ptr + request * q_stride_b + (q_index.to(tl.int64) * q_stride_q + head * HEAD_SIZE)[:, None] + value[None, :],
        mask=exists[:, None] & (value < HEAD_SIZE)[None, :], other=0.0,
    )  # fmt: skip
    q = tl.trans(q)
    out = out_ptr + request * out_stride_b
    top = group_max_ptr + request * group_max_stride_b
    query = query.to(tl.int64)[None, :]
    query_exists = query < num_queries
    length = tl.load(length_ptr + request * length_stride_b).to(tl.int32)
    committed_blocks = (length + BLOCK_N - 1) // BLOCK_N
    page_ids_ptr = page_table_ptr + request * page_table_stride_b
    page = load_pages_of_block(page_ids_ptr, program * BLOCK_N, length, PAGE_SIZE, BLOCK_N)
    for block in tl.range(program, committed_blocks, tl.num_programs(1), num_stages=STAGES):
        row = pool_rows_of_block(page, block * BLOCK_N, PAGE_SIZE, BLOCK_N)
        page = load_pages_of_block(page_ids_ptr, (block + tl.num_programs(1)) * BLOCK_N, length, PAGE_SIZE, BLOCK_N)
        at = (block * BLOCK_N + offset)[:, None]
        keys = tl.load(
            key_ptr + (row * key_stride_row)[:, None] + value[None, :],
            mask=(at < length) & (value < HEAD_SIZE)[None, :], other=0.0,
        )  # fmt: skip
        score = _score_block(keys, q, weight, at >= prefix_begin, QUERIES, BLOCK_HEADS, PRECISION)
        _store_scores(
            score, out, top, block, length, 0, 0, query, query_exists, out_stride_q, group_max_stride_q, GROUP_SIZE
        )
    # The last program takes the first staged block, because it may have one committed block less than other programs.
    first_staged, staged_blocks = tl.num_programs(1) - 1 - program, (num_staged_rows + BLOCK_N - 1) // BLOCK_N
    for block in tl.range(first_staged, staged_blocks, tl.num_programs(1), num_stages=1):
        at = (block * BLOCK_N + offset)[:, None]
        keys = tl.load(
            staged_ptr + request * staged_stride_b + at.to(tl.int64) * staged_stride_r + value[None, :],
            mask=(at < num_staged_rows) & (value < HEAD_SIZE)[None, :], other=0.0,
        )  # fmt: skip
        word = tl.load(
            ancestor_bits_ptr + request * bits_stride_b + query * bits_stride_q + at // 64,
            mask=(at < num_staged_rows) & query_exists, other=0,
        )  # fmt: skip
        seen = ((word >> (at % 64).to(tl.int64)) & 1) != 0
        score = _score_block(keys, q, weight, seen, QUERIES, BLOCK_HEADS, PRECISION)
        group = (num_positions + GROUP_SIZE - 1) // GROUP_SIZE
        _store_scores(
            score, out, top, block, num_staged_rows, num_positions, group, query, query_exists, out_stride_q,
            group_max_stride_q, GROUP_SIZE,
        )  # fmt: skip


def _plan_shared_memory(gpu: Chip, queries: int, heads: int, size: int, itemsize: int) -> SharedMemoryPlan:
    """Returns a program's shared memory plan.  The plan does not change the bits, because a score is a sum over the
    heads of one query.  size: values of a head.  itemsize: bytes of a value."""
    block_heads, row_bytes = max(next_power_of_2(heads), 16), max(next_power_of_2(size), 16) * itemsize
    max_columns = MAX_PRODUCT_COLUMNS if itemsize == 2 else MAX_FLOAT32_PRODUCT_COLUMNS
    free_rows = (gpu.shared_memory_per_program(PROGRAMS_PER_PROCESSOR) - STAGES * BLOCK_N * row_bytes) // row_bytes
    num_queries = next_power_of_2(queries)
    while num_queries > 1 and num_queries * block_heads > min(max_columns, free_rows):
        num_queries //= 2
    blocks = (gpu.shared_memory - SCORE_EXCHANGE_BYTES - num_queries * block_heads * row_bytes) // (BLOCK_N * row_bytes)
    return SharedMemoryPlan(num_queries, block_heads, min(max(blocks, 1), STAGES))


def index_scores(queries: IndexerQueries, keys: IndexerKeys, ancestor_bits: Tensor) -> IndexerScores:
    """Returns the scores of all rows for each query, see ops/selection.py.
    Raises EspalierError for shapes that do not agree, other dtypes, and too wide keys."""
    q, weights = queries
    batch, num_queries, heads, size = q.shape
    rows, capacity = keys.staged.shape[1], keys.page_table.shape[1] * keys.page_size
    if q.dtype not in KERNEL_DTYPES or size > MAX_INDEX_SIZE:
        raise EspalierError(
            f"index scores support {', '.join(map(str, KERNEL_DTYPES))} and keys of up to {MAX_INDEX_SIZE} values, but "
            f"got {q.dtype} and {size}: use attention='reference'"
        )
    require("index scores: weights", weights, (batch, num_queries, heads), torch.float32, q)
    require("index scores: committed", keys.committed, (-1, 1, size), q.dtype, q)
    require("index scores: staged", keys.staged, (batch, rows, 1, size), q.dtype, q)
    require("index scores: page_table", keys.page_table, (batch, -1), torch.int32, q)
    require("index scores: length", keys.length, (batch,), torch.int64, q)
    require_ancestor_bits("index scores: ancestor_bits", ancestor_bits, rows, q)
    if q.stride()[2:] != (size, 1) or weights.stride(2) != 1:
        q, weights = q.contiguous(), weights.contiguous()
    scores = IndexerScores.empty(batch, num_queries, capacity, rows, q.device)
    if not scores.row_scores.numel():
        return scores
    plan = _plan_shared_memory(chip(q), num_queries, heads, size, q.itemsize)
    blocks = -(-num_queries // plan.num_queries)
    max_programs = max(chip(q).processors * PROGRAMS_PER_PROCESSOR // (batch * blocks), 1)
    programs = min(-(-capacity // BLOCK_N) + -(-rows // BLOCK_N), max_programs)
    # With fused multiply-adds, the compiler could round the scores of a program's queries differently.
    _index_scores_kernel[(blocks, programs, batch)](
        *(q, weights, keys.committed, keys.staged, keys.page_table, keys.length, ancestor_bits, *scores),
        *(num_queries, rows, capacity, keys.first_position),
        *(*q.stride()[:2], *weights.stride()[:2], keys.committed.stride(0), *keys.staged.stride()[:2]),
        *(keys.page_table.stride(0), keys.length.stride(0), *ancestor_bits.stride()[:2]),
        *(*scores.row_scores.stride()[:2], *scores.group_scores.stride()[:2]),
        HEADS=heads, HEAD_SIZE=size, PAGE_SIZE=keys.page_size, PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        GROUP_SIZE=SCORE_GROUP_SIZE, QUERIES=plan.num_queries, BLOCK_N=BLOCK_N, BLOCK_HEADS=plan.block_heads,
        BLOCK_SIZE=max(next_power_of_2(size), 16), STAGES=plan.num_stages, num_warps=NUM_WARPS, enable_fp_fusion=False,
        **pdl_arguments(chip(q)),
    )  # fmt: skip
    return scores
