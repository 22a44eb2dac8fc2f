"""The converting warps of the Hopper kernels, for FP8 rows.

Hopper's tensor cores multiply bfloat16 queries with bfloat16 rows only, which they read from shared memory.  So the
loading warps copy FP8 rows to stages of their own ("raw"), and these warps write them to the stages that are attended,
in the queries' dtype.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from espalier.kernels.attention.hopper_load import extent_of, min_position_of
from espalier.kernels.attention.work_items import load_work_item, work_item_of
from espalier.kernels.runtime.launch import gluon_kernel

if TYPE_CHECKING:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper


# Arguments are grouped by meaning; one argument per line would hide the groups.
# fmt: off
@gluon_kernel
def raw_stages_of(
    dtype: gl.constexpr, SIZE: gl.constexpr, BLOCK_N: gl.constexpr, RAW_STAGES: gl.constexpr, LOAD_WARPS: gl.constexpr,
):
    """Allocate (k, v, full, empty): stages of rows as they are stored, and their barriers."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, SIZE], dtype)
    full = gl.allocate_shared_memory(gl.int64, [RAW_STAGES, 1], hopper.mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [RAW_STAGES, 1], hopper.mbarrier.MBarrierLayout())
    for stage in gl.static_range(RAW_STAGES):
        hopper.mbarrier.init(full.index(stage), count=32 * LOAD_WARPS)
        hopper.mbarrier.init(empty.index(stage), count=1)
    k = gl.allocate_shared_memory(dtype, [RAW_STAGES, BLOCK_N, SIZE], layout)
    v = gl.allocate_shared_memory(dtype, [RAW_STAGES, BLOCK_N, SIZE], layout)
    return k, v, full, empty


@gluon_kernel
def convert_tile(raw_stage, stage, LAYOUT: gl.constexpr):
    """Write a tile of a raw stage to a stage of another dtype.

    By way of float32, as in kernels/runtime/convert.py:from_fp8.
    """
    stage.store(raw_stage.load(LAYOUT).to(gl.float32).to(stage.dtype))


@gluon_kernel
def convert_work_items(
    raw, stages, plan, positions,
    KV_HEADS: gl.constexpr, GROUP_SIZE: gl.constexpr, SIZE: gl.constexpr, WINDOW: gl.constexpr, STAGED: gl.constexpr,
    LONGEST_FIRST: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    RAW_STAGES: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
):
    """Convert the blocks of all work items of a program.  kernels/attention/hopper.py makes the tuples of arguments."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 16], [512 // SIZE, SIZE // 16], [WARPS, 1], [1, 0])
    raw_k, raw_v, raw_full, raw_empty = raw
    k_stages, v_stages, full, empty = stages
    split_ptr, start_ptr, num_splits, num_tiles, queries, rows, first = plan
    position_ptr, position_b, position_q = positions
    num_work_items = num_splits * num_tiles * KV_HEADS
    backwards = 0
    num_done = 0
    for base in range(0, num_work_items, gl.num_programs(0)):
        work_item = work_item_of(base, backwards)
        backwards = 1 - backwards
        if work_item < num_work_items:
            _split, request, begin, end, _request_splits, is_last, tile, _head = load_work_item(
                work_item, split_ptr, start_ptr, num_splits, num_tiles, KV_HEADS, LONGEST_FIRST
            )
            min_position = 0
            if WINDOW > 0:
                at_request = position_ptr + request * position_b
                min_position = min_position_of(
                    at_request, position_q, tile, queries, GROUP_SIZE, BLOCK_M, gl.SliceLayout(1, LAYOUT)
                )
            _begin, _num_committed, _num_lower, _num_unmasked, _low, _high, num_blocks = extent_of(
                begin, end, first, is_last, tile, rows, min_position, GROUP_SIZE, STAGED, WINDOW, BLOCK_M, BLOCK_N
            )
            for _ in range(num_blocks):
                raw_stage = num_done % RAW_STAGES
                stage = num_done % STAGES
                hopper.mbarrier.wait(raw_full.index(raw_stage), num_done // RAW_STAGES % 2)
                hopper.mbarrier.wait(empty.index(stage), num_done // STAGES % 2 ^ 1)
                convert_tile(raw_k.index(raw_stage), k_stages.index(stage), LAYOUT)
                convert_tile(raw_v.index(raw_stage), v_stages.index(stage), LAYOUT)
                # Makes the rows visible to the tensor cores.
                hopper.fence_async_shared()
                hopper.mbarrier.arrive(raw_empty.index(raw_stage), count=1)
                hopper.mbarrier.arrive(full.index(stage), count=1)
                num_done += 1


@gluon_kernel
def convert_latent_work_items(
    raw, stages, plan, HEADS: gl.constexpr, STAGED: gl.constexpr, LONGEST_FIRST: gl.constexpr, BLOCK_N: gl.constexpr,
    RAW_STAGES: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
):
    """As `convert_work_items`, for kernels/attention/hopper_latent.py."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [WARPS, 1], [1, 0])
    raw_left, raw_right, raw_rope, raw_full, raw_empty = raw
    left, right, rope, full, empty = stages
    split_ptr, start_ptr, num_splits, num_tiles, _queries, rows, first = plan
    num_work_items = num_splits * num_tiles
    backwards = 0
    num_done = 0
    for base in range(0, num_work_items, gl.num_programs(0)):
        work_item = work_item_of(base, backwards)
        backwards = 1 - backwards
        if work_item < num_work_items:
            _split, _request, begin, end, _request_splits, is_last, tile, _head = load_work_item(
                work_item, split_ptr, start_ptr, num_splits, num_tiles, 1, LONGEST_FIRST
            )
            _begin, _num_committed, _num_lower, _num_unmasked, _low, _high, num_blocks = extent_of(
                begin, end, first, is_last, tile, rows, 0, HEADS, STAGED, 0, 64, BLOCK_N
            )
            for _ in range(num_blocks):
                raw_stage = num_done % RAW_STAGES
                stage = num_done % STAGES
                hopper.mbarrier.wait(raw_full.index(raw_stage), num_done // RAW_STAGES % 2)
                hopper.mbarrier.wait(empty.index(stage), num_done // STAGES % 2 ^ 1)
                convert_tile(raw_left.index(raw_stage), left.index(stage), LAYOUT)
                convert_tile(raw_right.index(raw_stage), right.index(stage), LAYOUT)
                convert_tile(raw_rope.index(raw_stage), rope.index(stage), LAYOUT)
                # Makes the rows visible to the tensor cores.
                hopper.fence_async_shared()
                hopper.mbarrier.arrive(raw_empty.index(raw_stage), count=1)
                hopper.mbarrier.arrive(full.index(stage), count=1)
                num_done += 1
# fmt: on
