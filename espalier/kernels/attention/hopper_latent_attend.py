"""The attending warps of the Hopper kernel for latent rows: two warpgroups for 64 packed queries.

The results of 64 queries, 512 values each, do not fit into the registers of one warpgroup, so each warpgroup sums one
half of the values.  The first warpgroup also computes the weights of each block, and sends them to the second through
shared memory.  While it computes the weights of a block, the tensor cores multiply the values of the block before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from espalier.kernels.attention.hopper_attend import _mask, _weigh
from espalier.kernels.attention.hopper_load import extent_of
from espalier.kernels.attention.work_items import load_work_item, work_item_of
from espalier.kernels.runtime.launch import gluon_kernel

if TYPE_CHECKING:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper


# Arguments are grouped by meaning; one argument per line would hide the groups.
# fmt: off
@gluon_kernel
def _copy_queries(
    q_shared, query_args, request, first_packed, queries,
    HEADS: gl.constexpr, HALF: gl.constexpr, ROPE: gl.constexpr,
):
    """Copy a tile's queries into shared memory.  All products with the queries of the tile before must have ended."""
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    left, right, rope = q_shared
    q_ptr, q_b, q_q, q_h = query_args
    at = first_packed + gl.arange(0, 64, layout=gl.SliceLayout(1, LOAD))
    query = at // HEADS
    row = gl.expand_dims(request * q_b + query.to(gl.int64) * q_q + at % HEADS * q_h, 1)
    exists = gl.expand_dims(query < queries, 1)
    half = row + gl.expand_dims(gl.arange(0, HALF, layout=gl.SliceLayout(0, LOAD)), 0)
    last = row + gl.expand_dims(gl.arange(0, ROPE, layout=gl.SliceLayout(0, LOAD)), 0)
    hopper.async_copy.async_copy_global_to_shared(left, q_ptr + half, mask=exists)
    hopper.async_copy.async_copy_global_to_shared(right, q_ptr + HALF + half, mask=exists)
    hopper.async_copy.async_copy_global_to_shared(rope, q_ptr + 2 * HALF + last, mask=exists)
    hopper.async_copy.commit_group()
    hopper.async_copy.wait_group(0)


@gluon_kernel
def _score(q_shared, stages, stage, zeros):
    """Start the product of the queries and the rows of a stage."""
    q_left, q_right, q_rope = q_shared
    left, right, rope, _full, _empty = stages
    # Makes the rows and queries that threads copied visible to the tensor cores.
    hopper.fence_async_shared()
    scores = hopper.warpgroup_mma(q_left, left.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    scores = hopper.warpgroup_mma(q_right, right.index(stage).permute((1, 0)), scores, is_async=True)
    return hopper.warpgroup_mma(q_rope, rope.index(stage).permute((1, 0)), scores, is_async=True)


@gluon_kernel
def _send(exchange, num_sent, weights, decay, SLOTS: gl.constexpr):
    """Send the weights of a block to the second warpgroup, with the decay: the factor for its earlier results."""
    weight_slots, decay_slots, sent, received = exchange
    slot = num_sent % SLOTS
    hopper.mbarrier.wait(received.index(slot), num_sent // SLOTS % 2 ^ 1)
    weight_slots.index(slot).store(weights)
    decay_slots.index(slot).store(decay)
    hopper.fence_async_shared()
    hopper.mbarrier.arrive(sent.index(slot), count=1)


@gluon_kernel
def _score_blocks(
    first_block, end_block, num_blocks, num_done, num_sent, weights, out, max_score, sum_weights, q_shared, stages,
    exchange, scale, query, query_exists, ancestor_bits, extent,
    MASKED: gl.constexpr, STAGED: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr,
    SCORES: gl.constexpr, OUT: gl.constexpr,
):
    """Compute and send the weights of blocks first_block .. end_block.  Each step adds the values of the block before.

    num_done: blocks that the program has finished, of all its work items; num_blocks: blocks of this work item.
    weights: of the block before first_block.
    """
    left, _right, _rope, full, empty = stages
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    zeros = gl.full([64, BLOCK_N], 0.0, gl.float32, layout=SCORES)
    for t in range(first_block, end_block):
        next_scores = _score(q_shared, stages, (num_done + 1) % STAGES, zeros)
        pending_out = hopper.warpgroup_mma(weights, left.index(num_done % STAGES), out, is_async=True)
        scores = hopper.warpgroup_mma_wait(num_outstanding=1, deps=[next_scores])
        if MASKED:
            scores = _mask(
                scores, t, query, query_exists, query, (0, 0), ancestor_bits, extent, STAGED, 0, BLOCK_N, SCORES
            )
        weights_float32, max_score, sum_weights, decay = _weigh(scores, scale, max_score, sum_weights)
        rounded = weights_float32.to(left.dtype)
        _send(exchange, num_sent, rounded, decay, SLOTS)
        weights = gl.convert_layout(rounded, WEIGHTS)
        out = hopper.warpgroup_mma_wait(num_outstanding=0, deps=[pending_out])
        hopper.mbarrier.arrive(empty.index(num_done % STAGES), count=1)
        out = out * gl.expand_dims(gl.convert_layout(decay, gl.SliceLayout(1, OUT)), 1)
        # Only after the stage is given back: with two stages, the block that is waited for needs it.
        hopper.mbarrier.wait(full.index((num_done + 2) % STAGES), (num_done + 2) // STAGES % 2, pred=t + 1 < num_blocks)
        num_done += 1
        num_sent += 1
    return num_done, num_sent, weights, out, max_score, sum_weights


@gluon_kernel
def _score_work_item(
    q_shared, stages, exchange, num_done, num_sent, num_unmasked, num_blocks, scale,
    query, query_exists, ancestor_bits, extent,
    HALF: gl.constexpr, STAGED: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr,
    SCORES: gl.constexpr, OUT: gl.constexpr,
):
    """(out [64, HALF], max_score, sum_weights) of a work item.  Its first num_unmasked blocks need no mask."""
    left, _right, _rope, full, empty = stages
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    max_score = gl.full([64], float("-inf"), gl.float32, layout=gl.SliceLayout(1, SCORES))
    sum_weights = gl.full([64], 0.0, gl.float32, layout=gl.SliceLayout(1, SCORES))
    out = gl.full([64, HALF], 0.0, gl.float32, layout=OUT)
    zeros = gl.full([64, BLOCK_N], 0.0, gl.float32, layout=SCORES)
    hopper.mbarrier.wait(full.index(num_done % STAGES), num_done // STAGES % 2)
    scores = _score(q_shared, stages, num_done % STAGES, zeros)
    scores = hopper.warpgroup_mma_wait(num_outstanding=0, deps=[scores])
    scores = _mask(scores, 0, query, query_exists, query, (0, 0), ancestor_bits, extent, STAGED, 0, BLOCK_N, SCORES)
    weights_float32, max_score, sum_weights, decay = _weigh(scores, scale, max_score, sum_weights)
    rounded = weights_float32.to(left.dtype)
    _send(exchange, num_sent, rounded, decay, SLOTS)
    num_sent += 1
    weights = gl.convert_layout(rounded, WEIGHTS)
    hopper.mbarrier.wait(full.index((num_done + 1) % STAGES), (num_done + 1) // STAGES % 2, pred=num_blocks > 1)
    masked = gl.maximum(num_unmasked, 1)
    num_done, num_sent, weights, out, max_score, sum_weights = _score_blocks(
        1, masked, num_blocks, num_done, num_sent, weights, out, max_score, sum_weights, q_shared, stages,
        exchange, scale, query, query_exists, ancestor_bits, extent,
        False, STAGED, BLOCK_N, STAGES, SLOTS, SCORES, OUT,
    )
    num_done, num_sent, weights, out, max_score, sum_weights = _score_blocks(
        masked, num_blocks, num_blocks, num_done, num_sent, weights, out, max_score, sum_weights, q_shared, stages,
        exchange, scale, query, query_exists, ancestor_bits, extent,
        True, STAGED, BLOCK_N, STAGES, SLOTS, SCORES, OUT,
    )
    pending_out = hopper.warpgroup_mma(weights, left.index(num_done % STAGES), out, is_async=True)
    out = hopper.warpgroup_mma_wait(num_outstanding=0, deps=[pending_out])
    hopper.mbarrier.arrive(empty.index(num_done % STAGES), count=1)
    return out, max_score, sum_weights


@gluon_kernel
def _write_half(
    to_ptr, base, queries, out, divisor, row_scale, first_packed, at_column,
    HEADS: gl.constexpr, HALF: gl.constexpr, OUT: gl.constexpr,
):
    """Write out / divisor of 64 packed queries to columns at_column .. at_column + HALF of to_ptr [.., 2 · HALF].

    base: index of the request in the results, or of the split in the partial results.  row_scale: of FP8 rows, else 1.
    """
    at = first_packed + gl.arange(0, 64, layout=gl.SliceLayout(1, OUT))
    row = base * queries * HEADS + at
    column = at_column + gl.arange(0, HALF, layout=gl.SliceLayout(0, OUT))
    to = to_ptr + (gl.expand_dims(row, 1) * (2 * HALF) + gl.expand_dims(column, 0))
    result = out / gl.expand_dims(divisor, 1) * row_scale
    gl.store(to, result.to(to_ptr.dtype.element_ty), mask=gl.expand_dims(at < queries * HEADS, 1))


@gluon_kernel
def score_work_items(
    q_shared, stages, exchange, plan, query_args, ancestor_bits, results, scale,
    HEADS: gl.constexpr, HALF: gl.constexpr, ROPE: gl.constexpr, STAGED: gl.constexpr, LONGEST_FIRST: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr,
):
    """The first warpgroup: weights of all work items of a program, and the left half of their values."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    split_ptr, start_ptr, num_splits, num_tiles, queries, rows, first = plan
    bits_ptr, bits_b, bits_q = ancestor_bits
    out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, row_scale = results
    _weight_slots, decay_slots, sent, received = exchange
    num_work_items = num_splits * num_tiles
    backwards = 0
    num_done = 0
    num_sent = 0
    for base in range(0, num_work_items, gl.num_programs(0)):
        work_item = work_item_of(base, backwards)
        backwards = 1 - backwards
        if work_item < num_work_items:
            split, request, begin, end, request_splits, is_last, tile, _head = load_work_item(
                work_item, split_ptr, start_ptr, num_splits, num_tiles, 1, LONGEST_FIRST
            )
            first_packed = tile * 64
            _copy_queries(q_shared, query_args, request, first_packed, queries, HEADS, HALF, ROPE)
            packed = first_packed + gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))
            query = packed // HEADS
            begin, num_committed, num_lower, num_unmasked, low, high, num_blocks = extent_of(
                begin, end, first, is_last, tile, rows, 0, HEADS, STAGED, 0, 64, BLOCK_N
            )
            # A chain's blocks before the tile's first query need no mask.
            first_masked_staged = num_committed
            if STAGED == 1:
                first_masked_staged = num_committed + gl.maximum(first_packed // HEADS + 1 - low, 0) // BLOCK_N
            out, max_score, sum_weights = _score_work_item(
                q_shared, stages, exchange, num_done, num_sent, num_unmasked, num_blocks, scale, query,
                query < queries, (bits_ptr + request * bits_b, bits_q),
                (begin, end, first, num_committed, num_lower, num_unmasked, first_masked_staged, low, high),
                HALF, STAGED, BLOCK_N, STAGES, SLOTS, SCORES, OUT,
            )
            num_done += num_blocks
            num_sent += num_blocks
            divisor = gl.where(sum_weights == 0.0, 1.0, sum_weights)
            # The second warpgroup gets the divisor last, in the place of a decay.
            slot = num_sent % SLOTS
            hopper.mbarrier.wait(received.index(slot), num_sent // SLOTS % 2 ^ 1)
            decay_slots.index(slot).store(divisor)
            hopper.mbarrier.arrive(sent.index(slot), count=1)
            num_sent += 1
            lse = gl.where(sum_weights == 0.0, float("-inf"), gl.fma(max_score, scale, gl.log2(divisor)))
            half_divisor = gl.convert_layout(divisor, gl.SliceLayout(1, OUT))
            exists = packed < queries * HEADS
            if request_splits == 1:
                _write_half(out_ptr, request, queries, out, half_divisor, row_scale, first_packed, 0, HEADS, HALF, OUT)
                gl.store(lse_ptr + (request * queries * HEADS + packed), lse * 0.6931471805599453, mask=exists)
            else:
                base_row = split.to(gl.int64)
                _write_half(
                    partial_ptr, base_row, queries, out, half_divisor, row_scale, first_packed, 0, HEADS, HALF, OUT
                )
                gl.store(partial_lse_ptr + (base_row * queries * HEADS + packed), lse, mask=exists)


@gluon_kernel
def value_work_items(
    stages, exchange, plan, results,
    HEADS: gl.constexpr, HALF: gl.constexpr, STAGED: gl.constexpr, LONGEST_FIRST: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr,
):
    """The second warpgroup: the right half of the values, with the weights that the first warpgroup sends."""
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    split_ptr, start_ptr, num_splits, num_tiles, queries, rows, first = plan
    _left, right, _rope, full, empty = stages
    out_ptr, _lse_ptr, partial_ptr, _partial_lse_ptr, row_scale = results
    weight_slots, decay_slots, sent, received = exchange
    num_work_items = num_splits * num_tiles
    backwards = 0
    num_done = 0
    num_sent = 0
    for base in range(0, num_work_items, gl.num_programs(0)):
        work_item = work_item_of(base, backwards)
        backwards = 1 - backwards
        if work_item < num_work_items:
            split, request, begin, end, request_splits, is_last, tile, _head = load_work_item(
                work_item, split_ptr, start_ptr, num_splits, num_tiles, 1, LONGEST_FIRST
            )
            _begin, _num_committed, _num_lower, _num_unmasked, _low, _high, num_blocks = extent_of(
                begin, end, first, is_last, tile, rows, 0, HEADS, STAGED, 0, 64, BLOCK_N
            )
            out = gl.full([64, HALF], 0.0, gl.float32, layout=OUT)
            for _ in range(num_blocks):
                slot = num_sent % SLOTS
                stage = num_done % STAGES
                hopper.mbarrier.wait(full.index(stage), num_done // STAGES % 2)
                hopper.mbarrier.wait(sent.index(slot), num_sent // SLOTS % 2)
                decay = decay_slots.index(slot).load(gl.SliceLayout(1, OUT))
                out = out * gl.expand_dims(decay, 1)
                hopper.fence_async_shared()
                pending = hopper.warpgroup_mma(weight_slots.index(slot), right.index(stage), out, is_async=True)
                out = hopper.warpgroup_mma_wait(num_outstanding=0, deps=[pending])
                hopper.mbarrier.arrive(received.index(slot), count=1)
                hopper.mbarrier.arrive(empty.index(stage), count=1)
                num_done += 1
                num_sent += 1
            slot = num_sent % SLOTS
            hopper.mbarrier.wait(sent.index(slot), num_sent // SLOTS % 2)
            divisor = decay_slots.index(slot).load(gl.SliceLayout(1, OUT))
            hopper.mbarrier.arrive(received.index(slot), count=1)
            num_sent += 1
            first_packed = tile * 64
            if request_splits == 1:
                _write_half(out_ptr, request, queries, out, divisor, row_scale, first_packed, HALF, HEADS, HALF, OUT)
            else:
                at = split.to(gl.int64)
                _write_half(partial_ptr, at, queries, out, divisor, row_scale, first_packed, HALF, HEADS, HALF, OUT)
# fmt: on
