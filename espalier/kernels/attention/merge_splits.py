"""Partial attention results, one a range, merged by their log-sum-exps in position order.

The order is that of a request's splits, which follow from its own rows: nothing here depends on the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from espalier.kernels.attention.kv_splits import KVSplits
from espalier.kernels.runtime.launch import chip, kernel, power_of_two, require
from espalier.kernels.runtime.pdl import early, pdl_trigger, pdl_wait

if TYPE_CHECKING:
    import triton.language as tl

# Values that a block, which is one warp, reads at once: of as many splits of a query's head as hold them, and of two
# heads where they hold both.
STEP_VALUES = 4096
# Of a multiprocessor; they take turns where there is more to merge.  It could hold four times as many, but where there
# is nothing to merge each that is started costs (docs/log.md).
BLOCKS_AT_ONCE = 8


@dataclass(frozen=True)
class Partials:
    """Results that wait to be merged.  out: [items, Q, heads, v_size] float32; lse: [items, Q, heads] float32, base 2.

    Rows of requests that have one range are not written where such requests need no merging.
    """

    out: Tensor
    lse: Tensor

    @classmethod
    def of(cls, splits: KVSplits, queries: int, heads: int, v_size: int) -> Partials:
        shape = (splits.items.shape[0], queries, heads)
        device = splits.items.device
        return cls(torch.empty(*shape, v_size, device=device), torch.empty(shape, device=device))


def combine(partials: Partials, splits: KVSplits, out: Tensor, lse: Tensor, sink: Tensor | None = None) -> None:
    """Write out [B, Q, heads, v_size] and lse [B, Q, heads] (float32, natural log) of requests with several splits.

    sink: [heads], an extra logit a head that takes weight and gives no value; with it requests of one range are merged
    too.  A query that sees nothing gives zeros.
    """
    (merge_splits_triton if out.is_cuda else merge_splits_reference)(partials, splits, out, lse, sink)


@kernel
def _ask(
    part_ptr, part_lse_ptr, start_ptr, at_pair, todo, pairs,
    V_SIZE: tl.constexpr, SINK: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_I: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """(results of splits, their log-sum-exps, the first's place, how many there are), on their way; none where a
    request's query's head needs no merging."""
    request = tl.minimum(at_pair, todo - 1) // pairs
    start = tl.load(start_ptr + request)
    count = tl.load(start_ptr + request + 1) - start
    count = tl.where((at_pair < todo) & (SINK or count > 1), count, 0)
    first = start.to(tl.int64) * pairs + at_pair % pairs
    step = tl.arange(0, STEP)
    size = tl.arange(0, BLOCK_V)
    # The results before it is known what they weigh.
    mask = (step < count)[:, None] & (size < V_SIZE)[None, :]
    part = tl.load(
        part_ptr + (first + step.to(tl.int64) * pairs)[:, None] * V_SIZE + size[None, :], mask=mask, other=0.0
    )
    index = tl.arange(0, BLOCK_I)
    parts = tl.load(part_lse_ptr + first + index * pairs, mask=index < count, other=float("-inf"))
    return part, parts, first, count


@kernel
def _merge(
    asked, part_ptr, part_lse_ptr, sink_ptr, out_ptr, lse_ptr, at_pair, pairs,
    HEADS: tl.constexpr, V_SIZE: tl.constexpr, SINK: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_I: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Write what a request's query's head sees, where it lies in several splits."""
    part, parts, first, count = asked
    size = tl.arange(0, BLOCK_V)
    index = tl.arange(0, STEP)
    top = tl.max(parts, 0)
    if SINK:
        sink = tl.load(sink_ptr + at_pair % pairs % HEADS).to(tl.float32) * 1.4426950408889634
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
            step = at + index
            row = first + step.to(tl.int64) * pairs
            weight = tl.exp2(tl.load(part_lse_ptr + row, mask=step < count, other=float("-inf")) - level)
            mask = (step < count)[:, None] & (size < V_SIZE)[None, :]
            part = tl.load(part_ptr + row[:, None] * V_SIZE + size[None, :], mask=mask, other=0.0)
            out += tl.sum(weight[:, None] * part, 0)
    divisor = tl.where(total == 0.0, 1.0, total)
    merged = count > 0
    written = (out / divisor).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + tl.cast(at_pair, tl.int64) * V_SIZE + size, written, mask=merged & (size < V_SIZE))
    lse = tl.where(total == 0.0, float("-inf"), level + tl.log2(divisor))
    tl.store(lse_ptr + at_pair, lse * 0.6931471805599453, mask=merged)


@kernel
def _merge_splits_kernel(
    part_ptr, part_lse_ptr, start_ptr, sink_ptr, out_ptr, lse_ptr, batch, pairs,
    HEADS: tl.constexpr, V_SIZE: tl.constexpr, SINK: tl.constexpr, TWO: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_I: tl.constexpr, STEP: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    pdl_wait(DEPENDENT)
    pdl_trigger(DEPENDENT)
    todo = batch * pairs
    if not SINK:
        # Nothing to merge where every request has one range, which most batches of a long layout have.
        todo = tl.where(tl.load(start_ptr + batch) > batch, todo, 0)
    rope_and_norm = tl.num_programs(0)
    for at in range(tl.program_id(0), todo, 2 * rope_and_norm if TWO else rope_and_norm):
        one = _ask(part_ptr, part_lse_ptr, start_ptr, at, todo, pairs, V_SIZE, SINK, BLOCK_V, BLOCK_I, STEP)
        if TWO:
            # Asked for before the first is written.
            other = _ask(
                part_ptr, part_lse_ptr, start_ptr, at + rope_and_norm, todo, pairs, V_SIZE, SINK, BLOCK_V, BLOCK_I, STEP
            )
        _merge(
            one, part_ptr, part_lse_ptr, sink_ptr, out_ptr, lse_ptr, at, pairs,
            HEADS, V_SIZE, SINK, BLOCK_V, BLOCK_I, STEP,
        )  # fmt: skip
        if TWO:
            _merge(
                other, part_ptr, part_lse_ptr, sink_ptr, out_ptr, lse_ptr, at + rope_and_norm, pairs,
                HEADS, V_SIZE, SINK, BLOCK_V, BLOCK_I, STEP,
            )  # fmt: skip


def merge_splits_triton(
    partials: Partials, splits: KVSplits, out: Tensor, lse: Tensor, sink: Tensor | None = None
) -> None:
    batch, queries, heads, v_size = out.shape
    capacity = splits.items.shape[0]
    require("combine's partials", partials.out, (capacity, queries, heads, v_size), torch.float32, out)
    require("combine's partial lse", partials.lse, (capacity, queries, heads), torch.float32, out)
    require("combine's lse", lse, (batch, queries, heads), torch.float32, out)
    if sink is not None:
        require("combine's sink", sink, (heads,), None, out)
    pairs = queries * heads
    if not out.numel():
        return
    width, splits_held = max(32, power_of_two(v_size)), power_of_two(splits.policy.max_splits)
    blocks = min(batch * pairs, chip(out).processors * BLOCKS_AT_ONCE)
    _merge_splits_kernel[(blocks,)](
        partials.out,
        partials.lse,
        splits.starts,
        out if sink is None else sink,
        out,
        lse,
        batch,
        pairs,
        HEADS=heads,
        V_SIZE=v_size,
        SINK=sink is not None,
        TWO=2 * splits_held * width <= STEP_VALUES,
        BLOCK_V=width,
        BLOCK_I=splits_held,
        STEP=min(STEP_VALUES // width, splits_held),
        num_warps=1,
        # Whether a head is the first or the other of two depends on the batch; what the compiler fuses must not.
        enable_fp_fusion=False,
        **early(chip(out)),
    )


def merge_splits_reference(
    partials: Partials, splits: KVSplits, out: Tensor, lse: Tensor, sink: Tensor | None = None
) -> None:
    starts = splits.starts.tolist()
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
