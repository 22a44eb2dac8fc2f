"""Processes one depth of a block draft with edges (edges.py): finds the candidates of its rows, and the next depth's
rows.

A row is one input of a depth, whose next candidates are scored.  Without recurrent edges the scores depend only on a
path's last token and depth, so paths with the same last token share a row.  With recurrent edges each path has a row.
There are three kernels.  The first has one program per (group of requests, tile of rows, split
of the columns).  The first kernel adds the edges, a product of low rank, to the depth's logits.  It writes the logits,
and each split's maximum and sum of exponentials.  The second kernel has one program per row.  The best columns are in
the splits with the best maxima, so a program reads only these splits.  The third kernel has one program per request,
which chooses the next depth's rows.

The reference is espalier/speculate/sampler.py:TorchSampler.next_depth.  Like draft_topk.py, this file may draft
other tokens than the reference; the emitted tokens are the same.  Children are ordered by logits in float32; of equal
logits, the lower column comes first.

Tolerance: as in draft_topk.py, plus rank · 2⁻²⁴ times the sum of the products' magnitudes, because logits are summed
in float32 (float64 for float64, then rounded to float32).  The reference rounds product and sum to the logits' dtype.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.ops.drafts import Candidates
from espalier.kernels.runtime.jit import float_to_key, kernel, key_to_float
from espalier.kernels.runtime.launch import acc_dtype, chip, next_power_of_2, require, warps_for
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger, pdl_trigger_and_wait, pdl_wait
from espalier.kernels.sampling.logit_processors import (
    COLUMNS,
    DraftedArguments,
    GatheredSlots,
    LogitsArguments,
    SlotArguments,
    drafted_arguments,
    leaves_logits_unchanged,
    load_row_arguments,
    logits_arguments,
)
from espalier.kernels.tree.draft_topk import process_and_add_noise
from espalier.kernels.tree.edges import DepthRows, LowRankEdges
from espalier.kernels.tree.select_tree import comparable_score

# Columns per program, and factor values per step (a factor has `rank` values).  A step's column factors take 64 kB in
# bfloat16, so three programs fit in the shared memory of a multiprocessor.
MAX_SPLIT_SIZE, BLOCK_RANK = 128, 256
NUM_WARPS = 8
# Requests per program.  The program reads columns once for all its requests.
REQUESTS_PER_PROGRAM = 8
# The fewest rows per program (tensor cores need 8), and the most rows (their logits must fit in registers).
MIN_TILE_ROWS, MAX_TILE_ROWS = 8, 16
# The fewest columns, and the smallest rank, that tensor cores take.
MIN_SPLIT_SIZE, MIN_RANK = 16, 16
# Values per warp when a program searches for the best values.  With few warps, a step of the search needs few barriers.
VALUES_PER_WARP = 1024


def edge_topk_triton(
    edges: LowRankEdges,
    depth: int,
    rows: DepthRows,
    factors_and_states: tuple[Tensor, Tensor | None] | None,
    d2t: Tensor | None,
    slots: GatheredSlots,
    first_positions: Tensor,
    out: Candidates,
    adds_noise: bool = True,
    mask: Tensor | None = None,
    forced_tokens: Tensor | None = None,
) -> DepthRows:
    """Write the K best children of each row at `depth` (from 0) to `out`, [B, R, K] each, and return the next rows.

    factors_and_states: the rows' factors and states, from edge_factors_triton; None: a row's factor is token_factors
    of its token.  The children have position first_positions [B] + depth.  mask: [B, 1, ceil(V / 32)] int32, the bits
    of target ids that may be drafted; None allows all.  forced_tokens: [B, 1] int64, the only token that may be
    drafted, or -1 if there are several.  d2t, slots, adds_noise: see draft_topk_triton; penalties count no drafted
    token.  Raises EspalierError for other shapes and dtypes.
    """
    (batch, num_rows, topk), (columns, rank) = out.tokens.shape, edges.column_factors.shape[-2:]
    factors, states = factors_and_states or (None, None)
    rows_are_paths = edges.is_recurrent
    next_depth = DepthRows(
        first_positions.new_empty(batch, topk),
        rows.scores.new_empty(batch, topk),
        first_positions.new_empty(batch, topk) if rows_are_paths else None,
        states,
    )
    if not out.tokens.numel():
        return next_depth
    # If all requests have the same columns, `expand` makes the batch stride of these tensors 0.
    has_own_columns = edges.ids is not None
    column_factors = (edges.column_factors[:, depth] if has_own_columns else edges.column_factors).expand(batch, -1, -1)
    ids = edges.ids[:, depth] if edges.ids is not None else None if d2t is None else d2t.expand(batch, -1)
    _check_arguments(edges, rows, factors, column_factors, ids, out)
    logits = logits_arguments(edges.base_logits[:, depth : depth + 1], columns, slots, first_positions)
    split = min(MAX_SPLIT_SIZE, max(next_power_of_2(columns), MIN_SPLIT_SIZE))
    splits = -(-columns // split)
    tile = min(max(next_power_of_2(num_rows), MIN_TILE_ROWS), MAX_TILE_ROWS)
    x = torch.empty(batch, num_rows, splits, split, dtype=torch.float32, device=edges.base_logits.device)
    tops, sums = x.new_empty(2, batch, num_rows, splits)
    id_arguments = (ids, 0 if ids is None else ids.stride(0))
    is_two_byte = column_factors.element_size() == 2
    requests_per_program = 1 if has_own_columns else min(REQUESTS_PER_PROGRAM, batch)
    groups = -(-batch // requests_per_program) * -(-num_rows // tile)
    row_factors = edges.token_factors if factors is None else factors.view(-1, rank)
    _edge_topk_kernel[(groups, splits)](
        *(x, tops, sums, rows.tokens if factors is None else None, *rows.tokens.stride()),
        *(row_factors, row_factors.stride(0), column_factors),
        *(*column_factors.stride()[:2], *id_arguments, depth, logits, slots.arguments),
        *(drafted_arguments(None, 0, 1, slots, mask), batch, requests_per_program, num_rows, columns, splits),
        COLUMNS=COLUMNS, ADDS_NOISE=adds_noise, RANK=rank,
        BLOCK_RANK=min(max(next_power_of_2(rank), MIN_RANK), BLOCK_RANK) if is_two_byte else MIN_RANK, ROWS=tile,
        SPLIT_SIZE=split, COLUMNS_ARE_WEIGHTS=not has_own_columns, ACC_DTYPE=acc_dtype(edges.base_logits.dtype),
        num_warps=NUM_WARPS, num_stages=1, enable_fp_fusion=False, **pdl_arguments(chip(x)),
    )  # fmt: skip
    _launch_merge_and_rank(out, next_depth, (x, tops, sums), id_arguments, rows.scores, forced_tokens)
    return next_depth


def _launch_merge_and_rank(
    out: Candidates,
    next_depth: DepthRows,
    split_results: tuple[Tensor, Tensor, Tensor],
    id_arguments: tuple[Tensor | None, int],
    row_scores: Tensor,
    forced_tokens: Tensor | None,
) -> None:
    """Launch the other two kernels.  split_results: (logits, maxima, sums).  id_arguments: (token ids, stride)."""
    (batch, num_rows, topk), (splits, split) = out.tokens.shape, split_results[0].shape[2:]
    gpu, block_splits, block_children = chip(row_scores), next_power_of_2(splits), next_power_of_2(topk)
    _merge_rows_kernel[(batch, num_rows)](
        *(*out[:2], out.tokens.stride(0), *split_results, *id_arguments),
        *(forced_tokens, 0 if forced_tokens is None else forced_tokens.stride(0), num_rows, splits, topk),
        SPLITS=block_splits, SPLIT_SIZE=split, BLOCK_CHILDREN=block_children,
        num_warps=warps_for(max(block_splits, block_children * split), VALUES_PER_WARP), enable_fp_fusion=False,
        **pdl_arguments(gpu),
    )  # fmt: skip
    candidates = next_power_of_2(num_rows * topk)
    _rank_rows_kernel[(batch,)](
        *(*out, out.tokens.stride(0), *next_depth[:3], row_scores, *row_scores.stride(), num_rows, topk),
        CANDIDATES=candidates, TOPK=topk, num_warps=warps_for(candidates, VALUES_PER_WARP), **pdl_arguments(gpu),
    )  # fmt: skip


def _check_arguments(
    edges: LowRankEdges,
    rows: DepthRows,
    factors: Tensor | None,
    column_factors: Tensor,
    ids: Tensor | None,
    out: Candidates,
) -> None:
    (batch, num_rows, topk), (_, columns, rank), base = out.tokens.shape, column_factors.shape, edges.base_logits
    if factors is not None:
        require("edge_topk: factors", factors, (batch, num_rows, rank), column_factors.dtype, base)
    require("edge_topk: tokens", rows.tokens, (batch, num_rows), torch.int64, base)
    require("edge_topk: scores", rows.scores, (batch, num_rows), torch.float32, base)
    require("edge_topk: token_factors", edges.token_factors, (-1, rank), column_factors.dtype, base)
    require("edge_topk: column_factors", column_factors, (batch, columns, rank), base.dtype, base)
    if ids is not None:
        require("edge_topk: ids", ids, (batch, columns), torch.int64, base)
    for value, dtype in zip(out, (torch.int64, torch.float32, torch.int32), strict=True):
        require("edge_topk: out", value, (batch, num_rows, topk), dtype, base)
    dense = [edges.token_factors, column_factors, *(() if ids is None else (ids,)), *(value[0] for value in out)]
    if any(value.stride(-1) != 1 for value in dense[:-3]) or not all(value.is_contiguous() for value in dense[-3:]):
        raise EspalierError(
            "edge_topk: factors, ids and out must be dense in their last dimensions; allocate them whole"
        )


@kernel
def _edge_topk_kernel(
    x_ptr, tops_ptr, sums_ptr, tokens_ptr, tokens_batch_stride, tokens_row_stride, token_factors_ptr,
    token_factors_stride, column_factors_ptr, column_factors_batch_stride, column_factors_stride, ids_ptr, ids_stride,
    depth, logits, slots, drafted, batch, requests_per_program, num_rows, num_columns, splits,
    COLUMNS: tl.constexpr, ADDS_NOISE: tl.constexpr, RANK: tl.constexpr, BLOCK_RANK: tl.constexpr,
    ROWS: tl.constexpr, SPLIT_SIZE: tl.constexpr, COLUMNS_ARE_WEIGHTS: tl.constexpr, ACC_DTYPE: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """Write the logits x [SPLIT_SIZE, ROWS] of one split of the columns, for ROWS rows of the depth.

    If the columns are weights, they are read before the wait, because no kernel writes weights.  Every second depth
    takes the splits in reverse order, because the columns that the previous depth read last may still be in the L2."""
    pdl_trigger(USE_PDL)
    tiles = tl.cdiv(num_rows, ROWS)
    first_request = (tl.program_id(0) // tiles).to(tl.int64) * requests_per_program
    row_index = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    index_in_split, rank = tl.arange(0, SPLIT_SIZE), tl.arange(0, BLOCK_RANK)
    split = tl.program_id(1)
    if depth % 2 != 0:
        split = splits - 1 - split
    index = split * SPLIT_SIZE + index_in_split
    inside = index < num_columns
    # For an index past the last column, the last column is read, and the logit becomes -inf.
    column_ptrs = column_factors_ptr + first_request * column_factors_batch_stride
    column_ptrs += tl.minimum(index, num_columns - 1).to(tl.int64) * column_factors_stride
    if not COLUMNS_ARE_WEIGHTS:
        pdl_wait(USE_PDL)
    column_values = tl.load(column_ptrs[:, None] + rank[None, :], mask=rank[None, :] < RANK, other=0.0)
    if COLUMNS_ARE_WEIGHTS:
        pdl_wait(USE_PDL)
    exists = row_index < num_rows
    logits, slots, drafted = LogitsArguments(*logits), SlotArguments(*slots), DraftedArguments(*drafted)
    for b in range(first_request, tl.minimum(first_request + requests_per_program, batch)):
        if tokens_ptr is None:
            factor_row = b * num_rows + tl.where(exists, row_index, 0)
        else:
            tokens = tokens_ptr + b * tokens_batch_stride + row_index * tokens_row_stride
            factor_row = tl.maximum(tl.load(tokens, mask=exists, other=0), 0)
        row_ptrs = token_factors_ptr + factor_row * token_factors_stride
        _, base_ptr, position, row, drafted_row = load_row_arguments(b, 1, depth, logits, slots, drafted, COLUMNS)
        base = tl.load(base_ptr + index, mask=inside, other=0.0).to(ACC_DTYPE)
        ids = index
        if ids_ptr is not None:
            # Rows whose logits do not change need no token ids.
            needs_ids = ~leaves_logits_unchanged(row) | (drafted.mask_words > 0)
            ids = tl.load(ids_ptr + b * ids_stride + index, mask=inside & needs_ids, other=0).to(tl.int32)
        row_values = tl.load(row_ptrs[None, :] + rank[:, None], mask=rank[:, None] < RANK, other=0.0)
        x = tl.dot(column_values, row_values, input_precision="ieee", out_dtype=ACC_DTYPE)
        for start in range(BLOCK_RANK, RANK, BLOCK_RANK):
            is_rank = start + rank < RANK
            more_columns = tl.load(column_ptrs[:, None] + (start + rank)[None, :], mask=is_rank[None, :], other=0.0)
            more_rows = tl.load(row_ptrs[None, :] + (start + rank)[:, None], mask=is_rank[:, None], other=0.0)
            x = tl.dot(more_columns, more_rows, x, input_precision="ieee", out_dtype=ACC_DTYPE)
        x = tl.where(inside[:, None], x + base[:, None], float("-inf"))
        x = process_and_add_noise(x, ids, inside, b, position, slots, row, drafted_row, COLUMNS, ADDS_NOISE)
        out = (b * num_rows + row_index) * splits + split
        tl.store(x_ptr + out[None, :] * SPLIT_SIZE + index_in_split[:, None], x, mask=exists[None, :])
        top, total = _max_and_sum_of_exp(x.to(tl.float32))
        tl.store(tops_ptr + out, top, mask=exists)
        tl.store(sums_ptr + out, total, mask=exists)


@kernel
def _max_and_sum_of_exp(x):
    """Returns (max x, sum of exp(x - max x)) over the first dimension.  The sum is NaN if an x is NaN or infinite."""
    top = tl.max(tl.where(x == x, x, float("-inf")), 0)
    return top, tl.sum(tl.exp(x - tl.where(top == float("-inf"), 0.0, top)[None, :]), 0)


@kernel
def _merge_rows_kernel(
    tokens_ptr, scores_ptr, out_stride, x_ptr, tops_ptr, sums_ptr, ids_ptr, ids_stride,
    forced_tokens_ptr, forced_tokens_stride, num_rows, splits, topk,
    SPLITS: tl.constexpr, SPLIT_SIZE: tl.constexpr, BLOCK_CHILDREN: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Find the topk best children of one row.  These children are in the topk splits with the largest maxima."""
    pdl_trigger_and_wait(USE_PDL)
    b = tl.program_id(0).to(tl.int64)
    row = b * num_rows + tl.program_id(1)
    split, child = tl.arange(0, SPLITS), tl.arange(0, BLOCK_CHILDREN)
    tops = tl.load(tops_ptr + row * splits + split, mask=split < splits, other=float("-inf"))
    sums = tl.load(sums_ptr + row * splits + split, mask=split < splits, other=0.0)
    top = tl.max(tops, 0)
    total = tl.sum(sums * tl.exp(tops - tl.where(top == float("-inf"), 0.0, top)), 0)
    split_tops, best_splits = _topk_values(tops, split, BLOCK_CHILDREN, topk)
    column = best_splits[:, None] * SPLIT_SIZE + tl.arange(0, SPLIT_SIZE)[None, :]
    is_chosen = (split_tops > float("-inf"))[:, None] & (column >= 0)
    x = tl.load(x_ptr + row * splits * SPLIT_SIZE + column, mask=is_chosen, other=float("-inf"))
    SIZE: tl.constexpr = BLOCK_CHILDREN * SPLIT_SIZE
    values, columns = _topk_values(tl.reshape(x, [SIZE]), tl.reshape(column, [SIZE]), BLOCK_CHILDREN, topk)
    scores = (values - top) - tl.log(total)
    # The comparison is also False for NaN.
    is_valid = scores > float("-inf")
    scores = tl.where(is_valid, tl.minimum(scores, 0.0), float("-inf"))
    tokens = columns.to(tl.int64)
    if ids_ptr is not None:
        tokens = tl.load(ids_ptr + b * ids_stride + columns, mask=is_valid, other=0)
    tokens = tl.where(is_valid, tokens, 0)
    if forced_tokens_ptr is not None:
        forced = tl.load(forced_tokens_ptr + b * forced_tokens_stride)
        tokens = tl.where(forced >= 0, forced, tokens)
        scores = tl.where(forced >= 0, tl.where(child == 0, 0.0, float("-inf")), scores)
    out = b * out_stride + tl.program_id(1) * topk + child
    tl.store(tokens_ptr + out, tokens, mask=child < topk)
    tl.store(scores_ptr + out, scores, mask=child < topk)


@kernel
def _topk_values(x, index, BLOCK_CHILDREN: tl.constexpr, topk):
    """Returns the topk best values of x, best first, and their indices, [BLOCK_CHILDREN] each.

    Of equal values, the one with the lower index comes first.  NaN counts as -inf.  If fewer than topk values are above
    -inf, the rest are -inf, with any index."""
    child = tl.arange(0, BLOCK_CHILDREN)
    # The keys are integers, because the maximum of integers over a warp is one instruction.
    keys, no_key = float_to_key(comparable_score(x)), float_to_key(tl.full([], float("-inf"), tl.float32))
    best_keys, best_index = tl.zeros([BLOCK_CHILDREN], tl.int32) + no_key, tl.zeros([BLOCK_CHILDREN], tl.int32)
    # topk is not constexpr, because Triton would unroll the loop, and the steps would not fit in the instruction cache.
    for k in range(topk):
        best = tl.max(keys, 0)
        best_at = tl.min(tl.where(keys == best, index, 2147483647), 0)
        best_keys = tl.where(child == k, best, best_keys)
        best_index = tl.where(child == k, best_at, best_index)
        keys = tl.where(index == best_at, no_key, keys)
    return key_to_float(best_keys), best_index


@kernel
def _rank_rows_kernel(
    tokens_ptr, scores_ptr, next_rows_ptr, out_stride, next_tokens_ptr, next_scores_ptr, next_parents_ptr,
    row_scores_ptr, row_scores_batch_stride, row_scores_stride, num_rows, topk,
    CANDIDATES: tl.constexpr, TOPK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Make the rows of the next depth, and write for each candidate the row that it leads to.

    TOPK times, the best remaining candidate makes a row.  If a row stands for a token and not for a path, all
    candidates with the same token lead to this row."""
    pdl_trigger_and_wait(USE_PDL)
    b = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, CANDIDATES)
    exists = i < num_rows * topk
    token = tl.load(tokens_ptr + b * out_stride + i, mask=exists, other=0).to(tl.int32)
    score = tl.load(scores_ptr + b * out_stride + i, mask=exists, other=float("-inf"))
    row_score = row_scores_ptr + b * row_scores_batch_stride + i // topk * row_scores_stride
    score = comparable_score(tl.load(row_score, mask=exists, other=float("-inf")) + score)
    # The keys are integers, because the maximum of integers over a warp is one instruction.
    key = float_to_key(score)
    none = float_to_key(tl.full([CANDIDATES], float("-inf"), tl.float32))
    next_rows = tl.full([CANDIDATES], -1, tl.int32)
    for next_row in range(TOPK):
        best_key = tl.max(key, 0)
        best_i = tl.min(tl.where(key == best_key, i, CANDIDATES), 0)
        best_token = tl.sum(tl.where(i == best_i, token, 0), 0)
        is_taken = (i == best_i if next_parents_ptr is not None else token == best_token) & (key > none)
        next_rows = tl.where(is_taken, next_row, next_rows)
        key = tl.where(is_taken, none, key)
        best_score = key_to_float(best_key)
        at = b * TOPK + next_row
        tl.store(next_tokens_ptr + at, tl.where(best_score > float("-inf"), best_token, 0).to(tl.int64))
        tl.store(next_scores_ptr + at, best_score)
        if next_parents_ptr is not None:
            tl.store(next_parents_ptr + at, tl.where(best_score > float("-inf"), best_i // topk, 0).to(tl.int64))
    tl.store(next_rows_ptr + b * out_stride + i, next_rows, mask=exists)
