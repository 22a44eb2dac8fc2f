"""Attention of a pass over committed rows in pages and over its staged rows, in one kernel.

A program of the persistent grid processes work items: (split of a request's committed rows, KV head, query tile), see
kernels/attention/work_items.py.  The last split of a request also covers its staged rows.  A request with one split
writes its result directly.  The other requests write partial results, which kernels/attention/merge_splits.py merges.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.attention.ancestor_bits import seen_rows
from espalier.kernels.attention.attention_blocks import (
    Constants,
    Tiles,
    _over_committed,
    _over_staged,
    _rows,
    _times_scale,
    _write_work_item,
)
from espalier.kernels.attention.hopper import DTYPES as HOPPER_DTYPES
from espalier.kernels.attention.hopper import (
    HEAD_SIZES,
    WARPGROUP_QUERIES,
    HopperConfig,
    _hopper_attention_kernel,
    choose_hopper_config,
    copies_by_tma,
    hopper_constants,
    needs_counting,
    tma_arguments,
)
from espalier.kernels.attention.kv_splits import PROGRAMS
from espalier.kernels.attention.masked_attention import masked_attention, with_sink
from espalier.kernels.attention.merge_splits import PartialResults, merge_splits_triton
from espalier.kernels.attention.rows import Inputs, Staged, check_shapes, shared_arguments, strides
from espalier.kernels.attention.triton_config import TritonConfig, choose_config
from espalier.kernels.attention.work_items import (
    let_merge_start,
    load_split,
    split_of,
    staged_rows_of,
    tile_and_head,
    wait_and_count_splits,
    work_item_of,
)
from espalier.kernels.runtime.launch import Kernel, chip, kernel, power_of_two, require, unspecialised
from espalier.kernels.runtime.tma import aligned_for_copies
from espalier.kernels.state.page_rows import page_rows
from espalier.layout import next_bucket

if TYPE_CHECKING:
    import triton.language as tl

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_HEAD_SIZE = 256


@kernel
def _queries(q_ptr, offsets, exists, FP8: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Load queries [M, BLOCK] at offsets [M].  bfloat16 ones become float16 where rows are FP8.

    To float16 one instruction converts two FP8 values, to bfloat16 it takes four (docs/design.md).  What float16 cannot
    hold becomes NaN, so that the request fails: infinite scores below zero would look like rows that are not seen.
    """
    q = _rows(q_ptr, offsets, exists, True, SIZE, BLOCK)
    if FP8 and q.dtype == tl.bfloat16:
        values = q.to(tl.float32)
        q = tl.where(tl.abs(values) <= 65504.0, values, float("nan")).to(tl.float16)
    return q


# Arguments are grouped by meaning; one argument per line would hide the groups.
# fmt: off
@unspecialised("batch")
@kernel
def _tree_attention_kernel(
    q_ptr, k_ptr, v_ptr, staged_k_ptr, staged_v_ptr,
    table_ptr, split_ptr, start_ptr, position_ptr, row_position_ptr, bits_ptr,
    out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, sink_ptr, k_scale_ptr, v_scale_ptr,
    scale, batch, queries, rows, first,
    q_b, q_q, q_h, k_row, k_h, v_row, v_h, staged_k_b, staged_k_r, staged_k_h, staged_v_b, staged_v_r, staged_v_h,
    table_b, position_b, position_q, row_position_b, row_position_r, bits_b, bits_q,
    KV_HEADS: tl.constexpr, GROUP_SIZE: tl.constexpr, K_SIZE: tl.constexpr, V_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr, STAGED: tl.constexpr, SINK: tl.constexpr,
    LONGEST_FIRST: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):
    CONSTANTS: tl.constexpr = Constants(
        PAGE_SIZE, WINDOW, STAGED, PRECISION, STAGES, BLOCK_N, BLOCK_R, K_SIZE, V_SIZE, BLOCK_K, BLOCK_V
    )
    num_tiles = (queries * GROUP_SIZE + BLOCK_M - 1) // BLOCK_M
    num_splits = wait_and_count_splits(start_ptr, batch, queries, DEPENDENT)
    num_work_items, backwards = num_splits * num_tiles * KV_HEADS, 0
    next_split = split_of(tl.program_id(0), num_splits, num_tiles, KV_HEADS, LONGEST_FIRST)
    exists = tl.program_id(0) < num_work_items
    next_request, next_begin, next_end, next_count = load_split(split_ptr, next_split, exists)
    for base in tl.range(0, num_work_items, tl.num_programs(0)):
        work_item, backwards = work_item_of(base, backwards), 1 - backwards
        split, request, begin, end, count = next_split, next_request, next_begin, next_end, next_count
        # The next split is loaded before the work on this one, so that nothing waits for it.
        next_work_item = work_item_of(base + tl.num_programs(0), backwards)
        next_split = split_of(next_work_item, num_splits, num_tiles, KV_HEADS, LONGEST_FIRST)
        exists = next_work_item < num_work_items
        next_request, next_begin, next_end, next_count = load_split(split_ptr, next_split, exists)
        if work_item < num_work_items:
            tile, head = tile_and_head(work_item, num_splits, num_tiles, KV_HEADS, LONGEST_FIRST)
            packed = tile * BLOCK_M + tl.arange(0, BLOCK_M)
            query = packed // GROUP_SIZE
            query_exists = query < queries
            q_head = head * GROUP_SIZE + packed % GROUP_SIZE
            q_offset = request * q_b + query.to(tl.int64) * q_q + q_head * q_h
            q = _queries(q_ptr, q_offset, query_exists, k_scale_ptr is not None, K_SIZE, BLOCK_K)
            position = query
            if WINDOW > 0:
                at_query = position_ptr + request * position_b + query.to(tl.int64) * position_q
                position = tl.load(at_query, mask=query_exists, other=0x7FFFFFFF).to(tl.int32)
                begin = tl.maximum(begin, (tl.min(position, 0) - WINDOW + 1) // BLOCK_N * BLOCK_N)
            score_scale = _times_scale(scale, k_scale_ptr, head)
            max_score, sum_weights = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
            out = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
            tiles = Tiles(k_ptr + head * k_h, k_row, v_ptr + head * v_h, v_row)
            max_score, sum_weights, out = _over_committed(
                q, position, table_ptr + request * table_b, tiles, begin, end, first,
                score_scale, max_score, sum_weights, out, CONSTANTS,
            )
            if STAGED > 0:
                num_staged = tl.where(split + 1 == tl.load(start_ptr + request + 1), rows, 0)
                low, high = staged_rows_of(tile, num_staged, STAGED, WINDOW, GROUP_SIZE, BLOCK_M, BLOCK_R)
                staged = Tiles(
                    staged_k_ptr + request * staged_k_b + head * staged_k_h, staged_k_r,
                    staged_v_ptr + request * staged_v_b + head * staged_v_h, staged_v_r,
                )
                max_score, sum_weights, out = _over_staged(
                    q, None, query, query_exists, position, staged,
                    row_position_ptr + request * row_position_b, row_position_r, bits_ptr + request * bits_b, bits_q,
                    low, high, rows, score_scale, max_score, sum_weights, out, CONSTANTS,
                )
            let_merge_start(base, num_work_items, DEPENDENT)
            _write_work_item(
                (out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, sink_ptr), split, request, count, queries, query,
                query_exists, q_head, v_scale_ptr, head, score_scale, max_score, sum_weights, out,
                q.dtype, KV_HEADS * GROUP_SIZE, SINK, V_SIZE, BLOCK_V,
            )
# fmt: on


def tree_attention_triton(
    inputs: Inputs,
    partials: PartialResults | None = None,
    config: TritonConfig | HopperConfig | None = None,
    contiguous: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of queries over committed and staged rows.

    Returns out [B, Q, heads, v_size] in q's dtype and lse [B, Q, heads] float32, natural log, of the rows without the
    sink.  A query that sees no rows gets zeros and lse -inf.  float32 products are IEEE, not TF32.

    partials: a buffer to reuse (`PartialResults.of`).  config: overrides the launch configuration, for tests and
    benchmarks.  contiguous: counts of kernels/attention/contiguous_blocks.py for these splits; without them the result
    is the same, but slower.
    """
    inputs = _checked(inputs)
    q, splits, sink = inputs.q, inputs.splits, inputs.sink
    if contiguous is not None:
        require("tree attention's contiguous blocks", contiguous, (splits.table.shape[0],), torch.int32, q)
    out, lse = inputs.buffers()
    if not out.numel():
        return out, lse
    if sink is not None:
        require("tree attention's sink", sink, (q.shape[2],), None, q)
    if partials is None:
        partials = PartialResults.of(splits, *out.shape[1:])
    if config is None:
        config = _choose(inputs)
    elif isinstance(config, HopperConfig) and not (
        _fits_hopper(inputs) and (inputs.committed.scales is not None) == (config.raw_stages > 0)
    ):
        raise EspalierError(
            f"the Hopper attention kernel needs bfloat16 or float16, a head size of {HEAD_SIZES}, strides divisible by "
            "16, staged rows if `staged` is given, and raw_stages for FP8 rows: use config=None"
        )
    _launch(inputs, partials, config, contiguous, out, lse)
    if splits.policy.max_splits > 1:
        merge_splits_triton(partials, splits, out, lse, sink)
    return out, lse


def uses_contiguous_blocks(inputs: Inputs) -> bool:
    """Whether tree_attention_triton is faster with `contiguous`."""
    if not needs_counting(inputs.committed.page_size, inputs.window or 0):
        return False
    config = _choose(inputs)
    return isinstance(config, HopperConfig) and copies_by_tma(config)


def _choose(inputs: Inputs) -> TritonConfig | HopperConfig:
    """The launch configuration.  The Hopper kernel and the Triton kernel give the same bits."""
    q, committed, staged, _, splits = inputs[:5]
    (batch, queries, heads, k_size), (kv_heads, v_size) = q.shape, committed.v.shape[1:]
    packed_queries, fp8 = queries * heads // kv_heads, committed.scales is not None
    if _fits_hopper(inputs):
        work_items = splits.table.shape[0] * kv_heads * -(-packed_queries // (2 * WARPGROUP_QUERIES))
        config = choose_hopper_config(chip(q), packed_queries, work_items, k_size, committed.page_size, fp8)
        if config is not None:
            return config
    rows = queries if staged is None else staged.k.shape[1]
    # By the bucket, as the policy: a padded graph and an eager launch have the same blocks, and so the same bits.
    one_wave = next_bucket(batch) * kv_heads * splits.policy.num_splits <= PROGRAMS
    return choose_config(chip(q), packed_queries, rows, k_size, v_size, q.dtype, one_wave, fp8)


def _fits_hopper(inputs: Inputs) -> bool:
    """Whether the Hopper kernel takes these types, sizes and strides."""
    q, committed, staged = inputs[:3]
    sizes = (q.shape[3], inputs.v_size)
    read = [q, committed.k, committed.v, *(() if staged is None else (staged.k, staged.v))]
    fits = q.dtype in HOPPER_DTYPES and sizes[0] == sizes[1] in HEAD_SIZES and all(map(aligned_for_copies, read))
    return fits and (staged is None or staged.k.shape[1] > 0)


def _launch(
    inputs: Inputs,
    partials: PartialResults,
    config: TritonConfig | HopperConfig,
    contiguous: Tensor | None,
    out: Tensor,
    lse: Tensor,
) -> None:
    q, committed, staged, positions, splits, _, _, sink = inputs
    window = inputs.window or 0
    (_, queries, heads, k_size), (kv_heads, v_size) = q.shape, committed.v.shape[1:]
    num_tiles = -(-queries * (heads // kv_heads) // config.block_m)
    # Without staged rows the kernel gets other pointers, which it does not read.
    new = Staged(q, q, positions, None) if staged is None else staged
    attention_kernel: Kernel
    if isinstance(config, HopperConfig):
        same_strides = committed.k.stride(0) == committed.v.stride(0)
        attention_kernel, constants = _hopper_attention_kernel, hopper_constants(config, k_size, same_strides)
        constants |= tma_arguments(config, committed.k, committed.v, committed.page_size, window, contiguous)
    else:
        attention_kernel, constants = _tree_attention_kernel, _constants(config, k_size, v_size, q.dtype)
    grid = min(splits.table.shape[0] * num_tiles * kv_heads, chip(q).processors * config.programs_per_processor)
    attention_kernel[(grid,)](
        **shared_arguments(inputs, partials, out, lse, num_tiles),
        k_ptr=committed.k,
        v_ptr=committed.v,
        staged_k_ptr=new.k,
        staged_v_ptr=new.v,
        position_ptr=positions,
        row_position_ptr=new.row_positions,
        sink_ptr=out if sink is None else sink,
        k_scale_ptr=None if committed.scales is None else committed.scales.k,
        v_scale_ptr=None if committed.scales is None else committed.scales.v,
        **strides(committed.k, "k_row", "k_h"),
        **strides(committed.v, "v_row", "v_h"),
        **strides(new.k, "staged_k_b", "staged_k_r", "staged_k_h"),
        **strides(new.v, "staged_v_b", "staged_v_r", "staged_v_h"),
        **strides(positions, "position_b", "position_q"),
        **strides(new.row_positions, "row_position_b", "row_position_r"),
        KV_HEADS=kv_heads,
        GROUP_SIZE=heads // kv_heads,
        WINDOW=window,
        SINK=sink is not None,
        **constants,
    )


def _constants(config: TritonConfig, k_size: int, v_size: int, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "K_SIZE": k_size,
        "V_SIZE": v_size,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_R": config.block_r,
        "BLOCK_K": max(16, power_of_two(k_size)),
        "BLOCK_V": max(16, power_of_two(v_size)),
        "STAGES": config.stages,
        "num_warps": config.warps,
    }


def _checked(inputs: Inputs) -> Inputs:
    """The inputs with values of q side by side.  Raises EspalierError if they do not agree, or are not supported."""
    q = inputs.q
    (heads, k_size), (kv_heads, v_size) = q.shape[2:], inputs.committed.v.shape[1:]
    if q.dtype not in DTYPES or heads % kv_heads or max(k_size, v_size) > MAX_HEAD_SIZE:
        raise EspalierError(
            f"tree attention supports {', '.join(map(str, DTYPES))}, a multiple of the KV heads, and head sizes up to "
            f"{MAX_HEAD_SIZE}, but got {q.dtype}, {heads} heads, {kv_heads} KV heads, and head sizes {k_size} (k) and "
            f"{v_size} (v): use attention='reference'"
        )
    check_shapes("tree attention", inputs, kv_heads)
    return inputs if q.stride(3) == 1 else inputs._replace(q=q.contiguous())


def tree_attention_reference(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """In plain torch: one masked attention over all rows.  Rows that do not exist are read as zeros."""
    q, committed, staged, positions, _, scale, window, sink = inputs
    batch, queries = positions.shape
    row_positions = torch.arange(committed.page_table.shape[1] * committed.page_size, device=q.device).expand(batch, -1)
    exists = (row_positions >= committed.first) & (row_positions < committed.length[:, None])
    row = page_rows(committed.page_table, row_positions, committed.page_size, exists)
    k, v = (torch.where(exists[..., None, None], buffer[row], 0) for buffer in (committed.k, committed.v))
    seen = exists[:, None].expand(-1, queries, -1)
    if staged is not None:
        seen_staged = seen_rows(staged.ancestor_bits, positions, staged.row_positions, None)
        seen = torch.cat((seen, seen_staged), 2)
        k, v = torch.cat((k, staged.k), 1), torch.cat((v, staged.v), 1)
        row_positions = torch.cat((row_positions, staged.row_positions), 1)
    if window is not None:
        seen = seen & (positions[:, :, None] - row_positions[:, None, :] < window)
    out, lse = masked_attention(q, k, v, seen, scale, committed.scales)
    return out if sink is None else with_sink(out, lse, sink), lse
