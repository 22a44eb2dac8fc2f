"""Checks the types and ranges of single values of a config.json.  config.py checks whether values fit together."""

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from espalier.errors import EspalierError, shown
from espalier.model_files import MAX_HEAD_SIZE, MAX_LAYERS, MAX_NUMBER, MAX_SIZE
from espalier.models.rope import ROPE_FIELDS, Json, rope_overrides, rope_type_of, with_rope_type

# The largest allowed values of the sizes that decide how much memory is taken before weights are read: the number of
# layers, and the sizes of heads (the numbers of columns of the RoPE tables).
HEAD_SIZE_FIELDS = ("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
LARGEST_VALUES: Mapping[str, int] = {"num_hidden_layers": MAX_LAYERS, **dict.fromkeys(HEAD_SIZE_FIELDS, MAX_HEAD_SIZE)}
NUMBER_FIELDS = tuple(
    "attn_logit_softcapping final_logit_softcapping partial_rotary_factor rotary_pct embedding_multiplier "
    "residual_multiplier attention_multiplier logits_scaling logit_scale query_pre_attn_scalar routed_scaling_factor "
    "clip_qkv swiglu_limit swiglu_alpha llama_4_scaling_beta qk_scale_factor output_multiplier "
    "moe_router_logit_softcapping".split()
)
COUNT_FIELDS = tuple(
    "num_experts num_local_experts n_routed_experts n_shared_experts shared_expert_intermediate_size "
    "first_k_dense_replace shared_intermediate_size".split()
)


@contextmanager
def path_in_errors(path: Path) -> Iterator[None]:
    """Adds the path of a model to the beginning of an EspalierError's text."""
    try:
        yield
    except EspalierError as error:
        raise EspalierError(f"{path}: {error}") from None


def _is_non_negative(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MAX_NUMBER


def _is_positive(value: Any) -> bool:
    return _is_non_negative(value) and value > 0


def _is_count(value: Any, max_value: int = MAX_SIZE) -> bool:
    return type(value) is int and 0 <= value <= max_value


def _is_instance_of(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind)


# For each field, a function that checks a value, and the allowed values in words.  If the words end with "null", the
# value may be null.
FIELD_TYPES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "rms_norm_eps": (_is_positive, "a positive number"),
    "rope_theta": (_is_positive, "a positive number or null"),
    "original_max_position_embeddings": (
        lambda value: type(value) is int and _is_positive(value),
        "a positive number or null",
    ),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), (_is_instance_of(Mapping), "an object or null")),
    **dict.fromkeys(("layer_types", "mlp_layer_types", "mlp_only_layers"), (_is_instance_of(list), "a list or null")),
    **dict.fromkeys(NUMBER_FIELDS, (_is_non_negative, "a number of at least 0 or null")),
    **dict.fromkeys(COUNT_FIELDS, (_is_count, f"0 to {MAX_SIZE} or null")),
    "num_nextn_predict_layers": (partial(_is_count, max_value=MAX_LAYERS), f"0 to {MAX_LAYERS} or null"),
    **dict.fromkeys(("scoring_func", "topk_method", "position_embedding_type"), (_is_instance_of(str), "text or null")),
}


def require_field_types(config_fields: Json) -> None:
    """Raises EspalierError if a field of FIELD_TYPES has a value of a wrong type."""
    for name, (is_allowed, needed) in FIELD_TYPES.items():
        value = config_fields.get(name)
        if not (value is None and needed.endswith("null")) and not is_allowed(value):
            raise EspalierError(f"{name} = {shown(value)}; {needed} is needed; correct it or pass model_overrides")


def positive_number(config_fields: Json, name: str) -> float:
    """Returns the value of the field `name`.  Raises EspalierError if it is not a positive number."""
    value = config_fields.get(name)
    if not _is_positive(value):
        raise EspalierError(f"{name} = {shown(value)}; a positive number is needed; correct the config")
    return float(config_fields[name])


def require_counts(config_fields: Json, names: Iterable[str], max_value: int = MAX_SIZE) -> None:
    """Raises EspalierError if one of the fields `names` is not an integer from 1 to `max_value`."""
    for name in names:
        positive_integer(config_fields, name, max_value)


def require_multiple(config_fields: Json, name: str, divisor_name: str) -> None:
    """Raises EspalierError if the field `name` is not a multiple of the field `divisor_name`."""
    if config_fields[name] % config_fields[divisor_name]:
        raise EspalierError(
            f"{name} = {config_fields[name]} is no multiple of {divisor_name} = {config_fields[divisor_name]}; "
            "correct the config"
        )


def rotated_size(config_fields: Json, head_size: int) -> int:
    """Returns how many values at the beginning of a head are rotated.  Raises EspalierError for an invalid
    partial_rotary_factor.

    For a proportional RoPE, returns the head size, because values that are not rotated have frequency 0."""
    if rope_type_of(config_fields) == "proportional":
        return head_size
    share = config_fields.get("partial_rotary_factor")
    size = head_size if share is None else int(head_size * share) if _is_non_negative(share) else 0
    if size % 2 or not 0 < size <= head_size:
        raise EspalierError(
            f"partial_rotary_factor = {share!r} of heads of {head_size} values is not supported; the rotated "
            f"part must have an even number of values, from 2 to {head_size}; correct the config"
        )
    return size


def positive_integer(config_fields: Json, name: str, max_value: int | None = None) -> int:
    """Returns the value of the field `name`.  Raises EspalierError if it is not a positive integer."""
    value, max_value = config_fields.get(name), max_value or LARGEST_VALUES.get(name, MAX_SIZE)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= max_value:
        raise EspalierError(
            f"{name} = {shown(value)}; a positive integer is needed, {max_value} at most; correct it or pass "
            "model_overrides"
        )
    return value


def kv_heads_and_head_size(config_fields: Json, heads: int, hidden: int) -> tuple[int, int]:
    """Returns (number of key-value heads, size of a head) of layers with K and V heads.  hidden: the hidden size."""
    head_size = (
        hidden // heads if config_fields.get("head_dim") is None else positive_integer(config_fields, "head_dim")
    )
    name = "num_key_value_heads"
    kv_heads = heads if config_fields.get(name) is None else positive_integer(config_fields, name)
    if heads % kv_heads or head_size % 2 or not 0 < head_size <= MAX_HEAD_SIZE:
        raise EspalierError(
            f"{heads} heads over {kv_heads} key-value heads of size {head_size}; heads must be a multiple "
            f"of key-value heads, and the size even, 2 to {MAX_HEAD_SIZE}; correct the config or override the fields"
        )
    return kv_heads, head_size


def read_eos_token_ids(config_fields: Json, generation_config: Json) -> tuple[int, ...]:
    eos_token_ids: list[int] = []
    for source in (generation_config.get("eos_token_id"), config_fields.get("eos_token_id")):
        eos_token_ids += source if isinstance(source, list) else [] if source is None else [source]
    for token in eos_token_ids:
        if not isinstance(token, int) or isinstance(token, bool):
            raise EspalierError(f"eos_token_id = {token!r}; a token id or a list of them is needed; correct it")
    return tuple(dict.fromkeys(eos_token_ids))


# Fields that choose the family.  They cannot be overridden.
FAMILY_FIELDS = ("architectures", "model_type")


def with_overrides(config_json: Json, overrides: Mapping[str, Any], allowed_names: set[str]) -> Json:
    """Returns `config_json` with the fields in `overrides` replaced.  Nested objects are merged field by field.
    Raises EspalierError for a name that is not in `allowed_names`."""
    merged, overrides = with_rope_type(config_json), rope_overrides(config_json, overrides)
    for name, value in overrides.items():
        if name in FAMILY_FIELDS and value != config_json.get(name):
            raise EspalierError(
                f"model_overrides: {name} says which family the model is of, and cannot be replaced; edit config.json"
            )
        if name not in allowed_names:
            near = difflib.get_close_matches(name, sorted(allowed_names), n=1)
            remedy = f"did you mean {near[0]!r}?" if near else "see config.json, or leave it out"
            raise EspalierError(f"model_overrides: no field {name!r} in this model's config; {remedy}")
        old = merged.get(name)
        merged[name] = {**old, **value} if isinstance(old, dict) and isinstance(value, Mapping) else value
    for name in ROPE_FIELDS:
        if "rope_theta" in overrides and "rope_theta" in (merged.get(name) or {}):
            merged[name] = {**merged[name], "rope_theta": overrides["rope_theta"]}
    return merged
