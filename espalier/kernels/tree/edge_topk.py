"""One depth of a block draft with edges: the candidates of all its rows, and the rows of the next depth.

A row is a token: all paths that end in the same token at the same depth have the same continuations.  The first kernel
has one program per (request, tile of rows, split of the columns).  It adds the edges, a product of low rank, to the
depth's logits, and keeps the split's top k, maximum and sum of exponentials.  It never writes the logits of a row.
The second kernel has one program per request: it merges the splits of each row and ranks the next depth's rows.

The reference is Sampler.next_depth in espalier/speculate/sampler.py on a CPU.  Like draft_topk.py, this file may draft
other tokens than the reference; the emitted tokens are the same.  Children are ordered by exact logits, and ties go to
the lower column.

Tolerance: that of draft_topk.py, plus rank · 2⁻²⁴ times the sum of the products' magnitudes, because logits are summed
in float32 (float64 for float64).  The reference rounds product and sum to the logits' dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.runtime.launch import chip, kernel, power_of_two, require
from espalier.kernels.runtime.pdl import ask_for, early, pdl_trigger, pdl_wait, pdl_wait_if
from espalier.kernels.sampling.logit_processors import (
    COLUMNS,
    AboveArguments,
    LogitsArguments,
    SlotArguments,
    SlotRows,
    above_arguments,
    leaves_logits,
    logits_arguments,
    row_of,
)
from espalier.kernels.tree.draft_topk import merge_splits, merge_warps, shaped_with_noise
from espalier.kernels.tree.select_beams import ordered_topk, usable, usable_score
from espalier.kernels.tree.select_paths import Candidates

if TYPE_CHECKING:
    import triton.language as tl

# Columns of a program.  With BLOCK_RANK and STAGES its tiles fit into the shared memory of the smallest supported GPU.
SPLIT = 512
BLOCK_RANK = 32
STAGES = 3
# Rows of a program: at least what tensor cores need; at most what keeps their logits in registers.
LEAST_ROWS, MOST_ROWS = 8, 16
# The fewest columns that tensor cores take.
LEAST_SPLIT = 16


class Rows(NamedTuple):
    """The rows of a depth.  tokens: [B, R] int64, the token before, 0 for a row that nothing leads to; scores: [B, R]
    float32, of the best path to each row, -inf for such a row."""

    tokens: Tensor
    scores: Tensor


@dataclass(frozen=True)
class LowRankEdges:
    """Logits of a block that depend on the token before: of column c after token u at a depth, base[c] + before[u] ·
    after[c].

    base: [B, S, C], by depth; before: [V, rank].  after: [C, rank], and ids None: the columns are the draft vocabulary.
    Or after: [B, S, C, rank] and ids: [B, S, C] int64, ascending: the columns are these tokens, and no others are
    candidates.
    """

    base: Tensor
    before: Tensor
    after: Tensor
    ids: Tensor | None = None

    def logits(self, depth: int, tokens: Tensor) -> Tensor:
        """tokens: [B, R], each before depth + 1 -> [B, R, draft vocabulary]."""
        after = self.after if self.ids is None else self.after[:, depth]
        columns = self.base[:, depth, None] + self.before[tokens.clamp(min=0)] @ after.mT
        if self.ids is None:
            return columns
        logits = columns.new_full((*tokens.shape, len(self.before)), -torch.inf)
        return logits.scatter_(2, self.ids[:, depth, None].expand_as(columns), columns)


def fill_depth(tokens: Tensor, scores: Tensor, rows: Rows, out: Candidates) -> Rows:
    """Write the candidates of a depth to `out`, and rank the rows of the next depth.

    tokens: [B, R, K] int64, scores: [B, R, K] float32: the best children of each row, with their log-probabilities.
    out: [B, R, K] each.  The next rows are the K best distinct tokens; a token's score is that of the best path to it,
    with scores ordered as in select_beams.
    """
    topk = tokens.shape[2]
    path_scores = usable(usable(rows.scores)[..., None] + usable(scores)).flatten(1)
    ids = tokens.flatten(1)
    order = torch.arange(ids.shape[1], device=ids.device)
    better = (path_scores[:, None] > path_scores[..., None]) | (
        (path_scores[:, None] == path_scores[..., None]) & (order < order[:, None])
    )
    same = ids[:, None] == ids[..., None]
    # A token's score is that of its best candidate.
    stands = ~(better & same).any(2)
    rank = (better & stands[:, None]).sum(2)
    rank_of_token = torch.where(same & stands[:, None], rank[:, None], 0).sum(2)
    has_row = (rank_of_token < topk) & (path_scores > -torch.inf)
    best, index = ordered_topk(path_scores.masked_fill(~stands, -torch.inf), topk)
    next_rows = torch.where(has_row, rank_of_token, -1).view(tokens.shape)
    for place, value in zip(out, (tokens, scores, next_rows), strict=True):
        place.copy_(value)
    return Rows(ids.gather(1, index).masked_fill(best == -torch.inf, 0), best)


def edge_topk_triton(
    edges: LowRankEdges,
    depth: int,
    rows: Rows,
    d2t: Tensor | None,
    slots: SlotRows,
    first: Tensor,
    out: Candidates,
    coupled: bool = True,
    mask: Tensor | None = None,
    only: Tensor | None = None,
) -> Rows:
    """Write the K best children of each row at `depth` (from 0) to `out`, [B, R, K] each, and return the next rows.

    first [B] + depth: the position of the children.  mask: [B, 1, ceil(V / 32)] int32, the bits of target ids that may
    be drafted; only: [B, 1] int64, the only token that may be, -1 for several.  d2t, slots, first, coupled and scores
    as draft_topk_triton; penalties count no drafted token.  Raises EspalierError for other shapes and dtypes.
    """
    (batch, num_rows, topk), (columns, rank) = out.tokens.shape, edges.after.shape[-2:]
    made = Rows(first.new_empty(batch, topk), rows.scores.new_empty(batch, topk))
    if not out.tokens.numel():
        return made
    # Stride 0: all requests share it.
    own = edges.ids is not None
    after = (edges.after[:, depth] if own else edges.after).expand(batch, -1, -1)
    ids = edges.ids[:, depth] if edges.ids is not None else None if d2t is None else d2t.expand(batch, -1)
    _require(edges, rows, after, ids, out)
    logits = logits_arguments(edges.base[:, depth : depth + 1], columns, slots, first)
    split = min(SPLIT, max(power_of_two(columns), LEAST_SPLIT))
    splits, kept = -(-columns // split), min(topk, split)
    tile = min(max(power_of_two(num_rows), LEAST_ROWS), MOST_ROWS)
    exact = torch.promote_types(edges.base.dtype, torch.float32)
    values = torch.empty(batch, num_rows, splits, kept, dtype=exact, device=edges.base.device)
    indices = torch.empty_like(values, dtype=torch.int32)
    sums = values.new_empty(batch, num_rows, splits)
    of_splits, id_arguments = (values, indices, sums), (ids, 0 if ids is None else ids.stride(0))
    is_half = after.element_size() == 2
    _edge_topk_kernel[(batch * -(-num_rows // tile), splits)](
        *(*of_splits, rows.tokens, *rows.tokens.stride(), edges.before, edges.before.stride(0), after),
        *(*after.stride()[:2], *id_arguments, depth, logits, slots.arguments),
        *(above_arguments(None, 0, 1, slots, mask), num_rows, columns, splits),
        COLUMNS=COLUMNS,
        COUPLED=coupled,
        RANK=rank,
        BLOCK_RANK=BLOCK_RANK if is_half else BLOCK_RANK // 2,
        ROWS=tile,
        SPLIT=split,
        KEPT=kept,
        IS_WEIGHT=not own,
        num_warps=4,
        num_stages=STAGES if is_half else 1,
        # A fused multiply-add rounds once; the reference rounds twice.
        enable_fp_fusion=False,
        **early(chip(values)),
    )
    rows_block, splits_block = power_of_two(num_rows), power_of_two(splits)
    _merge_rows_kernel[(batch,)](
        *(*out, out.tokens.stride(0), *made, *of_splits, *id_arguments, rows.scores, *rows.scores.stride()),
        *(only, 0 if only is None else only.stride(0), num_rows, splits, kept),
        ROWS=rows_block,
        SPLITS=splits_block,
        CHILDREN=power_of_two(topk),
        TOPK=topk,
        num_warps=merge_warps(rows_block * splits_block),
        enable_fp_fusion=False,
        **early(chip(values)),
    )
    return made


def _require(edges: LowRankEdges, rows: Rows, after: Tensor, ids: Tensor | None, out: Candidates) -> None:
    (batch, num_rows, topk), (_, columns, rank), base = out.tokens.shape, after.shape, edges.base
    require("edge_topk: tokens", rows.tokens, (batch, num_rows), torch.int64, base)
    require("edge_topk: scores", rows.scores, (batch, num_rows), torch.float32, base)
    require("edge_topk: before", edges.before, (-1, rank), after.dtype, base)
    require("edge_topk: after", after, (batch, columns, rank), base.dtype, base)
    if ids is not None:
        require("edge_topk: ids", ids, (batch, columns), torch.int64, base)
    for value, dtype in zip(out, (torch.int64, torch.float32, torch.int32), strict=True):
        require("edge_topk: out", value, (batch, num_rows, topk), dtype, base)
    dense = [edges.before, after, *(() if ids is None else (ids,)), *(value[0] for value in out)]
    if any(value.stride(-1) != 1 for value in dense[:-3]) or not all(value.is_contiguous() for value in dense[-3:]):
        raise EspalierError(
            "edge_topk: factors, ids and out must be dense in their last dimensions; allocate them whole"
        )


@kernel
def _edge_topk_kernel(
    values_ptr, indices_ptr, sums_ptr, tokens_ptr, tokens_batch_stride, tokens_row_stride, before_ptr, before_stride,
    after_ptr, after_batch_stride, after_stride, ids_ptr, ids_stride, depth, logits, slots, above,
    num_rows, num_columns, splits,
    COLUMNS: tl.constexpr, COUPLED: tl.constexpr, RANK: tl.constexpr, BLOCK_RANK: tl.constexpr, ROWS: tl.constexpr,
    SPLIT: tl.constexpr, KEPT: tl.constexpr, IS_WEIGHT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """x [SPLIT, ROWS] holds the logits of one split, a column for each row: all of one request and one position.

    The programs of a split are launched together, so its part of `after` is read from memory once.
    """
    pdl_trigger(DEPENDENT)
    tiles = tl.cdiv(num_rows, ROWS)
    b = (tl.program_id(0) // tiles).to(tl.int64)
    row_index = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(1)
    place, rank = tl.arange(0, SPLIT), tl.arange(0, BLOCK_RANK)
    index = split * SPLIT + place
    inside = index < num_columns
    # Columns past the end read the last one instead; they count as -inf.
    of_column = after_ptr + b * after_batch_stride + tl.minimum(index, num_columns - 1).to(tl.int64) * after_stride
    if DEPENDENT and IS_WEIGHT:
        # An L2 line of 128 bytes holds 64 numbers.
        for line in tl.static_range(0, RANK, 64):
            ask_for(of_column + line)
    pdl_wait(DEPENDENT)
    exists = row_index < num_rows
    tokens = tokens_ptr + b * tokens_batch_stride + row_index * tokens_row_stride
    of_row = before_ptr + tl.maximum(tl.load(tokens, mask=exists, other=0), 0) * before_stride
    exact: tl.constexpr = values_ptr.dtype.element_ty
    x = tl.zeros([SPLIT, ROWS], exact)
    for start in range(0, RANK, BLOCK_RANK):
        if RANK % BLOCK_RANK == 0:
            after = tl.load(of_column[:, None] + (start + rank)[None, :])
            before = tl.load(of_row[None, :] + (start + rank)[:, None])
        else:
            after = tl.load(of_column[:, None] + (start + rank)[None, :], mask=start + rank[None, :] < RANK, other=0.0)
            before = tl.load(of_row[None, :] + (start + rank)[:, None], mask=start + rank[:, None] < RANK, other=0.0)
        x = tl.dot(after, before, x, input_precision="ieee", out_dtype=exact)
    logits, slots, above = LogitsArguments(*logits), SlotArguments(*slots), AboveArguments(*above)
    _, base_ptr, position, row, row_above = row_of(b, 1, depth, logits, slots, above, COLUMNS)
    x += tl.load(base_ptr + index, mask=inside, other=0.0).to(exact)[:, None]
    x = tl.where(inside[:, None], x, float("-inf"))
    ids = index
    if ids_ptr is not None:
        # Who asks for nothing needs no ids.
        needs_ids = ~leaves_logits(row) | (above.mask_words > 0)
        ids = tl.load(ids_ptr + b * ids_stride + index, mask=inside & needs_ids, other=0).to(tl.int32)
    x = shaped_with_noise(x, ids[:, None], inside[:, None], b, position, slots, row, row_above, COLUMNS, COUPLED)
    nan = tl.max((x != x).to(tl.int32), 0)
    x = tl.where(x != x, float("-inf"), x)
    top = tl.max(x, 0)
    total = tl.sum(tl.exp(x - tl.where(top == float("-inf"), 0.0, top)[None, :]), 0)
    out = (b * num_rows + row_index) * splits + split
    tl.store(sums_ptr + out, tl.where(nan != 0, float("nan"), total), mask=exists)
    for k in range(KEPT):
        best, best_place = tl.max(x, 0, return_indices=True)
        tl.store(values_ptr + out * KEPT + k, best, mask=exists)
        tl.store(indices_ptr + out * KEPT + k, split * SPLIT + best_place, mask=exists)
        x = tl.where(place[:, None] == best_place[None, :], float("-inf"), x)


@kernel
def _merge_rows_kernel(
    tokens_ptr, scores_ptr, next_rows_ptr, out_stride, next_tokens_ptr, next_scores_ptr,
    values_ptr, indices_ptr, sums_ptr, ids_ptr, ids_stride, row_scores_ptr, row_scores_batch_stride, row_scores_stride,
    only_ptr, only_stride, num_rows, splits, kept,
    ROWS: tl.constexpr, SPLITS: tl.constexpr, CHILDREN: tl.constexpr, TOPK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    pdl_wait_if(DEPENDENT)
    b = tl.program_id(0).to(tl.int64)
    row, child = tl.arange(0, ROWS), tl.arange(0, CHILDREN)[None, :]
    columns, scores = merge_splits(
        values_ptr, indices_ptr, sums_ptr, b * num_rows + row, row < num_rows, splits, kept,
        ROWS, SPLITS, CHILDREN, TOPK,
    )  # fmt: skip
    valid = scores > float("-inf")
    tokens = columns.to(tl.int64)
    if ids_ptr is not None:
        tokens = tl.load(ids_ptr + b * ids_stride + columns, mask=valid, other=0)
    tokens = tl.where(valid, tokens, 0)
    if only_ptr is not None:
        only = tl.load(only_ptr + b * only_stride)
        tokens = tl.where(only >= 0, only, tokens)
        scores = tl.where(only >= 0, tl.where(child == 0, 0.0, float("-inf")), scores)
    out = b * out_stride + row[:, None] * TOPK + child
    is_child = (row < num_rows)[:, None] & (child < TOPK)
    tl.store(tokens_ptr + out, tokens, mask=is_child)
    tl.store(scores_ptr + out, scores, mask=is_child)
    row_scores = row_scores_ptr + b * row_scores_batch_stride + row * row_scores_stride
    path_scores = tl.load(row_scores, mask=row < num_rows, other=float("-inf"))[:, None] + scores
    path_scores = tl.where(is_child, usable_score(path_scores), float("-inf"))
    next_rows = _rank_rows(next_tokens_ptr + b * TOPK, next_scores_ptr + b * TOPK, tokens, path_scores, TOPK)
    tl.store(next_rows_ptr + out, next_rows, mask=is_child)


@kernel
def _rank_rows(next_tokens_ptr, next_scores_ptr, tokens, scores, TOPK: tl.constexpr):
    """The next row of each candidate [ROWS, CHILDREN].  Takes the best one TOPK times, with all of its token."""
    SIZE: tl.constexpr = tokens.numel
    token, score = tl.reshape(tokens, [SIZE]), tl.reshape(scores, [SIZE])
    i = tl.arange(0, SIZE)
    next_rows = tl.full([SIZE], -1, tl.int32)
    for next_row in range(TOPK):
        best, best_i = tl.max(score, 0, return_indices=True)
        best_token = tl.sum(tl.where(i == best_i, token, 0), 0)
        is_taken = (token == best_token) & (score > float("-inf"))
        next_rows = tl.where(is_taken, next_row, next_rows)
        score = tl.where(is_taken, float("-inf"), score)
        tl.store(next_tokens_ptr + next_row, tl.where(best > float("-inf"), best_token, 0))
        tl.store(next_scores_ptr + next_row, best)
    return tl.reshape(next_rows, tokens.shape)
