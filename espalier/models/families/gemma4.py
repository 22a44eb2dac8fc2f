"""Gemma 4 (text): head sizes and RoPE by layer type, shared K and V, and experts in parallel with a dense MLP.

Layers with full attention may have one projection for K and V.  V heads are normed without a weight and not rotated, so
K and V differ, and the cache stores both.  In the E sizes, the last layers read the K and V of an earlier layer: the
last layer of the same type that stores rows.  In these sizes, each layer also has a second input, which the embedding
computes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from espalier.attention import Pass
from espalier.cache.layer_spec import KVHeads, LayerSpec, specs_of_rank
from espalier.errors import EspalierError, shown
from espalier.kernels.ops.activation import GELU_TANH
from espalier.kernels.ops.drafts import DraftHidden
from espalier.kernels.ops.experts import Routing
from espalier.kernels.ops.rope import HeadNorms
from espalier.models.config import FULL_ATTENTION, SLIDING_ATTENTION, Experts, Family, Json, LayerWindows, ModelConfig
from espalier.models.config_values import kv_heads_and_head_size, path_in_errors
from espalier.models.families.by_type import layer_types_of, windows_by_type
from espalier.models.families.gemma3 import FAMILY as GEMMA3
from espalier.models.layer_loading import layer_specs_of, load_embedding, load_experts
from espalier.models.layers.attention import Attention
from espalier.models.layers.linear import Embedding, Linear
from espalier.models.layers.mlp import GatedMLP, MixtureMLP, RoutedRows, router_logits
from espalier.models.layers.norm import AnyNorm, BlockOutput, NormedOutputs, RMSNorm
from espalier.models.layers.residual import Residual
from espalier.models.rope import RopeTables
from espalier.models.weight_formats.sharded import UnsummedOutput
from espalier.models.weights import Weights
from espalier.shards import whole_part

# The RoPE of each layer type, if config.json has no rope_parameters.
DEFAULT_ROPES: Mapping[str, Json] = {
    SLIDING_ATTENTION: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL_ATTENTION: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
# The fields that may differ by layer in per_layer_config.
FIELDS_BY_LAYER = ("head_dim", "num_key_value_heads")


class PerLayerEmbedding(Embedding):
    """A token embedding that also computes a second input of P values for each layer (E2B, E4B).
    The second inputs are table[token] · table_scale + norm(project(embedding)), where `norm` runs over each layer's P
    values.  table: [vocab, layers · P].  project: the projection from [H] to [layers · P]."""

    __slots__ = ("table", "table_scale", "project", "norm")

    def __init__(self, embedding: Embedding, table: Tensor, table_scale: float, project: Linear, norm: RMSNorm) -> None:
        """embedding: the token embedding, whose weight and factor are taken over.  norm: has a weight of [P]."""
        super().__init__(embedding.weight, embedding.scale, None, embedding.shape[0], embedding.shards)
        self.table = table
        self.table_scale = table_scale
        self.project = project
        self.norm = norm

    def __call__(self, p: Pass, rope: RopeTables, draft_hidden: DraftHidden | None = None) -> Residual:
        """Returns the residual of the pass `p`, with per_layer_inputs.  draft_hidden: None, as for every target."""
        s = super().__call__(p, rope, draft_hidden)
        size = self.norm.weight.shape[0]
        # Rows without a token have token -1.  Their outputs are never read, so any token may replace -1.
        token_inputs = F.embedding(p.tokens.flatten().clamp(min=0), self.table).unflatten(1, (-1, size))
        projected_inputs = self.norm(self.project(s.x).unflatten(1, (-1, size)))
        s.per_layer_inputs = torch.add(projected_inputs, token_inputs, alpha=self.table_scale)
        return s


@dataclass(eq=False, slots=True)
class PerLayerInputBlock:
    """The block of a layer that reads its second input: x + norm(project(gelu(gate(x)) · input))."""

    gate: Linear
    project: Linear
    norm: RMSNorm

    def __call__(self, x: Tensor, per_layer_input: Tensor) -> Tensor | UnsummedOutput:
        """Returns the block's output before the norm, [N, H] or partial sums.  x: [N, H].  per_layer_input: [N, P]."""
        return self.project.residual_delta(F.gelu(self.gate(x), approximate="tanh") * per_layer_input)


class ParallelMLPRows(NamedTuple):
    """The inputs of the dense MLP and of the parallel experts."""

    mlp_rows: Tensor
    routed: RoutedRows


@dataclass(eq=False, slots=True)
class ParallelMLP:
    """A dense MLP and, in parallel, routed experts.  The MLP and the experts read the residual, each through its own
    norm.
    router_norm: the norm before the router; its weight includes the router's scale.  mlp_output_norm: the norm of the
    dense MLP's output.  experts_input_norm, experts_output_norm: the norms of the experts' input and output."""

    mlp: GatedMLP
    mixture: MixtureMLP
    router_norm: RMSNorm
    mlp_output_norm: RMSNorm
    experts_input_norm: RMSNorm
    experts_output_norm: RMSNorm

    def norm_input(self, norm: AnyNorm, delta: BlockOutput, residual: Tensor) -> tuple[Tensor, ParallelMLPRows]:
        """Returns (residual + delta, the normed inputs of both blocks).  See residual.py:NormReader."""
        assert isinstance(delta, NormedOutputs) and isinstance(norm, RMSNorm)
        norms = norm, self.experts_input_norm, self.router_norm
        total, (mlp_rows, rows, router_rows) = delta.add_and_norms(residual, norms)
        return total, ParallelMLPRows(mlp_rows, RoutedRows(rows, rows, router_logits(router_rows, self.mixture.router)))

    def __call__(
        self, rows: ParallelMLPRows, live: Tensor | None
    ) -> tuple[tuple[Tensor | UnsummedOutput, RMSNorm], ...]:
        """Returns the outputs of the dense MLP and of the experts, each with the norm to apply.  live: see Residual."""
        mlp_output, experts_output = self.mlp(rows.mlp_rows), self.mixture(rows.routed, live)
        return (mlp_output, self.mlp_output_norm), (experts_output, self.experts_output_norm)


@dataclass(eq=False, slots=True)
class Gemma4Layer:
    """A layer of Gemma 4: x + norm(attention(norm(x))), then x + norm(mlp(norm(x))), then PerLayerInputBlock.  The
    result is multiplied by scale.

    index: the layer's index in the pass.  per_layer_input: None if the layer has no second input.  post_mlp_norm: the
    norm of the MLP's output, whose weight includes `scale`; with per_layer_input, the norm of PerLayerInputBlock
    includes `scale` instead."""

    index: int
    attention_norm: RMSNorm
    attention: Attention
    post_attention_norm: RMSNorm
    mlp_norm: RMSNorm
    mlp: GatedMLP | ParallelMLP
    post_mlp_norm: RMSNorm
    per_layer_input: PerLayerInputBlock | None
    scale: float

    def __call__(self, s: Residual, p: Pass) -> None:
        """Adds the outputs of the layer's blocks to the residual `s`.  Attention also writes to the cache of `p`."""
        attended = self.attention(self.index, s.add_and_norm(self.attention_norm, self.attention), s, p)
        s.add(attended, self.post_attention_norm)
        rows = s.add_and_norm(self.mlp_norm, self.mlp)
        scale = self.scale if self.per_layer_input is None else 1.0
        if isinstance(self.mlp, ParallelMLP):
            out = NormedOutputs(*self.mlp(rows, s.live), norm=self.post_mlp_norm, scale=scale)
        else:
            out = NormedOutputs((self.mlp(rows, s.live), self.post_mlp_norm), scale=scale)
        if self.per_layer_input is not None:
            assert s.per_layer_inputs is not None
            s.x, _ = out.add_and_norms(s.x, ())
            out = NormedOutputs(
                (self.per_layer_input(s.x, s.per_layer_inputs[:, self.index]), self.per_layer_input.norm),
                scale=self.scale,
            )
        s.add(out)


def _layer_types(config_fields: Json) -> list[str]:
    """Returns the type of each layer, from `layer_types`; by default, every sixth layer and the last layer are full."""
    return layer_types_of(config_fields, lambda layer: layer % 6 == 0 or layer == config_fields["num_hidden_layers"])


def _checked_windows(config_fields: Json) -> LayerWindows:
    """Returns the window of each layer.  Raises EspalierError for bidirectional attention or a sliding last layer."""
    if config_fields["use_bidirectional_attention"] not in (None, False, "vision"):
        value = shown(config_fields["use_bidirectional_attention"])
        raise EspalierError(f"use_bidirectional_attention = {value} is not supported, only null or 'vision'")
    kinds = _layer_types(config_fields)
    if kinds and kinds[-1] != FULL_ATTENTION:
        raise EspalierError(
            f"layer_types ends with {shown(kinds[-1])}; Gemma 4 ends with {FULL_ATTENTION!r}; correct it"
        )
    return windows_by_type(config_fields, kinds)


def _sizes_by_layer(config_fields: Json) -> list[Json]:
    """Returns, for each layer, the fields of FIELDS_BY_LAYER whose values differ from those of the config.
    Transformers writes these values into `per_layer_config`.  Published files have the fields global_head_dim and
    num_global_key_value_heads instead."""
    by_layer, kinds = config_fields.get("per_layer_config"), _layer_types(config_fields)
    if by_layer is None:
        full_layer_sizes = {"head_dim": config_fields["global_head_dim"]}
        if config_fields["attention_k_eq_v"] and config_fields["num_global_key_value_heads"] is not None:
            full_layer_sizes["num_key_value_heads"] = config_fields["num_global_key_value_heads"]
        return [full_layer_sizes if kind == FULL_ATTENTION else {} for kind in kinds]
    if not isinstance(by_layer, Mapping) or not all(isinstance(sizes, Mapping) for sizes in by_layer.values()):
        raise EspalierError(f"per_layer_config = {shown(by_layer)}; an object for each layer is needed; correct it")
    unknown = [name for sizes in by_layer.values() for name in sizes if name not in FIELDS_BY_LAYER]
    if unknown:
        raise EspalierError(f"per_layer_config has {shown(unknown[0])}; supported are {', '.join(FIELDS_BY_LAYER)}")
    return [dict(by_layer.get(str(layer), {})) for layer in range(len(kinds))]


def _ropes(config_fields: Json) -> list[Json]:
    """Returns the RoPE fields of each layer, by the layer's type, with the size of the layer's heads."""
    kinds, parameters = _layer_types(config_fields), config_fields.get("rope_parameters") or DEFAULT_ROPES
    for name in ("rope_theta", "rope_scaling"):
        if config_fields.get(name) is not None:
            raise EspalierError(
                f"{name} = {shown(config_fields[name])} has no effect in Gemma 4; set it in rope_parameters"
            )
    for kind in kinds:
        if not isinstance(parameters.get(kind), Mapping):
            raise EspalierError(
                f"rope_parameters has {shown(parameters.get(kind))} for {kind!r}; Gemma 4 needs an object for each "
                "type of layer; correct it"
            )
    sizes = [layer_sizes.get("head_dim", config_fields["head_dim"]) for layer_sizes in _sizes_by_layer(config_fields)]
    ropes = {kind: _without_ignored_rotary_factor(parameters[kind]) for kind in set(kinds)}
    return [{"rope_parameters": ropes[kind], "head_dim": size} for kind, size in zip(kinds, sizes, strict=True)]


def _without_ignored_rotary_factor(parameters: Json) -> Json:
    """Returns the parameters, without partial_rotary_factor if transformers ignores it: for the type `default`."""
    is_default = parameters.get("rope_type", "default") == "default"
    return {name: value for name, value in parameters.items() if not (is_default and name == "partial_rotary_factor")}


def _experts(config_fields: Json) -> Experts | None:
    if not config_fields["enable_moe_block"]:
        return None
    return Experts(
        frozenset(range(config_fields["num_hidden_layers"])),
        Routing(config_fields["num_experts"], config_fields["top_k_experts"], norm_topk_prob=True),
        config_fields["moe_intermediate_size"],
        config_fields["intermediate_size"],
        "mlp",
        router_name="router.proj",
        scale_name="router.per_expert_scale",
        storage="joined",
        activation=GELU_TANH,
    )


def _layer_specs(config: ModelConfig) -> tuple[LayerSpec, ...]:
    fields, specs = config.raw, list[LayerSpec]()
    kinds, shared = _layer_types(fields), fields["num_kv_shared_layers"] or 0
    if not isinstance(shared, int) or not 0 <= shared < config.num_layers:
        raise EspalierError(
            f"{config.path}: num_kv_shared_layers = {shown(shared)} of {config.num_layers} layers; fewer than the "
            "layers are needed; correct it"
        )
    first = config.num_layers - shared
    for layer, layer_sizes in enumerate(_sizes_by_layer(fields)):
        with path_in_errors(config.path):
            kv_heads, size = kv_heads_and_head_size({**fields, **layer_sizes}, config.heads, config.hidden_size)
        cache_spec, source = KVHeads(kv_heads, size, size), None
        if layer >= first:
            source = next((i for i in reversed(range(first)) if kinds[i] == kinds[layer]), None)
            if source is None or specs[source].cache_spec != cache_spec:
                raise EspalierError(
                    f"{config.path}: num_kv_shared_layers = {shared}, but layer {layer} has no earlier layer of its "
                    "type and sizes whose K and V it could read; correct the config"
                )
        window = config.windows[layer]
        v_is_k = bool(fields["attention_k_eq_v"]) and window is None
        specs.append(LayerSpec(config.heads, cache_spec, window, scale=1.0, shares_with=source, v_is_k=v_is_k))
    return tuple(specs)


def _load_embedding(weights: Weights, config: ModelConfig, embedding_scale: float) -> Embedding:
    """Loads the embedding, with second inputs if the model has them.  embedding_scale: the factor of embeddings."""
    vocab, hidden, size = config.vocab_size, config.hidden_size, config.raw["hidden_size_per_layer_input"]
    embed = load_embedding(weights, config, embedding_scale)
    if not size:
        return embed
    rows, columns = config.raw["vocab_size_per_layer_input"], config.num_layers * size
    if rows < vocab:
        raise EspalierError(
            f"{config.path}: vocab_size_per_layer_input = {rows} is below vocab_size = {vocab}; correct the config"
        )
    table = weights.load("model.embed_tokens_per_layer.weight", rows, columns)
    project = weights.linear("model.", ("per_layer_model_projection",), (whole_part(columns),), hidden, bias=False)
    # The layers' second inputs are (norm(project · H^-½) + table · P^½) · 2^-½.  The norm of project · H^-½ with eps is
    # the norm of project with H · eps.
    factors = weights.load_exact("model.per_layer_projection_norm.weight", size) * 2**-0.5
    norm = RMSNorm(factors, config.rms_norm_eps * hidden)
    return PerLayerEmbedding(embed, table, (size / 2) ** 0.5, project, norm)


def _load_layer(weights: Weights, config: ModelConfig, prefix: str, layer: int, rope: RopeTables) -> Gemma4Layer:
    """Loads layer number `layer`, whose weights' names begin with `prefix`.  rope: the tables of its layer type."""
    fields, hidden, eps = config.raw, config.hidden_size, config.rms_norm_eps
    spec = layer_specs_of(config)[layer]
    scale = weights.load_number(f"{prefix}layer_scalar")

    def norm(name: str, factor: float = 1.0) -> RMSNorm:
        """Loads the layer's norm `name`.  With a factor, the weight is multiplied by it, in float32 or float64."""
        name = f"{prefix}{name}.weight"
        return RMSNorm(weights.load(name, hidden) if factor == 1 else weights.load_exact(name, hidden) * factor, eps)

    is_wide = fields["use_double_wide_mlp"] and spec.shares_with is not None
    inner, size = config.intermediate_size * (2 if is_wide else 1), fields["hidden_size_per_layer_input"]
    mlp = weights.mlp(f"{prefix}mlp.", hidden, inner, False, config.activation)
    per_layer_input = None
    if size:
        gate = weights.linear(prefix, ("per_layer_input_gate",), (whole_part(size),), hidden, bias=False)
        project = weights.linear(prefix, ("per_layer_projection",), (whole_part(hidden),), size, bias=False)
        per_layer_input = PerLayerInputBlock(gate, project, norm("post_per_layer_input_norm", scale))
    return Gemma4Layer(
        index=layer,
        attention_norm=norm("input_layernorm"),
        attention=_load_attention(weights, config, f"{prefix}self_attn.", spec, rope),
        post_attention_norm=norm("post_attention_layernorm"),
        mlp_norm=norm("pre_feedforward_layernorm"),
        mlp=mlp if config.experts is None else _load_experts(weights, config, config.experts, prefix, mlp),
        post_mlp_norm=norm("post_feedforward_layernorm", 1.0 if size else scale),
        per_layer_input=per_layer_input,
        scale=scale,
    )


def _load_attention(weights: Weights, config: ModelConfig, prefix: str, spec: LayerSpec, rope: RopeTables) -> Attention:
    """Loads the attention under `prefix`.  spec: the layer's heads and cache rows, those of all ranks together."""
    shards, size, eps = weights.shards, spec.cache_spec.k_size, config.rms_norm_eps
    q_rows, kv_rows = (
        shards.heads_part(spec.heads).scaled(size),
        shards.kv_heads_part(spec.cache_spec.kv_heads).scaled(size),
    )
    [rank_spec] = specs_of_rank([spec], shards)
    names = ("q_proj", "k_proj", "v_proj")[: 1 if spec.shares_with is not None else 2 if spec.v_is_k else 3]
    rows = (q_rows, kv_rows, kv_rows)[: len(names)]
    qkv = weights.linear(prefix, names, rows, config.hidden_size, config.attention_bias)
    out = weights.linear(prefix, ("o_proj",), (config.hidden_size,), q_rows, config.out_bias)
    q_norm = weights.load(f"{prefix}q_norm.weight", size)
    if spec.shares_with is None:
        norms = HeadNorms(
            q_norm, weights.load(f"{prefix}k_norm.weight", size), eps, norms_v_heads=True, v_is_k=spec.v_is_k
        )
    else:
        # Published files hold unused K and V weights for layers that read an earlier layer's K and V.
        weights.allow_unused_prefixes(tuple(f"{prefix}{name}" for name in ("k_proj.", "v_proj.", "k_norm.")))
        norms = HeadNorms(q_norm, q_norm, eps)
    return Attention(qkv, out, rank_spec.projected_heads, rope, norms)


def _load_experts(weights: Weights, config: ModelConfig, experts: Experts, prefix: str, mlp: GatedMLP) -> ParallelMLP:
    """Loads the experts under `prefix`, which run in parallel with `mlp`, the layer's dense MLP."""
    hidden, eps = config.hidden_size, config.rms_norm_eps
    return ParallelMLP(
        mlp=mlp,
        # The dense MLP is a separate block, not a shared expert in the experts' sum.
        mixture=load_experts(weights, replace(experts, shared_size=0), prefix, hidden),
        router_norm=RMSNorm(weights.load_exact(f"{prefix}router.scale", hidden) * hidden**-0.5, eps),
        mlp_output_norm=weights.norm(f"{prefix}post_feedforward_layernorm_1", hidden, eps),
        experts_input_norm=weights.norm(f"{prefix}pre_feedforward_layernorm_2", hidden, eps),
        experts_output_norm=weights.norm(f"{prefix}post_feedforward_layernorm_2", hidden, eps),
    )


FAMILY = Family(
    architecture="Gemma4ForCausalLM",
    model_type="gemma4_text",
    defaults={
        "vocab_size": 262144,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "num_global_key_value_heads": None,
        "attention_k_eq_v": False,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 512,
        "use_bidirectional_attention": None,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "enable_moe_block": False,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
    },
    windows=_checked_windows,
    qk_norm=True,
    layer_norms=GEMMA3.layer_norms,
    experts=_experts,
    embedding_scale=lambda fields: float(fields["hidden_size"] ** 0.5),
    layer_ropes=_ropes,
    load_embedding=_load_embedding,
    load_layer=_load_layer,
    layer_specs=_layer_specs,
    supported_fields=("final_logit_softcapping", "partial_rotary_factor", "use_bidirectional_attention", "num_experts"),
    activation_field="hidden_activation",
    multimodal_architectures=("Gemma4ForConditionalGeneration",),
)
# The 12B model.  Transformers has a separate class for this model, without experts and second inputs.
GEMMA4_UNIFIED = replace(
    FAMILY,
    architecture="Gemma4UnifiedForCausalLM",
    model_type="gemma4_unified_text",
    multimodal_architectures=("Gemma4UnifiedForConditionalGeneration",),
    defaults={
        **FAMILY.defaults,
        "max_position_embeddings": 262144,
        "sliding_window": 1024,
        "hidden_size_per_layer_input": 0,
    },
)
