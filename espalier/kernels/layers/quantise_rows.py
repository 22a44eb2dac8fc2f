"""Rounds the inputs of a product to FP8, with one scale per row, per group of a row's columns, or for all rows.

Grid: (rows, one or more groups of a row, parts of a group).  The divisions of values and scales are exact (IEEE), so
the results equal the reference's to the bit.  Norms that round their output use the same functions.
"""

import torch
import triton.language as tl
from torch import Tensor

from espalier.kernels.layers.quantised import FP8, FP8_MAX, InputScales, RoundedRows
from espalier.kernels.runtime.jit import kernel
from espalier.kernels.runtime.launch import chip, is_oversubscribed, next_power_of_2, require
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger_and_wait

# Values that a warp loads, in a large grid and in a small grid.  A small grid has at most one program per
# multiprocessor.  In a small grid, the divisions of a thread take most of the time.  So up to MAX_PARTS programs load
# the same group and find its largest value.  Each of these programs divides a part of the group.  The numbers were
# measured with static scales.  In any grid, a short group has up to FEW_WARPS warps with VALUES_PER_WARP_SMALL_GRID
# values each.
VALUES_PER_WARP, VALUES_PER_WARP_SMALL_GRID = 1024, 256
VALUES_PER_PART, MAX_PARTS = 1024, 8
FEW_WARPS, MAX_WARPS, MAX_WARPS_SMALL_GRID = 4, 16, 32
# Groups per program in a large grid, in which one program per group would take longer to start than to run.
GROUPS_PER_PROGRAM = 16
# If scales belong to blocks of the matrix, PyTorch's product takes only a multiple of this number of rows.
LIBRARY_ROW_MULTIPLE = 16


@kernel
def fp8_scale(max_magnitude, static_scale_ptr, FP8_MAX: tl.constexpr):
    """Returns the FP8 scale of bfloat16 or float16 values, given their largest magnitude in float32.
    static_scale_ptr: pointer to the scale of all rows, or None."""
    if static_scale_ptr is None:
        scale = _divide_negated(-max_magnitude, tl.zeros_like(max_magnitude) + FP8_MAX)
        scale = tl.where(max_magnitude == 0, 1.0, tl.where(max_magnitude == float("inf"), max_magnitude, scale))
    else:
        scale = tl.zeros_like(max_magnitude) + tl.load(static_scale_ptr)
    return scale


@kernel
def divide_by_scale(values, scale, static_scale_ptr, FP8_MAX: tl.constexpr):
    """Divide float32 values by their scale, see `fp8_scale`.  With a static scale, quotients are clamped to FP8's
    range."""
    if static_scale_ptr is None:
        # Value and scale are multiplied by a power of two, so that remainders of tiny values do not underflow.  An
        # infinite scale turns finite values into 0.
        is_infinite = scale == float("inf")
        power = tl.where(scale < 2.0**-64, 2.0**64, tl.where(is_infinite, 0.0, 1.0))
        # No clamp is needed, because the largest value rounds to FP8_MAX.
        value = _divide_negated(values * -power, tl.where(is_infinite, 1.0, scale * power))
    else:
        value = tl.div_rn(values, tl.zeros_like(values) + scale)
        # NaN stays NaN: both comparisons are false.
        value = tl.where(value > FP8_MAX, FP8_MAX, tl.where(value < -FP8_MAX, -FP8_MAX, value))
    return value


@kernel
def _divide_negated(negated_value, divisor):
    """Returns -negated_value / divisor, rounded once (IEEE).  Callers enlarge tiny numbers first, see divide_by_scale.

    tl.div_rn has a branch for tiny and huge numbers, so the divisions of a thread run one after another.  This function
    has the same steps without the branch: a reciprocal, which may be wrong by 2 units in the last place, and one
    correction.  For every value of bfloat16 or float16 and every scale that the value can have, the result has the bits
    of a division.
    """
    inverse = -1.0 / divisor
    value = negated_value * inverse
    # With these signs, -0 stays -0.
    return tl.fma(tl.fma(value, divisor, negated_value), inverse, value)


@kernel
def store_rounded_row(
    x, row, values_ptr, scales_ptr, static_scale_ptr,
    ROW_SIZE: tl.constexpr, BLOCK: tl.constexpr, GROUP_COLUMNS: tl.constexpr, FP8_MAX: tl.constexpr,
):  # fmt: skip
    """Round one row, x [BLOCK] float32 in registers with zeros from ROW_SIZE on, in groups of GROUP_COLUMNS columns."""
    group, column = tl.arange(0, BLOCK // GROUP_COLUMNS), tl.arange(0, BLOCK)
    groups = tl.reshape(x, (BLOCK // GROUP_COLUMNS, GROUP_COLUMNS))
    scale = fp8_scale(tl.max(tl.abs(groups), 1), static_scale_ptr, FP8_MAX)
    value = tl.reshape(divide_by_scale(groups, scale[:, None], static_scale_ptr, FP8_MAX), (BLOCK,))
    num_groups = tl.cdiv(ROW_SIZE, GROUP_COLUMNS)
    tl.store(values_ptr + row * ROW_SIZE + column, value.to(values_ptr.dtype.element_ty), mask=column < ROW_SIZE)
    tl.store(scales_ptr + row * num_groups + group, scale, mask=group < num_groups)


def store_rounded_row_arguments(
    rounded: RoundedRows | None, input_scales: InputScales | None, block_columns: int
) -> dict[str, object]:
    """Returns the arguments of store_rounded_row, for programs that hold `block_columns` columns; placeholders if
    `rounded` is None."""
    names = ("rounded_values_ptr", "rounded_scales_ptr", "static_scale_ptr")
    if rounded is None or input_scales is None:
        return dict.fromkeys(names) | {"GROUP_COLUMNS": block_columns, "FP8_MAX": FP8_MAX}
    size = rounded.values.shape[1]
    group = input_scales.columns(size)
    pointers = zip(names, (rounded.values, rounded.scales, input_scales.static_scale), strict=True)
    return dict(pointers) | {"GROUP_COLUMNS": group if group < size else block_columns, "FP8_MAX": FP8_MAX}


def allocate_rounded_rows(x: Tensor, input_scales: InputScales) -> RoundedRows:
    """Allocate memory for the rounded rows of x [rows, in]."""
    groups = -(-x.shape[1] // input_scales.columns(x.shape[1]))
    values = torch.empty(x.shape, dtype=FP8, device=x.device)
    return RoundedRows(values, torch.empty(len(x), groups, dtype=torch.float32, device=x.device), x.dtype)


@kernel
def _quantise_rows_kernel(
    x_ptr, static_scale_ptr, out_ptr, scales_ptr, num_in, x_stride, scale_row_stride, scale_group_stride,
    GROUP_COLUMNS: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr, PART_COLUMNS: tl.constexpr,
    FP8_MAX: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """GROUP_COLUMNS: columns that share a scale.  GROUPS: groups per program.  PART_COLUMNS: columns per part."""
    pdl_trigger_and_wait(USE_PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(2)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    offset = tl.arange(0, BLOCK)[None, :]
    column = group[:, None] * GROUP_COLUMNS + offset
    mask = (offset < GROUP_COLUMNS) & (column < num_in)
    x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    part_values = x
    if PART_COLUMNS < BLOCK:
        # The program's part is loaded before the reduction, so that both loads overlap.
        offset = part * PART_COLUMNS + tl.arange(0, PART_COLUMNS)[None, :]
        column = group[:, None] * GROUP_COLUMNS + offset
        mask = (offset < GROUP_COLUMNS) & (column < num_in)
        part_values = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    scale = fp8_scale(tl.max(tl.abs(x), 1), static_scale_ptr, FP8_MAX)
    value = divide_by_scale(part_values, scale[:, None], static_scale_ptr, FP8_MAX)
    tl.store(out_ptr + row * num_in + column, value.to(out_ptr.dtype.element_ty), mask=mask)
    exists = (part == 0) & (group < tl.cdiv(num_in, GROUP_COLUMNS))
    tl.store(scales_ptr + row * scale_row_stride + group * scale_group_stride, scale, mask=exists)


def quantise_rows(x: Tensor, input_scales: InputScales, library_layout: bool = False) -> tuple[Tensor, Tensor]:
    """Rounds x to FP8.  x: bfloat16 or float16 with contiguous rows.  Raises EspalierError for other shapes."""
    require("quantise_rows: x", x, (-1, -1), None, x)
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, num_in = x.shape
    group_columns = input_scales.columns(num_in)
    num_groups = -(-num_in // group_columns)
    padded_rows = -(-rows // LIBRARY_ROW_MULTIPLE) * LIBRARY_ROW_MULTIPLE if library_layout else rows
    values = torch.empty(padded_rows, num_in, dtype=FP8, device=x.device)
    shape = (num_groups, padded_rows) if library_layout else (rows, num_groups)
    scales = torch.empty(shape, dtype=torch.float32, device=x.device)
    scales = scales.t() if library_layout else scales
    if values.numel():
        block, gpu = next_power_of_2(group_columns), chip(x)
        is_large_grid = is_oversubscribed(rows * num_groups, gpu)
        block_groups = min(next_power_of_2(num_groups), GROUPS_PER_PROGRAM) if is_large_grid else 1
        is_small_grid = rows * num_groups <= gpu.processors
        warps = block_groups * block // (VALUES_PER_WARP_SMALL_GRID if is_small_grid else VALUES_PER_WARP)
        warps = max(warps, min(block // VALUES_PER_WARP_SMALL_GRID, FEW_WARPS), 1)
        num_parts = min(block // VALUES_PER_PART, MAX_PARTS) if rows * num_groups * MAX_PARTS <= gpu.processors else 1
        part_columns = block // max(num_parts, 1)
        _quantise_rows_kernel[rows, -(-num_groups // block_groups), -(-group_columns // part_columns)](
            *(x, input_scales.static_scale, values, scales, num_in, x.stride(0), *scales.stride()),
            GROUP_COLUMNS=group_columns, GROUPS=block_groups, BLOCK=block, PART_COLUMNS=part_columns, FP8_MAX=FP8_MAX,
            **pdl_arguments(gpu), num_warps=min(warps, MAX_WARPS_SMALL_GRID if is_small_grid else MAX_WARPS),
        )  # fmt: skip
    return values, scales
