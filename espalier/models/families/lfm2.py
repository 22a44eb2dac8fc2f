"""LFM2 and LFM2.5, dense and with experts.  Layers have a short convolution between two gates, or attention."""

from dataclasses import replace

from espalier.cache.layer_spec import LayerSpec, RecurrentState
from espalier.errors import EspalierError, shown
from espalier.kernels.ops.experts import Routing
from espalier.kernels.ops.recurrence import ShortConv
from espalier.models.config import FULL_ATTENTION, Experts, Family, Json, LayerWindows, ModelConfig, hybrid_windows
from espalier.models.config_values import require_counts
from espalier.models.layer_loading import load_attention, load_layer, specs_by_type
from espalier.models.layers.decoder import DecoderLayer, Mixer
from espalier.models.layers.recurrent import GatedConv
from espalier.models.rope import RopeTables
from espalier.models.stored_names import LayerNames, LayerNorms, MLPNames
from espalier.models.weights import Weights

CONV_LAYER = "conv"
MLP_NAMES = MLPNames(("w1", "w3"), "w2")
# Published field names -> the names that all families share.
RENAMED_FIELDS = {
    "norm_eps": "rms_norm_eps",
    "tie_embedding": "tie_word_embeddings",
    "block_ff_dim": "intermediate_size",
}


def _normalise_fields(config_json: Json) -> Json:
    """Returns the fields under the names that all families share, with `layer_types` added."""
    renamed = {other: config_json[name] for name, other in RENAMED_FIELDS.items() if name in config_json}
    fields = {**config_json, **renamed}
    count, attending = config_json.get("num_hidden_layers"), config_json.get("full_attn_idxs")
    if fields.get("layer_types") is None and type(count) is int:
        attending = range(count) if attending is None else attending
        fields["layer_types"] = [FULL_ATTENTION if layer in attending else CONV_LAYER for layer in range(count)]
    return fields


def _checked_windows(config_fields: Json) -> LayerWindows:
    """Returns None for each layer, because no layer has a window.  Raises EspalierError for invalid sizes."""
    require_counts(config_fields, ("conv_L_cache", "block_multiple_of"))
    factor = config_fields["block_ffn_dim_multiplier"]
    if factor is not None and (isinstance(factor, bool) or not isinstance(factor, int | float) or factor <= 0):
        raise EspalierError(f"block_ffn_dim_multiplier = {shown(factor)}; a positive number is needed; correct it")
    return hybrid_windows(config_fields)


def _mlp_size(config: ModelConfig) -> int:
    """Returns the MLP's intermediate size.  With block_auto_adjust_ff_dim, it is computed from intermediate_size."""
    size, fields = config.intermediate_size, config.raw
    if not fields["block_auto_adjust_ff_dim"]:
        return size
    size = 2 * size // 3
    if fields["block_ffn_dim_multiplier"] is None:
        return size
    unit = fields["block_multiple_of"]
    return -(-int(fields["block_ffn_dim_multiplier"] * size) // unit) * unit


def _experts(config_fields: Json) -> Experts:
    require_counts(config_fields, ("num_experts",))
    routing = Routing(
        config_fields["num_experts"],
        config_fields["num_experts_per_tok"],
        scoring="sigmoid",
        norm_topk_prob=bool(config_fields["norm_topk_prob"]),
        norm_eps=1e-6,
        routed_scaling_factor=config_fields["routed_scaling_factor"],
        correction_bias=bool(config_fields["use_expert_bias"]),
    )
    layers, dense = config_fields["num_hidden_layers"], config_fields["num_dense_layers"]
    if isinstance(dense, bool) or not isinstance(dense, int) or dense < 0:
        raise EspalierError(f"num_dense_layers = {shown(dense)}; a number of layers is needed; correct it")
    return Experts(
        frozenset(range(dense, layers)),
        routing,
        config_fields["moe_intermediate_size"],
        storage="joined",
        prefix="feed_forward.",
        names=MLP_NAMES,
        correction_name="expert_bias",
    )


def _layer_specs(config: ModelConfig) -> tuple[LayerSpec, ...]:
    state = RecurrentState(config.raw["conv_L_cache"], conv_channels=config.hidden_size)
    return specs_by_type(config, {CONV_LAYER: LayerSpec(0, state)})


def _load_layer(weights: Weights, config: ModelConfig, prefix: str, layer: int, rope: RopeTables) -> DecoderLayer:
    """Loads layer number `layer`, whose weights' names begin with `prefix`, with the computed size of the MLP."""
    return load_layer(weights, replace(config, intermediate_size=_mlp_size(config)), prefix, layer, rope)


def _load_mixer(weights: Weights, config: ModelConfig, prefix: str, layer: int, rope: RopeTables) -> Mixer:
    """Loads the first block of layer number `layer`, whose names begin with `prefix`: attention or a convolution."""
    if config.raw["layer_types"][layer] == FULL_ATTENTION:
        return load_attention(weights, config, f"{prefix}self_attn.", config.hidden_size, rope)
    prefix += "conv."
    hidden, taps, has_bias = config.hidden_size, config.raw["conv_L_cache"], bool(config.raw["conv_bias"])
    bias = weights.load(f"{prefix}conv.bias", hidden) if has_bias else None
    return GatedConv(
        weights.linear(prefix, ("in_proj",), (3 * hidden,), hidden, has_bias),
        ShortConv(weights.load(f"{prefix}conv.weight", hidden, 1, taps)[:, 0], bias, applies_silu=False),
        weights.linear(prefix, ("out_proj",), (hidden,), hidden, has_bias),
    )


FAMILY = Family(
    architecture="Lfm2ForCausalLM",
    model_type="lfm2",
    defaults={
        "num_key_value_heads": 8,
        "intermediate_size": 12288,
        "max_position_embeddings": 128000,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
    },
    qkv_bias=lambda fields: False,
    out_bias=lambda fields: False,
    windows=_checked_windows,
    qk_norm=True,
    layer_norms=LayerNorms("operator_norm", "ffn_norm"),
    names=LayerNames(
        out="out_proj",
        head_norms=("q_layernorm", "k_layernorm"),
        mlp_prefix="feed_forward.",
        mlp=MLP_NAMES,
    ),
    normalise_fields=_normalise_fields,
    extra_layer_types=(CONV_LAYER,),
    layer_specs=_layer_specs,
    load_layer=_load_layer,
    load_mixer=_load_mixer,
    final_norm="model.embedding_norm",
)
LFM2_MOE = replace(
    FAMILY,
    architecture="Lfm2MoeForCausalLM",
    model_type="lfm2_moe",
    defaults={
        **FAMILY.defaults,
        "intermediate_size": 7168,
        "block_auto_adjust_ff_dim": False,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1792,
        "num_dense_layers": 2,
        "norm_topk_prob": True,
        "use_expert_bias": True,
        "routed_scaling_factor": 1.0,
    },
    experts=_experts,
    supported_fields=("num_experts", "num_local_experts", "routed_scaling_factor"),
)
