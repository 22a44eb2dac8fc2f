"""Blocks and files of GGUF, made by hand from the format's description: no library is needed."""

import torch
from torch import Tensor

from espalier.kernels.layers.blocks import BLOCK_TYPES

# Where a block has float16 numbers.
HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def blocks_of(name: str, rows: int, columns: int, seed: int = 0, scale: float = 0.01) -> Tensor:
    """Random bytes [rows, row bytes], in which the float16 numbers are about `scale`."""
    kind, generator = BLOCK_TYPES[name], torch.Generator().manual_seed(seed)
    size = rows * columns // kind.values
    blocks = torch.randint(0, 256, (size, kind.nbytes), generator=generator).to(torch.uint8)
    for at in HALVES.get(name, (0,)):
        numbers = ((torch.rand(size, generator=generator) + 0.5) * scale).half()
        blocks[:, at : at + 2] = numbers[:, None].view(torch.uint8)
    return blocks.reshape(rows, -1)
