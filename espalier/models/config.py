"""Reads a model's config.json.  A field that changes the computation is either applied or refused with an error.

All families share this reader.  The defaults of missing fields differ by family, so each family file declares them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from espalier.cache.layer_spec import LayerSpec
from espalier.errors import EspalierError, shown
from espalier.kernels.ops.activation import GELU_TANH, SILU, Activation
from espalier.model_files import MAX_SIZE
from espalier.models.config_values import (
    kv_heads_and_head_size,
    path_in_errors,
    positive_integer,
    read_eos_token_ids,
    require_field_types,
    rotated_size,
    with_overrides,
)
from espalier.models.latent_config import LatentConfig, read_latent_config
from espalier.models.rope import ATTENTION_FIELDS, ROPE_FIELDS, Json, RopeConfig, RopeTables, read_rope
from espalier.models.stored_names import (
    DEFAULT_LAYER_NAMES,
    DEFAULT_LAYER_NORMS,
    SAME_NAMES,
    Experts,
    LayerNames,
    LayerNorms,
    MTPFamily,
    StoredNames,
)
from espalier.models.weight_formats import QUANTISATION_FIELDS, FormatLookup, declared_kv_dtype, read_formats

if TYPE_CHECKING:
    from espalier.models.from_transformers.probe import ProbeResult

# Values of `layer_types` that more than one family uses.
FULL_ATTENTION, SLIDING_ATTENTION, LINEAR_LAYER = "full_attention", "sliding_attention", "linear_attention"
LayerWindows = tuple[int | None, ...]
# A function that loads a layer: (weights, config, prefix of the layer's weight names, layer number, RoPE tables) -> a
# models/base.py:Layer.  In a family with MTP layers, the function has one more argument: the layer's index in the
# KV cache (default: the layer number).
LoadLayer = Callable[..., Any]
# A function that loads the first block of a layer: LoadLayer's five arguments -> a models/layers/decoder.py:Mixer.
LoadMixer = Callable[[Any, "ModelConfig", str, int, RopeTables], Any]
# (weights, config, the factor by which embeddings are multiplied) -> the token embedding.
LoadEmbedding = Callable[[Any, "ModelConfig", float], Any]
MakeLayerSpecs = Callable[["ModelConfig"], tuple[LayerSpec, ...]]

# Fields of config.json that change the computation -> the values with which the field has no effect.  Other values are
# refused, except in families that list the field in Family.supported_fields.
NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {
    "hidden_act": ("silu", "swish"),
    **dict.fromkeys(
        "attn_logit_softcapping final_logit_softcapping llama_4_scaling_beta moe_router_logit_softcapping".split(),
        (None, 0, 0.0),
    ),
    **dict.fromkeys(
        (
            "partial_rotary_factor rotary_pct embedding_multiplier residual_multiplier logits_scaling logit_scale "
            "routed_scaling_factor qk_scale_factor output_multiplier"
        ).split(),
        (None, 1, 1.0),
    ),
    **dict.fromkeys(
        (
            "attention_multiplier query_pre_attn_scalar layer_rope_theta num_attention_heads_per_layer "
            "attention_chunk_size clip_qkv swiglu_limit swiglu_alpha index_topk"
        ).split(),
        (None,),
    ),
    **dict.fromkeys(
        (
            "num_experts n_routed_experts n_shared_experts shared_expert_intermediate_size first_k_dense_replace "
            "shared_intermediate_size num_nextn_predict_layers"
        ).split(),
        (None, 0),
    ),
    "num_local_experts": (None, 0, 1),
    "scoring_func": (None, "softmax"),
    "topk_method": (None, "greedy"),
    "no_rope_layers": (None, []),
    "position_embedding_type": (None, "rope"),
    **dict.fromkeys(
        "gating moe_apply_router_weight_on_input use_mrope use_bidirectional_attention attn_output_gate".split(),
        (None, False),
    ),
}
# The supported activations, by their names in config.json (Family.activation_field).
ACTIVATIONS: Mapping[str, Activation] = {"silu": SILU, "swish": SILU, "gelu_pytorch_tanh": GELU_TANH}
# Fields that do not affect the forward pass.  A user may override them.
IGNORED_FIELDS = (
    "architectures bos_token_id eos_token_id pad_token_id attention_dropout dtype torch_dtype initializer_range "
    "pretraining_tp transformers_version use_cache"
).split()


@dataclass(frozen=True)
class Family:
    """The declaration of one model family.  Functions take the completed config (config.json with `defaults` for
    missing fields), if not stated otherwise.

    defaults: the values of fields that are missing in config.json, as in the family's config class of Hugging Face
    transformers; tie_word_embeddings is false by default.
    qkv_bias: whether the projections of q, k and v have a bias.  out_bias: whether the output projection of attention
    has a bias.  The default of both is the config field attention_bias.
    windows: for each layer, the number of positions that a query attends to (its own position counts), or None for no
    window; by default, None for all layers.
    qk_norm: whether each head of q and k is normed, or the name of the config field with this flag.
    qk_norm_over_all_heads: whether one norm covers all heads of q, and another all heads of k.
    layer_norms: the names of a layer's norms.  names: the names of a layer's other weights.
    norm_offset: a number that is added to the weight of every RMS norm, in float32 (in a float64 model: float64).
    has_sinks: whether each head has an attention sink: a logit in the softmax that has no value vector.
    experts: returns the declaration of the expert layers; None for a model without experts.  Raises EspalierError for
    unsupported experts.
    embedding_scale: the factor by which embeddings are multiplied.  softmax_scale: the factor of attention scores; None
    for 1/√head_size.
    residual_scale: the output of each block (attention or MLP) times this factor is added to the residual stream.
    logit_scale: the factor by which logits are multiplied, before the soft cap.
    layer_ropes: returns, for each layer, the RoPE fields that replace the fields of the config, and head_dim if the
    layer has another head size; None for a layer without RoPE.  By default, all layers have the config's RoPE.
    load_embedding, load_layer, load_mixer: load the token embedding, a layer, and the first block of a layer (attention
    or a recurrent block); None for layer_loading.py:load_embedding, load_layer and load_attention.
    layer_specs: takes the ModelConfig, and returns the LayerSpec of each layer; None for K and V heads or, with
    uses_mla, latent rows (layer_loading.py:layer_specs_of).
    uses_mla: whether layers have latent attention (MLA), with the sizes of espalier/models/latent_config.py.
    has_indexer: whether an indexer chooses the rows that a layer attends to (espalier/models/latent_config.py).
    supported_fields: the fields of NEUTRAL_VALUES that may have any value in this family, because the family reads the
    fields or because they do not change the output.
    multimodal_architectures: architectures of multimodal checkpoints whose text part may be of this family.
    mtp: the multi-token prediction (MTP) layers of the family's checkpoints; None if the family has no MTP layers.
    mlp_size_field, activation_field: the fields with the intermediate size and with the activation of dense MLPs.
    usable_in_drafts: whether an EAGLE-3 head, or an MTP head with its own config, may have layers of this family.
    eagle3.py supports only layers of attention and a gated MLP, with a norm before each.
    normalise_fields: takes config.json, and returns its fields under the names that all families share.
    extra_layer_types: further values that `layer_types` may contain.
    stored_names: how the family's checkpoints name the weights.  ignored_weights: prefixes of weights outside the text
    model, each with a description.  final_norm: the name of the last norm."""

    architecture: str
    model_type: str
    defaults: Mapping[str, Any]
    qkv_bias: Callable[[Json], bool] = lambda fields: bool(fields["attention_bias"])
    out_bias: Callable[[Json], bool] = lambda fields: bool(fields["attention_bias"])
    windows: Callable[[Json], LayerWindows] = lambda fields: no_windows(fields)
    qk_norm: bool | str = False
    qk_norm_over_all_heads: bool = False
    layer_norms: LayerNorms = DEFAULT_LAYER_NORMS
    names: LayerNames = DEFAULT_LAYER_NAMES
    norm_offset: float = 0.0
    has_sinks: bool = False
    experts: Callable[[Json], Experts | None] = lambda fields: None
    embedding_scale: Callable[[Json], float] = lambda fields: 1.0
    softmax_scale: Callable[[Json], float | None] = lambda fields: None
    residual_scale: Callable[[Json], float] = lambda fields: 1.0
    logit_scale: Callable[[Json], float] = lambda fields: 1.0
    layer_ropes: Callable[[Json], Sequence[Json | None]] | None = None
    load_embedding: "LoadEmbedding | None" = None
    load_layer: "LoadLayer | None" = None
    load_mixer: "LoadMixer | None" = None
    layer_specs: "MakeLayerSpecs | None" = None
    uses_mla: bool = False
    has_indexer: bool = False
    supported_fields: tuple[str, ...] = ()
    mtp: MTPFamily | None = None
    mlp_size_field: str = "intermediate_size"
    activation_field: str = "hidden_act"
    usable_in_drafts: bool = False
    multimodal_architectures: tuple[str, ...] = ()
    normalise_fields: Callable[[Json], Json] = lambda config_json: config_json
    extra_layer_types: tuple[str, ...] = ()
    stored_names: StoredNames = SAME_NAMES
    ignored_weights: Mapping[str, str] = field(default_factory=dict)
    final_norm: str = "model.norm"


@dataclass(frozen=True)
class ModelConfig:
    """A decoder's sizes and options.

    max_position: the longest supported context, in tokens: max_position_embeddings, or the length that YaRN extends to.
    layer_ropes: the RoPE of each layer; rope: the RoPE of the first layer.
    logit_cap, softcap: the soft caps of logits and of attention scores: tanh bounds values to ±cap; None for no cap.
    eos_token_ids: all ids in config.json and generation_config.json, or the ids of an override.
    latent: the sizes of latent attention; None for layers with K and V heads.  With latent attention, all heads share
    one key-value head, and head_size is the size of a q or k head, before q is projected to the latent.
    formats: the storage format of each matrix.  stored_names: how the checkpoint names the weights.
    embedding_scale, softmax_scale, residual_scale, logit_scale: results of the Family's functions of these names.
    activation: the activation of dense MLPs.
    raw: config.json, completed with the family's defaults, with the overrides applied.
    path: the checkpoint's directory, or its GGUF file.
    multimodal_architecture: the architecture of the multimodal checkpoint with this text model; None for a text model.
    probe_result: the properties of the transformers class that runs the model; None if Espalier's own layers run it."""

    family: Family = field(repr=False)
    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate_size: int
    rms_norm_eps: float
    rope: RopeConfig
    layer_ropes: tuple[RopeConfig, ...]
    max_position: int
    tie_word_embeddings: bool
    attention_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: LayerWindows
    experts: Experts | None
    embedding_scale: float
    softmax_scale: float | None
    residual_scale: float
    logit_scale: float
    softcap: float | None
    logit_cap: float | None
    activation: Activation
    eos_token_ids: tuple[int, ...]
    latent: LatentConfig | None
    formats: FormatLookup = field(repr=False)
    stored_names: StoredNames
    raw: Json = field(repr=False)
    path: Path = field(repr=False, compare=False)
    multimodal_architecture: str | None = None
    probe_result: "ProbeResult | None" = field(default=None, repr=False)

    @property
    def declared_kv_dtype(self) -> str | None:
        """The kv_dtype that config.json declares.  Raises EspalierError for a KV cache scheme that is not supported."""
        return declared_kv_dtype(self.raw)


def architecture_of(config_json: Json) -> str | None:
    """Returns the first entry of `architectures`, or model_type if that list is missing; None if it is not a string."""
    names = config_json.get("architectures") or [config_json.get("model_type")]
    name = names[0] if isinstance(names, list) else None
    return name if isinstance(name, str) else None


def parse_config(
    config_json: Json,
    family: Family,
    path: Path,
    overrides: Mapping[str, Any] | None = None,
    generation_config: Json | None = None,
) -> ModelConfig:
    """Returns a ModelConfig from config.json.  Raises EspalierError naming a field that is missing or not supported.
    overrides: fields that replace those of config.json.  generation_config: generation_config.json, for the eos ids."""
    with path_in_errors(path):
        return _parse_fields(config_json, family, path, overrides or {}, generation_config or {})


def _parse_fields(
    config_json: Json, family: Family, path: Path, overrides: Mapping[str, Any], generation_config: Json
) -> ModelConfig:
    """Does the work of parse_config.  overrides: fields in place of those of config.json.  path: the model's
    directory."""
    config_json = family.normalise_fields(config_json)
    defaults = {"tie_word_embeddings": False, **family.defaults}
    allowed_names = {*config_json, *defaults, *NEUTRAL_VALUES, *IGNORED_FIELDS, *QUANTISATION_FIELDS, *ROPE_FIELDS}
    overridden = with_overrides(config_json, overrides, {*allowed_names, "rope_theta"})
    # If the config has rope_scaling, transformers ignores the family's default rope_parameters, and so does this code.
    unused_defaults = ("rope_parameters",) if overridden.get("rope_scaling") else ()
    fields = {**{name: value for name, value in defaults.items() if name not in unused_defaults}, **overridden}
    require_field_types(fields)
    fields = _with_attention_fields(fields)
    refuse_unsupported(fields, family.supported_fields)
    count = partial(positive_integer, fields)
    heads, layers, hidden = count("num_attention_heads"), count("num_hidden_layers"), count("hidden_size")
    latent = read_latent_config(fields, count, family.has_indexer) if family.uses_mla else None
    kv_heads, head_size = (1, latent.head_size) if latent else kv_heads_and_head_size(fields, heads, hidden)
    max_position_embeddings = count("max_position_embeddings")
    windows = _read_windows(fields, family, layers)
    ropes, max_position = _read_ropes(fields, family, latent, head_size, max_position_embeddings)
    return ModelConfig(
        family=family,
        architecture=family.architecture,
        vocab_size=count("vocab_size"),
        hidden_size=hidden,
        num_layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        intermediate_size=count(family.mlp_size_field),
        rms_norm_eps=float(fields["rms_norm_eps"]),
        rope=ropes[0],
        layer_ropes=ropes,
        max_position=max_position,
        tie_word_embeddings=bool(fields["tie_word_embeddings"]),
        attention_bias=family.qkv_bias(fields),
        out_bias=family.out_bias(fields),
        mlp_bias=bool(fields.get("mlp_bias", False)),
        qk_norm=family.qk_norm if isinstance(family.qk_norm, bool) else bool(fields[family.qk_norm]),
        windows=windows,
        experts=_read_experts(fields, family),
        embedding_scale=family.embedding_scale(fields),
        softmax_scale=family.softmax_scale(fields),
        residual_scale=family.residual_scale(fields),
        logit_scale=family.logit_scale(fields),
        softcap=float(fields.get("attn_logit_softcapping") or 0) or None,
        logit_cap=float(fields.get("final_logit_softcapping") or 0) or None,
        activation=_read_activation(fields, family.activation_field),
        # An override of eos_token_id also replaces the ids of generation_config.json.
        eos_token_ids=read_eos_token_ids(fields, {} if "eos_token_id" in overrides else generation_config),
        latent=latent,
        formats=read_formats(fields),
        stored_names=family.stored_names,
        raw=fields,
        path=path,
    )


def refuse_unsupported(config_fields: Json, supported_fields: tuple[str, ...]) -> None:
    """Raises EspalierError for a config with a field whose computation is not implemented.
    supported_fields: the fields of NEUTRAL_VALUES that the model's family supports."""
    for name, neutral in NEUTRAL_VALUES.items():
        if name in config_fields and name not in supported_fields and config_fields[name] not in neutral:
            value = config_fields[name]
            supported = " or ".join(repr(v) for v in neutral)
            raise EspalierError(f"{name} = {shown(value)} is not supported, only {supported}; use another model")


def _read_activation(config_fields: Json, field: str) -> Activation:
    """Returns the activation that `field` names.  Raises EspalierError for an activation that is not supported."""
    name = config_fields.get(field, "silu")
    if not isinstance(name, str) or name not in ACTIVATIONS:
        supported = " or ".join(map(repr, ACTIVATIONS))
        raise EspalierError(f"{field} = {shown(name)} is not supported, only {supported}; use another model")
    return ACTIVATIONS[name]


def _with_attention_fields(config_fields: Json) -> Json:
    """Returns the config with ATTENTION_FIELDS at the top level; transformers 5 writes them into rope_parameters."""
    ropes = [config_fields.get(field) or {} for field in reversed(ROPE_FIELDS)]
    return config_fields | {name: rope[name] for rope in ropes for name in ATTENTION_FIELDS if name in rope}


def _read_ropes(
    config_fields: Json, family: Family, latent: LatentConfig | None, head_size: int, max_position_embeddings: int
) -> tuple[tuple[RopeConfig, ...], int]:
    """Returns the RoPE of each layer, and the longest context, in tokens, that all layers support."""
    layers = (
        [{}] * config_fields["num_hidden_layers"] if family.layer_ropes is None else family.layer_ropes(config_fields)
    )
    ropes_and_contexts = []
    for layer_fields in layers:
        if layer_fields is None:
            ropes_and_contexts.append((RopeConfig(head_size, 1.0, "none"), max_position_embeddings))
            continue
        merged = _with_attention_fields({**config_fields, **layer_fields})
        refuse_unsupported(merged, family.supported_fields)
        size = layer_fields.get("head_dim", head_size)
        rotary_dim = latent.rope_size if latent else rotated_size(merged, size)
        ropes_and_contexts.append(read_rope(merged, rotary_dim, max_position_embeddings))
    return tuple(rope for rope, _ in ropes_and_contexts), min(context for _, context in ropes_and_contexts)


def no_windows(config_fields: Json) -> LayerWindows:
    """Returns None for each layer, because no layer has a sliding window."""
    return (None,) * int(config_fields["num_hidden_layers"])


def windows_by_layer_type(config_fields: Json, slides_by_default: Callable[[int], bool]) -> LayerWindows:
    """Returns the window of each layer: `sliding_window` for sliding layers, else None.  `layer_types` says which
    layers are sliding.  If config.json has no `layer_types`, layer i is sliding if slides_by_default(i) is true."""
    window, types = config_fields.get("sliding_window"), config_fields.get("layer_types")
    if window is None:
        return no_windows(config_fields)
    layers = range(int(config_fields["num_hidden_layers"]))
    slides = [types[i] == SLIDING_ATTENTION for i in layers] if types else [slides_by_default(i) for i in layers]
    return tuple(int(window) if slides[i] else None for i in layers)


def windows_in_even_layers(config_fields: Json) -> LayerWindows:
    """Returns the window of each layer.  Without `layer_types`, layers 0, 2, 4, ... are sliding."""
    return windows_by_layer_type(config_fields, lambda layer: layer % 2 == 0)


def windows_if_enabled(config_fields: Json, slides_by_default: Callable[[int], bool]) -> LayerWindows:
    """Returns the result of windows_by_layer_type, or None for every layer if use_sliding_window is false."""
    window = config_fields["sliding_window"] if config_fields["use_sliding_window"] else None
    return windows_by_layer_type({**config_fields, "sliding_window": window}, slides_by_default)


def hybrid_windows(config_fields: Json) -> LayerWindows:
    """Returns the windows of a hybrid model: None for each layer.  Raises EspalierError if no layer has attention."""
    if FULL_ATTENTION not in (config_fields["layer_types"] or ()):
        raise EspalierError(
            "layer_types names no 'full_attention'; a model with no layer of attention is not supported"
        )
    return no_windows(config_fields)


def _read_windows(config_fields: Json, family: Family, num_layers: int) -> LayerWindows:
    """Returns the sliding window of each layer.  Raises EspalierError for fields that contradict each other."""
    types = config_fields.get("layer_types")
    if types is not None:
        supported = {FULL_ATTENTION, SLIDING_ATTENTION, *family.extra_layer_types}
        unknown = sorted({str(t) for t in types} - supported)
        if unknown:
            raise EspalierError(
                f"layer_types names {unknown[0]!r}; supported are 'full_attention' and 'sliding_attention'; "
                "use another model"
            )
        if len(types) != num_layers:
            raise EspalierError(
                f"layer_types has {len(types)} entries for num_hidden_layers = {num_layers}; make them agree"
            )
    # Some configs that do not use a window have sliding_window = 0.
    window = config_fields.get("sliding_window") if config_fields.get("use_sliding_window", True) else None
    if window is not None and (not isinstance(window, int) or window < 1):
        raise EspalierError(f"sliding_window = {window!r}; a positive integer or null is needed; correct it")
    windows = family.windows(config_fields)
    for layer, kind in enumerate(types or ()):
        if kind == SLIDING_ATTENTION and windows[layer] is None:
            raise EspalierError(
                f"layer_types calls layer {layer} 'sliding_attention', but the layer has no window "
                f"({family.architecture}, sliding_window = {config_fields.get('sliding_window')!r}, "
                f"use_sliding_window = {config_fields.get('use_sliding_window')!r}); correct layer_types, or set the "
                "window with model_overrides"
            )
    return windows


def _read_experts(config_fields: Json, family: Family) -> Experts | None:
    experts = family.experts(config_fields)
    if experts is not None:
        for name, value, min_size in (("size", experts.intermediate_size, 1), ("shared size", experts.shared_size, 0)):
            if not isinstance(value, int) or not min_size <= value <= MAX_SIZE:
                raise EspalierError(
                    f"experts of {name} {shown(value)}; an integer, {min_size} to {MAX_SIZE}, is needed; correct "
                    "the config"
                )
    return experts
