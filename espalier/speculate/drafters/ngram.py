"""N-gram lookup on the device (prompt lookup decoding, Saxena 2023): what once followed is proposed again.

No model and no K/V: candidates come from the slot's own history.  The longest and then the latest occurrences of the
history's suffix each give a branch; branches start with distinct tokens, so siblings are distinct.
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

    def sized(self, layout: RoundLayout) -> Self:
        return type(self)(layout)

    def prepare(self, lengths: CommittedLengths) -> None:
        pass

    def propose(self, slots: BatchState, sampler: Sampler) -> Tree:
        if self.layout.num_draft_tokens == 1:
            return root_only(slots.root)
        topk = self.layout.topk
        length, ends = find_matches(slots.table.history, slots.index, slots.prefix_len, topk)
        found = length > 0
        # A match of m tokens is trusted as m in m + 1 a step; what is not found scores -inf and becomes a void node.
        step = torch.where(found, torch.log(length / (length + 1.0)), -torch.inf).float()
        pool = Pool(topk)
        places = torch.arange(topk, device=ends.device).expand_as(ends)
        pool.add(slots.history_at(continued_at(ends, slots.prefix_len, 1))[:, None], step[:, None])
        for level in range(2, self.layout.steps + 1):
            # Branches stay in their order: each is its beam's first child.
            pool.keep(places if level == 2 else places * topk)
            tokens = slots.history_at(continued_at(ends, slots.prefix_len, level))
            pool.add(*only_children(tokens, step * level))
        return pool.select(slots.root, self.layout.num_draft_tokens)

    def extend(self, slots: BatchState, read: Tensor | None, length: Tensor) -> None:
        pass


def only_children(tokens: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """[B, K, K] each: a branch has one child where a beam could have topk; the rest of the candidates do not exist."""
    batch, topk = tokens.shape
    wide = scores.new_full((batch, topk, topk), -torch.inf)
    wide[..., 0] = scores
    return tokens[..., None].expand(-1, -1, topk), wide


def continued_at(ends: Tensor, root: Tensor, level: int) -> Tensor:
    """[B, K]: where the token `level` past positions `ends` [B, K] stands; a match that reaches the root [B] goes on
    around its period."""
    period = (root[:, None] - ends).clamp(min=1)
    return ends + 1 + (level - 1) % period
