"""Matrices in 8 or 4 bits with scales, and products with them.

On a GPU a product stores at most a block of dequantised rows (linear_dequantised.py).  So does the reference here: a
model on a CPU needs memory for its stored weights only.
Inputs may be rounded to FP8 too.  Every row gets its own scales (or the checkpoint's), so a row's result never depends
on the other rows of a batch.
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
# Rows of E2M1 scales are padded to steps of this many columns, so that a kernel loads scales without a mask.
E2M1_SCALE_PADDING = 256
# Number of columns whose nibbles are interleaved, and their bytes.
INTERLEAVED_COLUMNS = 32
INTERLEAVED_BYTES = INTERLEAVED_COLUMNS // 2
# How the bits of E2M1 move within the int32 words of `interleave_nibbles`: (bits, shift to the left).
E2M1_BIT_MOVES = (
    *((0x00000700, 20), (0x00080008, 12), (0x00070007, 6), (0x00800080, 4), (0x00700070, -2), (0x40004000, -4)),
    *((0x88008800, -6), (0x37003000, -12)),
)
# Then the first of these bits change those at their shifted places (exclusive or), then the second, and so on.
FOLDS = ((0x01000100, -8), (0x00040004, 8), (0x02000000, -8), (0x00020000, -8), (0x00000200, -8))
# NVFP4's scales are stored as bits 14 to 7 of float16, of the scale times this factor.  So E4M3's subnormal numbers
# have exponents like the others.
SCALE_UNIT, SCALE_SHIFT = 2.0**7, 7
# Values that the reference dequantises at once: 16 MiB of float32.
DEQUANTISED_VALUES_PER_STEP = 2**22

Code = Literal["fp8", "int4", "mxfp4", "nvfp4"]
# The codes whose nibbles are E2M1 numbers.
E2M1_CODES = ("mxfp4", "nvfp4")
# (bits of a word, their shift to the left) pairs.
BitMoves = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class InputScales:
    """How the inputs of a product are rounded to FP8.

    group: columns that share a scale; None: the whole row shares one.  static: float32 [1], the scale of every row;
    None: a scale is the largest magnitude over FP8_MAX.
    """

    group: int | None = None
    static: Tensor | None = None

    def columns(self, size: int) -> int:
        """The number of columns that share a scale, in a row of `size` columns."""
        return min(self.group or size, size)


@dataclass(frozen=True)
class RoundedRows:
    """Inputs of a product that are already rounded to FP8.

    values: FP8 [rows, in]; scales: float32 [rows, groups]; dtype: of the inputs before rounding and of the product.
    """

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

    codes: "fp8": float8_e4m3fn [..., out, in].  Other codes: uint8 [..., out, in / 2], two columns per byte, in the
    order of `interleave_nibbles`; E2M1_BIT_MOVES moves the bits of E2M1.
    scales: [..., ceil(out / row_block), ceil(in / group)], floating point.  "mxfp4": uint8 exponents; "nvfp4": uint8,
    see SCALE_UNIT; both padded to steps of E2M1_SCALE_PADDING columns.  Where a scale of "nvfp4" is 0, codes are 0.
    row_scales: "nvfp4": float64 [..., out], a factor of each row besides its scales.  A float32 factor or divisor in a
    file has an inverse in float64 that gives the float32 quotients of the format to the bit.
    zeros: "int4": uint8 [..., out, in / group]; None: 8 everywhere.
    order: [in] int64; column c of codes multiplies input order[c]; None: the columns are in order.
    inputs: how the inputs are rounded; None: they are not.
    """

    code: Code
    codes: Tensor
    scales: Tensor
    group: int
    row_block: int = 1
    zeros: Tensor | None = None
    order: Tensor | None = None
    inputs: InputScales | None = None
    row_scales: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        *lead, rows, columns = self.codes.shape
        return *lead, rows, columns if self.code == "fp8" else 2 * columns

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        optional = (self.zeros, self.row_scales, self.order, None if self.inputs is None else self.inputs.static)
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
        """One expert of a stack."""
        return self._each(lambda tensor: tensor[expert])

    def experts(self, count: int) -> "QuantisedMatrix":
        """The matrix [count · out, in] as a stack [count, out, in].  row_block must divide out."""
        return self._each(lambda tensor: tensor.unflatten(0, (count, -1)))

    def _each(self, change: Callable[[Tensor], Tensor]) -> "QuantisedMatrix":
        """Apply `change` to each tensor whose rows are those of the matrix."""
        zeros, factors = (None if each is None else change(each) for each in (self.zeros, self.row_scales))
        return replace(self, codes=change(self.codes), scales=change(self.scales), zeros=zeros, row_scales=factors)

    def rows_from(self, first: int) -> "QuantisedMatrix":
        """Return rows first .. out-1 of a matrix [out, in] as views.  row_block must divide `first`."""
        cut = self._each(lambda tensor: tensor[first:])
        return replace(cut, scales=self.scales[first // self.row_block :])

    def permute_rows_in_place(self, rows: Tensor) -> "QuantisedMatrix":
        """Reorder the rows of all experts [E, out, in], in place.  row_block must be 1.

        It works expert by expert, so there is never a second copy of all experts.
        """
        for tensor in (self.codes, self.scales, *(() if self.row_scales is None else (self.row_scales,))):
            for expert in tensor:
                expert.copy_(expert[rows.to(expert.device)])
        return self


def nibble_matrix(
    code: Literal["int4", "mxfp4", "nvfp4"],
    packed: Tensor,
    scales: Tensor,
    group: int,
    zeros: Tensor | None = None,
    order: Tensor | None = None,
    row_scales: Tensor | None = None,
) -> QuantisedMatrix:
    """Make a matrix of nibbles in column order: packed uint8 [..., out, in / 2], low nibbles first.

    scales: as in QuantisedMatrix but for the padding; "nvfp4": float8_e4m3fn, not negative.
    """
    if code == "nvfp4":
        packed, scales = _without_zero_scales(packed, scales, group), _stored_scales(scales)
    if code in E2M1_CODES:
        padded = F.pad(scales.view(torch.uint8), (0, -scales.shape[-1] % (E2M1_SCALE_PADDING // group)))
        scales = padded.view(scales.dtype)
    codes = interleave_nibbles(packed, code in E2M1_CODES)
    return QuantisedMatrix(code, codes, scales, group, zeros=zeros, order=order, row_scales=row_scales)


def _without_zero_scales(packed: Tensor, scales: Tensor, group: int) -> Tensor:
    """Make numbers of groups with a scale of 0 zeros of the same sign, as no kernel has a factor of 0."""
    is_zero = scales.view(torch.uint8) == 0
    if not is_zero.any():
        return packed
    return torch.where(is_zero.repeat_interleave(group // 2, -1)[..., : packed.shape[-1]], packed & 0x88, packed)


def _stored_scales(scales: Tensor) -> Tensor:
    return ((scales.half() * SCALE_UNIT).view(torch.int16) >> SCALE_SHIFT).to(torch.uint8)


def _true_scales(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of _stored_scales."""
    return (stored.to(torch.int16) << SCALE_SHIFT).view(torch.float16).to(dtype) / SCALE_UNIT


def dequantise(matrix: QuantisedMatrix, dtype: torch.dtype, begin: int = 0, end: int | None = None) -> Tensor:
    """Dequantise rows begin .. end-1 of a matrix [out, in].  The columns are in the order of the inputs.

    begin must be a multiple of row_block.  Each value is rounded once.
    """
    rows = slice(begin, matrix.shape[0] if end is None else end)
    exact = torch.promote_types(dtype, torch.float32)
    codes = matrix.codes[rows]
    values = _fp8_values(codes, exact) if matrix.code == "fp8" else _nibble_values(matrix, codes, exact)
    num_rows, num_in = values.shape
    # Columns past the end of the last group are computed and dropped.
    grouped = F.pad(values, (0, -num_in % matrix.group)).unflatten(1, (-1, matrix.group))
    if matrix.code == "int4":
        grouped -= 8 if matrix.zeros is None else matrix.zeros[rows, :, None]
    scales = matrix.scales[begin // matrix.row_block : -(-(begin + num_rows) // matrix.row_block)]
    if matrix.code in E2M1_CODES:
        scales = scales[:, : grouped.shape[1]]
    if matrix.code == "mxfp4":
        scales = torch.ldexp(torch.ones_like(scales, dtype=exact), scales.int() - E8M0_BIAS)
    if matrix.code == "nvfp4":
        scales = _true_scales(scales, exact)
    if matrix.row_scales is not None:
        scales = scales.double() * matrix.row_scales[rows, None]
    grouped *= scales.to(exact).repeat_interleave(matrix.row_block, 0)[:num_rows, :, None]
    values = grouped.flatten(1)[:, :num_in].to(dtype)
    if matrix.order is None:
        return values
    return torch.empty_like(values).index_copy_(1, matrix.order, values)


def _fp8_values(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert FP8 codes.  On a CPU a table of all pairs of values takes a third of the time of a conversion."""
    if codes.device.type != "cpu" or codes.shape[1] % 2 or codes.stride(0) % 2:
        return codes.to(dtype)
    pairs = codes.view(torch.uint16).to(torch.int32).flatten()
    return _fp8_pairs(dtype).index_select(0, pairs).view(codes.shape)


@cache
def _fp8_pairs(dtype: torch.dtype) -> Tensor:
    """[65536, 2]: the values of the two bytes of every uint16, in memory order."""
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.uint16)
    return numbers.view(FP8).view(-1, 2).to(dtype)


def _nibble_values(matrix: QuantisedMatrix, codes: Tensor, dtype: torch.dtype) -> Tensor:
    packed = deinterleave_nibbles(codes, matrix.code in E2M1_CODES)
    if matrix.code == "int4":
        return unpack_nibbles(packed, dtype)
    table = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)], dtype=dtype, device=packed.device)
    return table[unpack_nibbles(packed, torch.int32)]


def unpack_nibbles(packed: Tensor, dtype: torch.dtype = torch.uint8) -> Tensor:
    """uint8 [..., n] -> [..., 2·n] from 0 to 15, low nibbles first."""
    nibbles = torch.empty(*packed.shape, 2, dtype=dtype, device=packed.device)
    nibbles[..., 0], nibbles[..., 1] = packed & 15, packed >> 4
    return nibbles.flatten(-2)


def pack_nibbles(nibbles: Tensor) -> Tensor:
    """The inverse of unpack_nibbles."""
    return nibbles[..., ::2] | nibbles[..., 1::2] << 4


def interleave_nibbles(packed: Tensor, spreads: bool = False) -> Tensor:
    """Reorder nibbles from column order to the order in which a kernel unpacks them; uint8 [..., in / 2] both.

    Of 32 columns, column 8·p + 2·t + h becomes nibble p + 4·h of the t-th int32 (counted from the low bits).  So one
    shift and one mask give the neighbours h = 0 and 1 in the halves of a word.  Four threads share a row in a tensor
    core, and thread t of them finds all of its columns in its own words.  The last in % 32 columns stay in order.

    spreads: E2M1_BIT_MOVES and FOLDS also move the bits of E2M1 in these words w, so that one mask leaves the bits of
    two bfloat16 numbers: the sign in bit 15, exponent and mantissa in bits 8 to 6.  The mask is for w, w << 4, w
    rotated by 10 to the left, and (w >> 2) ^ (w << 6) (p = 0 to 3).  No three shifts of these bits are disjoint from
    them and from each other; the fourth pair's overlap, hence the exclusive or.
    """
    codes = packed.clone(memory_format=torch.contiguous_format)
    rows = codes.view(-1, packed.shape[-1])
    step = max(DEQUANTISED_VALUES_PER_STEP // max(packed.shape[-1], 1), 1)
    # One block at a time, because the copies that this makes are as large as a block.
    for begin in range(0, len(rows), step):
        whole = rows[begin : begin + step, : _interleaved_bytes(packed)]
        pairs = whole.unflatten(1, (-1, 2, 2, 4))
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        halves = torch.stack([first & 15 | second << 4, first >> 4 | second & 0xF0], -1)
        reordered = halves.transpose(-3, -2).transpose(-2, -1).flatten(1)
        whole.copy_(_folded(_move_bits(reordered, E2M1_BIT_MOVES), FOLDS) if spreads else reordered)
    return codes


def deinterleave_nibbles(codes: Tensor, spreads: bool = False) -> Tensor:
    """The inverse of interleave_nibbles."""
    end, whole = _interleaved_bytes(codes), codes[..., : _interleaved_bytes(codes)]
    if spreads:
        back = [(_shifted(bits, places), -places) for bits, places in E2M1_BIT_MOVES]
        whole = _move_bits(_folded(whole.clone(memory_format=torch.contiguous_format), FOLDS[::-1]), back)
    halves = whole.unflatten(-1, (-1, 4, 2, 2)).transpose(-2, -1).transpose(-3, -2)
    low, high = halves[..., 0], halves[..., 1]
    pairs = torch.stack([low & 15 | high << 4, low >> 4 | high & 0xF0], -2)
    return torch.cat([pairs.flatten(-4), codes[..., end:]], -1)


def _move_bits(codes: Tensor, moves: BitMoves) -> Tensor:
    """Move the bits of the codes' int32 words."""
    words = codes.contiguous().view(torch.int32)
    moved = torch.zeros_like(words)
    for bits, places in moves:
        moved |= _bits_of(words, bits, places)
    return moved.view(torch.uint8)


def _folded(codes: Tensor, folds: BitMoves) -> Tensor:
    """Change bits of the codes' int32 words by others, in place; FOLDS in the other order change them back."""
    words = codes.view(torch.int32)
    for bits, places in folds:
        words ^= _bits_of(words, bits, places)
    return codes


def _bits_of(words: Tensor, bits: int, places: int) -> Tensor:
    """These bits of int32 words, at their shifted places."""
    # A right shift repeats the highest bit; the mask removes the copies.
    shifted = words << places if places > 0 else words >> -places
    return shifted.bitwise_and_(_to_int32(_shifted(bits, places)))


def _shifted(bits: int, places: int) -> int:
    return bits << places if places > 0 else bits >> -places


def _to_int32(bits: int) -> int:
    """The int32 with these 32 bits."""
    return bits - (bits >> 31 << 32)


def _interleaved_bytes(packed: Tensor) -> int:
    """The number of bytes of a row that are interleaved."""
    return packed.shape[-1] // INTERLEAVED_BYTES * INTERLEAVED_BYTES


def quantise_inputs(x: Tensor, inputs: InputScales) -> tuple[Tensor, Tensor]:
    """Round x [rows, in] to (FP8 values [rows, in], scales [rows, ceil(in / group)], float32 at least)."""
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    rows, num_in = x.shape
    group = inputs.columns(num_in)
    padded = F.pad(exact, (0, -num_in % group)).unflatten(1, (-1, group))
    if inputs.static is None:
        largest = padded.abs().amax(2)
        # The scale of zeros is 1.  The divisor is a tensor: PyTorch on a GPU multiplies by the reciprocal of a number.
        scales = torch.where(largest == 0, 1.0, largest / torch.full_like(largest, FP8_MAX))
    else:
        scales = inputs.static.to(exact.dtype).expand(rows, padded.shape[1])
    values = (padded / scales[:, :, None]).clamp(-FP8_MAX, FP8_MAX)
    return values.flatten(1)[:, :num_in].to(FP8), scales


def fake_quantise_inputs(x: InputRows, inputs: InputScales) -> Tensor:
    """x after rounding by quantise_inputs, in float32 at least."""
    values, scales = (x.values, x.scales) if isinstance(x, RoundedRows) else quantise_inputs(x, inputs)
    num_in = values.shape[1]
    return values.to(scales.dtype) * scales.repeat_interleave(inputs.columns(num_in), 1)[:, :num_in]
