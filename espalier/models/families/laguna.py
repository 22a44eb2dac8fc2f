"""Laguna: the number of heads and the RoPE differ by layer, head outputs have gates, and most layers have experts."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from espalier.cache.layer_spec import KVHeads, LayerSpec
from espalier.errors import EspalierError, shown
from espalier.kernels.ops.experts import Routing
from espalier.models.config import FULL_ATTENTION, SLIDING_ATTENTION, Experts, Family, Json, LayerWindows, ModelConfig
from espalier.models.config_values import positive_number
from espalier.models.families.by_type import RopeBases, layer_types_of, ropes_by_type, windows_by_type
from espalier.models.families.glm4_moe import sparse_layers
from espalier.models.layer_loading import load_layer
from espalier.models.layers.attention import Attention, OutputGate
from espalier.models.layers.decoder import DecoderLayer
from espalier.models.rope import RopeTables
from espalier.models.weights import Weights

ROPE_BASES: RopeBases = {FULL_ATTENTION: ("", 5e5), SLIDING_ATTENTION: ("", 1e4)}
PER_HEAD_GATING, PER_VALUE_GATING = (True, "per-head"), ("per-element",)


def _layer_types(config_fields: Json) -> list[str]:
    return layer_types_of(config_fields, lambda layer: True)


def _heads_by_layer(config_fields: Json) -> list[int]:
    """Returns the number of query heads of each layer.  Raises EspalierError for invalid numbers."""
    layers, by_layer = config_fields["num_hidden_layers"], config_fields.get("num_attention_heads_per_layer")
    if by_layer is None:
        return [config_fields["num_attention_heads"]] * layers
    kv_heads = config_fields["num_key_value_heads"]
    is_list = isinstance(by_layer, list) and len(by_layer) == layers
    if not is_list or any(type(heads) is not int or heads < 1 or heads % kv_heads for heads in by_layer):
        raise EspalierError(
            f"num_attention_heads_per_layer = {shown(by_layer)}; a multiple of num_key_value_heads = {kv_heads} is "
            f"needed for each of {layers} layers; correct it"
        )
    return by_layer


def _checked_windows(config_fields: Json) -> LayerWindows:
    """Returns the window of each layer.  Raises EspalierError for invalid numbers of heads or unsupported gates."""
    _heads_by_layer(config_fields)
    if config_fields["gating"] not in (*PER_HEAD_GATING, *PER_VALUE_GATING):
        raise EspalierError(
            f"gating = {shown(config_fields['gating'])} is not supported, only true, 'per-head' or 'per-element'"
        )
    return windows_by_type(config_fields, _layer_types(config_fields))


def _experts(config_fields: Json) -> Experts:
    layers = sparse_layers(config_fields)
    return Experts(
        frozenset(range(1, config_fields["num_hidden_layers"])) if layers is None else layers,
        Routing(
            config_fields["num_experts"],
            config_fields["num_experts_per_tok"],
            "sigmoid",
            norm_topk_prob=True,
            routed_scaling_factor=positive_number(config_fields, "moe_routed_scaling_factor"),
            correction_bias=True,
        ),
        config_fields["moe_intermediate_size"],
        config_fields["shared_expert_intermediate_size"],
        "shared_expert",
        correction_name="experts.e_score_correction_bias",
    )


def _layer_specs(config: ModelConfig) -> tuple[LayerSpec, ...]:
    cache_spec = KVHeads(config.kv_heads, config.head_size, config.head_size)
    layers = zip(_heads_by_layer(config.raw), config.windows, strict=True)
    return tuple(LayerSpec(heads, cache_spec, window) for heads, window in layers)


def _load_layer(weights: Weights, config: ModelConfig, prefix: str, layer: int, rope: RopeTables) -> DecoderLayer:
    """Loads layer number `layer`, whose weights' names begin with `prefix`.  The number of heads differs by layer."""
    heads = _heads_by_layer(config.raw)[layer]
    decoder_layer = load_layer(weights, replace(config, heads=heads), prefix, layer, rope)
    assert isinstance(decoder_layer.attention, Attention)
    heads_part = weights.shards.heads_part(heads)
    rows = heads_part if config.raw["gating"] in PER_HEAD_GATING else heads_part.scaled(config.head_size)
    project = weights.linear(f"{prefix}self_attn.", ("g_proj",), (rows,), config.hidden_size, bias=False)
    decoder_layer.attention.output_gate = OutputGate(project, _softplus)
    return decoder_layer


def _softplus(x: Tensor) -> Tensor:
    return F.softplus(x.to(torch.promote_types(x.dtype, torch.float32))).to(x.dtype)


FAMILY = Family(
    architecture="LagunaForCausalLM",
    model_type="laguna",
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "sliding_window": 512,
        "gating": True,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "moe_routed_scaling_factor": 1.0,
        "rope_parameters": {
            FULL_ATTENTION: {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
            SLIDING_ATTENTION: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
        },
    },
    windows=_checked_windows,
    qk_norm=True,
    layer_ropes=lambda fields: ropes_by_type(fields, _layer_types(fields), ROPE_BASES),
    experts=_experts,
    load_layer=_load_layer,
    layer_specs=_layer_specs,
    supported_fields=(
        *("num_experts", "shared_expert_intermediate_size", "partial_rotary_factor"),
        *("num_attention_heads_per_layer", "gating"),
    ),
)
