"""Commit: rows that were decided leave staging for the pages, all layers of one shape in one launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.dependent import after_previous, early
from espalier.kernels.launch import chip, crowded, kernel, power_of_two, require
from espalier.layout import DUMMY_ROW

if TYPE_CHECKING:
    import triton.language as tl

LARGEST_BLOCK = 2048
# Of one warp at 16 bytes a thread, the widest access.
WARP_BYTES = 512
# Of one program, where one for each layer would crowd the chip.
LAYERS_A_PROGRAM = 4


def commit_rows(staged: tuple[Tensor, Tensor], committed: tuple[Tensor, Tensor], source: Tensor, rows: Tensor) -> None:
    """Copy rows `source` [N] of staged k and v to `rows` [N] of committed ones, [layers, rows, kv_heads, size] each.

    Rows are distinct but for row 0, the dummy's, to which nothing is copied.
    """
    for name, src, dst in zip("kv", staged, committed, strict=True):
        require(f"staged {name}", src, (dst.shape[0], -1, *dst.shape[2:]), dst.dtype, dst)
    require("commit's source", source, (-1,), torch.int64, committed[0])
    require("commit's rows", rows, tuple(source.shape), torch.int64, source)
    make = commit_rows_triton if source.is_cuda else commit_rows_reference
    make(staged, committed, source, rows)


@kernel
def _copy(src_ptr, dst_ptr, layer, source, row, src_layer, dst_layer, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    for begin in tl.static_range(0, SIZE, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        value = tl.load(src_ptr + layer * src_layer + source * SIZE + at, mask=at < SIZE)
        tl.store(dst_ptr + layer * dst_layer + row * SIZE + at, value, mask=at < SIZE)


@kernel
def _commit_kernel(
    k_src_ptr,
    v_src_ptr,
    k_dst_ptr,
    v_dst_ptr,
    source_ptr,
    row_ptr,
    k_src_layer,
    v_src_layer,
    k_dst_layer,
    v_dst_layer,
    layers,
    LAYERS: tl.constexpr,
    K_SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    after_previous(DEPENDENT)
    n, first = tl.program_id(0), tl.program_id(1).to(tl.int64) * LAYERS
    source, row = tl.load(source_ptr + n), tl.load(row_ptr + n)
    if row != 0:
        for layer in range(first, tl.minimum(first + LAYERS, layers)):
            _copy(k_src_ptr, k_dst_ptr, layer, source, row, k_src_layer, k_dst_layer, K_SIZE, K_BLOCK)
            _copy(v_src_ptr, v_dst_ptr, layer, source, row, v_src_layer, v_dst_layer, V_SIZE, V_BLOCK)


def commit_rows_triton(
    staged: tuple[Tensor, Tensor], committed: tuple[Tensor, Tensor], source: Tensor, rows: Tensor
) -> None:
    """Bytes are copied, so the result is the reference's."""
    if not source.shape[0]:
        return
    # Whatever the pages' memory order between layers, the values of one row stand together.
    for name, buffer in zip("kvkv", (*staged, *committed), strict=True):
        row = buffer.shape[2] * buffer.shape[3]
        if buffer.stride()[1:] != (row, buffer.shape[3], 1):
            raise EspalierError(
                f"commit needs rows of {name} that are contiguous, and their strides are {buffer.stride()}"
            )
    sizes = [buffer.shape[2] * buffer.shape[3] for buffer in committed]
    blocks = [min(power_of_two(size), LARGEST_BLOCK) for size in sizes]
    count, layers = source.shape[0], committed[0].shape[0]
    together = LAYERS_A_PROGRAM if crowded(count * layers, chip(source)) else 1
    _commit_kernel[(count, -(-layers // together))](
        *staged,
        *committed,
        source.contiguous(),
        rows.contiguous(),
        *(buffer.stride(0) for buffer in (*staged, *committed)),
        layers,
        LAYERS=together,
        K_SIZE=sizes[0],
        V_SIZE=sizes[1],
        K_BLOCK=blocks[0],
        V_BLOCK=blocks[1],
        num_warps=min(max(min(blocks) * committed[0].element_size() // WARP_BYTES, 1), 4),
        **early(chip(source)),
    )


def commit_rows_reference(
    staged: tuple[Tensor, Tensor], committed: tuple[Tensor, Tensor], source: Tensor, rows: Tensor
) -> None:
    for src, dst in zip(staged, committed, strict=True):
        dummy = dst[:, DUMMY_ROW].clone()
        dst.index_copy_(1, rows, src.index_select(1, source))
        dst[:, DUMMY_ROW] = dummy
