"""A linear layer: a weight of any format, and a bias."""

from dataclasses import dataclass

from torch import Tensor

from espalier.kernels.layers.quantised import InputScales, RoundedRows, Rows
from espalier.kernels.ops.activation import SILU, Activation
from espalier.models.layers.norm import AnyNorm, Delta
from espalier.models.weight_formats import Weight
from espalier.models.weight_formats.sharded import Unsummed


@dataclass(eq=False, slots=True)
class Linear:
    """y = x · weightᵀ + bias.  The weight may stack several projections of one input."""

    weight: Weight
    bias: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape

    def rows_from(self, first: int) -> "Linear":
        """The layer that gives outputs first .. out-1, on the same weight."""
        return Linear(self.weight.rows_from(first), None if self.bias is None else self.bias[first:])

    @property
    def rounding(self) -> InputScales | None:
        """How a norm must round the inputs of this layer that it gives as RoundedRows; None: it gives a tensor."""
        return self.weight.rounding

    def read(self, norm: AnyNorm, delta: Delta, x: Tensor) -> tuple[Tensor, Rows]:
        """As espalier/models/layers/stream.py:Reader."""
        rounding = self.weight.rounding
        return norm.after(delta, x) if rounding is None else norm.rounded_after(delta, x, rounding)

    def __call__(self, x: Rows) -> Tensor:
        """x [..., in] -> a new tensor [..., out]."""
        if isinstance(x, RoundedRows) or x.ndim == 2:
            return self.weight.apply(x, self.bias)
        return self.weight.apply(x.reshape(-1, x.shape[-1]), self.bias).view(*x.shape[:-1], self.shape[0])

    def for_stream(self, x: Rows) -> Tensor | Unsummed:
        """`in_parts`, or Unsummed if ranks divide the columns: then the next norm sums over the ranks too."""
        product: Tensor | Unsummed = self.weight.for_stream(x, self.bias)
        return product

    def in_parts(self, x: Rows) -> Tensor:
        """x [rows, in] -> [rows, out], or [parts, rows, out] float32, which the reader sums (RMSNorm.after)."""
        return self.weight.parts(x, self.bias)

    def write_parts(self, x: Tensor, out: Tensor) -> None:
        """x [rows, in] -> out [weight.num_parts(rows), rows, out], float32 at least, which the reader sums."""
        self.weight.write_parts(x, self.bias, out)

    def gated(self, x: Rows, activation: Activation = SILU) -> Tensor:
        """x [rows, in] -> the activation [rows, inner], for a weight that stacks gate and up [2·inner, in], or of up
        alone if the activation has no gate."""
        return self.weight.gated(x, self.bias, activation)
