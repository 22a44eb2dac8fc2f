"""Compares the values of GGUF files with those that the package `gguf` reads: prints cases and the largest difference.

    python -m scripts.gguf_values FILE.gguf ...

The comparison is to the bit for all matrices in blocks; it needs `pip install gguf`.
"""

import sys

import gguf
import numpy as np
import torch

from espalier.kernels.layers.blocks import BLOCK_TYPES, BlockMatrix, dequantise_blocks


def main(paths: list[str]) -> None:
    for path in paths:
        matrices, values, types, largest = 0, 0, set[str](), 0.0
        for tensor in gguf.GGUFReader(path).tensors:
            name = tensor.tensor_type.name
            if name not in BLOCK_TYPES:
                continue
            theirs = gguf.dequantize(tensor.data, tensor.tensor_type)
            ours = dequantise_blocks(BlockMatrix(BLOCK_TYPES[name], torch.from_numpy(np.array(tensor.data))))
            largest = max(largest, float(np.abs(theirs - ours.numpy()).max()))
            matrices, values, types = matrices + 1, values + theirs.size, types | {name}
        print(f"{path}: {matrices} matrices, {values} values, {', '.join(sorted(types))}: largest difference {largest}")


if __name__ == "__main__":
    main(sys.argv[1:])
