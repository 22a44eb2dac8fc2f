"""Reads config.json files: the kind of a draft, and whether a model can be a target.  PyTorch is not imported."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from espalier.errors import EspalierError
from espalier.model_files import MAX_LAYERS, MAX_SIZE, is_gguf, read_json

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM")
# The numbers that the config.json of a target must have.
SIZE_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "rms_norm_eps",
    "max_position_embeddings",
)
# For each kind of draft, the field of config.json that identifies the kind, and the value of that field.
KIND_FIELDS: Mapping[str, tuple[str, Any]] = MappingProxyType(
    {
        "eagle3": ("architectures", ["LlamaForCausalLMEagle3"]),
        "mtp": ("speculators_model_type", "mtp"),
        "block": ("speculators_model_type", "dspark"),
    }
)
# The fewest layers of a target for EAGLE-3 and block drafts, which read three layers (captured_layers).  Of 6 layers,
# they read 2, 3 and 3.  Of 5 layers, they would read layer 2 three times.
MIN_CAPTURED_LAYERS = 6


def read_config(directory: Path) -> dict[str, Any]:
    """Returns the config.json of a model.  Raises EspalierError if the file cannot be read."""
    if is_gguf(directory):
        raise EspalierError(
            f"{directory} is a GGUF file, from which nothing is trained; give the Hugging Face directory"
        )
    return read_json(directory / "config.json")


def read_target(directory: Path, min_layers: int = 1) -> dict[str, Any]:
    """Returns the config.json of a target.  Raises EspalierError for a model that cannot be a target."""
    config = read_config(directory)
    architecture = (config.get("architectures") or ["an unnamed architecture"])[0]
    if architecture not in ARCHITECTURES:
        raise EspalierError(
            f"--target {directory}: {architecture} cannot be a target here; use one of {', '.join(ARCHITECTURES)}"
        )
    for name in SIZE_FIELDS:
        value, max_value = config.get(name), MAX_LAYERS if name == "num_hidden_layers" else MAX_SIZE
        if not isinstance(value, int | float) or not 0 < value <= max_value:
            raise EspalierError(f"{directory / 'config.json'} has {name} {value!r}; give a model whose file is whole")
    if config["num_hidden_layers"] < min_layers:
        raise EspalierError(
            f"--target {directory} has {config['num_hidden_layers']} layers, and this draft reads three of a target's "
            f"layers; use a target of {min_layers} or more, or train an MTP head"
        )
    return config


def captured_layers(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Returns the indices of the target layers whose inputs EAGLE-3 and block drafts read.  config: the target's."""
    num_layers = int(config["num_hidden_layers"])
    return 2, num_layers // 2, num_layers - 3


def read_draft_kind(directory: Path) -> str | None:
    """Returns the kind of the draft in a directory; None if it has no draft of a kind in KIND_FIELDS."""
    config = read_config(directory)
    return next((kind for kind, (name, value) in KIND_FIELDS.items() if config.get(name) == value), None)
