"""Finds the family of a config.json among those that there are, and says why there is none."""

import re
from collections.abc import Mapping
from pathlib import Path

from espalier.errors import EspalierError
from espalier.models.config import Family, Raw, architecture_of

RECURRENT = re.compile("mamba|rwkv|jamba|bamba|recurrent|zamba|retnet|deltanet|lfm|qwen3next|hybrid")


def has_family(raw: Raw, families: Mapping[str, Family]) -> bool:
    """Whether a config.json is of one of the families."""
    return _family_of(raw, families) is not None


def _family_of(raw: Raw, families: Mapping[str, Family]) -> Family | None:
    """The family of a config.json, by `architectures`, or by `model_type` without it."""
    name = architecture_of(raw)
    by_type = {} if raw.get("architectures") else {family.model_type: family for family in families.values()}
    return families.get(str(name)) or by_type.get(str(name))


def find_family(raw: Raw, families: Mapping[str, Family], path: Path) -> Family:
    """The family of a config.json.  Raises EspalierError if there is none."""
    if (family := _family_of(raw, families)) is not None:
        return family
    name, supported = architecture_of(raw), ", ".join(families)
    if name is None and not raw.get("architectures") and "speculators_model_type" not in raw:
        raise EspalierError(f"{path}: config.json has neither architectures nor model_type; download the model again")
    lowered = str(name).lower()
    if "eagle" in lowered or "assistant" in lowered or "speculators_model_type" in raw:
        reason = "is a draft, not a target: pass it as draft= and its target as model=;"
    elif RECURRENT.search(lowered):
        reason = "keeps recurrent state, which is not supported;"
    else:
        reason = "is not supported;"
    raise EspalierError(f"{path}: architecture {name!r} {reason} supported are {supported}")
