"""The loading warps of the Hopper kernel: they copy the blocks of each work item into the stages of shared memory.

They run ahead of the attending warps (kernels/attention/hopper_attend.py) by up to STAGES blocks, across work items.
The `empty` barrier of a stage gives it to the loading warps, the `full` barrier to the attending warps.

TMA copies a block that is contiguous in the pool with one instruction.  All blocks are contiguous if a page holds whole
blocks, and most are if the pages were free in order.  cp.async gathers the other blocks from pages of any size, 16
bytes per thread; its copies delay the attending warps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from espalier.kernels.attention.work_items import (
    block_index,
    committed_blocks,
    load_work_item,
    staged_rows_of,
    work_item_of,
)
from espalier.kernels.runtime.launch import gluon_kernel

if TYPE_CHECKING:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper


# Arguments are grouped by meaning; one argument per line would hide the groups.
# fmt: off
@gluon_kernel
def extent_of(
    begin, end, first, is_last, tile, rows, min_position,
    GROUP_SIZE: gl.constexpr, STAGED: gl.constexpr, WINDOW: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):
    """(begin, num_committed, num_lower, num_unmasked, low, high, num_blocks) of a work item.

    The first num_committed blocks are committed rows from `begin` (work_items.committed_blocks); the others are the
    staged rows low .. high, which belong to the request's last split.  num_blocks is at least one.
    min_position: lowest position of the tile's queries, read only with a window.
    """
    if WINDOW > 0:
        begin = gl.maximum(begin, (min_position - WINDOW + 1) // BLOCK_N * BLOCK_N)
    num_committed, num_lower, num_unmasked = committed_blocks(begin, end, first, WINDOW, BLOCK_N)
    low = 0
    high = 0
    if STAGED > 0:
        low, high = staged_rows_of(tile, gl.where(is_last, rows, 0), STAGED, WINDOW, GROUP_SIZE, BLOCK_M, BLOCK_N)
    num_blocks = gl.maximum(num_committed + (gl.maximum(high - low, 0) + BLOCK_N - 1) // BLOCK_N, 1)
    return begin, num_committed, num_lower, num_unmasked, low, high, num_blocks
# fmt: on


@gluon_kernel
def min_position_of(
    positions, position_q, tile, queries, GROUP_SIZE: gl.constexpr, BLOCK_M: gl.constexpr, ROWS: gl.constexpr
):
    """The lowest position of a tile's queries."""
    query = (tile * BLOCK_M + gl.arange(0, BLOCK_M, layout=ROWS)) // GROUP_SIZE
    position = gl.load(positions + query.to(gl.int64) * position_q, mask=query < queries, other=0x7FFFFFFF)
    return gl.min(position.to(gl.int32), 0)


@gluon_kernel
def _pages(table, at, end, PAGE_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, ROWS: gl.constexpr):
    """Pages of the BLOCK_N positions from `at`, a multiple of BLOCK_N.  A scalar if one page holds the whole block."""
    if PAGE_SIZE % BLOCK_N == 0:
        page = gl.load(table + at // PAGE_SIZE, mask=at < end, other=0)
    else:
        offset = gl.arange(0, BLOCK_N, layout=ROWS)
        if BLOCK_N % PAGE_SIZE == 0:
            page = gl.load(table + at // PAGE_SIZE + offset // PAGE_SIZE, mask=at + offset < end, other=0)
        else:
            page = gl.load(table + (at + offset) // PAGE_SIZE, mask=at + offset < end, other=0)
    # The launcher checks that the pool has fewer than 2^31 rows.
    return page.to(gl.int32)


@gluon_kernel
def _row_of(page, at, PAGE_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, ROWS: gl.constexpr):
    """(row, row_offset [BLOCK_N]): the positions from `at` are in the pool rows row + row_offset."""
    offset = gl.arange(0, BLOCK_N, layout=ROWS)
    row = gl.to_tensor(0)
    if PAGE_SIZE % BLOCK_N == 0:
        row = page * PAGE_SIZE + at % PAGE_SIZE
        row_offset = offset
    elif BLOCK_N % PAGE_SIZE == 0:
        row_offset = page * PAGE_SIZE + offset % PAGE_SIZE
    else:
        row_offset = page * PAGE_SIZE + (at + offset) % PAGE_SIZE
    return row.to(gl.int64), row_offset


@gluon_kernel
def _copy(
    stage,
    pointer,
    offsets,
    exists,
    MASKED: gl.constexpr,
    SIZE: gl.constexpr,
    LOAD: gl.constexpr,
):
    """Start a copy of the rows at offsets [BLOCK_N] into a stage; if MASKED, zeros for rows that do not exist."""
    at = gl.expand_dims(offsets, 1) + gl.expand_dims(gl.arange(0, SIZE, layout=gl.SliceLayout(0, LOAD)), 0)
    if MASKED:
        hopper.async_copy.async_copy_global_to_shared(stage, pointer + at, mask=gl.expand_dims(exists, 1))
    else:
        hopper.async_copy.async_copy_global_to_shared(stage, pointer + at)


@gluon_kernel
def _element_offset(row_offset, stride, SMALL: gl.constexpr):
    """row_offset times the stride of a row.

    SMALL: the product fits in 32 bits.  Otherwise it is 32 x 32 to 64 bits: one instruction; 64 x 64 would take three.
    """
    if SMALL:
        product = row_offset * stride
    else:
        product = (row_offset.to(gl.uint32).to(gl.uint64) * stride.to(gl.uint32).to(gl.uint64)).to(gl.int64)
    return product


# fmt: off
@gluon_kernel
def _copy_rows(
    k_stage, v_stage, k_ptr, v_ptr, row, row_offset, k_row, v_row, exists,
    MASKED: gl.constexpr, SMALL: gl.constexpr, SAME_STRIDES: gl.constexpr, SIZE: gl.constexpr, LOAD: gl.constexpr,
):
    """Copy the keys and values of rows row + row_offset.  SMALL: row_offset is small; SAME_STRIDES: k_row == v_row."""
    k_at = _element_offset(row_offset, k_row, SMALL)
    v_at = k_at if SAME_STRIDES else _element_offset(row_offset, v_row, SMALL)
    _copy(k_stage, k_ptr + row * k_row, k_at, exists, MASKED, SIZE, LOAD)
    _copy(v_stage, v_ptr + row * v_row, v_at, exists, MASKED, SIZE, LOAD)


@gluon_kernel
def _load_block(
    t, at, page, k_stage, v_stage, committed_rows, staged_rows, end, first, num_committed, low, high,
    PAGE_SIZE: gl.constexpr, SAME_STRIDES: gl.constexpr, SIZE: gl.constexpr, BLOCK_N: gl.constexpr, LOAD: gl.constexpr,
):
    """Start the copies of the t-th block: committed rows from position `at` on `page`, or staged rows.

    Rows at or past `end`, below `first` or past the staged rows are never read: they may be NaN.
    """
    ROWS: gl.constexpr = gl.SliceLayout(1, LOAD)
    offset = gl.arange(0, BLOCK_N, layout=ROWS)
    if t < num_committed:
        k_ptr, v_ptr, k_row, v_row = committed_rows
        row, row_offset = _row_of(page, at, PAGE_SIZE, BLOCK_N, ROWS)
        if (at >= first) & (at + BLOCK_N <= end):
            _copy_rows(
                k_stage, v_stage, k_ptr, v_ptr, row, row_offset, k_row, v_row, 0,
                False, PAGE_SIZE % BLOCK_N == 0, SAME_STRIDES, SIZE, LOAD,
            )
        else:
            _copy_rows(
                k_stage, v_stage, k_ptr, v_ptr, row, row_offset, k_row, v_row,
                (at + offset >= first) & (at + offset < end), True, PAGE_SIZE % BLOCK_N == 0, SAME_STRIDES, SIZE, LOAD,
            )
    else:
        staged_k, staged_v, staged_k_row, staged_v_row = staged_rows
        node = low + (t - num_committed) * BLOCK_N
        _copy_rows(
            k_stage, v_stage, staged_k, staged_v, node.to(gl.int64), offset, staged_k_row, staged_v_row,
            node + offset < high, True, True, False, SIZE, LOAD,
        )


@gluon_kernel
def _load_contiguous(
    stages, num_done, count, at, end, k_descriptor, v_descriptor, head, table,
    SIZE: gl.constexpr, PAGE_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, LOAD_WARPS: gl.constexpr,
):
    """Copy `count` contiguous blocks from position `at` by TMA.  Returns num_done + count."""
    k_stages, v_stages, full, empty = stages
    BYTES: gl.constexpr = k_stages.dtype.primitive_bitwidth // 8
    # The next block's page is loaded before the wait for a stage; after the last block, its own page again.
    page = gl.load(table + at // PAGE_SIZE, mask=count > 0, other=0)
    for _ in range(count):
        row = page.to(gl.int32) * PAGE_SIZE + at % PAGE_SIZE
        at += BLOCK_N
        page = gl.load(table + gl.minimum(at, end - 1) // PAGE_SIZE)
        stage = num_done % STAGES
        hopper.mbarrier.wait(empty.index(stage), num_done // STAGES % 2 ^ 1)
        # `full` counts an arrival of every loading thread, as with cp.async.  Here one thread makes them all: one with
        # the expected bytes, the others by count.  So no warp may lag behind: the compiler puts a barrier into this
        # loop (tests/kernels/test_compiled.py).
        hopper.mbarrier.expect(full.index(stage), 2 * BLOCK_N * SIZE * BYTES)
        hopper.mbarrier.arrive(full.index(stage), count=32 * LOAD_WARPS - 1)
        hopper.tma.async_copy_global_to_shared(
            k_descriptor, [row, head * SIZE], full.index(stage), k_stages.index(stage)
        )
        hopper.tma.async_copy_global_to_shared(
            v_descriptor, [row, head * SIZE], full.index(stage), v_stages.index(stage)
        )
        num_done += 1
    return num_done


@gluon_kernel
def load_work_items(
    stages, plan, keys, values, staged_keys, staged_values, table_ptr, table_b, positions,
    k_descriptor, v_descriptor, contiguous_ptr,
    KV_HEADS: gl.constexpr, GROUP_SIZE: gl.constexpr, SIZE: gl.constexpr, PAGE_SIZE: gl.constexpr,
    WINDOW: gl.constexpr, STAGED: gl.constexpr, LONGEST_FIRST: gl.constexpr, SAME_STRIDES: gl.constexpr,
    CONTIGUOUS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, LOAD_WARPS: gl.constexpr,
):
    """Load the blocks of all work items of a program.  kernels/attention/hopper.py makes the tuples of arguments."""
    k_stages, v_stages, full, empty = stages
    # A thread copies 16 bytes.
    VALUES: gl.constexpr = 128 // k_stages.dtype.primitive_bitwidth
    LOAD: gl.constexpr = gl.BlockedLayout([1, VALUES], [VALUES // 2, 64 // VALUES], [LOAD_WARPS, 1], [1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(1, LOAD)
    split_ptr, start_ptr, num_splits, num_tiles, queries, rows, first = plan
    k_ptr, k_row, k_h = keys
    v_ptr, v_row, v_h = values
    staged_k_ptr, staged_k_b, staged_k_r, staged_k_h = staged_keys
    staged_v_ptr, staged_v_b, staged_v_r, staged_v_h = staged_values
    position_ptr, position_b, position_q = positions
    num_work_items = num_splits * num_tiles * KV_HEADS
    backwards = 0
    num_done = 0
    for base in range(0, num_work_items, gl.num_programs(0)):
        work_item = work_item_of(base, backwards)
        backwards = 1 - backwards
        if work_item < num_work_items:
            split, request, begin, end, _request_splits, is_last, tile, head = load_work_item(
                work_item, split_ptr, start_ptr, num_splits, num_tiles, KV_HEADS, LONGEST_FIRST
            )
            min_position = 0
            if WINDOW > 0:
                at_request = position_ptr + request * position_b
                min_position = min_position_of(at_request, position_q, tile, queries, GROUP_SIZE, BLOCK_M, ROWS)
            begin, num_committed, num_lower, num_unmasked, low, high, num_blocks = extent_of(
                begin, end, first, is_last, tile, rows, min_position, GROUP_SIZE, STAGED, WINDOW, BLOCK_M, BLOCK_N
            )
            table = table_ptr + request * table_b
            staged_k = staged_k_ptr + request * staged_k_b + head * staged_k_h
            staged_v = staged_v_ptr + request * staged_v_b + head * staged_v_h
            num_contiguous = 0
            if CONTIGUOUS != 0:
                num_contiguous = num_unmasked
                if CONTIGUOUS == 2:
                    num_contiguous = gl.minimum(gl.load(contiguous_ptr + split), num_unmasked)
                num_done = _load_contiguous(
                    stages, num_done, num_contiguous, begin + num_lower * BLOCK_N, end,
                    k_descriptor, v_descriptor, head, table,
                    SIZE, PAGE_SIZE, BLOCK_N, STAGES, LOAD_WARPS,
                )
            # Pages are loaded two blocks ahead: a copy cannot start without its page.
            at = begin + block_index(num_contiguous, num_lower, num_unmasked) * BLOCK_N
            next_at = begin + block_index(num_contiguous + 1, num_lower, num_unmasked) * BLOCK_N
            page = _pages(table, at, end, PAGE_SIZE, BLOCK_N, ROWS)
            next_page = _pages(table, next_at, end, PAGE_SIZE, BLOCK_N, ROWS)
            for t in range(num_contiguous, num_blocks):
                stage = num_done % STAGES
                hopper.mbarrier.wait(empty.index(stage), num_done // STAGES % 2 ^ 1)
                _load_block(
                    t, at, page, k_stages.index(stage), v_stages.index(stage),
                    (k_ptr + head * k_h, v_ptr + head * v_h, k_row, v_row),
                    (staged_k, staged_v, staged_k_r, staged_v_r),
                    end, first, num_committed, low, high, PAGE_SIZE, SAME_STRIDES, SIZE, BLOCK_N, LOAD,
                )
                hopper.async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
                page, at = next_page, next_at
                next_at = begin + block_index(t + 2, num_lower, num_unmasked) * BLOCK_N
                next_page = _pages(table, next_at, end, PAGE_SIZE, BLOCK_N, ROWS)
                num_done += 1
# fmt: on
