"""Reads a config.json for which transformers has a class, probes that class, and loads the model.

A model that cannot run is refused before weights are read.  Transformers' own loader reads the weights.  Code that
comes with a checkpoint never runs.
"""

import copy
import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from espalier.errors import EspalierError
from espalier.model_files import MAX_LAYERS
from espalier.models.config import IGNORED_FIELDS, Family, Json, ModelConfig, architecture_of, parse_config
from espalier.models.config_values import with_overrides
from espalier.models.from_transformers.probe import ProbeResult, probe
from espalier.models.from_transformers.shrink import refusal_reason
from espalier.models.from_transformers.target import ATTENTION_NAME, TransformersTarget
from espalier.models.weight_files import count_weights_in
from espalier.models.weight_formats import QUANTISATION_FIELDS
from espalier.models.weights import IGNORABLE_NAMES, Weights

log = logging.getLogger(__name__)


def load_by_transformers(
    path: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device | str, captured_layers: tuple[int, ...]
) -> TransformersTarget:
    """Load a target whose config is `probe_result`.

    Raises EspalierError for files that are missing or cut short, weights that are missing, misshapen or not used, and
    layers that cannot be captured.
    """
    probed = config.probe_result
    assert probed is not None
    if captured_layers and not probed.can_capture:
        raise EspalierError(
            f"{path}: the layers of {config.architecture} do not pass on one row for each token, so the draft cannot "
            "read them; use speculation algorithm 'ngram'"
        )
    Weights(path, dtype, "cpu")  # for its errors, which name file and remedy
    stored = count_weights_in(path, config.formats).num_cast_values
    # from_pretrained allocates memory for missing weights before it reports them.
    if probed.num_weights > 2 * stored:
        raise EspalierError(
            f"{path}: config.json describes {probed.num_weights} weights, and the files hold {stored}; they do not "
            "belong together: download both again"
        )
    return build_by_transformers(config, dtype, torch.device(device), captured_layers)


def build_by_transformers(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    captured_layers: tuple[int, ...],
    state: Mapping[str, Tensor] | None = None,
) -> TransformersTarget:
    """Returns the target that the config's class of transformers runs.
    state: the weights by name; None: from_pretrained reads them from the config's directory."""
    from transformers.utils import logging as bars

    probed = config.probe_result
    assert probed is not None
    # "eager" loops over experts and reads their rows on the host.  A captured pass cannot do that, so only a CPU does.
    options: dict[str, Any] = {"experts_implementation": "eager"} if device.type == "cpu" else {}
    # If accelerate is not installed, a model is loaded into host memory first and then moved to the GPU.
    options |= {"device_map": {"": device}} if device.type != "cpu" and find_spec("accelerate") else {}
    shows_progress = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        with refusal_reason(f"{config.path}: transformers cannot load the model; download the checkpoint again"):
            model, found = probed.model_class.from_pretrained(
                None if state else config.path,
                config=copy.deepcopy(probed.config),
                state_dict=state,
                dtype=dtype,
                attn_implementation=ATTENTION_NAME,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
                trust_remote_code=False,
                **options,
            )
    finally:
        if shows_progress:
            bars.enable_progress_bar()
    _require_all(found, config)
    log.info("%s runs by transformers; replaced by ours: %s", config.architecture, probed.replaced)
    return TransformersTarget(config, model.to(device).eval().requires_grad_(False), captured_layers)


def _require_all(found: Mapping[str, Any], config: ModelConfig) -> None:
    """Check that no weight is missing or unused, by from_pretrained's report `found`.  Raises EspalierError."""
    unused = [name for name in found["unexpected_keys"] if not IGNORABLE_NAMES.search(name)]
    for names, what in ((found["missing_keys"], "is missing from it"), (unused, "belongs to no parameter")):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise EspalierError(
                f"{config.path}: weight {min(names)!r}{more} {what} of {config.architecture}; config.json and weights "
                "do not belong together: download both again"
            )


def causal_class(raw: Json) -> str | None:
    """The name of transformers' causal class for a config.json; None if its architecture is another.
    Classes that come with a checkpoint do not count."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = raw.get("model_type")
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind) if isinstance(kind, str) else None
    return name if raw.get("architectures") in (None, [], [name]) else None


def read_by_transformers(
    raw: Json, path: Path, overrides: Mapping[str, Any] | None = None, generation: Json | None = None
) -> ModelConfig:
    """Returns the config of a model that a class of transformers runs.
    Raises EspalierError, with the reason, if no class can run it."""
    from transformers import CONFIG_MAPPING

    name = causal_class(raw)
    if name is None:
        raise EspalierError(
            f"{path}: {architecture_of(raw)!r} is not transformers' causal model of model_type "
            f"{raw.get('model_type')!r}; update transformers, or use a text generation model that it has"
        )
    config_class = CONFIG_MAPPING[raw["model_type"]]
    known_fields = {*config_class().to_dict(), *config_class.attribute_map, *raw, *IGNORED_FIELDS, *QUANTISATION_FIELDS}
    full = with_overrides(raw, overrides or {}, known_fields)
    # Fields that begin with "_" may name code.
    fields = {name: value for name, value in full.items() if not name.startswith("_")}
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


@lru_cache(maxsize=16)
def _probed(model_type: str, fields: str) -> ProbeResult:
    """Probes the class for a config.  fields: the config.json as JSON.  Raises EspalierError with the reason alone."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    config_class = CONFIG_MAPPING[model_type]
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    if getattr(model_class, "_is_stateful", False):
        raise EspalierError("it keeps recurrent state")
    with refusal_reason("its config is refused"):
        config = config_class.from_dict({**json.loads(fields), "output_router_logits": False})
    if getattr(config, "is_encoder_decoder", False):
        raise EspalierError("it is half of an encoder-decoder")
    if not hasattr(config, "num_hidden_layers"):
        raise EspalierError("its config describes several models (text and images or sound), not one of text")
    if not 1 <= config.num_hidden_layers <= MAX_LAYERS:
        raise EspalierError(f"it has {config.num_hidden_layers} layers; 1 to {MAX_LAYERS} are supported")
    return probe(model_class, config)


def _config(
    probed: ProbeResult, full: Json, path: Path, overrides: Mapping[str, Any] | None, generation: Json | None
) -> ModelConfig:
    """Returns the ModelConfig that `parse_config` would return for a plain model with these sizes.
    Fields that only Espalier's own layers read have neutral values."""
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
        "max_position_embeddings": _longest(hf),
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
    return replace(parse_config(plain, family, path, eos, generation), raw=full, probe_result=probed)


def _longest(hf: Any) -> Any:
    """Returns the number of positions up to which a learned embedding reaches, or LongRoPE's frequencies stay."""
    ropes = getattr(hf, "rope_parameters", None) or {}
    sets = [each for each in ropes.values() if isinstance(each, Mapping)] or [ropes]
    limits = [each["original_max_position_embeddings"] for each in sets if each.get("rope_type") == "longrope"]
    return min([getattr(hf, "max_position_embeddings", None), *limits])
