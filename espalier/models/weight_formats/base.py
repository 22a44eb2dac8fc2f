"""The contracts of a weight (for the layers) and of a weight format (for the loader).

A weight multiplies rows by a matrix, in whatever form its format keeps it.  A format declares the tensors that make up
a matrix in a checkpoint, the dimensions of these tensors that are the matrix's rows and columns, how many rows and
columns one entry covers, and the weight that they become.  With that, the loader checks, stacks and shards the tensors
of every format in the same way.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.layers.quantised import InputScales, QuantisedMatrix
from espalier.kernels.ops.activation import SILU, Activation, gated
from espalier.shards import Part


class Weight(ABC):
    """A matrix [out, in].  nbytes: bytes of its tensors in memory.

    A subclass implements `apply`.  It overrides the other products if it has faster kernels for them.  A weight with
    `rounding` takes inputs that are rounded so (RoundedRows) in `apply`, `parts` and `gated` too.
    """

    __slots__ = ("shape", "nbytes")
    format: str

    def __init__(self, shape: tuple[int, int], nbytes: int) -> None:
        self.shape = shape
        self.nbytes = nbytes

    @abstractmethod
    def apply(self, x: Any, bias: Tensor | None) -> Tensor:
        """x [rows, in] -> x · weightᵀ + bias, a new tensor [rows, out] in x's dtype."""

    def dense_tensor(self) -> Tensor | None:
        """The matrix [out, in] itself, if it is kept as one dense tensor."""
        return None

    def require_kernels(self, dtype: torch.dtype) -> None:  # noqa: B027
        """Raises EspalierError if no kernel multiplies inputs of this dtype on the weight's device."""

    def parts(self, x: Any, bias: Tensor | None) -> Tensor:
        """The result of `apply`, or [parts, rows, out] float32 that sum to it.  RMSNorm.after sums them."""
        return self.apply(x, bias)

    def for_stream(self, x: Any, bias: Tensor | None) -> Any:
        """`parts`, or Unsummed if ranks divide the columns (sharded.py)."""
        return self.parts(x, bias)

    def num_parts(self, rows: int) -> int:
        """The number of parts that `write_parts` writes."""
        return 1

    def write_parts(self, x: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """Write the result of `apply`, in parts that sum to it, to out [num_parts, rows, out], float32 at least."""
        out[0].copy_(self.apply(x, bias))

    def gated(self, x: Any, bias: Tensor | None, activation: Activation = SILU) -> Tensor:
        """The activation, as Linear.gated."""
        return gated(self.apply(x, bias), activation)

    @property
    def rounding(self) -> InputScales | None:
        """How inputs are rounded that may come as RoundedRows; None: they may not."""
        return None

    def rows_from(self, first: int) -> "Weight":
        """Rows first .. out-1 of the matrix, as a weight in the same memory."""
        return LastRows(self, first)


class LastRows(Weight):
    """The last rows of a weight whose format cannot be cut: it multiplies by all rows."""

    __slots__ = ("whole", "first", "format")

    def __init__(self, whole: Weight, first: int) -> None:
        super().__init__((whole.shape[0] - first, whole.shape[1]), 0)
        self.format = whole.format
        self.whole = whole
        self.first = first

    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        rows = self.whole.apply(x, None)[:, self.first :]
        return rows.contiguous() if bias is None else rows + bias


class StackedWeights(Weight):
    """Weights of several formats, one over the other: they read the same inputs."""

    __slots__ = ("parts_of_rows", "format")

    def __init__(self, weights: Sequence[Weight]) -> None:
        shape = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
        super().__init__(shape, sum(weight.nbytes for weight in weights))
        self.parts_of_rows = tuple(weights)
        self.format = " over ".join(weight.format for weight in weights)

    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        rows = [weight.shape[0] for weight in self.parts_of_rows]
        biases = [None] * len(rows) if bias is None else bias.split(rows)
        return torch.cat([weight.apply(x, own) for weight, own in zip(self.parts_of_rows, biases, strict=True)], 1)


@dataclass(frozen=True)
class StoredTensor:
    """One of the tensors that a checkpoint stores for a matrix.

    suffix: its name is the matrix's name and this suffix.
    dtype: None for a floating-point tensor, which is cast to the model's dtype.  A tensor of a given dtype keeps it; of
    several dtypes it keeps the one that it has.
    row_dim: its dimension that is the matrix's rows; None if every row of the matrix needs the whole tensor.
    column_dim: as row_dim, of the columns.  row_unit, column_unit: the rows and columns that one entry covers.
    """

    suffix: str
    shape: tuple[int, ...]
    dtype: torch.dtype | tuple[torch.dtype, ...] | None = None
    row_dim: int | None = None
    column_dim: int | None = None
    row_unit: int = 1
    column_unit: int = 1

    def cut(self, rows: Part, columns: Part) -> tuple[slice, ...]:
        """Where a part of the matrix is stored: a slice for each dimension.

        Raises EspalierError for a part that begins or ends inside an entry.
        """
        slices = [slice(0, size) for size in self.shape]
        for dim, part, unit in (
            (self.row_dim, rows, self.row_unit),
            (self.column_dim, columns, self.column_unit),
        ):
            if dim is not None and not part.is_whole:
                slices[dim] = part.in_units(unit).slice
        return tuple(slices)


class WeightFormat(ABC):
    """A way to store matrices.  Matrices of formats that compare equal may be stacked.

    has_shards: whether its StoredTensors declare rows and columns, so that ranks may hold parts of a matrix.
    """

    name: ClassVar[str]
    has_shards: ClassVar[bool] = False
    # Whether an embedding may be in the format too.  It becomes a table in the model's dtype.
    embeds: ClassVar[bool] = False

    @property
    def note(self) -> str | None:
        """A message for the log when a checkpoint in this format is loaded: a property of the format that is not
        followed."""
        return None

    def spelled(self, stored: Callable[[str], bool]) -> "WeightFormat":
        """This format with the suffixes that a matrix is stored under.  stored: whether a suffix is one of them."""
        return self

    @abstractmethod
    def tensors(self, rows: int, columns: int) -> tuple[StoredTensor, ...]:
        """The tensors that store a matrix [rows, columns].  Raises EspalierError for a shape that it cannot store."""

    @abstractmethod
    def build(self, tensors: Mapping[str, Tensor], rows: Sequence[int], columns: int) -> Weight:
        """One weight of stacked matrices, which have `rows` rows each, in this order.

        tensors: by suffix, on the device.  A tensor with row_dim has all matrices concatenated along it; a tensor
        without has an additional first dimension, with one entry for each matrix.
        """

    def of_part(self, tensors: Mapping[str, Tensor], rows: Sequence[Part], columns: Part) -> Mapping[str, Tensor]:
        """The tensors of a part, as `build` takes them: where values count rows or columns, they count the part's."""
        return tensors

    def matrix(self, tensors: Mapping[str, Tensor], rows: Sequence[int], columns: int) -> Tensor | QuantisedMatrix:
        """As `build`, but the matrix itself, for experts and latent attention."""
        raise EspalierError(f"format {self.name} is supported for linear layers only, not for experts")

    def expert_tensors(self, count: int, rows: int, columns: int) -> tuple[StoredTensor, ...]:
        """The tensors that store `count` experts [rows, columns] stacked, in the dtypes that they keep."""
        raise EspalierError(f"experts that are stored stacked are not supported in format {self.name}")

    def expert_matrix(self, tensors: Mapping[str, Tensor]) -> QuantisedMatrix:
        """The matrix [count, rows, columns] of `expert_tensors`, by suffix, on the device."""
        raise NotImplementedError

    def keeps(self, name: str, dtype: torch.dtype) -> bool:
        """Whether a tensor keeps its stored dtype in memory.  Other tensors are cast to the model's dtype."""
        return False


# The format of a matrix, by its name in the checkpoint, such as model.layers.0.mlp.up_proj.
FormatOf = Callable[[str], WeightFormat]
