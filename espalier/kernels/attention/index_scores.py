"""Computes index scores, the sum over index heads of weight · max(q · k, 0), for rows in pages and staged rows.

There are few queries and many rows.  So a block of keys is loaded once and multiplied with the heads of one query after
another.  The programs of a request take its blocks in turns, so a captured launch does no work for rows that do not
exist.  The last block holds the staged rows; a query sees its ancestors among them.

With 64 heads of 128 values, one query computes 16,384 flops for each key of 256 bytes.  So from 4 queries on, products
take longer than reading the keys.

Tolerance: products and sums are in float32, over values of the dtype, in another order than the reference's.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.attention.ancestor_bits import require_ancestor_bits
from espalier.kernels.ops.attention import DTYPES
from espalier.kernels.ops.selection import MAX_INDEX_SIZE, IndexKeys, IndexQueries
from espalier.kernels.runtime.jit import kernel
from espalier.kernels.runtime.launch import chip, power_of_two, require
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger_and_wait

BLOCK_N = 128
# Programs per multiprocessor: one loads keys while another multiplies.
PROGRAMS_A_PROCESSOR = 2
NUM_WARPS = 4
# Queries per program, because pieces of prompts have many queries.
QUERY_STEP = 64
# The most heads that are multiplied at once.
MAX_BLOCK_H = 64


@kernel
def _score_block(
    keys, q_ptr, weight_ptr, query, q_q, q_h, weight_q,
    HEADS: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N] float32: the scores of keys [BLOCK_N, SIZE] for one query."""
    value = tl.arange(0, BLOCK_SIZE)
    score = tl.zeros([BLOCK_N], tl.float32)
    for first in tl.static_range(0, HEADS, BLOCK_H):
        head = first + tl.arange(0, BLOCK_H)
        q = tl.load(
            q_ptr + query.to(tl.int64) * q_q + head[:, None] * q_h + value[None, :],
            mask=(head[:, None] < HEADS) & (value[None, :] < SIZE), other=0.0,
        )  # fmt: skip
        weight = tl.load(weight_ptr + query.to(tl.int64) * weight_q + head, mask=head < HEADS, other=0.0)
        products = tl.dot(keys, tl.trans(q), input_precision=PRECISION)
        score += tl.sum(tl.maximum(products, 0.0) * weight[None, :], 1)
    return score


@kernel
def _index_scores_kernel(
    q_ptr, weight_ptr, key_ptr, staged_ptr, table_ptr, length_ptr, bits_ptr, out_ptr,
    queries, rows, capacity, first,
    q_b, q_q, q_h, weight_b, weight_q, key_row, staged_b, staged_r, table_b, length_b, bits_b, bits_q, out_b, out_q,
    HEADS: tl.constexpr, SIZE: tl.constexpr, PAGE_SIZE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_SIZE: tl.constexpr, QUERY_STEP: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    pdl_trigger_and_wait(DEPENDENT)
    first_query = tl.program_id(2) * QUERY_STEP
    program, request = tl.program_id(0), tl.program_id(1).to(tl.int64)
    q_ptr += request * q_b
    weight_ptr += request * weight_b
    out_ptr += request * out_b
    length = tl.load(length_ptr + request * length_b).to(tl.int32)
    committed_blocks = (length + BLOCK_N - 1) // BLOCK_N
    num_blocks = committed_blocks + (rows + BLOCK_N - 1) // BLOCK_N
    value, offset = tl.arange(0, BLOCK_SIZE), tl.arange(0, BLOCK_N)
    for block in range(program, num_blocks, tl.num_programs(0)):
        is_staged = block >= committed_blocks
        at = (block - tl.where(is_staged, committed_blocks, 0)) * BLOCK_N + offset
        exists = at < tl.where(is_staged, rows, length)
        if is_staged:
            from_ptr = staged_ptr + request * staged_b + at.to(tl.int64) * staged_r
        else:
            page = tl.load(table_ptr + request * table_b + at // PAGE_SIZE, mask=exists, other=0).to(tl.int64)
            from_ptr = key_ptr + (page * PAGE_SIZE + at % PAGE_SIZE) * key_row
        keys = tl.load(
            from_ptr[:, None] + value[None, :], mask=exists[:, None] & (value[None, :] < SIZE), other=0.0
        )  # fmt: skip
        for query in range(first_query, tl.minimum(first_query + QUERY_STEP, queries)):
            score = _score_block(
                keys, q_ptr, weight_ptr, query, q_q, q_h, weight_q,
                HEADS, SIZE, PRECISION, BLOCK_N, BLOCK_H, BLOCK_SIZE,
            )  # fmt: skip
            seen = at >= first
            if is_staged:
                word = tl.load(bits_ptr + request * bits_b + query * bits_q + at // 64, mask=exists, other=0)
                seen = ((word >> (at % 64).to(tl.int64)) & 1) != 0
            score = tl.where(seen, score, float("-inf"))
            column = tl.where(is_staged, capacity, 0) + at
            tl.store(out_ptr + tl.cast(query, tl.int64) * out_q + column, score, mask=exists)


def index_scores(queries: IndexQueries, keys: IndexKeys, ancestor_bits: Tensor) -> Tensor:
    """See ops/selection.py.  Raises EspalierError for sizes that do not agree, dtypes not in DTYPES, and wide keys."""
    q, weights = queries
    batch, num_queries, heads, size = q.shape
    rows, capacity = keys.staged.shape[1], keys.page_table.shape[1] * keys.page_size
    if q.dtype not in DTYPES or size > MAX_INDEX_SIZE:
        raise EspalierError(
            f"index scores support {', '.join(map(str, DTYPES))} and keys of up to {MAX_INDEX_SIZE} values, but got "
            f"{q.dtype} and {size}: use attention='reference'"
        )
    require("index scores: weights", weights, (batch, num_queries, heads), torch.float32, q)
    require("index scores: committed", keys.committed, (-1, 1, size), q.dtype, q)
    require("index scores: staged", keys.staged, (batch, rows, 1, size), q.dtype, q)
    require("index scores: page_table", keys.page_table, (batch, -1), torch.int32, q)
    require("index scores: length", keys.length, (batch,), torch.int64, q)
    require_ancestor_bits("index scores: ancestor_bits", ancestor_bits, rows, q)
    q, weights = q.contiguous(), weights.contiguous()
    scores = torch.empty(batch, num_queries, capacity + rows, dtype=torch.float32, device=q.device)
    if not scores.numel():
        return scores
    most_blocks = -(-capacity // BLOCK_N) + -(-rows // BLOCK_N)
    programs = min(most_blocks, -(-chip(q).processors * PROGRAMS_A_PROCESSOR // batch))
    _index_scores_kernel[(programs, batch, -(-num_queries // QUERY_STEP))](
        *(q, weights, keys.committed, keys.staged, keys.page_table, keys.length, ancestor_bits, scores),
        *(num_queries, rows, capacity, keys.first),
        *(*q.stride()[:3], *weights.stride()[:2], keys.committed.stride(0), *keys.staged.stride()[:2]),
        *(keys.page_table.stride(0), keys.length.stride(0), *ancestor_bits.stride()[:2], *scores.stride()[:2]),
        HEADS=heads,
        SIZE=size,
        PAGE_SIZE=keys.page_size,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        BLOCK_N=BLOCK_N,
        BLOCK_H=min(max(power_of_two(heads), 16), MAX_BLOCK_H),
        BLOCK_SIZE=max(power_of_two(size), 16),
        QUERY_STEP=QUERY_STEP,
        num_warps=NUM_WARPS,
        **pdl_arguments(chip(q)),
    )
    return scores
