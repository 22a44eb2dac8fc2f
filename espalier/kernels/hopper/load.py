"""The loading and the converting warps of the Hopper kernels, which fill the stages of shared memory.

Loading warps copy the blocks of each work item, up to STAGES blocks ahead of the attending warps
(kernels/hopper/attend.py), across work items.  A stage's `empty` barrier tells the loading warps that the stage is
free.  Its `full` barrier tells the attending warps that the rows are there.

TMA copies a block with one instruction if the block is contiguous in the pages.  All blocks are contiguous if a page
holds a whole number of blocks.  Otherwise most blocks are contiguous if the request got consecutive pages.  cp.async
copies the other blocks, 16 bytes per thread, from pages of any size; its copies delay the attending warps.

Converting warps are for FP8 rows.  Hopper's tensor cores multiply two-byte queries only with two-byte rows, which they
read from shared memory.  So the loading warps copy FP8 rows to separate stages (raw_stages).  The converting warps
read these stages, and write two-byte rows to the stages of the attending warps.
"""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from espalier.kernels.attention.work_items import load_work_item, work_item_of_program
from espalier.kernels.hopper.work import (
    RowPtrs,
    position_of_block,
    stage_of,
    wait_until_empty,
    wait_until_full,
    work_item_blocks,
)
from espalier.kernels.runtime.jit import gluon_kernel


@gluon_kernel
def _load_page_ids(
    page_table, first_position, end_position, PAGE_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, ROW_LAYOUT: gl.constexpr
):
    """Load the page ids of BLOCK_N positions from first_position, a multiple of BLOCK_N; a scalar if it is one page."""
    if PAGE_SIZE % BLOCK_N == 0:
        page = gl.load(page_table + first_position // PAGE_SIZE, mask=first_position < end_position, other=0)
    else:
        offset = gl.arange(0, BLOCK_N, layout=ROW_LAYOUT)
        exists = first_position + offset < end_position
        if BLOCK_N % PAGE_SIZE == 0:
            page = gl.load(page_table + first_position // PAGE_SIZE + offset // PAGE_SIZE, mask=exists, other=0)
        else:
            page = gl.load(page_table + (first_position + offset) // PAGE_SIZE, mask=exists, other=0)
    # The launcher checks that the pages have fewer than 2^31 rows.
    return page.to(gl.int32)


@gluon_kernel
def _pool_rows(page, first_position, PAGE_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, ROW_LAYOUT: gl.constexpr):
    """Returns (row, row_offset [BLOCK_N]): the positions from first_position on are in page rows row + row_offset."""
    offset = gl.arange(0, BLOCK_N, layout=ROW_LAYOUT)
    row = gl.to_tensor(0)
    if PAGE_SIZE % BLOCK_N == 0:
        row = page * PAGE_SIZE + first_position % PAGE_SIZE
        row_offset = offset
    elif BLOCK_N % PAGE_SIZE == 0:
        row_offset = page * PAGE_SIZE + offset % PAGE_SIZE
    else:
        row_offset = page * PAGE_SIZE + (first_position + offset) % PAGE_SIZE
    return row.to(gl.int64), row_offset


@gluon_kernel
def _copy_to_tile(tile, pointer, offsets, row_exists, MASKED: gl.constexpr, LOAD_LAYOUT: gl.constexpr):
    """Start a copy of the rows at offsets [BLOCK_N] into a tile.  If MASKED, rows that do not exist become zeros."""
    column = gl.arange(0, tile.shape[1], layout=gl.SliceLayout(0, LOAD_LAYOUT))
    at = gl.expand_dims(offsets, 1) + gl.expand_dims(column, 0)
    if MASKED:
        hopper.async_copy.async_copy_global_to_shared(tile, pointer + at, mask=gl.expand_dims(row_exists, 1))
    else:
        hopper.async_copy.async_copy_global_to_shared(tile, pointer + at)


@gluon_kernel
def _element_offset(row_offset, stride, FITS_32_BITS: gl.constexpr):
    """Returns row_offset times the stride of a row.

    FITS_32_BITS: whether the product fits in 32 bits.  If not, the factors are extended from 32 bits, because such a
    product takes one instruction, and a product of 64-bit factors takes three."""
    if FITS_32_BITS:
        product = row_offset * stride
    else:
        product = (row_offset.to(gl.uint32).to(gl.uint64) * stride.to(gl.uint32).to(gl.uint64)).to(gl.int64)
    return product


# fmt: off
@gluon_kernel
def _copy_rows(
    stages, stage, sources, row, row_offset, row_exists,
    MASKED: gl.constexpr, FITS_32_BITS: gl.constexpr, SAME_STRIDES: gl.constexpr, LOAD_LAYOUT: gl.constexpr,
    COLUMNS: gl.constexpr,
):
    """Start the copies of rows row + row_offset.  sources: RowPtrs per tile.  FITS_32_BITS: see _element_offset."""
    for i in gl.static_range(len(sources)):
        offsets = _element_offset(row_offset, sources[0 if SAME_STRIDES else i].row_stride, FITS_32_BITS)
        pointer = sources[i].pointer + row * sources[i].row_stride + COLUMNS[i]
        _copy_to_tile(stages.tiles[i].index(stage), pointer, offsets, row_exists, MASKED, LOAD_LAYOUT)


@gluon_kernel
def _load_block(
    stages, stage, block_number, first_position, page, committed, staged, blocks, prefix_begin,
    LOAD_LAYOUT: gl.constexpr, CONSTANTS: gl.constexpr,
):
    """Start the copies of a block: committed rows from position `first_position` on `page`, or staged rows.

    Rows past the end of the committed or of the staged rows, or below `prefix_begin`, are not read: they may be NaN."""
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, LOAD_LAYOUT)
    BLOCK_N: gl.constexpr = CONSTANTS.BLOCK_N
    FITS_32_BITS: gl.constexpr = CONSTANTS.PAGE_SIZE % BLOCK_N == 0
    offset = gl.arange(0, BLOCK_N, layout=ROW_LAYOUT)
    if block_number < blocks.num_committed:
        row, row_offset = _pool_rows(page, first_position, CONSTANTS.PAGE_SIZE, BLOCK_N, ROW_LAYOUT)
        if (first_position >= prefix_begin) & (first_position + BLOCK_N <= blocks.end_committed):
            _copy_rows(
                stages, stage, committed, row, row_offset, 0,
                False, FITS_32_BITS, CONSTANTS.SAME_STRIDES, LOAD_LAYOUT, CONSTANTS.COLUMNS,
            )
        else:
            _copy_rows(
                stages, stage, committed, row, row_offset,
                (first_position + offset >= prefix_begin) & (first_position + offset < blocks.end_committed), True,
                FITS_32_BITS, CONSTANTS.SAME_STRIDES, LOAD_LAYOUT, CONSTANTS.COLUMNS,
            )
    else:
        node = blocks.begin_staged + (block_number - blocks.num_committed) * BLOCK_N
        _copy_rows(
            stages, stage, staged, node.to(gl.int64), offset, node + offset < blocks.end_staged,
            True, True, False, LOAD_LAYOUT, CONSTANTS.COLUMNS,
        )


@gluon_kernel
def _load_contiguous(
    stages, blocks_done, num_blocks, position, end_position, descriptors, kv_head, page_table, CONSTANTS: gl.constexpr,
):
    """Copy `num_blocks` contiguous blocks from `position` on by TMA.  Returns blocks_done + num_blocks."""
    BYTES: gl.constexpr = stages.tiles[0].dtype.primitive_bitwidth // 8
    PAGE_SIZE: gl.constexpr = CONSTANTS.PAGE_SIZE
    # The next block's page is loaded before the wait for a stage.  The last iteration loads the last page again.
    page = gl.load(page_table + position // PAGE_SIZE, mask=num_blocks > 0, other=0)
    for _ in range(num_blocks):
        row = page.to(gl.int32) * PAGE_SIZE + position % PAGE_SIZE
        position += CONSTANTS.BLOCK_N
        page = gl.load(page_table + gl.minimum(position, end_position - 1) // PAGE_SIZE)
        wait_until_empty(stages, blocks_done)
        stage = stage_of(stages, blocks_done)
        full = stages.full.index(stage)
        # `full` counts one arrival of every loading thread, as with cp.async.  Here one thread makes all arrivals: the
        # first together with the number of expected bytes, the others by a count.  So all warps must be in the same
        # iteration.  A barrier that the compiler puts in this loop ensures this (tests/kernels/test_compiled.py).
        hopper.mbarrier.expect(full, CONSTANTS.BLOCK_N * CONSTANTS.ROW_SIZE * BYTES)
        hopper.mbarrier.arrive(full, count=32 * CONSTANTS.LOAD_WARPS - 1)
        for i in gl.static_range(len(descriptors)):
            column = kv_head * CONSTANTS.WIDTHS[i] + CONSTANTS.COLUMNS[i]
            hopper.tma.async_copy_global_to_shared(descriptors[i], [row, column], full, stages.tiles[i].index(stage))
        blocks_done += 1
    return blocks_done


@gluon_kernel
def _rows_of_request(sources, request, kv_head):
    """Returns the sources with pointers to the first row of a request and KV head."""
    return [
        RowPtrs(rows.pointer + request * rows.request_stride + kv_head * rows.head_stride, 0, rows.row_stride, 0)
        for rows in sources
    ]


@gluon_kernel
def load_work_items(
    stages, plan, committed, staged, page_table_ptr, page_table_stride_b, positions, descriptors, contiguous_ptr,
    CONSTANTS: gl.constexpr,
):
    """Load the blocks of all work items of a program.

    committed, staged: RowPtrs for each tile of a stage.  descriptors: the TMA descriptor of the committed rows, for
    each tile.  The tiles are K and V, or the three tiles of a latent row."""
    BLOCK_N: gl.constexpr = CONSTANTS.BLOCK_N
    # A thread copies 16 bytes.
    VALUES: gl.constexpr = 128 // stages.tiles[0].dtype.primitive_bitwidth
    LOAD_LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, VALUES], [VALUES // 2, 64 // VALUES], [CONSTANTS.LOAD_WARPS, 1], [1, 0]
    )
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, LOAD_LAYOUT)
    num_work_items = plan.num_splits * plan.num_tiles * CONSTANTS.KV_HEADS
    backwards = 0
    blocks_done = 0
    for base in range(0, num_work_items, gl.num_programs(0)):
        work_item_index = work_item_of_program(base, backwards)
        backwards = 1 - backwards
        if work_item_index < num_work_items:
            work_item = load_work_item(plan, work_item_index, CONSTANTS.KV_HEADS, CONSTANTS.LONGEST_FIRST)
            blocks = work_item_blocks(plan, work_item, positions, ROW_LAYOUT, CONSTANTS)
            table, end_position = page_table_ptr + work_item.request * page_table_stride_b, blocks.end_committed
            staged_rows = _rows_of_request(staged, work_item.request, work_item.kv_head)
            num_contiguous = 0
            if CONSTANTS.TMA_BLOCKS != 0:
                num_contiguous = blocks.num_unmasked
                if CONSTANTS.TMA_BLOCKS == 2:
                    num_contiguous = gl.minimum(gl.load(contiguous_ptr + work_item.split), blocks.num_unmasked)
                blocks_done = _load_contiguous(
                    stages, blocks_done, num_contiguous, blocks.begin_committed + blocks.num_lower * BLOCK_N,
                    end_position, descriptors, work_item.kv_head, table, CONSTANTS,
                )
            # Pages are loaded two blocks ahead, because a copy cannot start without its page.
            position = position_of_block(blocks, num_contiguous, BLOCK_N)
            next_position = position_of_block(blocks, num_contiguous + 1, BLOCK_N)
            page = _load_page_ids(table, position, end_position, CONSTANTS.PAGE_SIZE, BLOCK_N, ROW_LAYOUT)
            next_page = _load_page_ids(table, next_position, end_position, CONSTANTS.PAGE_SIZE, BLOCK_N, ROW_LAYOUT)
            for number in range(num_contiguous, blocks.num_blocks):
                wait_until_empty(stages, blocks_done)
                stage = stage_of(stages, blocks_done)
                committed_rows = _rows_of_request(committed, 0, work_item.kv_head)
                _load_block(
                    stages, stage, number, position, page, committed_rows, staged_rows, blocks, plan.first_position,
                    LOAD_LAYOUT, CONSTANTS,
                )
                hopper.async_copy.mbarrier_arrive(stages.full.index(stage), increment_count=False)
                page, position = next_page, next_position
                next_position = position_of_block(blocks, number + 2, BLOCK_N)
                next_page = _load_page_ids(table, next_position, end_position, CONSTANTS.PAGE_SIZE, BLOCK_N, ROW_LAYOUT)
                blocks_done += 1
# fmt: on


@gluon_kernel
def convert_work_items(raw_stages, stages, plan, positions, CONSTANTS: gl.constexpr):
    """Convert the FP8 blocks of all work items of a program in `raw_stages`, and write them to `stages`."""
    # A thread converts 8 values, and a warp converts whole rows of the narrowest tile.  With 16 values per thread,
    # the threads of a row would use only half of the banks of shared memory.
    THREADS: gl.constexpr = CONSTANTS.WIDTHS[len(CONSTANTS.WIDTHS) - 1] // 8
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // THREADS, THREADS], [CONSTANTS.CONVERT_WARPS, 1], [1, 0])
    num_work_items = plan.num_splits * plan.num_tiles * CONSTANTS.KV_HEADS
    backwards = 0
    blocks_done = 0
    for base in range(0, num_work_items, gl.num_programs(0)):
        work_item_index = work_item_of_program(base, backwards)
        backwards = 1 - backwards
        if work_item_index < num_work_items:
            work_item = load_work_item(plan, work_item_index, CONSTANTS.KV_HEADS, CONSTANTS.LONGEST_FIRST)
            blocks = work_item_blocks(plan, work_item, positions, gl.SliceLayout(1, LAYOUT), CONSTANTS)
            for _ in range(blocks.num_blocks):
                wait_until_full(raw_stages, blocks_done, True)
                wait_until_empty(stages, blocks_done)
                raw_stage, stage = stage_of(raw_stages, blocks_done), stage_of(stages, blocks_done)
                for i in gl.static_range(len(stages.tiles)):
                    values = raw_stages.tiles[i].index(raw_stage).load(LAYOUT)
                    if stages.tiles[i].dtype == gl.bfloat16:
                        # FP8 becomes float32 and then bfloat16, as in kernels/runtime/jit.py:from_fp8.
                        values = values.to(gl.float32)
                    stages.tiles[i].index(stage).store(values.to(stages.tiles[i].dtype))
                # The fence makes the rows visible to the tensor cores.
                hopper.fence_async_shared()
                hopper.mbarrier.arrive(raw_stages.empty.index(raw_stage), count=1)
                hopper.mbarrier.arrive(stages.full.index(stage), count=1)
                blocks_done += 1
