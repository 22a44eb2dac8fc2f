"""Edges of a block draft (a Markov head): logits that depend on earlier drafted tokens, by a product of low rank.

A depth is scored row by row.  Depth 1 has one row, the root.  The best candidates of a depth become the rows of the
next depth (`choose_next_rows`).  edge_topk.py and edge_factors.py have the kernels; this file has the references.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from espalier.kernels.ops.drafts import Candidates
from espalier.kernels.ops.tree import comparable_scores, ordered_topk


class DepthRows(NamedTuple):
    """The rows of a depth.  A row is a token or a path of the previous depth, which the depth's candidates continue.

    tokens: [B, R] int64, the last token of each row; 0 for an unused row.  scores: [B, R] float32, the score of the
    best path to each row; -inf for an unused row.
    The other two fields are only for recurrent edges, from depth 2 on.  parents: [B, R] int64, the row of the previous
    depth that each row continues; 0 for an unused row.  states: [B, rows of the previous depth, rank], the state after
    each row of the previous depth.
    """

    tokens: Tensor
    scores: Tensor
    parents: Tensor | None = None
    states: Tensor | None = None

    @classmethod
    def for_roots(cls, root: Tensor) -> DepthRows:
        """Returns the rows of depth 1: one row per request.  root: [B] int64, the root's token."""
        return cls(root[:, None], torch.zeros(len(root), 1, device=root.device))


@dataclass(frozen=True)
class FactorProjection:
    """Factors that depend on more than a row's last token: DSpark's gated head, and its recurrent head (`rnn`).

    Let e be the last token's row of token_factors, and p a linear projection of e, of the block's hidden state at the
    depth and, in a recurrent head, of the state.  The factor of a gated head is sigmoid(p) * e.  In a recurrent head, p
    has three parts: gate, candidate and output.  The new state is sigmoid(gate) * state + (1 - sigmoid(gate)) *
    tanh(candidate), and the factor is tanh(output).  The state before depth 1 is 0.

    hidden_part: [B, S, rank], or [B, S, 3 * rank] if recurrent: the hidden state's part of p at each depth, with the
    bias.  weight: the projection without the columns for the hidden state: [rank, rank], for e; if recurrent, [3 *
    rank, 2 * rank], for the state and then e.
    """

    hidden_part: Tensor
    weight: Tensor
    is_recurrent: bool


def split_projection_columns(weight: Tensor, hidden_size: int, is_recurrent: bool) -> tuple[Tensor, Tensor]:
    """Split a stored projection into (the columns of the hidden state, FactorProjection.weight).

    A gate [rank, H + rank] has columns for the hidden state, then e.  A recurrent projection [3 * rank, 2 * rank + H]
    has columns for the state, e, then the hidden state."""
    if is_recurrent:
        return weight[:, -hidden_size:], weight[:, :-hidden_size]
    return weight[:, :hidden_size], weight[:, hidden_size:]


@dataclass(frozen=True)
class LowRankEdges:
    """The logits of a block draft, which depend on earlier drafted tokens.

    A row is an already drafted token or path (DepthRows).  At one depth, the logit of column c after a row is
    base_logits[c] + (factor of the row) · column_factors[c].
    base_logits: [B, S, C], for S depths.  token_factors: [V, rank].  A row's factor is token_factors[token]; with
    `projection`, see FactorProjection.
    ids: None if the columns are the draft vocabulary; column_factors is then [C, rank].  Otherwise [B, S, C] int64 in
    ascending order: the columns are these tokens, no other token is a candidate, and column_factors is [B, S, C, rank].
    """

    base_logits: Tensor
    token_factors: Tensor
    column_factors: Tensor
    ids: Tensor | None = None
    projection: FactorProjection | None = None

    @property
    def is_recurrent(self) -> bool:
        """Whether a row stands for one path.  If not, all paths that end in the same token share a row."""
        return self.projection is not None and self.projection.is_recurrent

    def factors(self, depth: int, rows: DepthRows) -> tuple[Tensor, Tensor | None]:
        """Returns (the rows' factors, their new states), [B, R, rank] each.  Without recurrence, the second is None.
        depth: counted from 0."""
        embedded = self.token_factors[rows.tokens.clamp(min=0)]
        if self.projection is None:
            return embedded, None
        hidden_part, weight = self.projection.hidden_part[:, depth, None], self.projection.weight
        if not self.is_recurrent:
            return torch.sigmoid(hidden_part + embedded @ weight.T) * embedded, None
        state = torch.zeros_like(embedded)
        if depth > 0:
            assert rows.parents is not None and rows.states is not None
            state = rows.states.gather(1, rows.parents[..., None].expand_as(embedded))
        gate, candidate, output = (hidden_part + torch.cat((state, embedded), -1) @ weight.T).chunk(3, -1)
        gate = torch.sigmoid(gate)
        return torch.tanh(output), gate * state + (1 - gate) * torch.tanh(candidate)

    def logits(self, depth: int, factors: Tensor) -> Tensor:
        """Returns the logits [B, R, draft vocabulary] at `depth` (from 0).  factors: [B, R, rank], from `factors`."""
        column_factors = self.column_factors if self.ids is None else self.column_factors[:, depth]
        columns = self.base_logits[:, depth, None] + factors @ column_factors.mT
        if self.ids is None:
            return columns
        logits = columns.new_full((*factors.shape[:2], len(self.token_factors)), -torch.inf)
        return logits.scatter_(2, self.ids[:, depth, None].expand_as(columns), columns)


def choose_next_rows(
    tokens: Tensor, scores: Tensor, rows: DepthRows, out: Candidates, rows_are_paths: bool = False
) -> DepthRows:
    """Write the candidates of a depth to `out`.  Choose and return the rows of the next depth.

    tokens: [B, R, K] int64, scores: [B, R, K] float32, the best children of each row and their log-probabilities.
    out: [B, R, K] each.  The next rows are the K best distinct tokens; a token's score is the score of the best path to
    the token.  With rows_are_paths, the next rows are the K best candidates.  NaN scores count as -inf.
    """
    topk = tokens.shape[2]
    path_scores = comparable_scores(comparable_scores(rows.scores)[..., None] + comparable_scores(scores)).flatten(1)
    ids = tokens.flatten(1)
    order = torch.arange(ids.shape[1], device=ids.device)
    is_better = (path_scores[:, None] > path_scores[..., None]) | (
        (path_scores[:, None] == path_scores[..., None]) & (order < order[:, None])
    )
    is_same_row = order == order[:, None] if rows_are_paths else ids[:, None] == ids[..., None]
    # Of several candidates with the same token, only the best counts.
    is_best_of_token = ~(is_better & is_same_row).any(2)
    rank = (is_better & is_best_of_token[:, None]).sum(2)
    rank_of_token = torch.where(is_same_row & is_best_of_token[:, None], rank[:, None], 0).sum(2)
    has_row = (rank_of_token < topk) & (path_scores > -torch.inf)
    best, index = ordered_topk(path_scores.masked_fill(~is_best_of_token, -torch.inf), topk)
    next_rows = torch.where(has_row, rank_of_token, -1).view(tokens.shape)
    for buffer, value in zip(out, (tokens, scores, next_rows), strict=True):
        buffer.copy_(value)
    is_missing = best == -torch.inf
    parents = (index // topk).masked_fill(is_missing, 0) if rows_are_paths else None
    return DepthRows(ids.gather(1, index).masked_fill(is_missing, 0), best, parents)
