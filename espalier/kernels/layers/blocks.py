"""Matrices in the block formats of GGUF files (llama.cpp), stored byte for byte as in the file.

A block holds 32 or 256 neighbouring values of a row: integers of 4 to 8 bits and one or two float16 scales.  A block of
256 values also has a small scale for each group of 16 or 32 values.  A value is scale · integer - minimum.  See
linear_blocks.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

# Decoded blocks: (integers [blocks, groups, group values], scales [blocks, groups, 1], minima like scales or None).
DecodedBlocks = tuple[Tensor, Tensor, Tensor | None]
# Bytes of the scales in a block of Q4_K or Q5_K.  The scales begin after two float16 numbers.
K_QUANT_SCALE_BYTES = 12


@dataclass(frozen=True)
class BlockType:
    """One block format.

    gguf_type: the number of the tensor type in GGUF.  block_values: values per block.  block_bytes: bytes per block.
    group_values: values that share a scale.  decode: decodes blocks, given as uint8 [blocks, block_bytes]."""

    name: str
    gguf_type: int
    block_values: int
    block_bytes: int
    group_values: int
    decode: Callable[[Tensor], DecodedBlocks]

    def row_bytes(self, num_columns: int) -> int:
        """Returns the bytes of a row of `num_columns` values.  num_columns must be a multiple of `block_values`."""
        return num_columns // self.block_values * self.block_bytes


@dataclass(frozen=True)
class BlockMatrix:
    """A matrix [out, in] of one block format.  blocks: uint8 [out, in / block_values · block_bytes]."""

    block_type: BlockType
    blocks: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        rows, row_bytes = self.blocks.shape
        return rows, row_bytes // self.block_type.block_bytes * self.block_type.block_values

    @property
    def device(self) -> torch.device:
        return self.blocks.device

    def rows_from(self, first_row: int) -> "BlockMatrix":
        """Returns rows first_row .. out-1 as a view."""
        return replace(self, blocks=self.blocks[first_row:])


def dequantise_blocks(matrix: BlockMatrix, first_row: int = 0, end_row: int | None = None) -> Tensor:
    """Returns rows first_row .. end_row-1 as float32 [rows, in].  The bits equal those of the package `gguf`."""
    rows = matrix.blocks[first_row:end_row]
    integers, scales, minima = matrix.block_type.decode(rows.reshape(-1, matrix.block_type.block_bytes))
    values = integers * scales
    if minima is not None:
        values -= minima
    return values.reshape(len(rows), -1)


def _read_float16(block_bytes: Tensor, byte_offset: int) -> Tensor:
    """Read the float16 number at byte `byte_offset` of each block: float32 [blocks, 1]."""
    return block_bytes[:, byte_offset : byte_offset + 2].contiguous().view(torch.float16).float()


def _unpack_integers(block_bytes: Tensor, bits: int, run_bytes: int) -> Tensor:
    """Unpack integers of `bits` bits: uint8 [blocks, bytes] -> [blocks, values].

    In each run of `run_bytes` bytes, the lowest bits hold the first `run_bytes` values, the next higher bits the next
    `run_bytes` values, and so on."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=block_bytes.device)
    shifted = block_bytes.unflatten(1, (-1, 1, run_bytes)) >> shifts.view(1, 1, -1, 1)
    return (shifted & (1 << bits) - 1).flatten(1)


def _decode_blocks_of_32(block_bytes: Tensor, has_minimum: bool, has_fifth_bit: bool) -> DecodedBlocks:
    """Decode Q4_0, Q4_1, Q5_0, Q5_1.  A block holds: scale, minimum (if any), fifth bits (if any), lower four bits."""
    offset = 4 if has_minimum else 2
    zero_point = 16 if has_fifth_bit else 8
    if has_fifth_bit:
        bits = (
            block_bytes[:, offset : offset + 4, None] >> torch.arange(8, dtype=torch.uint8, device=block_bytes.device)
            & 1
        )
        offset += 4
    integers = _unpack_integers(block_bytes[:, offset:], 4, 16)
    if has_fifth_bit:
        integers = integers | bits.flatten(1) << 4
    scale = _read_float16(block_bytes, 0)[:, None]
    if has_minimum:
        return integers.float()[:, None], scale, -_read_float16(block_bytes, 2)[:, None]
    return integers.float()[:, None] - zero_point, scale, None


def _decode_q8_0(block_bytes: Tensor) -> DecodedBlocks:
    """Decode Q8_0.  A block holds: scale, 32 signed bytes."""
    return block_bytes[:, None, 2:].contiguous().view(torch.int8).float(), _read_float16(block_bytes, 0)[:, None], None


def _unpack_k_scales(block_bytes: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack the scales and the minima of 8 groups, 6 bits each: uint8 [blocks, 8] for both.

    The first four scales are the lower 6 bits of bytes 0 to 3, the first four minima the lower 6 bits of bytes 4 to 7.
    The last four of both have their lower four bits in bytes 8 to 11 (scales in the lower half of a byte), and their
    upper two bits in the upper two bits of bytes 0 to 3 (scales) and 4 to 7 (minima).
    """
    low, high, last_bytes = block_bytes.split(4, 1)
    scales = torch.cat([low & 63, last_bytes & 15 | low >> 2 & 48], 1)
    return scales, torch.cat([high & 63, last_bytes >> 4 | high >> 2 & 48], 1)


def _decode_blocks_of_256(block_bytes: Tensor, has_fifth_bit: bool) -> DecodedBlocks:
    """Decode Q4_K, Q5_K.  A block: scale of scales, scale of minima, scales and minima, fifth bits, lower four bits."""
    scales, minima = _unpack_k_scales(block_bytes[:, 4 : 4 + K_QUANT_SCALE_BYTES])
    offset = 4 + K_QUANT_SCALE_BYTES
    integers = _unpack_integers(block_bytes[:, offset + (32 if has_fifth_bit else 0) :], 4, 32)
    if has_fifth_bit:
        integers = integers | _unpack_integers(block_bytes[:, offset : offset + 32], 1, 32) << 4
    scale, minimum = _read_float16(block_bytes, 0) * scales.float(), _read_float16(block_bytes, 2) * minima.float()
    return integers.unflatten(1, (8, 32)).float(), scale[:, :, None], minimum[:, :, None]


def _decode_q6_k(block_bytes: Tensor) -> DecodedBlocks:
    """Decode Q6_K.  A block: lower four bits, upper two bits, 16 scales int8, scale of the scales."""
    integers = _unpack_integers(block_bytes[:, :128], 4, 64) | _unpack_integers(block_bytes[:, 128:192], 2, 32) << 4
    scales = _read_float16(block_bytes, 208) * block_bytes[:, 192:208].contiguous().view(torch.int8).float()
    return (integers.float() - 32).unflatten(1, (16, 16)), scales[:, :, None], None


BLOCK_TYPES: Mapping[str, BlockType] = {
    type.name: type
    for type in (
        BlockType("Q4_0", 2, 32, 18, 32, partial(_decode_blocks_of_32, has_minimum=False, has_fifth_bit=False)),
        BlockType("Q4_1", 3, 32, 20, 32, partial(_decode_blocks_of_32, has_minimum=True, has_fifth_bit=False)),
        BlockType("Q5_0", 6, 32, 22, 32, partial(_decode_blocks_of_32, has_minimum=False, has_fifth_bit=True)),
        BlockType("Q5_1", 7, 32, 24, 32, partial(_decode_blocks_of_32, has_minimum=True, has_fifth_bit=True)),
        BlockType("Q8_0", 8, 32, 34, 32, _decode_q8_0),
        BlockType("Q4_K", 12, 256, 144, 32, partial(_decode_blocks_of_256, has_fifth_bit=False)),
        BlockType("Q5_K", 13, 256, 176, 32, partial(_decode_blocks_of_256, has_fifth_bit=True)),
        BlockType("Q6_K", 14, 256, 210, 16, _decode_q6_k),
    )
}
