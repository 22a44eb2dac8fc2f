"""Phi-3, Phi-3.5 and Phi-4, also mini: q, k and v are stored as one matrix, and gate and up; LongRoPE."""

from collections.abc import Mapping
from dataclasses import replace

from espalier.models.config import Raw
from espalier.models.families.mistral import FAMILY as MISTRAL
from espalier.models.layer_declaration import LayerNames, MLPNames
from espalier.models.rope import SPELLINGS, with_rope_type

# What LongRoPE was called.
OLD_NAMES = ("su", "yarn")


def _ropes(full: Raw) -> list[Raw]:
    fields = {name: rope for name, rope in with_rope_type(full).items() if name in SPELLINGS}
    for name, rope in fields.items():
        if isinstance(rope, Mapping) and rope.get("rope_type") in OLD_NAMES:
            fields[name] = {**rope, "rope_type": "longrope"}
    return [fields] * full["num_hidden_layers"]


FAMILY = replace(
    MISTRAL,
    architecture="Phi3ForCausalLM",
    model_type="phi3",
    defaults={
        **MISTRAL.defaults,
        "num_key_value_heads": None,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
    },
    ropes=_ropes,
    names=LayerNames(qkv=("qkv_proj",), mlp=MLPNames(gate_up=("gate_up_proj",))),
    honours=("partial_rotary_factor",),
    in_drafts=False,
    multimodal=(),
)
