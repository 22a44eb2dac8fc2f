"""What the layers know of a weight, and what the loader knows of a weight format.

A weight multiplies rows by a matrix that its format stores in any form.  A format says which tensors of a checkpoint
make up a matrix, along which of their dimensions its rows and columns lie, and what weight they become.  From that the
loader checks, stacks and cuts them, for every format alike.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.layers.silu import silu_mul


class Weight(ABC):
    """A matrix [out, in].  nbytes: of its tensors, as they are kept.

    A format writes `apply`, and the other two where its kernels do better than these.
    """

    __slots__ = ("shape", "nbytes")
    format: ClassVar[str]

    def __init__(self, shape: tuple[int, int], nbytes: int) -> None:
        self.shape = shape
        self.nbytes = nbytes

    @abstractmethod
    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [rows, in] -> a fresh tensor x · weightᵀ + bias [rows, out] in x's dtype."""

    def parts(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`apply`, or [parts, rows, out] float32 whose sum it is, for a reader that adds them (RMSNorm.after)."""
        return self.apply(x, bias)

    def gated(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """silu(gate) · up [rows, out / 2], of a weight that stacks gate over up."""
        return silu_mul(self.apply(x, bias))


@dataclass(frozen=True)
class Shard:
    """One of `count` equal cuts of a matrix.

    along "rows": the cuts' results stand side by side; along "columns": they are summed.
    """

    index: int = 0
    count: int = 1
    along: Literal["rows", "columns"] = "rows"

    def cut(self, rows: int, columns: int) -> tuple[int, int]:
        """The shape of one cut of a matrix."""
        return (rows // self.count, columns) if self.along == "rows" else (rows, columns // self.count)


WHOLE = Shard()


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a matrix in a checkpoint.

    suffix: what its name adds to the matrix's.  dtype: None for a floating-point tensor that is cast to the model's
    dtype.  row_dim, column_dim: the dimensions along which the matrix's rows and columns lie; None where every row
    (column) needs the whole tensor.
    """

    suffix: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    row_dim: int | None = None
    column_dim: int | None = None


class WeightFormat(ABC):
    """How matrices are stored.  Two formats are equal where their matrices may be stacked."""

    name: ClassVar[str]

    @abstractmethod
    def tensors(self, rows: int, columns: int) -> tuple[StoredTensor, ...]:
        """What a matrix [rows, columns] is stored as.  Raises EspalierError for a shape that the format cannot hold."""

    @abstractmethod
    def build(self, tensors: Mapping[str, Tensor], rows: Sequence[int], columns: int) -> Weight:
        """One weight from matrices of `rows` rows each, stacked in this order.

        tensors: by suffix, on the device.  Those with a row_dim are joined along it; those without have a first
        dimension more, one entry a matrix.
        """

    def keeps(self, name: str, dtype: torch.dtype) -> bool:
        """Whether a checkpoint's tensor stays in the dtype that it is stored in.  Others are cast to the model's."""
        return False

    def cut(self, stored: StoredTensor, shard: Shard) -> tuple[slice, ...]:
        """The part of a stored tensor that a shard needs.  Raises EspalierError where it does not divide evenly."""
        whole = [slice(0, size) for size in stored.shape]
        dim = stored.row_dim if shard.along == "rows" else stored.column_dim
        if dim is None:
            return tuple(whole)
        size, rest = divmod(stored.shape[dim], shard.count)
        if rest:
            raise EspalierError(
                f"{stored.suffix} {list(stored.shape)} in format {self.name} cannot be cut into {shard.count} equal "
                f"shards along its {shard.along}; use another number of devices"
            )
        whole[dim] = slice(shard.index * size, (shard.index + 1) * size)
        return tuple(whole)


# The format of a matrix, by its name in the checkpoint, such as model.layers.0.mlp.up_proj.
FormatOf = Callable[[str], WeightFormat]
