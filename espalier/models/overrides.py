"""Replaces fields of a config.json by those of model_overrides."""

import difflib
from collections.abc import Mapping
from typing import Any

from espalier.errors import EspalierError
from espalier.models.rope import SPELLINGS, rope_overrides, with_rope_type

Raw = dict[str, Any]

# Fields that choose the family, before anything is overridden.
OF_FAMILY = ("architectures", "model_type")


def with_overrides(raw: Raw, overrides: Mapping[str, Any], known: set[str]) -> Raw:
    """raw with fields replaced, nested objects merged key by key.  Raises EspalierError for a name not in `known`."""
    merged, overrides = with_rope_type(raw), rope_overrides(raw, overrides)
    for name, value in overrides.items():
        if name in OF_FAMILY and value != raw.get(name):
            raise EspalierError(
                f"model_overrides: {name} says which family the model is of, and cannot be replaced; edit config.json"
            )
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known), n=1)
            remedy = f"did you mean {near[0]!r}?" if near else "see config.json, or leave it out"
            raise EspalierError(f"model_overrides: no field {name!r} in this model's config; {remedy}")
        old = merged.get(name)
        merged[name] = {**old, **value} if isinstance(old, dict) and isinstance(value, Mapping) else value
    for name in SPELLINGS:
        if "rope_theta" in overrides and "rope_theta" in (merged.get(name) or {}):
            merged[name] = {**merged[name], "rope_theta": overrides["rope_theta"]}
    return merged
