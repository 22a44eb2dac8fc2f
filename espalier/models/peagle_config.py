"""Reads the config.json of P-EAGLE heads, in the forms of vLLM's speculators and of vLLM itself.

A P-EAGLE head is an EAGLE-3 head (eagle3_config.py), often of several layers, that proposes all depths in one pass
(peagle.py).  vLLM's form is a flat config that names the mask as `pard_token`, `ptd_token_id` or `mask_token_id`; its
architecture may be EAGLE-3's.  Both forms name captured layers by their input.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from espalier.errors import EspalierError
from espalier.models import eagle3_config
from espalier.models.config import ModelConfig, Raw
from espalier.models.draft import DraftSpec
from espalier.models.eagle3_config import Eagle3Config, read_head, refuse_misfit

ARCHITECTURES = ("PEagleDraftModel", "PeagleLlamaForCausalLM", "PeagleQwen3ForCausalLM", "PEagleSpeculator")
# Architectures of EAGLE-3 that are P-EAGLE if the config names a mask.
EAGLE3_ARCHITECTURES = (*eagle3_config.ARCHITECTURES, "Eagle3Qwen3ForCausalLM")
MASKS = ("mask_token_id", "pard_token", "ptd_token_id")
# For files that do not say for how many depths they were trained.
MAX_STEPS = 16


@dataclass(frozen=True)
class PEagleConfig(Eagle3Config):
    """As Eagle3Config.

    mask_token: the token of all rows but the root's; max_steps: the depths that it was trained for.
    """

    algorithm: ClassVar[str] = "peagle"

    mask_token: int
    max_steps: int

    @cached_property
    def spec(self) -> DraftSpec:
        return replace(super().spec, block_rows=self.max_steps - 1, max_steps=self.max_steps)


def read_peagle(path: Path, raw: Raw, target: ModelConfig) -> PEagleConfig:
    """Read the config.json `raw` of the head at `path` and check it against its target's config.  Loads no weights.

    Raises EspalierError if the head does not fit this target.
    """
    head = read_head(path, raw, target, by_input=None)
    config = PEagleConfig(**head, mask_token=_mask_token(raw, head["layer"], path), max_steps=_max_steps(raw, path))
    if config.layer.latent is not None:
        raise EspalierError(
            f"{path}: P-EAGLE heads with latent attention are not supported; use one with K and V heads"
        )
    narrow = [window for window in config.layer.windows if window is not None and window < config.max_steps]
    if narrow:
        raise EspalierError(
            f"{path}: sliding_window = {narrow[0]} is below the {config.max_steps} depths of the head, which is not "
            "supported; use a head with a wider window"
        )
    refuse_misfit(config, target, path)
    return config


def _mask_token(raw: Raw, layer: ModelConfig, path: Path) -> int:
    given = {name: raw[name] for name in MASKS if raw.get(name) is not None}
    name, token = next(iter(given.items()), (MASKS[0], None))
    if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < layer.vocab_size:
        raise EspalierError(
            f"{path}: {name} = {token!r}; a token of the vocabulary, 0 .. {layer.vocab_size - 1}, is needed as "
            f"{' or '.join(MASKS)}; correct the config"
        )
    if len(set(given.values())) > 1:
        raise EspalierError(f"{path} names different masks: {given}; correct the config")
    return token


def _max_steps(raw: Raw, path: Path) -> int:
    """The tokens that speculators trained the head to propose; MAX_STEPS if the config does not say."""
    methods = (raw.get("speculators_config") or {}).get("proposal_methods") or [{}]
    steps = methods[0].get("speculative_tokens", MAX_STEPS)
    if not isinstance(steps, int) or steps < 2:
        raise EspalierError(
            f"{path}: speculative_tokens = {steps!r}; an integer of at least 2 is needed; correct the config"
        )
    return steps
