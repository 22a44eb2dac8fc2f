"""Reads quant_method "compressed-tensors" of llm-compressor: FP8, 4-bit integers packed along columns, and NVFP4.

`config_groups` maps module names to schemes.  A module named in `ignore` is dense.  A scheme that is not implemented is
refused when config.json is read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.layers.quantised import QuantisedMatrix, make_nibble_matrix, unpack_nibbles
from espalier.models.weight_formats.base import FormatLookup, StoredTensor, WeightFormat
from espalier.models.weight_formats.dense import DENSE_FORMAT
from espalier.models.weight_formats.e2m1 import COMPRESSED_TENSORS_SUFFIXES, NVFP4_GROUP_SIZE, Nvfp4Format
from espalier.models.weight_formats.fp8 import Fp8Format, read_block
from espalier.models.weight_formats.quantised import (
    NIBBLES_OF_INT32,
    SCALE_DTYPES,
    QuantisedFormat,
    column_groups_of_part,
    common_column_order,
    matches_module,
    module_names,
    pack_rows,
    read_group_size,
    read_object,
    require_multiple_of,
    unpack_int32,
)
from espalier.shards import RankPart

SUPPORTED_SCHEMES = "float-quantized (FP8), pack-quantized (4 bits) and nvfp4-pack-quantized"
# The class name that stands for all linear layers in the targets of config_groups.
LINEAR_CLASS = "Linear"


@dataclass(frozen=True)
class PackedFormat(QuantisedFormat):
    """4-bit integers packed into int32.
    The tensors are weight_packed int32 [out, in / 8] (values + 8, low nibble first), weight_scale [out, in / group] and
    weight_shape.
    has_zero_points: whether the tensor weight_zero_point int32 [out / 8, in / group] exists, packed along the rows.
    has_g_idx: whether the tensor weight_g_idx int32 [in] exists: the group of each column."""

    group_size: int | None
    has_zero_points: bool = False
    has_g_idx: bool = False
    name = "pack-quantized"
    supports_shards = True

    def stored_tensors(self, rows: int, columns: int) -> tuple[StoredTensor, ...]:
        group = self.group_size or columns
        require_multiple_of(self.name, "columns", columns, NIBBLES_OF_INT32)
        require_multiple_of(self.name, "columns", columns, group)
        groups, packed = columns // group, columns // NIBBLES_OF_INT32
        group_dim = None if self.group_size is None else 1
        tensors = [
            StoredTensor(".weight_packed", (rows, packed), torch.int32, 0, 1, columns_per_entry=NIBBLES_OF_INT32),
            StoredTensor(".weight_scale", (rows, groups), SCALE_DTYPES, 0, group_dim, columns_per_entry=group),
            StoredTensor(".weight_shape", (2,), (torch.int64, torch.int32)),
        ]
        if self.has_zero_points:
            require_multiple_of(self.name, "rows", rows, NIBBLES_OF_INT32)
            shape = (rows // NIBBLES_OF_INT32, groups)
            zeros = StoredTensor(".weight_zero_point", shape, torch.int32, 0, group_dim, NIBBLES_OF_INT32, group)
            tensors.append(zeros)
        if self.has_g_idx:
            tensors.append(StoredTensor(".weight_g_idx", (columns,), torch.int32, column_dim=0))
        return tuple(tensors)

    def tensors_of_part(
        self, tensors: Mapping[str, Tensor], rows: Sequence[RankPart], columns: RankPart
    ) -> Mapping[str, Tensor]:
        """Corrects weight_shape and weight_g_idx for a part.  rows: the part of each stacked matrix's rows."""
        _require_shapes(tensors[".weight_shape"], [part.size for part in rows], columns.size)
        shapes = torch.tensor([(len(part), len(columns)) for part in rows])
        part_tensors = {**tensors, ".weight_shape": shapes}
        if self.has_g_idx and not columns.is_whole:
            part_tensors[".weight_g_idx"] = column_groups_of_part(tensors[".weight_g_idx"], columns, self.group_size)
        return part_tensors

    def stored_matrix(self, tensors: Mapping[str, Tensor], row_counts: Sequence[int], columns: int) -> QuantisedMatrix:
        """Returns the stacked matrix.  tensors: by suffix.  row_counts: the number of rows of each matrix in it."""
        _require_shapes(tensors[".weight_shape"], row_counts, columns)
        codes, group = tensors[".weight_packed"].view(torch.uint8), self.group_size or columns
        zeros = unpack_int32(tensors[".weight_zero_point"], 0) if self.has_zero_points else None
        order = common_column_order(tensors[".weight_g_idx"], group) if self.has_g_idx else None
        if order is not None:
            packed = codes
            codes = pack_rows(lambda begin, end: unpack_nibbles(packed[begin:end])[:, order], len(packed))
        return make_nibble_matrix("int4", codes, tensors[".weight_scale"], group, zeros, order)


def _require_shapes(shapes: Tensor, row_counts: Sequence[int], columns: int) -> None:
    """shapes: the stored (rows, columns) of each stacked matrix.  row_counts: the rows that config.json needs."""
    for count, shape in zip(row_counts, shapes.tolist(), strict=True):
        if shape != [count, columns]:
            raise EspalierError(
                f"weight_shape is {shape}, but config.json needs {[count, columns]}; download both again"
            )


def read_compressed_tensors(quantisation: Mapping[str, Any]) -> FormatLookup:
    """Returns the format of each matrix, for quant_method "compressed-tensors".
    Raises EspalierError naming a scheme that is not supported."""
    _refuse_fields(quantisation, "sparsity_config", "transform_config")
    ignored, default_format = module_names(quantisation, "ignore"), quantisation.get("format")
    groups: list[tuple[tuple[str, ...], WeightFormat]] = []
    config_groups = read_object(quantisation, "config_groups")
    for group in (read_object(config_groups, name) for name in config_groups):
        targets = module_names(group, "targets")
        groups.append((targets, _read_scheme(group, group.get("format") or default_format)))
    if not groups and quantisation.get("kv_cache_scheme") is None:
        raise EspalierError("quantization_config has no config_groups; download config.json again")

    def format_of(matrix_name: str) -> WeightFormat:
        if any(matches_module(matrix_name, pattern) for pattern in ignored):
            return DENSE_FORMAT
        # A group that names the module has priority over a group for all linear layers.
        named = (
            format
            for targets, format in groups
            if any(t != LINEAR_CLASS and matches_module(matrix_name, t) for t in targets)
        )
        linear = (format for targets, format in groups if LINEAR_CLASS in targets)
        return next(named, next(linear, DENSE_FORMAT))

    return format_of


def _refuse_fields(quantisation: Mapping[str, Any], *names: str) -> None:
    """Raises EspalierError if a field of quantization_config, one of `names`, declares a quantised format."""
    for name in names:
        value = read_object(quantisation, name)
        if value.get("format", "dense") != "dense" or value.get("config_groups"):
            raise EspalierError(f"quantization_config: {name} is not supported; use a checkpoint without it")


def _read_scheme(group: Mapping[str, Any], format_name: str | None) -> WeightFormat:
    """Returns the format for an entry of config_groups.  format_name: the `format` of the entry or of the config."""
    weights = read_object(group, "weights")
    inputs = None if group.get("input_activations") is None else read_object(group, "input_activations")
    if group.get("output_activations") is not None:
        raise EspalierError("quantization_config: output_activations are not supported; use another checkpoint")
    kind = weights.get("type"), weights.get("num_bits")
    if format_name in ("float-quantized", "naive-quantized") and kind == ("float", 8):
        return _read_fp8(weights, inputs)
    if format_name == "pack-quantized" and kind == ("int", 4):
        return _read_int4(weights, inputs)
    if format_name == "nvfp4-pack-quantized" and kind == ("float", 4):
        return _read_nvfp4(weights, inputs)
    raise EspalierError(
        f"quantization_config: format {format_name!r} with weights of {kind[1]} bits ({kind[0]}) is not supported, "
        f"only {SUPPORTED_SCHEMES}; use another copy of the model"
    )


def _read_fp8(weight_args: Mapping[str, Any], input_args: Mapping[str, Any] | None) -> WeightFormat:
    strategy = weight_args.get("strategy")
    if strategy not in ("tensor", "channel", "block") or weight_args.get("symmetric") is False:
        raise EspalierError(
            f"quantization_config: FP8 weights by {strategy!r} are not supported, only symmetric ones by 'tensor', "
            "'channel' or 'block'"
        )
    block_shape: tuple[int | None, int | None] = (None, None) if strategy == "tensor" else (1, None)
    if strategy == "block":
        block_shape = read_block(weight_args.get("block_structure"))
    kind, group = _read_inputs(input_args)
    return Fp8Format(block_shape, inputs=kind, group_size=group)


def _read_inputs(input_args: Mapping[str, Any] | None) -> tuple[Literal["static", "dynamic"] | None, int | None]:
    """Returns (how FP8 inputs are scaled, how many columns share a dynamic scale)."""
    if input_args is None:
        return None, None
    strategy, dynamic = input_args.get("strategy"), input_args.get("dynamic")
    is_fp8 = (input_args.get("type"), input_args.get("num_bits")) == ("float", 8)
    if is_fp8 and strategy == "tensor" and dynamic is False:
        return "static", None
    if is_fp8 and strategy == "token" and dynamic is True:
        return "dynamic", None
    if is_fp8 and strategy == "group" and dynamic is True:
        return "dynamic", read_group_size(input_args, 128)
    raise EspalierError(
        f"quantization_config: input_activations of {input_args.get('num_bits')} bits ({input_args.get('type')}) by "
        f"{strategy!r}, dynamic {dynamic!r}, are not supported, only FP8: dynamic by 'token' or 'group', or static by "
        "'tensor'"
    )


def _read_nvfp4(weight_args: Mapping[str, Any], input_args: Mapping[str, Any] | None) -> WeightFormat:
    for args_name, args in (("weights", weight_args), ("input_activations", input_args or weight_args)):
        scheme = {name: args.get(name) for name in ("num_bits", "type", "strategy", "group_size")}
        if scheme != {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": NVFP4_GROUP_SIZE}:
            raise EspalierError(
                f"quantization_config: {args_name} of NVFP4 with {scheme} are not supported, only 4 bits (float) by "
                f"'tensor_group' of {NVFP4_GROUP_SIZE}"
            )
    return Nvfp4Format(COMPRESSED_TENSORS_SUFFIXES, has_input_scales=input_args is not None)


def _read_int4(weight_args: Mapping[str, Any], input_args: Mapping[str, Any] | None) -> WeightFormat:
    strategy = weight_args.get("strategy")
    if strategy not in ("group", "channel") or input_args is not None:
        raise EspalierError(
            f"quantization_config: 4-bit weights by {strategy!r} with input_activations {input_args!r} are not "
            "supported, only by 'group' or 'channel', without input_activations"
        )
    group = read_group_size(weight_args, 128) if strategy == "group" else None
    has_g_idx = weight_args.get("actorder") in ("group", "dynamic", True)
    return PackedFormat(group, has_zero_points=weight_args.get("symmetric") is False, has_g_idx=has_g_idx)
