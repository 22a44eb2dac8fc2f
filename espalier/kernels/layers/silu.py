"""The gate of a gated feed-forward block: silu(gate) · up (arXiv:2002.05202)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.runtime.launch import chip, exact_type, kernel, require
from espalier.kernels.runtime.pdl import early, pdl_wait_if

if TYPE_CHECKING:
    import triton.language as tl

BLOCK = 1024


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [N, 2·I], gate first -> silu(gate) · up [N, I]."""
    return silu_mul_triton(gate_up) if gate_up.is_cuda else silu_mul_reference(gate_up)


@kernel
def silu_times(gate, up):
    return gate / (1.0 + tl.exp(-gate)) * up


@kernel
def _silu_mul_kernel(x_ptr, out_ptr, x_n, size, EXACT: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    pdl_wait_if(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = at < size
    gate = tl.load(x_ptr + row * x_n + at, mask=real, other=0.0).to(EXACT)
    up = tl.load(x_ptr + row * x_n + size + at, mask=real, other=0.0).to(EXACT)
    tl.store(out_ptr + row * size + at, silu_times(gate, up).to(out_ptr.dtype.element_ty), mask=real)


def silu_mul_triton(gate_up: Tensor) -> Tensor:
    """Rounded once, where PyTorch, and so transformers in bfloat16, rounds silu(gate) as well.

    That one rounding is an ulp of the dtype, or two where it meets a tie.  Raises EspalierError for an odd width.
    """
    require("gate_up", gate_up, (-1, -1), None, gate_up)
    rows, size = gate_up.shape[0], require_gated(gate_up.shape[1]) // 2
    gate_up = gate_up if gate_up.stride(1) == 1 else gate_up.contiguous()
    out = torch.empty(rows, size, dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        grid = (rows, -(-size // BLOCK))
        _silu_mul_kernel[grid](
            gate_up, out, gate_up.stride(0), size,
            EXACT=exact_type(gate_up.dtype), BLOCK=BLOCK, num_warps=4, **early(chip(gate_up)),
        )  # fmt: skip
    return out


def require_gated(size: int) -> int:
    """size, of gate and up together.  Raises EspalierError for an odd one."""
    if size % 2:
        raise EspalierError(f"gate_up stacks gate over up and has {size} columns: it needs an even number")
    return size


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
