"""Attention of a pass over committed rows in pages and over its staged rows, in one kernel.

Each program of the persistent grid processes work items (split of a request's committed rows, KV head, query tile); see
work_items.py.  The last split of a request also covers its staged rows.  A request with one split writes its result
directly.  Requests with several splits write partial results, which merge.py merges.
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
    attend_committed,
    attend_staged,
    check_attention_inputs,
    common_launch_arguments,
    load_rows,
    named_strides,
    times_scale,
    write_work_item_result,
)
from espalier.kernels.attention.choose import choose_attention_config, hopper_kernel_supports
from espalier.kernels.attention.triton_config import TritonConfig
from espalier.kernels.attention.work_items import (
    load_split_range,
    split_of_work_item,
    tile_and_kv_head,
    trigger_merge,
    visible_staged_range,
    wait_and_count_splits,
    work_item_of_program,
)
from espalier.kernels.hopper.attention import hopper_attention_arguments, hopper_attention_kernel, tma_arguments
from espalier.kernels.hopper.config import HEAD_SIZES, HopperConfig
from espalier.kernels.ops.attention import (
    KERNEL_DTYPES,
    MAX_HEAD_SIZE,
    AttentionInputs,
    PartialResults,
    is_wide_latent,
    latent_attention,
    merge_splits,
)
from espalier.kernels.runtime.jit import kernel
from espalier.kernels.runtime.launch import chip, next_power_of_2, require


@kernel
def _load_queries(q_ptr, offsets, query_exists, FP8: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Load queries [M, BLOCK] at offsets [M].  If rows are FP8, bfloat16 queries become float16.

    Converting two FP8 values takes one instruction to float16, and four to bfloat16 (docs/design.md).  Queries that are
    too large for float16 become NaN, so that the request fails.  Infinite queries could give scores of -inf, which
    would count as masked rows."""
    q = load_rows(q_ptr, offsets, query_exists, True, HEAD_SIZE, BLOCK)
    if FP8 and q.dtype == tl.bfloat16:
        values = q.to(tl.float32)
        q = tl.where(tl.abs(values) <= 65504.0, values, float("nan")).to(tl.float16)
    return q


# fmt: off
@kernel(do_not_specialize=["batch"])
def _tree_attention_kernel(
    q_ptr, k_ptr, v_ptr, staged_k_ptr, staged_v_ptr, page_table_ptr, splits_ptr, split_starts_ptr, position_ptr,
    row_position_ptr, ancestor_bits_ptr, out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, sink_ptr, k_scale_ptr,
    v_scale_ptr, scale, batch, queries, rows, first_position, q_stride_b, q_stride_q, q_stride_h, k_stride_row,
    k_stride_h, v_stride_row, v_stride_h, staged_k_stride_b, staged_k_stride_r, staged_k_stride_h, staged_v_stride_b,
    staged_v_stride_r, staged_v_stride_h, page_table_stride_b, position_stride_b, position_stride_q,
    row_position_stride_b, row_position_stride_r, bits_stride_b, bits_stride_q, KV_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr, K_SIZE: tl.constexpr, V_SIZE: tl.constexpr, PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, STAGED_KIND: tl.constexpr, HAS_SINK: tl.constexpr,
    LONGEST_FIRST: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, USE_PDL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):
    """STAGED_KIND: 0 for no staged rows, 1 a chain, 2 a tree.  LONGEST_FIRST: work items in order of query tiles."""
    CONSTANTS: tl.constexpr = AttentionConstexprs(
        PAGE_SIZE, WINDOW, SOFTCAP, STAGED_KIND, PRECISION, STAGES, BLOCK_N, BLOCK_R, K_SIZE, V_SIZE, BLOCK_K, BLOCK_V
    )
    num_tiles = (queries * GROUP_SIZE + BLOCK_M - 1) // BLOCK_M
    num_splits = wait_and_count_splits(split_starts_ptr, batch, queries, USE_PDL)
    num_work_items, backwards = num_splits * num_tiles * KV_HEADS, 0
    next_split = split_of_work_item(tl.program_id(0), num_splits, num_tiles, KV_HEADS, LONGEST_FIRST)
    exists = tl.program_id(0) < num_work_items
    next_request, next_begin, next_end, next_count = load_split_range(splits_ptr, next_split, exists)
    for base in tl.range(0, num_work_items, tl.num_programs(0)):
        work_item, backwards = work_item_of_program(base, backwards), 1 - backwards
        split, request, begin, end, count = next_split, next_request, next_begin, next_end, next_count
        # The next split is loaded before the work on this split, to hide the latency of the load.
        next_work_item = work_item_of_program(base + tl.num_programs(0), backwards)
        next_split = split_of_work_item(next_work_item, num_splits, num_tiles, KV_HEADS, LONGEST_FIRST)
        exists = next_work_item < num_work_items
        next_request, next_begin, next_end, next_count = load_split_range(splits_ptr, next_split, exists)
        if work_item < num_work_items:
            tile, head = tile_and_kv_head(work_item, num_splits, num_tiles, KV_HEADS, LONGEST_FIRST)
            packed_query = tile * BLOCK_M + tl.arange(0, BLOCK_M)
            query, q_head = packed_query // GROUP_SIZE, head * GROUP_SIZE + packed_query % GROUP_SIZE
            query_exists = query < queries
            q_offset = request * q_stride_b + query.to(tl.int64) * q_stride_q + q_head * q_stride_h
            q = _load_queries(q_ptr, q_offset, query_exists, k_scale_ptr is not None, K_SIZE, BLOCK_K)
            position = query
            if WINDOW > 0:
                position_ptrs = position_ptr + request * position_stride_b + query.to(tl.int64) * position_stride_q
                position = tl.load(position_ptrs, mask=query_exists, other=0x7FFFFFFF).to(tl.int32)
                begin = tl.maximum(begin, (tl.min(position, 0) - WINDOW + 1) // BLOCK_N * BLOCK_N)
            score_scale = times_scale(scale, k_scale_ptr, head)
            max_score, sum_weights = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
            out = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
            tiles = RowTiles(k_ptr + head * k_stride_h, k_stride_row, v_ptr + head * v_stride_h, v_stride_row)
            max_score, sum_weights, out = attend_committed(
                q, position, page_table_ptr + request * page_table_stride_b, tiles, begin, end, first_position,
                score_scale, max_score, sum_weights, out, CONSTANTS,
            )
            if STAGED_KIND > 0:
                num_staged = tl.where(split + 1 == tl.load(split_starts_ptr + request) + count, rows, 0)
                low, high = visible_staged_range(tile, num_staged, STAGED_KIND, WINDOW, GROUP_SIZE, BLOCK_M, BLOCK_R)
                staged = RowTiles(
                    staged_k_ptr + request * staged_k_stride_b + head * staged_k_stride_h, staged_k_stride_r,
                    staged_v_ptr + request * staged_v_stride_b + head * staged_v_stride_h, staged_v_stride_r,
                )
                max_score, sum_weights, out = attend_staged(
                    q, None, query, query_exists, position, staged,
                    row_position_ptr + request * row_position_stride_b, row_position_stride_r,
                    ancestor_bits_ptr + request * bits_stride_b, bits_stride_q, low, high, rows, score_scale, max_score,
                    sum_weights, out, CONSTANTS,
                )
            trigger_merge(base, num_work_items, USE_PDL)
            write_work_item_result(
                (out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, sink_ptr), split, request, count, queries, query,
                query_exists, q_head, v_scale_ptr, head, 1.0 if SOFTCAP > 0 else score_scale, max_score, sum_weights,
                out, q.dtype, KV_HEADS * GROUP_SIZE, HAS_SINK, V_SIZE, BLOCK_V,
            )
# fmt: on


def tree_attention(
    inputs: AttentionInputs,
    partial_results: PartialResults | None = None,
    config: TritonConfig | HopperConfig | None = None,
    num_contiguous_blocks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The launcher of ops/attention.py:tree_attention.  config: the launch configuration; None: chosen by shape."""
    inputs = _check_inputs(inputs)
    q, splits, sink = inputs.q, inputs.splits, inputs.sink
    if num_contiguous_blocks is not None:
        require("tree attention's contiguous blocks", num_contiguous_blocks, (splits.table.shape[0],), torch.int32, q)
    out, lse = inputs.output_buffers()
    if not out.numel():
        return out, lse
    if sink is not None:
        require("tree attention's sink", sink, (q.shape[2],), None, q)
    if partial_results is None:
        partial_results = PartialResults.allocate(splits, *out.shape[1:])
    if config is None:
        config = choose_attention_config(inputs)
    elif isinstance(config, HopperConfig) and not (
        hopper_kernel_supports(inputs) and (inputs.kv_scales is not None) == (config.raw_stages > 0)
    ):
        raise EspalierError(
            f"the Hopper attention kernel needs bfloat16 or float16, a head size of {HEAD_SIZES}, strides divisible by "
            "16, staged rows if `staged` is given, no soft-cap, and raw_stages for FP8 rows: use config=None"
        )
    _launch_kernel(inputs, partial_results, config, num_contiguous_blocks, out, lse)
    if splits.policy.max_splits > 1:
        merge_splits.triton(partial_results, splits, out, lse, sink)
    return out, lse


def _launch_kernel(
    inputs: AttentionInputs,
    partials: PartialResults,
    config: TritonConfig | HopperConfig,
    num_contiguous_blocks: Tensor | None,
    out: Tensor,
    lse: Tensor,
) -> None:
    q, (k, v), scales, nodes, sink = inputs.q, inputs.pages, inputs.kv_scales, inputs.nodes, inputs.sink
    window = inputs.window or 0
    (_, queries, heads, k_size), (kv_heads, v_size) = q.shape, v.shape[1:]
    num_tiles = -(-queries * (heads // kv_heads) // config.block_m)
    # Without staged rows the kernel gets placeholder pointers, which it does not read.
    staged_k, staged_v = inputs.staged or (q, q)
    attention_kernel: Any
    if isinstance(config, HopperConfig):
        attention_kernel = hopper_attention_kernel
        constants = hopper_attention_arguments(config, k_size, same_strides=k.stride(0) == v.stride(0))
        constants |= tma_arguments(config, k, v, inputs.page_size, window, num_contiguous_blocks)
    else:
        attention_kernel, constants = _tree_attention_kernel, _constexpr_arguments(config, k_size, v_size, q.dtype)
        constants["SOFTCAP"] = inputs.softcap or 0.0
    grid = min(inputs.splits.table.shape[0] * num_tiles * kv_heads, chip(q).processors * config.programs_per_processor)
    attention_kernel[(grid,)](
        **common_launch_arguments(inputs, partials, out, lse, num_tiles), k_ptr=k, v_ptr=v, staged_k_ptr=staged_k,
        staged_v_ptr=staged_v, position_ptr=nodes.positions, row_position_ptr=nodes.row_positions,
        sink_ptr=out if sink is None else sink, k_scale_ptr=None if scales is None else scales.k,
        v_scale_ptr=None if scales is None else scales.v, **named_strides(k, "k_stride_row", "k_stride_h"),
        **named_strides(v, "v_stride_row", "v_stride_h"),
        **named_strides(staged_k, "staged_k_stride_b", "staged_k_stride_r", "staged_k_stride_h"),
        **named_strides(staged_v, "staged_v_stride_b", "staged_v_stride_r", "staged_v_stride_h"),
        **named_strides(nodes.positions, "position_stride_b", "position_stride_q"),
        **named_strides(nodes.row_positions, "row_position_stride_b", "row_position_stride_r"), KV_HEADS=kv_heads,
        GROUP_SIZE=heads // kv_heads, WINDOW=window, HAS_SINK=sink is not None, **constants,
    )  # fmt: skip


def _constexpr_arguments(config: TritonConfig, k_size: int, v_size: int, dtype: torch.dtype) -> dict[str, Any]:
    """k_size, v_size: the values of a head of K and of V."""
    block_k, block_v = (max(16, next_power_of_2(size)) for size in (k_size, v_size))
    return config.constexpr_arguments(dtype) | {
        "K_SIZE": k_size,
        "V_SIZE": v_size,
        "BLOCK_K": block_k,
        "BLOCK_V": block_v,
    }


def _check_inputs(inputs: AttentionInputs) -> AttentionInputs:
    """Return the inputs with contiguous values of q.  Raises EspalierError for inputs that do not agree or fit."""
    q = inputs.q
    (heads, k_size), (kv_heads, v_size) = q.shape[2:], inputs.pages[1].shape[1:]
    if q.dtype not in KERNEL_DTYPES or heads % kv_heads or max(k_size, v_size) > MAX_HEAD_SIZE:
        raise EspalierError(
            f"tree attention supports {', '.join(map(str, KERNEL_DTYPES))}, a multiple of the KV heads, and head sizes "
            f"up to {MAX_HEAD_SIZE}, but got {q.dtype}, {heads} heads, {kv_heads} KV heads, and head sizes {k_size} "
            f"(k) and {v_size} (v): use attention='reference'"
        )
    check_attention_inputs("tree attention", inputs, kv_heads)
    return inputs if q.stride(3) == 1 else inputs._replace(q=q.contiguous())


def staged_attention(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """Returns (out, lse) of attention over the staged rows alone, see ops/attention.py:staged_attention."""
    assert inputs.staged is not None
    k, v = inputs.staged
    # The pages are not read.  One staged row takes their place, so that all page sizes share one compiled kernel.
    inputs = inputs._replace(pages=(k[:1, 0], v[:1, 0]), page_size=1)
    return (latent_attention.triton if is_wide_latent(k, v) else tree_attention)(inputs)
