"""Reads a config.json for which transformers has a class, and finds out what that class does.

What cannot run is refused here, before weights are read.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from espalier.errors import EspalierError
from espalier.model_files import MAX_LAYERS
from espalier.models.config import INERT, Family, ModelConfig, Raw, architecture_of, parse, with_overrides
from espalier.models.from_transformers.probe import Probed, probe
from espalier.models.from_transformers.refusal import refusing
from espalier.models.weight_formats import QUANTISATION_FIELDS

# Kinds of RoPE whose frequencies change behind a length, and the field that says which.
CHANGING_ROPES = {"longrope": "original_max_position_embeddings", "dynamic": "max_position_embeddings"}


def is_known(raw: Raw) -> bool:
    """Whether a config.json is of a causal class of transformers.  Code that comes with a checkpoint does not count."""
    name = causal_class(raw)
    return name is not None and raw.get("architectures") in (None, [], [name])


def causal_class(raw: Raw) -> str | None:
    """The name of transformers' causal class for the model_type of a config.json."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = raw.get("model_type")
    return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind) if isinstance(kind, str) else None


def read_by_transformers(
    raw: Raw, path: Path, overrides: Mapping[str, Any] | None = None, generation: Raw | None = None
) -> ModelConfig:
    """The config of a model that a class of transformers runs.  Raises EspalierError, with the reason, if none can."""
    name = causal_class(raw)
    if name is None:
        raise EspalierError(
            f"{path}: transformers has no causal model of model_type {raw.get('model_type')!r}; update "
            "transformers, or use another model"
        )
    if not is_known(raw):
        raise EspalierError(
            f"{path}: architecture {architecture_of(raw)!r} is not the causal model of its model_type, which is "
            f"{name}; use a text generation model that transformers has"
        )
    full = with_overrides(raw, overrides or {}, {*raw, *_fields(raw["model_type"]), *INERT, *QUANTISATION_FIELDS})
    left_out = (*QUANTISATION_FIELDS, "auto_map", "architectures", "torch_dtype", "dtype", "transformers_version")
    fields = {name: value for name, value in full.items() if name not in left_out and not name.startswith("_")}
    if any(full.get(name) is not None for name in QUANTISATION_FIELDS):
        raise EspalierError(
            f"{path}: {name} runs by transformers, for which quantised weights are not supported; use "
            "an unquantised copy of the model (bfloat16)"
        )
    try:
        probed = _probed(raw["model_type"], json.dumps(fields, sort_keys=True))
    except EspalierError as error:
        raise EspalierError(f"{path}: {name} cannot run by transformers: {error}; use another model") from None
    return _config(probed, full, path, overrides, generation)


def _fields(model_type: str) -> set[str]:
    """The fields that a config class knows."""
    from transformers import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[model_type]
    return {*config_class().to_dict(), *config_class.attribute_map}


@lru_cache(maxsize=16)
def _probed(model_type: str, fields: str) -> Probed:
    """Of a config.json's fields, as JSON.  Raises EspalierError with the reason alone."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    config_class = CONFIG_MAPPING[model_type]
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    if getattr(model_class, "_is_stateful", False):
        raise EspalierError("it keeps recurrent state")
    with refusing("its config is refused"):
        config = config_class.from_dict({**json.loads(fields), "output_router_logits": False})
    if getattr(config, "is_encoder_decoder", False):
        raise EspalierError("it is half of an encoder-decoder")
    if not hasattr(config, "num_hidden_layers"):
        raise EspalierError("its config describes several models (text and images or sound), not one of text")
    if not 1 <= config.num_hidden_layers <= MAX_LAYERS:
        raise EspalierError(f"it has {config.num_hidden_layers} layers; 1 to {MAX_LAYERS} are supported")
    return probe(model_class, config)


def _config(
    probed: Probed, full: Raw, path: Path, overrides: Mapping[str, Any] | None, generation: Raw | None
) -> ModelConfig:
    """As `parse` makes it of a plain model with these sizes: what only our own layers read is neutral."""
    hf, first = probed.config, probed.specs[0]
    windows = tuple(spec.window for spec in probed.specs)
    plain = {
        "vocab_size": probed.vocab_size,
        "hidden_size": hf.hidden_size,
        "intermediate_size": 4 * hf.hidden_size,
        "num_hidden_layers": len(probed.specs),
        "num_attention_heads": first.heads,
        "num_key_value_heads": first.rows.kv_heads,
        "head_dim": first.rows.k_size,
        "max_position_embeddings": _longest(hf, path),
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "tie_word_embeddings": bool(getattr(hf, "tie_word_embeddings", False)),
        "eos_token_id": full.get("eos_token_id"),
    }
    family = Family(
        architecture=probed.model_class.__name__,
        model_type=full["model_type"],
        defaults={},
        windows=lambda full: windows,
        layer_specs=lambda config: probed.specs,
    )
    eos = {name: value for name, value in (overrides or {}).items() if name == "eos_token_id"}
    return replace(parse(plain, family, path, eos, generation), raw=full, probed=probed)


def _longest(hf: Any, path: Path) -> int:
    """The most positions.  Behind them a learned embedding ends, or a RoPE changes."""
    longest = getattr(hf, "max_position_embeddings", None)
    if not isinstance(longest, int) or longest < 2:
        raise EspalierError(
            f"{path}: max_position_embeddings = {longest!r}; an integer of at least 2 is needed; correct the config"
        )
    ropes = getattr(hf, "rope_parameters", None) or {}
    sets = [each for each in ropes.values() if isinstance(each, Mapping)] or [ropes]
    limits = (each.get(CHANGING_ROPES.get(str(each.get("rope_type")), "")) for each in sets)
    return min([longest, *(int(limit) for limit in limits if limit)])
