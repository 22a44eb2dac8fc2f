"""P-EAGLE heads: EAGLE-3 heads (eagle3.py) that propose all depths of a round in one causal pass.

The root's row is an EAGLE-3 row and proposes depth 1.  The mask rows after it propose depths 2, 3, ...  All mask rows
have the same input: a mask token, and a learnt vector in place of the target's features.  A mask row attends to all
rows before it and is never kept.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.attention import Pass
from espalier.errors import EspalierError
from espalier.models.base import CausalLM
from espalier.models.draft import DraftOutput
from espalier.models.eagle3 import Eagle3Draft, head_parts
from espalier.models.eagle3_config import Eagle3Config
from espalier.models.weights import Weights


@dataclass(eq=False)
class PEagleDraft(Eagle3Draft):
    """A loaded P-EAGLE head.  mask_features: [1, 1, F], what mask rows read in place of the target's features."""

    mask_features: Tensor

    def __post_init__(self) -> None:
        super().__post_init__()
        self.mask_hidden = self.fuse(self.mask_features)

    def of_masks(self, p: Pass) -> DraftOutput:
        """Run over a pass of mask tokens."""
        return self(p, self.mask_hidden.expand(len(p.tokens), -1, -1), torch.zeros_like(p.tokens))


def make_peagle(weights: Weights, config: Eagle3Config, target: CausalLM, position_rows: int) -> PEagleDraft:
    """As make_eagle3."""
    name, size = "mask_hidden", len(config.spec.capture) * config.target_hidden
    if name not in weights:
        raise EspalierError(f"{weights.path} has no {name!r}, which a P-EAGLE head needs; use a whole checkpoint")
    shape = weights.shape(name)
    if math.prod(shape) != size:
        raise EspalierError(
            f"{weights.path}: {name} has {math.prod(shape)} values, but {len(config.spec.capture)} layers of "
            f"{config.target_hidden} are captured {config.spec.capture}; correct eagle_aux_hidden_state_layer_ids"
        )
    features = weights.take(name, *shape).view(1, 1, size)
    draft = PEagleDraft(**head_parts(weights, config, target, position_rows), mask_features=features)
    weights.finish()
    return draft
