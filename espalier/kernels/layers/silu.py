"""silu(gate) · up, the activation of a gated MLP (arXiv:2002.05202).

Grid: (rows, blocks of BLOCK columns).  Computed in float32 (float64 for float64).
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from espalier.kernels.ops.activation import require_gated
from espalier.kernels.runtime.jit import kernel
from espalier.kernels.runtime.launch import chip, exact_type, require
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger_and_wait

BLOCK = 1024


@kernel
def silu_times(gate, up):
    """silu(gate) · up, in the dtype of the arguments; also the epilogue of kernels/layers/linear.py."""
    return gate / (1.0 + tl.exp(-gate)) * up


@kernel
def _silu_mul_kernel(
    x_ptr, out_ptr, x_row_stride, size, EXACT: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):
    pdl_trigger_and_wait(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    gate = tl.load(x_ptr + row * x_row_stride + column, mask=mask, other=0.0).to(EXACT)
    up = tl.load(x_ptr + row * x_row_stride + size + column, mask=mask, other=0.0).to(EXACT)
    tl.store(out_ptr + row * size + column, silu_times(gate, up).to(out_ptr.dtype.element_ty), mask=mask)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Rounds once, at the end.  PyTorch, and so transformers in bfloat16, also rounds silu(gate).

    Tolerance: that extra rounding changes a result by 1 ulp of the dtype, or 2 at a tie.  Raises EspalierError for an
    odd number of columns.
    """
    require("silu_mul: gate_up", gate_up, (-1, -1), None, gate_up)
    rows, size = gate_up.shape[0], require_gated(gate_up.shape[1]) // 2
    gate_up = gate_up if gate_up.stride(1) == 1 else gate_up.contiguous()
    out = torch.empty(rows, size, dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        grid = (rows, -(-size // BLOCK))
        _silu_mul_kernel[grid](
            gate_up, out, gate_up.stride(0), size,
            EXACT=exact_type(gate_up.dtype), BLOCK=BLOCK, num_warps=4, **pdl_arguments(chip(gate_up)),
        )  # fmt: skip
    return out
