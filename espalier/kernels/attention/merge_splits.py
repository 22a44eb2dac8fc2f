"""Merges the partial attention results of each request's splits by their log-sum-exps, in position order.

The order of the sums depends only on the request's own splits, not on the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from espalier.kernels.attention.attention_blocks import _share_beside_sink
from espalier.kernels.attention.kv_splits import KVSplits
from espalier.kernels.attention.masked_attention import with_sink
from espalier.kernels.runtime.launch import chip, kernel, power_of_two, require, unspecialised
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger, pdl_wait

if TYPE_CHECKING:
    import triton.language as tl

# Floats that one program (one warp) loads at once: all splits of a (query, head) pair, or of two if both fit.
PROGRAM_VALUES = 4096
# Values of a pair that one program merges.  Wider values, or those of more splits, are divided among programs: latent
# attention has few pairs, but up to 128 splits of 512 values.
MIN_PART_SIZE, MAX_PART_SIZE = 32, 128
# Size of the persistent grid.  Four times as many programs would fit, but each costs time to start, even if there is
# nothing to merge (docs/log.md).
PROGRAMS_PER_PROCESSOR = 8


@dataclass(frozen=True)
class PartialResults:
    """Attention results of each split: out [B * max_splits, Q, heads, v_size] and lse [B * max_splits, Q, heads].

    Both are float32; lse is base 2.  Requests with a single split are not written here.
    """

    out: Tensor
    lse: Tensor

    @classmethod
    def of(cls, splits: KVSplits, queries: int, heads: int, v_size: int) -> PartialResults:
        shape = (splits.table.shape[0], queries, heads)
        device = splits.table.device
        return cls(torch.empty(*shape, v_size, device=device), torch.empty(shape, device=device))


@kernel
def _load_partials(
    partial_ptr, partial_lse_ptr, start_ptr, pair, num_pairs, pairs_per_request,
    V_SIZE: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
):  # fmt: skip
    """(partial_out, partial_lse, count) of a (query, head) pair.  count: of splits, 0 if there is nothing to merge."""
    request = tl.minimum(pair, num_pairs - 1) // pairs_per_request
    start = tl.load(start_ptr + request)
    count = tl.load(start_ptr + request + 1) - start
    count = tl.where((pair < num_pairs) & (count > 1), count, 0)
    first_row = start.to(tl.int64) * pairs_per_request + pair % pairs_per_request
    index = tl.arange(0, BLOCK_SPLITS)
    size = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    # Loaded before the log-sum-exps, so that both loads overlap.
    mask = (index < count)[:, None] & (size < V_SIZE)[None, :]
    partial_out = tl.load(
        partial_ptr + (first_row + index.to(tl.int64) * pairs_per_request)[:, None] * V_SIZE + size[None, :],
        mask=mask, other=0.0,
    )  # fmt: skip
    partial_lse = tl.load(
        partial_lse_ptr + first_row + index * pairs_per_request, mask=index < count, other=float("-inf")
    )
    return partial_out, partial_lse, count


@kernel
def _merge_pair(
    loaded, sink_ptr, out_ptr, lse_ptr, pair, HEADS: tl.constexpr, V_SIZE: tl.constexpr, SINK: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Merge the partial results of a (query, head) pair and write out and lse."""
    partial_out, partial_lse, count = loaded
    size = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    max_lse = tl.max(partial_lse, 0)
    shift = tl.where(max_lse == float("-inf"), 0.0, max_lse)
    weight = tl.exp2(partial_lse - shift)
    total_weight = tl.sum(weight, 0)
    divisor = tl.where(total_weight == 0.0, 1.0, total_weight)
    merged = count > 0
    lse = tl.where(total_weight == 0.0, float("-inf"), shift + tl.log2(divisor))
    out = tl.sum(weight[:, None] * partial_out, 0) / divisor
    if SINK:
        out = out * _share_beside_sink(lse, sink_ptr, pair % HEADS)
    tl.store(out_ptr + tl.cast(pair, tl.int64) * V_SIZE + size, out, mask=merged & (size < V_SIZE))
    tl.store(lse_ptr + pair, lse * 0.6931471805599453, mask=merged & (tl.program_id(1) == 0))


@unspecialised("batch")
@kernel
def _merge_splits_kernel(
    partial_ptr, partial_lse_ptr, start_ptr, sink_ptr, out_ptr, lse_ptr, batch, pairs_per_request,
    HEADS: tl.constexpr, V_SIZE: tl.constexpr, SINK: tl.constexpr, TWO_PAIRS: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_SPLITS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    # Before the wait: attention waited for the splits before it let this kernel start, or it has ended.
    num_splits = tl.load(start_ptr + batch)
    pdl_wait(DEPENDENT)
    pdl_trigger(DEPENDENT)
    # In most batches every request has one split: nothing to merge.
    num_pairs = tl.where(num_splits > batch, batch * pairs_per_request, 0)
    num_programs = tl.num_programs(0)
    for pair in range(tl.program_id(0), num_pairs, 2 * num_programs if TWO_PAIRS else num_programs):
        first = _load_partials(
            partial_ptr, partial_lse_ptr, start_ptr, pair, num_pairs, pairs_per_request, V_SIZE, BLOCK_V, BLOCK_SPLITS,
        )  # fmt: skip
        if TWO_PAIRS:
            # Loaded before the first pair is written, so that its load overlaps with that work.
            second = _load_partials(
                partial_ptr, partial_lse_ptr, start_ptr, pair + num_programs, num_pairs, pairs_per_request,
                V_SIZE, BLOCK_V, BLOCK_SPLITS,
            )  # fmt: skip
        _merge_pair(first, sink_ptr, out_ptr, lse_ptr, pair, HEADS, V_SIZE, SINK, BLOCK_V)
        if TWO_PAIRS:
            _merge_pair(second, sink_ptr, out_ptr, lse_ptr, pair + num_programs, HEADS, V_SIZE, SINK, BLOCK_V)


def merge_splits_triton(
    partials: PartialResults, splits: KVSplits, out: Tensor, lse: Tensor, sink: Tensor | None = None
) -> None:
    """Write out [B, Q, heads, v_size] and lse [B, Q, heads] (float32, natural log) of requests with several splits.

    sink: [heads], one extra logit per head, with weight but without a value; lse is without it.  A query that sees no
    rows gets zeros and lse -inf.
    """
    batch, queries, heads, v_size = out.shape
    capacity = splits.table.shape[0]
    require("merge_splits' partial out", partials.out, (capacity, queries, heads, v_size), torch.float32, out)
    require("merge_splits' partial lse", partials.lse, (capacity, queries, heads), torch.float32, out)
    require("merge_splits' lse", lse, (batch, queries, heads), torch.float32, out)
    if sink is not None:
        require("merge_splits' sink", sink, (heads,), None, out)
    pairs_per_request = queries * heads
    if not out.numel():
        return
    block_splits = power_of_two(splits.policy.max_splits)
    block_v = max(MIN_PART_SIZE, min(power_of_two(v_size), MAX_PART_SIZE, PROGRAM_VALUES // block_splits))
    num_parts = -(-v_size // block_v)
    num_programs = min(batch * pairs_per_request, chip(out).processors * PROGRAMS_PER_PROCESSOR // num_parts)
    _merge_splits_kernel[(num_programs, num_parts)](
        *(partials.out, partials.lse, splits.starts, out if sink is None else sink, out, lse, batch, pairs_per_request),
        HEADS=heads,
        V_SIZE=v_size,
        SINK=sink is not None,
        TWO_PAIRS=2 * block_splits * block_v <= PROGRAM_VALUES,
        BLOCK_V=block_v,
        BLOCK_SPLITS=block_splits,
        num_warps=1,
        # The batch decides which pair of two is the first.  The compiler could fuse their operations differently: a
        # request's bits would depend on the batch.
        enable_fp_fusion=False,
        **pdl_arguments(chip(out)),
    )


def merge_splits_reference(
    partials: PartialResults, splits: KVSplits, out: Tensor, lse: Tensor, sink: Tensor | None = None
) -> None:
    starts = splits.starts.tolist()
    for request in range(out.shape[0]):
        of_request = slice(starts[request], starts[request + 1])
        if starts[request + 1] - starts[request] == 1:
            continue
        partial_lse = partials.lse[of_request] * torch.tensor(2.0).log()
        total_weight = torch.logsumexp(partial_lse, 0)
        shift = total_weight.masked_fill(total_weight == -torch.inf, 0)
        merged = (torch.exp(partial_lse - shift)[..., None] * partials.out[of_request]).sum(0)
        out[request] = merged if sink is None else with_sink(merged, total_weight, sink)
        lse[request] = total_weight
