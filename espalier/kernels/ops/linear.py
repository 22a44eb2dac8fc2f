"""Linear layers with dense and with quantised weights, and the rounding of their inputs to FP8."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from espalier.kernels.layers.blocks import BlockMatrix, dequantise_blocks
from espalier.kernels.layers.linear_plans import LibraryPlan, LinearPlan, TritonPlan
from espalier.kernels.layers.quantised import (
    DEQUANTISED_VALUES_PER_STEP,
    InputRows,
    InputScales,
    QuantisedMatrix,
    RoundedRows,
    dequantise,
    fake_quantise_inputs,
    quantise_inputs,
)
from espalier.kernels.ops.activation import SILU, Activation, gated_activation
from espalier.kernels.runtime.launch import next_power_of_2
from espalier.kernels.runtime.op import op


@op("espalier.kernels.layers.linear")
def linear(x: Tensor, weight: Tensor, bias: Tensor | None, plan: LinearPlan) -> Tensor:
    """Returns x · weightᵀ + bias for x [rows, in]: a new tensor [rows, out] in x's dtype.

    plan: how the product is computed; None: by F.linear.  The bits of a row depend on the plan, but never on the values
    of other rows.  With a TritonPlan they also depend on block_rows(rows); with other plans, on the number of rows."""
    return add_partial_sums.reference(linear_partial_sums.reference(x, weight, bias, plan), x.dtype)


@op("espalier.kernels.layers.linear")
def linear_partial_sums(x: Tensor, weight: Tensor, bias: Tensor | None, plan: LinearPlan) -> Tensor:
    """Returns the result of `linear` [rows, out]; if the plan has splits, partial sums [splits, rows, out] in float32.

    The partial sums, added in order and rounded to x's dtype, equal the result of `linear` to the bit."""
    return library_partial_sums(x, weight, bias, plan) if isinstance(plan, LibraryPlan) else F.linear(x, weight, bias)


def library_partial_sums(x: Tensor, weight: Tensor, bias: Tensor | None, plan: LibraryPlan) -> Tensor:
    """Returns the result of linear_partial_sums, computed by PyTorch's library on views of x and weight.
    Raises RuntimeError if plan.splits does not divide the number of columns of x."""
    rows, num_out = x.shape[0], weight.shape[0]
    if plan.splits > 1 and rows * num_out > 0:
        shape = (plan.splits, -1)
        split_x, split_weight = x.unflatten(1, shape).transpose(0, 1), weight.unflatten(1, shape).permute(1, 2, 0)
        # Without a GPU, as in tests, PyTorch has no batched product of 16-bit floats with float32 output.
        exact = torch.float32
        partial_sums = (
            torch.bmm(split_x, split_weight, out_dtype=exact)
            if x.is_cuda
            else split_x.to(exact) @ split_weight.to(exact)
        )
        if bias is not None:
            partial_sums[0] += bias
        return partial_sums
    out = x.new_empty(rows, num_out)
    ends = [num_out * piece // plan.pieces for piece in range(plan.pieces + 1)]
    for begin, end in pairwise(ends):
        piece = slice(begin, end)
        write_product(x, weight[piece], None if bias is None else bias[piece], out[:, piece])
    return out


def write_product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write x · weightᵀ + bias to out [rows, out], which may be a view, in one call of PyTorch."""
    if bias is None:
        torch.mm(x, weight.T, out=out)
    else:
        torch.addmm(bias, x, weight.T, out=out)


@op("espalier.kernels.layers.linear")
def linear_gated(
    x: Tensor, weight: Tensor, bias: Tensor | None, plan: LinearPlan, activation: Activation = SILU
) -> Tensor:
    """Returns the activation [rows, out / 2] of gate and up, with the bits of `linear` and then `gated_activation`.
    weight: [out, in], the rows of gate, then the rows of up.  Raises EspalierError for an odd `out`."""
    return gated_activation.reference(linear.reference(x, weight, bias, plan), activation)


@op("espalier.kernels.layers.linear")
def write_parts(x: Tensor, weight: Tensor, bias: Tensor | None, plan: TritonPlan, out: Tensor) -> None:
    """Write the partial sums of `linear` to out [plan.splits, rows, out] float32, contiguous.

    Raises EspalierError if `out` is not contiguous, or if shapes, dtypes or the plan do not fit."""
    # The reference writes the whole product to the first partial sum, and zeros to the others.
    out.zero_()
    out[0] = F.linear(x, weight, bias)


@op("espalier.kernels.layers.linear")
def add_partial_sums(partial_sums: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the sum of partial sums [splits, rows, out] in `dtype`.  A tensor [rows, out] is returned unchanged."""
    if partial_sums.ndim == 2:
        return partial_sums
    total = partial_sums[0].clone()
    for part in partial_sums[1:]:
        total += part
    return total.to(dtype)


# The most columns of an activation that one program rounds.
MAX_ROUNDED_COLUMNS = 8192


def can_round_activation(num_columns: int, input_scales: InputScales) -> bool:
    """Returns whether `activate_partial_sums` can round rows of this size to FP8.
    A row must be short, and must have one scale, or one scale for each group of 2^n columns."""
    group, block = input_scales.columns(num_columns), next_power_of_2(num_columns)
    return block <= MAX_ROUNDED_COLUMNS and (group == num_columns or next_power_of_2(group) == group)


@op("espalier.kernels.layers.activation")
def activate_partial_sums(
    partial_sums: Tensor, dtype: torch.dtype, activation: Activation = SILU, rounding: InputScales | None = None
) -> InputRows:
    """Returns the result of `gated_activation` for add_partial_sums(partial_sums, dtype), in one launch.

    rounding: how the result is rounded to FP8; None: not rounded.  `can_round_activation` must accept the sizes."""
    out = gated_activation.reference(add_partial_sums.reference(partial_sums, dtype), activation)
    return out if rounding is None else RoundedRows(*quantise_inputs(out, rounding), dtype)


@op("espalier.kernels.layers.quantise_rows")
def quantise_rows(x: Tensor, input_scales: InputScales, library_layout: bool = False) -> tuple[Tensor, Tensor]:
    """Rounds x [rows, in] to FP8.  Returns (values [rows, in], scales [rows, ceil(in / group)] float32).

    library_layout: whether a GPU returns the form that the library's product needs: the scales of one group of columns
    are adjacent in memory, and undefined rows fill up the result to a multiple of LIBRARY_ROW_MULTIPLE rows."""
    return quantise_inputs(x, input_scales)


@op("espalier.kernels.layers.linear_quantised", tensor="weight.codes")
def linear_quantised(
    x: InputRows, weight: QuantisedMatrix, bias: Tensor | None, plan: TritonPlan | None = None
) -> Tensor:
    """Returns x · weightᵀ + bias for x [rows, in]: a new tensor [rows, out] in x's dtype.

    If x is RoundedRows, it must be rounded as weight.input_scales says.  The bits of a row never depend on other rows'
    values.
    plan: launch parameters of Espalier's kernel, whose block_in must divide `max_block_in`.  None: many rows use
    PyTorch's product; fewer rows use the plan that was measured for this shape, or else a plan by rule.  With 4-bit
    weights, PyTorch's product rounds the weight's values to x's dtype.  Raises EspalierError for other shapes and
    dtypes."""
    # The result is rounded once, at the end.
    wide_dtype = torch.promote_types(x.dtype, torch.float32)
    num_out, num_in = weight.shape
    if weight.input_scales is None:
        assert isinstance(x, Tensor)
        inputs = x.to(wide_dtype)
    else:
        inputs = fake_quantise_inputs(x, weight.input_scales)
    out = torch.empty(len(x), num_out, dtype=x.dtype, device=inputs.device)
    # Each step has a multiple of rows_per_scale rows, because `dequantise` must start at the first row of a scale.
    step = max(DEQUANTISED_VALUES_PER_STEP // max(num_in, 1) // weight.rows_per_scale, 1) * weight.rows_per_scale
    for begin in range(0, num_out, step):
        end = min(begin + step, num_out)
        block_bias = None if bias is None else bias[begin:end].to(wide_dtype)
        out[:, begin:end] = F.linear(inputs, dequantise(weight, wide_dtype, begin, end), block_bias)
    return out


@op("espalier.kernels.layers.linear_quantised", tensor="weight.codes")
def linear_quantised_partial_sums(
    x: InputRows, weight: QuantisedMatrix, bias: Tensor | None, plan: TritonPlan | None = None
) -> Tensor:
    """Returns the result of linear_quantised; if the plan has splits, partial sums [splits, rows, out] in float32."""
    return linear_quantised.reference(x, weight, bias)


@op("espalier.kernels.layers.linear_quantised", tensor="weight.codes")
def linear_quantised_gated(
    x: InputRows,
    weight: QuantisedMatrix,
    bias: Tensor | None,
    plan: TritonPlan | None = None,
    activation: Activation = SILU,
    rounding: InputScales | None = None,
) -> InputRows:
    """Returns the activation [rows, out / 2] of gate and up.  weight: the rows of gate, then the rows of up.

    rounding: how the next product rounds its inputs.  This function rounds its result in that way only if there are few
    rows, the activation has a separate launch, and can_round_activation returns True."""
    return gated_activation.reference(linear_quantised.reference(x, weight, bias), activation)


@op("espalier.kernels.layers.linear_blocks", tensor="weight.blocks")
def linear_blocks(x: Tensor, weight: BlockMatrix, bias: Tensor | None) -> Tensor:
    """Returns x · weightᵀ + bias for x [rows, in]: a new tensor [rows, out] in x's dtype.

    The bits of a row never depend on the values of other rows.  Raises EspalierError for other shapes and dtypes."""
    wide_dtype = torch.promote_types(x.dtype, torch.float32)
    num_out, num_in = weight.shape
    out = torch.empty(len(x), num_out, dtype=x.dtype, device=x.device)
    step = max(DEQUANTISED_VALUES_PER_STEP // max(num_in, 1), 1)
    for begin in range(0, num_out, step):
        end = min(begin + step, num_out)
        block_bias = None if bias is None else bias[begin:end].to(wide_dtype)
        out[:, begin:end] = F.linear(x.to(wide_dtype), dequantise_blocks(weight, begin, end).to(wide_dtype), block_bias)
    return out
