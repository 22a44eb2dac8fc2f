"""The inner loop of products with 4-bit matrices.  It turns nibbles into numbers in the registers of the tensor cores.

Decoding may take about two instructions per weight, because memory delivers some 25 weights per cycle to each
multiprocessor (docs/log.md).  So no instruction is for a single nibble.  A mask leaves two nibbles in the two halves of
a 32-bit word, where they are the bits of small floating-point numbers.  One multiply-add of pairs then gives both
values.  The order of interleave_nibbles (quantised.py) puts every pair into the thread that multiplies it.  So no
decoded weight moves between threads or through shared memory.  The inputs are in shared memory, in column order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from espalier.kernels.runtime.jit import kernel
from espalier.kernels.runtime.pdl import prefetch

# Whether Triton's interpreter, which has no inline assembly, runs the kernels.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@kernel
def nibble_dot(
    words_ptr, scales_ptr, zeros_ptr, w_rows, x_ptrs, inside, num_in, k_begin, k_end,
    CODE: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, EVEN_IN: tl.constexpr,
):  # fmt: skip
    """The product of quantised_dot for 4-bit codes.  words: int32 [rows, in / 8].  num_in is a multiple of 32.

    If CODE is 1, one of GROUP and BLOCK_IN divides the other, or GROUP is 0.
    """
    # Columns of one sum: they share a scale.
    STEP: tl.constexpr = GROUP if CODE == 1 and GROUP > 0 and GROUP < BLOCK_IN else BLOCK_IN
    WORDS: tl.constexpr = STEP // 8
    DTYPE: tl.constexpr = x_ptrs.dtype.element_ty
    # The factor that sums lack, because decoded numbers are too small by it (_decode_int4, _mxfp4_factor).
    IS_BFLOAT16: tl.constexpr = tl.bfloat16 == DTYPE
    UNIT: tl.constexpr = (2.0**6 if IS_BFLOAT16 else 2.0**9) if CODE == 1 else (2.0**64 if IS_BFLOAT16 else 2.0**10)
    ks = k_begin + tl.arange(0, STEP)
    # Written in this form so that the compiler sees that rows begin at multiples of 16 bytes.
    row_words = num_in // 32 * 4
    words = k_begin // 8 + tl.arange(0, WORDS)
    w_ptrs = words_ptr + w_rows[:, None] * row_words + words[None, :]
    num_groups = _num_groups(num_in, CODE, GROUP)
    scale_ptrs = scales_ptr + w_rows * num_groups
    acc = tl.zeros((BLOCK_OUT, ROWS), tl.float32)
    # Scales are loaded one step ahead, so that no step waits for its scales.
    if CODE == 1:
        scale = tl.load(scale_ptrs + _group_of(k_begin, num_groups, GROUP))
    for k in range(k_begin, k_end, BLOCK_IN):
        for step in tl.static_range(BLOCK_IN // STEP):
            first = k + step * STEP
            if CODE == 1:
                next_scale = tl.load(scale_ptrs + _group_of(first + STEP, num_groups, GROUP))
            if EVEN_IN:
                w = tl.load(w_ptrs)
                x = tl.load(x_ptrs[:, None] + ks[None, :], mask=inside[:, None], other=0.0)
            else:
                w = tl.load(w_ptrs, mask=words[None, :] < row_words, other=0)
                x = tl.load(x_ptrs[:, None] + ks[None, :], mask=inside[:, None] & (ks[None, :] < num_in), other=0.0)
            w = w.to(tl.uint32, bitcast=True)
            if CODE == 1:
                if zeros_ptr is None:
                    # -8 · 2^-6 (-8 · 2^-9 in float16) in both halves.
                    offset = tl.full((BLOCK_OUT, WORDS), 0xBE00BE00 if IS_BFLOAT16 else 0xA400A400, tl.uint32)
                else:
                    # Not loaded ahead: registers would then be distributed among threads unlike those of the words.
                    zero = tl.load(zeros_ptr + w_rows * num_groups + _group_of(first, num_groups, GROUP))
                    offset = tl.broadcast_to(_zero_point_offset(zero, DTYPE)[:, None], (BLOCK_OUT, WORDS))
                part = tl.dot(_decode_int4(w, offset, DTYPE, BLOCK_OUT, WORDS), tl.trans(x))
            else:
                # One exponent, or two scales, per 32 columns.
                scales = tl.load(scale_ptrs[:, None] + (first // 32 + tl.arange(0, STEP // 32))[None, :])
                left, right = _factors(scales, CODE, DTYPE)
                left = _repeat_per_word(left, BLOCK_OUT, WORDS)
                right = _repeat_per_word(right, BLOCK_OUT, WORDS) if CODE == 3 else left
                part = tl.dot(_decode_e2m1(w, left, right, DTYPE, BLOCK_OUT, WORDS), tl.trans(x))
            if CODE == 1 and GROUP > 0:
                acc += part * (scale.to(tl.float32) * UNIT)[:, None]
            else:
                acc += part * UNIT
            if CODE == 1:
                scale = next_scale
            w_ptrs += WORDS
            words += WORDS
            ks += STEP
    if CODE == 1 and GROUP == 0:
        acc *= scale.to(tl.float32)[:, None]
    return acc


@kernel
def _group_of(k, num_groups, GROUP: tl.constexpr):
    """The group of column k; the last group if k is past it."""
    return tl.minimum(k // GROUP, num_groups - 1) if GROUP > 0 else 0


@kernel
def prefetch_scales(scales_ptr, zeros_ptr, w_rows, k_begin, k_end, num_in, GROUP: tl.constexpr):
    """Prefetch the first and last int4 scales and zero points of columns k_begin .. k_end into the L2.

    These two cover most of their cache lines.  The loop itself loads scales only where it needs them.
    """
    num_groups = tl.cdiv(num_in, GROUP) if GROUP > 0 else 1
    ends = tl.minimum(tl.where(tl.arange(0, 2) == 0, k_begin, k_end - 1), num_in - 1)
    groups = ends // GROUP if GROUP > 0 else ends * 0
    places = w_rows[:, None] * num_groups + groups[None, :]
    prefetch(scales_ptr + places)
    if zeros_ptr is not None:
        prefetch(zeros_ptr + places)


@kernel
def _num_groups(num_in, CODE: tl.constexpr, GROUP: tl.constexpr):
    """The number of scales in a row of the matrix."""
    if CODE >= 2:
        # A scale is for 32 columns, and rows have whole steps of SCALED_COLUMNS (quantised.py).
        return tl.cdiv(num_in, 256) * 8
    return tl.cdiv(num_in, GROUP) if GROUP > 0 else 1


@kernel
def _zero_point_offset(zero, DTYPE: tl.constexpr):
    """The offset that _decode_int4 adds: minus the zero points of a group, per row, in both halves of a uint32."""
    STEP: tl.constexpr = 2.0**-6 if tl.bfloat16 == DTYPE else 2.0**-9
    offset = (zero.to(tl.float32) * -STEP).to(DTYPE)
    return offset.to(tl.uint16, bitcast=True).to(tl.uint32) * 0x10001


@kernel
def _decode_int4(w, offset, DTYPE: tl.constexpr, BLOCK_OUT: tl.constexpr, WORDS: tl.constexpr):
    """(nibbles - zero points) · 2^-6 in bfloat16, · 2^-9 in float16: [BLOCK_OUT, 8 · WORDS].

    As bits, a nibble n is the subnormal number n · 2^-133 (float16: n · 2^-24).  Times the dtype's largest power of
    two, 2^127 (2^15), it is n · 2^-6 (n · 2^-9).  A nibble four bits higher is 16 times as much.  This also holds in
    bfloat16, where the nibble's highest bit becomes the lowest exponent bit: numbers with that exponent have the same
    spacing as subnormal numbers.  So only half of the nibbles need a shift.  Values, products and sums are exact.
    """
    LOW: tl.constexpr = 0x000F000F
    HIGH: tl.constexpr = 0x00F000F0
    FACTOR: tl.constexpr = 0x7F007F00 if tl.bfloat16 == DTYPE else 0x78007800
    SIXTEENTH: tl.constexpr = 0x7D007D00 if tl.bfloat16 == DTYPE else 0x68006800
    of_low, of_high = tl.full((BLOCK_OUT, WORDS), FACTOR, tl.uint32), tl.full((BLOCK_OUT, WORDS), SIXTEENTH, tl.uint32)
    shifted = w >> 8
    first, second = (
        _multiply_add_pair(w & LOW, of_low, offset, DTYPE),
        _multiply_add_pair(w & HIGH, of_high, offset, DTYPE),
    )
    third, fourth = (
        _multiply_add_pair(shifted & LOW, of_low, offset, DTYPE),
        _multiply_add_pair(shifted & HIGH, of_high, offset, DTYPE),
    )
    return _to_column_order(first, second, third, fourth, BLOCK_OUT, WORDS)


@kernel
def _mxfp4_factor(exponents, DTYPE: tl.constexpr):
    """The factor by which _decode_e2m1 multiplies, per exponent, in both halves of a uint32.

    It is 2^(exponent - 127), times 2^126 (float16: 2^14) for the bits of E2M1, times 2^-64 (2^-10) to stay in range.
    Values are exact for exponents from 66 to MAX_EXPONENT (quantised_plans.py); smaller exponents mean less than 2^-58.
    """
    bits = exponents.to(tl.uint32)
    if tl.bfloat16 == DTYPE:
        return (bits + 62) * 0x800080
    # float16 runs only in the interpreter.  It has less range, so smaller exponents count as 0.
    return (tl.maximum(bits, 108) - 108) * 0x4000400


@kernel
def _factors(scales, CODE: tl.constexpr, DTYPE: tl.constexpr):
    """(left, right) of _decode_e2m1: factors of the first and the last 16 of 32 columns, in both halves of a uint32."""
    if CODE == 2:
        left = _mxfp4_factor(scales, DTYPE)
        right = left
    else:
        left, right = _nvfp4_factors(scales, DTYPE)
    return left, right


@kernel
def _nvfp4_factors(pairs, DTYPE: tl.constexpr):
    """The factors of two E4M3 scales in an int16: the scales times 2^62 (float16: 2^4).  See _mxfp4_factor.

    Scales have no sign.  Without the sign, the bits of E4M3 are those of a number of the dtype whose exponents begin
    120 (8) lower.  So subnormal scales are subnormal numbers, and two products bring all scales into range, exactly.
    """
    bits = pairs.to(tl.uint16, bitcast=True).to(tl.uint32)
    # The first scale goes to the low half, the second to the high half.
    IS_BFLOAT16: tl.constexpr = tl.bfloat16 == DTYPE
    spread = (bits & 0xFF) * 16 | (bits & 0xFF00) * 4096 if IS_BFLOAT16 else (bits & 0xFF) * 128 | (bits >> 8) << 23
    step = bits & 0 | (0x6D006D00 if IS_BFLOAT16 else 0x54005400)
    both = _multiply_pair(_multiply_pair(spread, step, DTYPE), step, DTYPE)
    return (both & 0xFFFF) * 0x10001, (both >> 16) * 0x10001


@kernel
def _repeat_per_word(factor, BLOCK_OUT: tl.constexpr, WORDS: tl.constexpr):
    """Repeat factors of 32 columns for their words: [BLOCK_OUT, WORDS / 4] -> [BLOCK_OUT, WORDS]."""
    return tl.reshape(tl.broadcast_to(factor[:, :, None], (BLOCK_OUT, WORDS // 4, 4)), (BLOCK_OUT, WORDS))


@kernel
def _decode_e2m1(w, left, right, DTYPE: tl.constexpr, BLOCK_OUT: tl.constexpr, WORDS: tl.constexpr):
    """Decode E2M1 numbers, times 2^-126 (float16: 2^-14) and their factor: [BLOCK_OUT, 8 · WORDS].

    left, right: the factors of the first and of the last 16 of 32 columns.  A word has two pairs of each.
    SPREAD (quantised.py) has moved the bits.  A mask puts the sign, the two exponent bits and the mantissa bit where
    the dtype has its sign, its lowest exponent bits and its highest mantissa bit.  So an exponent of 0 means a
    subnormal number in E2M1 and in the dtype.  The product is exact.
    """
    BITS: tl.constexpr = 0x81C081C0
    # Rotations, because some bits are in the other half.
    third, fourth = (w << 10) | (w >> 22), (w << 14) | (w >> 18)
    first = _decode_e2m1_pair(w & BITS, left, DTYPE)
    second = _decode_e2m1_pair((w << 4) & BITS, left, DTYPE)
    third = _decode_e2m1_pair(third & BITS, right, DTYPE)
    fourth = _decode_e2m1_pair((fourth & 0x81808180) | ((w << 6) & 0x00400040), right, DTYPE)
    return _to_column_order(first, second, third, fourth, BLOCK_OUT, WORDS)


@kernel
def _decode_e2m1_pair(bits, factor, DTYPE: tl.constexpr):
    """Multiply a pair of E2M1 numbers by its factor.  bits: as those of two bfloat16 numbers."""
    if tl.bfloat16 != DTYPE:
        bits = (bits & 0x80008000) | ((bits & 0x01C001C0) << 3)
    return _multiply_add_pair(bits, factor, bits & 0 | 0x80008000, DTYPE)


@kernel
def _to_column_order(first, second, third, fourth, BLOCK_OUT: tl.constexpr, WORDS: tl.constexpr):
    """Put the four pairs of each word in column order, see interleave_nibbles."""
    pairs = tl.join(tl.join(first, third), tl.join(second, fourth))
    # [rows, blocks of 32, t, h, p // 2, p % 2] -> [rows, blocks of 32, p // 2, p % 2, t, h]
    pairs = tl.reshape(pairs, (BLOCK_OUT, WORDS // 4, 4, 2, 2, 2)).permute(0, 1, 4, 5, 2, 3)
    return tl.reshape(pairs, (BLOCK_OUT, WORDS * 8))


@kernel
def _multiply_add_pair(bits, factor, offset, DTYPE: tl.constexpr):
    """Return number · factor + offset for the numbers in both halves of each uint32: DTYPE [..., 2].

    It is written in assembly (_fma), because Triton splits a product of pairs into two products.
    """
    if INTERPRETED:
        low = _low_half(bits, DTYPE) * _low_half(factor, DTYPE) + _low_half(offset, DTYPE)
        high = _low_half(bits >> 16, DTYPE) * _low_half(factor >> 16, DTYPE) + _low_half(offset >> 16, DTYPE)
    else:
        both = _fma(bits, factor, offset, DTYPE)
        low, high = _low_half(both, DTYPE), _low_half(both >> 16, DTYPE)
    return tl.join(low, high)


@kernel
def _multiply_pair(bits, factor, DTYPE: tl.constexpr):
    """Return number · factor for the numbers in both halves of each uint32, again as halves of uint32."""
    if INTERPRETED:
        low = (_low_half(bits, DTYPE) * _low_half(factor, DTYPE)).to(tl.uint16, bitcast=True)
        high = (_low_half(bits >> 16, DTYPE) * _low_half(factor >> 16, DTYPE)).to(tl.uint16, bitcast=True)
        both = low.to(tl.uint32) | high.to(tl.uint32) << 16
    else:
        both = _fma(bits, factor, bits & 0 | 0x80008000, DTYPE)
    return both


@kernel
def _fma(bits, factor, offset, DTYPE: tl.constexpr):
    ASSEMBLY: tl.constexpr = "fma.rn.bf16x2 $0, $1, $2, $3;" if tl.bfloat16 == DTYPE else "fma.rn.f16x2 $0, $1, $2, $3;"
    return tl.inline_asm_elementwise(ASSEMBLY, "=r,r,r,r", [bits, factor, offset], tl.uint32, is_pure=True, pack=1)


@kernel
def _low_half(words, DTYPE: tl.constexpr):
    """The low halves of uint32, as numbers of DTYPE."""
    return (words & 0xFFFF).to(tl.uint16).to(DTYPE, bitcast=True)
