"""Attention over latent rows (MLA) that are too wide for kernels/attention/tree_attention.py, such as 512 + 64 values.

K is the whole row and V is its first part.  A block of rows is loaded once and used as both.  Triton's tiles have sizes
of powers of two, so the block is two tiles: the latent, which is V, and the RoPE part.  All heads share one row, so
there is one KV head.  Work items, splits, partial results, their merge and the reference are shared with
tree_attention.py.  On Hopper, rows of 512 + 64 values in two-byte dtypes have other kernels: hopper/latent.py, and
hopper/latent_few.py for one query per request with up to 16 heads.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.attention.attention_blocks import (
    AttentionConstexprs,
    RowTiles,
    attend_blocks,
    attend_staged,
    check_attention_inputs,
    common_launch_arguments,
    load_rows,
    named_strides,
    times_scale,
    write_work_item_result,
)
from espalier.kernels.attention.choose import (
    LatentAttentionConfig,
    choose_latent_config,
    latent_config_supports,
    latent_tile_widths,
)
from espalier.kernels.attention.triton_config import TritonConfig
from espalier.kernels.attention.work_items import (
    WorkPlan,
    count_committed_blocks,
    load_work_item,
    trigger_merge,
    visible_staged_range,
    wait_and_count_splits,
    work_item_of_program,
)
from espalier.kernels.hopper.config import HopperLatentConfig, HopperLatentFewQueriesConfig
from espalier.kernels.hopper.latent import hopper_latent_arguments, hopper_latent_kernel
from espalier.kernels.hopper.latent_few import hopper_latent_few_arguments, hopper_latent_few_kernel
from espalier.kernels.ops.attention import (
    KERNEL_DTYPES,
    MAX_ROW_SIZE,
    MAX_V_SIZE,
    AttentionInputs,
    PartialResults,
    merge_splits,
)
from espalier.kernels.runtime.jit import kernel
from espalier.kernels.runtime.launch import chip


# fmt: off
@kernel(do_not_specialize=["batch"])
def _latent_attention_kernel(
    q_ptr, row_ptr, staged_ptr, page_table_ptr, splits_ptr, split_starts_ptr, ancestor_bits_ptr,
    out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, row_scale_ptr,
    scale, batch, queries, rows, first_position,
    q_stride_b, q_stride_q, q_stride_h, row_stride, staged_stride_b, staged_stride_r, page_table_stride_b,
    bits_stride_b, bits_stride_q,
    HEADS: tl.constexpr, V_SIZE: tl.constexpr, ROPE_SIZE: tl.constexpr, PAGE_SIZE: tl.constexpr,
    STAGED_KIND: tl.constexpr, LONGEST_FIRST: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    USE_PDL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
):
    """queries, rows: numbers of queries and staged rows per request.  row_ptr: pages.  row_scale_ptr: the FP8 scale.
    STAGED_KIND: 0 for no staged rows, 1 for a chain, 2 for a tree.  LONGEST_FIRST: see tile_and_kv_head."""
    CONSTANTS: tl.constexpr = AttentionConstexprs(
        PAGE_SIZE, 0, 0, STAGED_KIND, PRECISION, STAGES, BLOCK_N, BLOCK_R, V_SIZE, ROPE_SIZE, BLOCK_V, BLOCK_ROPE
    )
    tiles = RowTiles(row_ptr, row_stride, row_ptr + V_SIZE, row_stride)
    num_tiles = (queries * HEADS + BLOCK_M - 1) // BLOCK_M
    num_splits = wait_and_count_splits(split_starts_ptr, batch, queries, USE_PDL)
    num_work_items = num_splits * num_tiles
    plan = WorkPlan(splits_ptr, split_starts_ptr, num_splits, num_tiles, queries, rows, first_position)
    scale = times_scale(scale, row_scale_ptr, 0)
    backwards = 0
    for base in tl.range(0, num_work_items, tl.num_programs(0)):
        work_item = work_item_of_program(base, backwards)
        backwards = 1 - backwards
        if work_item < num_work_items:
            split, request, begin, end, request_splits, is_last_split, tile, _head = load_work_item(
                plan, work_item, 1, LONGEST_FIRST
            )
            packed_query = tile * BLOCK_M + tl.arange(0, BLOCK_M)
            query = packed_query // HEADS
            head = packed_query % HEADS
            query_exists = query < queries
            q_offset = request * q_stride_b + query.to(tl.int64) * q_stride_q + head * q_stride_h
            q = load_rows(q_ptr, q_offset, query_exists, True, V_SIZE, BLOCK_V)
            q_rope = load_rows(q_ptr + V_SIZE, q_offset, query_exists, True, ROPE_SIZE, BLOCK_ROPE)
            max_score = tl.full([BLOCK_M], float("-inf"), tl.float32)
            sum_weights = tl.zeros([BLOCK_M], tl.float32)
            out = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
            num_blocks, num_lower, num_unmasked = count_committed_blocks(begin, end, first_position, 0, BLOCK_N)
            table = page_table_ptr + request * page_table_stride_b
            max_score, sum_weights, out = attend_blocks(
                q, q_rope, query, table, tiles, begin, end, first_position, num_lower, num_unmasked, 0, num_unmasked,
                scale, max_score, sum_weights, out, False, CONSTANTS,
            )
            max_score, sum_weights, out = attend_blocks(
                q, q_rope, query, table, tiles, begin, end, first_position, num_lower, num_unmasked, num_unmasked,
                num_blocks, scale, max_score, sum_weights, out, True, CONSTANTS,
            )
            if STAGED_KIND > 0:
                num_staged = tl.where(is_last_split, rows, 0)
                low, high = visible_staged_range(tile, num_staged, STAGED_KIND, 0, HEADS, BLOCK_M, BLOCK_R)
                staged = staged_ptr + request * staged_stride_b
                # `query` is a placeholder for positions, which are not read without a window.
                max_score, sum_weights, out = attend_staged(
                    q, q_rope, query, query_exists, query,
                    RowTiles(staged, staged_stride_r, staged + V_SIZE, staged_stride_r), 0, 0,
                    ancestor_bits_ptr + request * bits_stride_b, bits_stride_q, low, high, rows, scale, max_score,
                    sum_weights, out, CONSTANTS,
                )
            trigger_merge(base, num_work_items, USE_PDL)
            write_work_item_result(
                (out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, None), split, request, request_splits, queries, query,
                query_exists, head, row_scale_ptr, 0, scale, max_score, sum_weights, out,
                q.dtype, HEADS, False, V_SIZE, BLOCK_V,
            )
# fmt: on


def latent_attention(
    inputs: AttentionInputs, partial_results: PartialResults | None = None, config: LatentAttentionConfig | None = None
) -> tuple[Tensor, Tensor]:
    """The launcher of ops/attention.py:latent_attention.  config: the launch configuration; None: chosen by shape."""
    inputs = _check_inputs(inputs)
    splits = inputs.splits
    out, lse = inputs.output_buffers()
    if not out.numel():
        return out, lse
    is_split = splits.policy.max_splits > 1
    if partial_results is None:
        # Without splits, no buffer for partial results is needed.  With 128 heads it would take 256 KB per query.
        partial_results = PartialResults.allocate(splits, *out.shape[1:]) if is_split else PartialResults(out, lse)
    if config is None:
        config = choose_latent_config(inputs)
    elif not (isinstance(config, TritonConfig) or latent_config_supports(config, inputs)):
        raise EspalierError(
            "the Hopper kernels for latent rows need bfloat16 or float16, rows of 512 + 64 values, addresses and "
            "strides divisible by 16, and raw_stages for FP8 rows; the one for few queries takes one node of at most "
            "16 heads: use config=None"
        )
    _launch_kernel(inputs, partial_results, config, out, lse)
    if is_split:
        merge_splits.triton(partial_results, splits, out, lse)
    return out, lse


def _launch_kernel(
    inputs: AttentionInputs, partials: PartialResults, config: LatentAttentionConfig, out: Tensor, lse: Tensor
) -> None:
    q, (rows, _), scales, page_size = inputs.q, inputs.pages, inputs.kv_scales, inputs.page_size
    (_, queries, heads, size), v_size = q.shape, inputs.v_size
    # Without staged rows the kernel gets another pointer, which it does not read.
    staged = q if inputs.staged is None else inputs.staged[0]
    attention_kernel: Any
    if isinstance(config, HopperLatentConfig):
        attention_kernel = hopper_latent_kernel
        constants = hopper_latent_arguments(config, rows, page_size)
    elif isinstance(config, HopperLatentFewQueriesConfig):
        attention_kernel = hopper_latent_few_kernel
        constants = hopper_latent_few_arguments(config, rows, page_size)
    else:
        attention_kernel, constants = _latent_attention_kernel, _constexpr_arguments(config, size, v_size, q.dtype)
    num_tiles = -(-queries * heads // config.block_m)
    grid = min(inputs.splits.table.shape[0] * num_tiles, chip(q).processors * config.programs_per_processor)
    attention_kernel[(grid,)](
        **common_launch_arguments(inputs, partials, out, lse, num_tiles), row_ptr=rows, staged_ptr=staged,
        row_scale_ptr=None if scales is None else scales.k, **named_strides(rows, "row_stride"),
        **named_strides(staged, "staged_stride_b", "staged_stride_r"), HEADS=heads, **constants,
    )  # fmt: skip


def _constexpr_arguments(config: TritonConfig, size: int, v_size: int, dtype: torch.dtype) -> dict[str, Any]:
    """size: the values of a latent row.  v_size: those of its first part, which is V."""
    block_v, block_rope = latent_tile_widths(size, v_size)
    sizes = {"V_SIZE": v_size, "ROPE_SIZE": size - v_size, "BLOCK_V": block_v, "BLOCK_ROPE": block_rope}
    return config.constexpr_arguments(dtype) | sizes


def _check_inputs(inputs: AttentionInputs) -> AttentionInputs:
    """Return the inputs with contiguous values of q.  Raises EspalierError for inputs that do not agree or fit."""
    q = inputs.q
    size, v_size = q.shape[3], inputs.v_size
    if q.dtype not in KERNEL_DTYPES or not v_size < size <= MAX_ROW_SIZE or v_size > MAX_V_SIZE:
        raise EspalierError(
            f"latent attention supports {', '.join(map(str, KERNEL_DTYPES))}, rows of up to {MAX_ROW_SIZE} values and "
            f"V of up to {MAX_V_SIZE} of them, but got {q.dtype}, rows of {size} and V of {v_size}: use "
            "attention='reference'"
        )
    check_attention_inputs("latent attention", inputs, 1)
    kv_pairs = (inputs.pages, inputs.staged or inputs.pages)
    if any(k.data_ptr() != v.data_ptr() or k.stride() != v.stride() for k, v in kv_pairs):
        raise EspalierError("latent attention needs V to be the first part of K, as a view of the same tensor")
    return inputs if q.stride(3) == 1 else inputs._replace(q=q.contiguous())
