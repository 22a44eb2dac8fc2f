"""The attending warps of the Hopper kernel: each warpgroup attends with 64 packed queries, one block of rows at a time.

While the tensor cores multiply the weights of one block with its values, the warps compute the weights of the next
block (Shah et al. 2024, FlashAttention-3, arXiv:2407.08608, section 3.2).  The warpgroups of a program do not wait for
each other: the exponentials of one can overlap with the products of another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from espalier.kernels.attention.hopper_load import extent_of, min_position_of
from espalier.kernels.attention.work_items import block_index, load_work_item, work_item_of
from espalier.kernels.runtime.launch import gluon_kernel

if TYPE_CHECKING:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper


# Arguments are grouped by meaning; one argument per line would hide the groups.
# fmt: off
@gluon_kernel
def _mask_committed(
    scores, at, position, end, first, WINDOW: gl.constexpr, BLOCK_N: gl.constexpr, SCORES: gl.constexpr,
):
    key_position = at + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SCORES))
    seen = gl.expand_dims((key_position >= first) & (key_position < end), 0)
    if WINDOW > 0:
        seen = seen & (gl.expand_dims(position, 1) - gl.expand_dims(key_position, 0) < WINDOW)
    return gl.where(seen, scores, float("-inf"))


@gluon_kernel
def _mask_chain(scores, at, query, high, WINDOW: gl.constexpr, BLOCK_N: gl.constexpr, SCORES: gl.constexpr):
    node = gl.expand_dims(at + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SCORES)), 0)
    seen = (node < high) & (node <= gl.expand_dims(query, 1))
    if WINDOW > 0:
        seen = seen & (gl.expand_dims(query, 1) - node < WINDOW)
    return gl.where(seen, scores, float("-inf"))


@gluon_kernel
def _mask_tree(
    scores, at, query, query_exists, position, row_positions, ancestor_bits, high,
    WINDOW: gl.constexpr, BLOCK_N: gl.constexpr, SCORES: gl.constexpr,
):
    row_position_ptr, row_position_r = row_positions
    bits_ptr, bits_q = ancestor_bits
    node = at + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SCORES))
    word = gl.load(bits_ptr + query.to(gl.int64) * bits_q + at // 64, mask=query_exists, other=0)
    bit = (gl.expand_dims(word, 1) >> gl.expand_dims((node % 64).to(gl.int64), 0)) & 1
    seen = gl.expand_dims(node < high, 0) & (bit != 0)
    if WINDOW > 0:
        row_position = gl.load(row_position_ptr + node.to(gl.int64) * row_position_r, mask=node < high, other=0)
        seen = seen & (gl.expand_dims(position, 1) - gl.expand_dims(row_position.to(gl.int32), 0) < WINDOW)
    return gl.where(seen, scores, float("-inf"))


@gluon_kernel
def _mask(
    scores, t, query, query_exists, position, row_positions, ancestor_bits, extent,
    STAGED: gl.constexpr, WINDOW: gl.constexpr, BLOCK_N: gl.constexpr, SCORES: gl.constexpr,
):
    """The scores of the t-th block, -inf where a query does not see a row."""
    begin, end, first, num_committed, num_lower, num_unmasked, first_masked_staged, low, high = extent
    if t < num_committed:
        if t >= num_unmasked:
            at = begin + block_index(t, num_lower, num_unmasked) * BLOCK_N
            scores = _mask_committed(scores, at, position, end, first, WINDOW, BLOCK_N, SCORES)
    elif t >= first_masked_staged:
        node = low + (t - num_committed) * BLOCK_N
        if STAGED == 0:
            scores = gl.full_like(scores, float("-inf"))
        if STAGED == 1:
            scores = _mask_chain(scores, node, query, high, WINDOW, BLOCK_N, SCORES)
        if STAGED == 2:
            scores = _mask_tree(
                scores, node, query, query_exists, position, row_positions, ancestor_bits, high, WINDOW, BLOCK_N, SCORES
            )
    return scores


@gluon_kernel
def _weigh(scores, scale, max_score, sum_weights):
    """One step of an online softmax in base 2 (Milakov and Gimelshein 2018).

    Returns (weights, max_score, sum_weights, decay); decay is the factor for the results so far.
    """
    new_max = gl.maximum(max_score, gl.max(scores, 1))
    # All scores are -inf until the first visible row; -inf - -inf would be NaN.
    scaled_max = gl.where(new_max == float("-inf"), 0.0, new_max * scale)
    weights = gl.exp2(gl.fma(scores, scale, gl.expand_dims(-scaled_max, 1)))
    decay = gl.exp2(gl.fma(max_score, scale, -scaled_max))
    return weights, new_max, gl.fma(sum_weights, decay, gl.sum(weights, 1)), decay


@gluon_kernel
def _score(q, k_stage, zeros):
    """Start the product of q and the keys of a stage.  The fence makes rows visible that other threads wrote."""
    hopper.fence_async_shared()
    return hopper.warpgroup_mma(q, k_stage.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon_kernel
def _attend_blocks(
    first_block, end_block, num_blocks, num_done, weights, out, max_score, sum_weights, q, stages, scale,
    query, query_exists, position, row_positions, ancestor_bits, extent,
    MASKED: gl.constexpr, WINDOW: gl.constexpr, STAGED: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, SCORES: gl.constexpr, OUT: gl.constexpr,
):
    """Compute the weights of blocks first_block .. end_block; add each previous block's weights times values to `out`.

    num_done: blocks that the program has finished, of all its work items; num_blocks: of this work item.
    """
    k_stages, v_stages, full, empty = stages
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    zeros = gl.full([64, BLOCK_N], 0.0, gl.float32, layout=SCORES)
    for t in range(first_block, end_block):
        next_scores = _score(q, k_stages.index((num_done + 1) % STAGES), zeros)
        pending_out = hopper.warpgroup_mma(weights, v_stages.index(num_done % STAGES), out, is_async=True)
        scores = hopper.warpgroup_mma_wait(num_outstanding=1, deps=[next_scores])
        if MASKED:
            scores = _mask(
                scores, t, query, query_exists, position, row_positions, ancestor_bits, extent,
                STAGED, WINDOW, BLOCK_N, SCORES,
            )
        weights_float32, max_score, sum_weights, decay = _weigh(scores, scale, max_score, sum_weights)
        weights = gl.convert_layout(weights_float32.to(q.dtype), WEIGHTS)
        # This wait for rows must stay between the weights and the wait for `out`: otherwise ptxas moves the latter up
        # before the weights, and nothing overlaps.
        hopper.mbarrier.wait(full.index((num_done + 2) % STAGES), (num_done + 2) // STAGES % 2, pred=t + 1 < num_blocks)
        out = hopper.warpgroup_mma_wait(num_outstanding=0, deps=[pending_out])
        hopper.mbarrier.arrive(empty.index(num_done % STAGES), count=1)
        out = out * gl.expand_dims(gl.convert_layout(decay, gl.SliceLayout(1, OUT)), 1)
        num_done += 1
    return num_done, weights, out, max_score, sum_weights


@gluon_kernel
def _attend_work_item(
    q, stages, num_done, num_unmasked, num_blocks, scale,
    query, query_exists, position, row_positions, ancestor_bits, extent,
    SIZE: gl.constexpr, WINDOW: gl.constexpr, STAGED: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, SCORES: gl.constexpr, OUT: gl.constexpr,
):
    """(out [64, SIZE], max_score, sum_weights) of a work item.  The num_unmasked blocks without a mask come first.

    num_done: blocks that the program has finished before.
    """
    k_stages, v_stages, full, empty = stages
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    max_score = gl.full([64], float("-inf"), gl.float32, layout=gl.SliceLayout(1, SCORES))
    sum_weights = gl.full([64], 0.0, gl.float32, layout=gl.SliceLayout(1, SCORES))
    out = gl.full([64, SIZE], 0.0, gl.float32, layout=OUT)
    zeros = gl.full([64, BLOCK_N], 0.0, gl.float32, layout=SCORES)
    hopper.mbarrier.wait(full.index(num_done % STAGES), num_done // STAGES % 2)
    scores = _score(q, k_stages.index(num_done % STAGES), zeros)
    scores = hopper.warpgroup_mma_wait(num_outstanding=0, deps=[scores])
    scores = _mask(
        scores, 0, query, query_exists, position, row_positions, ancestor_bits, extent, STAGED, WINDOW, BLOCK_N, SCORES
    )
    weights_float32, max_score, sum_weights, _decay = _weigh(scores, scale, max_score, sum_weights)
    weights = gl.convert_layout(weights_float32.to(q.dtype), WEIGHTS)
    hopper.mbarrier.wait(full.index((num_done + 1) % STAGES), (num_done + 1) // STAGES % 2, pred=num_blocks > 1)
    masked = gl.maximum(num_unmasked, 1)
    if WINDOW == 0:
        # Most blocks need no mask: a loop that never tests for one is 2 % faster.
        num_done, weights, out, max_score, sum_weights = _attend_blocks(
            1, masked, num_blocks, num_done, weights, out, max_score, sum_weights, q, stages, scale,
            query, query_exists, position, row_positions, ancestor_bits, extent,
            False, WINDOW, STAGED, BLOCK_N, STAGES, SCORES, OUT,
        )
    num_done, weights, out, max_score, sum_weights = _attend_blocks(
        masked, num_blocks, num_blocks, num_done, weights, out, max_score, sum_weights, q, stages, scale,
        query, query_exists, position, row_positions, ancestor_bits, extent,
        True, WINDOW, STAGED, BLOCK_N, STAGES, SCORES, OUT,
    )
    pending_out = hopper.warpgroup_mma(weights, v_stages.index(num_done % STAGES), out, is_async=True)
    out = hopper.warpgroup_mma_wait(num_outstanding=0, deps=[pending_out])
    hopper.mbarrier.arrive(empty.index(num_done % STAGES), count=1)
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
def _with_sink(
    out, lse, sink_ptr, first_packed, head,
    GROUP_SIZE: gl.constexpr, SINK: gl.constexpr, SCORES: gl.constexpr, OUT: gl.constexpr,
):
    """As kernels/attention/attention_blocks.py:_with_sink, for 64 packed queries of a KV head."""
    if SINK:
        packed = first_packed + gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))
        sink = gl.load(sink_ptr + head * GROUP_SIZE + packed % GROUP_SIZE).to(gl.float32)
        finite = gl.where(lse == float("-inf"), 0.0, lse)
        share = 1.0 / (1.0 + gl.exp2(gl.fma(sink, 1.4426950408889634, -finite)))
        out = out * gl.expand_dims(gl.convert_layout(share, gl.SliceLayout(1, OUT)), 1)
    return out


@gluon_kernel
def _write_work_item(
    results, v_scale_ptr, scale, out, max_score, sum_weights, split, request, request_splits, queries,
    first_packed, head, KV_HEADS: gl.constexpr, GROUP_SIZE: gl.constexpr, SIZE: gl.constexpr,
    SINK: gl.constexpr, FP8: gl.constexpr, SCORES: gl.constexpr, OUT: gl.constexpr,
):
    """Write the result of a request's only split, or the partial result of one of several.  scale: of the scores."""
    out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, sink_ptr = results
    divisor = gl.where(sum_weights == 0.0, 1.0, sum_weights)
    out = out / gl.expand_dims(gl.convert_layout(divisor, gl.SliceLayout(1, OUT)), 1)
    if FP8:
        out = out * gl.load(v_scale_ptr + head)
    lse = gl.where(sum_weights == 0.0, float("-inf"), gl.fma(max_score, scale, gl.log2(divisor)))
    if request_splits == 1:
        out = _with_sink(out, lse, sink_ptr, first_packed, head, GROUP_SIZE, SINK, SCORES, OUT)
        lse = lse * 0.6931471805599453
        _write(out_ptr, lse_ptr, request, queries, out, lse, first_packed, head, KV_HEADS, GROUP_SIZE, SIZE, OUT)
    else:
        at = split.to(gl.int64)
        _write(partial_ptr, partial_lse_ptr, at, queries, out, lse, first_packed, head, KV_HEADS, GROUP_SIZE, SIZE, OUT)


@gluon_kernel
def _read_queries(
    q_shared, query_args, request, head, first_packed, queries,
    GROUP_SIZE: gl.constexpr, SIZE: gl.constexpr, SCORES: gl.constexpr,
):
    """Load a tile's queries into registers: shared memory bandwidth is needed for K and V."""
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [256 // SIZE, SIZE // 8], [4, 1], [1, 0])
    q_ptr, q_b, q_q, q_h = query_args
    at = first_packed + gl.arange(0, 64, layout=gl.SliceLayout(1, LOAD))
    query = at // GROUP_SIZE
    row = request * q_b + query.to(gl.int64) * q_q + (head * GROUP_SIZE + at % GROUP_SIZE) * q_h
    offsets = gl.expand_dims(row, 1) + gl.expand_dims(gl.arange(0, SIZE, layout=gl.SliceLayout(0, LOAD)), 0)
    q_shared.store(gl.load(q_ptr + offsets, mask=gl.expand_dims(query < queries, 1), other=0.0))
    return q_shared.load(gl.DotOperandLayout(operand_index=0, parent=SCORES, k_width=2))


@gluon_kernel
def attend_work_items(
    q_shared, stages, plan, query_args, positions, row_positions, ancestor_bits, results, scale, scales,
    WARPGROUP: gl.constexpr, KV_HEADS: gl.constexpr, GROUP_SIZE: gl.constexpr, SIZE: gl.constexpr,
    WINDOW: gl.constexpr, STAGED: gl.constexpr, SINK: gl.constexpr, FP8: gl.constexpr, LONGEST_FIRST: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):
    """Attend all work items of a program, in its WARPGROUP-th warpgroup.

    scales: pointers to those of K and V, read only if FP8.  kernels/attention/hopper.py makes the tuples of arguments.
    """
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZE, 16])
    split_ptr, start_ptr, num_splits, num_tiles, queries, rows, first = plan
    position_ptr, position_b, position_q = positions
    row_position_ptr, row_position_b, row_position_r = row_positions
    bits_ptr, bits_b, bits_q = ancestor_bits
    k_scale_ptr, v_scale_ptr = scales
    num_work_items = num_splits * num_tiles * KV_HEADS
    backwards = 0
    num_done = 0
    for base in range(0, num_work_items, gl.num_programs(0)):
        work_item = work_item_of(base, backwards)
        backwards = 1 - backwards
        if work_item < num_work_items:
            split, request, begin, end, request_splits, is_last, tile, head = load_work_item(
                work_item, split_ptr, start_ptr, num_splits, num_tiles, KV_HEADS, LONGEST_FIRST
            )
            first_packed = tile * BLOCK_M + WARPGROUP * 64
            q = _read_queries(q_shared, query_args, request, head, first_packed, queries, GROUP_SIZE, SIZE, SCORES)
            query = (first_packed + gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))) // GROUP_SIZE
            query_exists = query < queries
            position = query
            min_position = 0
            if WINDOW > 0:
                at_request = position_ptr + request * position_b
                position = gl.load(at_request + query.to(gl.int64) * position_q, mask=query_exists, other=0x7FFFFFFF)
                position = position.to(gl.int32)
                min_position = min_position_of(
                    at_request, position_q, tile, queries, GROUP_SIZE, BLOCK_M, gl.SliceLayout(1, SCORES)
                )
            begin, num_committed, num_lower, num_unmasked, low, high, num_blocks = extent_of(
                begin, end, first, is_last, tile, rows, min_position, GROUP_SIZE, STAGED, WINDOW, BLOCK_M, BLOCK_N
            )
            # A chain's blocks before the tile's first query need no mask either.
            first_masked_staged = num_committed
            if STAGED == 1 and WINDOW == 0:
                first_masked_staged = num_committed + gl.maximum(first_packed // GROUP_SIZE + 1 - low, 0) // BLOCK_N
            score_scale = scale
            if FP8:
                score_scale = scale * gl.load(k_scale_ptr + head)
            out, max_score, sum_weights = _attend_work_item(
                q, stages, num_done, num_unmasked, num_blocks, score_scale, query, query_exists, position,
                (row_position_ptr + request * row_position_b, row_position_r), (bits_ptr + request * bits_b, bits_q),
                (begin, end, first, num_committed, num_lower, num_unmasked, first_masked_staged, low, high),
                SIZE, WINDOW, STAGED, BLOCK_N, STAGES, SCORES, OUT,
            )
            num_done += num_blocks
            _write_work_item(
                results, v_scale_ptr, score_scale, out, max_score, sum_weights, split, request, request_splits, queries,
                first_packed, head, KV_HEADS, GROUP_SIZE, SIZE, SINK, FP8, SCORES, OUT,
            )
# fmt: on
