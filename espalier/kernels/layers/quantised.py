"""Matrices in 8 or 4 bits with scales, and what products with such matrices need.

On a GPU a product stores at most a block of dequantised rows (linear_dequantised.py).  The reference also dequantises
one block at a time, so a model on a CPU needs memory for its stored weights only.
Inputs may be rounded to FP8 too.  The scales of an input row come from this row or from the checkpoint, so they do not
depend on other rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
# The values of E2M1's codes 0 to 7: 1 sign bit, 2 exponent bits, 1 mantissa bit (OCP Microscaling 1.0, 5.3.3).
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# An MXFP4 scale s means 2^(s - 127) (OCP Microscaling 1.0, 5.4.1).
E8M0_BIAS = 127
# Each row of E2M1 scales is padded to a multiple of this many columns, so that kernels load scales without a mask.
E2M1_SCALE_PADDING = 256
# The number of columns whose nibbles are reordered together (interleave_nibbles), and the bytes of these nibbles.
INTERLEAVED_COLUMNS = 32
INTERLEAVED_BYTES = INTERLEAVED_COLUMNS // 2
# How the bits of E2M1 move within the int32 words of `interleave_nibbles`: (mask of bits, their shift to the left).
E2M1_BIT_MOVES = (
    *((0x00000700, 20), (0x00080008, 12), (0x00070007, 6), (0x00800080, 4), (0x00700070, -2), (0x40004000, -4)),
    *((0x88008800, -6), (0x37003000, -12)),
)
# After the moves, for each pair (mask of bits, shift to the left) in turn, the shifted bits are xored into the word.
E2M1_BIT_FOLDS = ((0x01000100, -8), (0x00040004, 8), (0x02000000, -8), (0x00020000, -8), (0x00000200, -8))
# An NVFP4 scale is stored as bits 14 to 7 of float16(scale · SCALE_UNIT).  In this form no scale is subnormal.
SCALE_UNIT, SCALE_SHIFT = 2.0**7, 7
# The most values that the reference dequantises at once: 16 MiB of float32.
DEQUANTISED_VALUES_PER_STEP = 2**22

Code = Literal["fp8", "int4", "mxfp4", "nvfp4"]
# The codes whose nibbles are E2M1 numbers.
E2M1_CODES = ("mxfp4", "nvfp4")
# Pairs (mask of bits in a word, their shift to the left).
BitMoves = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class InputScales:
    """How the inputs of a product are rounded to FP8.

    group_size: the number of columns that share a scale; None: all columns of a row share one scale.  static_scale:
    float32 [1], the scale of every row; None: a scale is the largest magnitude of its group, divided by FP8_MAX."""

    group_size: int | None = None
    static_scale: Tensor | None = None

    def columns(self, num_columns: int) -> int:
        """Returns the number of columns that share a scale, in a row of `num_columns` columns."""
        return min(self.group_size or num_columns, num_columns)


@dataclass(frozen=True)
class RoundedRows:
    """Inputs of a product that are already rounded to FP8.

    values: FP8 [rows, in].  scales: float32 [rows, groups].  dtype: the dtype before the rounding, which is also the
    dtype of a product's result."""

    values: Tensor
    scales: Tensor
    dtype: torch.dtype

    def __len__(self) -> int:
        return len(self.values)


# Inputs of a product [rows, in].
InputRows = Tensor | RoundedRows


@dataclass(frozen=True)
class QuantisedMatrix:
    """A matrix [out, in] or a stack of experts [E, out, in].  Its values are (codes - zeros) · scales.

    code: the format of codes.  codes: for "fp8", float8_e4m3fn [..., out, in].  For other codes, uint8 [..., out, in /
    2] with two columns per byte, in the order of `interleave_nibbles`, which also moves the bits of E2M1.
    scales: [..., ceil(out / rows_per_scale), ceil(in / group_size)], floating point.  For "mxfp4", uint8 exponents.
    For "nvfp4", uint8, see SCALE_UNIT.  Both are padded, see E2M1_SCALE_PADDING.  If an NVFP4 scale is 0, the numbers
    of its group are ±0.
    row_scales: for "nvfp4", float64 [..., out], one more factor for each row.  If a file has a divisor instead, this is
    its float64 inverse: the products then have the bits of the format's float32 quotients.
    zeros: for "int4", the zero points, uint8 [..., out, ceil(in / group_size)]; None: all are 8.
    column_order: [in] int64, column c of codes multiplies input column_order[c]; None: column c multiplies input c.
    input_scales: how the inputs are rounded; None: inputs are not rounded.
    """

    code: Code
    codes: Tensor
    scales: Tensor
    group_size: int
    rows_per_scale: int = 1
    zeros: Tensor | None = None
    column_order: Tensor | None = None
    input_scales: InputScales | None = None
    row_scales: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        *lead, rows, columns = self.codes.shape
        return *lead, rows, columns if self.code == "fp8" else 2 * columns

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        input_scale = None if self.input_scales is None else self.input_scales.static_scale
        optional = (self.zeros, self.row_scales, self.column_order, input_scale)
        return self.codes, self.scales, *(tensor for tensor in optional if tensor is not None)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, expert: int) -> "QuantisedMatrix":
        """Returns one expert of a stack."""
        return self._map_rows(lambda tensor: tensor[expert])

    def experts(self, num_experts: int) -> "QuantisedMatrix":
        """Returns the matrix [E · out, in] as a stack of E experts [E, out, in].  rows_per_scale must divide out."""
        return self._map_rows(lambda tensor: tensor.unflatten(0, (num_experts, -1)))

    def _map_rows(self, transform: Callable[[Tensor], Tensor]) -> "QuantisedMatrix":
        """Apply `transform` to the tensors with rows of the matrix: codes, scales, zeros and row_scales."""
        optional = (self.zeros, self.row_scales)
        zeros, factors = (None if tensor is None else transform(tensor) for tensor in optional)
        return replace(
            self, codes=transform(self.codes), scales=transform(self.scales), zeros=zeros, row_scales=factors
        )

    def rows_from(self, first_row: int) -> "QuantisedMatrix":
        """Returns rows first_row .. out-1 of a matrix [out, in] as views.  rows_per_scale must divide `first_row`."""
        rows = self._map_rows(lambda tensor: tensor[first_row:])
        return replace(rows, scales=self.scales[first_row // self.rows_per_scale :])

    def permute_rows_in_place(self, new_order: Tensor) -> "QuantisedMatrix":
        """Reorder the rows of all experts [E, out, in], in place.  rows_per_scale must be 1, and zeros None.

        The experts are reordered one by one, so that no second copy of all experts is needed."""
        for tensor in (self.codes, self.scales, *(() if self.row_scales is None else (self.row_scales,))):
            for expert in tensor:
                expert.copy_(expert[new_order.to(expert.device)])
        return self


def make_nibble_matrix(
    code: Literal["int4", "mxfp4", "nvfp4"],
    packed: Tensor,
    scales: Tensor,
    group_size: int,
    zeros: Tensor | None = None,
    column_order: Tensor | None = None,
    row_scales: Tensor | None = None,
) -> QuantisedMatrix:
    """Make a matrix from packed nibbles in column order: uint8 [..., out, in / 2], low nibbles first.

    zeros, column_order, row_scales: as in QuantisedMatrix.  scales: likewise, but without padding.  For "nvfp4":
    float8_e4m3fn, at least 0."""
    if code == "nvfp4":
        packed, scales = _without_zero_scales(packed, scales, group_size), _encode_nvfp4_scales(scales)
    if code in E2M1_CODES:
        padded = F.pad(scales.view(torch.uint8), (0, -scales.shape[-1] % (E2M1_SCALE_PADDING // group_size)))
        scales = padded.view(scales.dtype)
    codes = interleave_nibbles(packed, code in E2M1_CODES)
    return QuantisedMatrix(code, codes, scales, group_size, 1, zeros, column_order, row_scales=row_scales)


def _without_zero_scales(packed: Tensor, scales: Tensor, group_size: int) -> Tensor:
    """Replace the numbers in groups of scale 0 by zeros of the same sign, because kernels do not support scale 0."""
    is_zero = scales.view(torch.uint8) == 0
    if not is_zero.any():
        return packed
    return torch.where(is_zero.repeat_interleave(group_size // 2, -1)[..., : packed.shape[-1]], packed & 0x88, packed)


def _encode_nvfp4_scales(scales: Tensor) -> Tensor:
    """Returns scales, float8_e4m3fn of at least 0, as the uint8 codes that kernels read (SCALE_UNIT)."""
    return ((scales.half() * SCALE_UNIT).view(torch.int16) >> SCALE_SHIFT).to(torch.uint8)


def _decode_nvfp4_scales(encoded: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the inverse of _encode_nvfp4_scales."""
    return (encoded.to(torch.int16) << SCALE_SHIFT).view(torch.float16).to(dtype) / SCALE_UNIT


def dequantise(matrix: QuantisedMatrix, dtype: torch.dtype, first_row: int = 0, end_row: int | None = None) -> Tensor:
    """Dequantises rows first_row .. end_row-1 of a matrix [out, in].  The columns of the result are in the order of the
    inputs.  first_row must be a multiple of rows_per_scale.  Each value is rounded once."""
    rows = slice(first_row, matrix.shape[0] if end_row is None else end_row)
    wide_dtype = torch.promote_types(dtype, torch.float32)
    codes = matrix.codes[rows]
    values = _fp8_values(codes, wide_dtype) if matrix.code == "fp8" else _nibble_values(matrix, codes, wide_dtype)
    num_rows, num_in = values.shape
    # Columns past the end of the last group are computed and dropped.
    grouped = F.pad(values, (0, -num_in % matrix.group_size)).unflatten(1, (-1, matrix.group_size))
    if matrix.code == "int4":
        grouped -= 8 if matrix.zeros is None else matrix.zeros[rows, :, None]
    scales = matrix.scales[first_row // matrix.rows_per_scale : -(-(first_row + num_rows) // matrix.rows_per_scale)]
    if matrix.code in E2M1_CODES:
        scales = scales[:, : grouped.shape[1]]
    if matrix.code == "mxfp4":
        scales = torch.ldexp(torch.ones_like(scales, dtype=wide_dtype), scales.int() - E8M0_BIAS)
    if matrix.code == "nvfp4":
        scales = _decode_nvfp4_scales(scales, wide_dtype)
    if matrix.row_scales is not None:
        scales = scales.double() * matrix.row_scales[rows, None]
    grouped *= scales.to(wide_dtype).repeat_interleave(matrix.rows_per_scale, 0)[:num_rows, :, None]
    values = grouped.flatten(1)[:, :num_in].to(dtype)
    if matrix.column_order is None:
        return values
    return torch.empty_like(values).index_copy_(1, matrix.column_order, values)


def _fp8_values(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert FP8 codes.  On a CPU, a table of all pairs of codes takes a third of the time of a conversion."""
    if codes.device.type != "cpu" or codes.shape[1] % 2 or codes.stride(0) % 2:
        return codes.to(dtype)
    pairs = codes.view(torch.uint16).to(torch.int32).flatten()
    return _fp8_pair_table(dtype).index_select(0, pairs).view(codes.shape)


@cache
def _fp8_pair_table(dtype: torch.dtype) -> Tensor:
    """Returns [65536, 2]: for every uint16, the FP8 values of its two bytes, in the order of memory."""
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.uint16)
    return numbers.view(FP8).view(-1, 2).to(dtype)


def _nibble_values(matrix: QuantisedMatrix, codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the values of 4-bit codes without their scales.  codes: interleaved, of some rows of the matrix."""
    packed = deinterleave_nibbles(codes, matrix.code in E2M1_CODES)
    if matrix.code == "int4":
        return unpack_nibbles(packed, dtype)
    table = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)], dtype=dtype, device=packed.device)
    return table[unpack_nibbles(packed, torch.int32)]


def unpack_nibbles(packed: Tensor, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Unpacks uint8 [..., n] to nibbles [..., 2·n], low nibbles first."""
    nibbles = torch.empty(*packed.shape, 2, dtype=dtype, device=packed.device)
    nibbles[..., 0], nibbles[..., 1] = packed & 15, packed >> 4
    return nibbles.flatten(-2)


def pack_nibbles(nibbles: Tensor) -> Tensor:
    """Returns the inverse of unpack_nibbles."""
    return nibbles[..., ::2] | nibbles[..., 1::2] << 4


def interleave_nibbles(packed: Tensor, is_e2m1: bool = False) -> Tensor:
    """Reorder nibbles from column order to the order in which a kernel unpacks them: uint8 [..., in / 2].

    Of 32 columns, column 8·p + 2·t + h becomes nibble p + 4·h of the t-th int32 (nibble 0 has the lowest bits).  So one
    shift and one mask put the neighbours h = 0 and h = 1 into the two halves of a word.  In a tensor core, four threads
    (t = 0 to 3) share a row, and all columns of thread t are in word t.  The last in % 32 columns stay in order.
    is_e2m1: E2M1_BIT_MOVES and E2M1_BIT_FOLDS also move the bits of E2M1 within each word w.  After that one mask
    leaves the bits of two bfloat16 numbers: the sign in bit 15, exponent and mantissa in bits 8 to 6.  The mask is
    applied to w, w << 4, w rotated by 10 to the left, and (w >> 2) ^ (w << 6), for p = 0 to 3.  Three shifts cannot
    keep the bits of all four pairs apart, so the fourth pair needs the exclusive or.
    """
    codes = packed.clone(memory_format=torch.contiguous_format)
    rows = codes.view(-1, packed.shape[-1])
    step = max(DEQUANTISED_VALUES_PER_STEP // max(packed.shape[-1], 1), 1)
    # The loop takes one block of rows at a time, to limit the size of the temporary copies.
    for begin in range(0, len(rows), step):
        interleaved = rows[begin : begin + step, : _num_interleaved_bytes(packed)]
        pairs = interleaved.unflatten(1, (-1, 2, 2, 4))
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        halves = torch.stack([first & 15 | second << 4, first >> 4 | second & 0xF0], -1)
        reordered = halves.transpose(-3, -2).transpose(-2, -1).flatten(1)
        interleaved.copy_(_fold_bits(_move_bits(reordered, E2M1_BIT_MOVES), E2M1_BIT_FOLDS) if is_e2m1 else reordered)
    return codes


def deinterleave_nibbles(codes: Tensor, is_e2m1: bool = False) -> Tensor:
    """Returns the inverse of interleave_nibbles."""
    num_bytes, interleaved = _num_interleaved_bytes(codes), codes[..., : _num_interleaved_bytes(codes)]
    if is_e2m1:
        inverse_moves = [(_shift_mask(bit_mask, shift), -shift) for bit_mask, shift in E2M1_BIT_MOVES]
        copy = interleaved.clone(memory_format=torch.contiguous_format)
        interleaved = _move_bits(_fold_bits(copy, E2M1_BIT_FOLDS[::-1]), inverse_moves)
    halves = interleaved.unflatten(-1, (-1, 4, 2, 2)).transpose(-2, -1).transpose(-3, -2)
    low, high = halves[..., 0], halves[..., 1]
    pairs = torch.stack([low & 15 | high << 4, low >> 4 | high & 0xF0], -2)
    return torch.cat([pairs.flatten(-4), codes[..., num_bytes:]], -1)


def _move_bits(codes: Tensor, moves: BitMoves) -> Tensor:
    """Move the bits of the codes' int32 words.  moves: (mask of bits, their shift to the left)."""
    words = codes.contiguous().view(torch.int32)
    moved = torch.zeros_like(words)
    for bit_mask, shift in moves:
        moved |= _shifted_bits(words, bit_mask, shift)
    return moved.view(torch.uint8)


def _fold_bits(codes: Tensor, folds: BitMoves) -> Tensor:
    """Apply `folds` to the codes' int32 words, in place.  The reversed folds undo this."""
    words = codes.view(torch.int32)
    for bit_mask, shift in folds:
        words ^= _shifted_bits(words, bit_mask, shift)
    return codes


def _shifted_bits(words: Tensor, bit_mask: int, shift: int) -> Tensor:
    """Returns the selected bits of int32 words, shifted by `shift` places to the left."""
    mask = _shift_mask(bit_mask, shift)
    # A right shift repeats the highest bit; the mask removes the copies.  The mask becomes a signed 32-bit integer.
    return (words << shift if shift > 0 else words >> -shift).bitwise_and_(mask - (mask >> 31 << 32))


def _shift_mask(bit_mask: int, shift: int) -> int:
    """Returns the mask shifted by `shift` places to the left, or to the right if `shift` is negative."""
    return bit_mask << shift if shift > 0 else bit_mask >> -shift


def _num_interleaved_bytes(packed: Tensor) -> int:
    """Returns how many bytes of a row are interleaved: all bytes except those of the last (in % 32) columns."""
    return packed.shape[-1] // INTERLEAVED_BYTES * INTERLEAVED_BYTES


def quantise_inputs(x: Tensor, input_scales: InputScales) -> tuple[Tensor, Tensor]:
    """Round x [rows, in] to (FP8 values [rows, in], scales [rows, ceil(in / group_size)]).
    Computes in float32, or float64 for float64; the scales have this dtype."""
    wide_x = x.to(torch.promote_types(x.dtype, torch.float32))
    rows, num_in = x.shape
    group_columns = input_scales.columns(num_in)
    padded = F.pad(wide_x, (0, -num_in % group_columns)).unflatten(1, (-1, group_columns))
    if input_scales.static_scale is None:
        largest = padded.abs().amax(2)
        # A group of zeros has scale 1.  The divisor is a tensor, because PyTorch on a GPU multiplies by the reciprocal
        # of a Python number instead of dividing.
        scales = torch.where(largest == 0, 1.0, largest / torch.full_like(largest, FP8_MAX))
    else:
        scales = input_scales.static_scale.to(wide_x.dtype).expand(rows, padded.shape[1])
    values = (padded / scales[:, :, None]).clamp(-FP8_MAX, FP8_MAX)
    return values.flatten(1)[:, :num_in].to(FP8), scales


def fake_quantise_inputs(x: InputRows, input_scales: InputScales) -> Tensor:
    """Returns x rounded by quantise_inputs and scaled back, in float32 (float64 for float64)."""
    values, scales = (x.values, x.scales) if isinstance(x, RoundedRows) else quantise_inputs(x, input_scales)
    num_in = values.shape[1]
    return values.to(scales.dtype) * scales.repeat_interleave(input_scales.columns(num_in), 1)[:, :num_in]
