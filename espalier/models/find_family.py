"""Finds the family of a config.json among those that there are, and says why there is none.

A multimodal checkpoint (`...ForConditionalGeneration`) has the config of its text part in `text_config`.  The names of
its weights are in stored_names.py.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from espalier.errors import EspalierError, shown
from espalier.models.config import Family, Raw, architecture_of

RECURRENT = re.compile("mamba|rwkv|jamba|bamba|recurrent|zamba|retnet|deltanet|lfm|qwen3next|hybrid")
# Fields of the whole that hold for its text part where `text_config` does not have them.
SHARED = ("dtype", "torch_dtype", "eos_token_id", "bos_token_id", "quantization_config", "compression_config")


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


def is_multimodal(raw: Raw, families: Iterable[Family]) -> bool:
    """Whether a config.json is of a multimodal checkpoint whose text part one of the families may be."""
    return any(architecture_of(raw) in family.multimodal for family in families)


def text_config(raw: Raw, families: Iterable[Family], path: Path) -> Raw:
    """The config of a multimodal checkpoint's text part, in the form of a text model's config.

    Raises EspalierError if the text part is of another family.
    """
    name, text = architecture_of(raw), raw.get("text_config")
    if not isinstance(text, Mapping):
        raise EspalierError(f"{path}: {name} needs an object text_config, not {shown(text)}; download the file again")
    known = {family.model_type: family for family in families if name in family.multimodal}
    kind = text.get("model_type", next(iter(known)))
    if kind not in known:
        raise EspalierError(
            f"{path}: the text part of {name} is of model_type {shown(kind)}, which is not supported; supported are "
            f"{', '.join(known)}"
        )
    shared = {field: raw[field] for field in SHARED if raw.get(field) is not None}
    # Tied or not is what the whole says: its head is no part of the text model.
    tied = {field: raw[field] for field in ("tie_word_embeddings",) if field in raw}
    return {**shared, **text, **tied, "architectures": [known[kind].architecture], "model_type": kind}
