"""The attending warps of the Hopper kernel: each warpgroup attends with 64 packed queries, one block of rows at a time.

While the tensor cores multiply one block's weights with its values, the warps compute the weights of the next block
(Shah et al. 2024, FlashAttention-3, arXiv:2407.08608, section 3.2).  The warpgroups of a program do not wait for each
other, so the exponentials of one can overlap with the products of another.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from espalier.kernels.attention.attention_blocks import lse_of, shift_exponent, sink_share
from espalier.kernels.attention.work_items import block_index, load_work_item, trigger_merge, work_item_of
from espalier.kernels.hopper.config import MAX_REGISTER_HEAD_SIZE
from espalier.kernels.hopper.work import stage_of, wait_until_empty, wait_until_full, work_item_extent
from espalier.kernels.runtime.jit import gluon_kernel

# In the form that kernels can read.
REGISTER_HEAD_SIZE = gl.constexpr(MAX_REGISTER_HEAD_SIZE)


class Queries(NamedTuple):
    """The data of 64 packed queries of a work item from which masks are computed.

    query, exists, position: [64]; row_positions, row_position_r: pointer to the positions of the request's staged rows,
    and its stride per row; bits, bits_q: pointer to the ancestor bits of its queries, and its stride per query; first:
    as in Plan; first_masked_staged: the first block of staged rows that needs a mask.
    """

    query: Any
    exists: Any
    position: Any
    row_positions: Any
    row_position_r: Any
    bits: Any
    bits_q: Any
    first: Any
    first_masked_staged: Any


# fmt: off
@gluon_kernel
def packed_queries(plan, item, first_packed, positions, CONSTANTS: gl.constexpr, SCORES: gl.constexpr):
    """(query, exists, position) of the packed queries first_packed .. first_packed + 64."""
    query = (first_packed + gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))) // CONSTANTS.GROUP_SIZE
    exists = query < plan.queries
    position = query
    if CONSTANTS.WINDOW > 0:
        at = positions.pointer + item.request * positions.request_stride + query.to(gl.int64) * positions.row_stride
        position = gl.load(at, mask=exists, other=0x7FFFFFFF).to(gl.int32)
    return query, exists, position


@gluon_kernel
def make_queries(plan, item, extent, first_packed, packed, row_positions, ancestor_bits, CONSTANTS: gl.constexpr):
    """Build the Queries of 64 packed queries.  packed: the result of `packed_queries`."""
    query, exists, position = packed
    first_masked_staged = extent.num_committed
    if CONSTANTS.STAGED == 1 and CONSTANTS.WINDOW == 0:
        # In a chain, blocks before the tile's first query need no mask either.
        num_seen = gl.maximum(first_packed // CONSTANTS.GROUP_SIZE + 1 - extent.low, 0)
        first_masked_staged = extent.num_committed + num_seen // CONSTANTS.BLOCK_N
    return Queries(
        query, exists, position,
        row_positions.pointer + item.request * row_positions.request_stride, row_positions.row_stride,
        ancestor_bits.pointer + item.request * ancestor_bits.request_stride, ancestor_bits.row_stride,
        plan.first, first_masked_staged,
    )


@gluon_kernel
def _mask_committed(
    scores, first_position, position, end, first, WINDOW: gl.constexpr, BLOCK_N: gl.constexpr, SCORES: gl.constexpr,
):
    key_position = first_position + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SCORES))
    seen = gl.expand_dims((key_position >= first) & (key_position < end), 0)
    if WINDOW > 0:
        seen = seen & (gl.expand_dims(position, 1) - gl.expand_dims(key_position, 0) < WINDOW)
    return gl.where(seen, scores, float("-inf"))


@gluon_kernel
def _mask_chain(scores, first_node, query, high, WINDOW: gl.constexpr, BLOCK_N: gl.constexpr, SCORES: gl.constexpr):
    node = gl.expand_dims(first_node + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SCORES)), 0)
    seen = (node < high) & (node <= gl.expand_dims(query, 1))
    if WINDOW > 0:
        seen = seen & (gl.expand_dims(query, 1) - node < WINDOW)
    return gl.where(seen, scores, float("-inf"))


@gluon_kernel
def _mask_tree(scores, first_node, queries, high, WINDOW: gl.constexpr, BLOCK_N: gl.constexpr, SCORES: gl.constexpr):
    node = first_node + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SCORES))
    at_word = queries.bits + queries.query.to(gl.int64) * queries.bits_q + first_node // 64
    word = gl.load(at_word, mask=queries.exists, other=0)
    bit = (gl.expand_dims(word, 1) >> gl.expand_dims((node % 64).to(gl.int64), 0)) & 1
    seen = gl.expand_dims(node < high, 0) & (bit != 0)
    if WINDOW > 0:
        at_row = queries.row_positions + node.to(gl.int64) * queries.row_position_r
        row_position = gl.load(at_row, mask=node < high, other=0).to(gl.int32)
        seen = seen & (gl.expand_dims(queries.position, 1) - gl.expand_dims(row_position, 0) < WINDOW)
    return gl.where(seen, scores, float("-inf"))


@gluon_kernel
def _mask(scores, t, queries, extent, CONSTANTS: gl.constexpr, SCORES: gl.constexpr):
    """The scores of the t-th block, -inf where a query does not see a row."""
    WINDOW: gl.constexpr = CONSTANTS.WINDOW
    BLOCK_N: gl.constexpr = CONSTANTS.BLOCK_N
    if t < extent.num_committed:
        if t >= extent.num_unmasked:
            at = extent.begin + block_index(t, extent.num_lower, extent.num_unmasked) * BLOCK_N
            scores = _mask_committed(scores, at, queries.position, extent.end, queries.first, WINDOW, BLOCK_N, SCORES)
    elif t >= queries.first_masked_staged:
        node = extent.low + (t - extent.num_committed) * BLOCK_N
        if CONSTANTS.STAGED == 0:
            scores = gl.full_like(scores, float("-inf"))
        if CONSTANTS.STAGED == 1:
            scores = _mask_chain(scores, node, queries.query, extent.high, WINDOW, BLOCK_N, SCORES)
        if CONSTANTS.STAGED == 2:
            scores = _mask_tree(scores, node, queries, extent.high, WINDOW, BLOCK_N, SCORES)
    return scores


@gluon_kernel
def _softmax_step(scores, scale, max_score, dtype: gl.constexpr):
    """Do one step of an online softmax in base 2 (Milakov and Gimelshein 2018), with weights in dtype.

    Returns (weights, sums, max_score, decay).  sums: the sums of the weights, [64, 4] by thread; decay: the factor for
    earlier results.
    """
    new_max = gl.maximum(max_score, gl.max(scores, 1))
    # All scores are -inf until the first visible row; -inf - -inf would be NaN.
    scaled_max = gl.where(new_max == float("-inf"), 0.0, new_max * scale)
    weights = gl.exp2(gl.fma(scores, scale, gl.expand_dims(-shift_exponent(scaled_max, dtype), 1)))
    decay = gl.exp2(gl.fma(max_score, scale, -scaled_max))
    # Column 8 i + 2 j + k belongs to thread j of the four threads that share a row.
    by_thread = weights.reshape([64, weights.shape[1] // 8, 4, 2]).permute((0, 2, 1, 3))
    sums = gl.sum(by_thread.reshape([64, 4, weights.shape[1] // 4]), 2)
    return weights, sums, new_max, decay


@gluon_kernel
def _update_sum_weights(sum_weights, decay, sums, SCORES: gl.constexpr):
    """sum_weights times decay, plus the sums of a block, [64, 4] by thread."""
    return gl.fma(sum_weights, decay, gl.convert_layout(gl.sum(sums, 1), gl.SliceLayout(1, SCORES)))


@gluon_kernel
def _start_scores(q, stages, stage, zeros, FENCED: gl.constexpr):
    """Start the product of the queries with the keys of a stage, tile by tile.

    FENCED: threads may have written rows or queries without a fence.  The fence makes them visible to the tensor cores.
    Rows that TMA has copied need no fence.
    """
    if FENCED:
        hopper.fence_async_shared()
    keys = stages.tiles[0].index(stage)
    scores = hopper.warpgroup_mma(q[0], keys.permute((1, 0)), zeros, use_acc=False, is_async=True)
    for i in gl.static_range(1, len(q)):
        scores = hopper.warpgroup_mma(q[i], stages.tiles[i].index(stage).permute((1, 0)), scores, is_async=True)
    return scores


@gluon_kernel
def _send_weights(exchange, num_sent, weights, decay):
    """Send the weights of a block, and the factor for earlier results (decay), to another warpgroup."""
    weight_slots, decay_slots = exchange.tiles
    slot = stage_of(exchange, num_sent)
    wait_until_empty(exchange, num_sent)
    weight_slots.index(slot).store(weights)
    decay_slots.index(slot).store(decay)
    hopper.fence_async_shared()
    hopper.mbarrier.arrive(exchange.full.index(slot), count=1)


@gluon_kernel
def _attend_blocks(
    first_block, end_block, num_blocks, num_done, num_sent, weights, out, max_score, sum_weights,
    q, stages, values, exchange, scale, queries, extent,
    MASKED: gl.constexpr, FENCED: gl.constexpr, CONSTANTS: gl.constexpr, SCORES: gl.constexpr, OUT: gl.constexpr,
):
    """Compute the weights of blocks first_block .. end_block; add each previous block's weights times values to `out`.

    num_done: blocks that the program has finished, over all its work items; num_blocks: blocks of this work item;
    FENCED: as in `_start_scores`.
    """
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    zeros = gl.full([64, CONSTANTS.BLOCK_N], 0.0, gl.float32, layout=SCORES)
    for t in range(first_block, end_block):
        next_scores = _start_scores(q, stages, stage_of(stages, num_done + 1), zeros, FENCED)
        pending_out = hopper.warpgroup_mma(weights, values.index(stage_of(stages, num_done)), out, is_async=True)
        scores = hopper.warpgroup_mma_wait(num_outstanding=1, deps=[next_scores])
        if MASKED:
            scores = _mask(scores, t, queries, extent, CONSTANTS, SCORES)
        weights_float32, sums, max_score, decay = _softmax_step(scores, scale, max_score, values.dtype)
        rounded = weights_float32.to(values.dtype)
        if exchange is not None:
            _send_weights(exchange, num_sent, rounded, decay)
            num_sent += 1
        weights = gl.convert_layout(rounded, WEIGHTS)
        if exchange is None:
            sum_weights = _update_sum_weights(sum_weights, decay, sums, SCORES)
            # This wait for rows must stay between the weights and the wait for `out`.  Otherwise ptxas moves the wait
            # for `out` before the weights, and nothing overlaps.
            wait_until_full(stages, num_done + 2, t + 1 < num_blocks)
        out = hopper.warpgroup_mma_wait(num_outstanding=0, deps=[pending_out])
        hopper.mbarrier.arrive(stages.empty.index(stage_of(stages, num_done)), count=1)
        out = out * gl.expand_dims(gl.convert_layout(decay, gl.SliceLayout(1, OUT)), 1)
        if exchange is not None:
            # The other warpgroup has these weights already, and does not need their sum.
            sum_weights = _update_sum_weights(sum_weights, decay, sums, SCORES)
            # This wait comes after the stage is given back: with two stages, the next block needs this stage.
            wait_until_full(stages, num_done + 2, t + 1 < num_blocks)
        num_done += 1
    return num_done, num_sent, weights, out, max_score, sum_weights


@gluon_kernel
def attend_work_item(
    q, stages, values, exchange, num_done, num_sent, scale, queries, extent,
    CONSTANTS: gl.constexpr, SCORES: gl.constexpr, OUT: gl.constexpr,
):
    """Attend to one work item.  Returns (out [64, OUT_SIZE], max_score, sum_weights).

    The num_unmasked blocks come first.  values: the stages' tile that is summed; exchange: slots through which each
    block's weights are sent to another warpgroup, or None; num_done, num_sent: blocks that the program has finished and
    sent before.
    """
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    max_score = gl.full([64], float("-inf"), gl.float32, layout=gl.SliceLayout(1, SCORES))
    sum_weights = gl.full([64], 0.0, gl.float32, layout=gl.SliceLayout(1, SCORES))
    out = gl.full([64, CONSTANTS.OUT_SIZE], 0.0, gl.float32, layout=OUT)
    zeros = gl.full([64, CONSTANTS.BLOCK_N], 0.0, gl.float32, layout=SCORES)
    wait_until_full(stages, num_done, True)
    scores = _start_scores(q, stages, stage_of(stages, num_done), zeros, True)
    scores = hopper.warpgroup_mma_wait(num_outstanding=0, deps=[scores])
    scores = _mask(scores, 0, queries, extent, CONSTANTS, SCORES)
    weights_float32, sums, max_score, decay = _softmax_step(scores, scale, max_score, values.dtype)
    rounded = weights_float32.to(values.dtype)
    if exchange is not None:
        _send_weights(exchange, num_sent, rounded, decay)
        num_sent += 1
    weights = gl.convert_layout(rounded, WEIGHTS)
    sum_weights = _update_sum_weights(sum_weights, decay, sums, SCORES)
    wait_until_full(stages, num_done + 1, extent.num_blocks > 1)
    masked = gl.maximum(extent.num_unmasked, 1)
    # If CONTIGUOUS is 1, TMA copies all unmasked blocks.  Warps that convert FP8 rows make a fence themselves.
    BY_THREADS: gl.constexpr = CONSTANTS.CONTIGUOUS != 1 and CONSTANTS.RAW_STAGES == 0
    if CONSTANTS.WINDOW == 0:
        # Most blocks need no mask, and a loop that never tests for one is 2 % faster.
        num_done, num_sent, weights, out, max_score, sum_weights = _attend_blocks(
            1, masked, extent.num_blocks, num_done, num_sent, weights, out, max_score, sum_weights,
            q, stages, values, exchange, scale, queries, extent, False, BY_THREADS, CONSTANTS, SCORES, OUT,
        )
    num_done, num_sent, weights, out, max_score, sum_weights = _attend_blocks(
        masked, extent.num_blocks, extent.num_blocks, num_done, num_sent, weights, out, max_score, sum_weights,
        q, stages, values, exchange, scale, queries, extent, True, True, CONSTANTS, SCORES, OUT,
    )
    pending_out = hopper.warpgroup_mma(weights, values.index(stage_of(stages, num_done)), out, is_async=True)
    out = hopper.warpgroup_mma_wait(num_outstanding=0, deps=[pending_out])
    hopper.mbarrier.arrive(stages.empty.index(stage_of(stages, num_done)), count=1)
    return out, max_score, sum_weights


@gluon_kernel
def _write(
    out_ptr, lse_ptr, base, queries, out, lse, first_packed, head,
    KV_HEADS: gl.constexpr, GROUP_SIZE: gl.constexpr, SIZE: gl.constexpr, OUT: gl.constexpr,
):
    """Write the results of 64 packed queries to out [.., queries, heads, SIZE] and lse [.., queries, heads].

    base: index of the request in `out`, or of the split in the partial results.
    """
    at = first_packed + gl.arange(0, 64, layout=gl.SliceLayout(1, OUT))
    row = (base * queries + at // GROUP_SIZE) * (KV_HEADS * GROUP_SIZE) + head * GROUP_SIZE + at % GROUP_SIZE
    size = gl.expand_dims(gl.arange(0, SIZE, layout=gl.SliceLayout(0, OUT)), 0)
    query_exists = at // GROUP_SIZE < queries
    to = out_ptr + (gl.expand_dims(row, 1) * SIZE + size)
    gl.store(to, out.to(out_ptr.dtype.element_ty), mask=gl.expand_dims(query_exists, 1))
    gl.store(lse_ptr + row, gl.convert_layout(lse, gl.SliceLayout(1, OUT)), mask=query_exists)


@gluon_kernel
def _write_work_item(
    results, v_scale_ptr, scale, out, max_score, sum_weights, plan, item, first_packed,
    dtype: gl.constexpr, SINK: gl.constexpr, CONSTANTS: gl.constexpr, SCORES: gl.constexpr, OUT: gl.constexpr,
):
    """Write a final or a partial result, see kernels/attention/attention_blocks.py:write_work_item."""
    out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, sink_ptr = results
    KV_HEADS: gl.constexpr = CONSTANTS.KV_HEADS
    GROUP_SIZE: gl.constexpr = CONSTANTS.GROUP_SIZE
    SIZE: gl.constexpr = CONSTANTS.OUT_SIZE
    queries, head = plan.queries, item.head
    divisor = gl.where(sum_weights == 0.0, 1.0, sum_weights)
    # One division per query instead of one per value.
    out = out * gl.expand_dims(gl.convert_layout(1.0 / divisor, gl.SliceLayout(1, OUT)), 1)
    if CONSTANTS.RAW_STAGES > 0:
        out = out * gl.load(v_scale_ptr + head)
    lse = lse_of(max_score, sum_weights, scale, dtype)
    if item.request_splits == 1:
        at = item.request
        if SINK:
            packed = first_packed + gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))
            share = sink_share(lse, sink_ptr, head * GROUP_SIZE + packed % GROUP_SIZE)
            out = out * gl.expand_dims(gl.convert_layout(share, gl.SliceLayout(1, OUT)), 1)
        lse = lse * 0.6931471805599453
        _write(out_ptr, lse_ptr, at, queries, out, lse, first_packed, head, KV_HEADS, GROUP_SIZE, SIZE, OUT)
    else:
        at = item.split.to(gl.int64)
        _write(partial_ptr, partial_lse_ptr, at, queries, out, lse, first_packed, head, KV_HEADS, GROUP_SIZE, SIZE, OUT)


@gluon_kernel
def _copy_queries(
    q_shared, q_rows, plan, work_item, WARPGROUP: gl.constexpr, SIZE: gl.constexpr, CONSTANTS: gl.constexpr,
):
    """Start the copy of a work item's queries, if the work item exists."""
    GROUP_SIZE: gl.constexpr = CONSTANTS.GROUP_SIZE
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [256 // SIZE, SIZE // 8], [4, 1], [1, 0])
    if work_item < plan.num_splits * plan.num_tiles * CONSTANTS.KV_HEADS:
        item = load_work_item(plan, work_item, CONSTANTS.KV_HEADS, CONSTANTS.LONGEST_FIRST)
        first_packed = item.tile * CONSTANTS.BLOCK_M + WARPGROUP * 64
        at = first_packed + gl.arange(0, 64, layout=gl.SliceLayout(1, LOAD))
        query = at // GROUP_SIZE
        row = item.request * q_rows.request_stride + query.to(gl.int64) * q_rows.row_stride
        row += (item.head * GROUP_SIZE + at % GROUP_SIZE) * q_rows.head_stride
        offsets = gl.expand_dims(row, 1) + gl.expand_dims(gl.arange(0, SIZE, layout=gl.SliceLayout(0, LOAD)), 0)
        exists = gl.expand_dims(query < plan.queries, 1)
        hopper.async_copy.async_copy_global_to_shared(q_shared, q_rows.pointer + offsets, mask=exists)
    hopper.async_copy.commit_group()


@gluon_kernel
def attend_work_items(
    WARPGROUP: gl.constexpr, q_shared, stages, plan, q_rows, positions, row_positions, ancestor_bits, results,
    scale, scales, SINK: gl.constexpr, CONSTANTS: gl.constexpr,
):
    """Attend to all work items of a program, in its WARPGROUP-th warpgroup.

    scales: pointers to the scales of K and V, read only if rows are FP8.
    """
    SIZE: gl.constexpr = CONSTANTS.OUT_SIZE
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CONSTANTS.BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZE, 16])
    k_scale_ptr, v_scale_ptr = scales
    q_tile = q_shared.index(WARPGROUP)
    # With FP8 rows, no registers are left for the addresses of the next queries.
    AHEAD: gl.constexpr = CONSTANTS.RAW_STAGES == 0
    num_work_items = plan.num_splits * plan.num_tiles * CONSTANTS.KV_HEADS
    backwards = 0
    num_done = 0
    if AHEAD:
        _copy_queries(q_tile, q_rows, plan, work_item_of(0, backwards), WARPGROUP, SIZE, CONSTANTS)
    for base in range(0, num_work_items, gl.num_programs(0)):
        work_item = work_item_of(base, backwards)
        backwards = 1 - backwards
        if work_item < num_work_items:
            item = load_work_item(plan, work_item, CONSTANTS.KV_HEADS, CONSTANTS.LONGEST_FIRST)
            first_packed = item.tile * CONSTANTS.BLOCK_M + WARPGROUP * 64
            if not AHEAD:
                _copy_queries(q_tile, q_rows, plan, work_item, WARPGROUP, SIZE, CONSTANTS)
            hopper.async_copy.wait_group(0)
            q = q_tile
            if SIZE <= REGISTER_HEAD_SIZE:
                # The queries stay in registers, because K and V need the bandwidth of shared memory.
                q = q_tile.load(gl.DotOperandLayout(operand_index=0, parent=SCORES, k_width=2))
            if q.dtype != stages.tiles[0].dtype:
                # Too large queries become NaN, as in kernels/attention/tree_attention.py:_queries.
                values = q.to(gl.float32)
                q = gl.where(gl.abs(values) <= 65504.0, values, float("nan")).to(stages.tiles[0].dtype)
            packed = packed_queries(plan, item, first_packed, positions, CONSTANTS, SCORES)
            extent = work_item_extent(plan, item, positions, gl.SliceLayout(1, SCORES), CONSTANTS)
            queries = make_queries(plan, item, extent, first_packed, packed, row_positions, ancestor_bits, CONSTANTS)
            score_scale = scale
            if CONSTANTS.RAW_STAGES > 0:
                score_scale = scale * gl.load(k_scale_ptr + item.head)
            out, max_score, sum_weights = attend_work_item(
                (q,), stages, stages.tiles[1], None, num_done, 0, score_scale, queries, extent, CONSTANTS, SCORES, OUT
            )
            num_done += extent.num_blocks
            trigger_merge(base, num_work_items, CONSTANTS.DEPENDENT)
            if AHEAD:
                # The next work item's queries are copied while the results are written.
                next_item = work_item_of(base + gl.num_programs(0), backwards)
                _copy_queries(q_tile, q_rows, plan, next_item, WARPGROUP, SIZE, CONSTANTS)
            _write_work_item(
                results, v_scale_ptr, score_scale, out, max_score, sum_weights, plan, item, first_packed,
                stages.tiles[1].dtype, SINK, CONSTANTS, SCORES, OUT,
            )
# fmt: on
