"""Code that all warps of the Hopper attention kernels share: groups of arguments, stages in shared memory, work items.

Every group of warps processes all work items of a program in the same order.  So all groups give a block the same
number.  This number determines the block's stage and the phase of the stage's barriers.

No group waits forever.  For each block of a work item, the warps that write the block wait once at `empty` and complete
`full` once.  Each group that reads the block waits once at `full` and arrives once at `empty`.  A group that waits for
a block holds at most the two blocks before it, so three stages suffice.  With two stages, the group releases one of
these blocks before it waits.
"""

from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from espalier.kernels.attention.work_items import count_committed_blocks, nth_block_index, visible_staged_range
from espalier.kernels.runtime.jit import gluon_kernel


class HopperConstexprs(NamedTuple):
    """The constexpr arguments of a Hopper attention kernel, as one `gl.constexpr` variable.

    Each row of a block is divided among tiles.  WIDTHS: for each tile, how many values of a row it holds.  COLUMNS: for
    each tile, the first of these values.  ROW_SIZE: the sum of WIDTHS.  OUT_SIZE: how many output values per query an
    attending warpgroup computes.
    GROUP_SIZE: query heads per KV head.  BLOCK_M: packed queries per query tile.  BLOCK_N: rows per block.
    LONGEST_FIRST: see split_of_work_item.  LOAD_WARPS, CONVERT_WARPS: numbers of warps.  SAME_STRIDES: whether
    committed rows of all tiles have the same stride.  TMA_BLOCKS, STAGED_KIND: see work_items.py.
    RAW_STAGES: number of stages of FP8 rows, which extra warps convert into the attended stages; 0 for other rows.
    USE_PDL: see kernels/runtime/pdl.py."""

    KV_HEADS: Any
    GROUP_SIZE: Any
    PAGE_SIZE: Any
    WINDOW: Any
    STAGED_KIND: Any
    LONGEST_FIRST: Any
    SAME_STRIDES: Any
    TMA_BLOCKS: Any
    WIDTHS: Any
    COLUMNS: Any
    ROW_SIZE: Any
    OUT_SIZE: Any
    BLOCK_M: Any
    BLOCK_N: Any
    RAW_STAGES: Any
    LOAD_WARPS: Any
    CONVERT_WARPS: Any
    USE_PDL: Any


class RowPtrs(NamedTuple):
    """A pointer to rows in global memory, and their strides.  For committed rows the stride per request is 0."""

    pointer: Any
    request_stride: Any
    row_stride: Any
    head_stride: Any


class Stages(NamedTuple):
    """Blocks of rows in shared memory.

    tiles: for each tile of a block, a buffer with all stages.  full: for each stage, the barrier that completes when
    the stage may be read.  empty: for each stage, the barrier that completes when the stage may be written."""

    tiles: Any
    full: Any
    empty: Any


class WorkItemBlocks(NamedTuple):
    """The blocks of a work item.

    The first num_committed blocks hold the committed rows begin_committed .. end_committed, see count_committed_blocks
    (work_items.py).  The other blocks hold the staged rows begin_staged .. end_staged; only a request's last split has
    staged rows.  num_blocks is at least one.
    num_lower: how many blocks, from the first on, contain positions below `first_position`.  num_unmasked: how many
    blocks after these need no mask."""

    begin_committed: Any
    end_committed: Any
    num_committed: Any
    num_lower: Any
    num_unmasked: Any
    begin_staged: Any
    end_staged: Any
    num_blocks: Any


# fmt: off
@gluon_kernel
def make_stages(
    dtype: gl.constexpr, STAGES: gl.constexpr, FULL_ARRIVALS: gl.constexpr, EMPTY_ARRIVALS: gl.constexpr,
    CONSTANTS: gl.constexpr,
):
    """Allocate stages.  FULL_ARRIVALS, EMPTY_ARRIVALS: how many arrivals complete a phase of these barriers."""
    BLOCK_N: gl.constexpr = CONSTANTS.BLOCK_N
    full, empty = make_barriers(STAGES, FULL_ARRIVALS, EMPTY_ARRIVALS)
    tiles = [
        gl.allocate_shared_memory(
            dtype, [STAGES, BLOCK_N, WIDTH], gl.NVMMASharedLayout.get_default_for([BLOCK_N, WIDTH], dtype)
        )
        for WIDTH in CONSTANTS.WIDTHS
    ]
    return Stages(tiles, full, empty)


@gluon_kernel
def make_barriers(STAGES: gl.constexpr, FULL_ARRIVALS: gl.constexpr, EMPTY_ARRIVALS: gl.constexpr):
    """Returns (full, empty): the barriers of stages, see `make_stages`."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        hopper.mbarrier.init(full.index(stage), count=FULL_ARRIVALS)
        hopper.mbarrier.init(empty.index(stage), count=EMPTY_ARRIVALS)
    return full, empty


@gluon_kernel
def stage_of(stages, block_index):
    """Returns the stage of the program's block number `block_index`."""
    return block_index % stages.full.shape[0]


@gluon_kernel
def wait_until_full(stages, block_index, condition):
    """If `condition`: wait until the program's block number `block_index` is in its stage."""
    STAGES: gl.constexpr = stages.full.shape[0]
    hopper.mbarrier.wait(stages.full.index(block_index % STAGES), block_index // STAGES % 2, pred=condition)


@gluon_kernel
def wait_until_empty(stages, block_index):
    """Wait until the stage of the program's block number `block_index` may be written."""
    STAGES: gl.constexpr = stages.full.shape[0]
    hopper.mbarrier.wait(stages.empty.index(block_index % STAGES), block_index // STAGES % 2 ^ 1)


@gluon_kernel
def work_item_blocks(plan, work_item, positions, ROW_LAYOUT: gl.constexpr, CONSTANTS: gl.constexpr):
    """Returns the blocks of a work item.  positions: RowPtrs of the queries' positions, read only with a window."""
    begin = work_item.begin
    if CONSTANTS.WINDOW > 0:
        min_position = _min_position(plan, work_item, positions, ROW_LAYOUT, CONSTANTS.GROUP_SIZE, CONSTANTS.BLOCK_M)
        begin = gl.maximum(begin, (min_position - CONSTANTS.WINDOW + 1) // CONSTANTS.BLOCK_N * CONSTANTS.BLOCK_N)
    num_committed, num_lower, num_unmasked = count_committed_blocks(
        begin, work_item.end, plan.first_position, CONSTANTS.WINDOW, CONSTANTS.BLOCK_N
    )
    low = 0
    high = 0
    if CONSTANTS.STAGED_KIND > 0:
        low, high = visible_staged_range(
            work_item.query_tile, gl.where(work_item.is_last_split, plan.num_staged_rows, 0),
            CONSTANTS.STAGED_KIND, CONSTANTS.WINDOW,
            CONSTANTS.GROUP_SIZE, CONSTANTS.BLOCK_M, CONSTANTS.BLOCK_N,
        )
    num_staged = (gl.maximum(high - low, 0) + CONSTANTS.BLOCK_N - 1) // CONSTANTS.BLOCK_N
    num_blocks = gl.maximum(num_committed + num_staged, 1)
    return WorkItemBlocks(begin, work_item.end, num_committed, num_lower, num_unmasked, low, high, num_blocks)


@gluon_kernel
def position_of_block(blocks, block_number, BLOCK_N: gl.constexpr):
    """Returns the position of the first row of a block of committed rows.  blocks: WorkItemBlocks."""
    return blocks.begin_committed + nth_block_index(block_number, blocks.num_lower, blocks.num_unmasked) * BLOCK_N


@gluon_kernel
def _min_position(
    plan, work_item, positions, ROW_LAYOUT: gl.constexpr, GROUP_SIZE: gl.constexpr, BLOCK_M: gl.constexpr,
):
    """Returns the lowest position of a tile's queries."""
    query = (work_item.query_tile * BLOCK_M + gl.arange(0, BLOCK_M, layout=ROW_LAYOUT)) // GROUP_SIZE
    at = positions.pointer + work_item.request * positions.request_stride + query.to(gl.int64) * positions.row_stride
    position = gl.load(at, mask=query < plan.queries, other=0x7FFFFFFF)
    return gl.min(position.to(gl.int32), 0)
