"""MXFP4 experts as GPT-OSS stores them: blocks of 32 values E2M1 with a power of two (OCP Microscaling Formats 1.0)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.layers.quantised import QuantisedMatrix, nibble_matrix
from espalier.models.weight_formats.base import FormatOf, StoredTensor
from espalier.models.weight_formats.dense import DENSE_FORMAT
from espalier.models.weight_formats.quantised import (
    QuantisedFormat,
    matches,
    module_names,
    require_multiple,
)

BLOCK = 32


@dataclass(frozen=True)
class Mxfp4Format(QuantisedFormat):
    """Stacked experts: _blocks uint8 [experts, out, in / 32, 16], low nibble first; _scales [experts, out, in / 32]."""

    name = "mxfp4"
    has_shards = True

    def tensors(self, rows: int, columns: int) -> tuple[StoredTensor, ...]:
        raise EspalierError(f"format {self.name} is supported for stacked experts only")

    def stored_matrix(self, tensors: Mapping[str, Tensor], rows: Sequence[int], columns: int) -> QuantisedMatrix:
        raise EspalierError(f"format {self.name} is supported for stacked experts only")

    def expert_tensors(self, count: int, rows: int, columns: int) -> tuple[StoredTensor, ...]:
        require_multiple(self.name, "columns", columns, BLOCK)
        shape = (count, rows, columns // BLOCK)
        return (
            StoredTensor("_blocks", (*shape, BLOCK // 2), torch.uint8, 1, 2, column_unit=BLOCK),
            StoredTensor("_scales", shape, torch.uint8, 1, 2, column_unit=BLOCK),
        )

    def expert_matrix(self, tensors: Mapping[str, Tensor]) -> QuantisedMatrix:
        return nibble_matrix("mxfp4", tensors["_blocks"].flatten(2), tensors["_scales"], BLOCK)

    def keeps(self, name: str, dtype: torch.dtype) -> bool:
        return name.endswith(("_blocks", "_scales"))


def read_mxfp4(quantisation: Mapping[str, Any]) -> FormatOf:
    """quant_method "mxfp4": the experts are quantised, and nothing else."""
    skipped, format = module_names(quantisation, "modules_to_not_convert"), Mxfp4Format()

    def format_of(name: str) -> Any:
        is_expert = matches(name, "mlp.experts") and not any(matches(name, pattern) for pattern in skipped)
        return format if is_expert else DENSE_FORMAT

    return format_of
