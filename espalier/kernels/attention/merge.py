"""Merges attention over two disjoint sets of keys by their log-sum-exps (Ye et al. 2025, FlashInfer, section 2.2)."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from espalier.kernels.ops.attention import Part
from espalier.kernels.runtime.jit import kernel
from espalier.kernels.runtime.launch import chip, exact_type, power_of_two, require
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger_and_wait


@kernel
def _merge_kernel(
    a_ptr, b_ptr, a_lse_ptr, b_lse_ptr, sink_ptr, out_ptr, rows,
    HEADS: tl.constexpr, V_SIZE: tl.constexpr, EXACT: tl.constexpr, BLOCK: tl.constexpr, BLOCK_V: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program merges BLOCK rows; a row is one head of one query."""
    pdl_trigger_and_wait(DEPENDENT)
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = row < rows
    a_lse = tl.load(a_lse_ptr + row, mask=real, other=float("-inf")).to(EXACT)
    b_lse = tl.load(b_lse_ptr + row, mask=real, other=float("-inf")).to(EXACT)
    max_lse = tl.maximum(a_lse, b_lse)
    sink = max_lse
    if sink_ptr is not None:
        sink = tl.load(sink_ptr + row % HEADS, mask=real, other=float("-inf")).to(EXACT)
        max_lse = tl.maximum(max_lse, sink)
    shift = tl.where(max_lse == float("-inf"), 0.0, max_lse)
    a_weight, b_weight = tl.exp(a_lse - shift), tl.exp(b_lse - shift)
    total_weight = a_weight + b_weight
    if sink_ptr is not None:
        total_weight += tl.exp(sink - shift)
    total_weight = tl.where(total_weight == 0.0, 1.0, total_weight)
    size = tl.arange(0, BLOCK_V)
    at = row[:, None] * V_SIZE + size[None, :]
    mask = real[:, None] & (size < V_SIZE)[None, :]
    out = tl.load(a_ptr + at, mask=mask, other=0.0).to(EXACT) * (a_weight / total_weight)[:, None]
    out += tl.load(b_ptr + at, mask=mask, other=0.0).to(EXACT) * (b_weight / total_weight)[:, None]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=mask)


def merge(a: Part, b: Part, sink: Tensor | None = None) -> Tensor:
    """Equal to the reference up to one rounding.  Raises EspalierError if the sizes do not agree."""
    shape = tuple(a[0].shape)
    heads, v_size = shape[-2:]
    require("merge's second part", b[0], shape, None, a[0])
    for name, (_, lse) in (("first", a), ("second", b)):
        require(f"merge's {name} lse", lse, shape[:-1], None, a[0])
    if sink is not None:
        require("merge's sink", sink, (heads,), None, a[0])
    out = torch.empty(shape, dtype=a[0].dtype, device=a[0].device)
    rows, block_v = a[1].numel(), power_of_two(v_size)
    if out.numel():
        block = max(1, 1024 // block_v)
        _merge_kernel[(-(-rows // block),)](
            *(a[0].contiguous(), b[0].contiguous(), a[1].contiguous(), b[1].contiguous(), sink, out, rows),
            HEADS=heads,
            V_SIZE=v_size,
            EXACT=exact_type(a[1].dtype),
            BLOCK=block,
            BLOCK_V=block_v,
            num_warps=4,
            **pdl_arguments(chip(out)),
        )
    return out
