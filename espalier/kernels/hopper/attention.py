"""Warp-specialized tree attention for Hopper: some warps load rows, and the other warps attend.

The kernel has the work items, splits, blocks and order of sums of kernels/attention/tree_attention.py, so it gives the
same bits.  It takes queries of two-byte types and head sizes 64, 128 and 256.  It is used only if a KV head has
more than 16 packed queries, because fewer would waste most of a tensor core tile of 64 rows.
"""

from typing import Any

import torch
from triton.experimental.gluon import language as gl

from espalier.kernels.attention.work_items import TMA_ALL, TMA_COUNTED, TMA_NONE, WorkPlan, wait_and_count_splits
from espalier.kernels.hopper.attend import attend_work_items
from espalier.kernels.hopper.config import HopperConfig, kv_block_rows, needs_block_counts, uses_tma
from espalier.kernels.hopper.load import convert_work_items, load_work_items
from espalier.kernels.hopper.work import HopperConstexprs, RowPtrs, make_stages
from espalier.kernels.runtime.jit import gluon_kernel
from espalier.kernels.runtime.launch import tma_descriptor


# fmt: off
@gluon_kernel(do_not_specialize=["batch"])
def hopper_attention_kernel(
    q_ptr, k_ptr, v_ptr, staged_k_ptr, staged_v_ptr,
    page_table_ptr, splits_ptr, split_starts_ptr, position_ptr, row_position_ptr, ancestor_bits_ptr,
    out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, sink_ptr, k_scale_ptr, v_scale_ptr,
    scale, batch, queries, rows, first_position,
    q_stride_b, q_stride_q, q_stride_h, k_stride_row, k_stride_h, v_stride_row, v_stride_h, staged_k_stride_b,
    staged_k_stride_r, staged_k_stride_h, staged_v_stride_b, staged_v_stride_r, staged_v_stride_h, page_table_stride_b,
    position_stride_b, position_stride_q, row_position_stride_b, row_position_stride_r, bits_stride_b, bits_stride_q,
    k_descriptor, v_descriptor, contiguous_ptr,
    KV_HEADS: gl.constexpr, GROUP_SIZE: gl.constexpr, HEAD_SIZE: gl.constexpr,
    PAGE_SIZE: gl.constexpr, WINDOW: gl.constexpr, STAGED_KIND: gl.constexpr, HAS_SINK: gl.constexpr,
    LONGEST_FIRST: gl.constexpr, SAME_STRIDES: gl.constexpr, TMA_BLOCKS: gl.constexpr,
    WARPGROUPS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, RAW_STAGES: gl.constexpr,
    ATTEND_REGISTERS: gl.constexpr, LOAD_REGISTERS: gl.constexpr, LOAD_WARPS: gl.constexpr,
    CONVERT_REGISTERS: gl.constexpr, CONVERT_WARPS: gl.constexpr, USE_PDL: gl.constexpr,
):
    """Attends to committed rows and to staged rows of this pass.  STAGED_KIND: 0 for none, 1 for a chain, 2 for a tree.
    RAW_STAGES: number of stages of FP8 rows, which extra warps convert and write to `stages`; 0 for other rows."""
    FP8: gl.constexpr = RAW_STAGES > 0
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    # FP8 rows are attended to in float16, as in kernels/attention/tree_attention.py:_load_queries.
    attended_dtype: gl.constexpr = gl.float16 if FP8 else dtype
    CONSTANTS: gl.constexpr = HopperConstexprs(
        KV_HEADS, GROUP_SIZE, PAGE_SIZE, WINDOW, STAGED_KIND, LONGEST_FIRST, SAME_STRIDES, TMA_BLOCKS,
        WIDTHS=(HEAD_SIZE, HEAD_SIZE), COLUMNS=(0, 0), ROW_SIZE=2 * HEAD_SIZE, OUT_SIZE=HEAD_SIZE,
        BLOCK_M=64 * WARPGROUPS, BLOCK_N=BLOCK_N, RAW_STAGES=RAW_STAGES, LOAD_WARPS=LOAD_WARPS,
        CONVERT_WARPS=CONVERT_WARPS, USE_PDL=USE_PDL,
    )
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, HEAD_SIZE], dtype)
    q_shared = gl.allocate_shared_memory(dtype, [WARPGROUPS, 64, HEAD_SIZE], q_layout)
    stages = make_stages(attended_dtype, STAGES, 1 if FP8 else 32 * LOAD_WARPS, WARPGROUPS, CONSTANTS)
    # FP8 rows are loaded into separate stages.
    loaded = stages
    num_splits = wait_and_count_splits(split_starts_ptr, batch, queries, USE_PDL)
    if FP8:
        loaded = make_stages(k_ptr.dtype.element_ty, RAW_STAGES, 32 * LOAD_WARPS, 1, CONSTANTS)
    num_tiles = (queries * GROUP_SIZE + CONSTANTS.BLOCK_M - 1) // CONSTANTS.BLOCK_M
    plan = WorkPlan(splits_ptr, split_starts_ptr, num_splits, num_tiles, queries, rows, first_position)
    q_rows = RowPtrs(q_ptr, q_stride_b, q_stride_q, q_stride_h)
    committed = (RowPtrs(k_ptr, 0, k_stride_row, k_stride_h), RowPtrs(v_ptr, 0, v_stride_row, v_stride_h))
    staged = (
        RowPtrs(staged_k_ptr, staged_k_stride_b, staged_k_stride_r, staged_k_stride_h),
        RowPtrs(staged_v_ptr, staged_v_stride_b, staged_v_stride_r, staged_v_stride_h),
    )
    positions = RowPtrs(position_ptr, position_stride_b, position_stride_q, 0)
    row_positions = RowPtrs(row_position_ptr, row_position_stride_b, row_position_stride_r, 0)
    ancestor_bits = RowPtrs(ancestor_bits_ptr, bits_stride_b, bits_stride_q, 0)
    results = (out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, sink_ptr)
    scales = (k_scale_ptr, v_scale_ptr)
    # With one attending warpgroup, the first function is left out.  With two-byte rows, the last function is left out.
    gl.warp_specialize(
        [
            (attend_work_items, (
                0, q_shared, stages, plan, q_rows, positions, row_positions, ancestor_bits, results, scale, scales,
                HAS_SINK, CONSTANTS,
            )),
            (attend_work_items, (
                WARPGROUPS - 1, q_shared, stages, plan, q_rows, positions, row_positions, ancestor_bits, results, scale,
                scales, HAS_SINK, CONSTANTS,
            )),
            (load_work_items, (
                loaded, plan, committed, staged, page_table_ptr, page_table_stride_b, positions, (k_descriptor,
                v_descriptor), contiguous_ptr, CONSTANTS,
            )),
            (convert_work_items, (loaded, stages, plan, positions, CONSTANTS)),
        ][2 - WARPGROUPS:4 if FP8 else 3],
        [4, LOAD_WARPS, CONVERT_WARPS][2 - WARPGROUPS:3 if FP8 else 2],
        [ATTEND_REGISTERS, LOAD_REGISTERS, CONVERT_REGISTERS][2 - WARPGROUPS:3 if FP8 else 2],
    )
# fmt: on


def tma_arguments(
    config: HopperConfig, k: torch.Tensor, v: torch.Tensor, page_size: int, window: int, contiguous: torch.Tensor | None
) -> dict[str, Any]:
    """Returns arguments for copies by TMA.  k, v: [R, heads, size].  contiguous: count_contiguous_blocks' result."""
    kind, size = TMA_NONE, k.shape[2]
    # The TMA descriptor is [R, heads · size], so the heads of a row must be adjacent in memory.
    if uses_tma(config) and not window and all(rows.stride(1) == rows.shape[2] for rows in (k, v)):
        kind_with_counts = TMA_NONE if contiguous is None else TMA_COUNTED
        kind = kind_with_counts if needs_block_counts(page_size, window, size) else TMA_ALL
    block = kv_block_rows(size), size
    descriptors = [None if kind == TMA_NONE else tma_descriptor(rows.flatten(1), *block) for rows in (k, v)]
    return {
        "k_descriptor": descriptors[0],
        "v_descriptor": descriptors[1],
        "contiguous_ptr": None if kind == TMA_NONE else contiguous,
        "TMA_BLOCKS": kind,
    }


def hopper_attention_arguments(config: HopperConfig, head_size: int, same_strides: bool) -> dict[str, Any]:
    """Constexpr arguments and options of a launch.  same_strides: whether rows of K and V have the same stride."""
    at_launch, attend_registers = config.registers(head_size)
    load_warps, load_registers = config.load_warps(head_size)
    convert_warps, convert_registers = config.convert_warps
    return {
        "HEAD_SIZE": head_size,
        "SAME_STRIDES": same_strides,
        "WARPGROUPS": config.warpgroups,
        "BLOCK_N": kv_block_rows(head_size),
        "STAGES": config.num_stages,
        "ATTEND_REGISTERS": attend_registers,
        "LOAD_REGISTERS": load_registers,
        "LOAD_WARPS": load_warps,
        "RAW_STAGES": config.raw_stages,
        "CONVERT_REGISTERS": convert_registers,
        "CONVERT_WARPS": convert_warps,
        "num_warps": 4,
        "maxnreg": at_launch,
    }
