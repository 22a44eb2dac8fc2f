"""Attention over latent rows of 512 + 64 values, for one query per request with at most 16 heads, on Hopper.

hopper/latent.py pads 16 packed queries to the 64 rows of a tensor core tile, so it wastes three fourths of its work.
This kernel swaps the operands: a tile has 64 rows of the cache, and the queries are the 16 columns.  So one warpgroup
computes as fast as memory delivers rows.  Work items, splits, loading warps and stages are as in hopper/latent.py.

    scores [64 rows, 16] = rows · queriesᵀ        out [512, 16] = rowsᵀ · weights [64 rows, 16]
"""

from typing import Any

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from espalier.kernels.attention.attention_blocks import log_sum_exp_base2, shift_exponent
from espalier.kernels.attention.work_items import (
    WorkPlan,
    load_work_item,
    trigger_merge,
    wait_and_count_splits,
    work_item_of_program,
)
from espalier.kernels.hopper.config import LATENT_FEW_BLOCK_N, LATENT_FEW_MAX_QUERIES, HopperLatentFewQueriesConfig
from espalier.kernels.hopper.latent import block_arguments, copy_queries
from espalier.kernels.hopper.load import load_work_items
from espalier.kernels.hopper.work import (
    HopperConstexprs,
    RowPtrs,
    make_stages,
    position_of_block,
    stage_of,
    wait_until_full,
    work_item_blocks,
)
from espalier.kernels.runtime.jit import gluon_kernel

LOAD_WARPS = 4
# Registers per thread: at launch, and in the loading warps.
REGISTERS_AT_LAUNCH, LOAD_REGISTERS = 200, 152


# fmt: off
@gluon_kernel
def _visible_rows(block_number, plan, blocks, ancestor_bits_ptr, KEY_LAYOUT: gl.constexpr, CONSTANTS: gl.constexpr):
    """Returns [BLOCK_N] bool: the rows of a block that the request's only query sees.

    ancestor_bits_ptr: the ancestor bits of this query."""
    BLOCK_N: gl.constexpr = CONSTANTS.BLOCK_N
    offset = gl.arange(0, BLOCK_N, layout=KEY_LAYOUT)
    if block_number < blocks.num_committed:
        at = position_of_block(blocks, block_number, BLOCK_N) + offset
        seen = (at >= plan.first_position) & (at < blocks.end_committed)
    else:
        node = blocks.begin_staged + (block_number - blocks.num_committed) * BLOCK_N + offset
        seen = node < blocks.end_staged
        if CONSTANTS.STAGED_KIND == 1:
            seen = seen & (node <= 0)
        if CONSTANTS.STAGED_KIND == 2:
            word = gl.load(ancestor_bits_ptr + node // 64, mask=seen, other=0)
            seen = seen & ((word >> (node % 64).to(gl.int64)) & 1 != 0)
    return seen


@gluon_kernel
def _attend_work_item(
    q_shared, weight_shared, stages, blocks_done, plan, blocks, ancestor_bits_ptr, scale,
    CONSTANTS: gl.constexpr, SCORE_LAYOUT: gl.constexpr,
):
    """Attend to one work item.  Returns (left half of out [OUT_SIZE, 16], right half, max_score, sum_weights).
    q_shared, weight_shared: shared memory for the queries and for a block's softmax weights."""
    HALF: gl.constexpr = CONSTANTS.OUT_SIZE
    BLOCK_N: gl.constexpr = CONSTANTS.BLOCK_N
    COLUMNS: gl.constexpr = q_shared[0].shape[0]
    zeros = gl.full([BLOCK_N, COLUMNS], 0.0, gl.float32, layout=SCORE_LAYOUT)
    left = gl.full([HALF, COLUMNS], 0.0, gl.float32, layout=SCORE_LAYOUT)
    right = gl.full([HALF, COLUMNS], 0.0, gl.float32, layout=SCORE_LAYOUT)
    max_score = gl.full([COLUMNS], float("-inf"), gl.float32, layout=gl.SliceLayout(0, SCORE_LAYOUT))
    # Each thread adds only the weights that it holds.  After the last block the sums of all threads are added.
    sums = gl.full([BLOCK_N, COLUMNS], 0.0, gl.float32, layout=SCORE_LAYOUT)
    for t in range(blocks.num_blocks):
        stage = stage_of(stages, blocks_done)
        wait_until_full(stages, blocks_done, True)
        # Threads may have written rows or queries; the fence makes them visible to the tensor cores.
        hopper.fence_async_shared()
        scores = hopper.warpgroup_mma(
            stages.tiles[0].index(stage), q_shared[0].permute((1, 0)), zeros, use_acc=False, is_async=True
        )
        for i in gl.static_range(1, len(q_shared)):
            scores = hopper.warpgroup_mma(
                stages.tiles[i].index(stage), q_shared[i].permute((1, 0)), scores, is_async=True
            )
        scores = hopper.warpgroup_mma_wait(num_outstanding=0, deps=[scores])
        if t >= blocks.num_unmasked:
            seen = _visible_rows(t, plan, blocks, ancestor_bits_ptr, gl.SliceLayout(1, SCORE_LAYOUT), CONSTANTS)
            scores = gl.where(gl.expand_dims(seen, 1), scores, float("-inf"))
        new_max = gl.maximum(max_score, gl.max(scores, 0))
        # All scores are -inf until the first visible row; -inf - -inf would be NaN.
        scaled_max = gl.where(new_max == float("-inf"), 0.0, new_max * scale)
        weights = gl.exp2(gl.fma(scores, scale, gl.expand_dims(-shift_exponent(scaled_max, weight_shared.dtype), 0)))
        decay = gl.expand_dims(gl.exp2(gl.fma(max_score, scale, -scaled_max)), 0)
        max_score = new_max
        sums = sums * decay + weights
        weight_shared.permute((1, 0)).store(weights.to(weight_shared.dtype))
        hopper.fence_async_shared()
        shared = weight_shared.permute((1, 0))
        left = hopper.warpgroup_mma(
            stages.tiles[0].index(stage).permute((1, 0)), shared, left * decay, is_async=True
        )
        right = hopper.warpgroup_mma(
            stages.tiles[1].index(stage).permute((1, 0)), shared, right * decay, is_async=True
        )
        left, right = hopper.warpgroup_mma_wait(num_outstanding=0, deps=[left, right])
        hopper.mbarrier.arrive(stages.empty.index(stage), count=1)
        blocks_done += 1
    return left, right, max_score, gl.sum(sums, 0)


@gluon_kernel
def _attend_work_items(
    q_shared, weight_shared, stages, plan, q_rows, ancestor_bits, results, scale, CONSTANTS: gl.constexpr,
):
    """Attend to all work items of this program.  q_shared: the buffers in shared memory for a work item's queries: the
    left half of the latent columns, the right half, and the RoPE columns."""
    HEADS: gl.constexpr = CONSTANTS.GROUP_SIZE
    HALF: gl.constexpr = CONSTANTS.OUT_SIZE
    COLUMNS: gl.constexpr = q_shared[0].shape[0]
    SCORE_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    out_ptr, lse_ptr, partial_ptr, partial_lse_ptr = results
    backwards = 0
    blocks_done = 0
    for base in range(0, plan.num_splits, gl.num_programs(0)):
        work_item_index = work_item_of_program(base, backwards)
        backwards = 1 - backwards
        if work_item_index < plan.num_splits:
            work_item = load_work_item(plan, work_item_index, 1, CONSTANTS.LONGEST_FIRST)
            copy_queries(q_shared, q_rows, work_item.request, 0, plan.queries, HEADS, CONSTANTS.COLUMNS)
            blocks = work_item_blocks(plan, work_item, ancestor_bits, gl.SliceLayout(0, SCORE_LAYOUT), CONSTANTS)
            left, right, max_score, sum_weights = _attend_work_item(
                q_shared, weight_shared, stages, blocks_done, plan, blocks,
                ancestor_bits.pointer + work_item.request * ancestor_bits.request_stride, scale, CONSTANTS,
                SCORE_LAYOUT,
            )
            blocks_done += blocks.num_blocks
            trigger_merge(base, plan.num_splits, CONSTANTS.USE_PDL)
            divisor = gl.where(sum_weights == 0.0, 1.0, sum_weights)
            factor = gl.expand_dims(1.0 / divisor, 0)
            lse = log_sum_exp_base2(max_score, sum_weights, scale, weight_shared.dtype)
            head = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, SCORE_LAYOUT))
            column = gl.expand_dims(gl.arange(0, HALF, layout=gl.SliceLayout(1, SCORE_LAYOUT)), 1)
            exists = gl.expand_dims(head < HEADS, 0)
            if work_item.request_splits == 1:
                row = work_item.request * HEADS + head
                at = gl.expand_dims(row, 0) * (2 * HALF) + column
                gl.store(out_ptr + at, (left * factor).to(out_ptr.dtype.element_ty), mask=exists)
                gl.store(out_ptr + HALF + at, (right * factor).to(out_ptr.dtype.element_ty), mask=exists)
                gl.store(lse_ptr + row, lse * 0.6931471805599453, mask=head < HEADS)
            else:
                row = work_item.split.to(gl.int64) * HEADS + head
                at = gl.expand_dims(row, 0) * (2 * HALF) + column
                gl.store(partial_ptr + at, left * factor, mask=exists)
                gl.store(partial_ptr + HALF + at, right * factor, mask=exists)
                gl.store(partial_lse_ptr + row, lse, mask=head < HEADS)


@gluon_kernel(do_not_specialize=["batch"])
def hopper_latent_few_kernel(
    q_ptr, row_ptr, staged_ptr, page_table_ptr, splits_ptr, split_starts_ptr, ancestor_bits_ptr,
    out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, row_scale_ptr,
    scale, batch, queries, rows, first_position,
    q_stride_b, q_stride_q, q_stride_h, row_stride, staged_stride_b, staged_stride_r, page_table_stride_b,
    bits_stride_b, bits_stride_q, half_descriptor, rope_descriptor,
    HEADS: gl.constexpr, HALF: gl.constexpr, ROPE: gl.constexpr, PAGE_SIZE: gl.constexpr, STAGED_KIND: gl.constexpr,
    LONGEST_FIRST: gl.constexpr, TMA_BLOCKS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    COLUMNS: gl.constexpr, USE_PDL: gl.constexpr, LOAD_REGISTERS: gl.constexpr, LOAD_WARPS: gl.constexpr,
):
    """HALF, ROPE: columns of half a latent, and of the RoPE part.  STAGED_KIND: 0 for no staged rows, 1 for a chain, 2
    for a tree.  COLUMNS: columns of a product, at least HEADS.  row_scale_ptr is None: there are no FP8 rows."""
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    CONSTANTS: gl.constexpr = HopperConstexprs(
        KV_HEADS=1, GROUP_SIZE=HEADS, PAGE_SIZE=PAGE_SIZE, WINDOW=0, STAGED_KIND=STAGED_KIND,
        LONGEST_FIRST=LONGEST_FIRST, SAME_STRIDES=True, TMA_BLOCKS=TMA_BLOCKS, WIDTHS=(HALF, HALF, ROPE),
        COLUMNS=(0, HALF, 2 * HALF), ROW_SIZE=2 * HALF + ROPE, OUT_SIZE=HALF, BLOCK_M=HEADS, BLOCK_N=BLOCK_N,
        RAW_STAGES=0, LOAD_WARPS=LOAD_WARPS, CONVERT_WARPS=0, USE_PDL=USE_PDL,
    )
    half_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([COLUMNS, HALF], dtype)
    rope_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([COLUMNS, ROPE], dtype)
    weight_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([COLUMNS, BLOCK_N], dtype)
    q_shared = (
        gl.allocate_shared_memory(dtype, [COLUMNS, HALF], half_layout),
        gl.allocate_shared_memory(dtype, [COLUMNS, HALF], half_layout),
        gl.allocate_shared_memory(dtype, [COLUMNS, ROPE], rope_layout),
    )
    weight_shared = gl.allocate_shared_memory(dtype, [COLUMNS, BLOCK_N], weight_layout)
    stages = make_stages(dtype, STAGES, 32 * LOAD_WARPS, 1, CONSTANTS)
    num_splits = wait_and_count_splits(split_starts_ptr, batch, queries, USE_PDL)
    plan = WorkPlan(splits_ptr, split_starts_ptr, num_splits, 1, queries, rows, first_position)
    committed, staged = RowPtrs(row_ptr, 0, row_stride, 0), RowPtrs(staged_ptr, staged_stride_b, staged_stride_r, 0)
    # The ancestor bits are a placeholder for positions, which are not read without a window.
    bits = RowPtrs(ancestor_bits_ptr, bits_stride_b, bits_stride_q, 0)
    results = (out_ptr, lse_ptr, partial_ptr, partial_lse_ptr)
    gl.warp_specialize(
        [
            (_attend_work_items, (
                q_shared, weight_shared, stages, plan, RowPtrs(q_ptr, q_stride_b, q_stride_q, q_stride_h), bits,
                results, scale, CONSTANTS,
            )),
            (load_work_items, (
                stages, plan, (committed, committed, committed), (staged, staged, staged), page_table_ptr,
                page_table_stride_b, bits, (half_descriptor, half_descriptor, rope_descriptor), None, CONSTANTS,
            )),
        ],
        [LOAD_WARPS],
        [LOAD_REGISTERS],
    )
# fmt: on


def hopper_latent_few_arguments(config: HopperLatentFewQueriesConfig, pages: Tensor, page_size: int) -> dict[str, Any]:
    """Returns the constexpr arguments, options and TMA descriptors of a launch.  pages: [R, 1, 576]."""
    return block_arguments(pages, page_size, LATENT_FEW_BLOCK_N) | {
        "STAGES": config.num_stages,
        "COLUMNS": LATENT_FEW_MAX_QUERIES,
        "LOAD_REGISTERS": LOAD_REGISTERS,
        "LOAD_WARPS": LOAD_WARPS,
        "num_warps": 4,
        "maxnreg": REGISTERS_AT_LAUNCH,
    }
