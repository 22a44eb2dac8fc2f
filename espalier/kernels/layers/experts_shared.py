"""Shared experts as tiles of the expert product: every row takes them, so they need no routing.

A shared MLP whose width is S times that of a routed expert is cut into S pieces of that width.  A piece is one more
tile of both launches of experts.py, for up to MAX_SHARED_ROWS rows.  So the shared MLP needs no launches of its own.
Its tiles come first: before the routing is complete they prefetch weights, because their addresses are known.

More rows fill the chip anyway, and a dense product reads a weight once for all of them: the caller runs it apart.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.layers.experts_tiles import expert_of_tile, pairs_of_tile
from espalier.kernels.ops.experts import MAX_SHARED_ROWS, SharedExperts
from espalier.kernels.runtime.jit import kernel
from espalier.kernels.runtime.launch import require
from espalier.kernels.runtime.pdl import prefetch

# Steps of its loop whose weights a tile prefetches.  More would take bandwidth from the kernels before.
PREFETCHED_STEPS = 1


def require_shared(shared: SharedExperts, x: Tensor, inner: int, is_plain: bool) -> None:
    """is_plain: whether the routed experts are dense, without biases, and their activation is silu.

    Raises EspalierError for other routed experts, shapes or dtypes, and for more than MAX_SHARED_ROWS rows.
    """
    (num_rows, hidden), wide = x.shape, shared.down.shape[1]
    require("grouped_experts: shared gate_up", shared.gate_up, (2 * wide, hidden), x.dtype, x)
    require("grouped_experts: shared down", shared.down, (hidden, wide), x.dtype, x)
    is_contiguous = shared.gate_up.is_contiguous() and shared.down.is_contiguous()
    if not is_plain or not is_contiguous or wide % inner or num_rows > MAX_SHARED_ROWS:
        raise EspalierError(
            f"grouped_experts: shared experts run beside dense ones without biases, with silu, if they are contiguous, "
            f"a whole number times {inner} wide, and taken by at most {MAX_SHARED_ROWS} rows, but got a width of "
            f"{wide}, strides {shared.down.stride()} and {num_rows} rows: run them as an MLP of their own"
        )


@kernel
def tile_and_expert(
    experts_ptr, live_ptr, top_k, num_experts, SHARED: tl.constexpr, SORTED: tl.constexpr, LIVE: tl.constexpr
):  # fmt: skip
    """(tile, expert) of this program: expert_of_tile for a tile of pairs; tile < 0 and expert 0 for a shared piece.

    SHARED: the number of pieces.
    """
    tile = tl.program_id(1) - SHARED
    expert = expert_of_tile(experts_ptr, live_ptr, tl.maximum(tile, 0), top_k, num_experts, SORTED, LIVE)
    if SHARED > 0:
        expert = tl.where(tile < 0, 0, expert)
    return tile, expert


@kernel
def rows_of_tile(
    order_ptr, ends_ptr, begins_ptr, tile, expert, num_rows, top_k,
    SHARED: tl.constexpr, SORTED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """(place, inside, row, part), each [ROWS]: the places of a tile, whether they exist, their rows and parts of out.

    The places of a piece follow those of the pairs, row by row; its part follows the top_k parts of the pairs.
    """
    if SHARED == 0:
        place, inside, pair = pairs_of_tile(order_ptr, ends_ptr, begins_ptr, tile, expert, SORTED, ROWS)
        row, part = pair // top_k, pair % top_k
    else:
        if tile < 0:
            row = tl.arange(0, ROWS)
            part = tl.zeros((ROWS,), tl.int32) + top_k + tile + SHARED
            place, inside = part * num_rows + row, row < num_rows
        else:
            place, inside, pair = pairs_of_tile(order_ptr, ends_ptr, begins_ptr, tile, expert, SORTED, ROWS)
            row, part = pair // top_k, pair % top_k
    return place, inside, row, part


@kernel
def prefetch_piece(
    w_ptr, column, num_out, num_in, SHARED: tl.constexpr, BLOCK_OUT: tl.constexpr, AHEAD: tl.constexpr
):  # fmt: skip
    """For a program of a piece: prefetch the first AHEAD columns of its rows of gate and up."""
    piece = tl.program_id(1)
    if piece < SHARED:
        w_row = piece.to(tl.int64) * num_out + tl.minimum(column, num_out - 1)
        # An L2 line of 128 bytes holds 64 numbers of two bytes: one prefetch each.
        line = tl.minimum(tl.arange(0, AHEAD // 64) * 64, num_in - 1)
        gate_ptrs = w_ptr + w_row[:, None] * num_in + line[None, :]
        prefetch(gate_ptrs)
        prefetch(gate_ptrs + num_out.to(tl.int64) * SHARED * num_in)
