"""The attending warps of Hopper's attention kernels: they compute scores, weights and outputs.  A warpgroup takes 64
packed queries, and one block of rows at a time.  A packed query is one head of one query.

While the tensor cores multiply one block's weights with its values, the warps compute the weights of the next block
(Shah et al. 2024, FlashAttention-3, arXiv:2407.08608, section 3.2).  The warpgroups of a program do not wait for each
other, so one warpgroup can compute exponentials during the products of another.
"""

from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from espalier.kernels.attention.attention_blocks import log_sum_exp_base2, shift_exponent, sink_share
from espalier.kernels.attention.work_items import load_work_item, trigger_merge, work_item_of_program
from espalier.kernels.hopper.config import MAX_REGISTER_HEAD_SIZE
from espalier.kernels.hopper.work import (
    position_of_block,
    stage_of,
    wait_until_empty,
    wait_until_full,
    work_item_blocks,
)
from espalier.kernels.runtime.jit import gluon_kernel

# MAX_REGISTER_HEAD_SIZE in a form that kernels can read.
REGISTER_HEAD_SIZE = gl.constexpr(MAX_REGISTER_HEAD_SIZE)


class Queries(NamedTuple):
    """The data for the masks of a tile of 64 packed queries.  A packed query is one head of one query.

    query, exists, position: [64].  row_positions: pointer to the positions of the request's staged rows, with stride
    row_position_stride_r.  bits: pointer to the ancestor bits of the request's queries.  bits_stride_q: the stride
    between the bits of two queries.  prefix_begin: the first position that exists.
    first_masked_staged: the first block with staged rows that needs a mask."""

    query: Any
    exists: Any
    position: Any
    row_positions: Any
    row_position_stride_r: Any
    bits: Any
    bits_stride_q: Any
    prefix_begin: Any
    first_masked_staged: Any


# fmt: off
@gluon_kernel
def packed_queries(plan, work_item, first_packed, positions, CONSTANTS: gl.constexpr, SCORE_LAYOUT: gl.constexpr):
    """Returns (query, exists, position) of the packed queries first_packed .. first_packed + 64."""
    query = (first_packed + gl.arange(0, 64, layout=gl.SliceLayout(1, SCORE_LAYOUT))) // CONSTANTS.GROUP_SIZE
    exists = query < plan.queries
    position = query
    if CONSTANTS.WINDOW > 0:
        request_ptr = positions.pointer + work_item.request * positions.request_stride
        at = request_ptr + query.to(gl.int64) * positions.row_stride
        position = gl.load(at, mask=exists, other=0x7FFFFFFF).to(gl.int32)
    return query, exists, position


@gluon_kernel
def make_queries(plan, work_item, blocks, first_packed, packed, row_positions, ancestor_bits, CONSTANTS: gl.constexpr):
    """Returns the Queries of a tile of 64 packed queries.
    packed: the result of `packed_queries`."""
    query, exists, position = packed
    first_masked_staged = blocks.num_committed
    if CONSTANTS.STAGED_KIND == 1 and CONSTANTS.WINDOW == 0:
        # In a chain, blocks before the tile's first query need no mask either.
        num_seen = gl.maximum(first_packed // CONSTANTS.GROUP_SIZE + 1 - blocks.begin_staged, 0)
        first_masked_staged = blocks.num_committed + num_seen // CONSTANTS.BLOCK_N
    return Queries(
        query, exists, position,
        row_positions.pointer + work_item.request * row_positions.request_stride, row_positions.row_stride,
        ancestor_bits.pointer + work_item.request * ancestor_bits.request_stride, ancestor_bits.row_stride,
        plan.first_position, first_masked_staged,
    )


@gluon_kernel
def _mask_committed(
    scores, first_position, query_position, end_position, prefix_begin, WINDOW: gl.constexpr, BLOCK_N: gl.constexpr,
    SCORE_LAYOUT: gl.constexpr,
):
    """Returns the scores of committed rows; -inf for rows that do not exist or are outside the window."""
    key_position = first_position + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SCORE_LAYOUT))
    seen = gl.expand_dims((key_position >= prefix_begin) & (key_position < end_position), 0)
    if WINDOW > 0:
        seen = seen & (gl.expand_dims(query_position, 1) - gl.expand_dims(key_position, 0) < WINDOW)
    return gl.where(seen, scores, float("-inf"))


@gluon_kernel
def _mask_chain(
    scores, first_node, query, end_node, WINDOW: gl.constexpr, BLOCK_N: gl.constexpr, SCORE_LAYOUT: gl.constexpr,
):
    """Returns the scores of staged rows first_node .. of a chain, -inf from end_node on and after the query."""
    node = gl.expand_dims(first_node + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SCORE_LAYOUT)), 0)
    seen = (node < end_node) & (node <= gl.expand_dims(query, 1))
    if WINDOW > 0:
        seen = seen & (gl.expand_dims(query, 1) - node < WINDOW)
    return gl.where(seen, scores, float("-inf"))


@gluon_kernel
def _mask_tree(
    scores, first_node, queries, end_node, WINDOW: gl.constexpr, BLOCK_N: gl.constexpr, SCORE_LAYOUT: gl.constexpr,
):
    """Returns the scores of staged rows first_node .. of a tree, -inf for rows that the ancestor bits exclude."""
    node = first_node + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SCORE_LAYOUT))
    at_word = queries.bits + queries.query.to(gl.int64) * queries.bits_stride_q + first_node // 64
    word = gl.load(at_word, mask=queries.exists, other=0)
    bit = (gl.expand_dims(word, 1) >> gl.expand_dims((node % 64).to(gl.int64), 0)) & 1
    seen = gl.expand_dims(node < end_node, 0) & (bit != 0)
    if WINDOW > 0:
        at_row = queries.row_positions + node.to(gl.int64) * queries.row_position_stride_r
        row_position = gl.load(at_row, mask=node < end_node, other=0).to(gl.int32)
        seen = seen & (gl.expand_dims(queries.position, 1) - gl.expand_dims(row_position, 0) < WINDOW)
    return gl.where(seen, scores, float("-inf"))


@gluon_kernel
def _mask_block(scores, block_number, queries, blocks, CONSTANTS: gl.constexpr, SCORE_LAYOUT: gl.constexpr):
    """Returns the scores of block number `block_number`, -inf where a query does not see a row."""
    WINDOW: gl.constexpr = CONSTANTS.WINDOW
    BLOCK_N: gl.constexpr = CONSTANTS.BLOCK_N
    if block_number < blocks.num_committed:
        if block_number >= blocks.num_unmasked:
            at = position_of_block(blocks, block_number, BLOCK_N)
            begin, end = queries.prefix_begin, blocks.end_committed
            scores = _mask_committed(scores, at, queries.position, end, begin, WINDOW, BLOCK_N, SCORE_LAYOUT)
    elif block_number >= queries.first_masked_staged:
        node = blocks.begin_staged + (block_number - blocks.num_committed) * BLOCK_N
        if CONSTANTS.STAGED_KIND == 0:
            scores = gl.full_like(scores, float("-inf"))
        if CONSTANTS.STAGED_KIND == 1:
            scores = _mask_chain(scores, node, queries.query, blocks.end_staged, WINDOW, BLOCK_N, SCORE_LAYOUT)
        if CONSTANTS.STAGED_KIND == 2:
            scores = _mask_tree(scores, node, queries, blocks.end_staged, WINDOW, BLOCK_N, SCORE_LAYOUT)
    return scores


@gluon_kernel
def _softmax_step(scores, scale, max_score, dtype: gl.constexpr):
    """Do one step of an online softmax in base 2 (Milakov and Gimelshein 2018), with weights in dtype.

    Returns (weights, sums of weights [64, 4], max_score, decay).  Column j of the sums is what thread j of a row's four
    threads adds up.  decay: the factor for earlier results."""
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
def _update_sum_weights(sum_weights, decay, sums, SCORE_LAYOUT: gl.constexpr):
    """Returns sum_weights times decay, plus the sums of a block, see `_softmax_step`."""
    return gl.fma(sum_weights, decay, gl.convert_layout(gl.sum(sums, 1), gl.SliceLayout(1, SCORE_LAYOUT)))


@gluon_kernel
def _start_scores(q, stages, stage, zeros, NEEDS_FENCE: gl.constexpr):
    """Start the product of the queries with the keys of a stage, tile by tile.

    NEEDS_FENCE: whether threads may have written rows or queries without a fence.  Rows that TMA wrote need no fence.
    """
    if NEEDS_FENCE:
        hopper.fence_async_shared()
    keys = stages.tiles[0].index(stage)
    scores = hopper.warpgroup_mma(q[0], keys.permute((1, 0)), zeros, use_acc=False, is_async=True)
    for i in gl.static_range(1, len(q)):
        scores = hopper.warpgroup_mma(q[i], stages.tiles[i].index(stage).permute((1, 0)), scores, is_async=True)
    return scores


@gluon_kernel
def _send_weights(exchange, blocks_sent, weights, decay):
    """Send the weights of a block, and the factor for earlier results (decay), to the second warpgroup."""
    weight_slots, decay_slots = exchange.tiles
    slot = stage_of(exchange, blocks_sent)
    wait_until_empty(exchange, blocks_sent)
    weight_slots.index(slot).store(weights)
    decay_slots.index(slot).store(decay)
    hopper.fence_async_shared()
    hopper.mbarrier.arrive(exchange.full.index(slot), count=1)


@gluon_kernel
def _attend_blocks(
    first_block, end_block, num_blocks, blocks_done, blocks_sent, weights, out, max_score, sum_weights,
    q, stages, values, exchange, scale, queries, blocks,
    MASKED: gl.constexpr, NEEDS_FENCE: gl.constexpr, CONSTANTS: gl.constexpr, SCORE_LAYOUT: gl.constexpr,
    OUT_LAYOUT: gl.constexpr,
):
    """Compute the weights of blocks first_block .. end_block; add each previous block's weights times values to `out`.

    blocks_done: blocks that the program has finished.  num_blocks: the blocks of this work item.
    NEEDS_FENCE: see `_start_scores`."""
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT_LAYOUT, k_width=2)
    zeros = gl.full([64, CONSTANTS.BLOCK_N], 0.0, gl.float32, layout=SCORE_LAYOUT)
    for t in range(first_block, end_block):
        next_scores = _start_scores(q, stages, stage_of(stages, blocks_done + 1), zeros, NEEDS_FENCE)
        pending_out = hopper.warpgroup_mma(weights, values.index(stage_of(stages, blocks_done)), out, is_async=True)
        scores = hopper.warpgroup_mma_wait(num_outstanding=1, deps=[next_scores])
        if MASKED:
            scores = _mask_block(scores, t, queries, blocks, CONSTANTS, SCORE_LAYOUT)
        weights_float32, sums, max_score, decay = _softmax_step(scores, scale, max_score, values.dtype)
        rounded = weights_float32.to(values.dtype)
        if exchange is not None:
            _send_weights(exchange, blocks_sent, rounded, decay)
            blocks_sent += 1
        weights = gl.convert_layout(rounded, WEIGHTS)
        if exchange is None:
            sum_weights = _update_sum_weights(sum_weights, decay, sums, SCORE_LAYOUT)
            # The wait for rows must stay between the weights and the wait for `out`.  Otherwise ptxas moves the wait
            # for `out` before the weights, and weights and products do not overlap.
            wait_until_full(stages, blocks_done + 2, t + 1 < num_blocks)
        out = hopper.warpgroup_mma_wait(num_outstanding=0, deps=[pending_out])
        hopper.mbarrier.arrive(stages.empty.index(stage_of(stages, blocks_done)), count=1)
        out = out * gl.expand_dims(gl.convert_layout(decay, gl.SliceLayout(1, OUT_LAYOUT)), 1)
        if exchange is not None:
            # The other warpgroup needs the weights but not their sum, so the sum comes later.
            sum_weights = _update_sum_weights(sum_weights, decay, sums, SCORE_LAYOUT)
            # The wait comes after the stage is released, because with two stages the next block needs this stage.
            wait_until_full(stages, blocks_done + 2, t + 1 < num_blocks)
        blocks_done += 1
    return blocks_done, blocks_sent, weights, out, max_score, sum_weights


@gluon_kernel
def attend_work_item(
    q, stages, values, exchange, blocks_done, blocks_sent, scale, queries, blocks,
    CONSTANTS: gl.constexpr, SCORE_LAYOUT: gl.constexpr, OUT_LAYOUT: gl.constexpr,
):
    """Attend to one work item.  Returns (out [64, OUT_SIZE], max_score, sum_weights).

    Blocks without a mask come first.  values: the buffer of the tile that holds V, with all stages.  exchange: the
    slots through which each block's weights go to another warpgroup, or None.  blocks_done, blocks_sent: the counts
    before this work item."""
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT_LAYOUT, k_width=2)
    max_score = gl.full([64], float("-inf"), gl.float32, layout=gl.SliceLayout(1, SCORE_LAYOUT))
    sum_weights = gl.full([64], 0.0, gl.float32, layout=gl.SliceLayout(1, SCORE_LAYOUT))
    out = gl.full([64, CONSTANTS.OUT_SIZE], 0.0, gl.float32, layout=OUT_LAYOUT)
    zeros = gl.full([64, CONSTANTS.BLOCK_N], 0.0, gl.float32, layout=SCORE_LAYOUT)
    wait_until_full(stages, blocks_done, True)
    scores = _start_scores(q, stages, stage_of(stages, blocks_done), zeros, True)
    scores = hopper.warpgroup_mma_wait(num_outstanding=0, deps=[scores])
    scores = _mask_block(scores, 0, queries, blocks, CONSTANTS, SCORE_LAYOUT)
    weights_float32, sums, max_score, decay = _softmax_step(scores, scale, max_score, values.dtype)
    rounded = weights_float32.to(values.dtype)
    if exchange is not None:
        _send_weights(exchange, blocks_sent, rounded, decay)
        blocks_sent += 1
    weights = gl.convert_layout(rounded, WEIGHTS)
    sum_weights = _update_sum_weights(sum_weights, decay, sums, SCORE_LAYOUT)
    wait_until_full(stages, blocks_done + 1, blocks.num_blocks > 1)
    masked = gl.maximum(blocks.num_unmasked, 1)
    # Whether unmasked blocks need a fence: not if TMA copies them, nor if converting warps (FP8) have made the fence.
    BY_THREADS: gl.constexpr = CONSTANTS.TMA_BLOCKS != 1 and CONSTANTS.RAW_STAGES == 0
    if CONSTANTS.WINDOW == 0:
        # Most blocks need no mask, and a loop that does not test for masks is 2% faster.
        blocks_done, blocks_sent, weights, out, max_score, sum_weights = _attend_blocks(
            1, masked, blocks.num_blocks, blocks_done, blocks_sent, weights, out, max_score, sum_weights,
            q, stages, values, exchange, scale, queries, blocks, False, BY_THREADS, CONSTANTS, SCORE_LAYOUT, OUT_LAYOUT,
        )
    blocks_done, blocks_sent, weights, out, max_score, sum_weights = _attend_blocks(
        masked, blocks.num_blocks, blocks.num_blocks, blocks_done, blocks_sent, weights, out, max_score, sum_weights,
        q, stages, values, exchange, scale, queries, blocks, True, True, CONSTANTS, SCORE_LAYOUT, OUT_LAYOUT,
    )
    pending_out = hopper.warpgroup_mma(weights, values.index(stage_of(stages, blocks_done)), out, is_async=True)
    out = hopper.warpgroup_mma_wait(num_outstanding=0, deps=[pending_out])
    hopper.mbarrier.arrive(stages.empty.index(stage_of(stages, blocks_done)), count=1)
    return out, max_score, sum_weights


@gluon_kernel
def _write_results(
    out_ptr, lse_ptr, result_index, queries, out, lse, first_packed, head,
    KV_HEADS: gl.constexpr, GROUP_SIZE: gl.constexpr, HEAD_SIZE: gl.constexpr, OUT_LAYOUT: gl.constexpr,
):
    """Write the results of 64 packed queries to out [.., queries, heads, HEAD_SIZE] and lse [.., queries, heads].

    result_index: index of the request in `out`, or of the split in the partial results."""
    at = first_packed + gl.arange(0, 64, layout=gl.SliceLayout(1, OUT_LAYOUT))
    row = (result_index * queries + at // GROUP_SIZE) * (KV_HEADS * GROUP_SIZE) + head * GROUP_SIZE + at % GROUP_SIZE
    column = gl.expand_dims(gl.arange(0, HEAD_SIZE, layout=gl.SliceLayout(0, OUT_LAYOUT)), 0)
    query_exists = at // GROUP_SIZE < queries
    out_ptrs = out_ptr + (gl.expand_dims(row, 1) * HEAD_SIZE + column)
    gl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=gl.expand_dims(query_exists, 1))
    gl.store(lse_ptr + row, gl.convert_layout(lse, gl.SliceLayout(1, OUT_LAYOUT)), mask=query_exists)


@gluon_kernel
def _write_work_item(
    results, v_scale_ptr, scale, out, max_score, sum_weights, plan, work_item, first_packed,
    dtype: gl.constexpr, HAS_SINK: gl.constexpr, CONSTANTS: gl.constexpr, SCORE_LAYOUT: gl.constexpr,
    OUT_LAYOUT: gl.constexpr,
):
    """Write a final or a partial result, see kernels/attention/attention_blocks.py:write_work_item_result."""
    out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, sink_ptr = results
    KV_HEADS: gl.constexpr = CONSTANTS.KV_HEADS
    GROUP_SIZE: gl.constexpr = CONSTANTS.GROUP_SIZE
    HEAD_SIZE: gl.constexpr = CONSTANTS.OUT_SIZE
    queries, head = plan.queries, work_item.kv_head
    divisor = gl.where(sum_weights == 0.0, 1.0, sum_weights)
    # One division per query is faster than one per value.
    out = out * gl.expand_dims(gl.convert_layout(1.0 / divisor, gl.SliceLayout(1, OUT_LAYOUT)), 1)
    if CONSTANTS.RAW_STAGES > 0:
        out = out * gl.load(v_scale_ptr + head)
    lse = log_sum_exp_base2(max_score, sum_weights, scale, dtype)
    if work_item.request_splits == 1:
        at = work_item.request
        if HAS_SINK:
            packed = first_packed + gl.arange(0, 64, layout=gl.SliceLayout(1, SCORE_LAYOUT))
            share = sink_share(lse, sink_ptr, head * GROUP_SIZE + packed % GROUP_SIZE)
            out = out * gl.expand_dims(gl.convert_layout(share, gl.SliceLayout(1, OUT_LAYOUT)), 1)
        lse = lse * 0.6931471805599453
        _write_results(
            out_ptr, lse_ptr, at, queries, out, lse, first_packed, head, KV_HEADS, GROUP_SIZE, HEAD_SIZE, OUT_LAYOUT,
        )
    else:
        at = work_item.split.to(gl.int64)
        _write_results(
            partial_ptr, partial_lse_ptr, at, queries, out, lse, first_packed, head, KV_HEADS, GROUP_SIZE, HEAD_SIZE,
            OUT_LAYOUT,
        )


@gluon_kernel
def _copy_queries(
    q_shared, q_rows, plan, work_item_index, WARPGROUP: gl.constexpr, HEAD_SIZE: gl.constexpr, CONSTANTS: gl.constexpr,
):
    """Start the copy of a work item's queries to shared memory `q_shared`, if the work item exists."""
    GROUP_SIZE: gl.constexpr = CONSTANTS.GROUP_SIZE
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_SIZE, HEAD_SIZE // 8], [4, 1], [1, 0])
    if work_item_index < plan.num_splits * plan.num_tiles * CONSTANTS.KV_HEADS:
        work_item = load_work_item(plan, work_item_index, CONSTANTS.KV_HEADS, CONSTANTS.LONGEST_FIRST)
        first_packed = work_item.query_tile * CONSTANTS.BLOCK_M + WARPGROUP * 64
        packed_query = first_packed + gl.arange(0, 64, layout=gl.SliceLayout(1, LOAD))
        query = packed_query // GROUP_SIZE
        row = work_item.request * q_rows.request_stride + query.to(gl.int64) * q_rows.row_stride
        row += (work_item.kv_head * GROUP_SIZE + packed_query % GROUP_SIZE) * q_rows.head_stride
        offsets = gl.expand_dims(row, 1) + gl.expand_dims(gl.arange(0, HEAD_SIZE, layout=gl.SliceLayout(0, LOAD)), 0)
        exists = gl.expand_dims(query < plan.queries, 1)
        hopper.async_copy.async_copy_global_to_shared(q_shared, q_rows.pointer + offsets, mask=exists)
    hopper.async_copy.commit_group()


@gluon_kernel
def attend_work_items(
    WARPGROUP: gl.constexpr, q_shared, stages, plan, q_rows, positions, row_positions, ancestor_bits, results,
    scale, scales, HAS_SINK: gl.constexpr, CONSTANTS: gl.constexpr,
):
    """Attend to all work items of a program, for the 64 queries of warpgroup number WARPGROUP in each tile.

    q_shared: shared memory for the queries.  scales: pointers to the scales of K and V, read only if rows are FP8."""
    HEAD_SIZE: gl.constexpr = CONSTANTS.OUT_SIZE
    SCORE_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CONSTANTS.BLOCK_N, 16])
    OUT_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_SIZE, 16])
    k_scale_ptr, v_scale_ptr = scales
    q_tile = q_shared.index(WARPGROUP)
    # Whether the next work item's queries are copied early.  With FP8 rows, no registers are left for the addresses.
    COPIES_EARLY: gl.constexpr = CONSTANTS.RAW_STAGES == 0
    num_work_items = plan.num_splits * plan.num_tiles * CONSTANTS.KV_HEADS
    backwards = 0
    blocks_done = 0
    if COPIES_EARLY:
        _copy_queries(q_tile, q_rows, plan, work_item_of_program(0, backwards), WARPGROUP, HEAD_SIZE, CONSTANTS)
    for base in range(0, num_work_items, gl.num_programs(0)):
        work_item_index = work_item_of_program(base, backwards)
        backwards = 1 - backwards
        if work_item_index < num_work_items:
            work_item = load_work_item(plan, work_item_index, CONSTANTS.KV_HEADS, CONSTANTS.LONGEST_FIRST)
            first_packed = work_item.query_tile * CONSTANTS.BLOCK_M + WARPGROUP * 64
            if not COPIES_EARLY:
                _copy_queries(q_tile, q_rows, plan, work_item_index, WARPGROUP, HEAD_SIZE, CONSTANTS)
            hopper.async_copy.wait_group(0)
            q = q_tile
            if HEAD_SIZE <= REGISTER_HEAD_SIZE:
                # The queries stay in registers, because K and V need the bandwidth of shared memory.
                q = q_tile.load(gl.DotOperandLayout(operand_index=0, parent=SCORE_LAYOUT, k_width=2))
            if q.dtype != stages.tiles[0].dtype:
                # Queries too large for float16 become NaN, as in kernels/attention/tree_attention.py:_load_queries.
                values = q.to(gl.float32)
                q = gl.where(gl.abs(values) <= 65504.0, values, float("nan")).to(stages.tiles[0].dtype)
            packed = packed_queries(plan, work_item, first_packed, positions, CONSTANTS, SCORE_LAYOUT)
            blocks = work_item_blocks(plan, work_item, positions, gl.SliceLayout(1, SCORE_LAYOUT), CONSTANTS)
            queries = make_queries(
                plan, work_item, blocks, first_packed, packed, row_positions, ancestor_bits, CONSTANTS,
            )
            score_scale = scale
            if CONSTANTS.RAW_STAGES > 0:
                score_scale = scale * gl.load(k_scale_ptr + work_item.kv_head)
            out, max_score, sum_weights = attend_work_item(
                (q,), stages, stages.tiles[1], None, blocks_done, 0, score_scale, queries, blocks,
                CONSTANTS, SCORE_LAYOUT, OUT_LAYOUT,
            )
            blocks_done += blocks.num_blocks
            trigger_merge(base, num_work_items, CONSTANTS.USE_PDL)
            if COPIES_EARLY:
                # The next work item's queries are copied while the results are written.
                next_work_item = work_item_of_program(base + gl.num_programs(0), backwards)
                _copy_queries(q_tile, q_rows, plan, next_work_item, WARPGROUP, HEAD_SIZE, CONSTANTS)
            _write_work_item(
                results, v_scale_ptr, score_scale, out, max_score, sum_weights, plan, work_item, first_packed,
                stages.tiles[1].dtype, HAS_SINK, CONSTANTS, SCORE_LAYOUT, OUT_LAYOUT,
            )
# fmt: on
