"""The converting warps of the Hopper kernels, for FP8 rows.

Hopper's tensor cores multiply two-byte queries with two-byte rows only, which they read from shared memory.  So the
loading warps copy FP8 rows to stages of their own ("raw").  The converting warps read them there, and write two-byte
rows to the stages that are attended.
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from espalier.kernels.attention.work_items import load_work_item, work_item_of
from espalier.kernels.hopper.work import extent_of, stage_of, wait_until_empty, wait_until_full
from espalier.kernels.runtime.jit import gluon_kernel


@gluon_kernel
def convert_work_items(raw, stages, plan, positions, CONSTANTS: gl.constexpr):
    """Convert the blocks of all work items of a program, from the stages `raw`."""
    # A warp converts 8 values a thread: of the narrowest tile, whole rows.  With 16 values the threads of a row would
    # write every second 16 bytes, and so use half of the memory's banks.
    THREADS: gl.constexpr = CONSTANTS.WIDTHS[len(CONSTANTS.WIDTHS) - 1] // 8
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // THREADS, THREADS], [CONSTANTS.CONVERT_WARPS, 1], [1, 0])
    num_work_items = plan.num_splits * plan.num_tiles * CONSTANTS.KV_HEADS
    backwards = 0
    num_done = 0
    for base in range(0, num_work_items, gl.num_programs(0)):
        work_item = work_item_of(base, backwards)
        backwards = 1 - backwards
        if work_item < num_work_items:
            item = load_work_item(plan, work_item, CONSTANTS.KV_HEADS, CONSTANTS.LONGEST_FIRST)
            extent = extent_of(plan, item, positions, gl.SliceLayout(1, LAYOUT), CONSTANTS)
            for _ in range(extent.num_blocks):
                wait_until_full(raw, num_done, True)
                wait_until_empty(stages, num_done)
                raw_stage, stage = stage_of(raw, num_done), stage_of(stages, num_done)
                for i in gl.static_range(len(stages.tiles)):
                    values = raw.tiles[i].index(raw_stage).load(LAYOUT)
                    if stages.tiles[i].dtype == gl.bfloat16:
                        # As in kernels/runtime/convert.py:from_fp8.
                        values = values.to(gl.float32)
                    stages.tiles[i].index(stage).store(values.to(stages.tiles[i].dtype))
                # Makes the rows visible to the tensor cores.
                hopper.fence_async_shared()
                hopper.mbarrier.arrive(raw.empty.index(raw_stage), count=1)
                hopper.mbarrier.arrive(stages.full.index(stage), count=1)
                num_done += 1
