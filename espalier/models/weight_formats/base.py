"""The interfaces of a weight (used by layers) and of a weight format (used by the loader).

A weight multiplies rows by a matrix that is kept in the format's own layout.  A format declares the tensors that store
a matrix in a checkpoint, and builds a weight from them.  For each tensor, the format declares which dimensions are the
matrix's rows and columns, and how many rows and columns one entry of the tensor stores.  With these declarations, the
loader checks, stacks and divides the tensors of all formats in the same way.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.layers.quantised import InputScales, QuantisedMatrix
from espalier.kernels.ops.activation import SILU, Activation, gated_activation
from espalier.shards import RankPart


class Weight(ABC):
    """A matrix [out, in].  format: the name of its storage format.  nbytes: the bytes of its tensors in memory.
    A subclass implements `apply`, and overrides other products for which it has faster kernels.  If `rounding` is not
    None, `apply`, `partial_sums` and `activated_product` also take RoundedRows: inputs that a norm quantised so."""

    __slots__ = ("shape", "nbytes")
    format: str

    def __init__(self, shape: tuple[int, int], nbytes: int) -> None:
        self.shape = shape
        self.nbytes = nbytes

    @abstractmethod
    def apply(self, x: Any, bias: Tensor | None) -> Tensor:
        """Returns x · weightᵀ + bias for x [rows, in], as a new tensor [rows, out] in x's dtype."""

    def dense_tensor(self) -> Tensor | None:
        """Returns the matrix [out, in] if it is one dense tensor, else None."""
        return None

    def require_kernels(self, dtype: torch.dtype) -> None:  # noqa: B027
        """Raises EspalierError if no kernel supports inputs of this dtype on the weight's device."""

    def partial_sums(self, x: Any, bias: Tensor | None) -> Tensor:
        """Returns apply(x, bias), or its float32 partial sums [parts, rows, out], which the next norm adds."""
        return self.apply(x, bias)

    def residual_delta(self, x: Any, bias: Tensor | None) -> Any:
        """Returns partial_sums(x, bias), or UnsummedOutput if ranks divide the columns (sharded.py)."""
        return self.partial_sums(x, bias)

    def num_partial_sums(self, num_rows: int) -> int:
        """Returns the number of partial sums that `write_partial_sums` writes."""
        return 1

    def write_partial_sums(self, x: Any, bias: Tensor | None, out: Tensor) -> None:
        """Writes partial sums of apply(x, bias) to out [num_partial_sums, rows, out], float32 or float64."""
        out[0].copy_(self.apply(x, bias))

    def activated_product(
        self, x: Any, bias: Tensor | None, activation: Activation = SILU, rounding: InputScales | None = None
    ) -> Any:
        """Returns activation(apply(x, bias)).  The weight stacks gate and up if the activation has a gate.
        rounding: how a kernel may quantise the result for the next product; None for a plain tensor."""
        return gated_activation(self.apply(x, bias), activation)

    @property
    def rounding(self) -> InputScales | None:
        """How inputs must be quantised (RoundedRows) for this weight; None if the weight takes only plain tensors."""
        return None

    def rows_from(self, first_row: int) -> "Weight":
        """Returns the matrix's rows from `first_row` on, as a weight in the same memory."""
        return LastRowsWeight(self, first_row)


class LastRowsWeight(Weight):
    """The last rows of a weight whose format cannot be sliced.  A product computes all rows, then drops
    the rows before first_row."""

    __slots__ = ("whole_weight", "first_row", "format")

    def __init__(self, whole_weight: Weight, first_row: int) -> None:
        super().__init__((whole_weight.shape[0] - first_row, whole_weight.shape[1]), 0)
        self.format = whole_weight.format
        self.whole_weight = whole_weight
        self.first_row = first_row

    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        rows = self.whole_weight.apply(x, None)[:, self.first_row :]
        return rows.contiguous() if bias is None else rows + bias


class StackedWeights(Weight):
    """Weights of several formats that read the same inputs.  Their outputs are concatenated."""

    __slots__ = ("stacked_weights", "format")

    def __init__(self, weights: Sequence[Weight]) -> None:
        shape = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
        super().__init__(shape, sum(weight.nbytes for weight in weights))
        self.stacked_weights = tuple(weights)
        self.format = " over ".join(weight.format for weight in weights)

    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        rows = [weight.shape[0] for weight in self.stacked_weights]
        biases = [None] * len(rows) if bias is None else bias.split(rows)
        return torch.cat([weight.apply(x, bias) for weight, bias in zip(self.stacked_weights, biases, strict=True)], 1)


@dataclass(frozen=True)
class StoredTensor:
    """One of the tensors that a checkpoint stores for a matrix.

    suffix: the tensor's name is the matrix's name plus this suffix.
    dtype: the tensor's dtype, or several allowed dtypes; the tensor is not cast.  None for a floating-point tensor that
    is cast to the model's dtype.
    row_dim, column_dim: the dimension that stores the matrix's rows or columns; None if every row or column of the
    matrix needs the whole tensor.
    rows_per_entry, columns_per_entry: the numbers of rows and columns of the matrix that one entry stores."""

    suffix: str
    shape: tuple[int, ...]
    dtype: torch.dtype | tuple[torch.dtype, ...] | None = None
    row_dim: int | None = None
    column_dim: int | None = None
    rows_per_entry: int = 1
    columns_per_entry: int = 1

    def part_slices(self, rows: RankPart, columns: RankPart) -> tuple[slice, ...]:
        """Returns the slices of the tensor, one per dimension, that store a part of the matrix: these rows and columns.
        Raises EspalierError for a part that begins or ends inside an entry."""
        slices = [slice(0, size) for size in self.shape]
        for dim, part, unit in (
            (self.row_dim, rows, self.rows_per_entry),
            (self.column_dim, columns, self.columns_per_entry),
        ):
            if dim is not None and not part.is_whole:
                slices[dim] = part.in_blocks_of(unit).slice
        return tuple(slices)


class WeightFormat(ABC):
    """A storage format of matrices.  Matrices may be stacked if their formats compare equal.

    supports_shards: whether ranks may hold parts of a matrix.  Each StoredTensor then has a row_dim and a column_dim.
    """

    name: ClassVar[str]
    supports_shards: ClassVar[bool] = False
    # Whether a checkpoint may store its embedding in this format.  Loading dequantises the embedding.
    can_store_embedding: ClassVar[bool] = False

    @property
    def load_warning(self) -> str | None:
        """A warning that is logged when a checkpoint in this format is loaded.
        The warning names a property of the format that Espalier ignores.  None if there is no such property."""
        return None

    def with_stored_suffixes(self, is_stored: Callable[[str], bool]) -> "WeightFormat":
        """Returns this format with the name suffixes that a checkpoint uses for a matrix.
        is_stored: whether the checkpoint has a tensor of this matrix with the suffix."""
        return self

    @abstractmethod
    def stored_tensors(self, rows: int, columns: int) -> tuple[StoredTensor, ...]:
        """Returns the tensors that store a matrix [rows, columns].
        Raises EspalierError for a shape that the format cannot store."""

    @abstractmethod
    def build_weight(self, tensors: Mapping[str, Tensor], row_counts: Sequence[int], columns: int) -> Weight:
        """Returns one weight of stacked matrices.  row_counts: the number of rows of each matrix, in order.
        columns: the number of columns of every matrix.
        tensors: the tensors of all matrices on the device, by suffix.  Tensors with a row_dim are concatenated along
        this dimension.  Other tensors are stacked along an additional first dimension."""

    def tensors_of_part(
        self, tensors: Mapping[str, Tensor], rows: Sequence[RankPart], columns: RankPart
    ) -> Mapping[str, Tensor]:
        """Returns the tensors of a part of stacked matrices, for build_weight.  tensors: the slices of this part.
        rows: the part of each matrix's rows.  A subclass corrects tensors whose values depend on the part, such as a
        tensor whose values are the matrix's shape."""
        return tensors

    def matrix(
        self, tensors: Mapping[str, Tensor], row_counts: Sequence[int], columns: int
    ) -> Tensor | QuantisedMatrix:
        """Returns a matrix instead of a weight, for experts and latent attention.  Takes what build_weight takes."""
        raise EspalierError(f"format {self.name} is supported for linear layers only, not for experts")

    def expert_tensors(self, num_experts: int, rows: int, columns: int) -> tuple[StoredTensor, ...]:
        """Returns the declarations of the tensors that store `num_experts` stacked experts [rows, columns]."""
        raise EspalierError(f"experts that are stored stacked are not supported in format {self.name}")

    def expert_matrix(self, tensors: Mapping[str, Tensor]) -> QuantisedMatrix:
        """Returns the matrix [experts, rows, columns].  tensors: by suffix, on the device."""
        raise NotImplementedError

    def keeps_stored_dtype(self, name: str, dtype: torch.dtype) -> bool:
        """Whether the tensor `name` keeps its stored dtype in memory.  Other tensors are cast to the model's dtype."""
        return False


# Maps the name of a matrix in the checkpoint, such as model.layers.0.mlp.up_proj, to the format of the matrix.
FormatLookup = Callable[[str], WeightFormat]
