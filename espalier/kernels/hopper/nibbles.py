"""The inner loop of products of few rows with matrices in 4 bits, on Hopper.

The results are equal to nibble_dot's (quantised_nibbles.py) to the bit; the instructions are others.  In nibble_dot the
tensor cores take the operands of a whole warpgroup, so a program decodes a step, then multiplies, then waits for the
product.  Here each warp multiplies on its own, with the older instruction for 16 × 8 × 16 numbers.  A warp does not
wait, so the compiler decodes the next weights during a product.  Up to 8 rows of inputs take half of the work of 16
rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from espalier.kernels.runtime.jit import gluon_kernel
from espalier.kernels.runtime.pdl import pdl_wait


class Nibbles(NamedTuple):
    """Pointers to a matrix: words of 8 nibbles; scales (for MXFP4 words of 4 exponents); zero points or None."""

    words: Any
    scales: Any
    zeros: Any


class Shared(NamedTuple):
    """Shared memory of a program, [STAGES, ...] each: words of nibbles, words of exponents, inputs."""

    words: Any
    exponents: Any
    x: Any


# Arguments are grouped by meaning; one argument per line would hide the groups.
# fmt: off
@gluon_kernel
def rows_of_block(block, num_out, GATED: gl.constexpr, LAYOUT: gl.constexpr):
    """[64]: the weight rows that a program multiplies with.  See linear.py:weight_rows."""
    row = gl.arange(0, 64, layout=LAYOUT)
    if GATED:
        found = gl.minimum(block * 32 + row // 16 * 8 + row % 8, num_out - 1) + row % 16 // 8 * num_out
    else:
        # Rows past the end become the last row; their results are not stored.
        found = gl.minimum(block * 64 + row, num_out - 1)
    return found


@gluon_kernel
def scales_of_row(num_in, MXFP4: gl.constexpr):
    """The number of scales per weight row: words of exponents for MXFP4, else groups."""
    return gl.cdiv(num_in, 256) * 2 if MXFP4 else gl.cdiv(num_in, 128)


@gluon_kernel
def _halves(words):
    """Split words [64, W] into their left and right half of columns."""
    W: gl.constexpr = words.shape[1]
    return gl.split(words.reshape(64, 2, W // 2).permute(0, 2, 1))


@gluon_kernel
def _low(words):
    return (words & 0xFFFF).to(gl.uint16).to(gl.bfloat16, bitcast=True)


@gluon_kernel
def _pair(bits, factor, offset, FACTOR: gl.constexpr):
    """Return number · factor + offset for the two numbers in each uint32, as bfloat16 [..., 2].

    FACTOR: "both": each number has the factor in its own half of `factor`; "low" or "high": both numbers have that one.
    """
    PAIR: gl.constexpr = "low, high" if FACTOR == "both" else FACTOR + ", " + FACTOR
    both = gl.inline_asm_elementwise(
        "{ .reg .b16 low, high; .reg .b32 f; mov.b32 {low, high}, $2; mov.b32 f, {" + PAIR + "};"
        "fma.rn.bf16x2 $0, $1, f, $3; }",
        "=r,r,r,r", [bits, factor, offset], gl.uint32, is_pure=True, pack=1,
    )
    return gl.join(_low(both), _low(both >> 16))


@gluon_kernel
def _in_columns(first, second, third, fourth, A: gl.constexpr):
    """Put the pairs of each word in the order of the columns, see quantised_nibbles.py:_to_column_order.

    No value moves between threads.
    """
    pairs = gl.join(gl.join(first, third), gl.join(second, fourth)).reshape(64, 2, 4, 2, 2, 2)
    return gl.convert_layout(pairs.permute(0, 1, 4, 5, 2, 3).reshape(64, 64), A, assert_trivial=True)


@gluon_kernel
def _int4(w, offset, A: gl.constexpr):
    """Decode 64 columns of int4, see quantised_nibbles.py:_decode_int4."""
    of_low, of_high, shifted = w & 0 | 0x7F007F00, w & 0 | 0x7D007D00, w >> 8
    first = _pair(w & 0x000F000F, of_low, offset, "both")
    second = _pair(w & 0x00F000F0, of_high, offset, "both")
    third = _pair(shifted & 0x000F000F, of_low, offset, "both")
    fourth = _pair(shifted & 0x00F000F0, of_high, offset, "both")
    return _in_columns(first, second, third, fourth, A)


@gluon_kernel
def _e2m1(w, factor, HALF: gl.constexpr, A: gl.constexpr):
    """Decode 64 columns of E2M1, see quantised_nibbles.py:_decode_e2m1.  HALF: the half of `factor` that is read."""
    zero = w & 0 | 0x80008000
    third, fourth = (w << 10) | (w >> 22), (w << 14) | (w >> 18)
    first = _pair(w & 0x81C081C0, factor, zero, HALF)
    second = _pair((w << 4) & 0x81C081C0, factor, zero, HALF)
    third = _pair(third & 0x81C081C0, factor, zero, HALF)
    fourth = _pair((fourth & 0x81808180) | ((w << 6) & 0x00400040), factor, zero, HALF)
    return _in_columns(first, second, third, fourth, A)


@gluon_kernel
def _factors(exponents, PIECE: gl.constexpr):
    """Words of 4 exponents [64] -> factors [64, 8] for words of 64 columns, see quantised_nibbles.py:_mxfp4_factor.

    The low halves are for the first two exponents, the high halves for the last two.
    """
    WORD: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0, 0], [0, 1, 0]], [[0, 0, 1], [0, 0, 2], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]], [], [64, 2, 4],
    )
    # Bytes 0 and 2 share one uint32, and bytes 1 and 3 another, each byte in a half.
    odd = gl.inline_asm_elementwise("prmt.b32 $0, $1, 0, 0x4341;", "=r,r", [exponents], gl.uint32, is_pure=True, pack=1)
    both = gl.convert_layout(gl.join(exponents & 0x00FF00FF, odd), gl.SliceLayout(2, WORD), assert_trivial=True)
    # 0x1F00 is 62 · 0x80.
    factors = gl.expand_dims(both * 0x80 + 0x1F001F00, 2) + gl.full([64, 2, 4], 0, gl.uint32, layout=WORD)
    return gl.convert_layout(factors.reshape(64, 8), PIECE, assert_trivial=True)


@gluon_kernel
def _places(block, num_out, row_size, COLUMNS: gl.constexpr, GATED: gl.constexpr, LAYOUT: gl.constexpr):
    """[64, COLUMNS]: offsets of a block's rows, in a matrix whose rows have row_size values.  Columns from 0 on."""
    rows = rows_of_block(block, num_out, GATED, gl.SliceLayout(1, LAYOUT)) * row_size
    return gl.expand_dims(rows, 1) + gl.expand_dims(gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT)), 0)


@gluon_kernel
def _copy_codes(shared, stage, matrix, places, k, row_words, MXFP4: gl.constexpr, EVEN_IN: gl.constexpr):
    """Start the copies of the words and exponents of columns k .. k + 255.

    places: (offsets of words, offsets of exponents) for columns 0 .. 255.
    """
    words, exponents = places
    if EVEN_IN:
        hopper.async_copy.async_copy_global_to_shared(shared.words.index(stage), matrix.words + k // 8 + words)
    else:
        column = gl.expand_dims(k // 8 + gl.arange(0, 32, layout=gl.SliceLayout(0, words.type.layout)), 0)
        hopper.async_copy.async_copy_global_to_shared(
            shared.words.index(stage), matrix.words + k // 8 + words, mask=column < row_words,
        )
    if MXFP4:
        hopper.async_copy.async_copy_global_to_shared(
            shared.exponents.index(stage), matrix.scales + k // 128 + exponents,
        )


@gluon_kernel
def _copy_inputs(shared, stage, x_ptr, places, inside, k, num_in, EVEN_IN: gl.constexpr):
    if not EVEN_IN:
        column = gl.expand_dims(k + gl.arange(0, 256, layout=gl.SliceLayout(0, places.type.layout)), 0)
        inside = inside & (column < num_in)
    hopper.async_copy.async_copy_global_to_shared(shared.x.index(stage), x_ptr + k + places, mask=inside)


@gluon_kernel
def _of_two_groups(pointers, k, num_groups):
    """Load the values at `pointers` for the two int4 groups from column k on; past the end, those of the last group."""
    first = gl.load(pointers + gl.minimum(k // 128, num_groups - 1))
    return first, gl.load(pointers + gl.minimum(k // 128 + 1, num_groups - 1))


@gluon_kernel
def _offset(zeros):
    """The offset that _int4 adds: minus the zero points, times 2^-6, in both halves of a uint32."""
    offset = (zeros.to(gl.float32) * -0.015625).to(gl.bfloat16)
    return offset.to(gl.uint16, bitcast=True).to(gl.uint32) * 0x10001


@gluon_kernel
def _pieces(shared, stage):
    """Load a step's words as 4 times [64, 8], laid out so that a thread decodes its own rows and columns of A."""
    WORDS: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0], [0, 4], [0, 8], [0, 16]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 32],
    )
    left, right = _halves(shared.words.index(stage).load(WORDS))
    return _halves(left) + _halves(right)


@gluon_kernel
def _multiply(a, x, piece: gl.constexpr, part):
    B: gl.constexpr = gl.DotOperandLayout(1, part.type.layout, 2)
    return hopper.mma_v2(a, x.slice(64 * piece, 64, 0).load(B), part)


@gluon_kernel
def _step_of_mxfp4(acc, shared, stage):
    """Add the products of one step to acc."""
    ACC: gl.constexpr = acc.type.layout
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    EXPONENTS: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0], [0, 1]], [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 2],
    )
    pieces = _pieces(shared, stage)
    PIECE: gl.constexpr = pieces[0].type.layout
    exponents = _halves(shared.exponents.index(stage).load(EXPONENTS))
    x = shared.x.index(stage).permute((1, 0))
    part = gl.zeros([64, acc.shape[1]], gl.float32, layout=ACC)
    for p in gl.static_range(4):
        factors = _factors(exponents[p // 2].reshape(64), PIECE)
        part = _multiply(_e2m1(pieces[p], factors, "low" if p % 2 == 0 else "high", A), x, p, part)
    # 2^64 is missing in the factors.
    return acc + part * 18446744073709551616.0


@gluon_kernel
def _step_of_int4(acc, shared, stage, scales, zeros, k, num_groups):
    """Add the products of one step to acc.  scales: of its two groups; zeros: pointers to zero points, or None."""
    ACC: gl.constexpr = acc.type.layout
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    pieces = _pieces(shared, stage)
    x = shared.x.index(stage).permute((1, 0))
    ROW: gl.constexpr = gl.SliceLayout(1, pieces[0].type.layout)
    if zeros is not None:
        points = _of_two_groups(zeros, k, num_groups)
    for group in gl.static_range(2):
        # -8 · 2^-6 in both halves.
        offset = pieces[0] & 0 | 0xBE00BE00
        if zeros is not None:
            offset = pieces[0] & 0 | gl.expand_dims(gl.convert_layout(_offset(points[group]), ROW), 1)
        part = gl.zeros([64, acc.shape[1]], gl.float32, layout=ACC)
        for p in gl.static_range(2 * group, 2 * group + 2):
            part = _multiply(_int4(pieces[p], offset, A), x, p, part)
        # The decoded numbers are 2^-6 times the true ones.
        acc += part * gl.expand_dims(scales[group].to(gl.float32) * 64.0, 1)
    return acc


@gluon_kernel
def nibble_product(
    matrix, block, x_ptr, x_places, inside, num_out, num_in, k_begin, k_end,
    MXFP4: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr, EVEN_IN: gl.constexpr, DEPENDENT: gl.constexpr,
    ACC: gl.constexpr,
):
    """[64, ROWS] float32 in layout ACC: the product of a block's rows with x, see quantised_nibbles.py:nibble_dot.

    block, num_out: as for rows_of_block.  x_places: [ROWS, 256], offsets of the inputs' first columns in x; inside:
    [ROWS, 1], whether the row exists.  k_begin: a multiple of 256.  int4 has groups of 128 columns.

    The copies of the first steps' codes start before the wait for the previous kernel.
    """
    ROWS: gl.constexpr = x_places.shape[0]
    # A thread copies 16 bytes of codes at a time, and 4 of exponents.
    COPIED: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    COPIED_EXPONENTS: gl.constexpr = gl.BlockedLayout([1, 1], [16, 2], [4, 1], [1, 0])
    shared = Shared(
        gl.allocate_shared_memory(gl.uint32, [STAGES, 64, 32], gl.SwizzledSharedLayout(4, 1, 8, [1, 0])),
        gl.allocate_shared_memory(gl.uint32, [STAGES, 64, 2], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])),
        gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, 256], gl.NVMMASharedLayout(128, 16, 2)),
    )
    row_words = num_in // 32 * 4
    row_scales = scales_of_row(num_in, MXFP4)
    places = (
        _places(block, num_out, row_words, 32, GATED, COPIED),
        _places(block, num_out, row_scales, 2, GATED, COPIED_EXPONENTS),
    )
    for s in gl.static_range(STAGES - 1):
        if k_begin + s * 256 < k_end:
            _copy_codes(shared, s, matrix, places, k_begin + s * 256, row_words, MXFP4, EVEN_IN)
    pdl_wait(DEPENDENT)
    for s in gl.static_range(STAGES - 1):
        if k_begin + s * 256 < k_end:
            _copy_inputs(shared, s, x_ptr, x_places, inside, k_begin + s * 256, num_in, EVEN_IN)
        hopper.async_copy.commit_group()
    acc = gl.zeros([64, ROWS], gl.float32, layout=ACC)
    own_groups = rows_of_block(block, num_out, GATED, gl.SliceLayout(1, ACC)) * row_scales
    zeros = None
    if matrix.zeros is not None:
        zeros = matrix.zeros + own_groups
    if not MXFP4:
        # Scales are loaded one step ahead, so that no step waits for its scales.
        scales = _of_two_groups(matrix.scales + own_groups, k_begin, row_scales)
    stage, empty = 0, STAGES - 1
    for k in range(k_begin, k_end, 256):
        hopper.async_copy.wait_group(STAGES - 2)
        if MXFP4:
            acc = _step_of_mxfp4(acc, shared, stage)
        else:
            next_scales = _of_two_groups(matrix.scales + own_groups, k + 256, row_scales)
            acc = _step_of_int4(acc, shared, stage, scales, zeros, k, row_scales)
            scales = next_scales
        ahead = k + (STAGES - 1) * 256
        if ahead < k_end:
            _copy_codes(shared, empty, matrix, places, ahead, row_words, MXFP4, EVEN_IN)
            _copy_inputs(shared, empty, x_ptr, x_places, inside, ahead, num_in, EVEN_IN)
        hopper.async_copy.commit_group()
        stage = stage + 1 if stage + 1 < STAGES else 0
        empty = empty + 1 if empty + 1 < STAGES else 0
    return acc


# fmt: on
