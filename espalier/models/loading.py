"""Loads a target model: finds the family, reads config.json, and builds the model from the weights.

Only the text part of a multimodal checkpoint (`...ForConditionalGeneration`) is loaded.  The config of the text part is
`text_config`, and stored_names.py maps the names of its weights."""

import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from espalier.cache.layer_spec import CacheSpec, LatentKV, layers_with_rows, specs_of_rank
from espalier.errors import EspalierError, shown
from espalier.kernels.state.kv_scales import KVScales
from espalier.model_files import add_path_to_errors, is_gguf, read_json
from espalier.models.base import CausalLM
from espalier.models.config import Family, Json, ModelConfig, architecture_of, parse_config
from espalier.models.declared_weights import require_shards
from espalier.models.families import FAMILIES
from espalier.models.from_transformers.probe import causal_class_name, read_by_transformers
from espalier.models.from_transformers.target import load_by_transformers
from espalier.models.gguf_config import gguf_config
from espalier.models.layer_loading import layer_specs_of, load_embedding, load_head, load_layer, tied_head
from espalier.models.layers.decoder import Decoder
from espalier.models.layers.linear import Embedding, Linear
from espalier.models.rope import RopeTables
from espalier.models.stored_names import TEXT_PART_NAMES
from espalier.models.weight_formats import QUANTISATION_FIELDS
from espalier.models.weight_formats.e2m1 import read_hf_quant_config
from espalier.models.weights import Weights
from espalier.shards import SINGLE_RANK, Shards, as_rank_part

RECURRENT_NAMES = re.compile("mamba|rwkv|jamba|bamba|recurrent|zamba|retnet|deltanet|lfm|qwen3next|hybrid")
# Fields of a multimodal config that also apply to its text part, unless `text_config` has them.
SHARED_FIELDS = ("dtype", "torch_dtype", "eos_token_id", "bos_token_id", "quantization_config", "compression_config")


def _known_family(config_json: Json) -> Family | None:
    """Returns the family that `architectures` (if missing, `model_type`) of a config.json names; None if unknown."""
    name = architecture_of(config_json)
    by_type = {} if config_json.get("architectures") else {family.model_type: family for family in FAMILIES.values()}
    return FAMILIES.get(str(name)) or by_type.get(str(name))


def find_family(config_json: Json, path: Path) -> Family:
    """Returns the family of a config.json.  Raises EspalierError if no family supports it."""
    if (family := _known_family(config_json)) is not None:
        return family
    name, supported = architecture_of(config_json), ", ".join(FAMILIES)
    if name is None and not config_json.get("architectures") and "speculators_model_type" not in config_json:
        raise EspalierError(f"{path}: config.json has neither architectures nor model_type; download the model again")
    lowered = str(name).lower()
    if "eagle" in lowered or "assistant" in lowered or "speculators_model_type" in config_json:
        reason = "is a draft, not a target: pass it as draft= and its target as model=;"
    elif RECURRENT_NAMES.search(lowered):
        reason = "keeps recurrent state in a form that is not supported;"
    else:
        reason = "is not supported;"
    raise EspalierError(f"{path}: architecture {name!r} {reason} supported are {supported}")


def is_multimodal(config_json: Json) -> bool:
    """Whether a config.json belongs to a multimodal checkpoint whose text part is supported by a family."""
    return any(architecture_of(config_json) in family.multimodal_architectures for family in FAMILIES.values())


def text_config(config_json: Json, path: Path) -> Json:
    """Returns the config of a multimodal checkpoint's text part, in the form of a text model's config.
    Raises EspalierError if no family supports the text part."""
    name, text = architecture_of(config_json), config_json.get("text_config")
    if not isinstance(text, Mapping):
        raise EspalierError(f"{path}: {name} needs an object text_config, not {shown(text)}; download the file again")
    by_type = {family.model_type: family for family in FAMILIES.values() if name in family.multimodal_architectures}
    kind = text.get("model_type", next(iter(by_type)))
    if kind not in by_type:
        raise EspalierError(
            f"{path}: the text part of {name} is of model_type {shown(kind)}, which is not supported; supported are "
            f"{', '.join(by_type)}"
        )
    shared = {field: config_json[field] for field in SHARED_FIELDS if config_json.get(field) is not None}
    # tie_word_embeddings is a field of the multimodal config, because the lm_head is not part of the text model.
    tie_field = {field: config_json[field] for field in ("tie_word_embeddings",) if field in config_json}
    return {**shared, **text, **tie_field, "architectures": [by_type[kind].architecture], "model_type": kind}


# The names of the FP8 scales of K and V in a layer's attention.  The first pair is from compressed-tensors, the second
# from ModelOpt, the third from early FP8 checkpoints, the fourth from early compressed-tensors.
KV_SCALE_NAMES = (
    ("k_scale", "v_scale"),
    ("k_proj.k_scale", "v_proj.v_scale"),
    ("kv_scale", "kv_scale"),
    ("k_proj.output_scale", "v_proj.output_scale"),
)


def load_kv_scales(weights: Weights, prefix: str, cache_spec: CacheSpec) -> KVScales | None:
    """Loads the FP8 scales of K and V of the attention under `prefix`.  Returns None if the checkpoint has no scales.
    The result has one scale for each head of this rank.  cache_spec: what the layer stores on all ranks together.
    Raises EspalierError if only K or only V has a scale, and for a wrong shape."""
    heads = as_rank_part(1) if isinstance(cache_spec, LatentKV) else weights.shards.kv_heads_part(cache_spec.kv_heads)
    for names in KV_SCALE_NAMES:
        if any(f"{prefix}{name}" in weights for name in names):
            k, v = (_load_scale_by_head(weights, f"{prefix}{name}", cache_spec.kv_heads)[heads.slice] for name in names)
            # A latent row serves as K and as V and is stored once, with K's scale.
            return KVScales(k, k if isinstance(cache_spec, LatentKV) else v, weights.dtype)
    return None


def _load_scale_by_head(weights: Weights, name: str, kv_heads: int) -> Tensor:
    """Returns [kv_heads] float32 from the tensor `name`, which stores one scale for each head or for all."""
    shape = weights.shape(name) if name in weights else (1,)
    size = kv_heads if prod(shape) == kv_heads else 1
    # In compressed-tensors, scales by head have the shape [kv_heads, 1, 1].
    expected_shape = shape if prod(shape) == kv_heads else (size,)
    scale = weights.load_exact(name, *expected_shape).to(torch.float32)
    return scale.reshape(size).expand(kv_heads).contiguous()


log = logging.getLogger(__name__)


def read_config(path: Path | str, overrides: Mapping[str, Any] | None = None, model_impl: str = "auto") -> ModelConfig:
    """Reads config.json in a target's directory, and the eos ids in its generation_config.json.
    model_impl: the code that runs the model.  "native": Espalier's own layers; "transformers": the model class of
    transformers; "auto": Espalier's layers if they support the architecture, else transformers.
    Raises EspalierError for an unknown architecture or override, a weight format that is not supported, and any other
    field that changes the computation in a way that is not supported."""
    path = Path(path)
    config_json = read_raw_config(path)
    file = path / "generation_config.json"
    with add_path_to_errors(path):
        generation_config = read_json(file) if file.exists() else None
        if _runs_by_transformers(config_json, model_impl):
            return read_by_transformers(config_json, path, overrides, generation_config)
        has_other_parts = is_multimodal(config_json)
        text = text_config(config_json, path) if has_other_parts else config_json
        family = find_family({**text, **(overrides or {})}, path)
        config = parse_config(text, family, path, overrides, generation_config)
        return (
            replace(config, multimodal_architecture=architecture_of(config_json), stored_names=TEXT_PART_NAMES)
            if has_other_parts
            else config
        )


def _runs_by_transformers(config_json: Json, model_impl: str) -> bool:
    """Whether transformers runs the model.  model_impl: "native", "transformers" or "auto" (see read_config)."""
    if model_impl != "auto":
        return model_impl == "transformers"
    return not (_known_family(config_json) or is_multimodal(config_json)) and causal_class_name(config_json) is not None


def read_raw_config(path: Path) -> dict[str, Any]:
    """Returns the config.json of a target or a draft.  ModelOpt's separate quantisation file is merged into the result.
    For a GGUF file, returns an equivalent config.json (gguf_config.py)."""
    if is_gguf(path):
        return gguf_config(path)
    config_json = read_json(path / "config.json")
    if any(config_json.get(name) is not None for name in QUANTISATION_FIELDS):
        return config_json
    return {**config_json, **read_hf_quant_config(path)}


def load_target(
    path: Path | str,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    position_rows: int,
    captured_layers: tuple[int, ...] = (),
    overrides: Mapping[str, Any] | None = None,
    max_context: int | None = None,
    model_impl: str = "auto",
    shards: Shards = SINGLE_RANK,
) -> CausalLM:
    """Loads a target, or one rank's part of a target.  overrides, model_impl: see read_config.
    position_rows: the number of rows of the rotary tables, which hold positions 0 .. position_rows-1.
    max_context: the number of tokens of the longest text; by default position_rows.
    captured_layers: the layers whose inputs every pass returns; the index num_layers means the final norm's input."""
    config = read_config(path, overrides, model_impl)
    missing = [layer for layer in captured_layers if not 0 <= layer <= config.num_layers]
    if missing:
        raise EspalierError(
            f"layer {missing[0]} cannot be captured from {path}, which has {config.num_layers} layers; use the target "
            "that the draft was trained for"
        )
    require_shards(config, shards.count)
    if config.probe_result is not None:
        return load_by_transformers(config, dtype, torch.device(device), tuple(captured_layers))
    weights = Weights(Path(path), dtype, device, config.formats, stored_names=config.stored_names, shards=shards)
    if config.multimodal_architecture is not None:
        other_parts = ", ".join(sorted(weights.other_parts)) or "none"
        log.info(
            "%s: only the text part of %s is loaded (other parts: %s)",
            path,
            config.multimodal_architecture,
            other_parts,
        )
    for prefix, description in config.family.ignored_weights.items():
        if weights.has_prefix(prefix):
            log.info("%s holds %s (%s*), which are not loaded", path, description, prefix)
    return make_target(weights, config, captured_layers, position_rows, max_context)


def make_target(
    weights: Weights,
    config: ModelConfig,
    captured_layers: tuple[int, ...],
    position_rows: int,
    max_context: int | None = None,
) -> Decoder:
    """Builds the target from its weights.  The arguments are those of load_target.
    Raises EspalierError for a weight that is missing, misshapen or not used."""
    layer_specs = layer_specs_of(config)
    scale = float(torch.tensor(config.embedding_scale, dtype=weights.dtype))
    embed = (config.family.load_embedding or load_embedding)(weights, config, scale)
    sizes = position_rows, weights.dtype, weights.device, max_context
    tables = {rope: RopeTables(rope, *sizes) for rope in dict.fromkeys(config.layer_ropes)}
    _log_longrope(config, max_context or position_rows)
    load = config.family.load_layer or load_layer
    layers = [load(weights, config, f"model.layers.{i}.", i, tables[rope]) for i, rope in enumerate(config.layer_ropes)]
    layers_without_state = layers_with_rows(layer_specs, range(len(layer_specs)))
    kv_layers = [i for i in layers_without_state if layer_specs[i].shares_with is None]
    kv_scales = tuple(
        load_kv_scales(weights, f"model.layers.{i}.self_attn.", spec.cache_spec) if i in kv_layers else None
        for i, spec in enumerate(layer_specs)
    )
    norm = weights.norm(config.family.final_norm, config.hidden_size, config.rms_norm_eps, config.family.norm_offset)
    head = _load_head(weights, config, embed)
    weights.allow_unused_prefixes(unread_prefixes(config))
    weights.require_all_used()
    rank_specs = specs_of_rank(layer_specs, weights.shards)
    return Decoder(
        config, rank_specs, tuple(captured_layers), tables[config.layer_ropes[0]], embed, layers, norm, head, kv_scales
    )


def _log_longrope(config: ModelConfig, context: int) -> None:
    """Logs which LongRoPE frequencies the model uses; they affect its output.  context: tokens of the longest text."""
    for original in {rope.original_max_position for rope in config.layer_ropes if rope.type == "longrope"}:
        used, other_limit = ("long", "at most") if context > original else ("short", "more than")
        log.info(
            "%s: LongRoPE's %s frequencies, because max_context is %d; with a max_context of %s %d, the others",
            *(config.path, used, context, other_limit, original),
        )


def unread_prefixes(config: ModelConfig) -> tuple[str, ...]:
    """Returns the name prefixes of stored weights that the target does not use: the weights of its MTP layers, which
    mtp.py loads as a draft, and the weights that the family ignores."""
    count = int(config.raw.get("num_nextn_predict_layers") or 0)
    mtp, layers = config.family.mtp, range(count)
    return *config.family.ignored_weights, *(
        () if mtp is None else (mtp.weights_prefix(i, config.num_layers) for i in layers)
    )


def _load_head(weights: Weights, config: ModelConfig, embed: Embedding) -> Linear:
    """Loads the lm_head.  A tied head is the embedding's tensor.  If the checkpoint also stores the tied head, both
    tensors must have the same values."""
    if not config.tie_word_embeddings:
        return load_head(weights, "lm_head", config.vocab_size, config.hidden_size)
    part, name = weights.shards.vocab_part(config.vocab_size), "lm_head.weight"
    if name in weights and not torch.equal(weights.load_parts(name, embed.shape, 0, [part]), embed.weight):
        raise EspalierError(
            f"{weights.path}: tie_word_embeddings is true but {name!r} differs from the embedding; "
            'pass model_overrides={"tie_word_embeddings": False} to use it'
        )
    return tied_head(embed, weights.shards)
