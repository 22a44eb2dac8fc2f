"""The inner loop of every product with a quantised matrix, for linear layers and experts.

A program multiplies a block of matrix rows with a tile of inputs.  The program reads the stored codes and decodes them
in registers.  FP8 values, nibbles minus their zero points, and E2M1 values times powers of two are exact in bfloat16,
so only the float32 sums are rounded.  Scales that are no powers of two are multiplied with the sum of each group.
quantised_nibbles.py has the code for 4 bits.

Inputs that are rounded to FP8 are multiplied with FP8 weights directly, on the chip's FP8 units.  FP8 units add with
fewer bits than float32.  So they add at most MAX_FP8_SUM_COLUMNS columns, and these sums are added in float32.
"""

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from espalier.kernels.layers.quantised import E2M1_CODES, QuantisedMatrix
from espalier.kernels.layers.quantised_nibbles import nibble_dot
from espalier.kernels.runtime.jit import from_fp8, kernel
from espalier.kernels.runtime.pdl import prefetch

# Bytes of an L2 line.  Kernels cannot read this constant, so prefetch_codes repeats it.
LINE_BYTES = 128
# The numbers that kernels use for QuantisedMatrix.code (quantised.py).
FORMAT_CODES = {"fp8": 0, "int4": 1, "mxfp4": 2, "nvfp4": 3}


def kernel_matrix(weight: QuantisedMatrix) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the arguments (codes, scales, zeros) of quantised_dot.  codes: FP8, or int32 words of 8 nibbles."""
    if weight.code == "fp8":
        return weight.codes, weight.scales, None
    words = weight.codes.view(torch.int32)
    if weight.code == "nvfp4":
        return words, weight.scales.view(torch.int16), weight.row_scales
    return words, weight.scales, weight.zeros


def format_constants(weight: QuantisedMatrix) -> dict[str, Any]:
    """Returns the constexpr arguments of quantised_dot that depend on the weight's format."""
    num_in, inputs = weight.shape[-1], weight.input_scales
    input_group = 0 if inputs is None or inputs.columns(num_in) == num_in else inputs.columns(num_in)
    group = 0 if weight.group_size >= num_in and weight.code not in E2M1_CODES else weight.group_size
    groups = {"GROUP_SIZE": group, "ROWS_PER_SCALE": weight.rows_per_scale, "INPUT_GROUP_SIZE": input_group}
    return {"CODE": FORMAT_CODES[weight.code]} | groups


@kernel
def quantised_dot(
    codes_ptr, scales_ptr, zero_points_ptr, w_rows, x_ptrs, x_scale_ptrs, row_exists, num_in, k_begin, k_end,
    CODE: tl.constexpr, GROUP_SIZE: tl.constexpr, ROWS_PER_SCALE: tl.constexpr, INPUT_GROUP_SIZE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, EVEN_IN: tl.constexpr,
):  # fmt: skip
    """Returns [BLOCK_OUT, ROWS] float32: the sum over columns k_begin .. k_end of matrix[w_rows] · x.

    codes: [rows, in] FP8, or int32 [rows, in / 8] of nibbles.  scales: [rows / ROWS_PER_SCALE, groups]; for NVFP4,
    int16 pairs of scales.  zeros: [rows, groups] or None; for NVFP4, the rows' factors [rows].
    w_rows: [BLOCK_OUT] int64.  x_ptrs: [ROWS], pointers to the first column of each input row.
    row_exists: [ROWS] bool.  x_scale_ptrs: [ROWS], pointers to the scales of each FP8 input row; None for other inputs.
    GROUP_SIZE, INPUT_GROUP_SIZE: columns that share a scale; 0: all columns.  For FP8, multiples of min(BLOCK_IN,
    MAX_FP8_SUM_COLUMNS).  k_begin and k_end are multiples of BLOCK_IN.  EVEN_IN: whether BLOCK_IN divides num_in.
    """
    if CODE > 0:
        acc = nibble_dot(
            codes_ptr, scales_ptr, zero_points_ptr, w_rows, x_ptrs, row_exists, num_in, k_begin, k_end,
            CODE, GROUP_SIZE, ROWS, BLOCK_OUT, BLOCK_IN, EVEN_IN,
        )  # fmt: skip
        if CODE == 3:
            acc *= tl.load(zero_points_ptr + w_rows).to(tl.float32)[:, None]
    else:
        acc = _fp8_dot(
            codes_ptr, scales_ptr, w_rows, x_ptrs, x_scale_ptrs, row_exists, num_in, k_begin, k_end,
            GROUP_SIZE, ROWS_PER_SCALE, INPUT_GROUP_SIZE, ROWS, BLOCK_OUT, BLOCK_IN, EVEN_IN,
        )  # fmt: skip
    return acc


@kernel
def _fp8_dot(
    codes_ptr, scales_ptr, w_rows, x_ptrs, x_scale_ptrs, row_exists, num_in, k_begin, k_end,
    GROUP_SIZE: tl.constexpr, ROWS_PER_SCALE: tl.constexpr, INPUT_GROUP_SIZE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, EVEN_IN: tl.constexpr,
):  # fmt: skip
    """Returns the product of quantised_dot for FP8 codes.  A step reads BLOCK_IN columns, because long reads are
    faster.  FP8 units sum at most 128 columns, so a step may have several sums."""
    # The value of MAX_FP8_SUM_COLUMNS.
    STEP: tl.constexpr = BLOCK_IN if BLOCK_IN < 128 else 128
    ks = k_begin + tl.arange(0, STEP)
    w_ptrs = codes_ptr + w_rows[:, None] * num_in + ks[None, :]
    num_groups = tl.cdiv(num_in, GROUP_SIZE) if GROUP_SIZE > 0 else 1
    scale_ptrs = scales_ptr + w_rows // ROWS_PER_SCALE * num_groups
    acc = tl.zeros((BLOCK_OUT, ROWS), tl.float32)
    for k in range(k_begin, k_end, BLOCK_IN):
        for step in tl.static_range(BLOCK_IN // STEP):
            # If the whole step is past the end, the scale of the last column is loaded.
            column = tl.minimum(k + step * STEP, num_in - 1)
            if EVEN_IN:
                w = tl.load(w_ptrs)
                x = tl.load(x_ptrs[:, None] + ks[None, :], mask=row_exists[:, None], other=0.0)
            else:
                w = tl.load(w_ptrs, mask=ks[None, :] < num_in, other=0.0)
                x = tl.load(x_ptrs[:, None] + ks[None, :], mask=row_exists[:, None] & (ks[None, :] < num_in), other=0.0)
            part = tl.dot(from_fp8(w, x.dtype), tl.trans(x))
            if GROUP_SIZE > 0:
                part *= tl.load(scale_ptrs + column // GROUP_SIZE).to(tl.float32)[:, None]
            if INPUT_GROUP_SIZE > 0:
                part *= tl.load(x_scale_ptrs + column // INPUT_GROUP_SIZE, mask=row_exists, other=0.0)[None, :]
            acc += part
            w_ptrs += STEP
            ks += STEP
    if GROUP_SIZE == 0:
        acc *= tl.load(scale_ptrs).to(tl.float32)[:, None]
    if INPUT_GROUP_SIZE == 0 and x_scale_ptrs is not None:
        acc *= tl.load(x_scale_ptrs, mask=row_exists, other=0.0)[None, :]
    return acc


@kernel
def prefetch_codes(codes_ptr, w_rows, k_begin, k_end, num_in, CODE: tl.constexpr, NUM_LINES: tl.constexpr):
    """Prefetch NUM_LINES cache lines of each row's codes into the L2, from column k_begin on, at most up to k_end."""
    # An element at codes_ptr is one FP8 value or an int32 word of 8 nibbles.  A cache line has LINE_BYTES bytes.
    VALUES_PER_ELEMENT: tl.constexpr = 8 if CODE > 0 else 1
    ELEMENTS_PER_LINE: tl.constexpr = 32 if CODE > 0 else 128
    row_elements = num_in // VALUES_PER_ELEMENT
    last_element = tl.maximum(tl.minimum(k_end // VALUES_PER_ELEMENT, row_elements) - 1, 0)
    line_begins = tl.minimum(k_begin // VALUES_PER_ELEMENT + tl.arange(0, NUM_LINES) * ELEMENTS_PER_LINE, last_element)
    prefetch(codes_ptr + w_rows[:, None] * row_elements + line_begins[None, :])
