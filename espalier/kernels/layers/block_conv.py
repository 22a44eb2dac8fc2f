"""The convolutions of a DFlash 2 draft.  Each sums a few rows of a block: the row itself and the rows before it.

Row i of a block becomes the sum over taps t of row i - t times (base[t] + delta[t]).  Rows before the block count as
zeros.  `base` has a coefficient for each channel.  `delta` has a coefficient for each group of adjacent channels: the
product of row i of the sublayer's input with a matrix.  Half of the matrix rows are for the convolution of the input,
the other half for the convolution of the output.
`block_conv` computes the product and the input's convolution.  Grid: (tiles of rows, blocks of groups).  A program
multiplies its rows with the matrix rows of its groups, and convolves the channels of these groups.

Tolerance: the product has the tolerance of linear.py and is rounded.  The float32 convolution is rounded once.

`block_conv_norm` computes the output's convolution, the residual addition and the next norm.  Grid: one program per
row, which holds the whole row in registers and reads the output's rows of all taps.

Tolerance: the sublayer's output is summed from its parts and rounded, convolved in float32 (float64 for float64), and
rounded before the addition.  The addition and the norm are computed as in kernels/layers/norm.py.
"""

import torch
import triton.language as tl
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.layers.norm import norm_row
from espalier.kernels.ops.drafts import block_conv as contract
from espalier.kernels.ops.drafts import check_block_conv
from espalier.kernels.runtime.jit import kernel, load_sum
from espalier.kernels.runtime.launch import acc_dtype, chip, next_power_of_2, require, warps_for
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger_and_wait

# Per program of block_conv: its rows (the fewest that tensor cores support), its groups, and the columns of one step of
# the product.
ROWS, GROUPS, COLUMNS = 16, 8, 128


def block_conv(x: Tensor, weight: Tensor, base_taps: Tensor, block_width: int) -> tuple[Tensor, Tensor]:
    """The launcher of ops/drafts.py:block_conv.  base_taps: [taps, H].  block_width: rows of a block."""
    if x.dtype == torch.float64:
        # Triton has no float64 product.
        return contract.reference(x, weight, base_taps, block_width)
    taps, groups = check_block_conv(x, weight, base_taps, block_width)
    x = x.contiguous()
    (rows, size), group = x.shape, x.shape[1] // groups
    out, coefficients = torch.empty_like(x), x.new_empty(rows, taps, groups)
    if rows:
        _block_conv_kernel[(-(-rows // ROWS), -(-groups // GROUPS))](
            *(x, weight.contiguous(), base_taps.contiguous(), out, coefficients, rows, groups, block_width),
            ROW_SIZE=size, GROUP_CHANNELS=group, TAPS=taps, BLOCK_TAPS=next_power_of_2(2 * taps), ROWS=ROWS,
            GROUPS=GROUPS, CHANNELS=next_power_of_2(group), COLUMNS=COLUMNS, num_warps=4, num_stages=4,
            **pdl_arguments(chip(x)),
        )  # fmt: skip
    return out, coefficients


@kernel
def _block_conv_kernel(
    x_ptr, weight_ptr, base_ptr, out_ptr, coefficients_ptr, num_rows, num_groups, block_width,
    ROW_SIZE: tl.constexpr, GROUP_CHANNELS: tl.constexpr, TAPS: tl.constexpr, BLOCK_TAPS: tl.constexpr,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, CHANNELS: tl.constexpr, COLUMNS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_TAPS: 2 · TAPS, or the next power of two."""
    pdl_trigger_and_wait(USE_PDL)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = row < num_rows
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    index = tl.arange(0, BLOCK_TAPS * GROUPS)
    of_group = tl.program_id(1) * GROUPS + index % GROUPS
    weight_row = (index // GROUPS) * num_groups + of_group
    is_weight_row = (index // GROUPS < 2 * TAPS) & (of_group < num_groups)
    column = tl.arange(0, COLUMNS)
    product = tl.zeros([ROWS, BLOCK_TAPS * GROUPS], tl.float32)
    for begin in range(0, ROW_SIZE, COLUMNS):
        inside = begin + column < ROW_SIZE
        x = tl.load(
            x_ptr + row[:, None] * ROW_SIZE + begin + column[None, :], mask=exists[:, None] & inside[None, :], other=0.0
        )
        weight = tl.load(
            weight_ptr + weight_row.to(tl.int64)[None, :] * ROW_SIZE + begin + column[:, None],
            mask=is_weight_row[None, :] & inside[:, None], other=0.0,
        )  # fmt: skip
        product = tl.dot(x, weight, product, input_precision="ieee")
    delta = tl.reshape(product.to(x_ptr.dtype.element_ty).to(tl.float32), [ROWS, BLOCK_TAPS, GROUPS])
    tap_index = tl.arange(0, BLOCK_TAPS)[None, :, None]
    channel = group[:, None] * GROUP_CHANNELS + tl.arange(0, CHANNELS)[None, :]
    channel_exists = (group < num_groups)[:, None] & (tl.arange(0, CHANNELS) < GROUP_CHANNELS)[None, :]
    total = tl.zeros([ROWS, GROUPS, CHANNELS], tl.float32)
    x_offsets = tl.reshape(row, [ROWS, 1, 1]) * ROW_SIZE + tl.reshape(channel, [1, GROUPS, CHANNELS])
    out_mask = tl.reshape(exists, [ROWS, 1, 1]) & tl.reshape(channel_exists, [1, GROUPS, CHANNELS])
    for tap in tl.static_range(TAPS):
        tap_delta = tl.sum(tl.where(tap_index == tap, delta, 0.0), 1)
        base = tl.load(base_ptr + tap * ROW_SIZE + channel, mask=channel_exists, other=0.0).to(tl.float32)
        in_block = out_mask & tl.reshape(row % block_width >= tap, [ROWS, 1, 1])
        x = tl.load(x_ptr + x_offsets - tap * ROW_SIZE, mask=in_block, other=0.0).to(tl.float32)
        total += x * (tl.reshape(base, [1, GROUPS, CHANNELS]) + tl.reshape(tap_delta, [ROWS, GROUPS, 1]))
        output_delta = tl.sum(tl.where(tap_index == TAPS + tap, delta, 0.0), 1)
        tl.store(
            coefficients_ptr + (row[:, None] * TAPS + tap) * num_groups + group[None, :],
            output_delta.to(coefficients_ptr.dtype.element_ty), mask=exists[:, None] & (group < num_groups)[None, :],
        )  # fmt: skip
    tl.store(out_ptr + x_offsets, total.to(out_ptr.dtype.element_ty), mask=out_mask)


def block_conv_norm(
    delta: Tensor,
    coefficients: Tensor,
    base_taps: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    block_width: int,
) -> tuple[Tensor, Tensor]:
    """The launcher of ops/drafts.py:block_conv_norm.  delta: the sublayer's output, which is convolved."""
    rows, size = residual.shape
    _, taps, groups = coefficients.shape
    partial_sums = delta if delta.ndim == 3 else delta[None]
    dtype = torch.promote_types(residual.dtype, torch.float32) if delta.ndim == 3 else residual.dtype
    require("block_conv_norm: delta", partial_sums, (-1, rows, size), dtype, residual)
    require("block_conv_norm: coefficients", coefficients, (rows, taps, groups), residual.dtype, residual)
    require("block_conv_norm: base", base_taps, (taps, size), residual.dtype, residual)
    require("block_conv_norm: weight", norm_weight, (size,), residual.dtype, residual)
    if rows % block_width or size % groups:
        raise EspalierError(
            f"block_conv_norm: {rows} rows in blocks of {block_width}, and {size} channels in {groups} groups, do not "
            "divide: allocate and launch from the same layout"
        )
    total, out = (torch.empty_like(residual, memory_format=torch.contiguous_format) for _ in range(2))
    if rows:
        block = next_power_of_2(size)
        _block_conv_norm_kernel[(rows,)](
            *(partial_sums.contiguous(), coefficients.contiguous(), base_taps.contiguous(), residual.contiguous()),
            *(norm_weight.contiguous(), total, out, rows * size, block_width),
            EPS=eps, ROW_SIZE=size, GROUPS=groups, TAPS=taps, SPLITS=partial_sums.shape[0],
            ACC_DTYPE=acc_dtype(residual.dtype), BLOCK=block, num_warps=warps_for(block, 512),
            **pdl_arguments(chip(residual)),
        )  # fmt: skip
    return total, out


@kernel
def _block_conv_norm_kernel(
    delta_ptr, coefficients_ptr, base_ptr, residual_ptr, weight_ptr, sum_ptr, out_ptr, split_stride, block_width,
    EPS: tl.constexpr, ROW_SIZE: tl.constexpr, GROUPS: tl.constexpr, TAPS: tl.constexpr, SPLITS: tl.constexpr,
    ACC_DTYPE: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """delta_ptr: the sublayer's output.  coefficients_ptr: [rows, TAPS, GROUPS].  SPLITS: partial sums of delta."""
    pdl_trigger_and_wait(USE_PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < ROW_SIZE
    group = column // (ROW_SIZE // GROUPS)
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(ACC_DTYPE)
    x = tl.load(residual_ptr + row * ROW_SIZE + column, mask=mask, other=0.0).to(ACC_DTYPE)
    added = tl.zeros([BLOCK], ACC_DTYPE)
    for tap in tl.static_range(TAPS):
        factor = tl.load(base_ptr + tap * ROW_SIZE + column, mask=mask, other=0.0).to(ACC_DTYPE)
        factor += tl.load(coefficients_ptr + (row * TAPS + tap) * GROUPS + group, mask=mask, other=0.0).to(ACC_DTYPE)
        in_block = mask & (row % block_width >= tap)
        delta = delta_ptr + (row - tap) * ROW_SIZE + column
        added += load_sum(delta, split_stride, in_block, SPLITS, sum_ptr.dtype.element_ty, ACC_DTYPE) * factor
    # Each of the three results is rounded as a separate launch would round it.
    x += added.to(sum_ptr.dtype.element_ty).to(ACC_DTYPE)
    x = x.to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + row * ROW_SIZE + column, x, mask=mask, eviction_policy="evict_last")
    x = x.to(ACC_DTYPE)
    norm = norm_row(x, weight, EPS, ROW_SIZE, ACC_DTYPE)
    tl.store(out_ptr + row * ROW_SIZE + column, norm.to(out_ptr.dtype.element_ty), mask=mask)
