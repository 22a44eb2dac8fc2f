"""Matrices in the block formats of GGUF files.  Matrices stay in these formats in memory, and products read the blocks.

The block format of each matrix is in the config.json that gguf_config.py makes from the file's metadata.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from espalier.errors import EspalierError, shown
from espalier.kernels.layers.blocks import BLOCK_TYPES, BlockMatrix, dequantise_blocks
from espalier.kernels.layers.linear_plans import DTYPES
from espalier.kernels.layers.quantised import DEQUANTISED_VALUES_PER_STEP
from espalier.kernels.ops.linear import linear_blocks
from espalier.models.weight_formats.base import FormatLookup, StoredTensor, Weight, WeightFormat
from espalier.models.weight_formats.dense import DENSE_FORMAT
from espalier.models.weight_formats.quantised import read_object, require_multiple_of

GGUF_METHOD = "gguf"


class BlockWeight(Weight):
    """A weight that is kept in the block format of its file."""

    __slots__ = ("matrix", "format")

    def __init__(self, matrix: BlockMatrix) -> None:
        super().__init__(matrix.shape, matrix.blocks.nbytes)
        self.matrix = matrix
        self.format = matrix.block_type.name

    def require_kernels(self, dtype: torch.dtype) -> None:
        if self.matrix.blocks.is_cuda and dtype not in DTYPES:
            raise EspalierError(f"{self.format} weights need dtype=bfloat16 or float16 on a GPU, not {dtype}")

    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return linear_blocks(x, self.matrix, bias)

    def rows_from(self, first_row: int) -> Weight:
        return BlockWeight(self.matrix.rows_from(first_row))

    def dequantise_into(self, table: Tensor) -> None:
        """Writes the dequantised values to `table`, a dense tensor [out, in] of any floating-point dtype."""
        step = max(DEQUANTISED_VALUES_PER_STEP // table.shape[1], 1)
        for begin in range(0, len(table), step):
            table[begin : begin + step].copy_(dequantise_blocks(self.matrix, begin, begin + step))


@dataclass(frozen=True)
class GGUFFormat(WeightFormat):
    """A matrix in blocks: `.weight` uint8 [out, blocks of a row, bytes of a block].  type: a name of BLOCK_TYPES."""

    type: str
    name = GGUF_METHOD
    supports_shards = True
    can_store_embedding = True

    def stored_tensors(self, rows: int, columns: int) -> tuple[StoredTensor, ...]:
        kind = BLOCK_TYPES[self.type]
        require_multiple_of(f"{self.name} ({self.type})", "columns", columns, kind.block_values)
        shape = (rows, columns // kind.block_values, kind.block_bytes)
        return (StoredTensor(".weight", shape, torch.uint8, 0, 1, columns_per_entry=kind.block_values),)

    def build_weight(self, tensors: Mapping[str, Tensor], row_counts: Sequence[int], columns: int) -> BlockWeight:
        return BlockWeight(BlockMatrix(BLOCK_TYPES[self.type], tensors[".weight"].flatten(1)))

    def keeps_stored_dtype(self, name: str, dtype: torch.dtype) -> bool:
        return dtype == torch.uint8


def read_gguf_types(quantisation: Mapping[str, Any]) -> FormatLookup:
    """Returns the format of each matrix, for quant_method "gguf".
    Raises EspalierError naming a block format that is not supported."""
    types = read_object(quantisation, "types")
    for type in types.values():
        if not isinstance(type, str) or type not in BLOCK_TYPES:
            raise EspalierError(f"quantization_config: block type {shown(type)} is not supported")
    formats = {name: GGUFFormat(type) for name, type in types.items()}
    return lambda name: formats.get(name, DENSE_FORMAT)
