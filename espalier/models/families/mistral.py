"""Mistral, Ministral, Ministral 3, Mixtral and Phi-3 to 4: no biases, and a sliding window if the config has one.

In Ministral, `layer_types` names the layers with the window; in the other families, every layer has the window.
Ministral 3 has YaRN and Llama 4's attention temperature.  Mixtral has experts in every layer.  Phi has LongRoPE, and
stores q, k and v as one matrix, and gate and up as another.
"""

from collections.abc import Mapping
from dataclasses import replace

from espalier.errors import EspalierError
from espalier.kernels.ops.experts import Routing
from espalier.models.config import FULL_ATTENTION, Experts, Family, Json, LayerWindows, windows_by_layer_type
from espalier.models.rope import ROPE_FIELDS, with_rope_type
from espalier.models.stored_names import LayerNames, MLPNames

# The rope_type of LongRoPE in older configs.
OLD_LONGROPE_NAMES = ("su", "yarn")


def mistral_windows(config_fields: Json) -> LayerWindows:
    """Returns the same window for each layer.
    Transformers ignores `layer_types` for Mistral.  Raises EspalierError if `layer_types` contains full attention."""
    window = config_fields["sliding_window"]
    if window is not None and FULL_ATTENTION in (config_fields.get("layer_types") or ()):
        raise EspalierError(
            "layer_types with 'full_attention' and a sliding_window are both set, but this architecture uses the "
            "window in every layer; remove one of them with model_overrides"
        )
    return (window,) * int(config_fields["num_hidden_layers"])


MISTRAL = Family(
    architecture="MistralForCausalLM",
    model_type="mistral",
    defaults={
        "num_key_value_heads": 8,
        "head_dim": None,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
    },
    qkv_bias=lambda fields: False,
    out_bias=lambda fields: False,
    windows=mistral_windows,
    usable_in_drafts=True,
    multimodal_architectures=("Mistral3ForConditionalGeneration",),
)
MINISTRAL = replace(
    MISTRAL,
    architecture="MinistralForCausalLM",
    model_type="ministral",
    windows=lambda fields: windows_by_layer_type(fields, slides_by_default=lambda layer: True),
    multimodal_architectures=(),
)
MINISTRAL3 = replace(
    MISTRAL,
    architecture="Ministral3ForCausalLM",
    model_type="ministral3",
    defaults={
        **MISTRAL.defaults,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale_all_dim": 1.0,
            "mscale": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    supported_fields=("llama_4_scaling_beta",),
)


def _experts(config_fields: Json) -> Experts:
    return Experts(
        frozenset(range(int(config_fields["num_hidden_layers"]))),
        Routing(config_fields["num_local_experts"], config_fields["num_experts_per_tok"], norm_topk_prob=True),
        config_fields["intermediate_size"],
        prefix="block_sparse_moe.",
        names=MLPNames(("w1", "w3"), "w2"),
    )


MIXTRAL = replace(
    MISTRAL,
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    defaults={
        **MISTRAL.defaults,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_theta": 1e6,
    },
    experts=_experts,
    supported_fields=("num_local_experts",),
    usable_in_drafts=False,
    multimodal_architectures=(),
)


def _ropes(config_fields: Json) -> list[Json]:
    """Returns the RoPE fields of each layer, which are the same for all, with today's name of LongRoPE."""
    ropes = {name: rope for name, rope in with_rope_type(config_fields).items() if name in ROPE_FIELDS}
    for name, rope in ropes.items():
        if isinstance(rope, Mapping) and rope.get("rope_type") in OLD_LONGROPE_NAMES:
            ropes[name] = {**rope, "rope_type": "longrope"}
    return [ropes] * config_fields["num_hidden_layers"]


PHI3 = replace(
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
    layer_ropes=_ropes,
    names=LayerNames(qkv=("qkv_proj",), mlp=MLPNames(gate_up=("gate_up_proj",))),
    supported_fields=("partial_rotary_factor",),
    usable_in_drafts=False,
    multimodal_architectures=(),
)
