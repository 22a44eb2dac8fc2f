"""The expert product of a mixture of experts: each row goes through the gated MLPs of its K experts.

Three launches.  `_sort_pairs_kernel` sorts the N · K pairs (row, choice) by expert and cuts each expert's pairs into
tiles.  `_gated_kernel` computes the activation of each tile, `_down_kernel` the weighted results.  Both have one
program for each tile and block of outputs, and read only the experts that have rows.  Grids follow from N, K and the
number of experts, so the launches can be captured; programs without a tile return at once.  The experts of one row
differ, so for a single row each pair is a tile, and nothing is sorted.

The K results of a row are not summed here.  The next norm adds them in order of choice, which is the same in every
batch.  Below, the place of a pair is its index in the sorted order; without a sort, it is the pair itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.layers.activation import SILU, Activation, apply_activation, apply_activation_reference
from espalier.kernels.layers.experts_plan import ExpertsPlan, ExpertsShape, ProductPlan
from espalier.kernels.layers.experts_tuning import plan_for
from espalier.kernels.layers.linear import block_rows
from espalier.kernels.layers.quantised import QuantisedMatrix, linear_quantised_reference
from espalier.kernels.layers.silu import require_gated
from espalier.kernels.runtime.launch import chip, exact_type, kernel, power_of_two, require
from espalier.kernels.runtime.pdl import early, pdl_wait_if

if TYPE_CHECKING:
    import triton.language as tl

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# Pairs that a sorting program reads per step.  It reads all pairs, so it has up to 1024 threads, the most of a program.
MAX_SORT_BLOCK = 8192
PAIRS_PER_THREAD = 8
# With fewer pairs than threads, some threads would hold copies, which tl.histogram must leave out.  So a step has at
# least this many pairs and threads.
MIN_SORT_THREADS = 128
WARP = 32
# Experts [E, out, in].
ExpertMatrix = Tensor | QuantisedMatrix


@dataclass(frozen=True)
class ExpertBiases:
    """Biases of E experts, in x's dtype.  gate_up: [E, 2·I], gate over up.  down: [E, H]."""

    gate_up: Tensor
    down: Tensor


def grouped_experts(
    x: Tensor,
    gate_up: ExpertMatrix,
    down: ExpertMatrix,
    ids: Tensor,
    weights: Tensor,
    live: Tensor | None = None,
    biases: ExpertBiases | None = None,
    activation: Activation = SILU,
    extra: int = 0,
) -> Tensor:
    """The weighted results of each row's experts, in order of choice: parts [K + extra, N, H].

    x: [N, H].  gate_up: [E, 2·I, H], gate over up.  down: [E, H, I].  ids: [N, K] int64, different experts for a row.
    weights: [N, K], float32 (float64 for float64); parts have its dtype.  The bias of `down` is weighted too.
    live: [N] bool; other rows go to no expert, and their parts are 0; None: all rows are live.
    extra: the number of further parts at the end.  They are allocated here, and the caller writes them.
    """
    implementation = grouped_experts_triton if x.is_cuda else grouped_experts_reference
    return implementation(x, gate_up, down, ids, weights, live, biases, activation, extra)


@kernel
def _experts_of(ids_ptr, live_ptr, pair, num_pairs, TOP_K: tl.constexpr, NUM_EXPERTS: tl.constexpr, LIVE: tl.constexpr):
    """The experts of pairs [BLOCK]: NUM_EXPERTS for rows without expert, NUM_EXPERTS + 1 past the last pair."""
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
    """Grid: one program for each expert, and one for the rows without expert.

    Each program reads all pairs, so the sort is stable and needs no atomics.
    """
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
    # The last program also marks the unused tiles, with -1.
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
def _expert_of_tile(experts_ptr, live_ptr, tile, top_k, num_experts, SORTED: tl.constexpr, LIVE: tl.constexpr):
    """The expert of a tile: num_experts for pairs without expert, -1 where there is no tile."""
    expert = tl.load(experts_ptr + tile).to(tl.int64)
    if LIVE and not SORTED:
        expert = tl.where(tl.load(live_ptr + tile // top_k) != 0, expert, num_experts)
    return expert


@kernel
def _pairs_of_tile(
    order_ptr, ends_ptr, begins_ptr, tile, expert, SORTED: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """(place, inside, pair), each [ROWS]: the places of a tile's pairs, whether they exist, and the pairs."""
    if SORTED:
        place = tl.load(begins_ptr + tile) + tl.arange(0, ROWS)
        inside = place < tl.load(ends_ptr + expert)
        pair = tl.load(order_ptr + place, mask=inside, other=0)
    else:
        place = tile + tl.arange(0, ROWS)
        inside = place == tile
        pair = tl.where(inside, place, 0)
    return place, inside, pair


@kernel
def _gated_kernel(
    x_ptr, w_ptr, bias_ptr, order_ptr, ends_ptr, tile_experts_ptr, tile_begins_ptr, live_ptr, out_ptr,
    num_out, num_in, x_stride, top_k, num_experts,
    ALPHA: tl.constexpr, UP_OFFSET: tl.constexpr, LIMIT: tl.constexpr,
    SORTED: tl.constexpr, LIVE: tl.constexpr, ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr,
    EVEN_IN: tl.constexpr, EXACT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Write the activations of all pairs, in order of place, to out [N · K, num_out].

    w: [E, 2 · num_out, num_in]; bias: [E, 2 · num_out].  EVEN_IN: BLOCK_IN divides num_in.
    """
    pdl_wait_if(DEPENDENT)
    tile = tl.program_id(1)
    expert = _expert_of_tile(tile_experts_ptr, live_ptr, tile, top_k, num_experts, SORTED, LIVE)
    if (expert < 0) | (expert == num_experts):
        return
    place, inside, pair = _pairs_of_tile(order_ptr, ends_ptr, tile_begins_ptr, tile, expert, SORTED, ROWS)
    row = (pair // top_k).to(tl.int64)
    column, ks = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT), tl.arange(0, BLOCK_IN)
    # Columns past the end read the last one instead; their results are not stored.
    w_row = expert * 2 * num_out + tl.minimum(column, num_out - 1)
    gate_ptrs = w_ptr + w_row[:, None] * num_in + ks[None, :]
    up_ptrs = gate_ptrs + num_out.to(tl.int64) * num_in
    x_ptrs = x_ptr + row[None, :] * x_stride + ks[:, None]
    gate = tl.zeros((BLOCK_OUT, ROWS), EXACT)
    up = tl.zeros((BLOCK_OUT, ROWS), EXACT)
    for k in range(0, num_in, BLOCK_IN):
        # Weights are loaded first: their addresses do not depend on `pair`, which is still being loaded.
        if EVEN_IN:
            w_gate = tl.load(gate_ptrs)
            w_up = tl.load(up_ptrs)
            x = tl.load(x_ptrs, mask=inside[None, :], other=0.0)
        else:
            left = num_in - k
            w_gate = tl.load(gate_ptrs, mask=ks[None, :] < left, other=0.0)
            w_up = tl.load(up_ptrs, mask=ks[None, :] < left, other=0.0)
            x = tl.load(x_ptrs, mask=inside[None, :] & (ks[:, None] < left), other=0.0)
        gate = tl.dot(w_gate, x, gate, input_precision="ieee", out_dtype=EXACT)
        up = tl.dot(w_up, x, up, input_precision="ieee", out_dtype=EXACT)
        gate_ptrs += BLOCK_IN
        up_ptrs += BLOCK_IN
        x_ptrs += BLOCK_IN
    if bias_ptr is not None:
        gate += tl.load(bias_ptr + w_row).to(EXACT)[:, None]
        up += tl.load(bias_ptr + w_row + num_out).to(EXACT)[:, None]
    # Rounded before the activation, as the output of a linear layer is.
    out_type = out_ptr.dtype.element_ty
    gate, up = gate.to(out_type).to(EXACT), up.to(out_type).to(EXACT)
    out = apply_activation(gate, up, ALPHA, UP_OFFSET, LIMIT).to(out_type)
    out_ptrs = out_ptr + place.to(tl.int64)[:, None] * num_out + column[None, :]
    tl.store(out_ptrs, tl.trans(out), mask=inside[:, None] & (column[None, :] < num_out))


@kernel
def _down_kernel(
    x_ptr, w_ptr, bias_ptr, weights_ptr, order_ptr, ends_ptr, tile_experts_ptr, tile_begins_ptr, live_ptr, out_ptr,
    num_out, num_in, num_rows, top_k, num_experts,
    SORTED: tl.constexpr, LIVE: tl.constexpr, ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr,
    EVEN_IN: tl.constexpr, EXACT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Write weight · (x · wᵀ + bias [E, num_out]) to out [K, N, num_out], and 0 for rows without expert.

    x: [N · K, num_in], in order of place.  EVEN_IN: BLOCK_IN divides num_in.
    """
    pdl_wait_if(DEPENDENT)
    tile = tl.program_id(1)
    expert = _expert_of_tile(tile_experts_ptr, live_ptr, tile, top_k, num_experts, SORTED, LIVE)
    if expert < 0:
        return
    place, inside, pair = _pairs_of_tile(order_ptr, ends_ptr, tile_begins_ptr, tile, expert, SORTED, ROWS)
    column, ks = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT), tl.arange(0, BLOCK_IN)
    w_row = tl.minimum(expert, num_experts - 1) * num_out + tl.minimum(column, num_out - 1)
    w_ptrs = w_ptr + w_row[:, None] * num_in + ks[None, :]
    x_ptrs = x_ptr + place.to(tl.int64)[None, :] * num_in + ks[:, None]
    acc = tl.zeros((BLOCK_OUT, ROWS), EXACT)
    # No steps for rows without expert: _gated_kernel writes nothing to their x.
    k_end = tl.where(expert == num_experts, 0, num_in)
    for k in range(0, k_end, BLOCK_IN):
        if EVEN_IN:
            w = tl.load(w_ptrs)
            x = tl.load(x_ptrs, mask=inside[None, :], other=0.0)
        else:
            left = num_in - k
            w = tl.load(w_ptrs, mask=ks[None, :] < left, other=0.0)
            x = tl.load(x_ptrs, mask=inside[None, :] & (ks[:, None] < left), other=0.0)
        acc = tl.dot(w, x, acc, input_precision="ieee", out_dtype=EXACT)
        w_ptrs += BLOCK_IN
        x_ptrs += BLOCK_IN
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + w_row).to(EXACT)[:, None]
    weight = tl.load(weights_ptr + pair, mask=inside, other=0.0)
    # tl.where and not a product by 0: the weight of a row without expert may be NaN.
    acc = tl.where(expert == num_experts, 0.0, acc * weight[None, :])
    out_row = (pair % top_k).to(tl.int64) * num_rows + pair // top_k
    out_ptrs = out_ptr + out_row[:, None] * num_out + column[None, :]
    tl.store(out_ptrs, tl.trans(acc), mask=inside[:, None] & (column[None, :] < num_out))


@dataclass(frozen=True)
class Tiles:
    """The pairs (row, choice) in tiles of one expert each.  A pair is the number row · K + choice.

    rows: the most pairs of a tile; 1: each pair is a tile, and nothing is sorted.
    experts: [tiles], the expert of each tile; E: no expert, -1: no tile.  begins: [tiles], each tile's first place.
    order: [N·K] int32, the pairs sorted by expert.  ends: [E + 1] int32, the place where each expert's pairs end.
    live: as in grouped_experts.  With rows = 1, `experts` is ids [N·K], and begins, order and ends are not read.
    """

    rows: int
    experts: Tensor
    begins: Tensor
    order: Tensor
    ends: Tensor
    live: Tensor | None

    @property
    def pointers(self) -> tuple[Tensor, ...]:
        live = self.experts if self.live is None else self.live
        return self.order, self.ends, self.experts, self.begins, live


def tiles_of(ids: Tensor, live: Tensor | None, num_experts: int, rows: int) -> Tiles:
    """rows: the most pairs of a tile.  Raises EspalierError for wrong shapes or dtypes."""
    if live is not None:
        require("grouped_experts: live", live, (ids.shape[0],), torch.bool, ids)
        live = live.contiguous()
    ids = ids.contiguous()
    if rows == 1:
        flat = ids.flatten()
        return Tiles(rows, flat, flat, flat, flat, live)
    return _sorted_tiles(ids, live, num_experts, rows)


def _sorted_tiles(ids: Tensor, live: Tensor | None, num_experts: int, rows: int) -> Tiles:
    num_pairs, top_k = ids.numel(), ids.shape[1]
    block = min(power_of_two(max(num_pairs, MIN_SORT_THREADS)), MAX_SORT_BLOCK)
    # Upper bound: rounding up adds less than one tile for each expert that has pairs.
    num_tiles = num_pairs // rows + min(num_experts + 1, num_pairs)
    order, ends, experts, begins = (
        torch.empty(size, dtype=torch.int32, device=ids.device)
        for size in (num_pairs, num_experts + 1, num_tiles, num_tiles)
    )
    _sort_pairs_kernel[(num_experts + 1,)](
        ids, ids if live is None else live, order, ends, experts, begins, num_pairs, num_tiles,
        TOP_K=top_k, NUM_EXPERTS=num_experts, BINS=power_of_two(max(num_experts + 2, WARP)), ROWS=rows,
        LIVE=live is not None, BLOCK=block, num_warps=max(MIN_SORT_THREADS, block // PAIRS_PER_THREAD) // WARP,
        **early(chip(ids)),
    )  # fmt: skip
    return Tiles(rows, experts, begins, order, ends, live)


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
    *,
    plan: ExpertsPlan | None = None,
) -> Tensor:
    """x's dtype is bfloat16, float16, float32 (IEEE products) or float64; weights and biases are contiguous.

    plan: None: the plan that experts_tuning.py chooses.  With the same plan, the bits of a row depend neither on the
    other rows nor on their number.
    Raises EspalierError on other shapes, dtypes or strides.
    """
    num_rows, hidden = x.shape
    _require(x, gate_up, down, ids, weights, biases)
    gate_up_bias, down_bias = (None, None) if biases is None else (biases.gate_up, biases.down)
    num_experts, inner, top_k = gate_up.shape[0], down.shape[2], ids.shape[1]
    if weights.numel() * hidden == 0:
        return weights.new_empty(top_k + extra, num_rows, hidden)
    if plan is None:
        plan = plan_for(ExpertsShape(num_experts, top_k, hidden, inner), num_rows, x.dtype, chip(x))
    tiles = tiles_of(ids, live, num_experts, plan.rows)
    gated = gated_triton(x, gate_up, tiles, top_k, plan.gated, gate_up_bias, activation)
    return down_triton(gated, down, weights, tiles, plan.down, down_bias, extra)


def gated_triton(
    x: Tensor,
    gate_up: Tensor,
    tiles: Tiles,
    top_k: int,
    plan: ProductPlan,
    bias: Tensor | None = None,
    activation: Activation = SILU,
) -> Tensor:
    """The activation of each pair, in order of place: [N·K, I]."""
    x = x if x.stride(1) == 1 else x.contiguous()
    num_experts, inner, hidden = gate_up.shape[0], gate_up.shape[1] // 2, x.shape[1]
    out = x.new_empty(len(x) * top_k, inner)
    _gated_kernel[-(-inner // plan.block_out), len(tiles.experts)](
        *(x, gate_up, bias, *tiles.pointers, out, inner, hidden, x.stride(0), top_k, num_experts),
        # constexpr: as run-time arguments they would be rounded to float32.
        ALPHA=activation.alpha,
        UP_OFFSET=activation.up_offset,
        LIMIT=activation.limit,
        **_options(x, tiles, plan, 2, hidden),
    )
    return out


def down_triton(
    gated: Tensor,
    down: Tensor,
    weights: Tensor,
    tiles: Tiles,
    plan: ProductPlan,
    bias: Tensor | None = None,
    extra: int = 0,
) -> Tensor:
    """gated: as gated_triton returns it.  Returns parts [K + extra, N, H]; the last `extra` are not written."""
    num_experts, hidden, inner = down.shape
    num_rows, top_k = weights.shape
    parts = weights.new_empty(top_k + extra, num_rows, hidden)
    _down_kernel[-(-hidden // plan.block_out), len(tiles.experts)](
        *(gated, down, bias, weights.contiguous(), *tiles.pointers),
        *(parts, hidden, inner, num_rows, top_k, num_experts),
        **_options(gated, tiles, plan, 1, inner),
    )
    return parts


def _options(x: Tensor, tiles: Tiles, plan: ProductPlan, matrices: int, num_in: int) -> dict[str, Any]:
    """Constants and launch options.  matrices: that a program reads: 2 for gate and up, 1 for down."""
    gpu = chip(x)
    return {
        "SORTED": tiles.rows > 1,
        "LIVE": tiles.live is not None,
        "ROWS": block_rows(tiles.rows),
        "BLOCK_OUT": plan.block_out,
        "BLOCK_IN": plan.block_in,
        "EVEN_IN": num_in % plan.block_in == 0,
        "EXACT": exact_type(x.dtype),
        "num_warps": plan.warps,
        "num_stages": plan.stages_on(gpu, matrices, tiles.rows, x.itemsize),
        **early(gpu),
    }


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
    gate_up: ExpertMatrix,
    down: ExpertMatrix,
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
            gated = _product(x[rows], gate_up[expert], None if gate_up_bias is None else gate_up_bias[expert])
            gated = apply_activation_reference(gated, activation)
            result = _product(gated, down[expert], None if down_bias is None else down_bias[expert]).to(parts.dtype)
            parts[choices, rows] = result * weights[rows, choices, None]
    return parts


def _product(x: Tensor, weight: ExpertMatrix, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias) if isinstance(weight, Tensor) else linear_quantised_reference(x, weight, bias)
