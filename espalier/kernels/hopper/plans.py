"""Which products of few rows with 4-bit weights the Hopper kernels take, and how they divide them."""

from __future__ import annotations

import torch
from torch import Tensor

from espalier.kernels.layers.quantised import QuantisedMatrix
from espalier.kernels.runtime.launch import HOPPER, Chip

# A program's tile of the weight and its warps, and the columns that share a scale of int4.
BLOCK_OUT, BLOCK_IN, WARPS, GROUP = 64, 256, 4, 128
# Rows of a tile.
FEW_ROWS, MAX_ROWS = 8, 16
# block_out, block_in and warps of the plans that the kernels take.
TILE = (BLOCK_OUT, BLOCK_IN, WARPS)
MAX_STAGES, MAX_SPLITS, MIN_STEPS = 8, 8, 2
# Programs that share a multiprocessor if there are as many.
PROGRAMS = 4


def takes_format(weight: QuantisedMatrix, dtype: torch.dtype, rows: int, gpu: Chip) -> bool:
    """Whether the kernels can multiply the weight with `rows` rows, or tiles of as many, of this dtype."""
    is_int4 = weight.code == "int4" and weight.group == GROUP < weight.shape[-1]
    is_few = gpu.capability == HOPPER and rows <= MAX_ROWS
    return is_few and dtype == torch.bfloat16 and (weight.code == "mxfp4" or is_int4)


def is_hopper_product(x: Tensor, weight: QuantisedMatrix, rows: int, tile: tuple[int, int, int], gpu: Chip) -> bool:
    """Whether these kernels, or those of hopper/nibbles.py, take a product.

    x: all inputs; rows: of a tile of them; tile: block_out, block_in and warps of the plan.  The kernels choose their
    stages themselves.
    """
    # Copies of 16 bytes, and places in 32 bits.
    is_aligned = x.stride(0) % 16 == 0 and x.data_ptr() % 16 == 0 and len(x) * x.stride(0) < 2**31
    return takes_format(weight, x.dtype, rows, gpu) and tile == TILE and is_aligned


def splits_of(num_out: int, num_in: int, gpu: Chip) -> int:
    """The splits of a layer that is split: all programs run at once, each with MIN_STEPS steps at least."""
    blocks, steps = -(-num_out // BLOCK_OUT), -(-num_in // BLOCK_IN)
    return max(min(PROGRAMS * gpu.processors // blocks, MAX_SPLITS, steps // MIN_STEPS), 1)


def stages(tile: int, programs: int, gpu: Chip) -> int:
    """As many as fit when programs share a multiprocessor, of `programs` programs with `tile` rows of inputs."""
    stage = BLOCK_OUT * BLOCK_IN // 2 + BLOCK_OUT * BLOCK_IN // 32 + tile * BLOCK_IN * 2
    sharing = min(-(-programs // gpu.processors), PROGRAMS)
    return max(min(gpu.shared_memory_of(sharing) // stage, MAX_STAGES), 2)
