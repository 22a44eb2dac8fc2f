"""Attention on Hopper, the warps that load: rows of a unit, block after block, into the stages of shared memory.

They run ahead of the warps that attend (kernels/attention/hopper_attend.py) by as many stages as there are, past the
end of a unit into the next.  A stage is theirs while `empty` says so and is handed over through `full`.

Blocks whose rows stand side by side in the pool, as all do on pages of whole blocks and most do on pages that were free
in order, are copied by the chip's own engine (TMA), a block in one go: copies of each thread's take turns with what the
attending warps do.  Other blocks are gathered by cp.async, 16 bytes a thread, from pages of any size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from espalier.kernels.attention.work_items import block_at, committed_blocks, nodes_of, unit_of, work_at
from espalier.kernels.runtime.launch import gluon_kernel

if TYPE_CHECKING:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper


# Arguments of kernels stand in groups, which a line each would hide.
# fmt: off
@gluon_kernel
def span(
    begin, end, first, is_last, tile, rows, shallowest,
    GROUPS: gl.constexpr, NODES: gl.constexpr, WINDOW: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):
    """Of a unit: begin, its blocks of committed rows (units.committed_blocks), staged rows low .. high, and how many
    blocks in all, at least one.

    shallowest: the tile's least position, where there is a window.  The last range of a request has its staged rows.
    """
    if WINDOW > 0:
        begin = gl.maximum(begin, (shallowest - WINDOW + 1) // BLOCK_N * BLOCK_N)
    committed, lower, whole = committed_blocks(begin, end, first, WINDOW, BLOCK_N)
    low = 0
    high = 0
    if NODES > 0:
        low, high = nodes_of(tile, gl.where(is_last, rows, 0), NODES, WINDOW, GROUPS, BLOCK_M, BLOCK_N)
    blocks = gl.maximum(committed + (gl.maximum(high - low, 0) + BLOCK_N - 1) // BLOCK_N, 1)
    return begin, committed, lower, whole, low, high, blocks
# fmt: on


@gluon_kernel
def shallowest_of(
    positions, position_q, tile, queries, GROUPS: gl.constexpr, BLOCK_M: gl.constexpr, ROWS: gl.constexpr
):
    query = (tile * BLOCK_M + gl.arange(0, BLOCK_M, layout=ROWS)) // GROUPS
    position = gl.load(positions + query.to(gl.int64) * position_q, mask=query < queries, other=0x7FFFFFFF)
    return gl.min(position.to(gl.int32), 0)


@gluon_kernel
def _pages(table, at, end, PAGE_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, ROWS: gl.constexpr):
    """Pages of BLOCK_N positions from `at`, a multiple of BLOCK_N: one where a page holds them, else one for each."""
    if PAGE_SIZE % BLOCK_N == 0:
        page = gl.load(table + at // PAGE_SIZE, mask=at < end, other=0)
    else:
        offset = gl.arange(0, BLOCK_N, layout=ROWS)
        if BLOCK_N % PAGE_SIZE == 0:
            page = gl.load(table + at // PAGE_SIZE + offset // PAGE_SIZE, mask=at + offset < end, other=0)
        else:
            page = gl.load(table + (at + offset) // PAGE_SIZE, mask=at + offset < end, other=0)
    # Pages and rows of a pool are fewer than 2^31, which the launcher checks.
    return page.to(gl.int32)


@gluon_kernel
def _further(page, at, PAGE_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, ROWS: gl.constexpr):
    """Where the positions from `at` on stand: a row of the pool, and how far from it each is."""
    offset = gl.arange(0, BLOCK_N, layout=ROWS)
    row = gl.to_tensor(0)
    if PAGE_SIZE % BLOCK_N == 0:
        row = page * PAGE_SIZE + at % PAGE_SIZE
        further = offset
    elif BLOCK_N % PAGE_SIZE == 0:
        further = page * PAGE_SIZE + offset % PAGE_SIZE
    else:
        further = page * PAGE_SIZE + (at + offset) % PAGE_SIZE
    return row.to(gl.int64), further


@gluon_kernel
def _copy(
    stage,
    pointer,
    offsets,
    real,
    MASKED: gl.constexpr,
    SIZE: gl.constexpr,
    LOAD: gl.constexpr,
):
    """Start a copy of rows at offsets [BLOCK_N] into a stage; where MASKED, zeros for those that are not real."""
    at = gl.expand_dims(offsets, 1) + gl.expand_dims(gl.arange(0, SIZE, layout=gl.SliceLayout(0, LOAD)), 0)
    if MASKED:
        hopper.async_copy.async_copy_global_to_shared(stage, pointer + at, mask=gl.expand_dims(real, 1))
    else:
        hopper.async_copy.async_copy_global_to_shared(stage, pointer + at)


@gluon_kernel
def _times(further, row, NEAR: gl.constexpr):
    """Rows times numbers a row: small, or a product of 32 by 32 bits, one instruction, where 64 by 64 are three."""
    if NEAR:
        product = further * row
    else:
        product = (further.to(gl.uint32).to(gl.uint64) * row.to(gl.uint32).to(gl.uint64)).to(gl.int64)
    return product


# fmt: off
@gluon_kernel
def _copy_rows(
    k_stage, v_stage, k_ptr, v_ptr, row, further, k_row, v_row, real,
    MASKED: gl.constexpr, NEAR: gl.constexpr, SAME: gl.constexpr, SIZE: gl.constexpr, LOAD: gl.constexpr,
):
    """Keys and values of rows `row` + `further`.  NEAR: `further` is small; SAME: k_row and v_row are."""
    k_at = _times(further, k_row, NEAR)
    v_at = k_at if SAME else _times(further, v_row, NEAR)
    _copy(k_stage, k_ptr + row * k_row, k_at, real, MASKED, SIZE, LOAD)
    _copy(v_stage, v_ptr + row * v_row, v_at, real, MASKED, SIZE, LOAD)


@gluon_kernel
def _load_block(
    t, at, page, k_stage, v_stage, committed_rows, staged_rows, end, first, committed, low, high,
    PAGE_SIZE: gl.constexpr, SAME: gl.constexpr, SIZE: gl.constexpr, BLOCK_N: gl.constexpr, LOAD: gl.constexpr,
):
    """Start the copies of a unit's t-th block: committed rows from position `at`, on the page given, or staged ones.

    What stands at `end` and past it, below `first`, or past the staged rows may be NaN: it is never read.
    """
    ROWS: gl.constexpr = gl.SliceLayout(1, LOAD)
    offset = gl.arange(0, BLOCK_N, layout=ROWS)
    if t < committed:
        k_ptr, v_ptr, k_row, v_row = committed_rows
        row, further = _further(page, at, PAGE_SIZE, BLOCK_N, ROWS)
        if (at >= first) & (at + BLOCK_N <= end):
            _copy_rows(
                k_stage, v_stage, k_ptr, v_ptr, row, further, k_row, v_row, 0,
                False, PAGE_SIZE % BLOCK_N == 0, SAME, SIZE, LOAD,
            )
        else:
            _copy_rows(
                k_stage, v_stage, k_ptr, v_ptr, row, further, k_row, v_row,
                (at + offset >= first) & (at + offset < end), True, PAGE_SIZE % BLOCK_N == 0, SAME, SIZE, LOAD,
            )
    else:
        k_new, v_new, k_new_row, v_new_row = staged_rows
        node = low + (t - committed) * BLOCK_N
        _copy_rows(
            k_stage, v_stage, k_new, v_new, node.to(gl.int64), offset, k_new_row, v_new_row,
            node + offset < high, True, True, False, SIZE, LOAD,
        )


@gluon_kernel
def _load_straight(
    stages, done, count, at, end, k_rows, v_rows, head, table,
    SIZE: gl.constexpr, PAGE_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
):
    """Hand over `count` blocks from position `at` on, each of rows that stand side by side; -> done + count."""
    k_stages, v_stages, full, empty = stages
    # A block's page is asked for before the wait for a stage; in place of one past the last, the last.
    page = gl.load(table + at // PAGE_SIZE, mask=count > 0, other=0)
    for _ in range(count):
        row = page.to(gl.int32) * PAGE_SIZE + at % PAGE_SIZE
        at += BLOCK_N
        page = gl.load(table + gl.minimum(at, end - 1) // PAGE_SIZE)
        stage = done % STAGES
        hopper.mbarrier.wait(empty.index(stage), done // STAGES % 2 ^ 1)
        # One arrival with the bytes that are to come, and those of the threads that would copy.  One thread makes them
        # all, so no warp may lag: a barrier of the compiler's sees to that (tests/kernels/test_compiled.py).
        hopper.mbarrier.expect(full.index(stage), 2 * BLOCK_N * SIZE * 2)
        hopper.mbarrier.arrive(full.index(stage), count=32 * WARPS - 1)
        hopper.tma.async_copy_global_to_shared(k_rows, [row, head * SIZE], full.index(stage), k_stages.index(stage))
        hopper.tma.async_copy_global_to_shared(v_rows, [row, head * SIZE], full.index(stage), v_stages.index(stage))
        done += 1
    return done


@gluon_kernel
def load_units(
    stages, plan, keys, values, new_keys, new_values, table_ptr, table_b, positions, k_rows, v_rows, straight_ptr,
    KV_HEADS: gl.constexpr, GROUPS: gl.constexpr, SIZE: gl.constexpr, PAGE_SIZE: gl.constexpr,
    WINDOW: gl.constexpr, NODES: gl.constexpr, WIDE: gl.constexpr, SAME: gl.constexpr, STRAIGHT: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
):
    """What the loading warps do, for all units of a block.  The groups of arguments: see
    kernels/attention/hopper.py."""
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(1, LOAD)
    k_stages, v_stages, full, empty = stages
    item_ptr, start_ptr, items, tiles, queries, rows, first = plan
    k_ptr, k_row, k_h = keys
    v_ptr, v_row, v_h = values
    new_k_ptr, new_k_b, new_k_r, new_k_h = new_keys
    new_v_ptr, new_v_b, new_v_r, new_v_h = new_values
    position_ptr, position_b, position_q = positions
    units = items * tiles * KV_HEADS
    backwards = 0
    done = 0
    for base in range(0, units, gl.num_programs(0)):
        unit = unit_of(base, backwards)
        backwards = 1 - backwards
        if unit < units:
            item, request, begin, end, _siblings, is_last, tile, head = work_at(
                unit, item_ptr, start_ptr, items, tiles, KV_HEADS, WIDE
            )
            shallowest = 0
            if WINDOW > 0:
                at_request = position_ptr + request * position_b
                shallowest = shallowest_of(at_request, position_q, tile, queries, GROUPS, BLOCK_M, ROWS)
            begin, committed, lower, whole, low, high, blocks = span(
                begin, end, first, is_last, tile, rows, shallowest, GROUPS, NODES, WINDOW, BLOCK_M, BLOCK_N
            )
            table = table_ptr + request * table_b
            new_k = new_k_ptr + request * new_k_b + head * new_k_h
            new_v = new_v_ptr + request * new_v_b + head * new_v_h
            straight = 0
            if STRAIGHT != 0:
                straight = whole
                if STRAIGHT == 2:
                    straight = gl.minimum(gl.load(straight_ptr + item), whole)
                done = _load_straight(
                    stages, done, straight, begin + lower * BLOCK_N, end, k_rows, v_rows, head, table,
                    SIZE, PAGE_SIZE, BLOCK_N, STAGES, WARPS,
                )
            # A page is asked for two blocks ahead: it comes from memory, and without it nothing else can.
            at = begin + block_at(straight, lower, whole) * BLOCK_N
            next_at = begin + block_at(straight + 1, lower, whole) * BLOCK_N
            page = _pages(table, at, end, PAGE_SIZE, BLOCK_N, ROWS)
            next_page = _pages(table, next_at, end, PAGE_SIZE, BLOCK_N, ROWS)
            for t in range(straight, blocks):
                stage = done % STAGES
                hopper.mbarrier.wait(empty.index(stage), done // STAGES % 2 ^ 1)
                _load_block(
                    t, at, page, k_stages.index(stage), v_stages.index(stage),
                    (k_ptr + head * k_h, v_ptr + head * v_h, k_row, v_row), (new_k, new_v, new_k_r, new_v_r),
                    end, first, committed, low, high, PAGE_SIZE, SAME, SIZE, BLOCK_N, LOAD,
                )
                hopper.async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
                page, at = next_page, next_at
                next_at = begin + block_at(t + 2, lower, whole) * BLOCK_N
                next_page = _pages(table, next_at, end, PAGE_SIZE, BLOCK_N, ROWS)
                done += 1
# fmt: on
