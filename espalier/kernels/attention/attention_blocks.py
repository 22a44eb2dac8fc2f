"""The loops of the Triton attention kernels, in which a query tile attends to one block of rows after the other.

`_attend_unmasked_blocks` and `attend_blocks` read committed rows through a page table.  `attend_staged` reads staged
rows.  Each loop takes and returns the tile's online softmax: (max_score, sum_weights, acc).  The loops serve
tree_attention.py (K and V heads) and latent_attention.py (latent rows, whose queries have two parts).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.attention.ancestor_bits import require_ancestor_bits
from espalier.kernels.attention.work_items import (
    STAGED_CHAIN,
    STAGED_NONE,
    STAGED_TREE,
    count_committed_blocks,
    nth_block_index,
)
from espalier.kernels.ops.attention import AttentionInputs, PartialResults
from espalier.kernels.runtime.jit import from_fp8, kernel
from espalier.kernels.runtime.launch import chip, require
from espalier.kernels.runtime.pdl import pdl_arguments
from espalier.kernels.state.kv_scales import require_kv_rows

LOG2_E = 1.4426950408889634


class AttentionConstexprs(NamedTuple):
    """The constexpr arguments of an attention kernel, as one `tl.constexpr` variable.

    WINDOW: the sliding window, 0 for none.  SOFTCAP: the soft-cap of logits, 0 for none.
    STAGED_KIND: 0 for no staged rows, 1 for a chain, 2 for a tree.  PRECISION: input_precision of tl.dot.
    BLOCK_N, BLOCK_R: committed rows and staged rows per step.  STAGES: pipeline stages.
    FIRST_TILE_SIZE, SECOND_TILE_SIZE: how many values of a row the first and the second tile hold (RowTiles).
    FIRST_TILE_BLOCK, SECOND_TILE_BLOCK: these sizes, rounded up to powers of two."""

    PAGE_SIZE: Any
    WINDOW: Any
    SOFTCAP: Any
    STAGED_KIND: Any
    PRECISION: Any
    STAGES: Any
    BLOCK_N: Any
    BLOCK_R: Any
    FIRST_TILE_SIZE: Any
    SECOND_TILE_SIZE: Any
    FIRST_TILE_BLOCK: Any
    SECOND_TILE_BLOCK: Any


class RowTiles(NamedTuple):
    """Pointers and row strides of the two tiles of a row.  For K and V heads, the tiles are K and V.  For a latent row,
    the first tile is the latent, which is also V, and the second is the RoPE part."""

    first_tile_ptr: Any
    first_tile_stride: Any
    second_tile_ptr: Any
    second_tile_stride: Any


@kernel
def _attend_block(
    q, q_rope, first_tile, second_tile, is_visible, scale, max_score, sum_weights, acc,
    MASKED: tl.constexpr, CONSTANTS: tl.constexpr,
):  # fmt: skip
    """Add the rows of two tiles [N, d] to an online softmax in base 2 (Milakov and Gimelshein 2018).

    q_rope: the part of the queries that is multiplied with the second tile of latent rows; None for K and V heads.
    FP8 rows are converted to q's dtype, exactly.  K's FP8 scale is a factor of `scale`.  V's FP8 scale multiplies the
    result.  Every fused multiply-add is explicit, so that the results equal those of kernels/hopper/attend.py, bit for
    bit.  If the compiler chose where to fuse, a change of another loop could change the bits.
    max_score [M], sum_weights [M], acc [M, d]: the state of the softmax so far; the new state is returned."""
    PRECISION: tl.constexpr = CONSTANTS.PRECISION
    values = from_fp8(first_tile, q.dtype)
    if q_rope is None:
        scores = tl.dot(q, tl.trans(values), input_precision=PRECISION)
        values = from_fp8(second_tile, q.dtype)
    else:
        rope = from_fp8(second_tile, q.dtype)
        scores = tl.dot(q, tl.trans(values), input_precision=PRECISION)
        scores = tl.dot(q_rope, tl.trans(rope), scores, input_precision=PRECISION)
    if CONSTANTS.SOFTCAP > 0:
        scores = _soft_capped(scores, scale, CONSTANTS.SOFTCAP)
        scale = 1.0
    return _attend_scores(scores, values, is_visible, scale, max_score, sum_weights, acc, MASKED, PRECISION)


@kernel
def _soft_capped(scores, scale, SOFTCAP: tl.constexpr):
    """Soft-cap scores: SOFTCAP · tanh(score / SOFTCAP), in base 2.

    A score times `scale` is in base 2; the cap of ±SOFTCAP is in base e.  tanh(x) is computed as 1 - 2 / (1 + e^2x).
    The error of tanh is at most 2^-24, so the error of a score is at most SOFTCAP · 2^-23."""
    exp_doubled = tl.exp2(scores * (scale * (2.0 / SOFTCAP)))
    return (SOFTCAP * 1.4426950408889634) * (1.0 - 2.0 / (1.0 + exp_doubled))


@kernel
def _attend_scores(
    scores, v, is_visible, scale, max_score, sum_weights, acc, MASKED: tl.constexpr, PRECISION: tl.constexpr
):
    """Add rows to an online softmax.  scores: [M, N], the products of queries and keys.  See _attend_block."""
    if MASKED:
        scores = tl.where(is_visible, scores, float("-inf"))
    new_max = tl.maximum(max_score, tl.max(scores, 1))
    # All scores are -inf until the first visible row; -inf - -inf would be NaN.
    scaled_max = tl.where(new_max == float("-inf"), 0.0, new_max * scale)
    weights = tl.exp2(tl.fma(scores, scale, -shift_exponent(scaled_max, v.dtype)[:, None]))
    decay = tl.exp2(tl.fma(max_score, scale, -scaled_max))
    sum_weights = tl.fma(sum_weights, decay, tl.sum(weights, 1))
    acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision=PRECISION)
    return new_max, sum_weights, acc


@kernel
def shift_exponent(exponent, dtype: tl.constexpr):
    """Subtract 15 from the exponent for float16.  So float16 weights are stored times 2^15.

    A weight is at most 1.  Without the factor, weights below 2^-24 would become 0, and the sum of many may matter."""
    if dtype == tl.float16:
        exponent = exponent - 15.0
    return exponent


@kernel
def log_sum_exp_base2(max_score, sum_weights, scale, dtype: tl.constexpr):
    """Returns the log-sum-exp in base 2.  sum_weights: the sum of weights in `dtype`, which shift_exponent scaled."""
    divisor = tl.where(sum_weights == 0.0, 1.0, sum_weights)
    lse = tl.fma(max_score, scale, shift_exponent(tl.log2(divisor), dtype))
    return tl.where(sum_weights == 0.0, float("-inf"), lse)


@kernel
def load_pages_of_block(page_ids_ptr, begin, end, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Load the page ids of BLOCK_N positions from `begin`, a multiple of BLOCK_N; a scalar if one page holds them all.

    page_ids_ptr: the request's row of the page table.  end: the first position that is not loaded."""
    if PAGE_SIZE % BLOCK_N == 0:
        page = tl.load(page_ids_ptr + begin // PAGE_SIZE, mask=begin < end, other=0)
    elif BLOCK_N % PAGE_SIZE == 0:
        offset = tl.arange(0, BLOCK_N)
        page = tl.load(page_ids_ptr + begin // PAGE_SIZE + offset // PAGE_SIZE, mask=begin + offset < end, other=0)
    else:
        key_position = begin + tl.arange(0, BLOCK_N)
        page = tl.load(page_ids_ptr + key_position // PAGE_SIZE, mask=key_position < end, other=0)
    return page


@kernel
def pool_rows_of_block(page, begin, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Returns [BLOCK_N] int64: the row (page · PAGE_SIZE + offset) of each position begin to begin + BLOCK_N - 1."""
    offset = tl.arange(0, BLOCK_N)
    # Rows fit in int32, which the launcher checks.  The conversion to int64 is here and not at the load of the page,
    # because Triton 3.6 pipelines only loops whose carried values are plain loads.
    if PAGE_SIZE % BLOCK_N == 0:
        row = page * PAGE_SIZE + begin % PAGE_SIZE + offset
    else:
        # Do not write offset % PAGE_SIZE here: Triton 3.6 would conclude that rows are multiples of the page size, and
        # use misaligned 16-byte loads for rows of 22 values.
        row = page * PAGE_SIZE + (begin + offset) % PAGE_SIZE
    return row.to(tl.int64)


@kernel
def load_rows(pointer, offsets, row_exists, MASKED: tl.constexpr, ROW_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Load rows [N, BLOCK] at offsets [N].  Values past ROW_SIZE are 0.  If MASKED, rows that do not exist are 0."""
    column = tl.arange(0, BLOCK)
    ptrs = pointer + offsets[:, None] + column[None, :]
    if MASKED:
        mask = row_exists[:, None]
        if BLOCK != ROW_SIZE:
            mask = mask & (column < ROW_SIZE)[None, :]
        rows = tl.load(ptrs, mask=mask, other=0.0)
    elif BLOCK != ROW_SIZE:
        rows = tl.load(ptrs, mask=(column < ROW_SIZE)[None, :], other=0.0)
    else:
        rows = tl.load(ptrs)
    return rows


# fmt: off
@kernel
def _load_tiles(tiles, row, row_exists, MASKED: tl.constexpr, CONSTANTS: tl.constexpr):
    """Returns (first tile, second tile) of the rows whose indices are `row` [N].  tiles: where the tiles begin."""
    first_rows, second_rows = row * tiles.first_tile_stride, row * tiles.second_tile_stride
    first = load_rows(
        tiles.first_tile_ptr, first_rows, row_exists, MASKED, CONSTANTS.FIRST_TILE_SIZE, CONSTANTS.FIRST_TILE_BLOCK,
    )
    second = load_rows(
        tiles.second_tile_ptr, second_rows, row_exists, MASKED, CONSTANTS.SECOND_TILE_SIZE, CONSTANTS.SECOND_TILE_BLOCK,
    )
    return first, second


@kernel
def _attend_unmasked_blocks(
    q, page_ids_ptr, tiles, begin, end, scale, max_score, sum_weights, acc, CONSTANTS: tl.constexpr
):
    """Attend to positions begin .. end, in whole blocks of BLOCK_N, without a mask: every query sees these rows."""
    PAGE_SIZE: tl.constexpr = CONSTANTS.PAGE_SIZE
    BLOCK_N: tl.constexpr = CONSTANTS.BLOCK_N
    page = load_pages_of_block(page_ids_ptr, begin, end, PAGE_SIZE, BLOCK_N)
    for block_begin in tl.range(begin, end, BLOCK_N, num_stages=CONSTANTS.STAGES):
        row = pool_rows_of_block(page, block_begin, PAGE_SIZE, BLOCK_N)
        page = load_pages_of_block(page_ids_ptr, block_begin + BLOCK_N, end, PAGE_SIZE, BLOCK_N)
        k, v = _load_tiles(tiles, row, 0, False, CONSTANTS)
        max_score, sum_weights, acc = _attend_block(
            q, None, k, v, 0, scale, max_score, sum_weights, acc, False, CONSTANTS
        )
    return max_score, sum_weights, acc


@kernel
def attend_blocks(
    q, q_rope, position, page_ids_ptr, tiles, begin, end, first_position, num_lower, num_unmasked, begin_block,
    end_block, scale, max_score, sum_weights, acc, MASKED: tl.constexpr, CONSTANTS: tl.constexpr,
):
    """Attend to blocks begin_block .. end_block from position `begin`, in the order of work_items.py:nth_block_index.

    num_lower, num_unmasked: see count_committed_blocks (work_items.py).
    MASKED: whether some rows are at or after `end`, or before `first_position`, or outside a window.  Rows that do not
    exist may be NaN, so they are not read."""
    PAGE_SIZE: tl.constexpr = CONSTANTS.PAGE_SIZE
    BLOCK_N: tl.constexpr = CONSTANTS.BLOCK_N
    block_begin = begin + nth_block_index(begin_block, num_lower, num_unmasked) * BLOCK_N
    page = load_pages_of_block(page_ids_ptr, block_begin, end, PAGE_SIZE, BLOCK_N)
    for step in tl.range(begin_block, end_block, num_stages=CONSTANTS.STAGES):
        block_begin = begin + nth_block_index(step, num_lower, num_unmasked) * BLOCK_N
        next_begin = begin + nth_block_index(step + 1, num_lower, num_unmasked) * BLOCK_N
        key_position = block_begin + tl.arange(0, BLOCK_N)
        row = pool_rows_of_block(page, block_begin, PAGE_SIZE, BLOCK_N)
        page = load_pages_of_block(page_ids_ptr, next_begin, end, PAGE_SIZE, BLOCK_N)
        exists = (key_position >= first_position) & (key_position < end)
        first_tile, second_tile = _load_tiles(tiles, row, exists, MASKED, CONSTANTS)
        seen = exists[None, :]
        if CONSTANTS.WINDOW > 0:
            seen = seen & (position[:, None] - key_position[None, :] < CONSTANTS.WINDOW)
        max_score, sum_weights, acc = _attend_block(
            q, q_rope, first_tile, second_tile, seen, scale, max_score, sum_weights, acc, MASKED, CONSTANTS
        )
    return max_score, sum_weights, acc


@kernel
def attend_staged(
    q, q_rope, query, query_exists, position, tiles, row_position_ptr, row_position_stride_r, ancestor_bits_ptr,
    bits_stride_q, begin_row, end_row, num_rows, scale, max_score, sum_weights, acc, CONSTANTS: tl.constexpr,
):
    """Attend to staged rows begin_row .. end_row, out of `num_rows`.

    In a chain (STAGED_KIND 1) a query sees its own row and all rows before it.  In a tree (STAGED_KIND 2) a query sees
    the rows whose bits are set in its ancestor bits."""
    WINDOW: tl.constexpr = CONSTANTS.WINDOW
    for first_row in tl.range(begin_row, end_row, CONSTANTS.BLOCK_R, num_stages=CONSTANTS.STAGES):
        node = first_row + tl.arange(0, CONSTANTS.BLOCK_R)
        exists = node < num_rows
        row = node.to(tl.int64)
        first_tile, second_tile = _load_tiles(tiles, row, exists, True, CONSTANTS)
        if CONSTANTS.STAGED_KIND == 1:
            seen = exists[None, :] & (node[None, :] <= query[:, None])
            if WINDOW > 0:
                seen = seen & (query[:, None] - node[None, :] < WINDOW)
        else:
            words_ptr = ancestor_bits_ptr + query.to(tl.int64) * bits_stride_q
            word = tl.load(words_ptr + first_row // 64, mask=query_exists, other=0)
            seen = exists[None, :] & (((word[:, None] >> (row % 64)[None, :]) & 1) != 0)
            if WINDOW > 0:
                position_ptrs = row_position_ptr + row * row_position_stride_r
                row_position = tl.load(position_ptrs, mask=exists, other=0).to(tl.int32)
                seen = seen & (position[:, None] - row_position[None, :] < WINDOW)
        max_score, sum_weights, acc = _attend_block(
            q, q_rope, first_tile, second_tile, seen, scale, max_score, sum_weights, acc, True, CONSTANTS
        )
    return max_score, sum_weights, acc


@kernel
def attend_committed(
    q, position, page_ids_ptr, tiles, begin, end, first_position, scale, max_score, sum_weights, acc,
    CONSTANTS: tl.constexpr,
):
    """Attend to positions begin .. end of K and V, first to the unmasked blocks.  begin is a multiple of BLOCK_N."""
    BLOCK_N: tl.constexpr = CONSTANTS.BLOCK_N
    num_blocks, num_lower, num_unmasked = count_committed_blocks(begin, end, first_position, CONSTANTS.WINDOW, BLOCK_N)
    if CONSTANTS.WINDOW == 0:
        low = begin + num_lower * BLOCK_N
        max_score, sum_weights, acc = _attend_unmasked_blocks(
            q, page_ids_ptr, tiles, low, low + num_unmasked * BLOCK_N, scale, max_score, sum_weights, acc, CONSTANTS
        )
    return attend_blocks(
        q, None, position, page_ids_ptr, tiles, begin, end, first_position, num_lower, num_unmasked, num_unmasked,
        num_blocks, scale, max_score, sum_weights, acc, True, CONSTANTS,
    )
# fmt: on


@kernel
def times_scale(values, scale_ptr, head):
    """Multiply values by the FP8 scale of a KV head.  scale_ptr: None for rows that are not FP8."""
    if scale_ptr is not None:
        values = values * tl.load(scale_ptr + head)
    return values


@kernel
def sink_share(lse, sink_ptr, head):
    """Returns the sum of all rows' weights, in a softmax that includes the head's sink (ops/attention.py:apply_sink).

    lse: the log-sum-exp of the rows, in base 2.  The fused multiply-add is explicit, as in `_attend_block`."""
    finite_lse = tl.where(lse == float("-inf"), 0.0, lse)
    sink = tl.load(sink_ptr + head).to(tl.float32)
    return 1.0 / (1.0 + tl.exp2(tl.fma(sink, 1.4426950408889634, -finite_lse)))


@kernel
def _write_tile(out_ptr, lse_ptr, row, acc, lse, query_exists, V_SIZE: tl.constexpr, BLOCK_V: tl.constexpr):
    """Write a query tile's results to rows `row` [M] of out [rows, V_SIZE] and lse [rows].  Skips padding queries."""
    column = tl.arange(0, BLOCK_V)
    mask = query_exists[:, None] & (column < V_SIZE)[None, :]
    tl.store(out_ptr + row[:, None] * V_SIZE + column[None, :], acc.to(out_ptr.dtype.element_ty), mask)
    tl.store(lse_ptr + row, lse, query_exists)


# fmt: off
@kernel
def write_work_item_result(
    results, split, request, request_splits, queries, query, query_exists, head, v_scale_ptr, kv_head,
    scale, max_score, sum_weights, acc,
    dtype: tl.constexpr, HEADS: tl.constexpr, HAS_SINK: tl.constexpr, V_SIZE: tl.constexpr, BLOCK_V: tl.constexpr,
):
    """Write the final result if the request has one split, else a partial result.

    scale: the factor of the scores; 1 for soft-capped scores, which are already scaled.  dtype: the weights' dtype."""
    out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, sink_ptr = results
    divisor = tl.where(sum_weights == 0.0, 1.0, sum_weights)
    # One division per query is faster than one per value.
    out = times_scale(acc * (1.0 / divisor)[:, None], v_scale_ptr, kv_head)
    lse = log_sum_exp_base2(max_score, sum_weights, scale, dtype)
    if request_splits == 1:
        if HAS_SINK:
            out = out * sink_share(lse, sink_ptr, head)[:, None]
        row = (request * queries + query) * HEADS + head
        _write_tile(out_ptr, lse_ptr, row, out, lse * 0.6931471805599453, query_exists, V_SIZE, BLOCK_V)
    else:
        row = (split.to(tl.int64) * queries + query) * HEADS + head
        _write_tile(partial_ptr, partial_lse_ptr, row, out, lse, query_exists, V_SIZE, BLOCK_V)
# fmt: on


def check_attention_inputs(name: str, inputs: AttentionInputs, kv_heads: int) -> None:
    """Check the shapes, dtypes and strides that every attention kernel needs.
    name: the kernel's name in the error text.  Raises EspalierError."""
    q, (k, v), scales, prefix, nodes = inputs.q, inputs.pages, inputs.kv_scales, inputs.prefix, inputs.nodes
    (batch, queries, _, k_size), v_size = q.shape, inputs.v_size
    require_kv_rows(f"{name}'s k pages", k, (-1, kv_heads, k_size), scales, q)
    require_kv_rows(f"{name}'s v pages", v, (k.shape[0], kv_heads, v_size), scales, q)
    require(f"{name}'s page table", prefix.page_table, (batch, -1), torch.int32, q)
    require(f"{name}'s positions", nodes.positions, (batch, queries), torch.int64, q)
    if k.shape[0] >= 2**31:
        raise EspalierError(f"{name} supports pools below 2^31 rows, but got {k.shape[0]}")
    require(f"{name}'s splits", inputs.splits.starts, (2 * batch + 1,), torch.int32, q)
    dense_tensors = [k, v, prefix.page_table]
    if inputs.staged is not None:
        staged_k, staged_v = inputs.staged
        rows = staged_k.shape[1] if nodes.ancestor_bits is not None else queries
        require_kv_rows(f"{name}'s staged k", staged_k, (batch, rows, kv_heads, k_size), scales, q)
        require_kv_rows(f"{name}'s staged v", staged_v, (batch, rows, kv_heads, v_size), scales, q)
        require(f"{name}'s row positions", nodes.row_positions, (batch, rows), torch.int64, q)
        dense_tensors += inputs.staged
        if nodes.ancestor_bits is not None:
            require_ancestor_bits(f"{name}'s ancestor bits", nodes.ancestor_bits, rows, q)
            dense_tensors.append(nodes.ancestor_bits)
    if any(tensor.stride(-1) != 1 and tensor.shape[-1] > 1 for tensor in dense_tensors):
        raise EspalierError(f"{name} needs k, v, page table and ancestor bits with a contiguous last dimension")


def common_launch_arguments(
    inputs: AttentionInputs, partials: PartialResults, out: Tensor, lse: Tensor, num_tiles: int
) -> dict[str, Any]:
    """Returns the launch arguments that all attention kernels share.  num_tiles: number of query tiles."""
    q, prefix, staged, splits = inputs.q, inputs.prefix, inputs.staged, inputs.splits
    ancestor_bits = None if staged is None else inputs.nodes.ancestor_bits
    staged_kind = STAGED_NONE if staged is None else STAGED_CHAIN if ancestor_bits is None else STAGED_TREE
    return {
        "q_ptr": q,
        "page_table_ptr": prefix.page_table,
        "splits_ptr": splits.table,
        "split_starts_ptr": splits.starts,
        # Without ancestor bits the kernel gets a placeholder pointer, which it does not read.
        "ancestor_bits_ptr": inputs.nodes.positions if ancestor_bits is None else ancestor_bits,
        "out_ptr": out,
        "lse_ptr": lse,
        "partial_ptr": partials.out,
        "partial_lse_ptr": partials.lse,
        "scale": inputs.scale * LOG2_E,
        "batch": q.shape[0],
        "queries": q.shape[1],
        "rows": 0 if staged is None else staged[0].shape[1],
        "first_position": prefix.first_position,
        **named_strides(q, "q_stride_b", "q_stride_q", "q_stride_h"),
        **named_strides(prefix.page_table, "page_table_stride_b"),
        **(
            {"bits_stride_b": 0, "bits_stride_q": 0}
            if ancestor_bits is None
            else named_strides(ancestor_bits, "bits_stride_b", "bits_stride_q")
        ),
        "PAGE_SIZE": inputs.page_size,
        "STAGED_KIND": staged_kind,
        "LONGEST_FIRST": staged_kind == STAGED_CHAIN and num_tiles >= 8,
        **pdl_arguments(chip(q)),
    }


def named_strides(tensor: Tensor, *names: str) -> dict[str, int]:
    """Returns the tensor's leading strides, under these names."""
    return dict(zip(names, tensor.stride(), strict=False))
