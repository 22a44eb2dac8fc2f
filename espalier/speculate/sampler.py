"""What a launch knows of sampling: parameters and noise for the target's picks and for the draft's scores.

The noise of a token depends on its position alone, so the nodes of one depth share it, plain decoding draws the same,
and the draft, which knows it too, proposes what the target is about to draw.  On a GPU the kernels read each slot's own
parameters and make the noise where it is used; on a CPU the same is done in plain torch, over what the batch needs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.kernels.sampling.logit_processors import SlotRows
from espalier.kernels.sampling.pick import pick_triton
from espalier.kernels.tree.draft_topk import draft_topk_triton
from espalier.sampling.logit_processors import Above, SamplingNeeds, SamplingRows, shape
from espalier.sampling.mask import masked
from espalier.sampling.noise import gumbel
from espalier.sampling.pick import SampledTokens, coupled_scores, over_temperature, pick
from espalier.slots import BatchState
from espalier.speculate.tree import VOID, Tree, ordered_topk


@dataclass(frozen=True)
class Sampler:
    """first: [B], position of the first token that this launch may draw; vocab: the target's; noise: [B, width, V] for
    positions first, first + 1, ...; rows and noise are None where the batch needs neither, and on a GPU, where
    slot_rows is what the kernels read; coupled: whether the draft's scores use the noise."""

    first: Tensor
    vocab: int
    needs: SamplingNeeds
    rows: SamplingRows | None
    noise: Tensor | None
    slot_rows: SlotRows | None = None
    coupled: bool = True

    @classmethod
    def of(
        cls, slots: BatchState, needs: SamplingNeeds, first: Tensor, width: int, vocab: int, dtype: torch.dtype
    ) -> "Sampler":
        if first.is_cuda:
            return cls.by_kernels(slots, needs, first, vocab)
        if not needs.any:
            return cls(first, vocab, needs, None, None)
        rows = SamplingRows.gather(slots, needs)
        positions = first[:, None] + torch.arange(width, device=first.device)
        noise = gumbel(rows.seed, positions, vocab, dtype) if needs.sampled else None
        return cls(first, vocab, needs, rows, noise)

    @classmethod
    def by_kernels(cls, slots: BatchState, needs: SamplingNeeds, first: Tensor, vocab: int) -> "Sampler":
        """Sampler that no knowledge of the host shapes: whatever `needs` says, each slot gets what it asks for."""
        return cls(first, vocab, needs, None, None, SlotRows.gather(slots.table, slots.index))

    def pick_nodes(self, logits: Tensor, tree: Tree, mask: Tensor | None = None) -> SampledTokens:
        """The target's token at every node: logits [B, D, V]; mask: [B, D, words] (sampling/mask.py)."""
        if self.slot_rows is not None:
            # Node 0, the root, is counted in its slot.
            above = (tree.tokens, tree.ancestors)
            rows, offsets = self.slot_rows, noise_offsets(tree)
            return SampledTokens(*pick_triton(logits, rows, self.first, offsets, above, first_above=1, mask=mask))
        drafted = tree.tokens.masked_fill(tree.depths == 0, VOID)
        counted = Above(drafted, tree.ancestors) if self.needs.penalised else None
        return self._pick(masked(logits, mask), noise_offsets(tree), counted)

    def pick_last(self, logits: Tensor, mask: Tensor | None = None) -> SampledTokens:
        """The token after a chunk: logits [B, 1, V]; mask: [B, 1, words]."""
        offsets = torch.zeros_like(self.first[:, None])
        if self.slot_rows is not None:
            return SampledTokens(*pick_triton(logits, self.slot_rows, self.first, offsets, mask=mask))
        return self._pick(masked(logits, mask), offsets, None)

    def _pick(self, logits: Tensor, offsets: Tensor, above: Above | None) -> SampledTokens:
        return pick(logits, self.rows, self.needs, self.first[:, None] + offsets, self._noise(offsets), above)

    def children(
        self, logits: Tensor, d2t: Tensor | None, offset: int, scores: Tensor, topk: int, above: Above | None
    ) -> tuple[Tensor, Tensor]:
        """The topk best continuations of draft rows: target ids [B, Q, K] and path scores [B, Q, K] float32.

        logits: [B, Q, draft vocabulary]; d2t: their target ids, None where the vocabularies are one; offset: of the
        position that is drawn; scores: [B, Q] of the rows' own paths; above: drafted tokens above each row.
        """
        if self.slot_rows is not None:
            hanging = None if above is None else (above.tokens, above.ancestor_bits)
            return draft_topk_triton(
                logits, d2t, self.slot_rows, self.first, offset, scores, topk, hanging, coupled=self.coupled
            )
        logp, ids = self._child_scores(logits, d2t, offset, above)
        best, index = ordered_topk(logp.float(), topk)
        return (index if ids is None else ids[index]), scores[..., None] + best.clamp(max=0)

    def _child_scores(
        self, logits: Tensor, d2t: Tensor | None, offset: int, above: Above | None
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities of the children, and the target ids that their last dimension counts.

        Where parameters shape the draw, they are over the target's vocabulary, and ids are None: the index is the id.
        """
        exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.rows is None:
            return torch.log_softmax(exact, -1), d2t
        if d2t is not None:
            exact = exact.new_full((*exact.shape[:-1], self.vocab), -torch.inf).index_copy_(-1, d2t, exact)
        offsets = torch.full(logits.shape[:2], offset, device=logits.device)
        shaped = shape(exact, self.rows, self.needs, self.first[:, None] + offsets, above)
        noise = self._noise(offsets)
        if noise is None:
            return torch.log_softmax(shaped, -1), None
        if not self.coupled:
            return torch.log_softmax(over_temperature(shaped, self.rows), -1), None
        return coupled_scores(shaped, self.rows, noise), None

    def _noise(self, offsets: Tensor) -> Tensor | None:
        if self.noise is None:
            return None
        batch = torch.arange(offsets.shape[0], device=offsets.device)[:, None]
        return self.noise[batch, offsets]


def noise_offsets(tree: Tree) -> Tensor:
    """[B, D]: how far past `first`, the position after the root, the token after a node stands: the node's depth."""
    return tree.depths
