"""A gated linear layer for many rows on Hopper: silu(x · gateᵀ) · (x · upᵀ), in one persistent kernel.

With PyTorch's product, the results of gate and up would be written to memory, and another launch would read them.
Writing and reading would take 4% of the time of a prompt's products.

Grid: as many programs as multiprocessors.  A program computes tiles of [BLOCK_ROWS, BLOCK_OUT] results, one after
another.  Its loading warps copy blocks of BLOCK_IN columns of x, gate and up by TMA.  They are up to STAGES blocks
ahead of the multiplying warps, also across tiles.  Two multiplying warpgroups compute half of a tile's rows each.  One
product has both the gate and the up columns.  For any number of rows, the kernel adds the products of a result in the
same order, so a row's bits do not depend on other rows.
Tolerance: see linear.py.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from espalier.errors import EspalierError
from espalier.kernels.hopper.work import make_barriers
from espalier.kernels.layers.activation import silu_and_multiply
from espalier.kernels.runtime.jit import gluon_kernel
from espalier.kernels.runtime.launch import HOPPER, Chip, chip, is_aligned_for_copies, require, tma_descriptor
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger_and_wait

# The fewest rows, and the smallest share of busy multiprocessors, for which the kernel beats PyTorch's product.
MIN_ROWS, MIN_FILL = 257, 0.9
BLOCK_ROWS, BLOCK_OUT, BLOCK_IN = 128, 128, 64
# Pipeline stages.  The stages and the results of a tile fill the shared memory.
STAGES = 4
# Blocks of rows of x that are multiplied with the same weights, while these are in the L2.  More blocks would not fit.
GROUP_ROW_BLOCKS = 8
# Registers per thread: at launch; later in the multiplying warps, and in the loading warps.
LAUNCH_REGISTERS, MULTIPLY_REGISTERS, LOAD_REGISTERS = 168, 232, 40


def supports_hopper_gated(x: Tensor, weight: Tensor, bias: Tensor | None, gpu: Chip) -> bool:
    """Returns whether the kernel takes x [rows, in] and weight [2·out, in]: the rows of gate, then the rows of up."""
    if gpu.capability != HOPPER or x.dtype != torch.bfloat16 or bias is not None or len(x) < MIN_ROWS:
        return False
    # Rows of results are copied like rows of x, in multiples of 16 bytes.
    return weight.shape[0] % 16 == 0 and all(t.stride(1) == 1 and is_aligned_for_copies(t) for t in (x, weight))


def fills_chip(num_rows: int, num_out: int, gpu: Chip) -> bool:
    """Returns whether the tiles keep at least MIN_FILL of the chip busy.  If not, PyTorch's product is faster."""
    tiles = num_tiles(num_rows, num_out)
    return tiles >= MIN_FILL * gpu.processors * -(-tiles // gpu.processors)


def num_tiles(num_rows: int, num_out: int) -> int:
    """Returns the number of tiles [BLOCK_ROWS, BLOCK_OUT] of a result [num_rows, num_out]."""
    return -(-num_rows // BLOCK_ROWS) * -(-num_out // BLOCK_OUT)


class ProductSizes(NamedTuple):
    """The sizes of x [num_rows, num_in] and of the result [num_rows, num_out]."""

    num_rows: Any
    num_out: Any
    num_in: Any


class BlockSizes(NamedTuple):
    """Constexpr arguments: the rows, outputs and inputs of a block, and how many blocks of rows share weights in the L2
    (ROW_BLOCKS)."""

    ROWS: Any
    OUT: Any
    IN: Any
    ROW_BLOCKS: Any


class Stages(NamedTuple):
    """Blocks in shared memory: x [stages, ROWS, IN]; weights [stages, 2 * OUT, IN], the rows of gate, then those of up.

    full: for each stage, the barrier for which the multiplying warps wait before they read.  empty: for each stage, the
    barrier for which the loading warps wait before they write."""

    x: Any
    weights: Any
    full: Any
    empty: Any


# fmt: off
@gluon_kernel
def _num_tiles(product_sizes, BLOCKS: gl.constexpr):
    """Returns the number of tiles of the result.  product_sizes: ProductSizes.  BLOCKS: BlockSizes."""
    return gl.cdiv(product_sizes.num_rows, BLOCKS.ROWS) * gl.cdiv(product_sizes.num_out, BLOCKS.OUT)


@gluon_kernel
def _tile_origin(tile_index, product_sizes, BLOCKS: gl.constexpr):
    """Returns (first row, first output) of tile number `tile_index`."""
    row_blocks, out_blocks = gl.cdiv(product_sizes.num_rows, BLOCKS.ROWS), gl.cdiv(product_sizes.num_out, BLOCKS.OUT)
    first_row_block = tile_index // (BLOCKS.ROW_BLOCKS * out_blocks) * BLOCKS.ROW_BLOCKS
    group_rows = gl.minimum(row_blocks - first_row_block, BLOCKS.ROW_BLOCKS)
    index_in_group = tile_index % (BLOCKS.ROW_BLOCKS * out_blocks)
    return (first_row_block + index_in_group % group_rows) * BLOCKS.ROWS, index_in_group // group_rows * BLOCKS.OUT


@gluon_kernel
def _round_to_bfloat16(values):
    """Round float32 values to bfloat16 in pairs, which is eight times as fast as one value at a time."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 pair; cvt.rn.bf16x2.f32 pair, $3, $2; shl.b32 $0, pair, 16; and.b32 $1, pair, 0xffff0000; }",
        "=r,=r,r,r", [values], dtype=gl.float32, is_pure=True, pack=2,
    )


@gluon_kernel
def _load_tiles(stages, x_descriptor, weight_descriptor, product_sizes, BLOCKS: gl.constexpr):
    """Copy the blocks of all tiles of a program into the stages."""
    STAGES: gl.constexpr = stages.full.shape[0]
    BYTES: gl.constexpr = (BLOCKS.ROWS + 2 * BLOCKS.OUT) * BLOCKS.IN * 2
    blocks_done = 0
    for index in range(gl.program_id(0), _num_tiles(product_sizes, BLOCKS), gl.num_programs(0)):
        row, out = _tile_origin(index, product_sizes, BLOCKS)
        for column in range(0, product_sizes.num_in, BLOCKS.IN):
            stage = blocks_done % STAGES
            hopper.mbarrier.wait(stages.empty.index(stage), blocks_done // STAGES % 2 ^ 1)
            full, weights = stages.full.index(stage), stages.weights.index(stage)
            hopper.mbarrier.expect(full, BYTES)
            hopper.tma.async_copy_global_to_shared(x_descriptor, [row, column], full, stages.x.index(stage))
            gate, up = weights.slice(0, BLOCKS.OUT), weights.slice(BLOCKS.OUT, BLOCKS.OUT)
            hopper.tma.async_copy_global_to_shared(weight_descriptor, [out, column], full, gate)
            hopper.tma.async_copy_global_to_shared(weight_descriptor, [product_sizes.num_out + out, column], full, up)
            blocks_done += 1


@gluon_kernel
def _multiply_tiles(WARPGROUP: gl.constexpr, stages, results, out_descriptor, product_sizes, BLOCKS: gl.constexpr):
    """Compute the results of a program's tiles, for the half of the rows that belongs to WARPGROUP."""
    STAGES: gl.constexpr = stages.full.shape[0]
    ROWS: gl.constexpr = BLOCKS.ROWS // 2
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * BLOCKS.OUT, 16])
    result = results.index(WARPGROUP)
    blocks_done = 0
    for index in range(gl.program_id(0), _num_tiles(product_sizes, BLOCKS), gl.num_programs(0)):
        row, out = _tile_origin(index, product_sizes, BLOCKS)
        sums = gl.full([ROWS, 2 * BLOCKS.OUT], 0.0, gl.float32, layout=SUMS)
        for column in range(0, product_sizes.num_in, BLOCKS.IN):
            stage = blocks_done % STAGES
            hopper.mbarrier.wait(stages.full.index(stage), blocks_done // STAGES % 2)
            x, weights = stages.x.index(stage).slice(WARPGROUP * ROWS, ROWS), stages.weights.index(stage)
            pending = hopper.warpgroup_mma(x, weights.permute((1, 0)), sums, is_async=True)
            # The product of the previous block has ended, so the stage of this block is free.
            sums = hopper.warpgroup_mma_wait(num_outstanding=1, deps=[pending])
            hopper.mbarrier.arrive(stages.empty.index((blocks_done + STAGES - 1) % STAGES), count=1, pred=column > 0)
            blocks_done += 1
        sums = hopper.warpgroup_mma_wait(num_outstanding=0, deps=[sums])
        hopper.mbarrier.arrive(stages.empty.index((blocks_done - 1) % STAGES), count=1)
        gate, up = gl.split(sums.reshape([ROWS, 2, BLOCKS.OUT]).permute((0, 2, 1)))
        # Gate and up are rounded before the activation, as the output of a linear layer is.
        activation = silu_and_multiply(_round_to_bfloat16(gate), _round_to_bfloat16(up)).to(result.dtype)
        # Wait until the previous tile's results have left shared memory.
        hopper.tma.store_wait(0)
        result.store(activation)
        hopper.fence_async_shared()
        hopper.tma.async_copy_shared_to_global(out_descriptor, [row + WARPGROUP * ROWS, out], result)
    hopper.tma.store_wait(0)


@gluon_kernel(do_not_specialize=["num_rows"])
def _hopper_gated_kernel(
    x_descriptor, weight_descriptor, out_descriptor, num_rows, num_out, num_in,
    BLOCK_ROWS: gl.constexpr, BLOCK_OUT: gl.constexpr, BLOCK_IN: gl.constexpr, STAGES: gl.constexpr,
    ROW_BLOCKS: gl.constexpr, MULTIPLY_REGISTERS: gl.constexpr, LOAD_REGISTERS: gl.constexpr, USE_PDL: gl.constexpr,
):
    """x [num_rows, num_in], weight [2 · num_out, num_in] and out [num_rows, num_out] are TMA descriptors."""
    BLOCKS: gl.constexpr = BlockSizes(BLOCK_ROWS, BLOCK_OUT, BLOCK_IN, ROW_BLOCKS)
    dtype: gl.constexpr = x_descriptor.dtype
    full, empty = make_barriers(STAGES, 1, 2)
    stages = Stages(
        gl.allocate_shared_memory(dtype, [STAGES, BLOCK_ROWS, BLOCK_IN], x_descriptor.layout),
        gl.allocate_shared_memory(dtype, [STAGES, 2 * BLOCK_OUT, BLOCK_IN], weight_descriptor.layout),
        full, empty,
    )
    results = gl.allocate_shared_memory(dtype, [2, BLOCK_ROWS // 2, BLOCK_OUT], out_descriptor.layout)
    sizes = ProductSizes(num_rows, num_out, num_in)
    pdl_trigger_and_wait(USE_PDL)
    gl.warp_specialize(
        [
            (_multiply_tiles, (0, stages, results, out_descriptor, sizes, BLOCKS)),
            (_multiply_tiles, (1, stages, results, out_descriptor, sizes, BLOCKS)),
            (_load_tiles, (stages, x_descriptor, weight_descriptor, sizes, BLOCKS)),
        ],
        [4, 4], [MULTIPLY_REGISTERS, LOAD_REGISTERS],
    )
# fmt: on


def hopper_gated(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """Returns silu(x · gateᵀ) · (x · upᵀ) in `out`, or in a new tensor [rows, out].  weight: [2·out, in], gate first.

    Supports bfloat16 on Hopper, with contiguous rows that are aligned to 16 bytes.  The reference is
    linear_gated.reference.  Raises EspalierError for other shapes, dtypes and layouts."""
    (rows, num_in), num_out = x.shape, weight.shape[0] // 2
    require("gated linear: x", x, (rows, num_in), torch.bfloat16, x)
    require("gated linear: weight", weight, (2 * num_out, num_in), torch.bfloat16, x)
    if num_out % 8 or not all(t.stride(1) == 1 and is_aligned_for_copies(t) for t in (x, weight)):
        raise EspalierError(
            f"gated linear: rows must be contiguous, and their addresses multiples of 16 bytes, but x has strides "
            f"{x.stride()} and weight, for {num_out} outputs, {weight.stride()}: use linear_gated"
        )
    out = x.new_empty(rows, num_out) if out is None else out
    _hopper_gated_kernel[(min(num_tiles(rows, num_out), chip(x).processors),)](
        tma_descriptor(x, BLOCK_ROWS, BLOCK_IN), tma_descriptor(weight, BLOCK_OUT, BLOCK_IN),
        tma_descriptor(out, BLOCK_ROWS // 2, BLOCK_OUT),
        *(rows, num_out, num_in),
        BLOCK_ROWS=BLOCK_ROWS, BLOCK_OUT=BLOCK_OUT, BLOCK_IN=BLOCK_IN, STAGES=STAGES, ROW_BLOCKS=GROUP_ROW_BLOCKS,
        MULTIPLY_REGISTERS=MULTIPLY_REGISTERS, LOAD_REGISTERS=LOAD_REGISTERS, num_warps=4, maxnreg=LAUNCH_REGISTERS,
        **pdl_arguments(chip(x)),
    )  # fmt: skip
    return out
