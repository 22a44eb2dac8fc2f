"""What a launch knows of sampling: one place for the target's picks and the draft's scores to take parameters and noise
from.

The noise of a token depends on its position alone, so the nodes of one depth share it, plain decoding draws the same,
and the draft, which knows it too, proposes what the target is about to draw.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.sampling.noise import gumbel
from espalier.sampling.pick import Picked, coupled_scores, pick
from espalier.sampling.shape import SamplingRows, Shaping, shape
from espalier.slots import Slots
from espalier.speculate.tree import Tree


@dataclass(frozen=True)
class Draws:
    """first: [B], position of the first token that this launch may draw; noise: [B, width, V] for first, first + 1,
    ...; rows and noise are None where the batch needs neither."""

    first: Tensor
    shaping: Shaping
    rows: SamplingRows | None
    noise: Tensor | None

    @classmethod
    def of(cls, slots: Slots, shaping: Shaping, first: Tensor, width: int, vocab: int, dtype: torch.dtype) -> "Draws":
        if not shaping.any:
            return cls(first, shaping, None, None)
        rows = SamplingRows.gather(slots, shaping)
        positions = first[:, None] + torch.arange(width, device=first.device)
        noise = gumbel(rows.seed, positions, vocab, dtype) if shaping.sampled else None
        return cls(first, shaping, rows, noise)

    def pick_nodes(self, logits: Tensor, tree: Tree) -> Picked:
        """The target's token at every node: logits [B, D, V]."""
        offsets = noise_offsets(tree)
        past_root = tree.depths > 0
        return self._pick(
            logits, offsets, tree.tokens, tree.mask() & past_root[:, None] if self.shaping.penalised else None
        )

    def pick_last(self, logits: Tensor) -> Picked:
        """The token after a chunk: logits [B, 1, V]."""
        return self._pick(logits, torch.zeros_like(self.first[:, None]), None, None)

    def _pick(self, logits: Tensor, offsets: Tensor, path: Tensor | None, on_path: Tensor | None) -> Picked:
        positions = self.first[:, None] + offsets
        return pick(logits, self.rows, self.shaping, positions, self._noise(offsets), path, on_path)

    def child_scores(
        self, logits: Tensor, d2t: Tensor | None, vocab: int, offset: int, path: Tensor | None, on_path: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities of the children of draft rows, and the target ids that their last dimension counts.

        logits: [B, Q, draft vocabulary]; offset: of the position that is drawn; path [B, R], on_path [B, Q, R]: drafted
        tokens above each row.  Where parameters shape the draw, scores are over target ids (None: the index is the id).
        """
        exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.rows is None:
            return torch.log_softmax(exact, -1), d2t
        if d2t is not None:
            exact = exact.new_full((*exact.shape[:-1], vocab), -torch.inf).index_copy_(-1, d2t, exact)
        offsets = torch.full(logits.shape[:2], offset, device=logits.device)
        shaped = shape(exact, self.rows, self.shaping, self.first[:, None] + offsets, path, on_path)
        noise = self._noise(offsets)
        if noise is None:
            return torch.log_softmax(shaped, -1), None
        return coupled_scores(shaped, self.rows, noise), None

    def _noise(self, offsets: Tensor) -> Tensor | None:
        if self.noise is None:
            return None
        batch = torch.arange(offsets.shape[0], device=offsets.device)[:, None]
        return self.noise[batch, offsets]


def noise_offsets(tree: Tree) -> Tensor:
    """[B, D]: the token after a node is drawn with the noise of its own position, depth + 1 past the root's."""
    return tree.depths
