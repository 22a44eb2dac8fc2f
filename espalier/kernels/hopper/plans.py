"""Decides which products of few rows with 4-bit weights run on the Hopper kernels, and how the kernels divide them."""

import torch
from torch import Tensor

from espalier.kernels.layers.quantised import E2M1_CODES, QuantisedMatrix
from espalier.kernels.runtime.launch import HOPPER, Chip

# A program's tile of the weight is [BLOCK_OUT, BLOCK_IN].  int4 needs groups of INT4_GROUP_SIZE columns with one scale.
BLOCK_OUT, BLOCK_IN, WARPS, INT4_GROUP_SIZE = 64, 256, 4, 128
# The rows of inputs in a small tile, and in a large tile.
FEW_ROWS, MAX_ROWS = 8, 16
# (block_out, block_in, warps): the kernels run only plans with this tile.
TILE_SHAPE = (BLOCK_OUT, BLOCK_IN, WARPS)
# The most pipeline stages, the most splits of split-K, and the fewest steps (blocks of BLOCK_IN columns) of a split.
MAX_STAGES, MAX_SPLITS, MIN_STEPS = 8, 8, 2
# The most programs that share a multiprocessor.
MAX_PROGRAMS_PER_PROCESSOR = 4


def supports_format(weight: QuantisedMatrix, dtype: torch.dtype, num_rows: int, gpu: Chip) -> bool:
    """Whether the kernels support the weight, with `num_rows` rows of inputs or with tiles of `num_rows` rows."""
    is_int4 = weight.code == "int4" and weight.group_size == INT4_GROUP_SIZE < weight.shape[-1]
    is_few = gpu.capability == HOPPER and num_rows <= MAX_ROWS
    return is_few and dtype == torch.bfloat16 and (weight.code in E2M1_CODES or is_int4)


def supports_hopper_product(
    x: Tensor, weight: QuantisedMatrix, tile_rows: int, tile_shape: tuple[int, int, int], gpu: Chip
) -> bool:
    """Returns whether the kernels of hopper/quantised_products.py take a product.

    x: all inputs.  tile_rows: rows of x per tile.  tile_shape: (block_out, block_in, warps) of the plan."""
    # The kernels copy 16 bytes at once, and their offsets have 32 bits.
    is_aligned = x.stride(0) % 16 == 0 and x.data_ptr() % 16 == 0 and len(x) * x.stride(0) < 2**31
    return supports_format(weight, x.dtype, tile_rows, gpu) and tile_shape == TILE_SHAPE and is_aligned


def num_splits_for(num_out: int, num_in: int, gpu: Chip) -> int:
    """Returns the number of splits for split-K.  All programs run at once, and each has at least MIN_STEPS steps.  A
    layer with too many outputs or too few inputs for several splits gets one split."""
    blocks, steps = -(-num_out // BLOCK_OUT), -(-num_in // BLOCK_IN)
    return max(min(MAX_PROGRAMS_PER_PROCESSOR * gpu.processors // blocks, MAX_SPLITS, steps // MIN_STEPS), 1)


def max_stages(tile_rows: int, code: str, num_programs: int, gpu: Chip) -> int:
    """Returns the most pipeline stages that fit in shared memory, if the launch has this number of programs.
    tile_rows: rows of inputs per tile.  code: see QuantisedMatrix."""
    num_weights = BLOCK_OUT * BLOCK_IN
    stage_bytes = num_weights // 2 + num_weights // (16 if code == "nvfp4" else 32) + tile_rows * BLOCK_IN * 2
    programs_per_processor = min(-(-num_programs // gpu.processors), MAX_PROGRAMS_PER_PROCESSOR)
    return max(min(gpu.shared_memory_per_program(programs_per_processor) // stage_bytes, MAX_STAGES), 2)
