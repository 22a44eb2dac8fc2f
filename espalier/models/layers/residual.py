"""The residual stream of a pass.

The output of a block is not added to the residual immediately.  The kernel of the next norm adds the output, so that
each row is read only once."""

from typing import Any, Protocol

from torch import Tensor

from espalier.models.layers.norm import AnyNorm, BlockOutput, NormedOutputs, RMSNorm
from espalier.models.weight_formats.sharded import UnsummedOutput, sum_over_ranks


class NormReader(Protocol):
    """A block or a linear layer whose input is the norm of the residual."""

    def norm_input(self, norm: AnyNorm, delta: BlockOutput, residual: Tensor) -> tuple[Tensor, Any]:
        """Returns (residual + delta, the norm of that sum in the form that the block takes).  delta: the output of the
        previous block; see RMSNorm.add_and_norm."""
        ...


class PendingAdd(Protocol):
    """A block's output that needs a special kernel to be added to the residual."""

    def add_and_norm(self, norm: AnyNorm, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (x + the block's output, the norm of that sum)."""
        ...


class Residual:
    """The residual stream of the N rows of a pass, from the embedding to the final norm.
    x: [N, H], the residual.  delta: the previous block's output, which the next norm adds to x.
    live: [N] bool, whether a row has a token.  Experts skip rows without a token.
    first_input: for draft heads whose first block has no norm, the input of that block, which the embedding computes.
    per_layer_inputs: [N, layers, P], a second input of each layer, which the embedding computes; or None.
    captured_inputs: [N, H], the inputs of the layers that a draft reads, by layer index."""

    __slots__ = ("x", "delta", "live", "first_input", "per_layer_inputs", "captured_inputs", "_captured_layer")

    def __init__(self, x: Tensor, live: Tensor | None = None, first_input: Tensor | None = None) -> None:
        self.x = x
        self.delta: BlockOutput | PendingAdd = None
        self.live = live
        self.first_input = first_input
        self.per_layer_inputs: Tensor | None = None
        self.captured_inputs: dict[int, Tensor] = {}
        self._captured_layer: int | None = None

    def add_and_norm(self, norm: AnyNorm | None, reader: NormReader) -> Any:
        """Adds the previous block's output to x.  Returns the norm of the sum in the form that `reader` takes.
        norm: None for a first block whose input the embedding computes."""
        if norm is None:
            rows, self.first_input = self.first_input, None
            assert rows is not None, "only the first block of a draft head reads the embedding's first_input"
            return rows
        if self.delta is None or isinstance(self.delta, Tensor | UnsummedOutput | NormedOutputs):
            self.x, rows = reader.norm_input(norm, self.delta, self.x)
        else:
            self.x, rows = self.delta.add_and_norm(norm, self.x)
        self.delta = None
        if self._captured_layer is not None:
            self.captured_inputs[self._captured_layer], self._captured_layer = self.x, None
        return rows

    def add(
        self,
        delta: Tensor | UnsummedOutput | NormedOutputs | PendingAdd,
        norm: RMSNorm | None = None,
        scale: float = 1.0,
    ) -> None:
        """Stores a block's output `delta`, [N, H] or partial sums.  The next norm adds this output to x.
        norm: the norm of the output, if the family has such a norm.  scale: the output's factor.  At most one is
        set."""
        if norm is not None or scale != 1:
            assert isinstance(delta, Tensor | UnsummedOutput) and (norm is None or scale == 1)
            delta = sum_over_ranks(delta) * scale if norm is None else NormedOutputs((delta, norm))
        self.delta = delta

    def keep_rows(self, rows: Tensor | None) -> None:
        """Keeps only the rows at the indices `rows`; None to keep all rows."""
        if rows is not None:
            self.x = self.x[rows]
            self.live = None if self.live is None else self.live[rows]
            self.per_layer_inputs = None if self.per_layer_inputs is None else self.per_layer_inputs[rows]

    def capture_input(self, layer: int) -> None:
        """Makes the next norm store x + delta, which is the input of this layer, in `captured_inputs`."""
        self._captured_layer = layer

    def final_norm(self, norm: RMSNorm, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Returns (the residual after the last block, its final norm), [*shape, H] each."""
        if self.delta is None or isinstance(self.delta, Tensor | UnsummedOutput | NormedOutputs):
            x, normed = norm.add_and_norm(self.delta, self.x)
        else:
            x, normed = self.delta.add_and_norm(norm, self.x)
        return x.unflatten(0, shape), normed.unflatten(0, shape)
