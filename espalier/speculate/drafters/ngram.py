"""N-gram lookup on the device (prompt lookup decoding, Saxena 2023): what once followed is proposed again.

No model and no K/V: candidates come from the slot's own history.  The longest and then the latest occurrences of the
history's suffix each give a branch; branches start with distinct tokens, so siblings are distinct.
"""

from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor

from espalier.attention import CommittedLengths
from espalier.layout import RoundLayout
from espalier.slots import Slots
from espalier.speculate.draws import Draws
from espalier.speculate.tree import Pool, Tree, root_only

MAX_NGRAM = 4


class NgramDrafter:
    algorithm = "ngram"
    layers = 0
    hidden_from: str | None = None
    carried: Mapping[str, tuple[int, ...]] = {}

    def __init__(self, layout: RoundLayout):
        self.layout = layout

    def sized(self, layout: RoundLayout) -> Self:
        return type(self)(layout)

    def prepare(self, lengths: CommittedLengths) -> None:
        pass

    def propose(self, slots: Slots, draws: Draws) -> Tree:
        if self.layout.num_draft_tokens == 1:
            return root_only(slots.root)
        topk = self.layout.topk
        history = slots.table.history[slots.index]
        length, ends = best_matches(history, slots.prefix_len, topk, draws.vocab)
        found = length > 0
        # A match of m tokens is trusted as m in m + 1 a step; what is not found scores -inf and becomes a void node.
        step = torch.where(found, torch.log(length / (length + 1.0)), -torch.inf).float()
        pool = Pool(topk)
        places = torch.arange(topk, device=ends.device).expand_as(ends)
        pool.add(continuation(history, ends, slots.prefix_len, 1)[:, None], step[:, None])
        for level in range(2, self.layout.steps + 1):
            # Branches stay in their order: each is its beam's first child.
            pool.keep(places if level == 2 else places * topk)
            pool.add(*only_children(continuation(history, ends, slots.prefix_len, level), step * level))
        return pool.select(slots.root, self.layout.num_draft_tokens)

    def extend(self, slots: Slots, captured: Tensor | None, length: Tensor) -> None:
        pass


def best_matches(history: Tensor, root: Tensor, topk: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Earlier positions [B, topk] where the history's last tokens stood before, with lengths of the match, 0 for none.

    history: [B, W]; root: [B] index of the last token.  Position j matches m tokens if history[j-m+1 .. j] equals
    history[root-m+1 .. root], m up to MAX_NGRAM.  Longest first, then latest; their next tokens are distinct.
    """
    batch, width = history.shape
    positions = torch.arange(width, device=history.device).expand(batch, -1)
    alive = positions < root[:, None]
    length = torch.zeros_like(history)
    for back in range(MAX_NGRAM):
        wanted = history.gather(1, (root - back).clamp(min=0)[:, None])
        there = torch.roll(history, back, 1)
        alive = alive & (there == wanted) & (positions >= back) & (root >= back)[:, None]
        length = length + alive
    following = torch.roll(history, -1, 1)
    key = torch.where(length > 0, length * width + positions, 0)
    best = torch.zeros(batch, vocab_size, dtype=key.dtype, device=key.device).scatter_reduce_(1, following, key, "amax")
    keys = best.topk(min(topk, vocab_size), 1).values
    keys = torch.nn.functional.pad(keys, (0, topk - keys.shape[1]))
    return keys // width, keys % width


def only_children(tokens: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """[B, K, K] each: a branch has one child where a beam could have topk; the rest of the candidates do not exist."""
    batch, topk = tokens.shape
    wide = scores.new_full((batch, topk, topk), -torch.inf)
    wide[..., 0] = scores
    return tokens[..., None].expand(-1, -1, topk), wide


def continuation(history: Tensor, ends: Tensor, root: Tensor, level: int) -> Tensor:
    """[B, K] tokens `level` past positions `ends`; a match that reaches the root goes on around its period."""
    period = (root[:, None] - ends).clamp(min=1)
    return history.gather(1, (ends + 1 + (level - 1) % period).clamp(max=history.shape[1] - 1))
