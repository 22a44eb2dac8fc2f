"""Merges of attention results by their log-sum-exps (Ye et al. 2025, FlashInfer, section 2.2).

`merge_results` joins the results over two disjoint sets of keys.  `merge_splits` joins the splits of each request, in
position order.  The order of the sums depends only on the request's own splits, not on the batch.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.attention.attention_blocks import sink_share
from espalier.kernels.ops.attention import OutAndLse, PartialResults
from espalier.kernels.ops.selection import KVSplits
from espalier.kernels.runtime.jit import kernel
from espalier.kernels.runtime.launch import acc_dtype, chip, next_power_of_2, require
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger, pdl_trigger_and_wait, pdl_wait


@kernel
def _merge_two_results_kernel(
    first_out_ptr, second_out_ptr, first_lse_ptr, second_lse_ptr, sink_ptr, out_ptr, rows,
    HEADS: tl.constexpr, V_SIZE: tl.constexpr, ACC_DTYPE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_V: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """Merges two results.  One program merges BLOCK rows.  A row is one head of one query."""
    pdl_trigger_and_wait(USE_PDL)
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row_exists = row < rows
    a_lse = tl.load(first_lse_ptr + row, mask=row_exists, other=float("-inf")).to(ACC_DTYPE)
    b_lse = tl.load(second_lse_ptr + row, mask=row_exists, other=float("-inf")).to(ACC_DTYPE)
    max_lse = tl.maximum(a_lse, b_lse)
    sink = max_lse
    if sink_ptr is not None:
        sink = tl.load(sink_ptr + row % HEADS, mask=row_exists, other=float("-inf")).to(ACC_DTYPE)
        max_lse = tl.maximum(max_lse, sink)
    shift = tl.where(max_lse == float("-inf"), 0.0, max_lse)
    a_weight, b_weight = tl.exp(a_lse - shift), tl.exp(b_lse - shift)
    total_weight = a_weight + b_weight
    if sink_ptr is not None:
        total_weight += tl.exp(sink - shift)
    total_weight = tl.where(total_weight == 0.0, 1.0, total_weight)
    column = tl.arange(0, BLOCK_V)
    offsets = row[:, None] * V_SIZE + column[None, :]
    mask = row_exists[:, None] & (column < V_SIZE)[None, :]
    out = tl.load(first_out_ptr + offsets, mask=mask, other=0.0).to(ACC_DTYPE) * (a_weight / total_weight)[:, None]
    out += tl.load(second_out_ptr + offsets, mask=mask, other=0.0).to(ACC_DTYPE) * (b_weight / total_weight)[:, None]
    tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=mask)


def merge_results(first_result: OutAndLse, second_result: OutAndLse, sink: Tensor | None = None) -> Tensor:
    """Merges attention results over two sets of keys, see ops/attention.py.  sink: [heads] or None.
    Equals the reference up to one rounding.  Raises EspalierError if shapes do not agree."""
    shape = tuple(first_result[0].shape)
    heads, v_size = shape[-2:]
    require("merge's second part", second_result[0], shape, None, first_result[0])
    for name, (_, lse) in (("first", first_result), ("second", second_result)):
        require(f"merge's {name} lse", lse, shape[:-1], None, first_result[0])
    if sink is not None:
        require("merge's sink", sink, (heads,), None, first_result[0])
    out = torch.empty(shape, dtype=first_result[0].dtype, device=first_result[0].device)
    rows, block_v = first_result[1].numel(), next_power_of_2(v_size)
    if out.numel():
        block = max(1, 1024 // block_v)
        _merge_two_results_kernel[(-(-rows // block),)](
            *(first_result[0].contiguous(), second_result[0].contiguous(), first_result[1].contiguous()),
            *(second_result[1].contiguous(), sink, out, rows),
            HEADS=heads, V_SIZE=v_size, ACC_DTYPE=acc_dtype(first_result[1].dtype), BLOCK=block, BLOCK_V=block_v,
            num_warps=4, **pdl_arguments(chip(out)),
        )  # fmt: skip
    return out


# Floats that one program (one warp) loads at once for one pair (query, head).
VALUES_PER_LOAD = 4096
# A request with few splits is merged in a small block of splits, so that a program can merge several pairs at once.
# The small block has room for KVSplitPolicy.num_splits splits, rounded up to a power of two, but at least for
# MIN_SMALL_BLOCK_SPLITS.  Requests with more splits use a large block.  If the small block would need room for more
# than MAX_SMALL_BLOCK_SPLITS splits, all requests use the large block.
MIN_SMALL_BLOCK_SPLITS, MAX_SMALL_BLOCK_SPLITS = 4, 8
# The number of splits that a program merges at once, over all its pairs.
SPLITS_PER_PROGRAM = 16
# The fewest and the most output columns of a (query, head) pair that a program merges.  Several programs share a pair
# with more columns or splits: latent attention has up to 128 splits of 512 columns.
MIN_BLOCK_V, MAX_BLOCK_V = 32, 128
# Programs of the persistent grid per multiprocessor.  Four times as many would fit, but starting a program takes time,
# even if the program has no work (docs/log.md).
PROGRAMS_PER_PROCESSOR = 8


@kernel
def _merge_query_head_pairs(
    partial_ptr, partial_lse_ptr, sink_ptr, out_ptr, lse_ptr, start, count, pair, pairs_per_request,
    HEADS: tl.constexpr, V_SIZE: tl.constexpr, HAS_SINK: tl.constexpr,
    PAIRS: tl.constexpr, BLOCK_SPLITS: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Merge PAIRS pairs (query, head) of one request, and write out and lse.

    pair: the first pair.  start: the request's first split.  count: the request's number of splits, at most
    BLOCK_SPLITS; 0 if there is nothing to merge.  Offsets have 32 bits, which the launcher checks."""
    pairs = tl.arange(0, PAIRS)
    index = tl.arange(0, BLOCK_SPLITS)
    column = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    first_row = start * pairs_per_request + pair % pairs_per_request
    row = index[None, :] * pairs_per_request + pairs[:, None]
    exists = (index < count)[None, :]
    # partial_out is loaded before the log-sum-exps, so that both loads overlap.
    partial_out = tl.load(
        partial_ptr + first_row * V_SIZE + (row * V_SIZE)[:, :, None] + column[None, None, :],
        mask=exists[:, :, None] & (column < V_SIZE)[None, None, :], other=0.0,
    )  # fmt: skip
    partial_lse = tl.load(partial_lse_ptr + first_row + row, mask=exists, other=float("-inf"))
    max_lse = tl.max(partial_lse, 1)
    shift = tl.where(max_lse == float("-inf"), 0.0, max_lse)
    weight = tl.exp2(partial_lse - shift[:, None])
    total_weight = tl.sum(weight, 1)
    divisor = tl.where(total_weight == 0.0, 1.0, total_weight)
    lse = tl.where(total_weight == 0.0, float("-inf"), shift + tl.log2(divisor))
    out = tl.sum(weight[:, :, None] * partial_out, 1) / divisor[:, None]
    if HAS_SINK:
        out = out * sink_share(lse, sink_ptr, (pair + pairs) % HEADS)[:, None]
    has_splits = count > 0
    offsets = pair * V_SIZE + (pairs * V_SIZE)[:, None] + column[None, :]
    tl.store(out_ptr + offsets, out, mask=has_splits & (column < V_SIZE)[None, :])
    tl.store(lse_ptr + pair + pairs, lse * 0.6931471805599453, mask=has_splits & (tl.program_id(1) == 0))


@kernel(do_not_specialize=["batch"])
def _merge_splits_kernel(
    partial_ptr, partial_lse_ptr, split_starts_ptr, sink_ptr, out_ptr, lse_ptr, batch, pairs_per_request,
    HEADS: tl.constexpr, V_SIZE: tl.constexpr, HAS_SINK: tl.constexpr, PAIRS: tl.constexpr,
    BLOCK_V: tl.constexpr, SMALL_BLOCK_SPLITS: tl.constexpr, BLOCK_SPLITS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Merge pairs (query, head): PAIRS at once for a request with up to SMALL_BLOCK_SPLITS splits, else one by one."""
    # split_starts may be read before the wait: it was ready before the attention kernel let this kernel start.
    num_splits = tl.load(split_starts_ptr + batch)
    pdl_wait(USE_PDL)
    pdl_trigger(USE_PDL)
    # In most batches every request has one split, so there is nothing to merge.
    num_pairs = tl.where(num_splits > batch, batch * pairs_per_request, 0)
    for pair in range(tl.program_id(0) * PAIRS, num_pairs, tl.num_programs(0) * PAIRS):
        request = pair // pairs_per_request
        start = tl.load(split_starts_ptr + request)
        count = tl.load(split_starts_ptr + batch + 1 + request)
        count = tl.where(count > 1, count, 0)
        if SMALL_BLOCK_SPLITS == BLOCK_SPLITS:
            # Without a branch on `count`, addresses are computed while the count is loaded.
            _merge_query_head_pairs(
                partial_ptr, partial_lse_ptr, sink_ptr, out_ptr, lse_ptr, start, count, pair, pairs_per_request,
                HEADS, V_SIZE, HAS_SINK, PAIRS, BLOCK_SPLITS, BLOCK_V,
            )  # fmt: skip
        elif count <= SMALL_BLOCK_SPLITS:
            _merge_query_head_pairs(
                partial_ptr, partial_lse_ptr, sink_ptr, out_ptr, lse_ptr, start, count, pair, pairs_per_request,
                HEADS, V_SIZE, HAS_SINK, PAIRS, SMALL_BLOCK_SPLITS, BLOCK_V,
            )  # fmt: skip
        else:
            for i in range(PAIRS):
                _merge_query_head_pairs(
                    partial_ptr, partial_lse_ptr, sink_ptr, out_ptr, lse_ptr, start, count, pair + i,
                    pairs_per_request, HEADS, V_SIZE, HAS_SINK, 1, BLOCK_SPLITS, BLOCK_V,
                )  # fmt: skip


def merge_splits(
    partial_results: PartialResults, splits: KVSplits, out: Tensor, lse: Tensor, sink: Tensor | None = None
) -> None:
    """The launcher of ops/attention.py:merge_splits.  out, lse: written for requests with splits."""
    batch, queries, heads, v_size = out.shape
    capacity = splits.table.shape[0]
    require("merge_splits' partial out", partial_results.out, (capacity, queries, heads, v_size), torch.float32, out)
    require("merge_splits' partial lse", partial_results.lse, (capacity, queries, heads), torch.float32, out)
    require("merge_splits' lse", lse, (batch, queries, heads), torch.float32, out)
    if sink is not None:
        require("merge_splits' sink", sink, (heads,), None, out)
    pairs_per_request = queries * heads
    if partial_results.out.numel() >= 2**31:
        raise EspalierError(
            f"merge_splits: partial results of {list(partial_results.out.shape)} need 64-bit offsets; use fewer splits "
            "(KVSplitPolicy.choose does)"
        )
    if not out.numel():
        return
    block_splits = next_power_of_2(splits.policy.max_splits)
    small = min(max(next_power_of_2(splits.policy.num_splits), MIN_SMALL_BLOCK_SPLITS), block_splits)
    small = small if small <= MAX_SMALL_BLOCK_SPLITS else block_splits
    block_v = max(MIN_BLOCK_V, min(next_power_of_2(v_size), MAX_BLOCK_V, VALUES_PER_LOAD // block_splits))
    num_column_blocks = -(-v_size // block_v)
    # A power of two that divides the heads, so that pairs merged at once belong to one request.  The number must not
    # depend on the batch, because it changes the order of a thread's sums, and thereby the bits.
    pairs = min(max(SPLITS_PER_PROGRAM // small, 1), heads & -heads) if queries > 1 else 1
    max_programs = chip(out).processors * PROGRAMS_PER_PROCESSOR // num_column_blocks
    num_programs = min(batch * pairs_per_request // pairs, max_programs)
    # With fused multiply-adds the compiler could round pairs differently, so the bits of a query would depend on its
    # place in the batch.
    _merge_splits_kernel[(num_programs, num_column_blocks)](
        *(partial_results.out, partial_results.lse, splits.starts, out if sink is None else sink),
        *(out, lse, batch, pairs_per_request),
        HEADS=heads, V_SIZE=v_size, HAS_SINK=sink is not None, PAIRS=pairs, BLOCK_V=block_v, SMALL_BLOCK_SPLITS=small,
        BLOCK_SPLITS=block_splits, num_warps=1, enable_fp_fusion=False, **pdl_arguments(chip(out)),
    )  # fmt: skip
