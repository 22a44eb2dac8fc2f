"""The text part of a multimodal checkpoint: which family it is of, its config, and the names of its weights.

Such a checkpoint (`...ForConditionalGeneration`) has the config of its text part in `text_config`.  The weights of its
other parts (vision, audio) are not read.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

from espalier.errors import EspalierError, shown
from espalier.models.config import Family, Raw, architecture_of
from espalier.models.weight_formats import FormatOf, WeightFormat

# Prefixes of the text part's names, and what a checkpoint of the text part alone has in their place.  The first two are
# in published checkpoints, the third is how transformers 5 calls them in memory.
PREFIXES = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("lm_head.", "lm_head."),
    # MTP layers.
    ("mtp.", "mtp."),
)
# Fields of the whole that hold for its text part where `text_config` does not have them.
SHARED = ("dtype", "torch_dtype", "eos_token_id", "bos_token_id", "quantization_config", "compression_config")


def is_multimodal(raw: Raw, families: Iterable[Family]) -> bool:
    """Whether a config.json is of a multimodal checkpoint whose text part one of the families may be."""
    return any(architecture_of(raw) in family.multimodal for family in families)


def text_config(raw: Raw, families: Iterable[Family], path: Path) -> Raw:
    """The config of the text part of a multimodal checkpoint, as that of a checkpoint of its own.

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


def name_in_text(stored: str) -> str | None:
    """What a checkpoint of the text part alone calls a weight; None for a weight of another part."""
    return next((own + stored.removeprefix(prefix) for prefix, own in PREFIXES if stored.startswith(prefix)), None)


def names_as_stored(formats: FormatOf, stored: Iterable[str]) -> FormatOf:
    """`formats`, asked with the names of a text part's own checkpoint.  stored: the names of all stored weights."""
    prefixes = {own: prefix for prefix, own in PREFIXES if any(name.startswith(prefix) for name in stored)}

    def of(name: str) -> WeightFormat:
        own = next((own for own in prefixes if f"{name}.".startswith(own)), "")
        return formats((prefixes.get(own, "") + f"{name}.".removeprefix(own)).removesuffix("."))

    return of
