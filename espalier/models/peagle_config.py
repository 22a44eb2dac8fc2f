"""Reads the config.json of P-EAGLE heads, in the forms of vLLM's speculators and of vLLM itself.

A P-EAGLE head is an EAGLE-3 head (eagle3_config.py), often of several layers, that proposes all depths in one pass
(peagle.py).  vLLM's form is a flat config that names the mask as `pard_token`, `ptd_token_id` or `mask_token_id`; its
architecture may be EAGLE-3's.  Both forms name captured layers by their input.
"""

from dataclasses import replace
from pathlib import Path

from espalier.models import eagle3_config
from espalier.models.config import ModelConfig, Raw
from espalier.models.draft_fields import Fields
from espalier.models.eagle3_config import Eagle3Config, read_head, refuse_misfit

ARCHITECTURES = ("PEagleDraftModel", "PeagleLlamaForCausalLM", "PeagleQwen3ForCausalLM", "PEagleSpeculator")
# Architectures of EAGLE-3 that are P-EAGLE if the config names a mask.
EAGLE3_ARCHITECTURES = (*eagle3_config.ARCHITECTURES, "Eagle3Qwen3ForCausalLM")
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
