"""Linear layers, dense and quantised, and the rounding of their inputs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from espalier.kernels.layers.linear_plans import LinearPlan, TritonPlan
from espalier.kernels.layers.quantised import (
    BLOCK_VALUES,
    InputScales,
    QuantisedMatrix,
    Rows,
    dequantise,
    quantise_inputs,
    rounded_inputs,
)
from espalier.kernels.ops.activation import SILU, Activation, gated
from espalier.kernels.runtime.op import op


@op("espalier.kernels.layers.linear")
def linear(x: Tensor, weight: Tensor, bias: Tensor | None, plan: LinearPlan) -> Tensor:
    """x · weightᵀ + bias: x [rows, in] -> a new tensor [rows, out] in x's dtype.  plan None: F.linear.

    The bits of a row never depend on the other rows' values.  They depend on the plan and, for a TritonPlan, on
    block_rows(rows); for the library, on rows.
    """
    return F.linear(x, weight, bias)


@op("espalier.kernels.layers.linear")
def linear_parts(x: Tensor, weight: Tensor, bias: Tensor | None, plan: LinearPlan) -> Tensor:
    """`linear` [rows, out] or, if the plan splits, its partial sums [splits, rows, out] in float32.

    The partial sums, added in order and rounded to x's dtype, equal `linear` to the bit.
    """
    return F.linear(x, weight, bias)


@op("espalier.kernels.layers.linear")
def linear_gated(
    x: Tensor, weight: Tensor, bias: Tensor | None, plan: LinearPlan, activation: Activation = SILU
) -> Tensor:
    """The activation [rows, out / 2] of gate and up, the halves of `linear`: the same bits as gated(linear).

    The weight stacks gate over up.  Raises EspalierError for an odd `out`.
    """
    return gated.reference(F.linear(x, weight, bias), activation)


@op("espalier.kernels.layers.linear")
def write_parts(x: Tensor, weight: Tensor, bias: Tensor | None, plan: TritonPlan, out: Tensor) -> None:
    """Write partial sums of `linear` to out [splits, rows, out] float32, contiguous; one part if `plan` has no splits.

    Raises EspalierError as linear_parts.
    """
    # The first part is the sum of all.
    out.zero_()
    out[0] = F.linear(x, weight, bias)


@op("espalier.kernels.layers.linear")
def sum_parts(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """Add partial sums [splits, rows, out], to dtype; a complete result [rows, out] is returned as it is."""
    if parts.ndim == 2:
        return parts
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total.to(dtype)


@op("espalier.kernels.layers.quantise_rows")
def quantise_rows(x: Tensor, inputs: InputScales, for_library: bool = False) -> tuple[Tensor, Tensor]:
    """x [rows, in] -> (FP8 values [rows, in], their scales [rows, ceil(in / group)] float32).

    for_library: on a GPU, the scales of a group lie together in memory, and there are more rows, up to a multiple of
    ROWS_FILLED; they hold anything.
    """
    return quantise_inputs(x, inputs)


@op("espalier.kernels.layers.linear_quantised", on="weight.codes")
def linear_quantised(x: Rows, weight: QuantisedMatrix, bias: Tensor | None, plan: TritonPlan | None = None) -> Tensor:
    """x [rows, in] · weightᵀ + bias -> a new tensor [rows, out] in x's dtype.

    RoundedRows must be rounded as the weight asks.  The bits of a row never depend on the other rows' values.
    plan: launch parameters of our kernel, whose block_in must divide `max_block_in`; None: the measured plan or the
    rule's, or the library's product where it takes one.  Raises EspalierError on other shapes and dtypes.
    """
    # Rounded once, at the end.
    exact = torch.promote_types(x.dtype, torch.float32)
    num_out, num_in = weight.shape
    if weight.inputs is None:
        assert isinstance(x, Tensor)
        inputs = x.to(exact)
    else:
        inputs = rounded_inputs(x, weight.inputs)
    out = torch.empty(len(x), num_out, dtype=x.dtype, device=inputs.device)
    # Whole row blocks: `dequantise` begins at one.
    step = max(BLOCK_VALUES // max(num_in, 1) // weight.row_block, 1) * weight.row_block
    for begin in range(0, num_out, step):
        end = min(begin + step, num_out)
        block_bias = None if bias is None else bias[begin:end].to(exact)
        out[:, begin:end] = F.linear(inputs, dequantise(weight, exact, begin, end), block_bias)
    return out


@op("espalier.kernels.layers.linear_quantised", on="weight.codes")
def linear_quantised_parts(
    x: Rows, weight: QuantisedMatrix, bias: Tensor | None, plan: TritonPlan | None = None
) -> Tensor:
    """`linear_quantised`, or its partial sums [splits, rows, out] in float32."""
    return linear_quantised.reference(x, weight, bias)


@op("espalier.kernels.layers.linear_quantised", on="weight.codes")
def linear_quantised_gated(
    x: Rows,
    weight: QuantisedMatrix,
    bias: Tensor | None,
    plan: TritonPlan | None = None,
    activation: Activation = SILU,
) -> Tensor:
    """The activation [rows, out / 2] of gate and up, for a weight that stacks gate over up."""
    return gated.reference(linear_quantised.reference(x, weight, bias), activation)
