"""Gather a request's rows by index: for example hidden states of all nodes at the nodes of the accepted path.

Grid: (output rows, blocks of up to MAX_BLOCK columns, parts).
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.runtime.jit import kernel
from espalier.kernels.runtime.launch import chip, power_of_two, require
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger_and_wait

MAX_BLOCK = 2048


def gather_rows(rows: Tensor, *parts: Tensor) -> Tensor:
    batch, width = rows.shape
    values = parts[0]
    size, strides = values.shape[2], values.stride()
    for part in parts:
        require("gather_rows: values", part, (batch, values.shape[1], size), values.dtype, values)
    require("gather_rows: rows", rows, (batch, width), torch.int64, values)
    if strides[2] != 1 or any(part.stride() != strides for part in parts):
        raise EspalierError("gather_rows: parts must have the same strides, and be contiguous in the last dimension")
    out = values.new_empty(batch, width, len(parts) * size)
    if out.numel():
        block = min(power_of_two(size), MAX_BLOCK)
        _gather_rows_kernel[(batch * width, -(-size // block), len(parts))](
            *(parts, rows, out, width, size, *strides[:2], *rows.stride()),
            PARTS=len(parts),
            BLOCK=block,
            num_warps=4,
            **pdl_arguments(chip(values)),
        )
    return out


@kernel
def _gather_rows_kernel(
    parts, rows_ptr, out_ptr, width, size, values_b, values_r, rows_b, rows_w,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    pdl_trigger_and_wait(DEPENDENT)
    out_row = tl.program_id(0).to(tl.int64)
    b = out_row // width
    row = tl.load(rows_ptr + b * rows_b + out_row % width * rows_w)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = b * values_b + row * values_r + column
    for part in tl.static_range(PARTS):
        if tl.program_id(2) == part:
            value = tl.load(parts[part] + at, mask=column < size, other=0.0)
            tl.store(out_ptr + (out_row * PARTS + part) * size + column, value, mask=column < size)
