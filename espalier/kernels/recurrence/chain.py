"""The outputs and states of prompts, in chunks of CHUNK rows (Yang et al. 2024, arXiv:2406.06484).

The first kernel takes all chunks and heads at once.  It multiplies keys and queries, and inverts I + A, a lower
triangle.  The inverse of [[P, 0], [C, R]] is [[P', 0], [-R' C P', R']].  So two products turn inverses of blocks of n
rows into those of blocks of 2n rows: n = 1, 2, 4, ...  In the second kernel a program holds a part of a head's state,
and goes over the chunks in order.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from espalier.kernels.ops.recurrence import CHUNK
from espalier.kernels.ops.states import PathRows, StateColumns
from espalier.kernels.recurrence.tree import PRECISION, SMALLEST, Config
from espalier.kernels.runtime.jit import kernel
from espalier.kernels.runtime.launch import chip, exact_type, power_of_two
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger_and_wait


@kernel
def _rows_of_chunk(request, chunk, rows, count_ptr, CHUNK: tl.constexpr):
    """For each row of the chunk: (its place, whether it is in the batch row, whether it is no padding)."""
    within = chunk * CHUNK + tl.arange(0, CHUNK)
    return request * rows + within, within < rows, within < tl.load(count_ptr + request)


@kernel
def _products_kernel(
    q_ptr, k_ptr, gates_ptr, count_ptr, inverse_ptr, scores_ptr, decay_ptr, rows,
    HEADS: tl.constexpr, SHARE: tl.constexpr, K_SIZE: tl.constexpr, DELTA: tl.constexpr, EXACT: tl.constexpr,
    PRECISION: tl.constexpr, OUT_PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """For each chunk and head: the log-decay from the chunk's start to each row, the inverse times beta, and the
    queries' scores.  Rows of padding add nothing."""
    pdl_trigger_and_wait(DEPENDENT)
    head, chunk, request = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    row, is_row, exists = _rows_of_chunk(request, chunk, rows, count_ptr, CHUNK)
    order, key = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    gate = gates_ptr + row * 2 * HEADS + head
    log_decay = tl.load(gate, mask=is_row & exists, other=0.0).to(EXACT)
    decay = tl.cumsum(log_decay, 0)
    seen = order[None, :] <= order[:, None]
    carry = tl.where(seen, tl.exp(tl.where(seen, decay[:, None] - decay[None, :], 0.0)), 0.0)
    place = (row * (HEADS // SHARE) + head // SHARE)[:, None] * K_SIZE + key[None, :]
    is_key = key[None, :] < K_SIZE
    k = tl.load(k_ptr + place, mask=(is_row & exists)[:, None] & is_key, other=0.0).to(EXACT)
    q = tl.load(q_ptr + place, mask=is_row[:, None] & is_key, other=0.0).to(EXACT)
    scores = tl.dot(q, tl.trans(k), input_precision=OUT_PRECISION, out_dtype=EXACT) * carry
    of_chunk = (request * tl.num_programs(1) + chunk) * HEADS + head
    tile = of_chunk * CHUNK * CHUNK + order[:, None] * CHUNK + order[None, :]
    tl.store(scores_ptr + tile, scores)
    tl.store(decay_ptr + of_chunk * CHUNK + order, decay)
    if DELTA:
        beta = tl.load(gate + HEADS, mask=is_row & exists, other=0.0).to(EXACT)
        system = tl.dot(k, tl.trans(k), input_precision=PRECISION, out_dtype=EXACT)
        system = tl.where(order[:, None] == order[None, :], 0.0, beta[:, None] * system * carry)
        inverse = tl.where(order[:, None] == order[None, :], 1.0, 0.0).to(EXACT)
        inverse -= tl.where((order[:, None] % 2 == 1) & (order[None, :] == order[:, None] - 1), system, 0.0)
        size = 2
        while size < CHUNK:
            below = (order[:, None] // size % 2 == 1) & (order[None, :] // size == order[:, None] // size - 1)
            corner = tl.dot(inverse, tl.where(below, system, 0.0), input_precision=PRECISION, out_dtype=EXACT)
            inverse -= tl.dot(corner, inverse, input_precision=PRECISION, out_dtype=EXACT)
            size *= 2
        tl.store(inverse_ptr + tile, inverse * beta[None, :])


@kernel
def _chain_kernel(
    q_ptr, k_ptr, v_ptr, gates_ptr, state_ptr, slot_ptr, count_ptr, marked_ptr, mark_row_ptr, follows_ptr, inverse_ptr,
    scores_ptr, decay_ptr, skip_ptr, out_ptr, batch, rows,
    HEADS: tl.constexpr, SHARE: tl.constexpr, K_SIZE: tl.constexpr, V_SIZE: tl.constexpr, DELTA: tl.constexpr,
    EXACT: tl.constexpr, PRECISION: tl.constexpr, OUT_PRECISION: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_B: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """follows_ptr: None, or for each batch row whether it continues the piece of a prompt in the batch row before."""
    pdl_trigger_and_wait(DEPENDENT)
    v_blocks: tl.constexpr = (V_SIZE + BLOCK_V - 1) // BLOCK_V
    head, first = tl.program_id(0) // v_blocks, tl.program_id(1).to(tl.int64)
    pieces = 1
    is_first = True
    if follows_ptr is not None:
        others = first + 1 + tl.arange(0, BLOCK_B)
        goes_on = tl.load(follows_ptr + others, mask=others < batch, other=False).to(tl.int1)
        pieces = 1 + tl.min(tl.where(goes_on, BLOCK_B, tl.arange(0, BLOCK_B)), 0)
        is_first = tl.load(follows_ptr + first) == 0
    if is_first:
        key, value = tl.arange(0, BLOCK_K), tl.program_id(0) % v_blocks * BLOCK_V + tl.arange(0, BLOCK_V)
        order = tl.arange(0, CHUNK)
        is_key, is_value = key < K_SIZE, value < V_SIZE
        is_both = is_key[:, None] & is_value[None, :]
        place = (head * K_SIZE + key[:, None]) * V_SIZE + value[None, :]
        own = state_ptr + tl.load(slot_ptr + first) * HEADS * K_SIZE * V_SIZE
        state = tl.load(own + place, mask=is_both, other=0.0)
        chunks = tl.cdiv(rows, CHUNK)
        for i in range(pieces * chunks):
            request, chunk = first + i // chunks, i % chunks
            row, is_row, exists = _rows_of_chunk(request, chunk, rows, count_ptr, CHUNK)
            of_chunk = (request * chunks + chunk) * HEADS + head
            decay = tl.load(decay_ptr + of_chunk * CHUNK + order)
            k_place = (row * (HEADS // SHARE) + head // SHARE)[:, None] * K_SIZE + key[None, :]
            v_place = (row * HEADS + head)[:, None] * V_SIZE + value[None, :]
            brings = is_row & exists
            k = tl.load(k_ptr + k_place, mask=brings[:, None] & is_key[None, :], other=0.0).to(EXACT)
            v = tl.load(v_ptr + v_place, mask=brings[:, None] & is_value[None, :], other=0.0).to(EXACT)
            if DELTA:
                read = tl.dot(k, state, input_precision=PRECISION, out_dtype=EXACT)
                tile = of_chunk * CHUNK * CHUNK + order[:, None] * CHUNK + order[None, :]
                inverse = tl.load(inverse_ptr + tile)
                new = v - tl.exp(decay)[:, None] * read
                new = tl.dot(inverse, new, input_precision=PRECISION, out_dtype=EXACT)
            else:
                beta = tl.load(gates_ptr + row * 2 * HEADS + HEADS + head, mask=brings, other=0.0).to(EXACT)
                new = beta[:, None] * v
            q = tl.load(q_ptr + k_place, mask=is_row[:, None] & is_key[None, :], other=0.0).to(EXACT)
            scores = tl.load(scores_ptr + of_chunk * CHUNK * CHUNK + order[:, None] * CHUNK + order[None, :])
            out = tl.exp(decay)[:, None] * tl.dot(q, state, input_precision=OUT_PRECISION, out_dtype=EXACT)
            out += tl.dot(scores, new, input_precision=OUT_PRECISION, out_dtype=EXACT)
            if skip_ptr is not None:
                out += tl.load(skip_ptr + head).to(EXACT) * v
            tl.store(out_ptr + v_place, out.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_value[None, :])
            if marked_ptr is not None:
                here = tl.load(marked_ptr + request) - chunk * CHUNK
                if (here > 0) & (here <= CHUNK):
                    whole = tl.sum(tl.where(order == here - 1, decay, 0.0), 0)
                    share = tl.where(order < here, tl.exp(tl.where(order < here, whole - decay, 0.0)), 0.0)
                    added = tl.dot(tl.trans(k), share[:, None] * new, input_precision=PRECISION, out_dtype=EXACT)
                    mark = state_ptr + tl.load(mark_row_ptr + request) * HEADS * K_SIZE * V_SIZE
                    tl.store(mark + place, tl.exp(whole) * state + added, mask=is_both)
            whole = tl.sum(tl.where(order == CHUNK - 1, decay, 0.0), 0)
            added = tl.exp(whole - decay)[:, None] * new
            state = tl.exp(whole) * state + tl.dot(tl.trans(k), added, input_precision=PRECISION, out_dtype=EXACT)
        if tl.load(count_ptr + first) > 0:
            tl.store(own + place, state, mask=is_both)


def chain_outputs(
    q: Tensor,
    rows: tuple[Tensor, Tensor, Tensor],
    state: StateColumns,
    path: PathRows,
    skip: Tensor | None,
    delta: bool,
) -> Tensor:
    """Tolerance: that of tree_outputs times the condition number of a chunk's system."""
    k, v, gates = (x.contiguous() for x in rows)
    q = q.contiguous()
    (batch, count, heads, v_size), (k_heads, k_size) = v.shape, k.shape[2:]
    table, slots = state
    out = torch.empty_like(v)
    if not batch or not count:
        return out
    chunks, config = -(-count // CHUNK), choose_config(v_size, v.dtype)
    tiles = (batch, chunks, heads, CHUNK, CHUNK)
    scores, decay = table.new_empty(tiles), table.new_empty(tiles[:-1])
    inverse = table.new_empty(tiles) if delta else None
    constants = {
        "HEADS": heads,
        "SHARE": heads // k_heads,
        "K_SIZE": k_size,
        "DELTA": delta,
        "EXACT": exact_type(table.dtype),
        "PRECISION": config.precision,
        "OUT_PRECISION": config.out_precision,
        "CHUNK": CHUNK,
        "BLOCK_K": max(power_of_two(k_size), SMALLEST),
        "num_warps": config.num_warps,
        "num_stages": 1,
        **pdl_arguments(chip(v)),
    }
    _products_kernel[heads, chunks, batch](q, k, gates, path.taken, inverse, scores, decay, count, **constants)
    _chain_kernel[heads * -(-v_size // config.block_v), batch](
        *(q, k, v, gates, table, slots, path.taken, path.marked, path.mark_row, path.follows),
        *(inverse, scores, decay, skip, out, batch, count),
        V_SIZE=v_size,
        BLOCK_V=config.block_v,
        BLOCK_B=power_of_two(batch),
        **constants,
    )
    return out


def choose_config(v_size: int, dtype: torch.dtype) -> Config:
    block_v = max(min(power_of_two(v_size), 32), SMALLEST)
    # As in kernels/recurrence/tree.py: no second warpgroup for 16 columns.
    return Config(block_v, 8 if block_v > SMALLEST else 4, PRECISION, PRECISION if dtype.itemsize >= 4 else "tf32")
