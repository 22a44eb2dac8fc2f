"""Commit: copies K and V rows of accepted tokens from the staging buffers to the pages.  Also writes a launch's
results.

One launch of the copy is for up to TENSORS_PER_LAUNCH tensors (such as K and V), each with all layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import triton.language as tl
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.ops.state import EMPTY_COLUMN, check_row_copies
from espalier.kernels.runtime.jit import kernel
from espalier.kernels.runtime.launch import chip, is_oversubscribed, next_power_of_2, require
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger_and_wait

MAX_BLOCK_SIZE = 2048
# Bytes that a warp copies at once: 16 per thread, the widest access.
BYTES_PER_WARP = 512
# Layers per program if one program per row and layer would oversubscribe the chip.
LAYERS_PER_PROGRAM = 4
TENSORS_PER_LAUNCH = 2


@kernel
def _copy_row(
    src_ptr, dst_ptr, layer, source, row, src_layer_stride, dst_layer_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """Copy one layer's row `source` of src to row `row` of dst.  SIZE: the values of a row."""
    for begin in tl.static_range(0, SIZE, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        value = tl.load(src_ptr + layer * src_layer_stride + source * SIZE + at, mask=at < SIZE)
        tl.store(dst_ptr + layer * dst_layer_stride + row * SIZE + at, value, mask=at < SIZE)


@kernel
def _commit_kernel(
    staged, committed, source_ptr, row_ptr, staged_layer_strides, committed_layer_strides, layers,
    NUM_TENSORS: tl.constexpr, NUM_LAYERS: tl.constexpr, SIZES: tl.constexpr, BLOCKS: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """Each program copies one row in NUM_LAYERS layers.  Arguments with one entry per tensor: staged, committed, the
    strides."""
    pdl_trigger_and_wait(USE_PDL)
    row_number, first_layer = tl.program_id(0), tl.program_id(1).to(tl.int64) * NUM_LAYERS
    source, row = tl.load(source_ptr + row_number), tl.load(row_ptr + row_number)
    if row != 0:
        for layer in range(first_layer, tl.minimum(first_layer + NUM_LAYERS, layers)):
            for i in tl.static_range(NUM_TENSORS):
                _copy_row(
                    staged[i], committed[i], layer, source, row, staged_layer_strides[i], committed_layer_strides[i],
                    SIZES[i], BLOCKS[i],
                )  # fmt: skip


def commit_rows(
    staged: Sequence[Tensor], committed: Sequence[Tensor], source_rows: Tensor, destination_rows: Tensor
) -> None:
    """Runs ops/state.py:commit_rows on a GPU.  The kernel copies bytes, so the result equals the reference's."""
    staged, committed = check_row_copies(staged, committed, source_rows, destination_rows)
    if not source_rows.shape[0]:
        return
    # Layers may have any order in memory, but the values of one row must be contiguous.
    for i, buffer in enumerate((*staged, *committed)):
        if buffer.stride()[1:] != (buffer.shape[2] * buffer.shape[3], buffer.shape[3], 1):
            raise EspalierError(
                f"commit needs rows of tensor {i % len(staged)} that are contiguous, and their strides are "
                f"{buffer.stride()}"
            )
    for first in range(0, len(staged), TENSORS_PER_LAUNCH):
        tensors = slice(first, first + TENSORS_PER_LAUNCH)
        _launch_commit(staged[tensors], committed[tensors], source_rows.contiguous(), destination_rows.contiguous())


def _launch_commit(
    staged: Sequence[Tensor], committed: Sequence[Tensor], source_rows: Tensor, destination_rows: Tensor
) -> None:
    """staged, committed: tensors [layers, rows, heads, size].  source_rows, destination_rows: [N]."""
    sizes = tuple(buffer.shape[2] * buffer.shape[3] for buffer in committed)
    blocks = tuple(min(next_power_of_2(size), MAX_BLOCK_SIZE) for size in sizes)
    count, layers = source_rows.shape[0], committed[0].shape[0]
    layers_per_program = LAYERS_PER_PROGRAM if is_oversubscribed(count * layers, chip(source_rows)) else 1
    _commit_kernel[(count, -(-layers // layers_per_program))](
        *(tuple(staged), tuple(committed), source_rows, destination_rows),
        *(tuple(buffer.stride(0) for buffer in tensors) for tensors in (staged, committed)),
        layers, NUM_TENSORS=len(staged), NUM_LAYERS=layers_per_program, SIZES=sizes, BLOCKS=blocks,
        num_warps=min(max(min(blocks) * committed[0].element_size() // BYTES_PER_WARP, 1), 4),
        **pdl_arguments(chip(source_rows)),
    )  # fmt: skip


def write_results(ring: Tensor, entry_index: Tensor, fields_by_column: Mapping[int, Tensor]) -> None:
    """The launcher of ops/state.py:write_results.  ring: [entries, rows, width].  entry_index: [1]."""
    _, rows, width = ring.shape
    batch = next(iter(fields_by_column.values())).shape[0]
    require("write_results: ring", ring, (-1, -1, -1), torch.int64, ring)
    require("write_results: entry", entry_index, (1,), torch.int64, ring)
    for start, field in fields_by_column.items():
        dtype = torch.float32 if field.dtype == torch.float32 else torch.int64
        require(f"write_results: the field of column {start}", field, (batch, -1), dtype, ring)
    ends = [start + field.shape[1] for start, field in fields_by_column.items()]
    if max(ends) > width or batch > rows:
        raise EspalierError(
            f"write_results: fields of {batch} rows up to column {max(ends)} need a ring that holds them, and it is "
            f"{list(ring.shape)}: take both from one layout"
        )
    if ring.stride(2) != 1:
        raise EspalierError(f"write_results: the ring's columns have stride {ring.stride(2)}, not 1")
    if batch:
        block = next_power_of_2(width)
        _write_results_kernel[(batch,)](
            *(ring, entry_index, *ring.stride()[:2], width),
            tuple(field.contiguous() for field in fields_by_column.values()),
            NUM_FIELDS=len(fields_by_column), FIRST_COLUMNS=tuple(fields_by_column), END_COLUMNS=tuple(ends),
            EMPTY_VALUE=EMPTY_COLUMN, BLOCK=block, num_warps=min(max(block // 128, 1), 8), **pdl_arguments(chip(ring)),
        )  # fmt: skip


@kernel
def _replace_columns(row, column, batch_index, field_ptr, FIRST_COLUMN: tl.constexpr, END_COLUMN: tl.constexpr):
    """Returns `row` with columns FIRST_COLUMN to END_COLUMN - 1 replaced by the field."""
    inside = (column >= FIRST_COLUMN) & (column < END_COLUMN)
    field = tl.load(field_ptr + batch_index * (END_COLUMN - FIRST_COLUMN) + column - FIRST_COLUMN, mask=inside, other=0)
    if field_ptr.dtype.element_ty == tl.float32:
        field = field.to(tl.int32, bitcast=True)
    return tl.where(inside, field.to(tl.int64), row)


@kernel
def _write_results_kernel(
    ring_ptr, entry_ptr, entry_stride, row_stride, width, fields,
    NUM_FIELDS: tl.constexpr, FIRST_COLUMNS: tl.constexpr, END_COLUMNS: tl.constexpr, EMPTY_VALUE: tl.constexpr,
    BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Write one row of the ring entry per program.  Field i fills columns FIRST_COLUMNS[i] to END_COLUMNS[i] - 1; other
    columns become EMPTY_VALUE."""
    pdl_trigger_and_wait(USE_PDL)
    b = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    row = tl.full([BLOCK], EMPTY_VALUE, tl.int64)
    for i in tl.static_range(NUM_FIELDS):
        row = _replace_columns(row, column, b, fields[i], FIRST_COLUMNS[i], END_COLUMNS[i])
    row_ptr = ring_ptr + tl.load(entry_ptr) * entry_stride + b * row_stride
    tl.store(row_ptr + column, row, mask=column < width)
