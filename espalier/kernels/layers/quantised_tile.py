"""The inner loop of every product with a quantised matrix, for linear layers and experts.

A program multiplies a block of rows of the matrix with a tile of inputs.  Codes are read as they are stored and become
numbers in registers.  FP8 values, nibbles minus their zero points, and E2M1 values times powers of two are exact in
bfloat16, so only the float32 sums round.  The other scales multiply the sum of each group.

Inputs that were rounded to FP8 are multiplied with FP8 weights as they are, on the chip's FP8 units.  Those add with
fewer bits than float32, so every step of the loop starts a new sum and adds it in float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from espalier.kernels.runtime.convert import from_fp8
from espalier.kernels.runtime.launch import kernel
from espalier.kernels.runtime.pdl import ask_for

if TYPE_CHECKING:
    import triton.language as tl

# Codes of espalier/kernels/layers/quantised.py:QuantisedMatrix, as numbers for a kernel.
CODES = {"fp8": 0, "int4": 1, "mxfp4": 2}


@kernel
def quantised_dot(
    codes_ptr, scales_ptr, zeros_ptr, w_rows, x_ptrs, x_scale_ptrs, inside, num_in, k_begin, k_end,
    CODE: tl.constexpr, GROUP: tl.constexpr, ROW_BLOCK: tl.constexpr, INPUT_GROUP: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, EVEN_IN: tl.constexpr,
):  # fmt: skip
    """Sum over columns k_begin .. k_end of matrix[w_rows] · x: [BLOCK_OUT, ROWS] float32.

    codes: [rows, in] FP8 or [rows, in / 2] nibbles; scales: [rows / ROW_BLOCK, groups]; zeros: [rows, groups] or None.
    w_rows: [BLOCK_OUT] int64.  x_ptrs: [ROWS], to the first column of each input; inside: [ROWS], which exist.
    x_scale_ptrs: [ROWS], to the scales of each FP8 input; None for other inputs.
    GROUP, INPUT_GROUP: columns that share a scale, a multiple of BLOCK_IN; 0: all columns do.  For E2M1 it is 32.
    k_begin and k_end are multiples of BLOCK_IN.  EVEN_IN: BLOCK_IN divides num_in.
    """
    NIBBLES: tl.constexpr = CODE > 0
    BLOCK_BYTES: tl.constexpr = BLOCK_IN // 2 if NIBBLES else BLOCK_IN
    row_bytes = num_in // 2 if NIBBLES else num_in
    bytes = (k_begin // 2 if NIBBLES else k_begin) + tl.arange(0, BLOCK_BYTES)
    ks = k_begin + tl.arange(0, BLOCK_IN)
    w_ptrs = codes_ptr + w_rows[:, None] * row_bytes + bytes[None, :]
    num_groups = tl.cdiv(num_in, GROUP) if GROUP > 0 else 1
    scale_ptrs = scales_ptr + w_rows // ROW_BLOCK * num_groups
    acc = tl.zeros((BLOCK_OUT, ROWS), tl.float32)
    for k in range(k_begin, k_end, BLOCK_IN):
        if EVEN_IN:
            w = tl.load(w_ptrs)
            x = tl.load(x_ptrs[:, None] + ks[None, :], mask=inside[:, None], other=0.0)
        else:
            w = tl.load(w_ptrs, mask=bytes[None, :] < row_bytes, other=0 if NIBBLES else 0.0)
            x = tl.load(x_ptrs[:, None] + ks[None, :], mask=inside[:, None] & (ks[None, :] < num_in), other=0.0)
        if NIBBLES:
            low, high = _values(
                w, scale_ptrs, zeros_ptr, w_rows, k, num_in, num_groups, x.dtype,
                CODE, GROUP, BLOCK_OUT, BLOCK_BYTES, EVEN_IN,
            )  # fmt: skip
            even, odd = tl.split(tl.reshape(x, (ROWS, BLOCK_BYTES, 2)))
            part = tl.dot(low, tl.trans(even))
            part = tl.dot(high, tl.trans(odd), part)
        else:
            part = tl.dot(from_fp8(w, x.dtype), tl.trans(x))
        if GROUP > 0 and CODE < 2:
            part *= tl.load(scale_ptrs + k // GROUP).to(tl.float32)[:, None]
        if INPUT_GROUP > 0:
            part *= tl.load(x_scale_ptrs + k // INPUT_GROUP, mask=inside, other=0.0)[None, :]
        acc += part
        w_ptrs += BLOCK_BYTES
        bytes += BLOCK_BYTES
        ks += BLOCK_IN
    if GROUP == 0:
        acc *= tl.load(scale_ptrs).to(tl.float32)[:, None]
    if INPUT_GROUP == 0 and x_scale_ptrs is not None:
        acc *= tl.load(x_scale_ptrs, mask=inside, other=0.0)[None, :]
    return acc


@kernel
def prefetch_codes(codes_ptr, w_rows, k_begin, num_in, CODE: tl.constexpr, BLOCK_IN: tl.constexpr):
    """Prefetch the first tile of the codes into the L2: an address for each line of 128 bytes."""
    BLOCK_BYTES: tl.constexpr = BLOCK_IN // 2 if CODE > 0 else BLOCK_IN
    LINES: tl.constexpr = BLOCK_BYTES // 128 if BLOCK_BYTES > 128 else 1
    row_bytes = num_in // 2 if CODE > 0 else num_in
    lines = (k_begin // 2 if CODE > 0 else k_begin) + tl.arange(0, LINES) * 128
    ask_for(codes_ptr + w_rows[:, None] * row_bytes + tl.minimum(lines, row_bytes - 1)[None, :])


@kernel
def _values(
    packed, scale_ptrs, zeros_ptr, w_rows, k, num_in, num_groups, DTYPE: tl.constexpr,
    CODE: tl.constexpr, GROUP: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_BYTES: tl.constexpr, EVEN_IN: tl.constexpr,
):  # fmt: skip
    """The values of the low and of the high nibbles of packed [BLOCK_OUT, BLOCK_BYTES], in DTYPE."""
    if CODE == 1:
        if zeros_ptr is None:
            zero = tl.full((BLOCK_OUT,), 8, tl.uint16)
        else:
            group = k // GROUP if GROUP > 0 else 0
            zero = tl.load(zeros_ptr + w_rows * num_groups + group).to(tl.uint16)
        low = _minus(packed & 15, zero[:, None], DTYPE)
        return low, _minus(packed >> 4, zero[:, None], DTYPE)
    group = k // 32 + tl.arange(0, BLOCK_BYTES // 16)
    if EVEN_IN:
        exponents = tl.load(scale_ptrs[:, None] + group[None, :])
    else:
        exponents = tl.load(scale_ptrs[:, None] + group[None, :], mask=group[None, :] < num_groups, other=0)
    bits = exponents.to(tl.uint32)
    # An exponent of 0 means 2^-127, a subnormal float32.
    scale = tl.where(bits == 0, 1 << 22, bits << 23).to(tl.float32, bitcast=True).to(DTYPE)
    scale = tl.broadcast_to(scale[:, :, None], (BLOCK_OUT, BLOCK_BYTES // 16, 16))
    scale = tl.reshape(scale, (BLOCK_OUT, BLOCK_BYTES))
    return _e2m1(packed & 15, DTYPE) * scale, _e2m1(packed >> 4, DTYPE) * scale


@kernel
def _minus(nibbles, zero, DTYPE: tl.constexpr):
    """nibbles - zero.  Bits of the mantissa of 128 (or 1024) hold a nibble: a float without a conversion."""
    if tl.bfloat16 == DTYPE:
        return _with_bits(nibbles, 0x4300, DTYPE) - _with_bits(zero, 0x4300, DTYPE)
    return _with_bits(nibbles, 0x6400, DTYPE) - _with_bits(zero, 0x6400, DTYPE)


@kernel
def _with_bits(nibbles, BITS: tl.constexpr, DTYPE: tl.constexpr):
    return (nibbles.to(tl.uint16) | BITS).to(tl.uint16).to(DTYPE, bitcast=True)


@kernel
def _e2m1(nibbles, DTYPE: tl.constexpr):
    """The values of E2M1 nibbles: its two exponent bits and one mantissa bit are put where DTYPE has its own."""
    MANTISSA: tl.constexpr = 7 if tl.bfloat16 == DTYPE else 10
    # The bits of 0.5: an exponent of 0 in E2M1 is that of 1, without the leading one.
    HALF: tl.constexpr = 126 << 7 if tl.bfloat16 == DTYPE else 14 << 10
    bits = nibbles.to(tl.uint16)
    magnitude = bits & 7
    value = tl.where(magnitude > 1, (magnitude << (MANTISSA - 1)) + HALF, magnitude * HALF)
    return (value | (bits & 8) << 12).to(tl.uint16).to(DTYPE, bitcast=True)
