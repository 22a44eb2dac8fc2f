"""Model families, their layers and their weights.  base.py defines the interface of a model."""

from espalier.models.base import CausalLM, Layer, ModelOutput
from espalier.models.config import ModelConfig
from espalier.models.draft import DraftConfig, DraftModel, DraftOutput, DraftSpec, draft_verifier
from espalier.models.loading import load_target, read_config

__all__ = [
    "CausalLM",
    "DraftConfig",
    "DraftModel",
    "DraftOutput",
    "DraftSpec",
    "Layer",
    "ModelConfig",
    "ModelOutput",
    "draft_verifier",
    "load_target",
    "read_config",
]
