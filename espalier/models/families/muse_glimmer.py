"""The text part of Muse-Glimmer: normed embeddings, norms around each block, and norms of q and k without weights.

Each value of the attention's output has a gate.  Layers with full attention have no RoPE.
"""

from dataclasses import replace

import torch

from espalier.errors import EspalierError, shown
from espalier.kernels.ops.rope import HeadNorms
from espalier.models.config import Family, Json, LayerWindows, ModelConfig
from espalier.models.config_values import positive_number
from espalier.models.families.by_type import layer_types_of, windows_by_type
from espalier.models.layer_loading import load_embedding, load_layer
from espalier.models.layers.attention import Attention, OutputGate
from espalier.models.layers.decoder import DecoderLayer
from espalier.models.layers.linear import Embedding
from espalier.models.layers.norm import RMSNorm
from espalier.models.rope import RopeTables
from espalier.models.stored_names import NORMS_AROUND_BLOCKS
from espalier.models.weights import Weights


def _has_full_attention(config_fields: Json, layer: int) -> bool:
    """Whether a layer has full attention: the last layer, and every fourth layer counted back from the last."""
    return (config_fields["num_hidden_layers"] - 1 - layer) % 4 == 0


def _checked_windows(config_fields: Json) -> LayerWindows:
    """Returns the window of each layer.  Raises EspalierError if a scale or eps is not positive."""
    for name in ("qk_scale_factor", "post_norm_eps"):
        positive_number(config_fields, name)
    return windows_by_type(
        config_fields, layer_types_of(config_fields, lambda layer: _has_full_attention(config_fields, layer - 1))
    )


def _ropes(config_fields: Json) -> list[Json | None]:
    """Returns the RoPE fields of each layer; None for a layer whose `layer_rope_theta` is 0.  As in transformers, all
    other layers have the base in rope_parameters."""
    layers, thetas = config_fields["num_hidden_layers"], config_fields.get("layer_rope_theta")
    if thetas is None:
        return [None if _has_full_attention(config_fields, layer) else {} for layer in range(layers)]
    base = (config_fields.get("rope_parameters") or config_fields).get("rope_theta", 10000.0)
    if not isinstance(thetas, list) or len(thetas) != layers or any(theta not in (0, base) for theta in thetas):
        raise EspalierError(
            f"layer_rope_theta = {shown(thetas)}; 0 or the model's rope_theta, {base}, is needed for each of {layers} "
            "layers; correct it"
        )
    return [{} if theta else None for theta in thetas]


def _load_embedding(weights: Weights, config: ModelConfig, embedding_scale: float) -> Embedding:
    """Loads the embedding, with a norm of each row.  embedding_scale: the factor of every embedding."""
    embed = load_embedding(weights, config, embedding_scale)
    embed.row_norm = RMSNorm(torch.ones_like(weights.empty(config.hidden_size)), config.rms_norm_eps)
    return embed


def _load_layer(weights: Weights, config: ModelConfig, prefix: str, layer: int, rope: RopeTables) -> DecoderLayer:
    """Loads layer number `layer`, whose weights' names begin with `prefix`."""
    # The checkpoint stores weight - 1 for the norms of layers, but not for the last norm.
    new_layer = load_layer(weights, replace(config, family=replace(FAMILY, norm_offset=1.0)), prefix, layer, rope)
    eps, size = positive_number(config.raw, "post_norm_eps"), config.head_size
    assert isinstance(new_layer.attention, Attention) and new_layer.post_attention_norm and new_layer.post_mlp_norm
    new_layer.post_attention_norm = RMSNorm(new_layer.post_attention_norm.weight, eps)
    new_layer.post_mlp_norm = RMSNorm(new_layer.post_mlp_norm.weight, eps)
    ones, q_scale = torch.ones_like(weights.empty(size)), positive_number(config.raw, "qk_scale_factor")
    new_layer.attention.norms = HeadNorms(ones * q_scale, ones, config.rms_norm_eps)
    rows = weights.shards.heads_part(config.heads).scaled(size)
    project = weights.linear(f"{prefix}self_attn.", ("gate_proj",), (rows,), config.hidden_size, bias=False)
    new_layer.attention.output_gate = OutputGate(project, torch.sigmoid)
    return new_layer


FAMILY = Family(
    architecture="MuseGlimmerForCausalLM",
    model_type="muse_glimmer_text",
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "post_norm_eps": 1e-8,
        "attention_bias": False,
        "hidden_activation": "silu",
        "sliding_window": 2048,
        "final_logit_softcapping": 20.0,
        "qk_scale_factor": 3.87,
        "output_multiplier": 0.19611613513818404,
    },
    windows=_checked_windows,
    layer_norms=NORMS_AROUND_BLOCKS,
    logit_scale=lambda fields: positive_number(fields, "output_multiplier"),
    layer_ropes=_ropes,
    load_embedding=_load_embedding,
    load_layer=_load_layer,
    supported_fields=("layer_rope_theta", "qk_scale_factor", "output_multiplier", "final_logit_softcapping"),
    activation_field="hidden_activation",
    multimodal_architectures=("MuseGlimmerForConditionalGeneration",),
)
