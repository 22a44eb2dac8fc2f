"""Attention in steps, in Triton: a tile of queries takes in rows, a block of them at a time.

What kernels/attention/tree_attention.py is built of.  `_over_whole` and `_over_edges` read committed rows through a
page table, `_over_nodes` staged ones; each takes and returns the running softmax (top, total, out) of its tile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from espalier.kernels.attention.work_items import block_at, committed_blocks
from espalier.kernels.runtime.launch import kernel

if TYPE_CHECKING:
    import triton.language as tl


@kernel
def _fold(q, k, v, seen, scale, top, total, out, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """Take keys k [N, d] with values v [N, d] into a running softmax in base 2 (Milakov and Gimelshein 2018).

    Every multiply-add is written as one.  Left to the compiler, which fuses what it finds free, a loop more or less
    elsewhere changes a rounding, and kernels/attention/hopper_attend.py would no longer give the same bits.
    """
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    return _fold_scores(scores, v, seen, scale, top, total, out, MASKED, PRECISION)


@kernel
def _fold_scores(scores, v, seen, scale, top, total, out, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """As `_fold`, from scores [M, N]."""
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    # Where nothing was seen yet all are -inf, and a difference would be NaN.
    level = tl.where(higher == float("-inf"), 0.0, higher * scale)
    weights = tl.exp2(tl.fma(scores, scale, -level[:, None]))
    decay = tl.exp2(tl.fma(top, scale, -level))
    total = tl.fma(total, decay, tl.sum(weights, 1))
    out = tl.dot(weights.to(v.dtype), v, out * decay[:, None], input_precision=PRECISION)
    return higher, total, out


@kernel
def _page(table, at, end, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Pages of BLOCK_N positions from `at`, a multiple of BLOCK_N, on: one page where a page is such a multiple too."""
    if PAGE_SIZE % BLOCK_N == 0:
        page = tl.load(table + at // PAGE_SIZE, mask=at < end, other=0)
    elif BLOCK_N % PAGE_SIZE == 0:
        offset = tl.arange(0, BLOCK_N)
        page = tl.load(table + at // PAGE_SIZE + offset // PAGE_SIZE, mask=at + offset < end, other=0)
    else:
        held = at + tl.arange(0, BLOCK_N)
        page = tl.load(table + held // PAGE_SIZE, mask=held < end, other=0)
    return page


@kernel
def _row(page, at, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """[BLOCK_N] int64: rows of the pool that hold the positions from `at` on."""
    offset = tl.arange(0, BLOCK_N)
    # Rows of a pool are fewer than 2^31, which the launcher checks.  They are widened here, not where a page is loaded:
    # Triton 3.6 does not pipeline a loop that carries more than the load itself.
    if PAGE_SIZE % BLOCK_N == 0:
        row = page * PAGE_SIZE + at % PAGE_SIZE + offset
    elif BLOCK_N % PAGE_SIZE == 0:
        row = page * PAGE_SIZE + offset % PAGE_SIZE
    else:
        row = page * PAGE_SIZE + (at + offset) % PAGE_SIZE
    return row.to(tl.int64)


@kernel
def _rows(pointer, offsets, real, MASKED: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """[N, BLOCK] values of rows at offsets [N], zeros past SIZE and, if MASKED, where a row is not real."""
    size = tl.arange(0, BLOCK)
    at = pointer + offsets[:, None] + size[None, :]
    if MASKED:
        mask = real[:, None]
        if BLOCK != SIZE:
            mask = mask & (size < SIZE)[None, :]
        rows = tl.load(at, mask=mask, other=0.0)
    elif BLOCK != SIZE:
        rows = tl.load(at, mask=(size < SIZE)[None, :], other=0.0)
    else:
        rows = tl.load(at)
    return rows


# Arguments stand in groups, which a line each would hide.
# fmt: off
@kernel
def _over_whole(
    q, table, k_ptr, v_ptr, k_row, v_row, low, high, scale, top, total, out,
    PAGE_SIZE: tl.constexpr, K_SIZE: tl.constexpr, V_SIZE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
):
    """Positions low .. high, a multiple of BLOCK_N of them, all of which exist and are seen: nothing is masked."""
    page = _page(table, low, high, PAGE_SIZE, BLOCK_N)
    for at in tl.range(low, high, BLOCK_N, num_stages=STAGES):
        row = _row(page, at, PAGE_SIZE, BLOCK_N)
        page = _page(table, at + BLOCK_N, high, PAGE_SIZE, BLOCK_N)
        k = _rows(k_ptr, row * k_row, 0, False, K_SIZE, BLOCK_K)
        v = _rows(v_ptr, row * v_row, 0, False, V_SIZE, BLOCK_V)
        top, total, out = _fold(q, k, v, 0, scale, top, total, out, False, PRECISION)
    return top, total, out


@kernel
def _over_edges(
    q, position, table, k_ptr, v_ptr, k_row, v_row, begin, end, first, lower, whole, steps, scale, top, total, out,
    PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr, K_SIZE: tl.constexpr, V_SIZE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
):
    """Of `steps` blocks from `begin` on all but the `whole` ones that come after `lower` others.

    What stands at `end` and past it, or below `first`, may be NaN: it is never read.
    """
    page = _page(table, begin + block_at(whole, lower, whole) * BLOCK_N, end, PAGE_SIZE, BLOCK_N)
    for t in tl.range(whole, steps, num_stages=STAGES):
        at = begin + block_at(t, lower, whole) * BLOCK_N
        at_next = begin + block_at(t + 1, lower, whole) * BLOCK_N
        held = at + tl.arange(0, BLOCK_N)
        row = _row(page, at, PAGE_SIZE, BLOCK_N)
        page = _page(table, at_next, end, PAGE_SIZE, BLOCK_N)
        real = (held >= first) & (held < end)
        k = _rows(k_ptr, row * k_row, real, True, K_SIZE, BLOCK_K)
        v = _rows(v_ptr, row * v_row, real, True, V_SIZE, BLOCK_V)
        seen = real[None, :]
        if WINDOW > 0:
            seen = seen & (position[:, None] - held[None, :] < WINDOW)
        top, total, out = _fold(q, k, v, seen, scale, top, total, out, True, PRECISION)
    return top, total, out


@kernel
def _over_nodes(
    q, query, asked, position, k_ptr, v_ptr, row_position_ptr, word_ptr, word_q, k_row, v_row, row_position_r,
    low, high, rows, scale, top, total, out,
    NODES: tl.constexpr, WINDOW: tl.constexpr, K_SIZE: tl.constexpr, V_SIZE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
):
    """Staged rows low .. high of `rows`: of a chain (NODES 1), a query's own and those before it; or by words (2)."""
    for at in tl.range(low, high, BLOCK_R, num_stages=STAGES):
        node = at + tl.arange(0, BLOCK_R)
        real = node < rows
        row = node.to(tl.int64)
        k = _rows(k_ptr, row * k_row, real, True, K_SIZE, BLOCK_K)
        v = _rows(v_ptr, row * v_row, real, True, V_SIZE, BLOCK_V)
        if NODES == 1:
            seen = real[None, :] & (node[None, :] <= query[:, None])
            if WINDOW > 0:
                seen = seen & (query[:, None] - node[None, :] < WINDOW)
        else:
            word = tl.load(word_ptr + query.to(tl.int64) * word_q + at // 64, mask=asked, other=0)
            seen = real[None, :] & (((word[:, None] >> (row % 64)[None, :]) & 1) != 0)
            if WINDOW > 0:
                row_position = tl.load(row_position_ptr + row * row_position_r, mask=real, other=0).to(tl.int32)
                seen = seen & (position[:, None] - row_position[None, :] < WINDOW)
        top, total, out = _fold(q, k, v, seen, scale, top, total, out, True, PRECISION)
    return top, total, out

@kernel
def _over_committed(
    q, position, table, k_ptr, v_ptr, k_row, v_row, begin, end, first, scale, top, total, out,
    PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr, K_SIZE: tl.constexpr, V_SIZE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
):
    """Positions begin .. end, begin a multiple of BLOCK_N: whole blocks, then those at the lower and the upper edge."""
    steps, lower, whole = committed_blocks(begin, end, first, WINDOW, BLOCK_N)
    if WINDOW == 0:
        low = begin + lower * BLOCK_N
        top, total, out = _over_whole(
            q, table, k_ptr, v_ptr, k_row, v_row, low, low + whole * BLOCK_N, scale, top, total, out,
            PAGE_SIZE, K_SIZE, V_SIZE, PRECISION, BLOCK_N, BLOCK_K, BLOCK_V, STAGES,
        )
    return _over_edges(
        q, position, table, k_ptr, v_ptr, k_row, v_row, begin, end, first, lower, whole, steps, scale, top, total, out,
        PAGE_SIZE, WINDOW, K_SIZE, V_SIZE, PRECISION, BLOCK_N, BLOCK_K, BLOCK_V, STAGES,
    )
# fmt: on


@kernel
def _write(out_ptr, lse_ptr, row, out, lse, asked, V_SIZE: tl.constexpr, BLOCK_V: tl.constexpr):
    """A tile's results to rows `row` [M] of [rows, V_SIZE] and [rows], where asked for."""
    size = tl.arange(0, BLOCK_V)
    mask = asked[:, None] & (size < V_SIZE)[None, :]
    tl.store(out_ptr + row[:, None] * V_SIZE + size[None, :], out.to(out_ptr.dtype.element_ty), mask)
    tl.store(lse_ptr + row, lse, asked)
