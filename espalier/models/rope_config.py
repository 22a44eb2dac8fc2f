"""Reads the RoPE fields of a config.json.  Types and parameters that are not supported are refused by name."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from espalier.errors import EspalierError
from espalier.model_files import MAX_NUMBER
from espalier.models.layers.rope import RopeConfig

Raw = dict[str, Any]

TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
RAMP = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "truncate")
POSITIVE = (
    *("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    *("beta_fast", "beta_slow"),
)
NOT_NUMBERS = ("rope_type", "truncate", "finetuned")
FIELDS = (
    *RAMP,
    "rope_type",
    "rope_theta",
    "original_max_position_embeddings",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "partial_rotary_factor",
    "finetuned",
)


SPELLINGS = ("rope_parameters", "rope_scaling")


def with_rope_type(fields: Mapping[str, Any]) -> Raw:
    """Fields of a config.json in which every RoPE calls its type "rope_type".  The old name is "type"."""
    named = dict(fields)
    for field in SPELLINGS:
        rope = fields.get(field)
        if isinstance(rope, Mapping) and "type" in rope:
            rest = {name: value for name, value in rope.items() if name != "type"}
            named[field] = {"rope_type": rope["type"], **rest}
    return named


def rope_overrides(raw: Raw, overrides: Mapping[str, Any]) -> Raw:
    """The overrides, in which RoPE's parameters stand in the field that config.json has: one of SPELLINGS.

    Raises EspalierError for an override that would change nothing.
    """
    moved = with_rope_type(overrides)
    for field, other in (SPELLINGS, SPELLINGS[::-1]):
        if field not in moved or not raw.get(other) or raw.get(field):
            continue
        rope = moved.pop(field)
        if rope is None:
            raise EspalierError(
                f"model_overrides: {field} = None does not change {other}, which this model's config has; override "
                f"{other} with the rope_type that you want, for example 'default'"
            )
        moved[other] = {**rope, **(moved.get(other) or {})} if isinstance(rope, Mapping) else rope
    return moved


def read_rope(full: Raw, rotated: int, longest: int, path: Path) -> tuple[RopeConfig, int]:
    """The RoPE configuration, and the longest context that it was made for.

    rotated: values of a head that are rotated.  longest: max_position_embeddings.  Two formats are read: rope_theta
    with rope_scaling, and rope_parameters of transformers 5, which holds all values.  Raises EspalierError for a type
    or parameter that is not supported.
    """
    new, old = (with_rope_type(full).get(field) or {} for field in SPELLINGS)
    for name in new:
        # Users add rope_scaling to a config whose rope_parameters have no scaling.
        if old.get(name, new[name]) != new[name] and (name, new[name]) != ("rope_type", "default"):
            raise EspalierError(
                f"{path}: {name} is {new[name]!r} in rope_parameters and {old[name]!r} in rope_scaling; remove one of "
                "the two fields"
            )
    parameters: Raw = {**new, **old}
    kind = parameters.get("rope_type") or "default"
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise EspalierError(
            f"{path}: rope_parameters differ by layer type; only one set for all layers is supported; use another model"
        )
    unknown = [name for name in parameters if name not in FIELDS]
    if kind not in TYPES or unknown:
        what = f"rope type {kind!r}" if kind not in TYPES else f"rope parameter {unknown[0]!r}"
        raise EspalierError(f"{path}: {what} is not supported; supported types are {', '.join(TYPES)}")
    for name, value in parameters.items():
        is_number = (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and abs(value) <= MAX_NUMBER
            and (name not in POSITIVE or value > 0)
        )
        if name not in NOT_NUMBERS and value is not None and not is_number:
            words = "a positive number" if name in POSITIVE else "a number"
            raise EspalierError(f"{path}: rope parameter {name} = {value!r}; {words} is needed; correct it")
    theta = parameters.get("rope_theta") or full.get("rope_theta") or 10000.0
    if theta <= 1:
        raise EspalierError(f"{path}: rope_theta = {theta!r}; a number above 1 is needed; correct it")
    original = int(parameters.get("original_max_position_embeddings") or longest)
    scaled = kind != "default"
    if not scaled and parameters.get("factor") not in (None, 1):
        raise EspalierError(
            f"{path}: rope parameter factor = {parameters['factor']!r} has no effect with rope_type 'default'; set the "
            "rope_type that the model was trained with, or remove factor"
        )
    if scaled and not isinstance(parameters.get("factor"), int | float):
        raise EspalierError(f"{path}: rope type {kind!r} needs a number 'factor', not {parameters.get('factor')!r}")
    for name in ("low_freq_factor", "high_freq_factor") if kind == "llama3" else ():
        if not isinstance(parameters.get(name), int | float):
            raise EspalierError(f"{path}: rope type 'llama3' needs a number {name!r}, not {parameters.get(name)!r}")
    rope = RopeConfig(
        dim=rotated,
        theta=float(theta),
        type=kind,
        original_max_position=original,
        attention_factor=_yarn_attention_factor(parameters) if kind == "yarn" else 1.0,
        latent_mscale=_yarn_mscale(parameters["factor"], parameters.get("mscale_all_dim") or 0) if scaled else 1.0,
        **{name: parameters[name] for name in RAMP if parameters.get(name) is not None},
    )
    extended = int(original * rope.factor) if kind == "yarn" else longest
    return rope, max(longest, extended)


def _yarn_attention_factor(parameters: Raw) -> float:
    """The factor of cos and sin: attention_factor if it is set, else by YaRN's formula."""
    attention_factor = parameters.get("attention_factor")
    if attention_factor is not None:
        return float(attention_factor)
    factor = float(parameters["factor"])
    mscale, mscale_all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all_dim)
    return _yarn_mscale(factor, 1.0)


def _yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's 0.1·mscale·ln(factor) + 1."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
