"""N-gram lookup on the device (prompt lookup decoding, Saxena 2023): tokens that followed before are proposed again.

It needs no model and no K/V: candidates come from the slot's history.  Earlier occurrences of the history's suffix give
the branches, longest first, then latest first.  Branches start with distinct tokens, so siblings are distinct.
"""

from typing import Self

import torch
from torch import Tensor

from espalier.attention import CommittedLengths
from espalier.kernels.tree.ngram import find_matches
from espalier.layout import RoundLayout
from espalier.models.draft import DraftSpec
from espalier.slots import BatchState
from espalier.speculate.sampler import Sampler
from espalier.speculate.tree import Pool, Tree, root_only


class NgramDrafter:
    spec = DraftSpec("ngram")

    def __init__(self, layout: RoundLayout):
        self.layout = layout

    def for_layout(self, layout: RoundLayout) -> Self:
        return type(self)(layout)

    def prepare(self, lengths: CommittedLengths) -> None:
        pass

    def propose(self, slots: BatchState, sampler: Sampler) -> Tree:
        if self.layout.num_draft_tokens == 1:
            return root_only(slots.root)
        topk = self.layout.topk
        length, ends = find_matches(slots.table.history, slots.index, slots.prefix_len, topk)
        # After a match of m tokens, each proposed token has probability m / (m + 1).  No match: -inf, a void node.
        logp = torch.where(length > 0, torch.log(length / (length + 1.0)), -torch.inf).float()
        pool = Pool(topk)
        branches = torch.arange(topk, device=ends.device).expand_as(ends)
        pool.add(slots.history_at(continued_at(ends, slots.prefix_len, 1))[:, None], logp[:, None])
        for level in range(2, self.layout.steps + 1):
            # Branches keep their order.  From level 2 on, a branch is the first of its beam's topk candidates.
            pool.keep(branches if level == 2 else branches * topk)
            tokens = slots.history_at(continued_at(ends, slots.prefix_len, level))
            pool.add(*only_children(tokens, logp * level))
        return pool.select(slots.root, self.layout.num_draft_tokens)

    def extend(
        self, slots: BatchState, target_features: Tensor | None, length: Tensor, last_pieces: Tensor | None = None
    ) -> None:
        pass


def only_children(tokens: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens and scores [B, K] as candidates [B, K, K]: one child for each branch, and -inf for its other children."""
    batch, topk = tokens.shape
    padded = scores.new_full((batch, topk, topk), -torch.inf)
    padded[..., 0] = scores
    return tokens[..., None].expand(-1, -1, topk), padded


def continued_at(ends: Tensor, root: Tensor, level: int) -> Tensor:
    """[B, K]: position of the token `level` tokens after `ends` [B, K].

    If that is past the root's position `root` [B], the text between match and root is continued periodically.
    """
    period = (root[:, None] - ends).clamp(min=1)
    return ends + 1 + (level - 1) % period
