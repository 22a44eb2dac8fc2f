"""A linear layer with a quantised weight: y = x · weightᵀ + bias, for any number of rows.

Up to 64 rows it streams the weight once, as linear.py does, with the same grid and split-K.  More rows are cut into
tiles, each a program of its own: a matrix product on tensor cores whose weight tiles become numbers in registers.  Up
to 256 rows it also splits the columns, as there are fewer tiles than multiprocessors.  No weight is ever dequantised
in memory.  quantised_tile.py has the inner loop.  For up to 16 rows and 4 bits, Hopper has a kernel of its own
(hopper_products.py), with the same bits.

Inputs that the format rounds to FP8 are rounded by the norm before (norm.py) or by a launch (quantise_rows.py).  Many
rows of such inputs are multiplied by the library (scaled_product.py).

Tolerance: as linear.py, with the values of weight and inputs exact, and one rounding more for the scales of each group
of columns: in · 2⁻²³ times the sum of the products' magnitudes.  For rounded inputs on a GPU it is 2⁻¹⁰ times that sum:
FP8 units cut each of 32 addends at 13 bits below the largest.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.layers.hopper_products import is_hopper_product, launch_linear, splits_of, takes_format
from espalier.kernels.layers.linear import (
    DTYPES,
    MIN_BLOCK_ROWS,
    TritonPlan,
    block_rows,
    store_tile,
    summed,
    weight_rows,
)
from espalier.kernels.layers.linear_tuning import LinearPlans, measured_plans
from espalier.kernels.layers.quantise_rows import quantise_rows
from espalier.kernels.layers.quantised import (
    E8M0_BIAS,
    INTERLEAVED,
    QuantisedMatrix,
    RoundedRows,
    Rows,
    linear_quantised_reference,
)
from espalier.kernels.layers.quantised_nibbles import prefetch_scales
from espalier.kernels.layers.quantised_tile import CODES, LINE_BYTES, SUM_COLUMNS, prefetch_codes, quantised_dot
from espalier.kernels.layers.scaled_product import is_scaled_product, scaled_product
from espalier.kernels.layers.silu import require_gated, silu_mul
from espalier.kernels.runtime.launch import Chip, chip, kernel, require
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger, pdl_wait

if TYPE_CHECKING:
    import triton.language as tl

# More rows are cut into tiles of this many.
MAX_BLOCK_ROWS = 128
# The largest exponent of MXFP4 that the kernels' numbers can hold: a scale of 2^65.
MAX_EXPONENT = E8M0_BIAS + 65
# The first chips whose compilers know E4M3.
FP8_CAPABILITY = (8, 9)
# Rows up to which the rule streams, and up to which it splits columns: more rows have programs enough.
STREAMED_ROWS, SPLIT_ROWS = 64, 256
# L2 lines of each row of codes that a program prefetches before it waits for the kernel before it: those of STEPS_AHEAD
# steps.  Only one for inputs that a norm has rounded, and for FP8 up to 16 rows: in a round, more would take bandwidth
# from the kernel before (docs/log.md).  4 bits are not measured so.
FEWEST_LINES_AHEAD, STEPS_AHEAD = 1, 4
# Programs per multiprocessor that the rule's split-K aims at where weights are streamed, and warps where products bind.
PROGRAMS_PER_PROCESSOR, WARPS_PER_PROCESSOR = 2, 8
MAX_SPLITS = 8
# The fewest steps of a split of FP8 weights: fewer do not fill a pipeline.
LEAST_STEPS = 4
# Of 4-bit weights: (most rows of a tile, (block_out, most block_in, warps), programs that registers let share a
# multiprocessor).  Up to 16 rows a step reads 128 bytes of each row of the weight.  With more, the inputs are the
# larger part of what is read, and blocks of 128 rows of the weight halve it.  For MXFP4 they are slower up to 32 rows
# (docs/log.md); the rest is not measured.  A thread needs four of a step's exponents of MXFP4, or they are not copied
# ahead.
NIBBLE_TILES = {
    "int4": ((16, (64, 256, 4), 4), (64, (128, 128, 8), 2), (MAX_BLOCK_ROWS, (128, 128, 8), 1)),
    "mxfp4": ((16, (64, 256, 4), 4), (32, (64, 256, 4), 3), (64, (128, 128, 4), 2), (MAX_BLOCK_ROWS, (128, 128, 8), 1)),
}
MAX_STAGES = 6
# From this number of columns on, the last step may be partly empty.
RAGGED_IN = 1024


def linear_quantised(x: Rows, weight: QuantisedMatrix, bias: Tensor | None) -> Tensor:
    """x [rows, in] · weightᵀ + bias -> a new tensor [rows, out] in x's dtype.

    RoundedRows must be rounded as the weight asks.  The bits of a row never depend on the other rows' values.
    """
    product = _product_of_others(x, weight, bias)
    return linear_quantised_triton(x, weight, bias, plan_of(weight, x)) if product is None else product


def linear_quantised_parts(x: Rows, weight: QuantisedMatrix, bias: Tensor | None) -> Tensor:
    """`linear_quantised`, or its partial sums [splits, rows, out] in float32."""
    product = _product_of_others(x, weight, bias)
    return linear_quantised_parts_triton(x, weight, bias, plan_of(weight, x)) if product is None else product


def linear_quantised_gated(x: Rows, weight: QuantisedMatrix, bias: Tensor | None) -> Tensor:
    """silu(gate) · up [rows, out / 2], for a weight that stacks gate over up."""
    require_gated(weight.shape[0])
    product = _product_of_others(x, weight, bias)
    if product is None:
        return linear_quantised_gated_triton(x, weight, bias, plan_of(weight, x))
    return silu_mul(product)


def _product_of_others(x: Rows, weight: QuantisedMatrix, bias: Tensor | None) -> Tensor | None:
    """The product by the reference on a CPU, and by the library where it takes it; None: by this file's kernel."""
    if not weight.codes.is_cuda:
        return None if isinstance(x, RoundedRows) else linear_quantised_reference(x, weight, bias)
    return scaled_product(x, weight, bias) if is_scaled_product(x, weight) else None


def linear_quantised_triton(x: Rows, weight: QuantisedMatrix, bias: Tensor | None, plan: TritonPlan) -> Tensor:
    """plan.block_in must divide `max_block_in`.  Raises EspalierError on other shapes and dtypes."""
    return summed(linear_quantised_parts_triton(x, weight, bias, plan), x.dtype)


def linear_quantised_parts_triton(x: Rows, weight: QuantisedMatrix, bias: Tensor | None, plan: TritonPlan) -> Tensor:
    return _launch(x, weight, bias, plan, gated=False)


def linear_quantised_gated_triton(x: Rows, weight: QuantisedMatrix, bias: Tensor | None, plan: TritonPlan) -> Tensor:
    if plan.splits == 1:
        return _launch(x, weight, bias, plan, gated=True)
    return silu_mul(linear_quantised_triton(x, weight, bias, plan))


@kernel
def _linear_quantised_kernel(
    x_ptr, x_scales_ptr, codes_ptr, scales_ptr, zeros_ptr, bias_ptr, out_ptr, num_rows, num_out, num_in, x_stride,
    CODE: tl.constexpr, GROUP: tl.constexpr, ROW_BLOCK: tl.constexpr, INPUT_GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, EVEN_OUT: tl.constexpr,
    EVEN_IN: tl.constexpr, GATED: tl.constexpr, LINES_AHEAD: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of weight rows, splits, tiles of rows).  Arguments as _linear_kernel and quantised_dot.

    LINES_AHEAD: L2 lines of a row's codes that are prefetched before the wait, a power of two.
    """
    w_rows = weight_rows(num_out, BLOCK_OUT, EVEN_OUT, GATED).to(tl.int64)
    split, num_splits = tl.program_id(1), tl.num_programs(1)
    steps = tl.cdiv(num_in, BLOCK_IN)
    k_begin, k_end = split * steps // num_splits * BLOCK_IN, (split + 1) * steps // num_splits * BLOCK_IN
    rows = tl.program_id(2) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    x_rows = rows.to(tl.int64)
    pdl_trigger(DEPENDENT)
    if DEPENDENT:
        prefetch_codes(codes_ptr, w_rows, k_begin, k_end, num_in, CODE, LINES_AHEAD)
        if CODE == 1:
            prefetch_scales(scales_ptr, zeros_ptr, w_rows, k_begin, k_end, num_in, GROUP)
    pdl_wait(DEPENDENT)
    x_scale_ptrs = None
    if x_scales_ptr is not None:
        x_scale_ptrs = x_scales_ptr + x_rows * (tl.cdiv(num_in, INPUT_GROUP) if INPUT_GROUP > 0 else 1)
    acc = quantised_dot(
        codes_ptr, scales_ptr, zeros_ptr, w_rows, x_ptr + x_rows * x_stride, x_scale_ptrs, rows < num_rows, num_in,
        k_begin, k_end, CODE, GROUP, ROW_BLOCK, INPUT_GROUP, BLOCK_ROWS, BLOCK_OUT, BLOCK_IN, EVEN_IN,
    )  # fmt: skip
    if bias_ptr is not None:
        # Only the first split adds the bias.
        acc += tl.where(split == 0, tl.load(bias_ptr + w_rows).to(tl.float32), 0.0)[:, None]
    store_tile(acc, out_ptr, split, rows, num_rows, num_out, BLOCK_ROWS, BLOCK_OUT, GATED)


def _launch(x: Rows, weight: QuantisedMatrix, bias: Tensor | None, plan: TritonPlan, gated: bool) -> Tensor:
    rows, num_in = stored(x).shape
    _require(x, weight, bias, plan)
    num_out, block_written = weight.shape[0], plan.block_out
    if gated:
        num_out, block_written = num_out // 2, block_written // 2
    in_parts = plan.splits > 1 and rows * num_out > 0
    shape, dtype = ((plan.splits, rows, num_out), torch.float32) if in_parts else ((rows, num_out), x.dtype)
    out = torch.empty(shape, dtype=dtype, device=weight.device)
    if out.numel() == 0:
        return out
    inputs, input_scales = kernel_inputs(x, weight)
    tile = min(block_rows(rows), MAX_BLOCK_ROWS)
    gpu = chip(inputs)
    if is_hopper_product(inputs, weight, rows, (plan.block_out, plan.block_in, plan.warps), gpu):
        grid = -(-num_out // block_written), plan.splits
        launch_linear(inputs, weight, bias, out, grid, gated, gpu)
        return out
    _linear_quantised_kernel[-(-num_out // block_written), plan.splits, -(-rows // tile)](
        *(inputs, input_scales, kernel_codes(weight), weight.scales, weight.zeros, bias, out),
        *(rows, num_out, num_in, inputs.stride(0)),
        **tile_options(weight),
        BLOCK_ROWS=tile,
        BLOCK_OUT=plan.block_out,
        BLOCK_IN=plan.block_in,
        EVEN_OUT=num_out % block_written == 0,
        EVEN_IN=num_in % plan.block_in == 0,
        GATED=gated,
        LINES_AHEAD=lines_ahead(x, weight.code, plan),
        num_warps=plan.warps,
        num_stages=plan.stages,
        **pdl_arguments(gpu),
    )
    return out


def lines_ahead(x: Rows, code: str, plan: TritonPlan) -> int:
    """The L2 lines of each row that a product with x prefetches: a power of two."""
    if isinstance(x, RoundedRows) or (code == "fp8" and len(x) <= MIN_BLOCK_ROWS):
        return FEWEST_LINES_AHEAD
    step_bytes = plan.block_in if code == "fp8" else plan.block_in // 2
    return max(STEPS_AHEAD * step_bytes // LINE_BYTES, FEWEST_LINES_AHEAD)


def kernel_inputs(x: Rows, weight: QuantisedMatrix) -> tuple[Tensor, Tensor | None]:
    """(inputs, their scales or None) as quantised_dot takes them: in the order of the columns, maybe rounded."""
    if isinstance(x, RoundedRows):
        return x.values, x.scales
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    if weight.inputs is not None:
        return quantise_rows(x, weight.inputs)
    return (x if x.stride(1) == 1 else x.contiguous()), None


def stored(x: Rows) -> Tensor:
    """The values of x as they lie in memory."""
    return x.values if isinstance(x, RoundedRows) else x


def kernel_codes(weight: QuantisedMatrix) -> Tensor:
    """The codes as quantised_dot takes them: FP8, or int32 words of 8 nibbles."""
    return weight.codes if weight.code == "fp8" else weight.codes.view(torch.int32)


def tile_options(weight: QuantisedMatrix) -> dict[str, Any]:
    """The constants of quantised_dot that follow from the matrix."""
    num_in, inputs = weight.shape[-1], weight.inputs
    input_group = 0 if inputs is None or inputs.columns(num_in) == num_in else inputs.columns(num_in)
    group = 0 if weight.group >= num_in and weight.code != "mxfp4" else weight.group
    return {"CODE": CODES[weight.code], "GROUP": group, "ROW_BLOCK": weight.row_block, "INPUT_GROUP": input_group}


def plan_of(weight: QuantisedMatrix, x: Rows) -> TritonPlan:
    """The measured plan for the weight's shape, format and x's rows; `rule`'s where there is none."""
    measured = measured_plans(chip(weight.codes), tuning_name(weight), x.dtype)
    plan = measured.get((weight.shape[0], weight.shape[1]), LinearPlans()).at(len(x))
    return plan if isinstance(plan, TritonPlan) else rule_of(weight, x)


def rule_of(weight: QuantisedMatrix, x: Rows) -> TritonPlan:
    """The plan of `rule`."""
    (num_out, num_in), grouped = weight.shape, weight.group < weight.shape[-1]
    input_bytes, gpu = 1 if weight.inputs is not None else x.dtype.itemsize, chip(weight.codes)
    plan = rule(len(x), num_out, num_in, weight.code, max_block_in(weight), grouped, gpu, input_bytes)
    if plan.splits > 1 and takes_format(weight, x.dtype, len(x), gpu):
        return replace(plan, splits=splits_of(num_out, num_in, gpu))
    return plan


def tuning_name(weight: QuantisedMatrix) -> str:
    """The format's name in tuning tables: what a kernel's time depends on."""
    group = "" if weight.group >= weight.shape[-1] else f"-{weight.row_block}x{weight.group}"
    inputs = "" if weight.inputs is None else f"-inputs{weight.inputs.group or ''}"
    return f"{weight.code}{group}{inputs}"


def max_block_in(weight: QuantisedMatrix) -> int:
    """The most columns of a tile: for FP8 those that share a scale, or two sums of them."""
    if weight.code != "fp8":
        return 256
    groups = [weight.group]
    if weight.inputs is not None and weight.inputs.group is not None:
        groups.append(weight.inputs.group)
    least = min([group for group in groups if group < weight.shape[-1]], default=SUM_COLUMNS)
    return 2 * SUM_COLUMNS if least % SUM_COLUMNS == 0 else least


@cache
def rule(
    rows: int, num_out: int, num_in: int, code: str, max_block: int, grouped: bool, gpu: Chip, input_bytes: int = 2
) -> TritonPlan:
    """The plan where nothing is measured.

    grouped: whether groups of columns have scales of their own.  input_bytes: of an input, as FP8 weights meet it.
    """
    tile = min(block_rows(rows), MAX_BLOCK_ROWS)
    num_tiles, streams = -(-rows // tile), rows <= STREAMED_ROWS
    max_splits = MAX_SPLITS if rows <= SPLIT_ROWS else 1
    if code != "fp8":
        return nibble_rule(tile, num_tiles, num_out, num_in, code, max_splits, gpu)
    return fp8_rule(tile, num_tiles, streams, num_out, num_in, max_block, grouped, max_splits, gpu, input_bytes)


@cache
def fp8_rule(
    tile: int,
    num_tiles: int,
    streams: bool,
    num_out: int,
    num_in: int,
    max_block: int,
    grouped: bool,
    max_splits: int,
    gpu: Chip,
    input_bytes: int,
) -> TritonPlan:
    """The plan of FP8 weights where nothing is measured, for `num_tiles` tiles of rows.

    streams: whether memory binds.
    """
    # For few rows that are rounded, steps of 256 columns are 3 to 5% faster than steps of 128 (docs/log.md).  Scales of
    # groups are not measured.
    is_few = streams and tile == MIN_BLOCK_ROWS and input_bytes == 1 and not grouped
    block_in = min(max_block, 256 if is_few and (num_in % 256 == 0 or num_in >= RAGGED_IN) else 128)
    # Scales of groups multiply the sums of a tile at every step: a small tile keeps both in registers.
    block_out, warps = (64, 4) if streams or grouped else (128, 8)
    programs, sharing, most = num_tiles * -(-num_out // block_out), 1, 4
    # Of few rows, two or three programs share a multiprocessor: whichever number leaves fewer places empty.
    together = [PROGRAMS_PER_PROCESSOR if streams else WARPS_PER_PROCESSOR // warps]
    if is_few:
        together.append(PROGRAMS_PER_PROCESSOR + 1)
    most_splits = min(max_splits, num_in // block_in // LEAST_STEPS)
    found = [max(min(count * gpu.processors // programs, most_splits), 1) for count in together]
    splits = max(found, key=lambda splits: _fill(programs * splits, gpu))
    if streams:
        # All programs at once, if registers allow: a second wave would be mostly empty.
        sharing = min(-(-programs * splits // gpu.processors), 3 if grouped and tile > MIN_BLOCK_ROWS else 4)
        most = MAX_STAGES
    plan = TritonPlan(block_out, block_in, splits, warps, 1)
    shared = gpu.shared_memory_of(sharing)
    # Where products bind, one program with deep stages is faster than two on a multiprocessor.
    return replace(plan, stages=max(min(shared // (block_in * (block_out + tile * input_bytes)), most), 1))


def _fill(programs: int, gpu: Chip) -> float:
    """The share of multiprocessors' places for programs that `programs` programs take."""
    return programs / (-(-programs // gpu.processors) * gpu.processors)


@cache
def nibble_rule(
    tile: int, num_tiles: int, num_out: int, num_in: int, code: str, max_splits: int, gpu: Chip
) -> TritonPlan:
    """The plan of 4-bit weights where nothing is measured, for `num_tiles` tiles of rows."""
    tiles = NIBBLE_TILES[code]
    (block_out, most, warps), together = next((shape, count) for rows, shape, count in tiles if tile <= rows)
    fitting_in = (size for size in (256, 128, 64, 32) if num_in >= RAGGED_IN or num_in % size == 0)
    block_in = min(next(fitting_in, 32), most)
    programs = num_tiles * -(-num_out // block_out)
    aim = min(PROGRAMS_PER_PROCESSOR, together) * gpu.processors
    splits = max(min(aim // programs, max_splits, num_in // block_in // 4), 1)
    # All programs at once if that many can share a multiprocessor: a second wave would be mostly empty.
    sharing = min(-(-programs * splits // gpu.processors), together)
    shared = gpu.shared_memory_of(sharing)
    plan = TritonPlan(block_out, block_in, splits, warps, 1)
    # One stage less for the codes: the step that runs has them in registers.
    codes, inputs = codes_bytes(plan, code), tile * plan.block_in * 2
    return replace(plan, stages=max(min((shared + codes) // (codes + inputs), MAX_STAGES), 2))


def stage_bytes(plan: TritonPlan, tile: int, weight: QuantisedMatrix) -> int:
    """Bytes of shared memory of a pipeline stage, with `tile` rows of inputs."""
    return codes_bytes(plan, weight.code) + tile * plan.block_in * (1 if weight.inputs is not None else 2)


def codes_bytes(plan: TritonPlan, code: str) -> int:
    """With the exponents of MXFP4, which are loaded with them."""
    values = plan.block_out * plan.block_in
    return values if code == "fp8" else values // 2 + (values // 32 if code == "mxfp4" else 0)


def require_supported(weight: QuantisedMatrix, dtype: torch.dtype) -> None:
    """Raises EspalierError if the weight is on a GPU that no kernel for it runs on."""
    if not weight.codes.is_cuda:
        return
    if weight.code != "fp8" and _in_no_words(weight):
        raise EspalierError(
            f"on a GPU, 4-bit weights need columns, and columns of a group, in multiples of {INTERLEAVED}, but this "
            f"matrix has {weight.shape[-1]} in groups of {weight.group}; use another copy of the model"
        )
    if weight.code == "mxfp4" and weight.scales.numel() and (largest := int(weight.scales.max())) > MAX_EXPONENT:
        raise EspalierError(
            f"a scale is 2^{largest - E8M0_BIAS}, but on a GPU those of MXFP4 may be at most 2^"
            f"{MAX_EXPONENT - E8M0_BIAS}; if no value is so large, the file is corrupt: download it again"
        )
    if weight.code == "fp8" and chip(weight.codes).capability < FP8_CAPABILITY:
        raise EspalierError(
            "FP8 weights need a GPU of compute capability 8.9 or newer (Ada, Hopper); use a 4-bit or bfloat16 copy of "
            "the model"
        )
    if dtype not in (DTYPES if weight.code != "mxfp4" else (torch.bfloat16,)):
        raise EspalierError(f"{weight.code} weights need dtype=bfloat16 on a GPU, not {dtype}; pass dtype=bfloat16")


def _in_no_words(weight: QuantisedMatrix) -> bool:
    """Whether the kernels cannot take the nibbles: a word has columns of two groups, or is not interleaved."""
    return min(weight.group, weight.shape[-1]) % INTERLEAVED != 0 or weight.shape[-1] % INTERLEAVED != 0


def _require(x: Rows, weight: QuantisedMatrix, bias: Tensor | None, plan: TritonPlan) -> None:
    num_in = stored(x).shape[1]
    packed = num_in if weight.code == "fp8" else num_in // 2
    require("quantised linear: codes", weight.codes, (-1, packed), None, stored(x))
    if bias is not None:
        require("quantised linear: bias", bias, (weight.shape[0],), x.dtype, weight.codes)
    fits = all(tensor.is_contiguous() for tensor in weight.tensors) and max_block_in(weight) % plan.block_in == 0
    if x.dtype not in DTYPES or not fits or (weight.code != "fp8" and _in_no_words(weight)):
        raise EspalierError(
            f"quantised linear: the Triton kernel takes bfloat16 or float16, contiguous weights, blocks that divide "
            f"{max_block_in(weight)} columns and, for 4 bits, groups of whole words, but got {x.dtype}, groups of "
            f"{weight.group} of {num_in} columns and {plan}: use the reference"
        )
