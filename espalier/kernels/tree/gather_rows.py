"""Gather a request's rows by index: for example hidden states of all nodes at the nodes of the accepted path.

Grid: (output rows, blocks of up to MAX_BLOCK columns).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.runtime.launch import chip, kernel, power_of_two, require
from espalier.kernels.runtime.pdl import early, pdl_wait_if

if TYPE_CHECKING:
    import triton.language as tl

MAX_BLOCK = 2048


def gather_rows(values: Tensor, rows: Tensor) -> Tensor:
    """out[b, w] = values[b, rows[b, w]]: values [B, D, n], rows [B, W] int64 -> [B, W, n].  Exact."""
    return (gather_rows_triton if values.is_cuda else gather_rows_reference)(values, rows)


def gather_rows_triton(values: Tensor, rows: Tensor) -> Tensor:
    batch, width = rows.shape
    size = values.shape[2]
    require("gather_rows: values", values, (batch, -1, size), None, values)
    require("gather_rows: rows", rows, (batch, width), torch.int64, values)
    if values.stride(2) != 1:
        raise EspalierError("gather_rows: values must be contiguous in the last dimension")
    out = values.new_empty(batch, width, size)
    if out.numel():
        block = min(power_of_two(size), MAX_BLOCK)
        _gather_rows_kernel[(batch * width, -(-size // block))](
            *(values, rows, out, width, size, *values.stride()[:2], *rows.stride()),
            BLOCK=block,
            num_warps=4,
            **early(chip(values)),
        )
    return out


def gather_rows_reference(values: Tensor, rows: Tensor) -> Tensor:
    return values.gather(1, rows[..., None].expand(-1, -1, values.shape[2]))


@kernel
def _gather_rows_kernel(
    values_ptr, rows_ptr, out_ptr, width, size, values_b, values_r, rows_b, rows_w,
    BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    pdl_wait_if(DEPENDENT)
    out_row = tl.program_id(0).to(tl.int64)
    b = out_row // width
    row = tl.load(rows_ptr + b * rows_b + out_row % width * rows_w)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(values_ptr + b * values_b + row * values_r + column, mask=column < size, other=0.0)
    tl.store(out_ptr + out_row * size + column, value, mask=column < size)
