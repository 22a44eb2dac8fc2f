"""GPTQ (Frantar et al. 2022, arXiv:2210.17323): 4-bit values packed along the columns, as in AutoGPTQ and GPTQModel.

With `desc_act`, the columns of a group are not adjacent, and `g_idx` has the group of each column.  Loading sorts the
columns by group, and products reorder their inputs in the same way.

AWQ (Lin et al. 2023, arXiv:2306.00978): 4-bit values packed along the rows, as in AutoAWQ's "gemm" version.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.layers.quantised import QuantisedMatrix, make_nibble_matrix
from espalier.models.weight_formats.base import FormatLookup, StoredTensor
from espalier.models.weight_formats.dense import DENSE_FORMAT
from espalier.models.weight_formats.quantised import (
    NIBBLES_OF_INT32,
    SCALE_DTYPES,
    QuantisedFormat,
    column_groups_of_part,
    common_column_order,
    dense_if_skipped,
    matches_module,
    module_names,
    pack_rows,
    read_field,
    read_group_size,
    require_multiple_of,
    unpack_int32,
)
from espalier.shards import RankPart

# In checkpoint_format "gptq", each int32 of zero points is stored minus this number, which is 1 for each nibble.
# Adding the number to the whole int32 also undoes the borrows of nibbles that were 0.
ONE_PER_NIBBLE = 0x11111111


@dataclass(frozen=True)
class GptqFormat(QuantisedFormat):
    """A matrix in GPTQ's format.
    The tensors are qweight int32 [in / 8, out], qzeros int32 [in / group, out / 8], scales [in / group, out] and g_idx
    int32 [in].  group_size: the number of columns of a group; None if all columns are one group.
    zero_point_offset: what loading adds to stored zero points: 1 in checkpoint_format "gptq" (v1), 0 in "gptq_v2"."""

    group_size: int | None
    zero_point_offset: int
    name = "gptq"
    supports_shards = True

    def stored_tensors(self, rows: int, columns: int) -> tuple[StoredTensor, ...]:
        group = self.group_size or columns
        require_multiple_of(self.name, "rows", rows, NIBBLES_OF_INT32)
        require_multiple_of(self.name, "columns", columns, NIBBLES_OF_INT32)
        require_multiple_of(self.name, "columns", columns, group)
        groups, packed = columns // group, rows // NIBBLES_OF_INT32
        group_dim = None if self.group_size is None else 0
        return (
            StoredTensor(
                ".qweight", (columns // NIBBLES_OF_INT32, rows), torch.int32, 1, 0, columns_per_entry=NIBBLES_OF_INT32
            ),
            StoredTensor(".qzeros", (groups, packed), torch.int32, 1, group_dim, NIBBLES_OF_INT32, group),
            StoredTensor(".scales", (groups, rows), SCALE_DTYPES, 1, group_dim, columns_per_entry=group),
            StoredTensor(".g_idx", (columns,), torch.int32, column_dim=0),
        )

    def tensors_of_part(
        self, tensors: Mapping[str, Tensor], rows: Sequence[RankPart], columns: RankPart
    ) -> Mapping[str, Tensor]:
        """Corrects g_idx for a part of the columns; all other tensors stay as they are."""
        if columns.is_whole:
            return tensors
        return {**tensors, ".g_idx": column_groups_of_part(tensors[".g_idx"], columns, self.group_size)}

    def stored_matrix(self, tensors: Mapping[str, Tensor], row_counts: Sequence[int], columns: int) -> QuantisedMatrix:
        """Returns the stacked matrix.  tensors: by suffix.  row_counts: the number of rows of each matrix in it."""
        packed, group = tensors[".qweight"], self.group_size or columns
        order = common_column_order(tensors[".g_idx"], group)

        def unpack_rows(begin: int, end: int) -> Tensor:
            """Returns the codes of the matrix's rows begin .. end-1."""
            codes = unpack_int32(packed[:, begin:end], 0).T
            return codes if order is None else codes[:, order]

        zeros = unpack_int32(tensors[".qzeros"] + self.zero_point_offset * ONE_PER_NIBBLE, 1).T.contiguous()
        scales = tensors[".scales"].T.contiguous()
        return make_nibble_matrix("int4", pack_rows(unpack_rows, sum(row_counts)), scales, group, zeros, order)


def read_gptq(quantisation: Mapping[str, Any]) -> FormatLookup:
    """Returns the format of each matrix, for quant_method "gptq".
    Raises EspalierError naming a field that is not supported."""
    read_field(quantisation, "bits", (4,))
    if quantisation.get("dynamic"):
        raise EspalierError("quantization_config: dynamic (settings for each module) is not supported, only none")
    version = read_field(quantisation, "checkpoint_format", ("gptq", "gptq_v2", "", None), "gptq")
    skipped = module_names(quantisation, "modules_to_not_convert")
    format = GptqFormat(read_group_size(quantisation, 128), 0 if version == "gptq_v2" else 1)
    format_of = dense_if_skipped(skipped, format, bool(quantisation.get("lm_head")))
    # The field is a list of names, or a list of such lists.
    blocks = quantisation.get("modules_in_block_to_quantize")
    if isinstance(blocks, list) and all(isinstance(block, list) for block in blocks):
        blocks = [name for block in blocks for name in block]
    quantised = module_names({"modules_in_block_to_quantize": blocks}, "modules_in_block_to_quantize")
    if not quantised:
        return format_of
    return lambda name: format_of(name) if any(matches_module(name, module) for module in quantised) else DENSE_FORMAT


# For each of the eight rows in an int32, the index of the row's nibble.
AWQ_NIBBLE_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True)
class AwqFormat(QuantisedFormat):
    """A matrix in AWQ's format.
    The tensors are qweight int32 [in, out / 8], qzeros int32 [in / group, out / 8] and scales [in / group, out]."""

    group_size: int | None
    name = "awq"
    supports_shards = True

    def stored_tensors(self, rows: int, columns: int) -> tuple[StoredTensor, ...]:
        group = self.group_size or columns
        require_multiple_of(self.name, "rows", rows, NIBBLES_OF_INT32)
        require_multiple_of(self.name, "columns", columns, group)
        groups, packed = columns // group, rows // NIBBLES_OF_INT32
        group_dim = None if self.group_size is None else 0
        return (
            StoredTensor(".qweight", (columns, packed), torch.int32, 1, 0, NIBBLES_OF_INT32),
            StoredTensor(".qzeros", (groups, packed), torch.int32, 1, group_dim, NIBBLES_OF_INT32, group),
            StoredTensor(".scales", (groups, rows), SCALE_DTYPES, 1, group_dim, columns_per_entry=group),
        )

    def stored_matrix(self, tensors: Mapping[str, Tensor], row_counts: Sequence[int], columns: int) -> QuantisedMatrix:
        """Returns the stacked matrix.  tensors: by suffix.  row_counts: the number of rows of each matrix in it."""
        packed = tensors[".qweight"]

        def unpack_rows(begin: int, end: int) -> Tensor:
            """Returns the codes of the matrix's rows begin .. end-1."""
            return unpack_int32(packed[:, begin // NIBBLES_OF_INT32 : end // NIBBLES_OF_INT32], 1, AWQ_NIBBLE_ORDER).T

        zeros = unpack_int32(tensors[".qzeros"], 1, AWQ_NIBBLE_ORDER).T.contiguous()
        scales = tensors[".scales"].T.contiguous()
        return make_nibble_matrix(
            "int4", pack_rows(unpack_rows, sum(row_counts)), scales, self.group_size or columns, zeros
        )


def read_awq(quantisation: Mapping[str, Any]) -> FormatLookup:
    """Returns the format of each matrix, for quant_method "awq".
    Raises EspalierError naming a field that is not supported."""
    read_field(quantisation, "bits", (4,), quantisation.get("w_bit", 4))
    read_field(quantisation, "version", ("gemm", "GEMM"), "gemm")
    read_field(quantisation, "zero_point", (True,), True)
    group = read_group_size(quantisation, quantisation.get("q_group_size", 128))
    skipped = module_names(quantisation, "modules_to_not_convert")
    return dense_if_skipped(skipped, AwqFormat(group), bool(quantisation.get("lm_head")))
