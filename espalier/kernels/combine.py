"""Partial attention results, one a range, merged by their log-sum-exps in position order.

The order is that of a request's ranges, which follow from its own rows: nothing here depends on the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from espalier.kernels.dependent import early, let_next_start, wait_for_previous
from espalier.kernels.launch import chip, kernel, power_of_two, require
from espalier.kernels.ranges import Ranges

if TYPE_CHECKING:
    import triton.language as tl

# Values that a block, which is one warp of one query's head, reads at once: of as many ranges as hold them.
STEP_VALUES = 4096
# Of a multiprocessor, which holds as many; they take turns where there is more to merge.
BLOCKS_AT_ONCE = 32


@dataclass(frozen=True)
class Partials:
    """Results that wait to be merged.  out: [items, Q, heads, v_size] float32; lse: [items, Q, heads] float32, base 2.

    Rows of requests that have one range are not written where such requests need no merging.
    """

    out: Tensor
    lse: Tensor

    @classmethod
    def of(cls, ranges: Ranges, queries: int, heads: int, v_size: int) -> Partials:
        shape = (ranges.items.shape[0], queries, heads)
        device = ranges.items.device
        return cls(torch.empty(*shape, v_size, device=device), torch.empty(shape, device=device))


def combine(partials: Partials, ranges: Ranges, out: Tensor, lse: Tensor, sink: Tensor | None = None) -> None:
    """Write out [B, Q, heads, v_size] and lse [B, Q, heads] (float32, natural log) of requests with several ranges.

    sink: [heads], an extra logit a head that takes weight and gives no value; with it requests of one range are merged
    too.  A query that sees nothing gives zeros.
    """
    (combine_triton if out.is_cuda else combine_reference)(partials, ranges, out, lse, sink)


@kernel
def _merge_pair(
    part_ptr, part_lse_ptr, start_ptr, sink_ptr, out_ptr, lse_ptr, request, pair, pairs,
    HEADS: tl.constexpr, V_SIZE: tl.constexpr, SINK: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_I: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Write what a request's query's head sees, where it lies in several ranges."""
    start = tl.load(start_ptr + request)
    count = tl.load(start_ptr + request + 1) - start
    if SINK or count > 1:
        first = start.to(tl.int64) * pairs + pair
        size = tl.arange(0, BLOCK_V)
        index = tl.arange(0, BLOCK_I)
        if STEP == BLOCK_I:
            # All at once: the results are on their way while their weights are worked out.
            mask = (index < count)[:, None] & (size < V_SIZE)[None, :]
            at = (first + index.to(tl.int64) * pairs)[:, None] * V_SIZE + size[None, :]
            part = tl.load(part_ptr + at, mask=mask, other=0.0)
        parts = tl.load(part_lse_ptr + first + index * pairs, mask=index < count, other=float("-inf"))
        top = tl.max(parts, 0)
        if SINK:
            sink = tl.load(sink_ptr + pair % HEADS).to(tl.float32) * 1.4426950408889634
            top = tl.maximum(top, sink)
        level = tl.where(top == float("-inf"), 0.0, top)
        total = tl.sum(tl.exp2(parts - level), 0)
        if SINK:
            total += tl.exp2(sink - level)
        if STEP == BLOCK_I:
            out = tl.sum(tl.exp2(parts - level)[:, None] * part, 0)
        else:
            out = tl.zeros([BLOCK_V], tl.float32)
            for at in tl.range(0, count, STEP):
                step = at + tl.arange(0, STEP)
                row = first + step.to(tl.int64) * pairs
                weight = tl.exp2(tl.load(part_lse_ptr + row, mask=step < count, other=float("-inf")) - level)
                mask = (step < count)[:, None] & (size < V_SIZE)[None, :]
                part = tl.load(part_ptr + row[:, None] * V_SIZE + size[None, :], mask=mask, other=0.0)
                out += tl.sum(weight[:, None] * part, 0)
        divisor = tl.where(total == 0.0, 1.0, total)
        row_out = request.to(tl.int64) * pairs + pair
        written = (out / divisor).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + row_out * V_SIZE + size, written, mask=size < V_SIZE)
        lse = tl.where(total == 0.0, float("-inf"), level + tl.log2(divisor))
        tl.store(lse_ptr + row_out, lse * 0.6931471805599453)


@kernel
def _combine_kernel(
    part_ptr,
    part_lse_ptr,
    start_ptr,
    sink_ptr,
    out_ptr,
    lse_ptr,
    batch,
    pairs,
    HEADS: tl.constexpr,
    V_SIZE: tl.constexpr,
    SINK: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_I: tl.constexpr,
    STEP: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_previous(DEPENDENT)
    let_next_start(DEPENDENT)
    todo = batch * pairs
    if not SINK:
        # Nothing to merge where every request has one range, which most batches of a long layout have.
        todo = tl.where(tl.load(start_ptr + batch) > batch, todo, 0)
    for at_pair in range(tl.program_id(0), todo, tl.num_programs(0)):
        _merge_pair(
            part_ptr, part_lse_ptr, start_ptr, sink_ptr, out_ptr, lse_ptr, at_pair // pairs, at_pair % pairs, pairs,
            HEADS, V_SIZE, SINK, BLOCK_V, BLOCK_I, STEP,
        )  # fmt: skip


def combine_triton(partials: Partials, ranges: Ranges, out: Tensor, lse: Tensor, sink: Tensor | None = None) -> None:
    batch, queries, heads, v_size = out.shape
    capacity = ranges.items.shape[0]
    require("combine's partials", partials.out, (capacity, queries, heads, v_size), torch.float32, out)
    require("combine's partial lse", partials.lse, (capacity, queries, heads), torch.float32, out)
    require("combine's lse", lse, (batch, queries, heads), torch.float32, out)
    if sink is not None:
        require("combine's sink", sink, (heads,), None, out)
    pairs = queries * heads
    if not out.numel():
        return
    width, ranges_held = max(32, power_of_two(v_size)), power_of_two(ranges.cut.most)
    blocks = min(batch * pairs, chip(out).processors * BLOCKS_AT_ONCE)
    _combine_kernel[(blocks,)](
        partials.out,
        partials.lse,
        ranges.starts,
        out if sink is None else sink,
        out,
        lse,
        batch,
        pairs,
        HEADS=heads,
        V_SIZE=v_size,
        SINK=sink is not None,
        BLOCK_V=width,
        BLOCK_I=ranges_held,
        STEP=min(STEP_VALUES // width, ranges_held),
        num_warps=1,
        **early(chip(out)),
    )


def combine_reference(partials: Partials, ranges: Ranges, out: Tensor, lse: Tensor, sink: Tensor | None = None) -> None:
    starts = ranges.starts.tolist()
    for request in range(out.shape[0]):
        mine = slice(starts[request], starts[request + 1])
        if sink is None and starts[request + 1] - starts[request] == 1:
            continue
        parts = partials.lse[mine] * torch.tensor(2.0).log()
        total = torch.logsumexp(parts, 0)
        if sink is not None:
            total = torch.logaddexp(total, sink.float())
        level = total.masked_fill(total == -torch.inf, 0)
        out[request] = (torch.exp(parts - level)[..., None] * partials.out[mine]).sum(0).to(out.dtype)
        lse[request] = total
