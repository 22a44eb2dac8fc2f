"""A linear layer with a quantised weight: y = x · weightᵀ + bias, for any number of rows.

Up to 64 rows, the kernel streams the weight once, with the grid and split-K of linear.py.  For more rows, each program
computes one tile, and decodes its weights in registers.  Up to 256 rows, the columns are also split, because there are
fewer tiles than multiprocessors.  quantised_tile.py has the inner loop.  With 4-bit weights and up to 16 rows, Hopper
has a separate kernel (hopper/quantised_products.py), which gives the same bits.  With 4-bit weights and many rows, the
weight's values are written to memory, and PyTorch multiplies (linear_dequantised.py).

If the weight's format needs inputs in FP8, the preceding norm (norm.py), the preceding activation (activation.py) or a
separate launch (quantise_rows.py) rounds them.  For many rows of such inputs, PyTorch's scaled_mm computes the product
(scaled_product.py).

Tolerance: the tolerance of linear.py, plus in · 2⁻²³ times the sum of the products' magnitudes, because scales multiply
the sum of each group of columns.  For rounded inputs on a GPU the tolerance is 2⁻¹⁰ times that sum of magnitudes,
because FP8 units add 32 products at once, and drop the bits of a product that are more than 13 bits below the largest
product.
"""

import torch
import triton.language as tl
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.hopper.plans import supports_hopper_product
from espalier.kernels.hopper.quantised_products import hopper_linear_kernel, nibble_launch_options, weight_pointers
from espalier.kernels.layers.linear import store_tile, weight_rows
from espalier.kernels.layers.linear_dequantised import dequantised_gated, dequantised_product, uses_dequantised_product
from espalier.kernels.layers.linear_plans import DTYPES, MIN_BLOCK_ROWS, TritonPlan, block_rows
from espalier.kernels.layers.quantised import InputRows, InputScales, QuantisedMatrix, RoundedRows
from espalier.kernels.layers.quantised_nibbles import prefetch_scales
from espalier.kernels.layers.quantised_plans import (
    MAX_BLOCK_ROWS,
    has_words_of_two_groups,
    max_block_in,
    quantised_plan_for,
)
from espalier.kernels.layers.quantised_tile import (
    LINE_BYTES,
    format_constants,
    kernel_matrix,
    prefetch_codes,
    quantised_dot,
)
from espalier.kernels.layers.scaled_product import library_supports_product, max_kernel_rows, scaled_product
from espalier.kernels.ops.activation import SILU, Activation, gated_activation, num_up_columns
from espalier.kernels.ops.linear import activate_partial_sums, add_partial_sums, can_round_activation, quantise_rows
from espalier.kernels.runtime.jit import kernel
from espalier.kernels.runtime.launch import chip, require
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger, pdl_wait

# Before a program waits for the previous kernel (PDL), it prefetches L2 lines of each row of codes: the lines of the
# first PREFETCHED_STEPS steps.  For inputs that are already rounded, and for FP8 weights with up to 16 rows, it
# prefetches only MIN_PREFETCHED_LINES lines, because more would take bandwidth from the previous kernel (docs/log.md).
MIN_PREFETCHED_LINES, PREFETCHED_STEPS = 1, 4


def linear_quantised(
    x: InputRows, weight: QuantisedMatrix, bias: Tensor | None, plan: TritonPlan | None = None
) -> Tensor:
    """Returns x · weightᵀ + bias, [rows, out] in the dtype of x, see ops/linear.py:linear_quantised."""
    return add_partial_sums.triton(linear_quantised_partial_sums(x, weight, bias, plan), x.dtype)


def linear_quantised_partial_sums(
    x: InputRows, weight: QuantisedMatrix, bias: Tensor | None, plan: TritonPlan | None = None
) -> Tensor:
    """Returns the product [rows, out]; if the plan has splits, partial sums [splits, rows, out] in float32."""
    if plan is None and (product := _library_product(x, weight, bias)) is not None:
        return product
    return _launch(x, weight, bias, quantised_plan_for(weight, x) if plan is None else plan, is_gated=False)


def linear_quantised_gated(
    x: InputRows,
    weight: QuantisedMatrix,
    bias: Tensor | None,
    plan: TritonPlan | None = None,
    activation: Activation = SILU,
    rounding: InputScales | None = None,
) -> InputRows:
    """rounding: how the next product rounds its inputs; a result of few rows is rounded in that way."""
    inner = num_up_columns(weight.shape[0], activation)
    if plan is None and weight.codes.is_cuda and uses_dequantised_product(x, weight):
        return dequantised_gated(kernel_inputs(x, weight)[0], weight, bias, activation)
    if plan is None and (product := _library_product(x, weight, bias)) is not None:
        return gated_activation.triton(product, activation)
    plan = quantised_plan_for(weight, x) if plan is None else plan
    if activation.is_silu and plan.splits == 1:
        return _launch(x, weight, bias, plan, is_gated=True)
    # The result is rounded only for few rows, because for many rows scaled_product itself rounds its inputs.
    is_few = rounding is not None and len(x) <= max_kernel_rows(rounding, chip(weight.codes))
    rounding = rounding if is_few and rounding is not None and can_round_activation(inner, rounding) else None
    partial_sums = linear_quantised_partial_sums(x, weight, bias, plan)
    return activate_partial_sums.triton(partial_sums, x.dtype, activation, rounding)


def _library_product(x: InputRows, weight: QuantisedMatrix, bias: Tensor | None) -> Tensor | None:
    """Returns the product by PyTorch's library; None if our kernel is faster, or if only our kernel supports the
    product."""
    if not weight.codes.is_cuda:
        return None
    if uses_dequantised_product(x, weight):
        return dequantised_product(kernel_inputs(x, weight)[0], weight, bias)
    return scaled_product(x, weight, bias) if library_supports_product(x, weight) else None


@kernel
def _linear_quantised_kernel(
    x_ptr, x_scales_ptr, codes_ptr, scales_ptr, zero_points_ptr, bias_ptr, out_ptr, num_rows, num_out, num_in, x_stride,
    CODE: tl.constexpr, GROUP_SIZE: tl.constexpr, ROWS_PER_SCALE: tl.constexpr, INPUT_GROUP_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, EVEN_OUT: tl.constexpr,
    EVEN_IN: tl.constexpr, IS_GATED: tl.constexpr, PREFETCHED_LINES: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of weight rows, splits, tiles of rows).  Arguments: see _linear_kernel and quantised_dot.

    PREFETCHED_LINES: L2 lines of a row's codes that are prefetched before the wait, a power of two."""
    w_rows = weight_rows(num_out, BLOCK_OUT, EVEN_OUT, IS_GATED).to(tl.int64)
    split, num_splits = tl.program_id(1), tl.num_programs(1)
    steps = tl.cdiv(num_in, BLOCK_IN)
    k_begin, k_end = split * steps // num_splits * BLOCK_IN, (split + 1) * steps // num_splits * BLOCK_IN
    rows = tl.program_id(2) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    x_rows = rows.to(tl.int64)
    pdl_trigger(USE_PDL)
    if USE_PDL:
        prefetch_codes(codes_ptr, w_rows, k_begin, k_end, num_in, CODE, PREFETCHED_LINES)
        if CODE == 1:
            prefetch_scales(scales_ptr, zero_points_ptr, w_rows, k_begin, k_end, num_in, GROUP_SIZE)
    pdl_wait(USE_PDL)
    x_scale_ptrs = None
    if x_scales_ptr is not None:
        x_scale_ptrs = x_scales_ptr + x_rows * (tl.cdiv(num_in, INPUT_GROUP_SIZE) if INPUT_GROUP_SIZE > 0 else 1)
    acc = quantised_dot(
        codes_ptr, scales_ptr, zero_points_ptr, w_rows, x_ptr + x_rows * x_stride, x_scale_ptrs, rows < num_rows,
        num_in,
        k_begin, k_end, CODE, GROUP_SIZE, ROWS_PER_SCALE, INPUT_GROUP_SIZE, BLOCK_ROWS, BLOCK_OUT, BLOCK_IN, EVEN_IN,
    )  # fmt: skip
    if bias_ptr is not None:
        # Only the first split adds the bias.
        acc += tl.where(split == 0, tl.load(bias_ptr + w_rows).to(tl.float32), 0.0)[:, None]
    store_tile(acc, out_ptr, split, rows, num_rows, num_out, BLOCK_ROWS, BLOCK_OUT, IS_GATED)


def _launch(x: InputRows, weight: QuantisedMatrix, bias: Tensor | None, plan: TritonPlan, is_gated: bool) -> Tensor:
    """is_gated: whether the kernel returns silu(gate) · up.  Returns the result, or partial sums if plan.splits > 1."""
    rows, num_in = input_values(x).shape
    _check_arguments(x, weight, bias, plan)
    num_out, block_written = weight.shape[0], plan.block_out
    if is_gated:
        num_out, block_written = num_out // 2, block_written // 2
    has_partial_sums = plan.splits > 1 and rows * num_out > 0
    shape, dtype = ((plan.splits, rows, num_out), torch.float32) if has_partial_sums else ((rows, num_out), x.dtype)
    out = torch.empty(shape, dtype=dtype, device=weight.device)
    if out.numel() == 0:
        return out
    inputs, input_scales = kernel_inputs(x, weight)
    tile = min(block_rows(rows), MAX_BLOCK_ROWS)
    gpu = chip(inputs)
    if supports_hopper_product(inputs, weight, rows, (plan.block_out, plan.block_in, plan.warps), gpu):
        grid = -(-num_out // block_written), plan.splits
        hopper_linear_kernel[grid](
            *(inputs, *weight_pointers(weight), bias, out, rows, num_out, num_in, inputs.stride(0)),
            IS_GATED=is_gated, **nibble_launch_options(weight, rows, grid, gpu),
        )  # fmt: skip
        return out
    _linear_quantised_kernel[-(-num_out // block_written), plan.splits, -(-rows // tile)](
        *(inputs, input_scales, *kernel_matrix(weight), bias, out),
        *(rows, num_out, num_in, inputs.stride(0)),
        **format_constants(weight),
        BLOCK_ROWS=tile, BLOCK_OUT=plan.block_out, BLOCK_IN=plan.block_in,
        EVEN_OUT=num_out % block_written == 0, EVEN_IN=num_in % plan.block_in == 0, IS_GATED=is_gated,
        PREFETCHED_LINES=num_prefetched_lines(x, weight.code, plan),
        num_warps=plan.warps, num_stages=plan.stages, **pdl_arguments(gpu),
    )  # fmt: skip
    return out


def num_prefetched_lines(x: InputRows, code: str, plan: TritonPlan) -> int:
    """Returns how many L2 lines of each weight row a program prefetches, a power of two."""
    if isinstance(x, RoundedRows) or (code == "fp8" and len(x) <= MIN_BLOCK_ROWS):
        return MIN_PREFETCHED_LINES
    step_bytes = plan.block_in if code == "fp8" else plan.block_in // 2
    return max(PREFETCHED_STEPS * step_bytes // LINE_BYTES, MIN_PREFETCHED_LINES)


def kernel_inputs(x: InputRows, weight: QuantisedMatrix) -> tuple[Tensor, Tensor | None]:
    """Returns (inputs, scales of the inputs or None) for quantised_dot.  The inputs are in the weight's column order,
    and rounded if the weight needs that."""
    if isinstance(x, RoundedRows):
        return x.values, x.scales
    if weight.column_order is not None:
        x = x.index_select(1, weight.column_order)
    if weight.input_scales is not None:
        return quantise_rows(x, weight.input_scales)
    return (x if x.stride(1) == 1 else x.contiguous()), None


def input_values(x: InputRows) -> Tensor:
    """Returns the values of x as they are stored: FP8 for RoundedRows."""
    return x.values if isinstance(x, RoundedRows) else x


def _check_arguments(x: InputRows, weight: QuantisedMatrix, bias: Tensor | None, plan: TritonPlan) -> None:
    num_in = input_values(x).shape[1]
    code_columns = num_in if weight.code == "fp8" else num_in // 2
    require("quantised linear: codes", weight.codes, (-1, code_columns), None, input_values(x))
    if bias is not None:
        require("quantised linear: bias", bias, (weight.shape[0],), x.dtype, weight.codes)
    fits = all(tensor.is_contiguous() for tensor in weight.tensors) and max_block_in(weight) % plan.block_in == 0
    if x.dtype not in DTYPES or not fits or (weight.code != "fp8" and has_words_of_two_groups(weight)):
        raise EspalierError(
            f"quantised linear: the Triton kernel takes bfloat16 or float16, contiguous weights, blocks that divide "
            f"{max_block_in(weight)} columns and, for 4 bits, groups of whole words, but got {x.dtype}, groups of "
            f"{weight.group_size} of {num_in} columns and {plan}: use the reference"
        )
