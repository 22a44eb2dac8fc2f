"""Loads a target from a directory: finds its family, reads its config, builds the model from its weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from espalier.cache.layer_spec import KVHeads, LatentKV, LayerSpec
from espalier.errors import EspalierError
from espalier.kernels.ops.rope import HeadNorms, LatentForm
from espalier.model_files import naming_config, read_json
from espalier.models import (
    deepseek,
    gemma3,
    glm4_moe,
    gpt_oss,
    llama,
    mimo,
    mistral,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
)
from espalier.models.base import CausalLM
from espalier.models.config import Family, ModelConfig, find_family, parse
from espalier.models.expert_loading import load_experts
from espalier.models.latent_config import LatentConfig
from espalier.models.layers.attention import Attention
from espalier.models.layers.decoder import Decoder, DecoderLayer
from espalier.models.layers.embedding import Embedding
from espalier.models.layers.latent_attention import NORM_EPS, LatentAttention
from espalier.models.layers.linear import Linear
from espalier.models.layers.norm import RMSNorm
from espalier.models.rope import RopeTables
from espalier.models.weight_formats import QUANTISATION_FIELDS, dense_weight
from espalier.models.weight_formats.modelopt import read_hf_quant_config
from espalier.models.weights import Weights

# To add a family from outside this package: FAMILIES[FAMILY.architecture] = FAMILY.
FAMILIES: dict[str, Family] = {
    family.architecture: family
    for family in (
        *(module.FAMILY for module in (llama, qwen2, qwen3, mistral, gemma3, mimo, qwen2_moe, qwen3_moe, gpt_oss)),
        *(deepseek.V2, deepseek.V3, glm4_moe.GLM, glm4_moe.GLM_LITE, glm4_moe.DOTS),
    )
}


def read_config(path: Path | str, overrides: Mapping[str, Any] | None = None) -> ModelConfig:
    """Parse config.json of a target directory, and the eos ids of its generation_config.json.

    Raises EspalierError for an unknown architecture or override, a weight format that is not supported, recurrent
    state, and any other field that changes the computation in a way that is not supported.
    """
    path = Path(path)
    raw = read_raw(path)
    generation = path / "generation_config.json"
    with naming_config(path):
        family = find_family({**raw, **(overrides or {})}, FAMILIES, path)
        return parse(raw, family, path, overrides, read_json(generation) if generation.exists() else None)


def read_raw(path: Path) -> dict[str, Any]:
    """config.json of a target or a draft, and the quantisation that ModelOpt describes in a file of its own."""
    raw = read_json(path / "config.json")
    if any(raw.get(name) is not None for name in QUANTISATION_FIELDS):
        return raw
    return {**raw, **read_hf_quant_config(path)}


def load_target(
    path: Path | str,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    position_rows: int,
    capture: tuple[int, ...] = (),
    overrides: Mapping[str, Any] | None = None,
) -> CausalLM:
    """Load a target.

    position_rows: rotary tables cover positions 0 .. position_rows-1.
    capture: layers whose inputs every pass returns, in this order; num_layers means the input of the final norm.
    """
    config = read_config(path, overrides)
    missing = [layer for layer in capture if not 0 <= layer <= config.num_layers]
    if missing:
        raise EspalierError(
            f"layer {missing[0]} cannot be captured from {path}, which has {config.num_layers} layers; use the target "
            "that the draft was trained for"
        )
    return make_target(Weights(Path(path), dtype, device, config.formats), config, capture, position_rows)


def make_target(weights: Weights, config: ModelConfig, capture: tuple[int, ...], position_rows: int) -> Decoder:
    """Build the target from its weights.  Raises EspalierError for a weight that is missing, misshapen or not used."""
    layer_specs = layer_specs_of(config)
    scale = float(torch.tensor(config.embedding_scale, dtype=weights.dtype))
    embed = Embedding(weights.take("model.embed_tokens.weight", config.vocab_size, config.hidden_size), scale)
    tables = {rope: RopeTables(rope, position_rows, weights.dtype, weights.device) for rope in config.ropes}
    load = config.load_layer or load_layer
    layers = [load(weights, config, f"model.layers.{i}.", i, tables[rope]) for i, rope in enumerate(config.ropes)]
    kv_scales = tuple(
        weights.kv_scales(f"model.layers.{i}.self_attn.", spec.keeps) for i, spec in enumerate(layer_specs)
    )
    norm = weights.norm("model.norm", config.hidden_size, config.rms_norm_eps, config.norm_offset)
    head = _head(weights, config, embed)
    weights.ignore_under(mtp_prefixes(config))
    weights.finish()
    return Decoder(config, layer_specs, tuple(capture), tables[config.ropes[0]], embed, layers, norm, head, kv_scales)


def mtp_prefixes(config: ModelConfig) -> tuple[str, ...]:
    """The prefixes of a target's own MTP layers.  They are a draft (mtp.py): the target's output does not need them."""
    count = int(config.raw.get("num_nextn_predict_layers") or 0)
    return () if config.mtp is None else tuple(config.mtp.prefix_of(i, config.num_layers) for i in range(count))


def layer_specs_of(config: ModelConfig) -> tuple[LayerSpec, ...]:
    """The spec of each layer."""
    size, latent = config.head_size, config.latent
    if latent is None:
        keeps = KVHeads(config.kv_heads, size, size)
        return tuple(LayerSpec(config.heads, keeps, window, config.softmax_scale) for window in config.windows)
    scale = config.rope.latent_mscale**2 * size**-0.5
    row = LatentKV(latent.row_size, latent.kv_rank)
    return tuple(LayerSpec(config.heads, row, window, scale) for window in config.windows)


def load_attention(
    weights: Weights, config: ModelConfig, prefix: str, columns: int, rope: RopeTables
) -> Attention | LatentAttention:
    """The attention block under `prefix`, with K and V heads or latent rows as the config says.

    columns: input size of q, k and v: the hidden size, or twice that for a draft, whose input is embedding and hidden
    state concatenated.
    """
    if config.latent is not None:
        return _load_latent_attention(weights, config, config.latent, prefix, columns, rope)
    size = config.head_size
    q_rows, kv_rows = config.heads * size, config.kv_heads * size
    rows = (q_rows, kv_rows, kv_rows)
    qkv = weights.linear(prefix, ("q_proj", "k_proj", "v_proj"), rows, columns, config.attention_bias)
    out = weights.linear(prefix, ("o_proj",), (config.hidden_size,), q_rows, config.out_bias)
    norms = sink = None
    if config.qk_norm:
        q_norm, k_norm = (weights.norm_weight(f"{prefix}{name}_norm.weight", size, config.norm_offset) for name in "qk")
        norms = HeadNorms(q_norm, k_norm, config.rms_norm_eps)
    if config.sinks:
        sink = weights.take_exact(f"{prefix}sinks", config.heads)
    return Attention(qkv, out, config.heads + 2 * config.kv_heads, rope, norms, sink)


def _load_latent_attention(
    weights: Weights, config: ModelConfig, latent: LatentConfig, prefix: str, columns: int, rope: RopeTables
) -> LatentAttention:
    """The latent attention block under `prefix`.  columns: as in load_attention."""
    hidden, heads, rank = config.hidden_size, config.heads, latent.q_rank
    q_rows, bias = heads * latent.head_size, config.attention_bias
    name, rows = ("q_proj", q_rows) if rank is None else ("q_a_proj", rank)
    names, row = (name, "kv_a_proj_with_mqa"), latent.row_size
    down = weights.linear(prefix, names, (rows, row), columns, bias=bias and rank is not None)
    q_norm = q = None
    if rank is not None:
        q_norm = weights.norm(f"{prefix}q_a_layernorm", rank, NORM_EPS)
        q = weights.linear(prefix, ("q_b_proj",), (q_rows,), rank, bias=False)
    elif bias:
        # Only the row to keep has one.
        down.bias = torch.cat((weights.empty(rows).zero_(), weights.take(f"{prefix}{names[1]}.bias", row)))
    kv_up = weights.take_matrix(f"{prefix}kv_b_proj", heads * (latent.nope_size + latent.v_size), latent.kv_rank)
    k_up, v_up = kv_up.unflatten(0, (heads, -1)).split((latent.nope_size, latent.v_size), 1)
    return LatentAttention(
        down=down,
        q_norm=q_norm,
        q=q,
        form=LatentForm(weights.take(f"{prefix}kv_a_layernorm.weight", latent.kv_rank), NORM_EPS, latent.interleaved),
        k_up=k_up,
        v_up=v_up,
        out=weights.linear(prefix, ("o_proj",), (hidden,), heads * latent.v_size, config.out_bias),
        row_size=row,
        rope=rope,
    )


def load_layer(
    weights: Weights, config: ModelConfig, prefix: str, layer: int, rope: RopeTables, index: int | None = None
) -> DecoderLayer:
    """The layer under `prefix`.

    layer: its number in the checkpoint, which says whether it has experts; index: its place in a pass, by default the
    same.
    """
    experts = config.experts if config.experts is not None and layer in config.experts.layers else None
    hidden, names = config.hidden_size, config.layer_norms

    def norm(name: str) -> RMSNorm:
        return weights.norm(f"{prefix}{name}", hidden, config.rms_norm_eps, config.norm_offset)

    attention = f"{prefix}self_attn."
    return DecoderLayer(
        index=layer if index is None else index,
        attention_norm=norm(names.before_attention),
        attention=load_attention(weights, config, attention, hidden, rope),
        mlp_norm=norm(names.before_mlp),
        mlp=(
            weights.mlp(f"{prefix}mlp.", hidden, config.intermediate_size, config.mlp_bias, config.activation)
            if experts is None
            else load_experts(weights, experts, f"{prefix}mlp.", hidden, config.activation)
        ),
        post_attention_norm=norm(names.behind_attention) if names.behind_attention else None,
        post_mlp_norm=norm(names.behind_mlp) if names.behind_mlp else None,
    )


def _head(weights: Weights, config: ModelConfig, embed: Embedding) -> Linear:
    """The lm_head.  With tied embeddings it is the embedding's tensor, and a stored head must be equal to it."""
    if not config.tie_word_embeddings:
        return weights.linear("", ("lm_head",), (config.vocab_size,), config.hidden_size, bias=False)
    name = "lm_head.weight"
    if name in weights and not torch.equal(weights.take(name, *embed.weight.shape), embed.weight):
        raise EspalierError(
            f"{weights.path}: tie_word_embeddings is true but {name!r} differs from the embedding; "
            'pass model_overrides={"tie_word_embeddings": False} to use it'
        )
    return Linear(dense_weight(embed.weight))
