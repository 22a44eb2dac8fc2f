"""The inner loop of products of few rows with matrices in 4 bits, on Hopper.

The results equal those of nibble_dot (quantised_nibbles.py) to the bit, but the instructions differ.  In nibble_dot the
four warps of a warpgroup multiply together.  A program decodes the weights of a step, then multiplies, then waits for
the product.  Here each warp multiplies alone, with the older instruction mma.m16n8k16.  A warp does not wait for its
product, so it decodes the next weights meanwhile.  A tile of 8 rows of inputs takes half of the work of 16 rows.
"""

from typing import Any, NamedTuple

from triton import constexpr_function
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from espalier.kernels.runtime.jit import gluon_kernel
from espalier.kernels.runtime.pdl import pdl_wait


class NibblePointers(NamedTuple):
    """Pointers to a matrix (quantised_products.py:weight_pointers).  words: each has 8 nibbles (4-bit codes).
    scales: for E2M1, words of 4 scales.  zeros: zero points of int4, or row factors of NVFP4."""

    words: Any
    scales: Any
    zeros: Any


class SharedBuffers(NamedTuple):
    """A program's buffers in shared memory, [STAGES, ...] each, for the words and scales of weights and for x."""

    words: Any
    scales: Any
    x: Any


@constexpr_function
def _num_scale_words(code: str) -> int:
    """Returns the number of words that hold the E2M1 scales of a row in a step of 256 columns."""
    return 2 if code == "mxfp4" else 4


# fmt: off
@gluon_kernel
def weight_rows_of_block(block_index, num_out, IS_GATED: gl.constexpr, LAYOUT: gl.constexpr):
    """Returns [64]: the rows of the weight with which a program multiplies, as linear.py:weight_rows does."""
    row = gl.arange(0, 64, layout=LAYOUT)
    if IS_GATED:
        w_rows = gl.minimum(block_index * 32 + row // 16 * 8 + row % 8, num_out - 1) + row % 16 // 8 * num_out
    else:
        # Rows past the end are replaced by the last row; their results are not stored.
        w_rows = gl.minimum(block_index * 64 + row, num_out - 1)
    return w_rows


@gluon_kernel
def num_row_scales(num_in, CODE: gl.constexpr):
    """Returns how many elements hold the scales of a weight row.  For int4, each group of 128 columns has one element.
    For E2M1, an element is a word of 4 scales."""
    return gl.cdiv(num_in, 128) if CODE == "int4" else gl.cdiv(num_in, 256) * _num_scale_words(CODE)


@gluon_kernel
def _split_columns(words):
    """Split words [64, W] into their left and right half of columns."""
    W: gl.constexpr = words.shape[1]
    return gl.split(words.reshape(64, 2, W // 2).permute(0, 2, 1))


@gluon_kernel
def _low_halves(words):
    """Returns the low halves of uint32 words, as bfloat16."""
    return (words & 0xFFFF).to(gl.uint16).to(gl.bfloat16, bitcast=True)


@gluon_kernel
def _multiply_add_pair(bits, factor, offset, FACTOR_HALF: gl.constexpr):
    """Return number · factor + offset for the two numbers in each uint32, as bfloat16 [..., 2].

    FACTOR_HALF: "both": each number is multiplied by the half of `factor` in the same place.  "low", "high": both
    numbers are multiplied by this half."""
    PAIR: gl.constexpr = "low, high" if FACTOR_HALF == "both" else FACTOR_HALF + ", " + FACTOR_HALF
    both = gl.inline_asm_elementwise(
        "{ .reg .b16 low, high; .reg .b32 f; mov.b32 {low, high}, $2; mov.b32 f, {" + PAIR + "};"
        "fma.rn.bf16x2 $0, $1, f, $3; }",
        "=r,r,r,r", [bits, factor, offset], gl.uint32, is_pure=True, pack=1,
    )
    return gl.join(_low_halves(both), _low_halves(both >> 16))


@gluon_kernel
def _in_column_order(first, second, third, fourth, A_LAYOUT: gl.constexpr):
    """Put the pairs of each word in the order of the columns, see quantised_nibbles.py:_in_column_order.
    No value moves to another thread."""
    pairs = gl.join(gl.join(first, third), gl.join(second, fourth)).reshape(64, 2, 4, 2, 2, 2)
    return gl.convert_layout(pairs.permute(0, 1, 4, 5, 2, 3).reshape(64, 64), A_LAYOUT, assert_trivial=True)


@gluon_kernel
def _decode_int4(w, offset, A_LAYOUT: gl.constexpr):
    """Decode 64 columns of int4, see quantised_nibbles.py:_decode_int4."""
    low_factor, high_factor, shifted = w & 0 | 0x7F007F00, w & 0 | 0x7D007D00, w >> 8
    first = _multiply_add_pair(w & 0x000F000F, low_factor, offset, "both")
    second = _multiply_add_pair(w & 0x00F000F0, high_factor, offset, "both")
    third = _multiply_add_pair(shifted & 0x000F000F, low_factor, offset, "both")
    fourth = _multiply_add_pair(shifted & 0x00F000F0, high_factor, offset, "both")
    return _in_column_order(first, second, third, fourth, A_LAYOUT)


@gluon_kernel
def _decode_e2m1(w, factors, FIRST_HALF: gl.constexpr, SECOND_HALF: gl.constexpr, A_LAYOUT: gl.constexpr):
    """Decode 64 columns of E2M1, see quantised_nibbles.py:_decode_e2m1.

    factors: words of two factors.  A factor multiplies 16 columns: their scale times a power of two.
    FIRST_HALF, SECOND_HALF: the half of the word, "low" or "high", with the factor of the first and last 16 columns."""
    zero = w & 0 | 0x80008000
    first = _multiply_add_pair(w & 0x81C081C0, factors, zero, FIRST_HALF)
    second = _multiply_add_pair((w << 4) & 0x81C081C0, factors, zero, FIRST_HALF)
    third = _multiply_add_pair(((w << 10) | (w >> 22)) & 0x81C081C0, factors, zero, SECOND_HALF)
    fourth = _multiply_add_pair(((w >> 2) ^ (w << 6)) & 0x81C081C0, factors, zero, SECOND_HALF)
    return _in_column_order(first, second, third, fourth, A_LAYOUT)


@gluon_kernel
def _permute_bytes(words, BYTE_SELECTOR: gl.constexpr):
    """Returns words whose bytes the hexadecimal digits of BYTE_SELECTOR choose: 0 to 3 a byte of the word, 4 a zero."""
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, 0, " + BYTE_SELECTOR + ";", "=r,r", [words], gl.uint32, is_pure=True, pack=1,
    )


@gluon_kernel
def _factors_of_scale_words(words, CODE: gl.constexpr, PIECE_LAYOUT: gl.constexpr):
    """Turn words [64], which hold 4 scales each, into factors [64, 8] for the 8 words that hold a row's 64 columns.  A
    factor is a uint32 of two bfloat16 halves (quantised_nibbles.py).

    MXFP4: the 4 scales are exponents, which belong to two pieces of 64 columns.  The low halves of the factors belong
    to the first piece, the high halves to the second.  NVFP4: the 4 scales belong to one piece.  A half of a factor is
    for 16 columns."""
    WORD: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0, 0], [0, 1, 0]], [[0, 0, 1], [0, 0, 2], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]], [], [64, 2, 4],
    )
    if CODE == "mxfp4":
        # 0x1F00 is 62 · 0x80.
        both = gl.join(words & 0x00FF00FF, _permute_bytes(words, "0x4341")) * 0x80 + 0x1F001F00
    else:
        both = gl.join(_permute_bytes(words, "0x4140"), _permute_bytes(words, "0x4342")) * 0x10 + 0x60006000
    both = gl.convert_layout(both, gl.SliceLayout(2, WORD), assert_trivial=True)
    factors = gl.expand_dims(both, 2) + gl.full([64, 2, 4], 0, gl.uint32, layout=WORD)
    return gl.convert_layout(factors.reshape(64, 8), PIECE_LAYOUT, assert_trivial=True)


@gluon_kernel
def _block_offsets(block_index, num_out, row_size, COLUMNS: gl.constexpr, IS_GATED: gl.constexpr, LAYOUT: gl.constexpr):
    """Returns [64, COLUMNS]: the offsets of the first columns of a block's rows.  row_size: values per matrix row."""
    rows = weight_rows_of_block(block_index, num_out, IS_GATED, gl.SliceLayout(1, LAYOUT)) * row_size
    return gl.expand_dims(rows, 1) + gl.expand_dims(gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT)), 0)


@gluon_kernel
def _copy_codes(buffers, stage, matrix, offsets, first_column, row_words, CODE: gl.constexpr, EVEN_IN: gl.constexpr):
    """Start to copy the weights' codes: the words of columns first_column .. first_column + 255, and for E2M1 their
    scales.

    offsets: (offsets of words, offsets of scales) in the matrix, for columns 0 .. 255."""
    words, scales = offsets
    if EVEN_IN:
        source = matrix.words + first_column // 8 + words
        hopper.async_copy.async_copy_global_to_shared(buffers.words.index(stage), source)
    else:
        column = gl.expand_dims(first_column // 8 + gl.arange(0, 32, layout=gl.SliceLayout(0, words.type.layout)), 0)
        hopper.async_copy.async_copy_global_to_shared(
            buffers.words.index(stage), matrix.words + first_column // 8 + words, mask=column < row_words,
        )
    if CODE != "int4":
        hopper.async_copy.async_copy_global_to_shared(
            buffers.scales.index(stage), matrix.scales + first_column // 256 * _num_scale_words(CODE) + scales,
        )


@gluon_kernel
def _copy_inputs(buffers, stage, x_ptr, offsets, row_exists, first_column, num_in, EVEN_IN: gl.constexpr):
    """Start to copy columns first_column .. first_column + 255 of x to a stage.  offsets: of columns 0 .. 255 in x."""
    if not EVEN_IN:
        column = gl.expand_dims(first_column + gl.arange(0, 256, layout=gl.SliceLayout(0, offsets.type.layout)), 0)
        row_exists = row_exists & (column < num_in)
    source = x_ptr + first_column + offsets
    hopper.async_copy.async_copy_global_to_shared(buffers.x.index(stage), source, mask=row_exists)


@gluon_kernel
def _load_two_groups(pointers, first_column, num_groups):
    """Load the values (scales or zero points) of the two int4 groups from first_column on.

    A group past the end gets the last group's value."""
    first = gl.load(pointers + gl.minimum(first_column // 128, num_groups - 1))
    return first, gl.load(pointers + gl.minimum(first_column // 128 + 1, num_groups - 1))


@gluon_kernel
def _zero_point_offset(zeros):
    """Returns the offset that _decode_int4 adds: minus the zero points, times 2^-6, in both halves of a uint32."""
    offset = (zeros.to(gl.float32) * -0.015625).to(gl.bfloat16)
    return offset.to(gl.uint16, bitcast=True).to(gl.uint32) * 0x10001


@gluon_kernel
def _load_word_pieces(buffers, stage):
    """Load the words of a step (256 columns) as 4 pieces [64, 8].  A thread gets the words that it multiplies."""
    WORDS: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0], [0, 4], [0, 8], [0, 16]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 32],
    )
    left, right = _split_columns(buffers.words.index(stage).load(WORDS))
    return _split_columns(left) + _split_columns(right)


@gluon_kernel
def _multiply_piece(weights, x, piece: gl.constexpr, partial_sum):
    """Add the product of weights with columns 64 · piece .. 64 · piece + 63 of x to partial_sum."""
    B: gl.constexpr = gl.DotOperandLayout(1, partial_sum.type.layout, 2)
    return hopper.mma_v2(weights, x.slice(64 * piece, 64, 0).load(B), partial_sum)


@gluon_kernel
def _multiply_e2m1_step(acc, buffers, stage, CODE: gl.constexpr):
    """Add the products of the weights and inputs in a stage to acc.  buffers: the buffers of all stages."""
    ACC_LAYOUT: gl.constexpr = acc.type.layout
    A_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, ACC_LAYOUT, 2)
    TWO_WORDS: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0], [0, 1]], [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 2],
    )
    FOUR_WORDS: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0], [0, 1], [0, 2]], [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 4],
    )
    pieces = _load_word_pieces(buffers, stage)
    PIECE_LAYOUT: gl.constexpr = pieces[0].type.layout
    x = buffers.x.index(stage).permute((1, 0))
    step_sum = gl.zeros([64, acc.shape[1]], gl.float32, layout=ACC_LAYOUT)
    if CODE == "mxfp4":
        scales = _split_columns(buffers.scales.index(stage).load(TWO_WORDS))
        for p in gl.static_range(4):
            factors = _factors_of_scale_words(scales[p // 2].reshape(64), CODE, PIECE_LAYOUT)
            if p % 2 == 0:
                step_sum = _multiply_piece(_decode_e2m1(pieces[p], factors, "low", "low", A_LAYOUT), x, p, step_sum)
            else:
                step_sum = _multiply_piece(_decode_e2m1(pieces[p], factors, "high", "high", A_LAYOUT), x, p, step_sum)
    else:
        left, right = _split_columns(buffers.scales.index(stage).load(FOUR_WORDS))
        scales = _split_columns(left) + _split_columns(right)
        for p in gl.static_range(4):
            factors = _factors_of_scale_words(scales[p].reshape(64), CODE, PIECE_LAYOUT)
            step_sum = _multiply_piece(_decode_e2m1(pieces[p], factors, "low", "high", A_LAYOUT), x, p, step_sum)
    # The factors are too small by 2^64 (MXFP4) or 2^39 (NVFP4).
    UNIT: gl.constexpr = 18446744073709551616.0 if CODE == "mxfp4" else 549755813888.0
    return acc + step_sum * UNIT


@gluon_kernel
def _multiply_int4_step(acc, buffers, stage, scales, zeros, first_column, num_groups):
    """Add the products of one step to acc.  scales: the scales of the step's two groups.  zeros: pointers to each row's
    zero points, or None."""
    ACC_LAYOUT: gl.constexpr = acc.type.layout
    A_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, ACC_LAYOUT, 2)
    pieces = _load_word_pieces(buffers, stage)
    x = buffers.x.index(stage).permute((1, 0))
    ROW: gl.constexpr = gl.SliceLayout(1, pieces[0].type.layout)
    if zeros is not None:
        zero_points = _load_two_groups(zeros, first_column, num_groups)
    for group in gl.static_range(2):
        # -8 · 2^-6 in both halves.
        offset = pieces[0] & 0 | 0xBE00BE00
        if zeros is not None:
            offset = pieces[0] & 0 | gl.expand_dims(gl.convert_layout(_zero_point_offset(zero_points[group]), ROW), 1)
        group_sum = gl.zeros([64, acc.shape[1]], gl.float32, layout=ACC_LAYOUT)
        for p in gl.static_range(2 * group, 2 * group + 2):
            group_sum = _multiply_piece(_decode_int4(pieces[p], offset, A_LAYOUT), x, p, group_sum)
        # The decoded numbers are 2^-6 times the true numbers.
        acc += group_sum * gl.expand_dims(scales[group].to(gl.float32) * 64.0, 1)
    return acc


@gluon_kernel
def nibble_product(
    matrix, block_index, x_ptr, x_places, row_exists, num_out, num_in, k_begin, k_end,
    CODE: gl.constexpr, STAGES: gl.constexpr, IS_GATED: gl.constexpr, EVEN_IN: gl.constexpr, USE_PDL: gl.constexpr,
    ACC_LAYOUT: gl.constexpr,
):
    """Returns [64, ROWS] float32 in layout ACC_LAYOUT: the product of a block's rows with x, see
    quantised_nibbles.py:nibble_dot.

    block_index, num_out: as for weight_rows_of_block.  x_places: [ROWS, 256], the offsets of columns 0 .. 255 in x.
    row_exists: [ROWS, 1] bool.  k_begin, k_end: the first column, a multiple of 256, and the end.  int4 has groups of
    128 columns.

    The copies of the first steps' codes start before the wait for the previous kernel."""
    ROWS: gl.constexpr = x_places.shape[0]
    # A thread copies 16 bytes of codes at a time, and 4 or 8 bytes of scales.
    COPIED: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    SCALE_WORDS: gl.constexpr = _num_scale_words(CODE)
    SCALES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    COPIED_SCALES: gl.constexpr = gl.BlockedLayout([1, SCALE_WORDS // 2], [16, 2], [4, 1], [1, 0])
    shared = SharedBuffers(
        gl.allocate_shared_memory(gl.uint32, [STAGES, 64, 32], gl.SwizzledSharedLayout(4, 1, 8, [1, 0])),
        gl.allocate_shared_memory(gl.uint32, [STAGES, 64, SCALE_WORDS], SCALES),
        gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, 256], gl.NVMMASharedLayout(128, 16, 2)),
    )
    row_words = num_in // 32 * 4
    row_scales = num_row_scales(num_in, CODE)
    code_offsets = (
        _block_offsets(block_index, num_out, row_words, 32, IS_GATED, COPIED),
        _block_offsets(block_index, num_out, row_scales, SCALE_WORDS, IS_GATED, COPIED_SCALES),
    )
    for s in gl.static_range(STAGES - 1):
        if k_begin + s * 256 < k_end:
            _copy_codes(shared, s, matrix, code_offsets, k_begin + s * 256, row_words, CODE, EVEN_IN)
    pdl_wait(USE_PDL)
    for s in gl.static_range(STAGES - 1):
        if k_begin + s * 256 < k_end:
            _copy_inputs(shared, s, x_ptr, x_places, row_exists, k_begin + s * 256, num_in, EVEN_IN)
        hopper.async_copy.commit_group()
    acc = gl.zeros([64, ROWS], gl.float32, layout=ACC_LAYOUT)
    acc_rows = weight_rows_of_block(block_index, num_out, IS_GATED, gl.SliceLayout(1, ACC_LAYOUT))
    first_scales = acc_rows * row_scales
    if CODE == "int4":
        zeros = None if matrix.zeros is None else matrix.zeros + first_scales
        # Scales are loaded one step ahead, so that no step waits for its scales.
        scales = _load_two_groups(matrix.scales + first_scales, k_begin, row_scales)
    if CODE == "nvfp4":
        row_factors = gl.load(matrix.zeros + acc_rows).to(gl.float32)
    stage, free_stage = 0, STAGES - 1
    for k in range(k_begin, k_end, 256):
        hopper.async_copy.wait_group(STAGES - 2)
        next_k = k + (STAGES - 1) * 256
        if next_k < k_end:
            _copy_codes(shared, free_stage, matrix, code_offsets, next_k, row_words, CODE, EVEN_IN)
            _copy_inputs(shared, free_stage, x_ptr, x_places, row_exists, next_k, num_in, EVEN_IN)
        hopper.async_copy.commit_group()
        if CODE == "int4":
            next_scales = _load_two_groups(matrix.scales + first_scales, k + 256, row_scales)
            acc = _multiply_int4_step(acc, shared, stage, scales, zeros, k, row_scales)
            scales = next_scales
        else:
            acc = _multiply_e2m1_step(acc, shared, stage, CODE)
        stage = stage + 1 if stage + 1 < STAGES else 0
        free_stage = free_stage + 1 if free_stage + 1 < STAGES else 0
    if CODE == "nvfp4":
        acc *= gl.expand_dims(row_factors, 1)
    return acc
