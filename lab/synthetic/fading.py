"""How the skill of a synthetic block draft falls with depth.

One pass of a block draft proposes all depths, and real drafts are worse at deeper ones.  The planted draft knows the
chain by its edges, which are the same at every depth.  To be worse at deeper depths, it prefers a random quarter of the
tokens, more strongly at each depth.  So its first guess is wrong more often.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.errors import EspalierError

# The share of tokens that deeper rows prefer, and the largest preference in nats.
FAVOURED_SHARE = 1 / 4
MAX_FAVOUR_NATS = 8.0
# Places over which a skill is measured.
MEASURED_PLACES = 8192


@dataclass(frozen=True)
class Fading:
    """favoured: [N] float32, how much the token at a place is preferred, 0 to 1; children: [N, 1 + NUM_CANDIDATES], the
    place that each shift leads to; nats_by_depth: [S] float32, nats for a token with preference 1; 0 at depth 1."""

    favoured: Tensor
    children: Tensor
    nats_by_depth: Tensor

    def logp(self, draft_logp: Tensor, steps: int) -> list[Tensor]:
        """Returns Chain.draft_logp at depths 1 to `steps`.  Raises EspalierError if the draft proposes fewer depths."""
        if steps > len(self.nats_by_depth):
            raise EspalierError(f"steps={steps} is above block_size={len(self.nats_by_depth)} of the draft; lower it")
        return [self.at(draft_logp, favour) for favour in self.nats_by_depth[:steps].tolist()]

    def at(self, draft_logp: Tensor, favour_nats: float) -> Tensor:
        return (draft_logp + favour_nats * self.favoured[self.children]).log_softmax(1)


def fading_of(draft_logp: Tensor, children: Tensor, skills: Sequence[float], generator: torch.Generator) -> Fading:
    """Returns the fading with these skills.  draft_logp: see Chain; children: see Fading.

    skills: how often the first guess is right at each depth.  Raises EspalierError for a skill that cannot be reached.
    """
    # Preferences differ between tokens, so that the skill falls smoothly.
    drawn = torch.rand(len(draft_logp), generator=generator)
    favoured = torch.where(drawn < FAVOURED_SHARE, 1 - drawn / (2 * FAVOURED_SHARE), 0.0)
    some = Fading(favoured, children[:MEASURED_PLACES], torch.zeros(1))

    def skill(favour: float) -> float:
        return float((some.at(draft_logp[:MEASURED_PLACES], favour).argmax(1) == 0).double().mean())

    least = skill(MAX_FAVOUR_NATS)
    nats_by_depth = [0.0]
    for depth, wanted in enumerate(skills[1:], 2):
        if wanted == skills[0]:
            nats_by_depth.append(0.0)
            continue
        if not least <= wanted < skills[0]:
            raise EspalierError(
                f"a skill of {wanted:.2f} at depth {depth} is out of reach of a block draft; with {skills[0]:.2f} at "
                f"depth 1, use {least:.2f} or more"
            )
        low, high = nats_by_depth[-1], MAX_FAVOUR_NATS
        while high - low > 1e-3:
            middle = (low + high) / 2
            low, high = (middle, high) if skill(middle) >= wanted else (low, middle)
        nats_by_depth.append(low)
    return Fading(favoured, children, torch.tensor(nats_by_depth))
