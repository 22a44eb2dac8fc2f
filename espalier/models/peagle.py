"""P-EAGLE heads: EAGLE-3 heads (eagle3.py) that propose all depths of a round in one causal pass.

The root's row is an EAGLE-3 row and proposes depth 1.  The mask rows after it propose depths 2, 3, ...  All mask rows
have the same input: a mask token, and a learnt vector in place of the target's features.  A mask row attends to all
rows before it and is never kept.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from espalier.attention import Pass
from espalier.errors import EspalierError
from espalier.models import eagle3
from espalier.models.base import CausalLM
from espalier.models.config import ModelConfig, Raw
from espalier.models.draft import DraftOutput
from espalier.models.draft_parts import Fields
from espalier.models.eagle3 import Eagle3Config, Eagle3Draft, head_parts, read_head, refuse_misfit
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


ARCHITECTURES = ("PEagleDraftModel", "PeagleLlamaForCausalLM", "PeagleQwen3ForCausalLM", "PEagleSpeculator")
# Architectures of EAGLE-3 that are P-EAGLE if the config names a mask.
EAGLE3_ARCHITECTURES = (*eagle3.ARCHITECTURES, "Eagle3Qwen3ForCausalLM")
MASKS = ("mask_token_id", "pard_token", "ptd_token_id")
# For files that do not say for how many depths they were trained.
MAX_STEPS = 16


def read_peagle(path: Path, raw: Raw, target: ModelConfig) -> Eagle3Config:
    """Read the config.json `raw` of the head at `path` and check it against its target's config.  Loads no weights.

    Raises EspalierError if the head does not fit this target.
    """
    head = read_head(path, raw, target, by_input=None)
    # The tokens that speculators trained the head to propose.
    given = Fields(raw, path)
    methods = given.object("speculators_config").get("proposal_methods") or [{}]
    if not isinstance(methods, list) or not isinstance(methods[0], dict):
        raise given.error(f"proposal_methods = {methods!r}; a list of objects is needed; correct the config")
    steps = Fields({"speculative_tokens": MAX_STEPS, **methods[0]}, path).count("speculative_tokens")
    mask_token = given.mask_token(head.layer.vocab_size, MASKS)
    spec = replace(head.spec, algorithm="peagle", block_rows=steps - 1, max_steps=steps, mask_token=mask_token)
    config = replace(head, spec=spec)
    if config.layer.latent is not None:
        raise given.error("P-EAGLE heads with latent attention are not supported; use one with K and V heads")
    narrow = [window for window in config.layer.windows if window is not None and window < steps]
    if narrow:
        raise given.error(
            f"sliding_window = {narrow[0]} is below the {steps} depths of the head, which is not supported; use a head "
            "with a wider window"
        )
    refuse_misfit(config, target, path)
    return config
