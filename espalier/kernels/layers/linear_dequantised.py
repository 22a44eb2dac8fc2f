"""A linear layer with a 4-bit weight, for many rows: a kernel writes the weight's values, and PyTorch multiplies.

Above MAX_FUSED_ROWS rows, the product of PyTorch's library (cuBLAS) is faster than the product of linear_quantised.py.
It saves more time than it takes to write and read the values.  The values are in scratch memory of at most
MAX_SCRATCH_BYTES; a larger weight is multiplied in blocks of rows.  The sizes of the blocks do not depend on the number
of input rows, so a larger pass needs at least as much scratch memory.  startup/measure_memory.py runs the largest
launches to find how much memory is left for pages, so its measurement includes the scratch memory.

Tolerance: the values of the weight are rounded once to the dtype of x, as in the reference code of these formats, and
MXFP4's values are exact.  The library may also round a few partial sums.  Against float64 the error is
at most half an ulp of the result, plus (an ulp of 1 + in · 2⁻²³) times the sum of the products' magnitudes.
"""

import torch
import triton.language as tl
from torch import Tensor

from espalier.kernels.hopper.gated import fills_chip, hopper_gated, supports_hopper_gated
from espalier.kernels.layers.linear_plans import DTYPES
from espalier.kernels.layers.quantised import E2M1_CODES, InputRows, QuantisedMatrix
from espalier.kernels.layers.quantised_nibbles import decode_words
from espalier.kernels.layers.quantised_tile import format_constants, kernel_matrix
from espalier.kernels.ops.activation import Activation, gated_activation
from espalier.kernels.ops.linear import write_product
from espalier.kernels.runtime.jit import kernel
from espalier.kernels.runtime.launch import chip, is_precompiling
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger_and_wait

# The most rows that linear_quantised.py multiplies with 4-bit weights.  Dequantising one value moves 2.5 bytes: 0.9 ps
# at 2.8 TB/s.  For each row the library then saves 1.8 fs per value (720 TFLOP/s instead of 440).  So both ways are
# equally fast at about 500 rows.  On an H100, with the library, the layers of Llama-3.1-8B took 4% more time for 512
# rows, and 22% less for 768 rows.  MAX_FUSED_ROWS is a power of two, because startup compiles for ranges of rows that
# end at powers of two.
MAX_FUSED_ROWS = 512
MAX_SCRATCH_BYTES = 128 * 2**20
# The rows of a block are a multiple of this number, the largest edge of the library's tiles.
BLOCK_ROW_MULTIPLE = 256
# A program's tile of the weight, and its warps: the fastest of six tiles on an H100, 2.7 to 3.0 TB/s.
BLOCK_OUT, BLOCK_IN, WARPS = 16, 256, 4


def uses_dequantised_product(x: InputRows, weight: QuantisedMatrix) -> bool:
    """Returns whether a layer of x [rows, in] uses these products: a 4-bit weight and above MAX_FUSED_ROWS rows."""
    return weight.code != "fp8" and x.dtype in DTYPES and len(x) > MAX_FUSED_ROWS and len(weight) > 0


def dequantised_product(x: Tensor, weight: QuantisedMatrix, bias: Tensor | None) -> Tensor:
    """Return x [rows, in] · weightᵀ + bias as a new tensor [rows, out].  x: in the order of the matrix's columns."""
    (num_out, num_in), out = weight.shape, x.new_empty(len(x), weight.shape[0])
    blocks = blocks_of(num_out, num_in * x.itemsize)
    scratch = x.new_empty(len(blocks[0]), num_in)
    for rows in blocks:
        values, row_slice = scratch[: len(rows)], slice(rows.start, rows.stop)
        write_dequantised_rows(weight, rows, values)
        write_product(x, values, None if bias is None else bias[row_slice], out[:, row_slice])
    return out


def dequantised_gated(x: Tensor, weight: QuantisedMatrix, bias: Tensor | None, activation: Activation) -> Tensor:
    """Return the activation [rows, inner] of dequantised_product.  weight: the rows of gate, then the rows of up."""
    if (out := _try_hopper_gated(x, weight, bias, activation)) is not None and not is_precompiling():
        return out
    return gated_activation.triton(dequantised_product(x, weight, bias), activation)


def _try_hopper_gated(x: Tensor, weight: QuantisedMatrix, bias: Tensor | None, activation: Activation) -> Tensor | None:
    """Returns the activation, computed by the kernel of hopper/gated.py, if that is faster; else None."""
    if not activation.is_silu:
        return None
    (num_out, num_in), gpu = weight.shape, chip(x)
    blocks = blocks_of(num_out // 2, 2 * num_in * x.itemsize)
    scratch = x.new_empty(2 * len(blocks[0]), num_in)
    is_supported = all(supports_hopper_gated(x, scratch[: 2 * len(rows)], bias, gpu) for rows in blocks)
    if not is_supported or not (fills_chip(len(x), len(blocks[0]), gpu) or is_precompiling()):
        return None
    out = x.new_empty(len(x), num_out // 2)
    for rows in blocks:
        values = scratch[: 2 * len(rows)]
        write_dequantised_rows(weight, rows, values[: len(rows)])
        write_dequantised_rows(weight, range(num_out // 2 + rows.start, num_out // 2 + rows.stop), values[len(rows) :])
        hopper_gated(x, values, out[:, rows.start : rows.stop])
    return out


def blocks_of(num_rows: int, row_bytes: int) -> list[range]:
    """Divides num_rows rows of a weight into blocks of about equal size, which fit in the scratch memory."""
    max_units = max(MAX_SCRATCH_BYTES // row_bytes // BLOCK_ROW_MULTIPLE, 1)
    num_units = -(-num_rows // BLOCK_ROW_MULTIPLE)
    block_rows = -(-num_units // -(-num_units // max_units)) * BLOCK_ROW_MULTIPLE
    return [range(begin, min(begin + block_rows, num_rows)) for begin in range(0, num_rows, block_rows)]


@kernel
def _write_dequantised_rows_kernel(
    words_ptr, scales_ptr, zero_points_ptr, out_ptr, num_rows, num_in,
    CODE: tl.constexpr, GROUP_SIZE: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """Write the values of a matrix to out [num_rows, num_in].  Grid: (blocks of columns, blocks of rows).
    Other arguments: see quantised_dot."""
    pdl_trigger_and_wait(USE_PDL)
    # The columns that share a scale: 16 in NVFP4.  In other codes, groups are multiples of 32 columns.
    UNIT: tl.constexpr = 16 if CODE == 3 else 32
    UNITS: tl.constexpr = BLOCK_IN // UNIT
    first = tl.program_id(0) * BLOCK_IN
    # Rows past the end write the last row again.
    w_rows = tl.minimum(tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT), num_rows - 1).to(tl.int64)
    row_words = num_in // 32 * 4
    words = first // 8 + tl.arange(0, BLOCK_IN // 8)
    w = tl.load(words_ptr + w_rows[:, None] * row_words + words[None, :], mask=words[None, :] < row_words, other=0)
    numbers = decode_words(
        w.to(tl.uint32, bitcast=True), CODE, out_ptr.dtype.element_ty, BLOCK_OUT, BLOCK_IN // 8
    )  # fmt: skip
    numbers = tl.reshape(numbers, (BLOCK_OUT, UNITS, UNIT))
    units = first // UNIT + tl.arange(0, UNITS)
    if CODE == 1:
        groups = tl.minimum(units * 32 // GROUP_SIZE, tl.cdiv(num_in, GROUP_SIZE) - 1) if GROUP_SIZE > 0 else units * 0
        places = (w_rows * (tl.cdiv(num_in, GROUP_SIZE) if GROUP_SIZE > 0 else 1))[:, None] + groups[None, :]
        scales = tl.load(scales_ptr + places).to(tl.float32)
        numbers -= tl.load(zero_points_ptr + places).to(tl.float32)[:, :, None] if zero_points_ptr is not None else 8.0
    else:
        # Rows of scales are padded to multiples of E2M1_SCALE_PADDING columns (quantised.py), so no load is masked.
        scale_codes = tl.load(scales_ptr + (w_rows * (tl.cdiv(num_in, 256) * 256 // UNIT))[:, None] + units[None, :])
        if CODE == 2:
            scales = (scale_codes.to(tl.uint32) << 23).to(tl.float32, bitcast=True)
        else:
            # For the stored bits, see SCALE_UNIT (quantised.py).  The product is in float64, as in the reference.
            scales = (scale_codes.to(tl.uint16) << 7).to(tl.float16, bitcast=True).to(tl.float64) * 2.0**-7
            scales = (scales * tl.load(zero_points_ptr + w_rows)[:, None]).to(tl.float32)
    values = tl.reshape(numbers * scales[:, :, None], (BLOCK_OUT, BLOCK_IN)).to(out_ptr.dtype.element_ty)
    columns = first + tl.arange(0, BLOCK_IN)
    tl.store(out_ptr + w_rows[:, None] * num_in + columns[None, :], values, mask=columns[None, :] < num_in)


def write_dequantised_rows(weight: QuantisedMatrix, rows: range, out: Tensor) -> None:
    """Write the values of rows `rows` of a 4-bit matrix to out [rows, in], bfloat16 or float16, contiguous.

    The columns are in the order of the codes.  The reference is quantised.py:dequantise; the bits are equal."""
    (words, scales, factors), num_in = kernel_matrix(weight.rows_from(rows.start)), weight.shape[1]
    scales = scales.view(torch.uint8) if weight.code in E2M1_CODES else scales
    constants = format_constants(weight)
    _write_dequantised_rows_kernel[-(-num_in // BLOCK_IN), -(-len(rows) // BLOCK_OUT)](
        *(words, scales, factors, out, len(rows), num_in),
        CODE=constants["CODE"],
        GROUP_SIZE=constants["GROUP_SIZE"],
        BLOCK_OUT=BLOCK_OUT,
        BLOCK_IN=BLOCK_IN,
        num_warps=WARPS,
        **pdl_arguments(chip(out)),
    )
