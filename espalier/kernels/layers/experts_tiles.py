"""Sorts the pairs (row, choice) of a mixture of experts by expert, and cuts them into tiles of one expert each.

`route` chooses the experts of each row.  Each program of experts.py computes outputs of one tile.  Shared experts
need no routing, because every row goes through them.  A shared MLP whose width is S times that of a routed expert is
cut into S pieces of that width.  For up to MAX_SHARED_ROWS rows, each piece is one more tile in both launches of
experts.py.  So the shared MLP needs no separate launches.  The programs of these tiles come first in the grid, and
prefetch weights before the routing is complete.

For more rows, the caller runs the shared MLP in separate launches.  These fill the chip and read each weight once.
"""

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.ops.experts import MAX_SHARED_ROWS, Routing, SharedExperts
from espalier.kernels.runtime.jit import float_to_key, kernel, load_sum
from espalier.kernels.runtime.launch import acc_dtype, chip, next_power_of_2, require
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger_and_wait, prefetch

# The most pairs that a sorting program reads per step.  A program reads all pairs, so it has up to 1024 threads.
MAX_SORT_BLOCK = 8192
PAIRS_PER_THREAD = 8
# The fewest pairs per step, and the fewest threads: with fewer pairs than threads, tl.histogram counts pairs twice.
MIN_SORT_THREADS = 128
WARP_THREADS = 32
# Above this number of pairs, a separate launch counts the pairs of each expert.  Up to this number, every sorting
# program counts them itself, by a histogram.
MAX_HISTOGRAM_PAIRS = MAX_SORT_BLOCK
# The experts per warp of `_route_kernel`.  The number is large, because reductions within one warp need no shared
# memory.
EXPERTS_PER_WARP = 512


@kernel
def _experts_of_pairs(
    ids_ptr, live_ptr, pair, num_pairs, TOP_K: tl.constexpr, NUM_EXPERTS: tl.constexpr, HAS_LIVE: tl.constexpr
):
    """Returns the experts of pairs [BLOCK]: NUM_EXPERTS for a row without experts, NUM_EXPERTS + 1 past the end."""
    inside = pair < num_pairs
    expert = tl.load(ids_ptr + pair, mask=inside, other=NUM_EXPERTS + 1).to(tl.int32)
    if HAS_LIVE:
        live = tl.load(live_ptr + pair // TOP_K, mask=inside, other=1)
        expert = tl.where(live != 0, expert, NUM_EXPERTS)
    return expert


@kernel
def _count_pairs_kernel(
    ids_ptr, live_ptr, counts_ptr, num_pairs,
    TOP_K: tl.constexpr, NUM_EXPERTS: tl.constexpr, HAS_LIVE: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Counts the pairs of each expert.  Grid: one program for each expert, and one for the rows without experts."""
    pdl_trigger_and_wait(USE_PDL)
    own_expert, offset = tl.program_id(0), tl.arange(0, BLOCK)
    count = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, num_pairs, BLOCK):
        expert = _experts_of_pairs(ids_ptr, live_ptr, begin + offset, num_pairs, TOP_K, NUM_EXPERTS, HAS_LIVE)
        count += (expert == own_expert).to(tl.int32)
    tl.store(counts_ptr + own_expert, tl.sum(count, 0))


@kernel(do_not_specialize=["num_tiles"])
def _sort_pairs_kernel(
    ids_ptr, live_ptr, counts_ptr, pair_order_ptr, pair_ends_ptr, tile_experts_ptr, tile_begins_ptr, num_pairs,
    num_tiles,
    TOP_K: tl.constexpr, NUM_EXPERTS: tl.constexpr, NUM_BINS: tl.constexpr, ROWS: tl.constexpr, HAS_LIVE: tl.constexpr,
    BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Sorts the pairs by expert.  Grid: one program for each expert, and one for the rows without experts.

    A program reads all pairs in order, so the sort is stable.
    counts_ptr: the result of _count_pairs_kernel; None: this kernel counts."""
    pdl_trigger_and_wait(USE_PDL)
    own_expert = tl.program_id(0)
    offset, bins = tl.arange(0, BLOCK), tl.arange(0, NUM_BINS)
    if counts_ptr is not None:
        counts = tl.load(counts_ptr + bins, mask=bins <= NUM_EXPERTS, other=0)
    else:
        counts = tl.zeros((NUM_BINS,), tl.int32)
        for begin in range(0, num_pairs, BLOCK):
            counts += tl.histogram(
                _experts_of_pairs(ids_ptr, live_ptr, begin + offset, num_pairs, TOP_K, NUM_EXPERTS, HAS_LIVE), NUM_BINS
            )
    tiles = tl.cdiv(counts, ROWS)
    place = tl.sum(tl.where(bins < own_expert, counts, 0), 0)
    first_tile = tl.sum(tl.where(bins < own_expert, tiles, 0), 0)
    own_tiles = tl.sum(tl.where(bins == own_expert, tiles, 0), 0)
    tl.store(pair_ends_ptr + own_expert, place + tl.sum(tl.where(bins == own_expert, counts, 0), 0))
    # The last program also writes -1 to the unused tiles.
    num_listed = num_tiles - first_tile if own_expert == NUM_EXPERTS else own_tiles
    for begin in range(0, num_listed, BLOCK):
        tile = begin + offset
        mask = tile < num_listed
        tl.store(tile_experts_ptr + first_tile + tile, tl.where(tile < own_tiles, own_expert, -1), mask=mask)
        tl.store(tile_begins_ptr + first_tile + tile, place + tile * ROWS, mask=mask)
    for begin in range(0, num_pairs, BLOCK):
        pair = begin + offset
        expert = _experts_of_pairs(ids_ptr, live_ptr, pair, num_pairs, TOP_K, NUM_EXPERTS, HAS_LIVE)
        is_own = (expert == own_expert).to(tl.int32)
        tl.store(pair_order_ptr + place + tl.cumsum(is_own, 0) - 1, pair, mask=is_own != 0)
        place += tl.sum(is_own, 0)


@kernel
def pairs_of_tile(
    pair_order_ptr, pair_ends_ptr, begins_ptr, tile_index, expert, IS_SORTED: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Returns (place, inside, pair), [ROWS] each: a pair's index in pair_order, whether the pair exists, and the pair's
    number row · K + choice."""
    if IS_SORTED:
        place = tl.load(begins_ptr + tile_index) + tl.arange(0, ROWS)
        inside = place < tl.load(pair_ends_ptr + expert)
        pair = tl.load(pair_order_ptr + place, mask=inside, other=0)
    else:
        place = tile_index + tl.arange(0, ROWS)
        inside = place == tile_index
        pair = tl.where(inside, place, 0)
    return place, inside, pair


@dataclass(frozen=True)
class ExpertTiles:
    """The pairs (row, choice) in tiles of one expert each.  A pair is the number row · K + choice.

    tile_rows: the most pairs of a tile; 1: each pair is a tile, and nothing is sorted.
    pair_order: [N·K] int32, the pairs sorted by expert.  pair_ends: [E + 1] int32, the index in `pair_order` after each
    expert's last pair.  tile_experts: [tiles], the expert of each tile; E for pairs without an expert, -1 for an unused
    tile.  tile_begins: [tiles], the index in `pair_order` of each tile's first pair.
    live: [N] bool, False for rows without experts; None: all rows have experts.
    If tile_rows is 1, tile_experts is expert_ids [N·K], and nothing reads tile_begins, pair_order and pair_ends.
    """

    tile_rows: int
    tile_experts: Tensor
    tile_begins: Tensor
    pair_order: Tensor
    pair_ends: Tensor
    live: Tensor | None

    @property
    def pointers(self) -> tuple[Tensor, ...]:
        live = self.tile_experts if self.live is None else self.live
        return self.pair_order, self.pair_ends, self.tile_experts, self.tile_begins, live


def make_expert_tiles(expert_ids: Tensor, live_rows: Tensor | None, num_experts: int, tile_rows: int) -> ExpertTiles:
    """Returns the tiles of expert_ids [N, K].  tile_rows: the most pairs of a tile.
    Raises EspalierError for wrong shapes or dtypes."""
    if live_rows is not None:
        require("grouped_experts: live", live_rows, (expert_ids.shape[0],), torch.bool, expert_ids)
        live_rows = live_rows.contiguous()
    expert_ids = expert_ids.contiguous()
    if tile_rows == 1:
        flat = expert_ids.flatten()
        return ExpertTiles(tile_rows, flat, flat, flat, flat, live_rows)
    num_pairs, top_k = expert_ids.numel(), expert_ids.shape[1]
    block = min(next_power_of_2(max(num_pairs, MIN_SORT_THREADS)), MAX_SORT_BLOCK)
    # An upper bound: rounding up adds less than one tile for each expert that has pairs.
    num_tiles = num_pairs // tile_rows + min(num_experts + 1, num_pairs)
    order, ends, experts, begins = (
        torch.empty(size, dtype=torch.int32, device=expert_ids.device)
        for size in (num_pairs, num_experts + 1, num_tiles, num_tiles)
    )
    grid, counts, pairs = (num_experts + 1,), None, (expert_ids, expert_ids if live_rows is None else live_rows)
    options = {
        "TOP_K": top_k,
        "NUM_EXPERTS": num_experts,
        "HAS_LIVE": live_rows is not None,
        "BLOCK": block,
        "num_warps": max(MIN_SORT_THREADS, block // PAIRS_PER_THREAD) // WARP_THREADS,
        **pdl_arguments(chip(expert_ids)),
    }
    if num_pairs > MAX_HISTOGRAM_PAIRS:
        counts = torch.empty(num_experts + 1, dtype=torch.int32, device=expert_ids.device)
        _count_pairs_kernel[grid](*pairs, counts, num_pairs, **options)
    bins = next_power_of_2(max(num_experts + 2, WARP_THREADS))
    _sort_pairs_kernel[grid](
        *pairs, counts, order, ends, experts, begins, num_pairs, num_tiles, NUM_BINS=bins, ROWS=tile_rows, **options
    )
    return ExpertTiles(tile_rows, experts, begins, order, ends, live_rows)


# A program of a shared piece prefetches the weights of this number of loop steps.  More would take bandwidth from
# earlier kernels.
PREFETCHED_STEPS = 1


def check_shared_experts(
    shared_experts: SharedExperts, x: Tensor, inner_size: int, is_dense_silu_without_bias: bool
) -> None:
    """Check the shared experts for grouped_experts.

    is_dense_silu_without_bias: whether the routed experts are dense, without biases, and their activation is silu.
    Raises EspalierError if this is False, for wrong shapes or dtypes, and for more than MAX_SHARED_ROWS rows."""
    (num_rows, hidden), wide = x.shape, shared_experts.down.shape[1]
    require("grouped_experts: shared gate_up", shared_experts.gate_up, (2 * wide, hidden), x.dtype, x)
    require("grouped_experts: shared down", shared_experts.down, (hidden, wide), x.dtype, x)
    is_contiguous = shared_experts.gate_up.is_contiguous() and shared_experts.down.is_contiguous()
    if not is_dense_silu_without_bias or not is_contiguous or wide % inner_size or num_rows > MAX_SHARED_ROWS:
        raise EspalierError(
            f"grouped_experts: shared experts run beside dense ones without biases, with silu, if they are contiguous, "
            f"a whole number times {inner_size} wide, and taken by at most {MAX_SHARED_ROWS} rows, but got a width of "
            f"{wide}, strides {shared_experts.down.stride()} and {num_rows} rows: run them as an MLP of their own"
        )


@kernel
def tile_and_expert(
    experts_ptr, live_ptr, top_k, num_experts, NUM_PIECES: tl.constexpr, IS_SORTED: tl.constexpr, HAS_LIVE: tl.constexpr
):  # fmt: skip
    """Returns (tile, expert) of this program.  For a shared piece, tile < 0 and expert = 0.

    expert: num_experts for pairs without an expert, -1 for an unused tile.  NUM_PIECES: the shared experts' pieces."""
    tile = tl.program_id(1) - NUM_PIECES
    routed = tl.maximum(tile, 0)
    expert = tl.load(experts_ptr + routed).to(tl.int64)
    if HAS_LIVE and not IS_SORTED:
        expert = tl.where(tl.load(live_ptr + routed // top_k) != 0, expert, num_experts)
    if NUM_PIECES > 0:
        expert = tl.where(tile < 0, 0, expert)
    return tile, expert


@kernel
def rows_of_tile(
    pair_order_ptr, pair_ends_ptr, begins_ptr, tile_index, expert, num_rows, top_k,
    NUM_PIECES: tl.constexpr, IS_SORTED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Returns (place, inside, row, out_part), [ROWS] each.

    place: indices into the intermediate results, in the order of sorted pairs.  inside: whether the place exists.
    row: the row of x.  out_part: the first index of out [K + NUM_PIECES, N, num_out], the choice of a pair.
    Shared pieces come after the pairs.  Piece p has the places (top_k + p) · num_rows + row, and out_part top_k + p.
    """
    if NUM_PIECES == 0:
        place, inside, pair = pairs_of_tile(
            pair_order_ptr, pair_ends_ptr, begins_ptr, tile_index, expert, IS_SORTED, ROWS
        )
        row, out_part = pair // top_k, pair % top_k
    else:
        if tile_index < 0:
            row = tl.arange(0, ROWS)
            out_part = tl.zeros((ROWS,), tl.int32) + top_k + tile_index + NUM_PIECES
            place, inside = out_part * num_rows + row, row < num_rows
        else:
            place, inside, pair = pairs_of_tile(
                pair_order_ptr, pair_ends_ptr, begins_ptr, tile_index, expert, IS_SORTED, ROWS
            )
            row, out_part = pair // top_k, pair % top_k
    return place, inside, row, out_part


@kernel
def prefetch_shared_piece(
    w_ptr, column, num_out, num_in, NUM_PIECES: tl.constexpr, BLOCK_OUT: tl.constexpr, PREFETCHED_COLUMNS: tl.constexpr
):  # fmt: skip
    """For a tile of a shared piece, prefetch PREFETCHED_COLUMNS columns of the tile's rows of gate and up."""
    piece = tl.program_id(1)
    if piece < NUM_PIECES:
        w_row = piece.to(tl.int64) * num_out + tl.minimum(column, num_out - 1)
        # One prefetch per L2 line, which holds 64 two-byte numbers.
        line = tl.minimum(tl.arange(0, PREFETCHED_COLUMNS // 64) * 64, num_in - 1)
        gate_ptrs = w_ptr + w_row[:, None] * num_in + line[None, :]
        prefetch(gate_ptrs)
        prefetch(gate_ptrs + num_out.to(tl.int64) * NUM_PIECES * num_in)


@kernel
def _route_kernel(
    logits_ptr, bias_ptr, scale_ptr, ids_ptr, weights_ptr, part_stride, row_stride,
    PARTS: tl.constexpr, NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SCORING: tl.constexpr,
    HAS_BIAS: tl.constexpr, LOGIT_BIAS: tl.constexpr,
    NORMALIZES_WEIGHTS: tl.constexpr, NORM_EPS: tl.constexpr, SCALE: tl.constexpr, N_GROUP: tl.constexpr,
    TOPK_GROUP: tl.constexpr, TOP2_SUM: tl.constexpr, ACC_DTYPE: tl.constexpr, BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """Chooses the experts of a row.  Grid: one program per row, which holds the logits of all experts.
    scale_ptr: [NUM_EXPERTS], a factor of each expert's weight; may be None."""
    pdl_trigger_and_wait(USE_PDL)
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    inside = expert < NUM_EXPERTS
    logits = load_sum(logits_ptr + row * row_stride + expert, part_stride, inside, PARTS, ACC_DTYPE, ACC_DTYPE)
    logits = tl.where(inside, logits, -float("inf"))
    if HAS_BIAS and LOGIT_BIAS:
        logits += tl.load(bias_ptr + expert, mask=inside, other=0.0).to(ACC_DTYPE)
    if SCORING == "softmax":
        exps = tl.exp(logits - tl.max(logits, 0))
        scores = exps / tl.sum(exps, 0)
    elif SCORING == "sigmoid":
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        scores = logits
    selection_scores = scores
    if HAS_BIAS and not LOGIT_BIAS:
        selection_scores += tl.load(bias_ptr + expert, mask=inside, other=0.0).to(ACC_DTYPE)
    # NaN counts as the largest score, as in a sort.  Otherwise no expert would be chosen, because comparisons with
    # NaN are false.
    selection_scores = tl.where(selection_scores == selection_scores, selection_scores, float("inf"))
    is_candidate = inside
    if N_GROUP > 1:
        is_candidate = inside & is_in_best_group(
            selection_scores, expert, inside, NUM_EXPERTS // N_GROUP, N_GROUP, TOPK_GROUP, TOP2_SUM
        )
    # LEAST is below all keys.  Adding 0.0 turns -0.0 into 0.0.  Keys are integers, because a warp finds the largest
    # integer with one instruction.
    LEAST: tl.constexpr = -(1 << (ACC_DTYPE.primitive_bitwidth - 1))
    keys = tl.where(is_candidate, float_to_key(selection_scores + 0.0), LEAST)
    chosen = expert < 0
    for _ in tl.static_range(TOP_K):
        best = tl.min(tl.where(keys == tl.max(keys, 0), expert, BLOCK), 0)
        chosen = chosen | (expert == best)
        keys = tl.where(expert == best, LEAST, keys)
    weights = tl.where(chosen, scores, 0.0)
    if SCORING == "topk_softmax":
        exps = tl.where(chosen, tl.exp(logits - tl.max(tl.where(chosen, logits, -float("inf")), 0)), 0.0)
        weights = exps / tl.sum(exps, 0)
    if NORMALIZES_WEIGHTS:
        weights = weights / (tl.sum(weights, 0) + NORM_EPS)
    place = row * TOP_K + tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(ids_ptr + place, expert.to(tl.int64), mask=chosen)
    weights *= SCALE
    if scale_ptr is not None:
        weights *= tl.load(scale_ptr + expert, mask=inside, other=0.0).to(ACC_DTYPE)
    tl.store(weights_ptr + place, weights, mask=chosen)


@kernel
def is_in_best_group(
    selection_scores, expert, is_expert, GROUP_EXPERTS: tl.constexpr, N_GROUP: tl.constexpr, TOPK_GROUP: tl.constexpr,
    TOP2_SUM: tl.constexpr,
):  # fmt: skip
    """Returns [BLOCK] bool: whether an expert's group (GROUP_EXPERTS experts) is one of the best TOPK_GROUP groups."""
    group = expert // GROUP_EXPERTS
    group_scores = tl.full(selection_scores.shape, -float("inf"), selection_scores.dtype)
    for group_index in tl.static_range(N_GROUP):
        members = is_expert & (group == group_index)
        score = tl.max(tl.where(members, selection_scores, -float("inf")), 0)
        if TOP2_SUM:
            first = tl.min(tl.where(members & (selection_scores == score), expert, selection_scores.shape[0]), 0)
            score += tl.max(tl.where(members & (expert != first), selection_scores, -float("inf")), 0)
        # A sum of infinities may be NaN.
        group_scores = tl.where(members, tl.where(score == score, score, float("inf")), group_scores)
    is_best = expert < 0
    for _ in tl.static_range(TOPK_GROUP):
        is_left = is_expert & ~is_best
        best = tl.max(tl.where(is_left, group_scores, -float("inf")), 0)
        first = tl.min(tl.where(is_left & (group_scores == best), group, N_GROUP), 0)
        is_best = is_best | (group == first)
    return is_best


def route(logits: Tensor, bias: Tensor | None, routing: Routing, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns (ids, weights) of each row's experts, see ops/experts.py.  The ids equal those of the reference, unless
    rounding changes the order of scores.  The weights differ by at most 1e-5."""
    parts = logits if logits.ndim == 3 else logits[None]
    num_parts, num_rows, top_k = parts.shape[0], parts.shape[1], routing.top_k
    require("route: logits", parts, (num_parts, num_rows, routing.num_experts), None, parts)
    for name, expert_values in (("bias", bias), ("scale", scale)):
        if expert_values is not None:
            require(f"route: {name}", expert_values, (routing.num_experts,), None, logits)
    parts, block = parts if parts.stride(2) == 1 else parts.contiguous(), next_power_of_2(routing.num_experts)
    ids = torch.empty(num_rows, top_k, dtype=torch.int64, device=logits.device)
    weights = logits.new_empty(num_rows, top_k)
    if num_rows:
        # SCALE is a constexpr argument, because a run-time value would be rounded to float32.
        _route_kernel[(num_rows,)](
            *(parts, parts if bias is None else bias.contiguous(), None if scale is None else scale.contiguous()),
            *(ids, weights, *parts.stride()[:2]),
            PARTS=num_parts, NUM_EXPERTS=routing.num_experts, TOP_K=top_k, SCORING=routing.scoring,
            HAS_BIAS=bias is not None, LOGIT_BIAS=routing.logit_bias, NORMALIZES_WEIGHTS=routing.norm_topk_prob,
            NORM_EPS=routing.norm_eps, SCALE=routing.routed_scaling_factor, N_GROUP=routing.n_group,
            TOPK_GROUP=routing.topk_group, TOP2_SUM=routing.group_score == "top2_sum",
            ACC_DTYPE=acc_dtype(logits.dtype), BLOCK=block, num_warps=max(block // EXPERTS_PER_WARP, 1),
            **pdl_arguments(chip(logits)),
        )  # fmt: skip
    return ids, weights
