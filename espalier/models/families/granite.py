"""Granite 3 and 4, dense and with experts.  Embeddings, block outputs, attention scores and logits are multiplied by
factors from config.json.

In Granite 4, each layer has Mamba-2 or attention, then a shared MLP and, in some models, experts.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from espalier.cache.layer_spec import LayerSpec, RecurrentState
from espalier.errors import EspalierError, shown
from espalier.kernels.ops.experts import Routing
from espalier.models.config import (
    FULL_ATTENTION,
    LINEAR_LAYER,
    Experts,
    Family,
    Json,
    LayerWindows,
    ModelConfig,
    hybrid_windows,
)
from espalier.models.config_values import positive_number, require_counts, require_multiple
from espalier.models.families.llama import LLAMA
from espalier.models.layer_loading import load_attention, load_mamba2, specs_by_type
from espalier.models.layers.decoder import Mixer
from espalier.models.rope import RopeTables
from espalier.models.stored_names import LayerNames, MLPNames
from espalier.models.weights import Weights

FACTOR_FIELDS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
SHARED_MLP = MLPNames(gate_up=("input_linear",), down="output_linear")


def _experts(config_fields: Json) -> Experts | None:
    if config_fields["num_local_experts"] == 0:
        return None
    return Experts(
        frozenset(range(int(config_fields["num_hidden_layers"]))),
        Routing(config_fields["num_local_experts"], config_fields["num_experts_per_tok"], "topk_softmax"),
        config_fields["intermediate_size"],
        shared_size=config_fields.get("shared_intermediate_size") or 0,
        shared_name="shared_mlp",
        shared_prefix="",
        shared_names=SHARED_MLP,
        router_name="router.layer",
        storage="joined",
        prefix="block_sparse_moe.",
        joined_names=("input_linear.weight", "output_linear.weight"),
    )


FAMILY = Family(
    architecture="GraniteForCausalLM",
    model_type="granite",
    defaults={**LLAMA.defaults, **dict.fromkeys(FACTOR_FIELDS, 1.0)},
    embedding_scale=lambda fields: positive_number(fields, "embedding_multiplier"),
    softmax_scale=lambda fields: positive_number(fields, "attention_multiplier"),
    residual_scale=lambda fields: positive_number(fields, "residual_multiplier"),
    logit_scale=lambda fields: 1 / positive_number(fields, "logits_scaling"),
    supported_fields=FACTOR_FIELDS,
)
MOE = replace(
    FAMILY,
    architecture="GraniteMoeForCausalLM",
    model_type="granitemoe",
    defaults={**FAMILY.defaults, "num_local_experts": 8, "num_experts_per_tok": 2},
    experts=_experts,
    supported_fields=(*FACTOR_FIELDS, "num_local_experts"),
)
MOE_SHARED = replace(
    MOE,
    architecture="GraniteMoeSharedForCausalLM",
    model_type="granitemoeshared",
    defaults={**MOE.defaults, "shared_intermediate_size": 0},
    supported_fields=(*MOE.supported_fields, "shared_intermediate_size"),
)


LAYER_TYPES = {"mamba": LINEAR_LAYER, "attention": FULL_ATTENTION}
COUNT_FIELDS = (
    *("mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head", "mamba_d_conv"),
    "shared_intermediate_size",
)
# How transformers writes infinity into a config.json, because JSON has no such number.
INFINITY = {"__float__": "Infinity"}


def _normalise_fields(config_json: Json) -> Json:
    """Returns the fields, with the layer types named as in other families, and with mamba_d_head as a number."""
    fields, types = dict(config_json), config_json.get("layer_types") or config_json.get("layers_block_type")
    if isinstance(types, list):
        fields["layer_types"] = [LAYER_TYPES.get(kind, kind) if isinstance(kind, str) else kind for kind in types]
    sizes: list[Any] = [config_json.get(name) for name in ("hidden_size", "mamba_n_heads", "mamba_expand")]
    if config_json.get("mamba_d_head", "auto") == "auto" and all(type(size) is int and size > 0 for size in sizes):
        hidden, heads, expand = sizes
        fields["mamba_d_head"] = expand * hidden // heads
    return with_numeric_time_step_limit(fields)


def with_numeric_time_step_limit(config_fields: Json) -> Json:
    """Returns the fields, in which INFINITY in time_step_limit is replaced by float("inf")."""
    limits = config_fields.get("time_step_limit")
    if not isinstance(limits, list):
        return config_fields
    return {**config_fields, "time_step_limit": [float("inf") if limit == INFINITY else limit for limit in limits]}


def require_mamba_sizes(config_fields: Json, count_fields: Sequence[str], heads_and_groups: tuple[str, str]) -> None:
    """Raises EspalierError for invalid fields of Mamba-2, and if no layer has attention.
    count_fields: the fields that must be positive integers.  heads_and_groups: the fields for the number of heads and
    the number of groups; the heads of a group share B and C."""
    require_counts(config_fields, count_fields)
    require_multiple(config_fields, *heads_and_groups)
    hybrid_windows(config_fields)
    limits = config_fields["time_step_limit"]
    are_two = isinstance(limits, list | tuple) and len(limits) == 2
    if not are_two or not all(isinstance(limit, int | float) for limit in limits):
        raise EspalierError(f"time_step_limit = {shown(limits)}; a list of two numbers is needed; correct the config")


def _checked_windows(config_fields: Json) -> LayerWindows:
    """Returns None for each layer, because no layer has a window.  Raises EspalierError for invalid sizes."""
    if LINEAR_LAYER in (config_fields["layer_types"] or ()):
        require_mamba_sizes(config_fields, COUNT_FIELDS, ("mamba_n_heads", "mamba_n_groups"))
    return hybrid_windows(config_fields)


def _ropes(config_fields: Json) -> list[Json | None]:
    """Returns the RoPE fields of each layer: either all layers have the config's RoPE, or no layer has a RoPE."""
    kind = config_fields["position_embedding_type"]
    if kind not in (None, "nope", "rope"):
        value = shown(kind)
        raise EspalierError(f"position_embedding_type = {value} is not supported, only 'rope', 'nope' or null")
    return [{} if kind == "rope" else None] * config_fields["num_hidden_layers"]


def _recurrent_state(config: ModelConfig) -> RecurrentState:
    fields = config.raw
    heads, groups, size = fields["mamba_n_heads"], fields["mamba_n_groups"], fields["mamba_d_state"]
    return RecurrentState(fields["mamba_d_conv"], heads, groups, size, fields["mamba_d_head"], delta=False, units=False)


def _layer_specs(config: ModelConfig) -> tuple[LayerSpec, ...]:
    if LINEAR_LAYER not in config.raw["layer_types"]:
        return specs_by_type(config, {})
    state = _recurrent_state(config)
    return specs_by_type(config, {LINEAR_LAYER: LayerSpec(state.heads, state)})


def _load_mixer(weights: Weights, config: ModelConfig, prefix: str, layer: int, rope: RopeTables) -> Mixer:
    """Loads the first block of layer number `layer`, whose names begin with `prefix`: attention or Mamba-2."""
    if config.raw["layer_types"][layer] == FULL_ATTENTION:
        return load_attention(weights, config, f"{prefix}self_attn.", config.hidden_size, rope)
    fields = config.raw
    biases = {"bias": bool(fields["mamba_proj_bias"]), "conv_bias": bool(fields["mamba_conv_bias"])}
    size, eps, limits = config.hidden_size, config.rms_norm_eps, fields["time_step_limit"]
    return load_mamba2(weights, f"{prefix}mamba.", _recurrent_state(config), size, eps, dt_limits=limits, **biases)


HYBRID = replace(
    MOE_SHARED,
    architecture="GraniteMoeHybridForCausalLM",
    model_type="granitemoehybrid",
    defaults={
        **MOE.defaults,
        "intermediate_size": 11008,
        "shared_intermediate_size": 1024,
        "position_embedding_type": None,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "time_step_limit": (0.0, float("inf")),
        "layer_types": None,
    },
    windows=_checked_windows,
    layer_ropes=_ropes,
    names=LayerNames(mlp_prefix="shared_mlp.", mlp=SHARED_MLP),
    mlp_size_field="shared_intermediate_size",
    supported_fields=(*MOE_SHARED.supported_fields, "position_embedding_type"),
    normalise_fields=_normalise_fields,
    extra_layer_types=(LINEAR_LAYER,),
    layer_specs=_layer_specs,
    load_mixer=_load_mixer,
)
