"""Warp-specialized attention over latent rows of 512 + 64 values, for Hopper.

Work items, splits and masks are the same as in kernels/attention/latent_attention.py.  The loading warps copy each
block of rows into shared memory once, for K and V.  Two warpgroups attend.  Each computes one half of the output's
columns.
"""

from typing import Any

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from espalier.kernels.attention.attention_blocks import log_sum_exp_base2
from espalier.kernels.attention.work_items import (
    TMA_ALL,
    TMA_NONE,
    WorkPlan,
    load_work_item,
    trigger_merge,
    wait_and_count_splits,
    work_item_of_program,
)
from espalier.kernels.hopper.attend import attend_work_item, make_queries, packed_queries
from espalier.kernels.hopper.config import LATENT_BLOCK_N, ROPE_SIZE, V_SIZE, WEIGHT_SLOTS, HopperLatentConfig
from espalier.kernels.hopper.load import convert_work_items, load_work_items
from espalier.kernels.hopper.work import (
    HopperConstexprs,
    RowPtrs,
    Stages,
    make_barriers,
    make_stages,
    stage_of,
    wait_until_empty,
    wait_until_full,
    work_item_blocks,
)
from espalier.kernels.runtime.jit import gluon_kernel
from espalier.kernels.runtime.launch import tma_descriptor

LOAD_WARPS = 4
# Registers per thread: at launch, in the second attending warpgroup, in the loading warps.  The first attending
# warpgroup gets the remaining registers: 232 per thread.
REGISTERS_AT_LAUNCH, VALUE_REGISTERS, LOAD_REGISTERS = 168, 200, 72
# Numbers of loading warps and of converting warps, if rows are FP8.  The products of a warpgroup need 158 registers at
# launch, so a program cannot have more warps than with two-byte rows.
FP8_LOAD_WARPS, CONVERT_WARPS = 2, 2


# fmt: off
@gluon_kernel
def copy_queries(
    q_shared, q_rows, request, first_packed, num_queries, HEADS: gl.constexpr, COLUMNS: gl.constexpr,
):
    """Copy a tile's queries into shared memory.  All products with the previous tile's queries must have ended."""
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    at = first_packed + gl.arange(0, q_shared[0].shape[0], layout=gl.SliceLayout(1, LOAD))
    query = at // HEADS
    head = at % HEADS * q_rows.head_stride
    row = gl.expand_dims(request * q_rows.request_stride + query.to(gl.int64) * q_rows.row_stride + head, 1)
    exists = gl.expand_dims(query < num_queries, 1)
    for i in gl.static_range(len(q_shared)):
        column = gl.expand_dims(gl.arange(0, q_shared[i].shape[1], layout=gl.SliceLayout(0, LOAD)), 0)
        pointer = q_rows.pointer + COLUMNS[i] + (row + column)
        hopper.async_copy.async_copy_global_to_shared(q_shared[i], pointer, mask=exists)
    hopper.async_copy.commit_group()
    hopper.async_copy.wait_group(0)


@gluon_kernel
def _write_half(results, plan, work_item, out, factor, first_column, CONSTANTS: gl.constexpr, OUT_LAYOUT: gl.constexpr):
    """Write out * factor to columns first_column .. first_column + HALF of the results, or of the partial results."""
    HEADS: gl.constexpr = CONSTANTS.GROUP_SIZE
    HALF: gl.constexpr = CONSTANTS.OUT_SIZE
    out_ptr, _lse_ptr, partial_ptr, _partial_lse_ptr, _row_scale = results
    result = out * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, OUT_LAYOUT)), 1)
    at = gl.expand_dims(work_item.query_tile * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, OUT_LAYOUT)), 1)
    column = gl.expand_dims(first_column + gl.arange(0, HALF, layout=gl.SliceLayout(0, OUT_LAYOUT)), 0)
    rows = plan.queries * HEADS
    if work_item.request_splits == 1:
        row = work_item.request * rows + at
        gl.store(out_ptr + (row * (2 * HALF) + column), result.to(out_ptr.dtype.element_ty), mask=at < rows)
    else:
        row = work_item.split.to(gl.int64) * rows + at
        gl.store(partial_ptr + (row * (2 * HALF) + column), result, mask=at < rows)


@gluon_kernel
def score_and_sum_left_half(
    q_shared, stages, exchange, plan, q_rows, unused_positions, ancestor_bits, results, scale, CONSTANTS: gl.constexpr,
):
    """In the first warpgroup, compute the softmax weights of all work items, and the left half of the output's columns.

    exchange: the slots through which weights go to the second warpgroup.  unused_positions: a placeholder for
    positions, which only layers with a window need."""
    HEADS: gl.constexpr = CONSTANTS.GROUP_SIZE
    HALF: gl.constexpr = CONSTANTS.OUT_SIZE
    SCORE_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CONSTANTS.BLOCK_N, 16])
    OUT_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    _out_ptr, lse_ptr, _partial_ptr, partial_lse_ptr, row_scale = results
    num_work_items = plan.num_splits * plan.num_tiles
    backwards = 0
    blocks_done = 0
    blocks_sent = 0
    for base in range(0, num_work_items, gl.num_programs(0)):
        work_item_index = work_item_of_program(base, backwards)
        backwards = 1 - backwards
        if work_item_index < num_work_items:
            work_item = load_work_item(plan, work_item_index, 1, CONSTANTS.LONGEST_FIRST)
            first_packed = work_item.query_tile * 64
            copy_queries(q_shared, q_rows, work_item.request, first_packed, plan.queries, HEADS, CONSTANTS.COLUMNS)
            blocks = work_item_blocks(plan, work_item, unused_positions, gl.SliceLayout(1, SCORE_LAYOUT), CONSTANTS)
            packed = packed_queries(plan, work_item, first_packed, unused_positions, CONSTANTS, SCORE_LAYOUT)
            queries = make_queries(
                plan, work_item, blocks, first_packed, packed, unused_positions, ancestor_bits, CONSTANTS,
            )
            out, max_score, sum_weights = attend_work_item(
                q_shared, stages, stages.tiles[0], exchange, blocks_done, blocks_sent, scale, queries, blocks,
                CONSTANTS, SCORE_LAYOUT, OUT_LAYOUT,
            )
            blocks_done += blocks.num_blocks
            blocks_sent += blocks.num_blocks
            trigger_merge(base, num_work_items, CONSTANTS.USE_PDL)
            divisor = gl.where(sum_weights == 0.0, 1.0, sum_weights)
            # One division per query is faster than one per value.  row_scale: the scale of FP8 rows, else 1.
            factor = row_scale / divisor
            # After the last block, the second warpgroup gets the factor in the place of a decay.
            slot = stage_of(exchange, blocks_sent)
            wait_until_empty(exchange, blocks_sent)
            exchange.tiles[1].index(slot).store(factor)
            hopper.mbarrier.arrive(exchange.full.index(slot), count=1)
            blocks_sent += 1
            lse = log_sum_exp_base2(max_score, sum_weights, scale, stages.tiles[0].dtype)
            _write_half(results, plan, work_item, out, factor, 0, CONSTANTS, OUT_LAYOUT)
            index = first_packed + gl.arange(0, 64, layout=gl.SliceLayout(1, SCORE_LAYOUT))
            rows = plan.queries * HEADS
            if work_item.request_splits == 1:
                gl.store(lse_ptr + (work_item.request * rows + index), lse * 0.6931471805599453, mask=index < rows)
            else:
                gl.store(partial_lse_ptr + (work_item.split.to(gl.int64) * rows + index), lse, mask=index < rows)


@gluon_kernel
def sum_right_half(stages, exchange, plan, unused_positions, results, CONSTANTS: gl.constexpr):
    """In the second warpgroup, compute the right half of the output's columns, with the first warpgroup's weights."""
    HALF: gl.constexpr = CONSTANTS.OUT_SIZE
    OUT_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    weight_slots, decay_slots = exchange.tiles
    num_work_items = plan.num_splits * plan.num_tiles
    backwards = 0
    blocks_done = 0
    blocks_sent = 0
    for base in range(0, num_work_items, gl.num_programs(0)):
        work_item_index = work_item_of_program(base, backwards)
        backwards = 1 - backwards
        if work_item_index < num_work_items:
            work_item = load_work_item(plan, work_item_index, 1, CONSTANTS.LONGEST_FIRST)
            blocks = work_item_blocks(plan, work_item, unused_positions, gl.SliceLayout(1, OUT_LAYOUT), CONSTANTS)
            out = gl.full([64, HALF], 0.0, gl.float32, layout=OUT_LAYOUT)
            for t in range(blocks.num_blocks):
                slot, stage = stage_of(exchange, blocks_sent), stage_of(stages, blocks_done)
                wait_until_full(stages, blocks_done, True)
                wait_until_full(exchange, blocks_sent, True)
                decay = decay_slots.index(slot).load(gl.SliceLayout(1, OUT_LAYOUT))
                out = out * gl.expand_dims(decay, 1)
                # Rows that threads wrote need a fence.  For the weights, the first warpgroup has made the fence.
                if (CONSTANTS.TMA_BLOCKS != 1 and CONSTANTS.RAW_STAGES == 0) or t >= blocks.num_unmasked:
                    hopper.fence_async_shared()
                values = stages.tiles[1].index(stage)
                pending = hopper.warpgroup_mma(weight_slots.index(slot), values, out, is_async=True)
                out = hopper.warpgroup_mma_wait(num_outstanding=0, deps=[pending])
                hopper.mbarrier.arrive(exchange.empty.index(slot), count=1)
                hopper.mbarrier.arrive(stages.empty.index(stage), count=1)
                blocks_done += 1
                blocks_sent += 1
            slot = stage_of(exchange, blocks_sent)
            wait_until_full(exchange, blocks_sent, True)
            factor = decay_slots.index(slot).load(gl.SliceLayout(1, OUT_LAYOUT))
            hopper.mbarrier.arrive(exchange.empty.index(slot), count=1)
            blocks_sent += 1
            _write_half(results, plan, work_item, out, factor, HALF, CONSTANTS, OUT_LAYOUT)


@gluon_kernel(do_not_specialize=["batch"])
def hopper_latent_kernel(
    q_ptr, row_ptr, staged_ptr, page_table_ptr, splits_ptr, split_starts_ptr, ancestor_bits_ptr,
    out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, row_scale_ptr,
    scale, batch, queries, rows, first_position,
    q_stride_b, q_stride_q, q_stride_h, row_stride, staged_stride_b, staged_stride_r, page_table_stride_b,
    bits_stride_b, bits_stride_q, half_descriptor, rope_descriptor,
    HEADS: gl.constexpr, HALF: gl.constexpr, ROPE: gl.constexpr, PAGE_SIZE: gl.constexpr, STAGED_KIND: gl.constexpr,
    LONGEST_FIRST: gl.constexpr, TMA_BLOCKS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    RAW_STAGES: gl.constexpr, WEIGHT_SLOTS: gl.constexpr, USE_PDL: gl.constexpr,
    VALUE_REGISTERS: gl.constexpr, LOAD_REGISTERS: gl.constexpr, LOAD_WARPS: gl.constexpr, CONVERT_WARPS: gl.constexpr,
):
    """HALF, ROPE: columns of half a latent, and of the RoPE part.  STAGED_KIND: 0 for no staged rows, 1 for a chain, 2
    for a tree.  WEIGHT_SLOTS: buffers for the softmax weights that the first warpgroup sends to the second.
    RAW_STAGES: number of stages of FP8 rows, which extra warps convert and write to `stages`; 0 for other rows."""
    FP8: gl.constexpr = RAW_STAGES > 0
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    # The tiles of a row are columns of one row in memory, so all tiles have the same stride.
    CONSTANTS: gl.constexpr = HopperConstexprs(
        KV_HEADS=1, GROUP_SIZE=HEADS, PAGE_SIZE=PAGE_SIZE, WINDOW=0, STAGED_KIND=STAGED_KIND,
        LONGEST_FIRST=LONGEST_FIRST, SAME_STRIDES=True, TMA_BLOCKS=TMA_BLOCKS, WIDTHS=(HALF, HALF, ROPE),
        COLUMNS=(0, HALF, 2 * HALF), ROW_SIZE=2 * HALF + ROPE, OUT_SIZE=HALF, BLOCK_M=64, BLOCK_N=BLOCK_N,
        RAW_STAGES=RAW_STAGES, LOAD_WARPS=LOAD_WARPS, CONVERT_WARPS=CONVERT_WARPS, USE_PDL=USE_PDL,
    )
    half_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, HALF], dtype)
    rope_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, ROPE], dtype)
    weight_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BLOCK_N], dtype)
    q_shared = (
        gl.allocate_shared_memory(dtype, [64, HALF], half_layout),
        gl.allocate_shared_memory(dtype, [64, HALF], half_layout),
        gl.allocate_shared_memory(dtype, [64, ROPE], rope_layout),
    )
    stages = make_stages(dtype, STAGES, 1 if FP8 else 32 * LOAD_WARPS, 2, CONSTANTS)
    full_slots, empty_slots = make_barriers(WEIGHT_SLOTS, 1, 1)
    weights = gl.allocate_shared_memory(dtype, [WEIGHT_SLOTS, 64, BLOCK_N], weight_layout)
    decays = gl.allocate_shared_memory(gl.float32, [WEIGHT_SLOTS, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    exchange = Stages((weights, decays), full_slots, empty_slots)
    num_splits = wait_and_count_splits(split_starts_ptr, batch, queries, USE_PDL)
    num_tiles = (queries * HEADS + 63) // 64
    plan = WorkPlan(splits_ptr, split_starts_ptr, num_splits, num_tiles, queries, rows, first_position)
    # FP8 rows are loaded into separate stages.
    loaded = stages
    row_scale = gl.to_tensor(1.0)
    if FP8:
        loaded = make_stages(row_ptr.dtype.element_ty, RAW_STAGES, 32 * LOAD_WARPS, 1, CONSTANTS)
        row_scale = gl.load(row_scale_ptr)
        scale = scale * row_scale
    committed, staged = RowPtrs(row_ptr, 0, row_stride, 0), RowPtrs(staged_ptr, staged_stride_b, staged_stride_r, 0)
    # A placeholder for positions, which only kernels with a window read.
    unused = RowPtrs(ancestor_bits_ptr, 0, 0, 0)
    results = (out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, row_scale)
    # With two-byte rows, the last function is left out.
    gl.warp_specialize(
        [
            (score_and_sum_left_half, (
                q_shared, stages, exchange, plan, RowPtrs(q_ptr, q_stride_b, q_stride_q, q_stride_h), unused,
                RowPtrs(ancestor_bits_ptr, bits_stride_b, bits_stride_q, 0), results, scale, CONSTANTS,
            )),
            (sum_right_half, (stages, exchange, plan, unused, results, CONSTANTS)),
            (load_work_items, (
                loaded, plan, (committed, committed, committed), (staged, staged, staged), page_table_ptr,
                page_table_stride_b, unused, (half_descriptor, half_descriptor, rope_descriptor), None, CONSTANTS,
            )),
            (convert_work_items, (loaded, stages, plan, unused, CONSTANTS)),
        ][:4 if FP8 else 3],
        [4, LOAD_WARPS, CONVERT_WARPS][:3 if FP8 else 2],
        [VALUE_REGISTERS, LOAD_REGISTERS, LOAD_REGISTERS][:3 if FP8 else 2],
    )
# fmt: on


def block_arguments(pages: Tensor, page_size: int, block_n: int) -> dict[str, Any]:
    """Returns the constexpr arguments and TMA descriptors of blocks of `block_n` rows.  pages: [R, 1, 576].
    TMA copies the blocks only if a page holds a whole number of blocks."""
    pages_hold_blocks = page_size % block_n == 0
    return {
        "half_descriptor": tma_descriptor(pages[:, 0], block_n, V_SIZE // 2) if pages_hold_blocks else None,
        "rope_descriptor": tma_descriptor(pages[:, 0], block_n, ROPE_SIZE) if pages_hold_blocks else None,
        "TMA_BLOCKS": TMA_ALL if pages_hold_blocks else TMA_NONE,
        "HALF": V_SIZE // 2,
        "ROPE": ROPE_SIZE,
        "BLOCK_N": block_n,
    }


def hopper_latent_arguments(config: HopperLatentConfig, pages: Tensor, page_size: int) -> dict[str, Any]:
    """Returns the constexpr arguments, options and TMA descriptors of a launch.  pages: [R, 1, 576]."""
    return block_arguments(pages, page_size, LATENT_BLOCK_N) | {
        "STAGES": config.num_stages,
        "RAW_STAGES": config.raw_stages,
        "WEIGHT_SLOTS": WEIGHT_SLOTS,
        "VALUE_REGISTERS": VALUE_REGISTERS,
        "LOAD_REGISTERS": LOAD_REGISTERS,
        "LOAD_WARPS": FP8_LOAD_WARPS if config.raw_stages else LOAD_WARPS,
        "CONVERT_WARPS": CONVERT_WARPS,
        "num_warps": 4,
        "maxnreg": REGISTERS_AT_LAUNCH,
    }
