"""Commit: copies the rows of accepted tokens from staging to the pages.

One launch copies all layers of a group, and up to two stacked planes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import triton.language as tl
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.ops.state import EMPTY_COLUMN, check_copies
from espalier.kernels.runtime.jit import kernel
from espalier.kernels.runtime.launch import chip, oversubscribed, power_of_two, require
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger_and_wait

MAX_BLOCK = 2048
# Bytes that a warp copies at once: 16 per thread, the widest access.
WARP_BYTES = 512
# Layers per program, if one program per layer would be more programs than the chip can start quickly.
LAYERS_PER_PROGRAM = 4
TENSORS_PER_LAUNCH = 2


@kernel
def _copy(src_ptr, dst_ptr, layer, source, row, src_layer, dst_layer, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    for begin in tl.static_range(0, SIZE, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        value = tl.load(src_ptr + layer * src_layer + source * SIZE + at, mask=at < SIZE)
        tl.store(dst_ptr + layer * dst_layer + row * SIZE + at, value, mask=at < SIZE)


@kernel
def _commit_kernel(
    src_0_ptr, src_1_ptr, dst_0_ptr, dst_1_ptr, source_ptr, row_ptr,
    src_0_layer, src_1_layer, dst_0_layer, dst_1_layer, layers,
    LAYERS: tl.constexpr, SIZE_0: tl.constexpr, SIZE_1: tl.constexpr, BLOCK_0: tl.constexpr, BLOCK_1: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Copy LAYERS layers of one row per program.  src_1_ptr is None if there is no second tensor."""
    pdl_trigger_and_wait(DEPENDENT)
    n, first = tl.program_id(0), tl.program_id(1).to(tl.int64) * LAYERS
    source, row = tl.load(source_ptr + n), tl.load(row_ptr + n)
    if row != 0:
        for layer in range(first, tl.minimum(first + LAYERS, layers)):
            _copy(src_0_ptr, dst_0_ptr, layer, source, row, src_0_layer, dst_0_layer, SIZE_0, BLOCK_0)
            if src_1_ptr is not None:
                _copy(src_1_ptr, dst_1_ptr, layer, source, row, src_1_layer, dst_1_layer, SIZE_1, BLOCK_1)


def commit_rows(staged: Sequence[Tensor], committed: Sequence[Tensor], source: Tensor, rows: Tensor) -> None:
    """See ops/state.py.  The kernel copies bytes, so the result equals the reference's."""
    staged, committed = check_copies(staged, committed, source, rows)
    if not source.shape[0]:
        return
    # Layers may have any order in memory, but the values of one row must be contiguous.
    for i, buffer in enumerate((*staged, *committed)):
        if buffer.stride()[1:] != (buffer.shape[2] * buffer.shape[3], buffer.shape[3], 1):
            raise EspalierError(
                f"commit needs rows of tensor {i % len(staged)} that are contiguous, and their strides are "
                f"{buffer.stride()}"
            )
    for first in range(0, len(staged), TENSORS_PER_LAUNCH):
        some = slice(first, first + TENSORS_PER_LAUNCH)
        _launch(staged[some], committed[some], source.contiguous(), rows.contiguous())


def _launch(staged: Sequence[Tensor], committed: Sequence[Tensor], source: Tensor, rows: Tensor) -> None:
    missing = TENSORS_PER_LAUNCH - len(staged)
    sizes = [buffer.shape[2] * buffer.shape[3] for buffer in committed]
    blocks = [min(power_of_two(size), MAX_BLOCK) for size in sizes]
    count, layers = source.shape[0], committed[0].shape[0]
    layers_per_program = LAYERS_PER_PROGRAM if oversubscribed(count * layers, chip(source)) else 1
    _commit_kernel[(count, -(-layers // layers_per_program))](
        *(*staged, *[None] * missing),
        *(*committed, *[None] * missing),
        source,
        rows,
        *(*(buffer.stride(0) for buffer in staged), *[0] * missing),
        *(*(buffer.stride(0) for buffer in committed), *[0] * missing),
        layers,
        LAYERS=layers_per_program,
        **{f"SIZE_{i}": size for i, size in enumerate([*sizes, *[0] * missing])},
        **{f"BLOCK_{i}": block for i, block in enumerate([*blocks, *[0] * missing])},
        num_warps=min(max(min(blocks) * committed[0].element_size() // WARP_BYTES, 1), 4),
        **pdl_arguments(chip(source)),
    )


MAX_FIELDS = 10


def write_results(ring: Tensor, entry: Tensor, fields: Mapping[int, Tensor]) -> None:
    _, rows, width = ring.shape
    batch = next(iter(fields.values())).shape[0]
    require("write_results: ring", ring, (-1, -1, -1), torch.int64, ring)
    require("write_results: entry", entry, (1,), torch.int64, ring)
    for start, field in fields.items():
        dtype = torch.float32 if field.dtype == torch.float32 else torch.int64
        require(f"write_results: the field of column {start}", field, (batch, -1), dtype, ring)
    ends = [start + field.shape[1] for start, field in fields.items()]
    if len(fields) > MAX_FIELDS or max(ends) > width or batch > rows:
        raise EspalierError(
            f"write_results: {len(fields)} fields of {batch} rows up to column {max(ends)} need a ring that holds "
            f"them, {MAX_FIELDS} fields at most, and it is {list(ring.shape)}: take both from one layout"
        )
    if ring.stride(2) != 1:
        raise EspalierError(f"write_results: the ring's columns have stride {ring.stride(2)}, not 1")
    if batch:
        missing = MAX_FIELDS - len(fields)
        block = power_of_two(width)
        _write_results_kernel[(batch,)](
            *(ring, entry, *ring.stride()[:2], width),
            *(*(field.contiguous() for field in fields.values()), *[None] * missing),
            **{f"START_{i}": start for i, start in enumerate([*fields, *[0] * missing])},
            **{f"END_{i}": end for i, end in enumerate([*ends, *[0] * missing])},
            NOTHING=EMPTY_COLUMN,
            BLOCK=block,
            num_warps=min(max(block // 128, 1), 8),
            **pdl_arguments(chip(ring)),
        )


@kernel
def _with_field(value, at, b, field_ptr, START: tl.constexpr, END: tl.constexpr):
    """Return the row `value` with columns START to END - 1 replaced by the field; unchanged if field_ptr is None."""
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
    field_0, field_1, field_2, field_3, field_4, field_5, field_6, field_7, field_8,
    field_9,
    START_0: tl.constexpr, START_1: tl.constexpr, START_2: tl.constexpr, START_3: tl.constexpr,
    START_4: tl.constexpr, START_5: tl.constexpr, START_6: tl.constexpr, START_7: tl.constexpr,
    START_8: tl.constexpr, START_9: tl.constexpr,
    END_0: tl.constexpr, END_1: tl.constexpr, END_2: tl.constexpr, END_3: tl.constexpr,
    END_4: tl.constexpr, END_5: tl.constexpr, END_6: tl.constexpr, END_7: tl.constexpr,
    END_8: tl.constexpr, END_9: tl.constexpr,
    NOTHING: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Write one row of the ring entry per program.  Field i fills columns START_i to END_i - 1 of the row; END_i is the
    first column after the field.  Other columns become NOTHING."""
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
    value = _with_field(value, at, b, field_8, START_8, END_8)
    value = _with_field(value, at, b, field_9, START_9, END_9)
    row_ptr = ring_ptr + tl.load(entry_ptr) * entry_stride + b * row_stride
    tl.store(row_ptr + at, value, mask=at < width)
