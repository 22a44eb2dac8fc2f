"""Dense weights: one floating-point tensor in the model's dtype.

On an x86 CPU in float32, the weight is kept in oneDNN's blocked layout, because F.linear in the usual layout takes 2 to
4 times as long for the few rows of a decoding step (docs/log.md).  The results differ only by float32 rounding.

On a GPU, a table of measurements (kernels/layers/linear_plans.py) decides for each shape and number of rows whether
Espalier's kernel or F.linear is used.
"""

import platform
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from espalier.kernels.layers.linear_plans import DENSE, LINEAR_TUNING, LinearPlans, TritonPlan, plans_for_dense_weight
from espalier.kernels.layers.quantised import InputScales
from espalier.kernels.ops.activation import SILU, Activation
from espalier.kernels.ops.linear import linear, linear_gated, linear_partial_sums, write_parts
from espalier.models.weight_formats.base import StoredTensor, Weight, WeightFormat

# oneDNN optimises the layout for a given number of rows.  The layout for 16 rows is nearly the best for 1 to 128 rows.
PACKED_FOR_ROWS = 16


class DenseWeight(Weight):
    """A weight [out, in] that F.linear multiplies."""

    __slots__ = ("tensor",)
    format = DENSE

    def __init__(self, tensor: Tensor) -> None:
        super().__init__((tensor.shape[0], tensor.shape[1]), tensor.nbytes)
        self.tensor = tensor

    def dense_tensor(self) -> Tensor | None:
        return self.tensor

    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, self.tensor, bias)

    def activated_product(
        self, x: Tensor, bias: Tensor | None, activation: Activation = SILU, rounding: InputScales | None = None
    ) -> Tensor:
        """Returns activation(x · weightᵀ + bias) as a plain tensor; `rounding` is ignored."""
        return linear_gated(x, self.tensor, bias, None, activation)

    def rows_from(self, first_row: int) -> Weight:
        return dense_weight(self.tensor[first_row:])


class TunedWeight(DenseWeight):
    """A dense weight on a GPU.  plans: the kernel and its tiles for each number of input rows (linear_plans.py)."""

    __slots__ = ("_plans",)

    def __init__(self, tensor: Tensor, plans: LinearPlans) -> None:
        super().__init__(tensor)
        self._plans = plans

    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return linear(x, self.tensor, bias, LINEAR_TUNING.plan_for_count(self._plans, len(x)))

    def partial_sums(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return linear_partial_sums(x, self.tensor, bias, LINEAR_TUNING.plan_for_count(self._plans, len(x)))

    def num_partial_sums(self, num_rows: int) -> int:
        plan = LINEAR_TUNING.plan_for_count(self._plans, num_rows)
        return plan.splits if isinstance(plan, TritonPlan) else 1

    def write_partial_sums(self, x: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """Writes partial sums of apply(x, bias) to out [num_partial_sums, rows, out]."""
        plan = LINEAR_TUNING.plan_for_count(self._plans, len(x))
        if isinstance(plan, TritonPlan):
            write_parts.triton(x, self.tensor, bias, plan, out)
        else:
            super().write_partial_sums(x, bias, out)

    def activated_product(
        self, x: Tensor, bias: Tensor | None, activation: Activation = SILU, rounding: InputScales | None = None
    ) -> Tensor:
        """Returns activation(x · weightᵀ + bias) as a plain tensor; `rounding` is ignored."""
        return linear_gated(x, self.tensor, bias, LINEAR_TUNING.plan_for_count(self._plans, len(x)), activation)


class PackedWeight(Weight):
    """A float32 weight on an x86 CPU, in oneDNN's layout."""

    __slots__ = ("_packed", "_multiply")
    format = DENSE

    def __init__(self, tensor: Tensor) -> None:
        super().__init__((tensor.shape[0], tensor.shape[1]), tensor.nbytes)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(tensor.contiguous(), PACKED_FOR_ROWS)
        # The operator is stored, because looking it up takes as long as the computation of a small layer.
        self._multiply = torch.ops.mkldnn._linear_pointwise.default

    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        out: Tensor = self._multiply(x, self._packed, bias, "none", [], "")
        return out

    # These aliases avoid the nested calls of Weight's methods, because a decoding step has hundreds of products.
    partial_sums = residual_delta = apply


class DenseFormat(WeightFormat):
    name = DENSE
    supports_shards = True

    def stored_tensors(self, rows: int, columns: int) -> tuple[StoredTensor, ...]:
        return (StoredTensor(".weight", (rows, columns), row_dim=0, column_dim=1),)

    def build_weight(self, tensors: Mapping[str, Tensor], row_counts: Sequence[int], columns: int) -> Weight:
        return dense_weight(tensors[".weight"])

    def matrix(self, tensors: Mapping[str, Tensor], row_counts: Sequence[int], columns: int) -> Tensor:
        return tensors[".weight"]


# The only instance of DenseFormat, so that formats can be compared.
DENSE_FORMAT = DenseFormat()


def dense_weight(tensor: Tensor) -> Weight:
    """Returns a weight for a tensor [out, in].  The weight uses the tensor's memory, unless it is a PackedWeight."""
    if has_onednn_layout(tensor):
        return PackedWeight(tensor)
    plans = plans_for_dense_weight(tensor)
    return DenseWeight(tensor) if plans is None else TunedWeight(tensor, plans)


def has_onednn_layout(tensor: Tensor) -> bool:
    """Whether oneDNN's blocked layout supports this tensor."""
    return (
        tensor.device.type == "cpu"
        and tensor.dtype == torch.float32
        and platform.machine() in ("x86_64", "AMD64")
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )
