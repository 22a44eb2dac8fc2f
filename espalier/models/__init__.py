"""Model families, their layers and weights.  Loading is the whole interface; the contract of a model is in base.py."""

from espalier.models.base import Attend, CausalLM, ModelOutput
from espalier.models.config import ModelConfig
from espalier.models.eagle3 import Eagle3Draft, load_eagle3
from espalier.models.eagle3_config import Eagle3Config, draft_verifier, read_eagle3
from espalier.models.loading import load_target, read_config

__all__ = [
    "Attend",
    "CausalLM",
    "Eagle3Config",
    "Eagle3Draft",
    "ModelConfig",
    "ModelOutput",
    "draft_verifier",
    "load_eagle3",
    "load_target",
    "read_config",
    "read_eagle3",
]
