"""Code that all quantised formats share: the weight class, rules for dense matrices, and 4-bit layouts."""

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.layers.quantised import InputRows, InputScales, QuantisedMatrix, pack_nibbles
from espalier.kernels.layers.quantised_plans import require_supported_weight
from espalier.kernels.ops.activation import SILU, Activation
from espalier.kernels.ops.linear import linear_quantised, linear_quantised_gated, linear_quantised_partial_sums
from espalier.models.weight_formats.base import FormatLookup, Weight, WeightFormat
from espalier.models.weight_formats.dense import DENSE_FORMAT
from espalier.shards import RankPart
from espalier.tokenizer_files import may_be_exponential

# The dtypes that scales may have.  Loading does not cast scales.
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Matrices that are dense by default: the lm_head, and the projection and head of MTP layers.
ALWAYS_DENSE = re.compile(r"(^|\.)(lm_head|eh_proj|shared_head\.head)$")
NIBBLES_OF_INT32 = 8


class QuantisedWeight(Weight):
    """A weight with 8 or 4 bits per value."""

    __slots__ = ("format", "matrix")

    def __init__(self, matrix: QuantisedMatrix, format: str) -> None:
        super().__init__((matrix.shape[0], matrix.shape[1]), matrix.nbytes)
        self.matrix = matrix
        self.format = format

    def require_kernels(self, dtype: torch.dtype) -> None:
        require_supported_weight(self.matrix, dtype)

    def apply(self, x: InputRows, bias: Tensor | None) -> Tensor:
        return linear_quantised(x, self.matrix, bias)

    def partial_sums(self, x: InputRows, bias: Tensor | None) -> Tensor:
        return linear_quantised_partial_sums(x, self.matrix, bias)

    def activated_product(
        self, x: InputRows, bias: Tensor | None, activation: Activation = SILU, rounding: InputScales | None = None
    ) -> InputRows:
        """Returns activation(x · weightᵀ + bias).  rounding: how a kernel quantises this result, or None."""
        return linear_quantised_gated(x, self.matrix, bias, None, activation, rounding)

    @property
    def rounding(self) -> InputScales | None:
        return self.matrix.input_scales if self.matrix.column_order is None else None

    def rows_from(self, first_row: int) -> Weight:
        if first_row % self.matrix.rows_per_scale:
            return super().rows_from(first_row)
        return QuantisedWeight(self.matrix.rows_from(first_row), self.format)


class QuantisedFormat(WeightFormat):
    """A format that loads matrices as QuantisedMatrix."""

    @abstractmethod
    def stored_matrix(self, tensors: Mapping[str, Tensor], row_counts: Sequence[int], columns: int) -> QuantisedMatrix:
        """Returns the matrix, with the input quantisation that the checkpoint declares, for any device.
        The arguments are those of build_weight."""

    def matrix(self, tensors: Mapping[str, Tensor], row_counts: Sequence[int], columns: int) -> QuantisedMatrix:
        """Returns the result of stored_matrix in the form that the kernels of the tensors' device take."""
        return adapt_to_device(self.stored_matrix(tensors, row_counts, columns))

    def build_weight(self, tensors: Mapping[str, Tensor], row_counts: Sequence[int], columns: int) -> Weight:
        return QuantisedWeight(self.matrix(tensors, row_counts, columns), self.name)

    def keeps_stored_dtype(self, name: str, dtype: torch.dtype) -> bool:
        """Whether the tensor `name` keeps its stored dtype.  Biases and norms (`.weight` of 16 bits or more) do not."""
        return not name.endswith(".bias") and (dtype.itemsize == 1 or not name.endswith(".weight"))


def adapt_to_device(matrix: QuantisedMatrix) -> QuantisedMatrix:
    """Returns the matrix in the form that its device uses.  On a CPU, `input_scales` is removed, so inputs are not
    quantised.  A CPU has no FP8 units, so FP8 inputs would not be faster.  Also, a difference in a value's last bit can
    change a quantised input, so tree and plain decoding would differ more often (docs/design.md, section 6)."""
    return replace(matrix, input_scales=None) if matrix.device.type == "cpu" else matrix


def require_multiple_of(format_name: str, dim: str, size: int, unit: int) -> None:
    """Raises EspalierError if `size` is not a multiple of `unit`.  dim: "rows" or "columns", for the error."""
    if size % unit:
        raise EspalierError(f"format {format_name} needs {dim} in a multiple of {unit}, but this matrix has {size}")


def unpack_int32(packed: Tensor, dim: int, order: Sequence[int] = range(NIBBLES_OF_INT32)) -> Tensor:
    """Unpacks the nibbles of `packed`, int32, along `dim`.  Returns uint8; `dim` becomes 8 times as large.
    order: order[i] is the place of the i-th value's nibble in its int32, counted from the low bits."""
    shifts = torch.tensor(order, dtype=torch.int32, device=packed.device) * 4
    dim %= packed.ndim
    shape = [1] * (dim + 1) + [NIBBLES_OF_INT32] + [1] * (packed.ndim - dim - 1)
    return ((packed.unsqueeze(dim + 1) >> shifts.view(shape)) & 15).to(torch.uint8).flatten(dim, dim + 1)


def pack_rows(unpacked_rows: Any, num_rows: int, step: int = 4096) -> Tensor:
    """Packs nibbles in blocks of `step` rows.  Returns codes [num_rows, in / 2].  unpacked_rows(begin, end): returns
    the rows to pack, uint8 [end - begin, in]."""
    blocks = (pack_nibbles(unpacked_rows(begin, min(begin + step, num_rows))) for begin in range(0, num_rows, step))
    return torch.cat(list(blocks))


def dense_if_skipped(skipped_names: Sequence[str], format: WeightFormat, quantises_head: bool = False) -> FormatLookup:
    """Returns a function from a matrix's name to its format: dense for names in `skipped_names` and ALWAYS_DENSE, else
    `format`.

    skipped_names: module names, parts of module names ("mlp.gate", "layers.61"), or "re:" and a regular expression.
    quantises_head: whether the lm_head is quantised too."""

    def format_of(matrix_name: str) -> WeightFormat:
        is_dense = (ALWAYS_DENSE.search(matrix_name) and not (quantises_head and matrix_name == "lm_head")) or any(
            matches_module(matrix_name, pattern) for pattern in skipped_names
        )
        return DENSE_FORMAT if is_dense else format

    return format_of


def matches_module(name: str, pattern: str) -> bool:
    """Whether a pattern in config.json matches the name of a module or of an enclosing module.
    As in transformers, a final dot is ignored ("model.layers.0."), and the end of a name matches: "gate" matches
    "shared_expert_gate"."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    parts = ".".join("[^.]+" if part == "*" else re.escape(part) for part in pattern.strip(".").split("."))
    return name.endswith(pattern) or re.search(rf"(^|\.){parts}(\.|$)", name) is not None


def read_field(quantisation: Mapping[str, Any], name: str, allowed: Sequence[object], default: object = None) -> Any:
    """Returns the value of a field of quantization_config.  Raises EspalierError for other values than `allowed`."""
    value = quantisation.get(name, default)
    if value not in allowed:
        supported = " or ".join(map(repr, allowed))
        raise EspalierError(f"quantization_config: {name} = {value!r} is not supported, only {supported}")
    return value


def module_names(fields: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Returns the module names and patterns in the field `name`; no names if the field is null.
    Raises EspalierError for any other value."""
    value = fields.get(name) or ()
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) and _is_pattern(item) for item in value):
        raise EspalierError(f"quantization_config: {name} = {value!r}; a list of module names is needed; correct it")
    return tuple(item for item in value if item)


def _is_pattern(name: str) -> bool:
    """Whether `name` may stand in a list of modules: a plain name, or "re:" and a regex without a syntax error."""
    if not name.startswith("re:"):
        return True
    try:
        re.compile(name[3:])
    except re.error:
        return False
    return not may_be_exponential(name[3:])


def read_object(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Returns the object in the field `name`; empty if the field is null.  Raises EspalierError for any other value."""
    value = fields.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise EspalierError(f"quantization_config: {name} = {value!r}; an object is needed; correct it")
    return value or {}


def read_group_size(quantisation: Mapping[str, Any], default: int) -> int | None:
    """Returns how many columns share a scale; None (-1 in the config) for all columns.  Raises EspalierError for a size
    that is not supported."""
    size = read_field(quantisation, "group_size", (-1, 16, 32, 64, 128, 256, 512, 1024), default)
    return None if size == -1 else int(size)


def column_groups_of_part(groups: Tensor, columns: RankPart, group_size: int | None) -> Tensor:
    """Returns the group index of each column of a part, relative to the part's first group.
    groups: the group index of each column, relative to the matrix's first group.  Raises EspalierError if columns are
    not sorted by group, because their scales may be on another rank."""
    part_groups = groups - columns.begin // (group_size or columns.size)
    expected = torch.arange(len(columns), device=groups.device) // (group_size or columns.size)
    if not bool((part_groups == expected).all()):
        raise EspalierError(
            "columns whose groups are not in order (desc_act, actorder) cannot be divided among ranks; use "
            "tensor_parallel=1, or a checkpoint without them"
        )
    return part_groups


def common_column_order(groups: Tensor, group_size: int) -> Tensor | None:
    """Returns the indices [in] of the columns, sorted by group; None if the columns are already sorted.
    groups: [matrices, in], the group of each column of each stacked matrix.  Raises EspalierError if matrices have
    different groups, or if a group does not have `group_size` columns."""
    if not bool((groups == groups[0]).all()):
        raise EspalierError(
            "the stacked matrices have different values of g_idx; only equal ones are supported: use a checkpoint "
            "without desc_act"
        )
    column_groups, expected = groups[0], torch.arange(groups.shape[1], device=groups.device) // group_size
    if torch.equal(column_groups, expected.to(column_groups.dtype)):
        return None
    order = column_groups.argsort(stable=True)
    if not torch.equal(column_groups[order], expected.to(column_groups.dtype)):
        raise EspalierError(
            f"g_idx does not put {group_size} columns into each group; the file is corrupt: download it again"
        )
    return order
