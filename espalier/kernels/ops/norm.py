"""RMS norm (arXiv:1910.07467), alone or fused with residual additions, rounding or a router's product."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from espalier.kernels.layers.linear_plans import DTYPES
from espalier.kernels.layers.quantised import InputRows, InputScales, RoundedRows, quantise_inputs
from espalier.kernels.ops.linear import add_partial_sums
from espalier.kernels.runtime.launch import next_power_of_2
from espalier.kernels.runtime.op import op

# The most rows that the kernel of norm_router takes.
MAX_ROUTER_ROWS = 4


def supports_norm_router(residual: Tensor) -> bool:
    """Returns whether the kernel of norm_router supports the device, dtype and number of rows of `residual`."""
    return residual.is_cuda and residual.dtype in DTYPES and 0 < len(residual) <= MAX_ROUTER_ROWS


def can_round_norm(num_columns: int, input_scales: InputScales) -> bool:
    """Returns whether the launch of a norm of `num_columns` columns can also round the result to FP8."""
    group = input_scales.columns(num_columns)
    return group == num_columns or next_power_of_2(group) == group


def rms_norm_by_length_constants(weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns (weight · sqrt(H), sqrt(H · eps)): the arguments scaled_weight and min_length of rms_norm_by_length.
    weight: [H]."""
    size = weight.numel()
    return weight * size**0.5, weight.new_full((), (size * eps) ** 0.5)


def rms_norm_by_length(x: Tensor, scaled_weight: Tensor, min_length: Tensor) -> Tensor:
    """Returns the RMS norm of x [..., H], computed from the length (L2 norm) of x.

    scaled_weight, min_length: from rms_norm_by_length_constants.  sqrt(sum(x²) + H · eps) is hypot(length, min_length),
    so this takes 4 operations of PyTorch; F.rms_norm takes 9."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return (x / torch.hypot(length, min_length)).mul_(scaled_weight)


@op("espalier.kernels.layers.norm")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns x / sqrt(mean(x²) + eps) · weight over the last dimension of x [..., H], in x's dtype."""
    wide_dtype = torch.promote_types(x.dtype, torch.float32)
    if x.dtype == weight.dtype == wide_dtype:
        return rms_norm_by_length(x, *rms_norm_by_length_constants(weight, eps))
    return rms_norm_by_length(x.to(wide_dtype), *rms_norm_by_length_constants(weight.to(wide_dtype), eps)).to(x.dtype)


@op("espalier.kernels.layers.norm", tensor="residual")
def add_rms_norm(delta: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns (sum, norm) with sum = residual + delta and norm = rms_norm(sum), each [N, H] in residual's dtype.

    delta: [N, H] in residual's dtype, or partial sums [splits, N, H] in float32 (float64 for float64), as
    kernels/ops/linear.py:linear_partial_sums returns.  Partial sums are first added in order and rounded to residual's
    dtype.  The norm is computed from `sum` after its rounding."""
    if delta.ndim == 3:
        delta = add_partial_sums.reference(delta, residual.dtype)
    total = residual + delta
    return total, rms_norm.reference(total, weight, eps)


class NormWeight(NamedTuple):
    """The parameters of an RMS norm.  weight: [H]."""

    weight: Tensor
    eps: float


# The most block_outputs, and the most next_norms, that add_normed takes.
MAX_OUTPUTS, MAX_NORMS = 2, 3


@op("espalier.kernels.layers.add_normed", tensor="residual")
def add_normed(
    block_outputs: tuple[tuple[Tensor, NormWeight], ...],
    output_norm: NormWeight | None,
    residual: Tensor,
    residual_scale: float,
    next_norms: tuple[NormWeight, ...],
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Returns (sum, norms of sum), each [N, H] in residual's dtype.

    sum = residual · residual_scale + output_norm(total of the normed block outputs).
    block_outputs: 1 to MAX_OUTPUTS pairs (output of a block, its norm).  An output has a form of `delta` in
    add_rms_norm.  output_norm: if None, the total is not normed.  next_norms: at most MAX_NORMS norms, each applied to
    `sum`.
    Every product, sum and norm is rounded to residual's dtype, as separate launches would round it."""
    dtype = residual.dtype
    normed = [rms_norm.reference(add_partial_sums.reference(output, dtype), *norm) for output, norm in block_outputs]
    added = sum(normed[1:], normed[0])
    added = added if output_norm is None else rms_norm.reference(added, *output_norm)
    total = (residual if residual_scale == 1 else residual * residual_scale) + added
    return total, tuple(rms_norm.reference(total, *norm) for norm in next_norms)


@op("espalier.kernels.layers.norm", tensor="residual")
def rounded_norm(
    delta: Tensor | None,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    input_scales: InputScales,
    return_norm: bool = False,
) -> tuple[Tensor, Tensor | None, RoundedRows]:
    """Returns (sum, norm, rounded): the results of add_rms_norm, and the norm rounded to FP8 as by quantise_rows.

    delta: [N, H] or partial sums, see add_rms_norm; None: nothing is added, and sum is `residual`.  return_norm: if
    false, norm is None.  Raises EspalierError for sizes that `can_round_norm` refuses."""
    if delta is None:
        total, out = residual, rms_norm.reference(residual, weight, eps)
    else:
        total, out = add_rms_norm.reference(delta, residual, weight, eps)
    return total, out if return_norm else None, RoundedRows(*quantise_inputs(out, input_scales), out.dtype)


@op("espalier.kernels.layers.norm", tensor="residual")
def norm_router(
    delta: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    router: Tensor,
    rounding: InputScales | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, InputRows, Tensor]:
    """Returns (sum, norm, rows, logits) for 1 to MAX_ROUTER_ROWS rows of bfloat16 or float16.

    sum, norm: the results of add_rms_norm, with the tolerance of add_rms_norm; delta may be partial sums.
    rows: the norm rounded to FP8, with the bits of quantise_rows; without `rounding`, the norm itself.
    router: [E, H], contiguous, the weight of a router or another small matrix.
    logits: norm · routerᵀ [rows, E], computed in float32 and returned in `dtype`.
    Raises EspalierError on other shapes, dtypes or strides, and for a rounding that `can_round_norm` refuses."""
    total, normed = add_rms_norm.reference(delta, residual, weight, eps)
    rows = normed if rounding is None else RoundedRows(*quantise_inputs(normed, rounding), normed.dtype)
    return total, normed, rows, F.linear(normed.float(), router.float()).to(dtype)
