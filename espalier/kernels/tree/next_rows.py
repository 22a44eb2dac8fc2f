"""The rows of the next depth of a block draft whose candidates depend on the token before.

Candidates of all rows of a depth compete for `topk` rows of the next depth.  A row stands for a token: all paths that
end in the same token at the same depth share their continuation.  Scores are ordered as in select_beams.

Grid: one program per request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from espalier.kernels.runtime.launch import chip, kernel, power_of_two, require
from espalier.kernels.runtime.pdl import early, pdl_wait_if
from espalier.kernels.tree.select_beams import ordered_topk, usable, usable_score

if TYPE_CHECKING:
    import triton.language as tl


class NextRows(NamedTuple):
    """tokens: [B, K] int64, the token of each row, 0 for a row that nothing leads to; scores: [B, K] float32, of the
    best path to each row, -inf for such a row; next_rows: [B, R, K] int32, the row of each candidate, -1: none."""

    tokens: Tensor
    scores: Tensor
    next_rows: Tensor


def next_rows(tokens: Tensor, scores: Tensor, row_scores: Tensor) -> NextRows:
    """The K best distinct tokens among R · K candidates.

    tokens: [B, R, K] int64; scores: [B, R, K] float32, log-probabilities; row_scores: [B, R] float32, of the best path
    to each row.  A token's score is that of the best path to it.  Equal scores: the lower index first.  Exact.
    """
    return (next_rows_triton if tokens.is_cuda else next_rows_reference)(tokens, scores, row_scores)


def next_rows_triton(tokens: Tensor, scores: Tensor, row_scores: Tensor) -> NextRows:
    batch, rows, topk = tokens.shape
    require("next_rows: tokens", tokens, (-1, -1, -1), torch.int64, tokens)
    require("next_rows: scores", scores, (batch, rows, topk), torch.float32, tokens)
    require("next_rows: row_scores", row_scores, (batch, rows), torch.float32, tokens)
    made = NextRows(
        tokens.new_empty(batch, topk), scores.new_empty(batch, topk), tokens.new_empty(tokens.shape, dtype=torch.int32)
    )
    if batch:
        block = power_of_two(rows * topk)
        _next_rows_kernel[(batch,)](
            *(tokens.contiguous(), scores.contiguous(), row_scores.contiguous(), *made, topk),
            SIZE=rows * topk,
            ROWS=rows,
            TOPK=topk,
            BLOCK=block,
            num_warps=1 if block <= 256 else 4,
            **early(chip(tokens)),
        )
    return made


def next_rows_reference(tokens: Tensor, scores: Tensor, row_scores: Tensor) -> NextRows:
    topk = tokens.shape[2]
    path_scores = usable(usable(row_scores)[..., None] + usable(scores)).flatten(1)
    ids = tokens.flatten(1)
    order = torch.arange(ids.shape[1], device=ids.device)
    better = (path_scores[:, None] > path_scores[..., None]) | (
        (path_scores[:, None] == path_scores[..., None]) & (order < order[:, None])
    )
    same = ids[:, None] == ids[..., None]
    # The best candidate of each token stands for it.
    stands = ~(better & same).any(2)
    rank = (better & stands[:, None]).sum(2)
    rank_of_token = torch.where(same & stands[:, None], rank[:, None], 0).sum(2)
    usable_row = (rank_of_token < topk) & (path_scores > -torch.inf)
    best, index = ordered_topk(path_scores.masked_fill(~stands, -torch.inf), topk)
    row_tokens = ids.gather(1, index).masked_fill(best == -torch.inf, 0)
    made = torch.where(usable_row, rank_of_token, -1).to(torch.int32)
    return NextRows(row_tokens, best, made.view(tokens.shape))


@kernel
def _next_rows_kernel(
    tokens_ptr, scores_ptr, row_scores_ptr, out_tokens_ptr, out_scores_ptr, out_rows_ptr, topk,
    SIZE: tl.constexpr, ROWS: tl.constexpr, TOPK: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Takes the best candidate TOPK times, each time with all candidates of its token.

    topk equals TOPK and is used for the division: see _select_tree_kernel.
    """
    pdl_wait_if(DEPENDENT)
    request = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    exists = i < SIZE
    token = tl.load(tokens_ptr + request * SIZE + i, mask=exists, other=0)
    score = usable_score(tl.load(scores_ptr + request * SIZE + i, mask=exists, other=float("-inf")))
    before = tl.load(row_scores_ptr + request * ROWS + i // topk, mask=exists, other=float("-inf"))
    score = usable_score(usable_score(before) + score)
    rows = tl.full([BLOCK], -1, tl.int32)
    for row in range(TOPK):
        best = tl.max(score, 0)
        index = tl.min(tl.where(score == best, i, BLOCK), 0)
        row_token = tl.sum(tl.where(i == index, token, 0), 0)
        taken = (token == row_token) & (score > float("-inf"))
        rows = tl.where(taken, row, rows)
        score = tl.where(taken, float("-inf"), score)
        tl.store(out_tokens_ptr + request * TOPK + row, tl.where(best > float("-inf"), row_token, 0))
        tl.store(out_scores_ptr + request * TOPK + row, best)
    tl.store(out_rows_ptr + request * SIZE + i, rows, mask=exists)
