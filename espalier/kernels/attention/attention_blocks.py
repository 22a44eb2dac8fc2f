"""The loops of the Triton attention kernel (kernels/attention/tree_attention.py): a query tile over blocks of rows.

`_over_unmasked` and `_over_masked` read committed rows through a page table, `_over_staged` reads staged rows.  Each
takes and returns the tile's online softmax: (max_score, sum_weights, acc).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from espalier.kernels.attention.work_items import block_index, committed_blocks
from espalier.kernels.runtime.convert import from_fp8
from espalier.kernels.runtime.launch import kernel

if TYPE_CHECKING:
    import triton.language as tl


@kernel
def _attend_block(q, k, v, seen, scale, max_score, sum_weights, acc, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """Add keys k [N, d] and values v [N, d] to an online softmax in base 2 (Milakov and Gimelshein 2018).

    FP8 rows become q's dtype, which is exact.  Their scales are factors of `scale` and of the result.
    Every fused multiply-add is explicit.  If the compiler chose them, a change of another loop could change a rounding,
    and the bits would differ from those of kernels/attention/hopper_attend.py.
    """
    scores = tl.dot(q, tl.trans(from_fp8(k, q.dtype)), input_precision=PRECISION)
    return _attend_scores(scores, from_fp8(v, q.dtype), seen, scale, max_score, sum_weights, acc, MASKED, PRECISION)


@kernel
def _attend_scores(scores, v, seen, scale, max_score, sum_weights, acc, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """As `_attend_block`, but with the products of queries and keys already computed: scores [M, N]."""
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    new_max = tl.maximum(max_score, tl.max(scores, 1))
    # All scores are -inf until the first visible row; -inf - -inf would be NaN.
    scaled_max = tl.where(new_max == float("-inf"), 0.0, new_max * scale)
    weights = tl.exp2(tl.fma(scores, scale, -scaled_max[:, None]))
    decay = tl.exp2(tl.fma(max_score, scale, -scaled_max))
    sum_weights = tl.fma(sum_weights, decay, tl.sum(weights, 1))
    acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision=PRECISION)
    return new_max, sum_weights, acc


@kernel
def _page(table, at, end, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Pages of the BLOCK_N positions from `at`, a multiple of BLOCK_N.  A scalar if one page holds the whole block."""
    if PAGE_SIZE % BLOCK_N == 0:
        page = tl.load(table + at // PAGE_SIZE, mask=at < end, other=0)
    elif BLOCK_N % PAGE_SIZE == 0:
        offset = tl.arange(0, BLOCK_N)
        page = tl.load(table + at // PAGE_SIZE + offset // PAGE_SIZE, mask=at + offset < end, other=0)
    else:
        key_position = at + tl.arange(0, BLOCK_N)
        page = tl.load(table + key_position // PAGE_SIZE, mask=key_position < end, other=0)
    return page


@kernel
def _row(page, at, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """[BLOCK_N] int64: pool rows of the positions from `at`."""
    offset = tl.arange(0, BLOCK_N)
    # Rows fit in int32: the launcher checks the pool.  They become int64 here and not at the load of the page, because
    # Triton 3.6 does not pipeline a loop that carries more than the load itself.
    if PAGE_SIZE % BLOCK_N == 0:
        row = page * PAGE_SIZE + at % PAGE_SIZE + offset
    else:
        # Never offset % PAGE_SIZE alone: from it Triton 3.6 takes each row for a multiple of the page size, and loads
        # rows of 22 values 16 bytes at a time, misaligned.
        row = page * PAGE_SIZE + (at + offset) % PAGE_SIZE
    return row.to(tl.int64)


@kernel
def _rows(pointer, offsets, exists, MASKED: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Load rows [N, BLOCK] at offsets [N].  Zeros past SIZE and, if MASKED, for rows that do not exist."""
    size = tl.arange(0, BLOCK)
    at = pointer + offsets[:, None] + size[None, :]
    if MASKED:
        mask = exists[:, None]
        if BLOCK != SIZE:
            mask = mask & (size < SIZE)[None, :]
        rows = tl.load(at, mask=mask, other=0.0)
    elif BLOCK != SIZE:
        rows = tl.load(at, mask=(size < SIZE)[None, :], other=0.0)
    else:
        rows = tl.load(at)
    return rows


# Arguments are grouped by meaning; one argument per line would hide the groups.
# fmt: off
@kernel
def _over_unmasked(
    q, table, k_ptr, v_ptr, k_row, v_row, low, high, scale, max_score, sum_weights, acc,
    PAGE_SIZE: tl.constexpr, K_SIZE: tl.constexpr, V_SIZE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
):
    """Positions low .. high, in whole blocks of BLOCK_N.  All rows exist and every query sees them: no mask."""
    page = _page(table, low, high, PAGE_SIZE, BLOCK_N)
    for at in tl.range(low, high, BLOCK_N, num_stages=STAGES):
        row = _row(page, at, PAGE_SIZE, BLOCK_N)
        page = _page(table, at + BLOCK_N, high, PAGE_SIZE, BLOCK_N)
        k = _rows(k_ptr, row * k_row, 0, False, K_SIZE, BLOCK_K)
        v = _rows(v_ptr, row * v_row, 0, False, V_SIZE, BLOCK_V)
        max_score, sum_weights, acc = _attend_block(q, k, v, 0, scale, max_score, sum_weights, acc, False, PRECISION)
    return max_score, sum_weights, acc


@kernel
def _over_masked(
    q, position, table, k_ptr, v_ptr, k_row, v_row, begin, end, first, num_lower, num_unmasked, num_blocks,
    scale, max_score, sum_weights, acc,
    PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr, K_SIZE: tl.constexpr, V_SIZE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
):
    """The blocks that need a mask: all num_blocks from `begin`, except the num_unmasked after the first num_lower.

    Rows at or past `end` and below `first` are never read: they may be NaN.
    """
    page = _page(table, begin + block_index(num_unmasked, num_lower, num_unmasked) * BLOCK_N, end, PAGE_SIZE, BLOCK_N)
    for t in tl.range(num_unmasked, num_blocks, num_stages=STAGES):
        at = begin + block_index(t, num_lower, num_unmasked) * BLOCK_N
        at_next = begin + block_index(t + 1, num_lower, num_unmasked) * BLOCK_N
        key_position = at + tl.arange(0, BLOCK_N)
        row = _row(page, at, PAGE_SIZE, BLOCK_N)
        page = _page(table, at_next, end, PAGE_SIZE, BLOCK_N)
        exists = (key_position >= first) & (key_position < end)
        k = _rows(k_ptr, row * k_row, exists, True, K_SIZE, BLOCK_K)
        v = _rows(v_ptr, row * v_row, exists, True, V_SIZE, BLOCK_V)
        seen = exists[None, :]
        if WINDOW > 0:
            seen = seen & (position[:, None] - key_position[None, :] < WINDOW)
        max_score, sum_weights, acc = _attend_block(q, k, v, seen, scale, max_score, sum_weights, acc, True, PRECISION)
    return max_score, sum_weights, acc


@kernel
def _over_staged(
    q, query, query_exists, position, k_ptr, v_ptr, row_position_ptr, bits_ptr, bits_q, k_row, v_row, row_position_r,
    low, high, rows, scale, max_score, sum_weights, acc,
    STAGED: tl.constexpr, WINDOW: tl.constexpr, K_SIZE: tl.constexpr, V_SIZE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
):
    """Staged rows low .. high, out of `rows`.

    In a chain (STAGED 1) a query sees its own row and those before it; in a tree (2), the rows of its ancestor bits.
    """
    for at in tl.range(low, high, BLOCK_R, num_stages=STAGES):
        node = at + tl.arange(0, BLOCK_R)
        exists = node < rows
        row = node.to(tl.int64)
        k = _rows(k_ptr, row * k_row, exists, True, K_SIZE, BLOCK_K)
        v = _rows(v_ptr, row * v_row, exists, True, V_SIZE, BLOCK_V)
        if STAGED == 1:
            seen = exists[None, :] & (node[None, :] <= query[:, None])
            if WINDOW > 0:
                seen = seen & (query[:, None] - node[None, :] < WINDOW)
        else:
            word = tl.load(bits_ptr + query.to(tl.int64) * bits_q + at // 64, mask=query_exists, other=0)
            seen = exists[None, :] & (((word[:, None] >> (row % 64)[None, :]) & 1) != 0)
            if WINDOW > 0:
                row_position = tl.load(row_position_ptr + row * row_position_r, mask=exists, other=0).to(tl.int32)
                seen = seen & (position[:, None] - row_position[None, :] < WINDOW)
        max_score, sum_weights, acc = _attend_block(q, k, v, seen, scale, max_score, sum_weights, acc, True, PRECISION)
    return max_score, sum_weights, acc

@kernel
def _over_committed(
    q, position, table, k_ptr, v_ptr, k_row, v_row, begin, end, first, scale, max_score, sum_weights, acc,
    PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr, K_SIZE: tl.constexpr, V_SIZE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
):
    """Positions begin .. end; begin is a multiple of BLOCK_N.  First the unmasked blocks, then the masked ones."""
    num_blocks, num_lower, num_unmasked = committed_blocks(begin, end, first, WINDOW, BLOCK_N)
    if WINDOW == 0:
        low = begin + num_lower * BLOCK_N
        max_score, sum_weights, acc = _over_unmasked(
            q, table, k_ptr, v_ptr, k_row, v_row, low, low + num_unmasked * BLOCK_N, scale, max_score, sum_weights, acc,
            PAGE_SIZE, K_SIZE, V_SIZE, PRECISION, BLOCK_N, BLOCK_K, BLOCK_V, STAGES,
        )
    return _over_masked(
        q, position, table, k_ptr, v_ptr, k_row, v_row, begin, end, first, num_lower, num_unmasked, num_blocks,
        scale, max_score, sum_weights, acc,
        PAGE_SIZE, WINDOW, K_SIZE, V_SIZE, PRECISION, BLOCK_N, BLOCK_K, BLOCK_V, STAGES,
    )
# fmt: on


@kernel
def _times_scale(values, scale_ptr, head):
    """values times the FP8 scale of a KV head; scale_ptr: None for rows that are not FP8."""
    if scale_ptr is not None:
        values = values * tl.load(scale_ptr + head)
    return values


@kernel
def _share_beside_sink(lse, sink_ptr, head):
    """The share of the softmax that rows keep when the sink of their head joins (masked_attention.py:with_sink).

    lse: of the rows, in base 2.  The fused multiply-add is explicit, as in `_attend_block`.
    """
    finite = tl.where(lse == float("-inf"), 0.0, lse)
    sink = tl.load(sink_ptr + head).to(tl.float32)
    return 1.0 / (1.0 + tl.exp2(tl.fma(sink, 1.4426950408889634, -finite)))


@kernel
def _with_sink(out, lse, sink_ptr, head, SINK: tl.constexpr):
    """A tile's out [M, V] after the sinks of its heads [M] have joined the softmax.  lse: [M], of the rows alone."""
    if SINK:
        out = out * _share_beside_sink(lse, sink_ptr, head)[:, None]
    return out


@kernel
def _write(out_ptr, lse_ptr, row, acc, lse, query_exists, V_SIZE: tl.constexpr, BLOCK_V: tl.constexpr):
    """Write a tile's results to the rows `row` [M] of out [rows, V_SIZE] and lse [rows]; skip padding queries."""
    size = tl.arange(0, BLOCK_V)
    mask = query_exists[:, None] & (size < V_SIZE)[None, :]
    tl.store(out_ptr + row[:, None] * V_SIZE + size[None, :], acc.to(out_ptr.dtype.element_ty), mask)
    tl.store(lse_ptr + row, lse, query_exists)
