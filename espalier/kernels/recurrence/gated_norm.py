"""The norm of the heads' outputs and their gate, or the gate alone, in one launch.

A program takes adjacent groups, so that programs that run together read adjacent memory; it takes a whole row if the
row is rounded to FP8 with one scale.  The kernel computes in float32 (float64 for float64) and rounds where the
reference rounds.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.layers.quantise_rows import allocate_rounded_rows, divide_by_scale, fp8_scale
from espalier.kernels.layers.quantised import FP8_MAX, InputRows, InputScales
from espalier.kernels.ops.states import OutputGate, rounds_groups
from espalier.kernels.recurrence.inputs import num_parts
from espalier.kernels.runtime.jit import kernel, load_sum
from espalier.kernels.runtime.launch import chip, exact_type, power_of_two
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger_and_wait

# A program holds at least this many values; small groups therefore get several rows per program.
VALUES = 512
# Values of a whole row for each warp, and the most warps.
WARP_VALUES, MAX_WARPS = 256, 16


@kernel
def _normed(
    x, gate, weight, SIZE: tl.constexpr, GATE_FIRST: tl.constexpr, EPS: tl.constexpr, EXACT: tl.constexpr,
    TYPE: tl.constexpr,
):  # fmt: skip
    gate = gate / (1.0 + tl.exp(-gate))
    if GATE_FIRST:
        x *= gate
        x *= (1.0 / tl.sqrt(tl.sum(x * x, 1) / SIZE + EPS))[:, None]
        out = x.to(TYPE).to(EXACT) * weight
    else:
        x *= (1.0 / tl.sqrt(tl.sum(x * x, 1) / SIZE + EPS))[:, None] * weight
        out = x.to(TYPE).to(EXACT) * gate
    return out


@kernel(do_not_specialize=["num_rows"])
def _gated_norm_kernel(
    x_ptr, gate_ptr, weight_ptr, out_ptr, scales_ptr, static_ptr, num_rows, gate_stride, gate_split,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, SHARE: tl.constexpr, STEP: tl.constexpr, GATE_FIRST: tl.constexpr,
    SPLITS: tl.constexpr, EPS: tl.constexpr, EXACT: tl.constexpr, FP8_MAX: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """A program holds BLOCK_R groups of BLOCK columns: all groups of a row if WHOLE, else BLOCK_R adjacent groups.

    weight_ptr: None for the gate alone.  SPLITS: of the gate's partial sums.  scales_ptr: if not None, the result is
    rounded to FP8 as in quantise_rows.py, with a scale for each group, or for the row if WHOLE.
    """
    pdl_trigger_and_wait(DEPENDENT)
    TYPE: tl.constexpr = x_ptr.dtype.element_ty
    first, group, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK)
    if WHOLE:
        row, exists = first + group * 0, group < GROUPS
    else:
        index = first * BLOCK_R + group
        row, group, exists = index // GROUPS, index % GROUPS, index < num_rows * GROUPS
    mask = exists[:, None] & (column < SIZE)[None, :]
    place = (row * GROUPS + group)[:, None] * SIZE + column[None, :]
    gate_at = row * gate_stride + group // SHARE * STEP + group % SHARE * SIZE
    x = tl.load(x_ptr + place, mask=mask, other=0.0).to(EXACT)
    gate = load_sum(gate_ptr + gate_at[:, None] + column[None, :], gate_split, mask, SPLITS, TYPE, EXACT)
    if weight_ptr is None:
        out = x * (1.0 / (1.0 + tl.exp(-gate))).to(TYPE).to(EXACT)
    else:
        of_group = group * SIZE if GATE_FIRST else group * 0
        weight = tl.load(weight_ptr + of_group[:, None] + column[None, :], mask=mask, other=0.0).to(EXACT)
        out = _normed(x, gate, weight, SIZE, GATE_FIRST, EPS, EXACT, TYPE)
    if scales_ptr is not None:
        out = out.to(TYPE).to(EXACT)
        if WHOLE:
            scale = fp8_scale(tl.max(tl.max(tl.abs(out), 1), 0) + tl.zeros([1], EXACT), static_ptr, FP8_MAX)
            out = divide_by_scale(out, scale[:, None], static_ptr, FP8_MAX)
            tl.store(scales_ptr + tl.program_id(0) + tl.arange(0, 1), scale)
        else:
            scale = fp8_scale(tl.max(tl.abs(out), 1), static_ptr, FP8_MAX)
            out = divide_by_scale(out, scale[:, None], static_ptr, FP8_MAX)
            tl.store(scales_ptr + row * GROUPS + group, scale, mask=exists)
    tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=mask)


def gated_norm(
    read: Tensor, gate: OutputGate, weight: Tensor | None, eps: float = 0.0, rounding: InputScales | None = None
) -> InputRows:
    """See ops/states.py.  Tolerance: two ulps of the reference.  The rounded result equals the unrounded result after
    quantise_rows."""
    read = read.contiguous()
    num_rows, groups, size = read.shape
    if rounding is not None and not rounds_groups(size, groups, rounding):
        raise EspalierError(
            f"a gated norm of {groups} groups of {size} columns is not rounded in groups of {rounding.group}"
        )
    rounded = None if rounding is None else allocate_rounded_rows(read.flatten(1), rounding)
    out = torch.empty_like(read) if rounded is None else rounded.values
    if not num_rows:
        return out.flatten(1) if rounded is None else rounded
    block = power_of_two(size)
    is_whole = rounding is not None and rounding.columns(groups * size) == groups * size > size
    block_r = power_of_two(groups) if is_whole else max(VALUES // block, 1)
    warps = min(block_r * block // WARP_VALUES, MAX_WARPS) if is_whole else 4 if block >= 512 else 2
    values = gate.values
    _gated_norm_kernel[(num_rows if is_whole else -(-num_rows * groups // block_r),)](
        *(read, values, weight, out),
        *(None if rounded is None else rounded.scales, None if rounding is None else rounding.static),
        *(num_rows, values.stride(-2), values.stride(0)),
        GROUPS=groups,
        SIZE=size,
        SHARE=gate.share,
        STEP=gate.step,
        GATE_FIRST=gate.is_first,
        SPLITS=num_parts(values),
        EPS=eps,
        EXACT=exact_type(read.dtype),
        FP8_MAX=FP8_MAX,
        WHOLE=is_whole,
        BLOCK_R=block_r,
        BLOCK=block,
        num_warps=max(warps, 1),
        **pdl_arguments(chip(read)),
    )
    return out.flatten(1) if rounded is None else rounded
