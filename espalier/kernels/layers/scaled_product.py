"""PyTorch's product of FP8 inputs with an FP8 matrix, for many rows: torch.nn.functional.scaled_mm.  In this file, it
is called the library's product.

The library has two such products.  The first, for compute capability 8.9 and later, has one scale per row of the inputs
and of the matrix.  The second, for Hopper only, has one scale per 128 columns of an input row, and one per 128 x 128
values of the matrix (DeepSeek).
"""

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

from espalier.kernels.layers.quantised import InputRows, InputScales, QuantisedMatrix, RoundedRows
from espalier.kernels.ops.linear import quantise_rows
from espalier.kernels.runtime.launch import HOPPER, Chip, chip

# The most rows that our kernel multiplies: with row scales, and with block scales.  For more rows the library
# multiplies, if it supports the product.  With row scales and a matrix that fills the chip, the library already
# multiplies for more than TILE_ROWS rows.
MAX_KERNEL_ROWS, MAX_KERNEL_ROWS_IN_BLOCKS = 256, 64
# Rows and outputs of the largest tile of our kernel (linear_quantised.py).  If the tiles of TILE_ROWS rows fill the
# chip, more rows double our kernel's time, but not the library's.
TILE_ROWS, TILE_OUTPUTS = 128, 128
# The library needs the matrix's rows and columns in multiples of 16 bytes.
ALIGNMENT_BYTES = 16
# Edge of a block that has one scale, and the number of blocks whose scales the library reads at once.
SCALE_BLOCK = 128
SCALE_BLOCKS_PER_READ = 4


def max_kernel_rows(input_scales: InputScales, gpu: Chip) -> int:
    """Returns the most rows of inputs that the previous launch may round to FP8.  For more rows, scaled_product rounds
    them."""
    has_block_scales = input_scales.group_size == SCALE_BLOCK and gpu.capability[0] == HOPPER[0]
    return MAX_KERNEL_ROWS_IN_BLOCKS if has_block_scales else MAX_KERNEL_ROWS


def library_supports_product(x: InputRows, weight: QuantisedMatrix) -> bool:
    """Whether `scaled_product` multiplies x [rows, in] with this matrix.  With block scales, x must be unrounded."""
    if weight.input_scales is None or x.dtype != torch.bfloat16:
        return False
    if _has_row_scales(weight):
        fills_the_chip = weight.shape[0] >= TILE_OUTPUTS * chip(weight.codes).processors
        return len(x) > (TILE_ROWS if fills_the_chip else MAX_KERNEL_ROWS)
    if isinstance(x, RoundedRows) or not _has_block_scales(weight):
        return False
    return len(x) > MAX_KERNEL_ROWS_IN_BLOCKS and chip(weight.codes).capability[0] == HOPPER[0]


def scaled_product(x: InputRows, weight: QuantisedMatrix, bias: Tensor | None) -> Tensor:
    """Return x [rows, in] · weightᵀ + bias as a new tensor [rows, out].  Needs library_supports_product(x, weight).

    Tolerance: as linear_quantised.py for rounded inputs on a GPU."""
    assert weight.input_scales is not None
    num_out, scales = weight.shape[0], weight.scales.float()
    if _has_row_scales(weight):
        rounded = (x.values, x.scales) if isinstance(x, RoundedRows) else quantise_rows(x, weight.input_scales)
        scales = scales.expand(num_out, 1).reshape(1, num_out).contiguous()
        types = ScalingType.RowWise, ScalingType.RowWise
    else:
        assert isinstance(x, Tensor)
        rounded = quantise_rows.triton(x, weight.input_scales, library_layout=True)
        scales = scales.t()
        types = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
    inputs, input_scales = rounded
    product = scaled_mm(
        inputs, weight.codes.t(), input_scales, types[0], scales, types[1], bias=bias, output_dtype=x.dtype
    )
    return product[: len(x)]


def _has_row_scales(weight: QuantisedMatrix) -> bool:
    """Returns whether each input row has one scale, and whether each matrix row has one scale or all matrix rows share
    one."""
    (num_out, num_in), inputs = weight.shape, weight.input_scales
    return (
        inputs is not None
        and _is_fp8(weight)
        and weight.group_size >= num_in
        and inputs.columns(num_in) == num_in
        and (weight.rows_per_scale == 1 or weight.rows_per_scale >= num_out)
    )


def _has_block_scales(weight: QuantisedMatrix) -> bool:
    """Returns whether each 128 x 128 weights, and each 128 inputs of a row, share an FP8 scale."""
    (num_out, num_in), inputs = weight.shape, weight.input_scales
    return (
        inputs is not None
        and _is_fp8(weight)
        and weight.group_size == weight.rows_per_scale == inputs.group_size == SCALE_BLOCK
        and num_out % SCALE_BLOCK == 0
        and num_in % (SCALE_BLOCKS_PER_READ * SCALE_BLOCK) == 0
    )


def _is_fp8(weight: QuantisedMatrix) -> bool:
    """Returns whether the matrix is FP8, has the column order of the inputs, and has sizes that the library takes."""
    is_aligned = all(size % ALIGNMENT_BYTES == 0 for size in weight.shape)
    return weight.code == "fp8" and weight.column_order is None and is_aligned
