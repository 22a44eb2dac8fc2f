"""Reads and writes EAGLE-3 drafts in SafeAILab's format, and writes the files of any draft."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file
from torch import nn

from espalier.errors import EspalierError
from espalier.models.weight_files import write_weights
from espalier.train.configs import read_config, read_draft_kind
from espalier.train.draft import DraftShape, Eagle3Draft
from espalier.train.llama import LlamaShape
from espalier.train.work import replace_file

Shape = TypeVar("Shape", bound=LlamaShape)
DISK_REMEDY = "free some space there, or give another --out"


def rope_theta(config: dict[str, Any]) -> float:
    """Returns the base of the rotary angles.  config: a config.json."""
    nested = config.get("rope_parameters") or {}
    return float(nested.get("rope_theta") or config.get("rope_theta") or 10000.0)


def layer_fields(target_config: dict[str, Any], intermediate_size: int | None) -> dict[str, int | float]:
    """Returns the sizes of a draft layer, which are the target's.  intermediate_size: None for the target's."""
    hidden, heads = int(target_config["hidden_size"]), int(target_config["num_attention_heads"])
    return {
        "vocab_size": int(target_config["vocab_size"]),
        "hidden_size": hidden,
        "intermediate_size": int(intermediate_size or target_config["intermediate_size"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(target_config.get("num_key_value_heads") or heads),
        "head_dim": int(target_config.get("head_dim") or hidden // heads),
        "rope_theta": rope_theta(target_config),
        "rms_norm_eps": float(target_config["rms_norm_eps"]),
        "max_position_embeddings": int(target_config["max_position_embeddings"]),
    }


def read_shape(layer_config: dict[str, Any], shape_type: type[Shape], **other_fields: Any) -> Shape:
    """Returns a `shape_type` with the sizes in `layer_config`: a config.json, or its part that describes layers.
    other_fields: fields of the shape that are not in `layer_config`."""
    sizes = {name: layer_config[name] for name in shape_type.__dataclass_fields__ if name in layer_config}
    return shape_type(**{**sizes, "rope_theta": rope_theta(layer_config), **other_fields})


def make_draft_shape(target_config: dict[str, Any], draft_vocab_size: int, intermediate_size: int | None) -> DraftShape:
    """Returns the sizes of an EAGLE-3 draft.  intermediate_size: None for the target's."""
    sizes: dict[str, Any] = layer_fields(target_config, intermediate_size)
    return DraftShape(draft_vocab_size=draft_vocab_size, target_hidden_size=sizes["hidden_size"], **sizes)


def write_checkpoint(config: dict[str, Any], module: nn.Module, out: Path) -> None:
    """Writes config.json, and the module's weights in bfloat16 as model.safetensors."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {
        name: tensor.detach().cpu().to(torch.bfloat16 if tensor.is_floating_point() else tensor.dtype).contiguous()
        for name, tensor in module.state_dict().items()
    }
    with replace_file(out / "model.safetensors", DISK_REMEDY) as unfinished:
        write_weights(unfinished, weights)
    with replace_file(out / "config.json", DISK_REMEDY) as unfinished:
        unfinished.write_text(json.dumps(config, indent=2) + "\n")


def save_draft(draft: Eagle3Draft, out: Path) -> None:
    """Writes a draft to the directory `out`, with the names of EAGLE-3 checkpoints."""
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **vars(draft.shape),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    write_checkpoint(config, draft, out)


def load_draft(directory: Path) -> Eagle3Draft:
    """Loads a draft that `save_draft` wrote."""
    config = read_config(directory)
    if read_draft_kind(directory) != "eagle3":
        raise EspalierError(
            f"{directory} holds {config.get('architectures')}; give a draft of the architecture LlamaForCausalLMEagle3"
        )
    draft = Eagle3Draft(read_shape(config, DraftShape))
    draft.load_state_dict(load_file(directory / "model.safetensors"))
    return draft
