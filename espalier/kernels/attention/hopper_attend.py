"""Attention on Hopper, the warps that attend: four of them to 64 packed queries, block of rows after block.

While the tensor cores take a block's weights to its values, and the next block's keys, the warps work out the next
block's weights (Shah et al. 2024, FlashAttention-3, arXiv:2407.08608, section 3.2); the groups of a block of the grid
wait for nothing but rows, so that one group's exponentials meet another's products.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from espalier.kernels.attention.hopper_load import shallowest_of, span
from espalier.kernels.attention.work_items import block_at, unit_of, work_at
from espalier.kernels.runtime.launch import gluon_kernel

if TYPE_CHECKING:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper


# Arguments of kernels stand in groups, which a line each would hide.
# fmt: off
@gluon_kernel
def _mask_committed(
    scores, at, position, end, first, WINDOW: gl.constexpr, BLOCK_N: gl.constexpr, SCORES: gl.constexpr,
):
    held = at + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SCORES))
    seen = gl.expand_dims((held >= first) & (held < end), 0)
    if WINDOW > 0:
        seen = seen & (gl.expand_dims(position, 1) - gl.expand_dims(held, 0) < WINDOW)
    return gl.where(seen, scores, float("-inf"))


@gluon_kernel
def _mask_chain(scores, at, query, high, WINDOW: gl.constexpr, BLOCK_N: gl.constexpr, SCORES: gl.constexpr):
    node = gl.expand_dims(at + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SCORES)), 0)
    seen = (node < high) & (node <= gl.expand_dims(query, 1))
    if WINDOW > 0:
        seen = seen & (gl.expand_dims(query, 1) - node < WINDOW)
    return gl.where(seen, scores, float("-inf"))


@gluon_kernel
def _mask_words(
    scores, at, query, asked, position, row_positions, ancestor_bits, high,
    WINDOW: gl.constexpr, BLOCK_N: gl.constexpr, SCORES: gl.constexpr,
):
    row_position_ptr, row_position_r = row_positions
    word_ptr, word_q = ancestor_bits
    node = at + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SCORES))
    word = gl.load(word_ptr + query.to(gl.int64) * word_q + at // 64, mask=asked, other=0)
    bit = (gl.expand_dims(word, 1) >> gl.expand_dims((node % 64).to(gl.int64), 0)) & 1
    seen = gl.expand_dims(node < high, 0) & (bit != 0)
    if WINDOW > 0:
        row_position = gl.load(row_position_ptr + node.to(gl.int64) * row_position_r, mask=node < high, other=0)
        seen = seen & (gl.expand_dims(position, 1) - gl.expand_dims(row_position.to(gl.int32), 0) < WINDOW)
    return gl.where(seen, scores, float("-inf"))


@gluon_kernel
def _mask(
    scores, t, query, asked, position, row_positions, ancestor_bits, extent,
    NODES: gl.constexpr, WINDOW: gl.constexpr, BLOCK_N: gl.constexpr, SCORES: gl.constexpr,
):
    """Scores of the t-th block, -inf where a query does not see a row."""
    begin, end, first, committed, lower, whole, chain, low, high = extent
    if t < committed:
        if t >= whole:
            at = begin + block_at(t, lower, whole) * BLOCK_N
            scores = _mask_committed(scores, at, position, end, first, WINDOW, BLOCK_N, SCORES)
    elif t >= chain:
        node = low + (t - committed) * BLOCK_N
        if NODES == 0:
            scores = gl.full_like(scores, float("-inf"))
        if NODES == 1:
            scores = _mask_chain(scores, node, query, high, WINDOW, BLOCK_N, SCORES)
        if NODES == 2:
            scores = _mask_words(
                scores, node, query, asked, position, row_positions, ancestor_bits, high, WINDOW, BLOCK_N, SCORES
            )
    return scores


@gluon_kernel
def _weigh(scores, scale, top, total):
    """A running softmax in base 2 (Milakov and Gimelshein 2018): weights, and what earlier results decay by."""
    higher = gl.maximum(top, gl.max(scores, 1))
    # Where nothing was seen yet all are -inf, and a difference would be NaN.
    level = gl.where(higher == float("-inf"), 0.0, higher * scale)
    weights = gl.exp2(gl.fma(scores, scale, gl.expand_dims(-level, 1)))
    decay = gl.exp2(gl.fma(top, scale, -level))
    return weights, higher, gl.fma(total, decay, gl.sum(weights, 1)), decay


@gluon_kernel
def _score(q, k_stage, none):
    """Ask the tensor cores for the scores of a block; written by other threads, its rows pass a fence first."""
    hopper.fence_async_shared()
    return hopper.warpgroup_mma(q, k_stage.permute((1, 0)), none, use_acc=False, is_async=True)


@gluon_kernel
def _attend_blocks(
    since, until, blocks, done, weights, out, top, total, q, stages, scale,
    query, asked, position, row_positions, ancestor_bits, extent,
    MASKED: gl.constexpr, WINDOW: gl.constexpr, NODES: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, SCORES: gl.constexpr, OUT: gl.constexpr,
):
    """Work out the weights of a unit's blocks since .. until, of `blocks`, and take in those of the block in front."""
    k_stages, v_stages, full, empty = stages
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    none = gl.full([64, BLOCK_N], 0.0, gl.float32, layout=SCORES)
    for t in range(since, until):
        coming = _score(q, k_stages.index((done + 1) % STAGES), none)
        under_way = hopper.warpgroup_mma(weights, v_stages.index(done % STAGES), out, is_async=True)
        scores = hopper.warpgroup_mma_wait(num_outstanding=1, deps=[coming])
        if MASKED:
            scores = _mask(
                scores, t, query, asked, position, row_positions, ancestor_bits, extent, NODES, WINDOW, BLOCK_N, SCORES
            )
        exact, top, total, decay = _weigh(scores, scale, top, total)
        weights = gl.convert_layout(exact.to(q.dtype), WEIGHTS)
        # This wait stands between the weights and the next: ptxas would move the next one up before them, and nothing
        # would overlap.
        hopper.mbarrier.wait(full.index((done + 2) % STAGES), (done + 2) // STAGES % 2, pred=t + 1 < blocks)
        out = hopper.warpgroup_mma_wait(num_outstanding=0, deps=[under_way])
        hopper.mbarrier.arrive(empty.index(done % STAGES), count=1)
        out = out * gl.expand_dims(gl.convert_layout(decay, gl.SliceLayout(1, OUT)), 1)
        done += 1
    return done, weights, out, top, total


@gluon_kernel
def _attend_unit(
    q, stages, done, whole, blocks, scale, query, asked, position, row_positions, ancestor_bits, extent,
    SIZE: gl.constexpr, WINDOW: gl.constexpr, NODES: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, SCORES: gl.constexpr, OUT: gl.constexpr,
):
    """Out [64, SIZE], top and total of a unit, whose first block is the `done`-th of all; `whole` of its blocks are
    seen whole, and come first."""
    k_stages, v_stages, full, empty = stages
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    top = gl.full([64], float("-inf"), gl.float32, layout=gl.SliceLayout(1, SCORES))
    total = gl.full([64], 0.0, gl.float32, layout=gl.SliceLayout(1, SCORES))
    out = gl.full([64, SIZE], 0.0, gl.float32, layout=OUT)
    none = gl.full([64, BLOCK_N], 0.0, gl.float32, layout=SCORES)
    hopper.mbarrier.wait(full.index(done % STAGES), done // STAGES % 2)
    scores = _score(q, k_stages.index(done % STAGES), none)
    scores = hopper.warpgroup_mma_wait(num_outstanding=0, deps=[scores])
    scores = _mask(
        scores, 0, query, asked, position, row_positions, ancestor_bits, extent, NODES, WINDOW, BLOCK_N, SCORES
    )
    exact, top, total, _decay = _weigh(scores, scale, top, total)
    weights = gl.convert_layout(exact.to(q.dtype), WEIGHTS)
    hopper.mbarrier.wait(full.index((done + 1) % STAGES), (done + 1) // STAGES % 2, pred=blocks > 1)
    masked = gl.maximum(whole, 1)
    if WINDOW == 0:
        # Most blocks: a loop without so much as the question is a fiftieth faster.
        done, weights, out, top, total = _attend_blocks(
            1, masked, blocks, done, weights, out, top, total, q, stages, scale, query, asked, position, row_positions,
            ancestor_bits, extent, False, WINDOW, NODES, BLOCK_N, STAGES, SCORES, OUT,
        )
    done, weights, out, top, total = _attend_blocks(
        masked, blocks, blocks, done, weights, out, top, total, q, stages, scale,
        query, asked, position, row_positions, ancestor_bits, extent, True, WINDOW, NODES, BLOCK_N, STAGES, SCORES, OUT,
    )
    under_way = hopper.warpgroup_mma(weights, v_stages.index(done % STAGES), out, is_async=True)
    out = hopper.warpgroup_mma_wait(num_outstanding=0, deps=[under_way])
    hopper.mbarrier.arrive(empty.index(done % STAGES), count=1)
    return out, top, total


@gluon_kernel
def _write(
    out_ptr, lse_ptr, base, queries, out, lse, packed, head,
    KV_HEADS: gl.constexpr, GROUPS: gl.constexpr, SIZE: gl.constexpr, OUT: gl.constexpr,
):
    """Results of packed queries from `packed` on, to rows of [.., queries, heads, SIZE] and [.., queries, heads]."""
    at = packed + gl.arange(0, 64, layout=gl.SliceLayout(1, OUT))
    row = (base * queries + at // GROUPS) * (KV_HEADS * GROUPS) + head * GROUPS + at % GROUPS
    size = gl.expand_dims(gl.arange(0, SIZE, layout=gl.SliceLayout(0, OUT)), 0)
    asked = at // GROUPS < queries
    to = out_ptr + (gl.expand_dims(row, 1) * SIZE + size)
    gl.store(to, out.to(out_ptr.dtype.element_ty), mask=gl.expand_dims(asked, 1))
    gl.store(lse_ptr + row, gl.convert_layout(lse, gl.SliceLayout(1, OUT)), mask=asked)


@gluon_kernel
def _read_queries(
    q_shared, asks, request, head, packed, queries, GROUPS: gl.constexpr, SIZE: gl.constexpr, SCORES: gl.constexpr,
):
    """A tile's queries, to registers: what shared memory can deliver is wanted for rows."""
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [256 // SIZE, SIZE // 8], [4, 1], [1, 0])
    q_ptr, q_b, q_q, q_h = asks
    at = packed + gl.arange(0, 64, layout=gl.SliceLayout(1, LOAD))
    query = at // GROUPS
    row = request * q_b + query.to(gl.int64) * q_q + (head * GROUPS + at % GROUPS) * q_h
    offsets = gl.expand_dims(row, 1) + gl.expand_dims(gl.arange(0, SIZE, layout=gl.SliceLayout(0, LOAD)), 0)
    q_shared.store(gl.load(q_ptr + offsets, mask=gl.expand_dims(query < queries, 1), other=0.0))
    return q_shared.load(gl.DotOperandLayout(operand_index=0, parent=SCORES, k_width=2))


@gluon_kernel
def attend_units(
    q_shared, stages, plan, asks, positions, row_positions, ancestor_bits, results, scale,
    GROUP: gl.constexpr, KV_HEADS: gl.constexpr, GROUPS: gl.constexpr, SIZE: gl.constexpr,
    WINDOW: gl.constexpr, NODES: gl.constexpr, DIRECT: gl.constexpr, WIDE: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):
    """What the GROUP-th four attending warps do, for all units of a block.  Groups of arguments:
    kernels/attention/hopper.py."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZE, 16])
    item_ptr, start_ptr, items, tiles, queries, rows, first = plan
    position_ptr, position_b, position_q = positions
    row_position_ptr, row_position_b, row_position_r = row_positions
    word_ptr, word_b, word_q = ancestor_bits
    out_ptr, lse_ptr, part_ptr, part_lse_ptr = results
    units = items * tiles * KV_HEADS
    backwards = 0
    done = 0
    for base in range(0, units, gl.num_programs(0)):
        unit = unit_of(base, backwards)
        backwards = 1 - backwards
        if unit < units:
            item, request, begin, end, siblings, is_last, tile, head = work_at(
                unit, item_ptr, start_ptr, items, tiles, KV_HEADS, WIDE
            )
            packed = tile * BLOCK_M + GROUP * 64
            q = _read_queries(q_shared, asks, request, head, packed, queries, GROUPS, SIZE, SCORES)
            query = (packed + gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))) // GROUPS
            asked = query < queries
            position = query
            shallowest = 0
            if WINDOW > 0:
                at_request = position_ptr + request * position_b
                position = gl.load(at_request + query.to(gl.int64) * position_q, mask=asked, other=0x7FFFFFFF)
                position = position.to(gl.int32)
                shallowest = shallowest_of(
                    at_request, position_q, tile, queries, GROUPS, BLOCK_M, gl.SliceLayout(1, SCORES)
                )
            begin, committed, lower, whole, low, high, blocks = span(
                begin, end, first, is_last, tile, rows, shallowest, GROUPS, NODES, WINDOW, BLOCK_M, BLOCK_N
            )
            # Nothing to mask in a chain's blocks before the first query either.
            chain = committed
            if NODES == 1 and WINDOW == 0:
                chain = committed + gl.maximum(packed // GROUPS + 1 - low, 0) // BLOCK_N
            out, top, total = _attend_unit(
                q, stages, done, whole, blocks, scale, query, asked, position,
                (row_position_ptr + request * row_position_b, row_position_r), (word_ptr + request * word_b, word_q),
                (begin, end, first, committed, lower, whole, chain, low, high),
                SIZE, WINDOW, NODES, BLOCK_N, STAGES, SCORES, OUT,
            )
            done += blocks
            divisor = gl.where(total == 0.0, 1.0, total)
            out = out / gl.expand_dims(gl.convert_layout(divisor, gl.SliceLayout(1, OUT)), 1)
            lse = gl.where(total == 0.0, float("-inf"), gl.fma(top, scale, gl.log2(divisor)))
            if DIRECT and siblings == 1:
                lse = lse * 0.6931471805599453
                _write(out_ptr, lse_ptr, request, queries, out, lse, packed, head, KV_HEADS, GROUPS, SIZE, OUT)
            else:
                at = item.to(gl.int64)
                _write(part_ptr, part_lse_ptr, at, queries, out, lse, packed, head, KV_HEADS, GROUPS, SIZE, OUT)
# fmt: on
