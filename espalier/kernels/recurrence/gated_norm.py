"""For the outputs of a layer with a recurrent state: their RMS norm and gate, or only the gate, in one launch.

A group is the columns that are normed together, such as a head.  A program takes adjacent groups, so that programs that
run together read adjacent memory.  If a row is rounded to FP8 with one scale, a program takes the whole row.  The
kernel computes in float32 (float64 for float64) and rounds where the reference rounds.
"""

import torch
import triton.language as tl
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.layers.norm import num_partial_sums
from espalier.kernels.layers.quantise_rows import allocate_rounded_rows, divide_by_scale, fp8_scale
from espalier.kernels.layers.quantised import FP8_MAX, InputRows, InputScales
from espalier.kernels.ops.states import OutputGate, can_round_groups
from espalier.kernels.runtime.jit import kernel, load_sum
from espalier.kernels.runtime.launch import acc_dtype, chip, next_power_of_2
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger_and_wait

# The fewest values per program.  For small groups, a program takes several groups.
MIN_PROGRAM_VALUES = 512
# For programs that take a whole row: the values per warp, and the most warps.
WARP_VALUES, MAX_WARPS = 256, 16


@kernel
def _norm_and_gate(
    x, gate, weight, GROUP_COLUMNS: tl.constexpr, GATE_BEFORE_NORM: tl.constexpr, EPS: tl.constexpr,
    ACC_DTYPE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Returns x [groups, columns] with its RMS norm and the factor silu(gate), in ACC_DTYPE."""
    gate = gate / (1.0 + tl.exp(-gate))
    if GATE_BEFORE_NORM:
        x *= gate
        x *= (1.0 / tl.sqrt(tl.sum(x * x, 1) / GROUP_COLUMNS + EPS))[:, None]
        out = x.to(DTYPE).to(ACC_DTYPE) * weight
    else:
        x *= (1.0 / tl.sqrt(tl.sum(x * x, 1) / GROUP_COLUMNS + EPS))[:, None] * weight
        out = x.to(DTYPE).to(ACC_DTYPE) * gate
    return out


@kernel(do_not_specialize=["num_rows"])
def _gated_norm_kernel(
    x_ptr, gate_ptr, weight_ptr, out_ptr, scales_ptr, static_scale_ptr, num_rows, gate_stride, gate_split_stride,
    GROUPS: tl.constexpr, GROUP_COLUMNS: tl.constexpr, ADJACENT_GROUPS: tl.constexpr, COLUMN_STRIDE: tl.constexpr,
    GATE_BEFORE_NORM: tl.constexpr, SPLITS: tl.constexpr, EPS: tl.constexpr, ACC_DTYPE: tl.constexpr,
    FP8_MAX: tl.constexpr, WHOLE_ROW: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """A program holds BLOCK_R groups of BLOCK columns: all groups of a row if WHOLE_ROW, else BLOCK_R adjacent groups.

    weight_ptr: None if there is no norm, only the gate.  SPLITS: the number of partial sums of the gate.  scales_ptr:
    if not None, the result is rounded to FP8 as in quantise_rows.py, with a scale per group, or per row if WHOLE_ROW.
    """
    pdl_trigger_and_wait(USE_PDL)
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    first, group, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK)
    if WHOLE_ROW:
        row, exists = first + group * 0, group < GROUPS
    else:
        index = first * BLOCK_R + group
        row, group, exists = index // GROUPS, index % GROUPS, index < num_rows * GROUPS
    mask = exists[:, None] & (column < GROUP_COLUMNS)[None, :]
    place = (row * GROUPS + group)[:, None] * GROUP_COLUMNS + column[None, :]
    gate_at = row * gate_stride + group // ADJACENT_GROUPS * COLUMN_STRIDE + group % ADJACENT_GROUPS * GROUP_COLUMNS
    x = tl.load(x_ptr + place, mask=mask, other=0.0).to(ACC_DTYPE)
    gate = load_sum(gate_ptr + gate_at[:, None] + column[None, :], gate_split_stride, mask, SPLITS, DTYPE, ACC_DTYPE)
    if weight_ptr is None:
        out = x * (1.0 / (1.0 + tl.exp(-gate))).to(DTYPE).to(ACC_DTYPE)
    else:
        of_group = group * GROUP_COLUMNS if GATE_BEFORE_NORM else group * 0
        weight = tl.load(weight_ptr + of_group[:, None] + column[None, :], mask=mask, other=0.0).to(ACC_DTYPE)
        out = _norm_and_gate(x, gate, weight, GROUP_COLUMNS, GATE_BEFORE_NORM, EPS, ACC_DTYPE, DTYPE)
    if scales_ptr is not None:
        out = out.to(DTYPE).to(ACC_DTYPE)
        if WHOLE_ROW:
            scale = fp8_scale(tl.max(tl.max(tl.abs(out), 1), 0) + tl.zeros([1], ACC_DTYPE), static_scale_ptr, FP8_MAX)
            out = divide_by_scale(out, scale[:, None], static_scale_ptr, FP8_MAX)
            tl.store(scales_ptr + tl.program_id(0) + tl.arange(0, 1), scale)
        else:
            scale = fp8_scale(tl.max(tl.abs(out), 1), static_scale_ptr, FP8_MAX)
            out = divide_by_scale(out, scale[:, None], static_scale_ptr, FP8_MAX)
            tl.store(scales_ptr + row * GROUPS + group, scale, mask=exists)
    tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=mask)


def gated_norm(
    x: Tensor, gate: OutputGate, weight: Tensor | None, eps: float = 0.0, rounding: InputScales | None = None
) -> InputRows:
    """The launcher of ops/states.py:gated_norm.  Tolerance: two ulps; with rounding, the bits of quantise_rows."""
    x = x.contiguous()
    num_rows, groups, size = x.shape
    if rounding is not None and not can_round_groups(size, groups, rounding):
        raise EspalierError(
            f"a gated norm of {groups} groups of {size} columns is not rounded in groups of {rounding.group_size}"
        )
    rounded = None if rounding is None else allocate_rounded_rows(x.flatten(1), rounding)
    out = torch.empty_like(x) if rounded is None else rounded.values
    if not num_rows:
        return out.flatten(1) if rounded is None else rounded
    block = next_power_of_2(size)
    is_whole = rounding is not None and rounding.columns(groups * size) == groups * size > size
    block_r = next_power_of_2(groups) if is_whole else max(MIN_PROGRAM_VALUES // block, 1)
    warps = min(block_r * block // WARP_VALUES, MAX_WARPS) if is_whole else 4 if block >= 512 else 2
    values = gate.values
    _gated_norm_kernel[(num_rows if is_whole else -(-num_rows * groups // block_r),)](
        *(x, values, weight, out),
        *(None if rounded is None else rounded.scales, None if rounding is None else rounding.static_scale),
        *(num_rows, values.stride(-2), values.stride(0)),
        GROUPS=groups, GROUP_COLUMNS=size, ADJACENT_GROUPS=gate.adjacent_groups, COLUMN_STRIDE=gate.column_stride,
        GATE_BEFORE_NORM=gate.is_before_norm, SPLITS=num_partial_sums(values), EPS=eps, ACC_DTYPE=acc_dtype(x.dtype),
        FP8_MAX=FP8_MAX, WHOLE_ROW=is_whole, BLOCK_R=block_r, BLOCK=block, num_warps=max(warps, 1),
        **pdl_arguments(chip(x)),
    )  # fmt: skip
    return out.flatten(1) if rounded is None else rounded
