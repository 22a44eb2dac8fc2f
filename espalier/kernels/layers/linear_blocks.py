"""A linear layer whose weight is in a block format of GGUF files (blocks.py): y = x · weightᵀ + bias.

A program reads the blocks of its rows byte for byte as they are in the file.  The integers of a group are exact in
bfloat16 and float16, and tensor cores multiply them with the inputs.  The group's scale multiplies the float32 sum of
these products.  A group's minimum is multiplied by the sum of the group's inputs.  So no weight is rounded, and no
dequantised weight is stored.
Tolerance: in · 2⁻²³ times the sum of magnitudes |x| · (|scale · integer| + |minimum|), and the rounding of the output.
"""

import torch
import triton.language as tl
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.layers.blocks import BlockMatrix
from espalier.kernels.layers.linear import store_tile, weight_rows
from espalier.kernels.layers.linear_plans import DTYPES, block_rows
from espalier.kernels.ops.linear import add_partial_sums
from espalier.kernels.runtime.jit import kernel
from espalier.kernels.runtime.launch import Chip, chip, require
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger_and_wait

# Weight rows per program, the most input rows per program, and warps per program.
BLOCK_OUT, MAX_BLOCK_ROWS, WARPS = 64, 128, 4
# Split-K: the most input rows for which columns are split, the programs per multiprocessor, the most splits, and the
# fewest columns of a split.
SPLIT_ROWS, PROGRAMS_PER_PROCESSOR, MAX_SPLITS, MIN_COLUMNS = 64, 2, 8, 512


def linear_blocks(x: Tensor, weight: BlockMatrix, bias: Tensor | None) -> Tensor:
    """Returns x · weightᵀ + bias for x [rows, in], see ops/linear.py:linear_blocks."""
    return _launch_kernel(x, weight, bias, num_splits_for(len(x), weight, chip(weight.blocks)))


def num_splits_for(num_rows: int, weight: BlockMatrix, gpu: Chip) -> int:
    """Returns the number of programs among which the columns of the weight are split."""
    num_out, num_in = weight.shape
    if num_rows > SPLIT_ROWS:
        return 1
    max_programs = PROGRAMS_PER_PROCESSOR * gpu.processors // -(-num_out // BLOCK_OUT)
    return max(min(max_programs, MAX_SPLITS, num_in // max(MIN_COLUMNS, weight.block_type.block_values)), 1)


@kernel
def _load_float16(ptrs):
    """Load the float16 numbers at byte pointers ptrs, as float32."""
    low, high = tl.load(ptrs).to(tl.uint16), tl.load(ptrs + 1).to(tl.uint16)
    return (low | high << 8).to(tl.float16, bitcast=True).to(tl.float32)


@kernel
def _load_bits(ptrs, shift, BIT_MASK: tl.constexpr):
    """Load the bytes at `ptrs`, and return the bits of BIT_MASK after a right shift by `shift`."""
    return (tl.load(ptrs).to(tl.int32) >> shift) & BIT_MASK


@kernel
def _decode_blocks_of_32(block_ptrs, GGUF_TYPE: tl.constexpr):
    """Returns (integers [BLOCK_OUT, 32], scales [BLOCK_OUT], minima [BLOCK_OUT]) of blocks of Q4_0 to Q8_0.
    block_ptrs: [BLOCK_OUT], pointers to the blocks' first bytes."""
    i = tl.arange(0, 32)[None, :]
    scale, minimum = _load_float16(block_ptrs), 0.0 * _load_float16(block_ptrs)
    if GGUF_TYPE == 8:
        integers = tl.load(block_ptrs[:, None] + 2 + i).to(tl.int8, bitcast=True).to(tl.int32)
    else:
        HAS_MINIMUM: tl.constexpr = GGUF_TYPE % 2 == 1
        HAS_FIFTH_BIT: tl.constexpr = GGUF_TYPE >= 6
        AT: tl.constexpr = 4 if HAS_MINIMUM else 2
        integers = _load_bits(block_ptrs[:, None] + (AT + (4 if HAS_FIFTH_BIT else 0)) + i % 16, i // 16 * 4, 15)
        if HAS_FIFTH_BIT:
            integers |= _load_bits(block_ptrs[:, None] + AT + i // 8, i % 8, 1) << 4
        if HAS_MINIMUM:
            minimum = -_load_float16(block_ptrs + 2)
        else:
            integers -= 16 if HAS_FIFTH_BIT else 8
    return integers, scale, minimum


@kernel
def _decode_blocks_of_256(block_ptrs, group: tl.constexpr, GGUF_TYPE: tl.constexpr):
    """Decodes one group of blocks of Q4_K, Q5_K (GGUF_TYPE 12, 13; 32 columns) or Q6_K (14; 16 columns).
    Arguments and results: see _decode_blocks_of_32."""
    if GGUF_TYPE == 14:
        first: tl.constexpr = 16 * group % 128
        i = first + tl.arange(0, 16)[None, :]
        half: tl.constexpr = group // 8
        integers = _load_bits(block_ptrs[:, None] + 64 * half + i % 64, i // 64 * 4, 15)
        integers |= _load_bits(block_ptrs[:, None] + (128 + 32 * half) + i % 32, i // 32 * 2, 3) << 4
        integers -= 32
        group_scale = tl.load(block_ptrs + (192 + group)).to(tl.int8, bitcast=True).to(tl.float32)
        scale = _load_float16(block_ptrs + 208) * group_scale
        minimum = 0.0 * scale
    else:
        i = tl.arange(0, 32)[None, :]
        AT: tl.constexpr = 16 if GGUF_TYPE == 12 else 48
        integers = _load_bits(block_ptrs[:, None] + (AT + group // 2 * 32) + i, group % 2 * 4, 15)
        if GGUF_TYPE == 13:
            integers |= _load_bits(block_ptrs[:, None] + 16 + i, group, 1) << 4
        index: tl.constexpr = group % 4
        scale_bits = _load_bits(block_ptrs + (4 + index), 0, 255)
        minimum_bits = _load_bits(block_ptrs + (8 + index), 0, 255)
        if group < 4:
            scale_bits, minimum_bits = scale_bits & 63, minimum_bits & 63
        else:
            upper = _load_bits(block_ptrs + (12 + index), 0, 255)
            scale_bits, minimum_bits = upper & 15 | (scale_bits >> 6) << 4, upper >> 4 | (minimum_bits >> 6) << 4
        scale = _load_float16(block_ptrs) * scale_bits.to(tl.float32)
        minimum = _load_float16(block_ptrs + 2) * minimum_bits.to(tl.float32)
    return integers, scale, minimum


@kernel
def _linear_blocks_kernel(
    x_ptr, blocks_ptr, bias_ptr, out_ptr, num_rows, num_out, num_blocks, x_stride,
    GGUF_TYPE: tl.constexpr, BLOCK_VALUES: tl.constexpr, BLOCK_BYTES: tl.constexpr, GROUP_VALUES: tl.constexpr,
    HAS_MINIMUM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, EVEN_OUT: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """y = x · weightᵀ + bias.  Grid: (blocks of weight rows, splits, tiles of rows).  Arguments: see _linear_kernel.

    num_blocks: blocks per row.  GGUF_TYPE: the block format's number; BLOCK_VALUES to GROUP_VALUES: its sizes."""
    pdl_trigger_and_wait(USE_PDL)
    w_rows = weight_rows(num_out, BLOCK_OUT, EVEN_OUT, False).to(tl.int64)
    split, num_splits = tl.program_id(1), tl.num_programs(1)
    begin, end = split * num_blocks // num_splits, (split + 1) * num_blocks // num_splits
    rows = tl.program_id(2) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * x_stride + tl.arange(0, GROUP_VALUES)[None, :]
    row_exists = rows[:, None] < num_rows
    acc = tl.zeros((BLOCK_OUT, BLOCK_ROWS), tl.float32)
    for block_index in range(begin, end):
        block = blocks_ptr + (w_rows * num_blocks + block_index) * BLOCK_BYTES
        for group in tl.static_range(BLOCK_VALUES // GROUP_VALUES):
            x = tl.load(x_ptrs + block_index * BLOCK_VALUES + group * GROUP_VALUES, mask=row_exists, other=0.0)
            if BLOCK_VALUES == 32:
                integers, scale, minimum = _decode_blocks_of_32(block, GGUF_TYPE)
            else:
                integers, scale, minimum = _decode_blocks_of_256(block, group, GGUF_TYPE)
            acc += tl.dot(integers.to(x.dtype), tl.trans(x)) * scale[:, None]
            if HAS_MINIMUM:
                acc -= minimum[:, None] * tl.sum(x.to(tl.float32), 1)[None, :]
    if bias_ptr is not None:
        # Only the first split adds the bias.
        acc += tl.where(split == 0, tl.load(bias_ptr + w_rows).to(tl.float32), 0.0)[:, None]
    store_tile(acc, out_ptr, split, rows, num_rows, num_out, BLOCK_ROWS, BLOCK_OUT, False)


# Formats whose values have a minimum.
FORMATS_WITH_MINIMA = ("Q4_1", "Q5_1", "Q4_K", "Q5_K")


def _launch_kernel(x: Tensor, weight: BlockMatrix, bias: Tensor | None, splits: int) -> Tensor:
    num_rows, (num_out, num_in), block_type = len(x), weight.shape, weight.block_type
    require("linear_blocks: x", x, (num_rows, num_in), None, weight.blocks)
    if bias is not None:
        require("linear_blocks: bias", bias, (num_out,), x.dtype, weight.blocks)
    if x.dtype not in DTYPES or not weight.blocks.is_contiguous():
        raise EspalierError(
            f"linear_blocks: the Triton kernel takes bfloat16 or float16 and contiguous blocks, but got {x.dtype}: use "
            "the reference"
        )
    x = x if x.stride(1) == 1 else x.contiguous()
    shape, dtype = ((splits, num_rows, num_out), torch.float32) if splits > 1 else ((num_rows, num_out), x.dtype)
    out = torch.empty(shape, dtype=dtype, device=x.device)
    if num_rows * num_out == 0:
        return add_partial_sums.triton(out, x.dtype)
    tile = min(block_rows(num_rows), MAX_BLOCK_ROWS)
    _linear_blocks_kernel[-(-num_out // BLOCK_OUT), splits, -(-num_rows // tile)](
        *(x, weight.blocks, bias, out, num_rows, num_out, num_in // block_type.block_values, x.stride(0)),
        GGUF_TYPE=block_type.gguf_type, BLOCK_VALUES=block_type.block_values, BLOCK_BYTES=block_type.block_bytes,
        GROUP_VALUES=block_type.group_values, HAS_MINIMUM=block_type.name in FORMATS_WITH_MINIMA, BLOCK_ROWS=tile,
        BLOCK_OUT=BLOCK_OUT, EVEN_OUT=num_out % BLOCK_OUT == 0, num_warps=WARPS, **pdl_arguments(chip(x)),
    )  # fmt: skip
    return add_partial_sums.triton(out, x.dtype)
