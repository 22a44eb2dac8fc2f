"""The inner loop of products with 4-bit matrices.  Nibbles become numbers in the registers of the tensor cores.

Decoding must not take more than about two instructions per weight, because memory delivers some 25 weights per cycle to
each multiprocessor (docs/log.md).  So every instruction decodes several nibbles.  A mask leaves two nibbles in the two
halves of a 32-bit word, where they are the bits of small floating-point numbers.  One multiply-add of pairs then gives
both values.  The order of interleave_nibbles (quantised.py) puts every pair into the thread that multiplies it.  So no
decoded weight moves between threads or through shared memory.  The inputs are in shared memory, in column order.
"""

import triton
import triton.language as tl

from espalier.kernels.runtime.jit import kernel
from espalier.kernels.runtime.pdl import prefetch

# Whether kernels run in Triton's interpreter, which has no inline assembly.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@kernel
def nibble_dot(
    words_ptr, scales_ptr, zero_points_ptr, w_rows, x_ptrs, row_exists, num_in, k_begin, k_end,
    CODE: tl.constexpr, GROUP_SIZE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, EVEN_IN: tl.constexpr,
):  # fmt: skip
    """Returns the product of quantised_dot for 4-bit codes.  words: int32 [rows, in / 8].  num_in is a multiple of 32.

    If CODE is 1 (int4), GROUP_SIZE divides BLOCK_IN, or BLOCK_IN divides GROUP_SIZE, or GROUP_SIZE is 0."""
    # The columns of one step.  In int4, the columns of a step share a scale.
    STEP: tl.constexpr = GROUP_SIZE if CODE == 1 and GROUP_SIZE > 0 and GROUP_SIZE < BLOCK_IN else BLOCK_IN
    WORDS: tl.constexpr = STEP // 8
    DTYPE: tl.constexpr = x_ptrs.dtype.element_ty
    # Decoded numbers are too small by the factor UNIT (_decode_int4, _factors_per_word), so sums are multiplied by it.
    IS_BFLOAT16: tl.constexpr = tl.bfloat16 == DTYPE
    UNITS: tl.constexpr = (2.0**6, 2.0**64, 2.0**39) if IS_BFLOAT16 else (2.0**9, 2.0**10, 2.0**7)
    UNIT: tl.constexpr = UNITS[CODE - 1]
    # Whether tensor cores add all steps to one sum.  If so, a large tile decodes a step while it multiplies another.
    ONE_SUM: tl.constexpr = CODE > 1 and ROWS >= 64
    ks = k_begin + tl.arange(0, STEP)
    # num_in // 32 * 4 equals num_in // 8, and shows the compiler that rows begin at multiples of 16 bytes.
    row_words = num_in // 32 * 4
    words = k_begin // 8 + tl.arange(0, WORDS)
    w_ptrs = words_ptr + w_rows[:, None] * row_words + words[None, :]
    num_groups = _num_groups(num_in, CODE, GROUP_SIZE)
    scale_ptrs = scales_ptr + w_rows * num_groups
    acc = tl.zeros((BLOCK_OUT, ROWS), tl.float32)
    # Scales are loaded one step ahead, so that no step waits for its scales.
    if CODE == 1:
        scale = tl.load(scale_ptrs + _group_of_column(k_begin, num_groups, GROUP_SIZE))
    for k in range(k_begin, k_end, BLOCK_IN):
        for step in tl.static_range(BLOCK_IN // STEP):
            first_column = k + step * STEP
            if CODE == 1:
                next_scale = tl.load(scale_ptrs + _group_of_column(first_column + STEP, num_groups, GROUP_SIZE))
            if EVEN_IN:
                w = tl.load(w_ptrs)
                x = tl.load(x_ptrs[:, None] + ks[None, :], mask=row_exists[:, None], other=0.0)
            else:
                w = tl.load(w_ptrs, mask=words[None, :] < row_words, other=0)
                x = tl.load(x_ptrs[:, None] + ks[None, :], mask=row_exists[:, None] & (ks[None, :] < num_in), other=0.0)
            w = w.to(tl.uint32, bitcast=True)
            if CODE == 1:
                # The offset is not loaded a step ahead, because its registers would not have the layout of the words.
                group = w_rows * num_groups + _group_of_column(first_column, num_groups, GROUP_SIZE)
                offset = _zero_point_offsets(zero_points_ptr, group, DTYPE, BLOCK_OUT, WORDS)
                step_sum = tl.dot(_decode_int4(w, offset, DTYPE, BLOCK_OUT, WORDS), tl.trans(x))
            else:
                # 32 columns have one MXFP4 exponent, or two NVFP4 scales.
                scales = tl.load(scale_ptrs[:, None] + (first_column // 32 + tl.arange(0, STEP // 32))[None, :])
                factors = _factors_per_word(scales, CODE, DTYPE, BLOCK_OUT, WORDS)
                w = _decode_e2m1(w, factors, DTYPE, BLOCK_OUT, WORDS)
                step_sum = tl.dot(w, tl.trans(x), acc if ONE_SUM else None)
            if CODE == 1 and GROUP_SIZE > 0:
                acc += step_sum * (scale.to(tl.float32) * UNIT)[:, None]
            elif ONE_SUM:
                acc = step_sum
            else:
                acc += step_sum * UNIT
            if CODE == 1:
                scale = next_scale
            w_ptrs += WORDS
            words += WORDS
            ks += STEP
    if CODE == 1 and GROUP_SIZE == 0:
        acc *= scale.to(tl.float32)[:, None]
    elif ONE_SUM:
        acc *= UNIT
    return acc


@kernel
def _group_of_column(column, num_groups, GROUP_SIZE: tl.constexpr):
    """Returns the group of a column; the last group for a column past the end."""
    return tl.minimum(column // GROUP_SIZE, num_groups - 1) if GROUP_SIZE > 0 else 0


@kernel
def prefetch_scales(scales_ptr, zero_points_ptr, w_rows, k_begin, k_end, num_in, GROUP_SIZE: tl.constexpr):
    """Prefetch the first and last int4 scales and zero points of columns k_begin .. k_end into the L2.

    The cache lines of the first and the last scale of a row hold most of the row's other scales too."""
    num_groups = tl.cdiv(num_in, GROUP_SIZE) if GROUP_SIZE > 0 else 1
    ends = tl.minimum(tl.where(tl.arange(0, 2) == 0, k_begin, k_end - 1), num_in - 1)
    groups = ends // GROUP_SIZE if GROUP_SIZE > 0 else ends * 0
    places = w_rows[:, None] * num_groups + groups[None, :]
    prefetch(scales_ptr + places)
    if zero_points_ptr is not None:
        prefetch(zero_points_ptr + places)


@kernel
def _num_groups(num_in, CODE: tl.constexpr, GROUP_SIZE: tl.constexpr):
    """Returns the number of scales in a row of the matrix; for NVFP4, the number of pairs of scales."""
    if CODE >= 2:
        # A scale or a pair covers 32 columns, and rows are padded to E2M1_SCALE_PADDING columns (quantised.py).
        return tl.cdiv(num_in, 256) * 8
    return tl.cdiv(num_in, GROUP_SIZE) if GROUP_SIZE > 0 else 1


@kernel
def _zero_point_offsets(zero_points_ptr, group, DTYPE: tl.constexpr, BLOCK_OUT: tl.constexpr, WORDS: tl.constexpr):
    """Returns the offsets that _decode_int4 adds: each row's -(zero point) · STEP, in both halves of a uint32.
    If zero_points_ptr is None, all zero points are 8."""
    STEP: tl.constexpr = 2.0**-6 if tl.bfloat16 == DTYPE else 2.0**-9
    if zero_points_ptr is None:
        # The constants are -8 · 2^-6 (bfloat16) and -8 · 2^-9 (float16), in both halves of a word.
        offsets = tl.full((BLOCK_OUT, WORDS), 0xBE00BE00 if tl.bfloat16 == DTYPE else 0xA400A400, tl.uint32)
    else:
        offset = (tl.load(zero_points_ptr + group).to(tl.float32) * -STEP).to(DTYPE)
        both = offset.to(tl.uint16, bitcast=True).to(tl.uint32) * 0x10001
        offsets = tl.broadcast_to(both[:, None], (BLOCK_OUT, WORDS))
    return offsets


@kernel
def _decode_int4(w, offset, DTYPE: tl.constexpr, BLOCK_OUT: tl.constexpr, WORDS: tl.constexpr):
    """Returns (nibbles - zero points) · 2^-6 in bfloat16, · 2^-9 in float16: [BLOCK_OUT, 8 · WORDS].

    The bits of a nibble n, read as bfloat16, are the subnormal number n · 2^-133 (float16: n · 2^-24).  The product
    with the dtype's largest power of two, 2^127 (2^15), is n · 2^-6 (n · 2^-9).  A nibble that stands four bits higher
    means 16 times the number.  In bfloat16, the highest bit of such a nibble is the lowest bit of the exponent.  The
    number is still right, because numbers with exponent 1 have the spacing of subnormal numbers.  So half of the
    nibbles need no shift.
    """
    LOW: tl.constexpr = 0x000F000F
    HIGH: tl.constexpr = 0x00F000F0
    FACTOR: tl.constexpr = 0x7F007F00 if tl.bfloat16 == DTYPE else 0x78007800
    SIXTEENTH: tl.constexpr = 0x7D007D00 if tl.bfloat16 == DTYPE else 0x68006800
    low_factor = tl.full((BLOCK_OUT, WORDS), FACTOR, tl.uint32)
    high_factor = tl.full((BLOCK_OUT, WORDS), SIXTEENTH, tl.uint32)
    shifted = w >> 8
    first, second = (
        _multiply_add_pair(w & LOW, low_factor, offset, "both", DTYPE),
        _multiply_add_pair(w & HIGH, high_factor, offset, "both", DTYPE),
    )
    third = _multiply_add_pair(shifted & LOW, low_factor, offset, "both", DTYPE)
    fourth = _multiply_add_pair(shifted & HIGH, high_factor, offset, "both", DTYPE)
    return _in_column_order(first, second, third, fourth, BLOCK_OUT, WORDS)


@kernel
def decode_words(w, CODE: tl.constexpr, DTYPE: tl.constexpr, BLOCK_OUT: tl.constexpr, WORDS: tl.constexpr):
    """Returns the nibbles (int4) or E2M1 numbers of words uint32 [BLOCK_OUT, WORDS]: float32 [BLOCK_OUT, 8 · WORDS].

    The result has the columns in order.  DTYPE: the dtype in which the words are decoded.  The decoding is exact."""
    IS_BFLOAT16: tl.constexpr = tl.bfloat16 == DTYPE
    if CODE == 1:
        numbers = _decode_int4(w, tl.full((BLOCK_OUT, WORDS), 0x80008000, tl.uint32), DTYPE, BLOCK_OUT, WORDS)
        numbers = numbers.to(tl.float32) * (2.0**6 if IS_BFLOAT16 else 2.0**9)
    else:
        # 127 is the MXFP4 exponent of scale 1.
        factors = _factors_of_mxfp4_scales(tl.full((BLOCK_OUT, WORDS), 127, tl.uint32), DTYPE)
        numbers = _decode_e2m1(w, factors, DTYPE, BLOCK_OUT, WORDS).to(tl.float32) * (
            2.0**64 if IS_BFLOAT16 else 2.0**10
        )
    return numbers


@kernel
def _factors_per_word(scales, CODE: tl.constexpr, DTYPE: tl.constexpr, BLOCK_OUT: tl.constexpr, WORDS: tl.constexpr):
    """Returns [BLOCK_OUT, WORDS]: for each word of 8 numbers, the factor that _decode_e2m1 takes.  scales: [BLOCK_OUT,
    WORDS / 4], one MXFP4 exponent or two NVFP4 scales for each 32 columns."""
    factors = _factors_of_mxfp4_scales(scales, DTYPE) if CODE == 2 else _factors_of_nvfp4_scales(scales, DTYPE)
    return tl.reshape(tl.broadcast_to(factors[:, :, None], (BLOCK_OUT, WORDS // 4, 4)), (BLOCK_OUT, WORDS))


@kernel
def _factors_of_mxfp4_scales(exponents, DTYPE: tl.constexpr):
    """Returns the factors of MXFP4's exponents for _decode_e2m1, in both halves of a uint32.

    A factor is 2^(exponent - 127), times 2^126 (float16: 2^14) because of _decode_e2m1, times 2^-64 (2^-10) to stay in
    range.  Values are exact for exponents from 66 (values near 2^-58) to MAX_EXPONENT (quantised_plans.py)."""
    bits = exponents.to(tl.uint32)
    if tl.bfloat16 == DTYPE:
        return (bits + 62) * 0x800080
    # float16 runs only in the interpreter.  Its range is smaller, so small exponents count as 0.
    return (tl.maximum(bits, 108) - 108) * 0x4000400


@kernel
def _factors_of_nvfp4_scales(pairs, DTYPE: tl.constexpr):
    """Returns the two NVFP4 scales of an int16, times 2^87 (float16: 2^7), as the two halves of a uint32.

    The stored bits (quantised.py) are the bits of a float16, or of a bfloat16 with the exponent lowered by 192."""
    bits = pairs.to(tl.uint16, bitcast=True).to(tl.uint32)
    if tl.bfloat16 == DTYPE:
        factors = ((bits & 0xFF) * 16 | (bits & 0xFF00) * 4096) + 0x60006000
    else:
        factors = (bits & 0xFF) * 128 | (bits >> 8) << 23
    return factors


@kernel
def _decode_e2m1(w, factors, DTYPE: tl.constexpr, BLOCK_OUT: tl.constexpr, WORDS: tl.constexpr):
    """Returns E2M1 numbers times 2^-126 (float16: 2^-14) times their factor: [BLOCK_OUT, 8 · WORDS].

    factors: a uint32 per word.  Its low half is for columns 0 to 15 of 32, its high half for columns 16 to 31.  A word
    has two pairs of numbers from columns 0 to 15, and two pairs from columns 16 to 31.
    interleave_nibbles (quantised.py) has moved the bits.  A mask puts the sign, the two exponent bits and the mantissa
    bit where the dtype has its sign, its lowest exponent bits and its highest mantissa bit.  So an exponent of 0 means
    a subnormal number in E2M1 and in the dtype.  The product is exact.
    """
    # The third pair needs a rotation, because some of its bits are in the other half.
    third, fourth = (w << 10) | (w >> 22), (w >> 2) ^ (w << 6)
    first, second = _decode_e2m1_pair(w, factors, "low", DTYPE), _decode_e2m1_pair(w << 4, factors, "low", DTYPE)
    third, fourth = _decode_e2m1_pair(third, factors, "high", DTYPE), _decode_e2m1_pair(fourth, factors, "high", DTYPE)
    return _in_column_order(first, second, third, fourth, BLOCK_OUT, WORDS)


@kernel
def _decode_e2m1_pair(bits, factors, HALF: tl.constexpr, DTYPE: tl.constexpr):
    """Multiply a pair of E2M1 numbers by its factor.  bits: the bits of two bfloat16 numbers, which a mask has left."""
    bits = bits & 0x81C081C0
    if tl.bfloat16 != DTYPE:
        bits = (bits & 0x80008000) | ((bits & 0x01C001C0) << 3)
    return _multiply_add_pair(bits, factors, bits & 0 | 0x80008000, HALF, DTYPE)


@kernel
def _in_column_order(first, second, third, fourth, BLOCK_OUT: tl.constexpr, WORDS: tl.constexpr):
    """Put the four pairs of each word in column order, see interleave_nibbles."""
    pairs = tl.join(tl.join(first, third), tl.join(second, fourth))
    # [rows, blocks of 32, t, h, p // 2, p % 2] -> [rows, blocks of 32, p // 2, p % 2, t, h]
    pairs = tl.reshape(pairs, (BLOCK_OUT, WORDS // 4, 4, 2, 2, 2)).permute(0, 1, 4, 5, 2, 3)
    return tl.reshape(pairs, (BLOCK_OUT, WORDS * 8))


@kernel
def _multiply_add_pair(bits, factors, offset, HALF: tl.constexpr, DTYPE: tl.constexpr):
    """Return number · factor + offset for the numbers in both halves of each uint32: DTYPE [..., 2].

    HALF: which half of `factors` multiplies a number.  "both": the half in the place of the number.  "low", "high": the
    low, the high half for both numbers.
    The code is assembly, because Triton would split a product of pairs into two products.
    """
    if INTERPRETED:
        low_factor, high_factor = factors >> (16 if HALF == "high" else 0), factors >> (0 if HALF == "low" else 16)
        low = _low_halves(bits, DTYPE) * _low_halves(low_factor, DTYPE) + _low_halves(offset, DTYPE)
        high = _low_halves(bits >> 16, DTYPE) * _low_halves(high_factor, DTYPE) + _low_halves(offset >> 16, DTYPE)
    else:
        PAIR: tl.constexpr = "low, high" if HALF == "both" else HALF + ", " + HALF
        PTX_TYPE: tl.constexpr = "bf16x2" if tl.bfloat16 == DTYPE else "f16x2"
        ASSEMBLY: tl.constexpr = (
            "{ .reg .b16 low, high; .reg .b32 f; mov.b32 {low, high}, $2; mov.b32 f, {" + PAIR + "};"
            "fma.rn." + PTX_TYPE + " $0, $1, f, $3; }"
        )
        both = tl.inline_asm_elementwise(ASSEMBLY, "=r,r,r,r", [bits, factors, offset], tl.uint32, is_pure=True, pack=1)
        low, high = _low_halves(both, DTYPE), _low_halves(both >> 16, DTYPE)
    return tl.join(low, high)


@kernel
def _low_halves(words, DTYPE: tl.constexpr):
    """Returns the low halves of uint32 words, as numbers of DTYPE."""
    return (words & 0xFFFF).to(tl.uint16).to(DTYPE, bitcast=True)
