"""The norm of the heads' outputs and their gate, in one launch.

Grid: (blocks of rows, groups).  The kernel computes in float32 (float64 for float64) and rounds where the reference
rounds.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.layers.quantise_rows import allocate_rounded_rows, divide_by_scale, fp8_scale
from espalier.kernels.layers.quantised import FP8_MAX, InputRows, InputScales
from espalier.kernels.ops.states import OutputGate, rounds_groups
from espalier.kernels.runtime.jit import kernel
from espalier.kernels.runtime.launch import chip, exact_type, power_of_two
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger_and_wait

# A program holds at least this many values; small groups therefore get several rows per program.
VALUES = 512


@kernel(do_not_specialize=["num_rows"])
def _gated_norm_kernel(
    x_ptr, gate_ptr, weight_ptr, out_ptr, scales_ptr, static_ptr, num_rows, gate_stride,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, SHARE: tl.constexpr, STEP: tl.constexpr, GATE_FIRST: tl.constexpr,
    EPS: tl.constexpr, EXACT: tl.constexpr, FP8_MAX: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """scales_ptr: if not None, the result is rounded to FP8 as in quantise_rows.py, with a scale for each group."""
    pdl_trigger_and_wait(DEPENDENT)
    row, group = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    mask = (row < num_rows)[:, None] & (column < SIZE)[None, :]
    place = (row[:, None] * GROUPS + group) * SIZE + column[None, :]
    gate_at = group // SHARE * STEP + group % SHARE * SIZE
    x = tl.load(x_ptr + place, mask=mask, other=0.0).to(EXACT)
    gate = tl.load(gate_ptr + row[:, None] * gate_stride + gate_at + column[None, :], mask=mask, other=0.0).to(EXACT)
    of_group = group * SIZE if GATE_FIRST else 0
    weight = tl.load(weight_ptr + of_group + column, mask=column < SIZE, other=0.0).to(EXACT)[None, :]
    gate = gate / (1.0 + tl.exp(-gate))
    if GATE_FIRST:
        x *= gate
        x *= (1.0 / tl.sqrt(tl.sum(x * x, 1) / SIZE + EPS))[:, None]
        out = x.to(x_ptr.dtype.element_ty).to(EXACT) * weight
    else:
        x *= (1.0 / tl.sqrt(tl.sum(x * x, 1) / SIZE + EPS))[:, None] * weight
        out = x.to(x_ptr.dtype.element_ty).to(EXACT) * gate
    if scales_ptr is not None:
        out = out.to(x_ptr.dtype.element_ty).to(EXACT)
        scale = fp8_scale(tl.max(tl.abs(out), 1), static_ptr, FP8_MAX)
        out = divide_by_scale(out, scale[:, None], static_ptr, FP8_MAX)
        tl.store(scales_ptr + row * GROUPS + group, scale, mask=row < num_rows)
    tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=mask)


def gated_norm(
    read: Tensor, gate: OutputGate, weight: Tensor, eps: float, rounding: InputScales | None = None
) -> InputRows:
    """See ops/states.py.  Tolerance: two ulps of the reference.  The rounded result equals the unrounded result after
    quantise_rows."""
    read = read.contiguous()
    num_rows, groups, size = read.shape
    if rounding is not None and not rounds_groups(size, groups, rounding):
        raise EspalierError(f"a gated norm of groups of {size} columns is not rounded in groups of {rounding.group}")
    rounded = None if rounding is None else allocate_rounded_rows(read.flatten(1), rounding)
    out = torch.empty_like(read) if rounded is None else rounded.values
    if not num_rows:
        return out.flatten(1) if rounded is None else rounded
    block = power_of_two(size)
    block_r = max(VALUES // block, 1)
    _gated_norm_kernel[-(-num_rows // block_r), groups](
        *(read, gate.values, weight, out),
        *(None if rounded is None else rounded.scales, None if rounding is None else rounding.static),
        *(num_rows, gate.values.stride(0)),
        GROUPS=groups,
        SIZE=size,
        SHARE=gate.share,
        STEP=gate.step,
        GATE_FIRST=gate.is_first,
        EPS=eps,
        EXACT=exact_type(read.dtype),
        FP8_MAX=FP8_MAX,
        BLOCK_R=block_r,
        BLOCK=block,
        num_warps=4 if block >= 512 else 2,
        **pdl_arguments(chip(read)),
    )
    return out.flatten(1) if rounded is None else rounded
