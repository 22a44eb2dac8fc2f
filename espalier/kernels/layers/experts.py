"""The expert product of a mixture of experts: each row goes through the gated MLPs of its K experts.

Three launches.  `_sort_pairs_kernel` sorts the N · K pairs (row, choice) by expert and cuts each expert's pairs into
tiles.  `_gated_kernel` computes the activation of each tile, `_down_kernel` the weighted results.  Both have one
program for each tile and block of outputs, and read only the experts that have rows.  Grids follow from N, K and the
number of experts, so the launches can be captured; programs without a tile return at once.

The K results of a row are not summed here: the reader adds them in order, so a sum has the same order in every batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.layers.activation import SILU, Activation, activated, activated_reference
from espalier.kernels.layers.linear import MIN_BLOCK_ROWS, RESERVED_SHARED_MEMORY
from espalier.kernels.layers.silu import require_gated
from espalier.kernels.runtime.launch import Chip, chip, exact_type, kernel, power_of_two, require
from espalier.kernels.runtime.pdl import early, pdl_wait_if

if TYPE_CHECKING:
    import triton.language as tl

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
MAX_SORT_BLOCK = 1024
# Threads of a program that sorts: with fewer values some threads would hold copies, which tl.histogram must leave out.
SORT_THREADS = 128
WARP = 32
MAX_BLOCK_ROWS = 128
MAX_STAGES = 3


@dataclass(frozen=True)
class ExpertBiases:
    """Biases of E experts, in x's dtype.  gate_up: [E, 2·I], gate over up.  down: [E, H]."""

    gate_up: Tensor
    down: Tensor


def grouped_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    ids: Tensor,
    weights: Tensor,
    live: Tensor | None = None,
    biases: ExpertBiases | None = None,
    activation: Activation = SILU,
    extra: int = 0,
) -> Tensor:
    """The weighted results of each row's experts, in order of choice: parts [K + extra, N, H].

    x: [N, H].  gate_up: [E, 2·I, H], gate over up.  down: [E, H, I].  ids: [N, K] int64, different experts for a row.
    weights: [N, K], float32 (float64 for float64), as parts.  live: [N] bool; other rows go to no expert, and their
    parts are 0; None: all rows.  The bias of `down` is weighted like the product.  extra: parts at the end that the
    caller writes.
    """
    implementation = grouped_experts_triton if x.is_cuda else grouped_experts_reference
    return implementation(x, gate_up, down, ids, weights, live, biases, activation, extra)


@dataclass(frozen=True)
class ExpertsPlan:
    """Launch parameters of both products.

    rows: pairs of one expert that a program takes; block_out, block_in: its tile of gate, up or down; warps: per
    program.
    """

    rows: int
    block_out: int
    block_in: int
    warps: int

    def stages(self, matrices: int, itemsize: int, gpu: Chip) -> int:
        """Pipeline stages that fit the chip; each holds a tile of every matrix and one of x."""
        stage = (matrices * self.block_out + self.rows) * self.block_in * itemsize
        return max(min(MAX_STAGES, (gpu.shared_memory - RESERVED_SHARED_MEMORY) // stage), 1)


def plan_for(num_pairs: int, num_experts: int, dtype: torch.dtype) -> ExpertsPlan:
    """A tile holds twice the pairs that an expert has on average, so most experts have one tile.

    It depends on the number of pairs, not on the experts that they go to: so do the bits of a row.
    """
    rows = min(max(power_of_two(-(-2 * num_pairs // num_experts)), MIN_BLOCK_ROWS), MAX_BLOCK_ROWS)
    if dtype.itemsize > 2:
        # IEEE products of float32 do not use tensor cores: a tile is held in registers.
        return ExpertsPlan(min(rows, 32), 32, 32, 4)
    return ExpertsPlan(rows, 64, 128 if rows <= 32 else 64, 4 if rows <= 64 else 8)


@kernel
def _experts_of(ids_ptr, live_ptr, pair, num_pairs, TOP_K: tl.constexpr, NUM_EXPERTS: tl.constexpr, LIVE: tl.constexpr):
    """The experts of pairs [BLOCK]: NUM_EXPERTS for a row that goes to none, NUM_EXPERTS + 1 past the last pair."""
    inside = pair < num_pairs
    expert = tl.load(ids_ptr + pair, mask=inside, other=NUM_EXPERTS + 1).to(tl.int32)
    if LIVE:
        live = tl.load(live_ptr + pair // TOP_K, mask=inside, other=1)
        expert = tl.where(live != 0, expert, NUM_EXPERTS)
    return expert


@kernel
def _sort_pairs_kernel(
    ids_ptr, live_ptr, order_ptr, ends_ptr, tile_experts_ptr, tile_begins_ptr, num_pairs, num_tiles,
    TOP_K: tl.constexpr, NUM_EXPERTS: tl.constexpr, BINS: tl.constexpr, ROWS: tl.constexpr, LIVE: tl.constexpr,
    BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """A program for each expert, and one for the rows without expert.  Each reads all pairs, so the sort is stable and
    needs no atomics."""
    pdl_wait_if(DEPENDENT)
    own = tl.program_id(0)
    offset, bins = tl.arange(0, BLOCK), tl.arange(0, BINS)
    counts = tl.zeros((BINS,), tl.int32)
    for begin in range(0, num_pairs, BLOCK):
        counts += tl.histogram(
            _experts_of(ids_ptr, live_ptr, begin + offset, num_pairs, TOP_K, NUM_EXPERTS, LIVE), BINS
        )
    tiles = tl.cdiv(counts, ROWS)
    place = tl.sum(tl.where(bins < own, counts, 0), 0)
    first_tile = tl.sum(tl.where(bins < own, tiles, 0), 0)
    own_tiles = tl.sum(tl.where(bins == own, tiles, 0), 0)
    tl.store(ends_ptr + own, place + tl.sum(tl.where(bins == own, counts, 0), 0))
    # The last program also marks the tiles that no expert has.
    listed = num_tiles - first_tile if own == NUM_EXPERTS else own_tiles
    for begin in range(0, listed, BLOCK):
        tile = begin + offset
        mask = tile < listed
        tl.store(tile_experts_ptr + first_tile + tile, tl.where(tile < own_tiles, own, -1), mask=mask)
        tl.store(tile_begins_ptr + first_tile + tile, place + tile * ROWS, mask=mask)
    for begin in range(0, num_pairs, BLOCK):
        pair = begin + offset
        expert = _experts_of(ids_ptr, live_ptr, pair, num_pairs, TOP_K, NUM_EXPERTS, LIVE)
        is_own = (expert == own).to(tl.int32)
        tl.store(order_ptr + place + tl.cumsum(is_own, 0) - 1, pair, mask=is_own != 0)
        place += tl.sum(is_own, 0)


@kernel
def _gated_kernel(
    x_ptr, w_ptr, bias_ptr, order_ptr, ends_ptr, tile_experts_ptr, tile_begins_ptr, out_ptr, num_out, num_in, x_stride,
    ALPHA: tl.constexpr, UP_OFFSET: tl.constexpr, LIMIT: tl.constexpr,
    TOP_K: tl.constexpr, NUM_EXPERTS: tl.constexpr, ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr, EXACT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """out [N · K, num_out], sorted by expert: the activation.  w: [E, 2 · num_out, num_in]; bias: [E, 2 · num_out]."""
    pdl_wait_if(DEPENDENT)
    expert = tl.load(tile_experts_ptr + tl.program_id(1)).to(tl.int64)
    if (expert < 0) | (expert == NUM_EXPERTS):
        return
    place = tl.load(tile_begins_ptr + tl.program_id(1)) + tl.arange(0, ROWS)
    inside = place < tl.load(ends_ptr + expert)
    row = tl.load(order_ptr + place, mask=inside, other=0).to(tl.int64) // TOP_K
    column, ks = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT), tl.arange(0, BLOCK_IN)
    # Columns past the end read the last one instead; their results are not stored.
    w_row = expert * 2 * num_out + tl.minimum(column, num_out - 1)
    gate_ptrs = w_ptr + w_row[:, None] * num_in + ks[None, :]
    up_ptrs = gate_ptrs + num_out.to(tl.int64) * num_in
    x_ptrs = x_ptr + row[None, :] * x_stride + ks[:, None]
    gate = tl.zeros((BLOCK_OUT, ROWS), EXACT)
    up = tl.zeros((BLOCK_OUT, ROWS), EXACT)
    for k in range(0, num_in, BLOCK_IN):
        left = num_in - k
        x = tl.load(x_ptrs, mask=inside[None, :] & (ks[:, None] < left), other=0.0)
        w_gate = tl.load(gate_ptrs, mask=ks[None, :] < left, other=0.0)
        w_up = tl.load(up_ptrs, mask=ks[None, :] < left, other=0.0)
        gate = tl.dot(w_gate, x, gate, input_precision="ieee", out_dtype=EXACT)
        up = tl.dot(w_up, x, up, input_precision="ieee", out_dtype=EXACT)
        gate_ptrs += BLOCK_IN
        up_ptrs += BLOCK_IN
        x_ptrs += BLOCK_IN
    if bias_ptr is not None:
        gate += tl.load(bias_ptr + w_row).to(EXACT)[:, None]
        up += tl.load(bias_ptr + w_row + num_out).to(EXACT)[:, None]
    # Rounded as a linear layer's output, before the activation.
    out_type = out_ptr.dtype.element_ty
    gate, up = gate.to(out_type).to(EXACT), up.to(out_type).to(EXACT)
    out = activated(gate, up, ALPHA, UP_OFFSET, LIMIT).to(out_type)
    out_ptrs = out_ptr + place.to(tl.int64)[:, None] * num_out + column[None, :]
    tl.store(out_ptrs, tl.trans(out), mask=inside[:, None] & (column[None, :] < num_out))


@kernel
def _down_kernel(
    x_ptr, w_ptr, bias_ptr, weights_ptr, order_ptr, ends_ptr, tile_experts_ptr, tile_begins_ptr, out_ptr,
    num_out, num_in, num_rows,
    TOP_K: tl.constexpr, NUM_EXPERTS: tl.constexpr, ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr, EXACT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """out [K, N, num_out]: weight · (x · wᵀ + bias [E, num_out]), and 0 for rows without expert.

    x: [N · K, num_in], sorted by expert.
    """
    pdl_wait_if(DEPENDENT)
    expert = tl.load(tile_experts_ptr + tl.program_id(1)).to(tl.int64)
    if expert < 0:
        return
    place = tl.load(tile_begins_ptr + tl.program_id(1)) + tl.arange(0, ROWS)
    inside = place < tl.load(ends_ptr + expert)
    pair = tl.load(order_ptr + place, mask=inside, other=0).to(tl.int64)
    column, ks = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT), tl.arange(0, BLOCK_IN)
    w_row = tl.minimum(expert, NUM_EXPERTS - 1) * num_out + tl.minimum(column, num_out - 1)
    w_ptrs = w_ptr + w_row[:, None] * num_in + ks[None, :]
    x_ptrs = x_ptr + place.to(tl.int64)[None, :] * num_in + ks[:, None]
    acc = tl.zeros((BLOCK_OUT, ROWS), EXACT)
    # No steps for rows without expert: nothing was written to their x.
    k_end = tl.where(expert == NUM_EXPERTS, 0, num_in)
    for k in range(0, k_end, BLOCK_IN):
        left = num_in - k
        x = tl.load(x_ptrs, mask=inside[None, :] & (ks[:, None] < left), other=0.0)
        w = tl.load(w_ptrs, mask=ks[None, :] < left, other=0.0)
        acc = tl.dot(w, x, acc, input_precision="ieee", out_dtype=EXACT)
        w_ptrs += BLOCK_IN
        x_ptrs += BLOCK_IN
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + w_row).to(EXACT)[:, None]
    weight = tl.load(weights_ptr + pair, mask=inside, other=0.0)
    # Not a product by 0: the weight of a row without expert may be NaN.
    acc = tl.where(expert == NUM_EXPERTS, 0.0, acc * weight[None, :])
    out_row = pair % TOP_K * num_rows + pair // TOP_K
    out_ptrs = out_ptr + out_row[:, None] * num_out + column[None, :]
    tl.store(out_ptrs, tl.trans(acc), mask=inside[:, None] & (column[None, :] < num_out))


@dataclass(frozen=True)
class SortedPairs:
    """The pairs (row, choice), row · K + choice, by expert; E stands for no expert.

    order: [N·K] int32.  ends: [E + 1] int32, where each expert's pairs end in `order`.
    tile_experts, tile_begins: [tiles] int32, each tile's expert (-1: no tile) and its first place in `order`.
    """

    order: Tensor
    ends: Tensor
    tile_experts: Tensor
    tile_begins: Tensor


def sort_pairs_triton(ids: Tensor, live: Tensor | None, num_experts: int, rows: int) -> SortedPairs:
    """rows: pairs of a tile.  Raises EspalierError for wrong shapes or dtypes."""
    num_rows, top_k = ids.shape
    if live is not None:
        require("grouped_experts: live", live, (num_rows,), torch.bool, ids)
    num_pairs = num_rows * top_k
    # Rounding up adds less than one tile for each expert that has pairs.
    num_tiles = num_pairs // rows + min(num_experts + 1, num_pairs)
    order, ends, tile_experts, tile_begins = (
        torch.empty(size, dtype=torch.int32, device=ids.device)
        for size in (num_pairs, num_experts + 1, num_tiles, num_tiles)
    )
    ids = ids.contiguous()
    _sort_pairs_kernel[(num_experts + 1,)](
        ids, ids if live is None else live.contiguous(), order, ends, tile_experts, tile_begins, num_pairs, num_tiles,
        TOP_K=top_k, NUM_EXPERTS=num_experts, BINS=power_of_two(max(num_experts + 2, WARP)), ROWS=rows,
        LIVE=live is not None, BLOCK=min(power_of_two(max(num_pairs, SORT_THREADS)), MAX_SORT_BLOCK),
        num_warps=SORT_THREADS // WARP, **early(chip(ids)),
    )  # fmt: skip
    return SortedPairs(order, ends, tile_experts, tile_begins)


def grouped_experts_triton(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    ids: Tensor,
    weights: Tensor,
    live: Tensor | None = None,
    biases: ExpertBiases | None = None,
    activation: Activation = SILU,
    extra: int = 0,
) -> Tensor:
    """x's dtype is bfloat16, float16, float32 (IEEE products) or float64; weights and biases are contiguous.

    Within one ExpertsPlan the bits of a row depend neither on the other rows nor on their number.
    Raises EspalierError on other shapes, dtypes or strides.
    """
    num_rows, hidden = x.shape
    _require(x, gate_up, down, ids, weights, biases)
    gate_up_bias, down_bias = (None, None) if biases is None else (biases.gate_up, biases.down)
    num_experts, inner, top_k = gate_up.shape[0], down.shape[2], ids.shape[1]
    parts = weights.new_empty(top_k + extra, num_rows, hidden)
    if parts.numel() == 0:
        return parts
    plan, gpu = plan_for(ids.numel(), num_experts, x.dtype), chip(x)
    pairs = sort_pairs_triton(ids, live, num_experts, plan.rows)
    sorted_pairs = (pairs.order, pairs.ends, pairs.tile_experts, pairs.tile_begins)
    num_tiles = pairs.tile_experts.shape[0]
    options = {
        "TOP_K": top_k,
        "NUM_EXPERTS": num_experts,
        "ROWS": plan.rows,
        "BLOCK_OUT": plan.block_out,
        "BLOCK_IN": plan.block_in,
        "EXACT": exact_type(x.dtype),
        "num_warps": plan.warps,
        **early(gpu),
    }
    x = x if x.stride(1) == 1 else x.contiguous()
    gated = x.new_empty(ids.numel(), inner)
    _gated_kernel[-(-inner // plan.block_out), num_tiles](
        *(x, gate_up, gate_up_bias, *sorted_pairs, gated, inner, hidden, x.stride(0)),
        # constexpr: as run-time arguments they would be rounded to float32.
        ALPHA=activation.alpha,
        UP_OFFSET=activation.up_offset,
        LIMIT=activation.limit,
        num_stages=plan.stages(2, x.itemsize, gpu),
        **options,
    )
    _down_kernel[-(-hidden // plan.block_out), num_tiles](
        *(gated, down, down_bias, weights.contiguous(), *sorted_pairs, parts, hidden, inner, num_rows),
        num_stages=plan.stages(1, x.itemsize, gpu),
        **options,
    )
    return parts


def _require(
    x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor, biases: ExpertBiases | None
) -> None:
    require_gated(gate_up.shape[1])
    num_rows, hidden = x.shape
    exact = torch.promote_types(x.dtype, torch.float32)
    require("grouped_experts: gate_up", gate_up, (-1, -1, hidden), x.dtype, x)
    require("grouped_experts: down", down, (gate_up.shape[0], hidden, gate_up.shape[1] // 2), x.dtype, x)
    require("grouped_experts: ids", ids, (num_rows, -1), torch.int64, x)
    require("grouped_experts: weights", weights, tuple(ids.shape), exact, x)
    contiguous = [gate_up, down]
    if biases is not None:
        require("grouped_experts: biases of gate_up", biases.gate_up, tuple(gate_up.shape[:2]), x.dtype, x)
        require("grouped_experts: biases of down", biases.down, tuple(down.shape[:2]), x.dtype, x)
        contiguous += [biases.gate_up, biases.down]
    if x.dtype not in DTYPES or not all(tensor.is_contiguous() for tensor in contiguous):
        raise EspalierError(
            f"grouped_experts: the Triton kernel takes contiguous experts of a floating-point dtype of 2 to 8 bytes, "
            f"but got {x.dtype} with strides {[tensor.stride() for tensor in contiguous]}: use the reference"
        )


def grouped_experts_reference(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    ids: Tensor,
    weights: Tensor,
    live: Tensor | None = None,
    biases: ExpertBiases | None = None,
    activation: Activation = SILU,
    extra: int = 0,
) -> Tensor:
    """A loop over the experts that have rows.  It reads their number on the host."""
    top_k = ids.shape[1]
    gate_up_bias, down_bias = (None, None) if biases is None else (biases.gate_up, biases.down)
    parts = x.new_zeros(top_k + extra, len(x), down.shape[1], dtype=weights.dtype)
    if live is not None:
        ids = ids.masked_fill(~live[:, None], len(gate_up))
    counts = ids.flatten().bincount(minlength=len(gate_up) + 1).tolist()
    pairs = ids.flatten().argsort(stable=True).split(counts)
    for expert, own in enumerate(pairs[: len(gate_up)]):
        if len(own):
            rows, choices = own // top_k, own % top_k
            gated = F.linear(x[rows], gate_up[expert], None if gate_up_bias is None else gate_up_bias[expert])
            gated = activated_reference(gated, activation)
            result = F.linear(gated, down[expert], None if down_bias is None else down_bias[expert]).to(parts.dtype)
            parts[choices, rows] = result * weights[rows, choices, None]
    return parts
