"""LFM2 and LFM2.5, dense: most layers are a short convolution between two gates, the others have attention."""

from espalier.cache.layer_spec import KVHeads, LayerSpec, RecurrentState
from espalier.errors import EspalierError, shown
from espalier.kernels.ops.recurrence import ShortConv
from espalier.kernels.ops.rope import HeadNorms
from espalier.model_files import MAX_SIZE
from espalier.models.config import Family, ModelConfig, Raw, Windows, full_attention
from espalier.models.layers.attention import Attention
from espalier.models.layers.decoder import DecoderLayer
from espalier.models.layers.mixer import MixerLayer
from espalier.models.layers.mlp import GatedMLP
from espalier.models.layers.short_conv import GatedConv
from espalier.models.rope import RopeTables
from espalier.models.weights import Weights

CONV, FULL = "conv", "full_attention"
# Published names and those that all families share.
RENAMED = {"norm_eps": "rms_norm_eps", "tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"}


def _own_fields(raw: Raw) -> Raw:
    """The fields under the names of other families, with a type for each layer."""
    fields = {**raw, **{other: raw[name] for name, other in RENAMED.items() if name in raw}}
    count, attending = raw.get("num_hidden_layers"), raw.get("full_attn_idxs")
    if fields.get("layer_types") is None and type(count) is int:
        attending = range(count) if attending is None else attending
        fields["layer_types"] = [FULL if layer in attending else CONV for layer in range(count)]
    return fields


def _check(full: Raw) -> Windows:
    """No layer has a window.  Raises EspalierError for sizes that no layer can have."""
    for name in ("conv_L_cache", "block_multiple_of"):
        if type(full[name]) is not int or not 1 <= full[name] <= MAX_SIZE:
            raise EspalierError(f"{name} = {shown(full[name])}; a positive integer is needed; correct the config")
    factor = full["block_ffn_dim_multiplier"]
    if factor is not None and (isinstance(factor, bool) or not isinstance(factor, int | float) or factor <= 0):
        raise EspalierError(f"block_ffn_dim_multiplier = {shown(factor)}; a positive number is needed; correct it")
    if FULL not in full["layer_types"]:
        raise EspalierError(f"layer_types names no {FULL!r}; a model with no layer of attention is not supported")
    return full_attention(full)


def _inner(config: ModelConfig) -> int:
    """The size of the MLP, which the config may give before it is adjusted."""
    size, raw = config.intermediate_size, config.raw
    if not raw["block_auto_adjust_ff_dim"]:
        return size
    size = 2 * size // 3
    if raw["block_ffn_dim_multiplier"] is None:
        return size
    unit = raw["block_multiple_of"]
    return -(-int(raw["block_ffn_dim_multiplier"] * size) // unit) * unit


def _layer_specs(config: ModelConfig) -> tuple[LayerSpec, ...]:
    size = config.head_size
    of_kind = {
        CONV: LayerSpec(0, RecurrentState(config.raw["conv_L_cache"], conv_channels=config.hidden_size)),
        FULL: LayerSpec(config.heads, KVHeads(config.kv_heads, size, size)),
    }
    return tuple(of_kind[kind] for kind in config.raw["layer_types"])


def _load_layer(
    weights: Weights, config: ModelConfig, prefix: str, layer: int, rope: RopeTables
) -> MixerLayer | DecoderLayer:
    """As espalier/models/config.py:LoadLayer."""
    hidden, inner = config.hidden_size, _inner(config)
    norms = [weights.norm(f"{prefix}{name}_norm", hidden, config.rms_norm_eps) for name in ("operator", "ffn")]
    under = f"{prefix}feed_forward."
    gate_up = weights.linear(under, ("w1", "w3"), (inner, inner), hidden, bias=False)
    mlp = GatedMLP(gate_up, weights.linear(under, ("w2",), (hidden,), inner, bias=False), config.activation)
    if config.raw["layer_types"][layer] == FULL:
        return DecoderLayer(
            layer, norms[0], _load_attention(weights, config, f"{prefix}self_attn.", rope), norms[1], mlp
        )
    return MixerLayer(layer, norms[0], _load_conv(weights, config, f"{prefix}conv."), norms[1], mlp)


def _load_attention(weights: Weights, config: ModelConfig, prefix: str, rope: RopeTables) -> Attention:
    size, hidden = config.head_size, config.hidden_size
    rows = (config.heads * size, config.kv_heads * size, config.kv_heads * size)
    q_norm, k_norm = (weights.take(f"{prefix}{name}_layernorm.weight", size) for name in "qk")
    return Attention(
        weights.linear(prefix, ("q_proj", "k_proj", "v_proj"), rows, hidden, bias=False),
        weights.linear(prefix, ("out_proj",), (hidden,), rows[0], bias=False),
        config.heads + 2 * config.kv_heads,
        rope,
        HeadNorms(q_norm, k_norm, config.rms_norm_eps),
    )


def _load_conv(weights: Weights, config: ModelConfig, prefix: str) -> GatedConv:
    hidden, taps, has_bias = config.hidden_size, config.raw["conv_L_cache"], bool(config.raw["conv_bias"])
    bias = weights.take(f"{prefix}conv.bias", hidden) if has_bias else None
    return GatedConv(
        weights.linear(prefix, ("in_proj",), (3 * hidden,), hidden, has_bias),
        ShortConv(weights.take(f"{prefix}conv.weight", hidden, 1, taps)[:, 0], bias, silu=False),
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
    qkv_bias=lambda full: False,
    out_bias=lambda full: False,
    windows=_check,
    fields=_own_fields,
    layer_kinds=(CONV,),
    layer_specs=_layer_specs,
    load_layer=_load_layer,
    final_norm="model.embedding_norm",
)
