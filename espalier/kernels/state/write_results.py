"""Write a launch's results to one entry of a ring: a row per request, with all fields side by side as int64."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton.language as tl
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.ops.state import EMPTY
from espalier.kernels.runtime.jit import kernel
from espalier.kernels.runtime.launch import chip, power_of_two, require
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger_and_wait

MOST_FIELDS = 8


def write_results(ring: Tensor, entry: Tensor, fields: Mapping[int, Tensor]) -> None:
    _, rows, width = ring.shape
    batch = next(iter(fields.values())).shape[0]
    require("write_results: ring", ring, (-1, -1, -1), torch.int64, ring)
    require("write_results: entry", entry, (1,), torch.int64, ring)
    for start, field in fields.items():
        dtype = torch.float32 if field.dtype == torch.float32 else torch.int64
        require(f"write_results: the field of column {start}", field, (batch, -1), dtype, ring)
    ends = [start + field.shape[1] for start, field in fields.items()]
    if len(fields) > MOST_FIELDS or max(ends) > width or batch > rows:
        raise EspalierError(
            f"write_results: {len(fields)} fields of {batch} rows up to column {max(ends)} need a ring that holds "
            f"them, {MOST_FIELDS} fields at most, and it is {list(ring.shape)}: take both from one layout"
        )
    if ring.stride(2) != 1:
        raise EspalierError(f"write_results: the ring's columns have stride {ring.stride(2)}, not 1")
    if batch:
        missing = MOST_FIELDS - len(fields)
        block = power_of_two(width)
        _write_results_kernel[(batch,)](
            *(ring, entry, *ring.stride()[:2], width),
            *(*(field.contiguous() for field in fields.values()), *[None] * missing),
            **{f"START_{i}": start for i, start in enumerate([*fields, *[0] * missing])},
            **{f"END_{i}": end for i, end in enumerate([*ends, *[0] * missing])},
            NOTHING=EMPTY,
            BLOCK=block,
            num_warps=min(max(block // 128, 1), 8),
            **pdl_arguments(chip(ring)),
        )


@kernel
def _with_field(value, at, b, field_ptr, START: tl.constexpr, END: tl.constexpr):
    """The row `value` with columns START to END - 1 replaced by the field; unchanged if field_ptr is None."""
    if field_ptr is not None:
        inside = (at >= START) & (at < END)
        field = tl.load(field_ptr + b * (END - START) + at - START, mask=inside, other=0)
        if field_ptr.dtype.element_ty == tl.float32:
            field = field.to(tl.int32, bitcast=True)
        value = tl.where(inside, field.to(tl.int64), value)
    return value


@kernel
def _write_results_kernel(
    ring_ptr, entry_ptr, entry_stride, row_stride, width,
    field_0, field_1, field_2, field_3, field_4, field_5, field_6, field_7,
    START_0: tl.constexpr, START_1: tl.constexpr, START_2: tl.constexpr, START_3: tl.constexpr,
    START_4: tl.constexpr, START_5: tl.constexpr, START_6: tl.constexpr, START_7: tl.constexpr,
    END_0: tl.constexpr, END_1: tl.constexpr, END_2: tl.constexpr, END_3: tl.constexpr,
    END_4: tl.constexpr, END_5: tl.constexpr, END_6: tl.constexpr, END_7: tl.constexpr,
    NOTHING: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program per row."""
    pdl_trigger_and_wait(DEPENDENT)
    b = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    value = tl.full([BLOCK], NOTHING, tl.int64)
    value = _with_field(value, at, b, field_0, START_0, END_0)
    value = _with_field(value, at, b, field_1, START_1, END_1)
    value = _with_field(value, at, b, field_2, START_2, END_2)
    value = _with_field(value, at, b, field_3, START_3, END_3)
    value = _with_field(value, at, b, field_4, START_4, END_4)
    value = _with_field(value, at, b, field_5, START_5, END_5)
    value = _with_field(value, at, b, field_6, START_6, END_6)
    value = _with_field(value, at, b, field_7, START_7, END_7)
    row_ptr = ring_ptr + tl.load(entry_ptr) * entry_stride + b * row_stride
    tl.store(row_ptr + at, value, mask=at < width)
