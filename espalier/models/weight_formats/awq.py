"""AWQ (Lin et al. 2023, arXiv:2306.00978): 4 bits along the rows, as AutoAWQ's "gemm" version packs them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from espalier.kernels.layers.quantised import QuantisedMatrix, nibble_matrix
from espalier.models.weight_formats.base import FormatOf, StoredTensor
from espalier.models.weight_formats.quantised import (
    NIBBLES_OF_INT32,
    SCALE_DTYPES,
    QuantisedFormat,
    dense_if_skipped,
    module_names,
    packed_rows,
    read_field,
    read_group,
    require_multiple,
    unpack_int32,
)

# Row r of eight is this nibble of its int32.
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True)
class AwqFormat(QuantisedFormat):
    """qweight int32 [in, out / 8], qzeros int32 [in / group, out / 8], scales [in / group, out]."""

    group: int | None
    name = "awq"
    has_shards = True

    def tensors(self, rows: int, columns: int) -> tuple[StoredTensor, ...]:
        group = self.group or columns
        require_multiple(self.name, "rows", rows, NIBBLES_OF_INT32)
        require_multiple(self.name, "columns", columns, group)
        groups, packed = columns // group, rows // NIBBLES_OF_INT32
        of_groups = None if self.group is None else 0
        return (
            StoredTensor(".qweight", (columns, packed), torch.int32, 1, 0, NIBBLES_OF_INT32),
            StoredTensor(".qzeros", (groups, packed), torch.int32, 1, of_groups, NIBBLES_OF_INT32, group),
            StoredTensor(".scales", (groups, rows), SCALE_DTYPES, 1, of_groups, column_unit=group),
        )

    def stored_matrix(self, tensors: Mapping[str, Tensor], rows: Sequence[int], columns: int) -> QuantisedMatrix:
        packed = tensors[".qweight"]

        def block(begin: int, end: int) -> Tensor:
            return unpack_int32(packed[:, begin // NIBBLES_OF_INT32 : end // NIBBLES_OF_INT32], 1, AWQ_ORDER).T

        zeros = unpack_int32(tensors[".qzeros"], 1, AWQ_ORDER).T.contiguous()
        scales = tensors[".scales"].T.contiguous()
        return nibble_matrix("int4", packed_rows(block, sum(rows)), scales, self.group or columns, zeros)


def read_awq(quantisation: Mapping[str, Any]) -> FormatOf:
    """quant_method "awq".  Raises EspalierError naming a field that is not supported."""
    read_field(quantisation, "bits", (4,), quantisation.get("w_bit", 4))
    read_field(quantisation, "version", ("gemm", "GEMM"), "gemm")
    read_field(quantisation, "zero_point", (True,), True)
    group = read_group(quantisation, quantisation.get("q_group_size", 128))
    skipped = module_names(quantisation, "modules_to_not_convert")
    return dense_if_skipped(skipped, AwqFormat(group), bool(quantisation.get("lm_head")))
