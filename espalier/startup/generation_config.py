"""Reads a model's default sampling parameters and its end tokens."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from espalier.errors import EspalierError
from espalier.model_files import read_json
from espalier.models.config import ModelConfig
from espalier.request import GENERATION_CONFIG_NAMES, PARAM_CHECKS

# Fields of generation_config.json that transformers supports and Espalier does not.  For each field, the values that
# have no effect.
UNSUPPORTED_FIELDS: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys("num_beams typical_p guidance_scale encoder_repetition_penalty".split(), (None, 1)),
    **dict.fromkeys("no_repeat_ngram_size epsilon_cutoff eta_cutoff penalty_alpha min_length".split(), (None, 0)),
    **dict.fromkeys("bad_words_ids suppress_tokens begin_suppress_tokens stop_strings".split(), (None, [])),
    **dict.fromkeys(
        (
            "sequence_bias exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id top_h "
            "watermarking_config"
        ).split(),
        (None,),
    ),
    "renormalize_logits": (None, False),
    "token_healing": (None, False),
}
log = logging.getLogger("espalier")


def generation_config(path: Path) -> dict[str, Any]:
    """Returns the content of the model's generation_config.json; {} if there is no such file.  Logs fields that are not
    supported.

    Raises EspalierError if a field has a value that is invalid for the same parameter of a request.
    """
    file = path / "generation_config.json"
    if not file.exists():
        return {}
    config_fields = read_json(file)
    for theirs, ours in GENERATION_CONFIG_NAMES.items():
        if (value := config_fields.get(theirs)) is not None:
            try:
                PARAM_CHECKS[ours](theirs, value)
            except EspalierError as error:
                raise EspalierError(f"{file}: {error}; correct the file, or remove this field from it") from None
    ignored_fields = [
        f"{name}={config_fields[name]!r}"
        for name, neutral in UNSUPPORTED_FIELDS.items()
        if config_fields.get(name) not in neutral
    ]
    if ignored_fields:
        log.warning("%s sets %s, which is not supported and ignored", file, ", ".join(ignored_fields))
    return config_fields


def end_tokens(path: Path, config: ModelConfig) -> tuple[int, ...]:
    """Returns the model's end tokens.  An end token outside the vocabulary is ignored, with a warning."""
    outside = [token for token in config.eos_token_ids if not 0 <= token < config.vocab_size]
    if outside:
        log.warning(
            "%s: eos_token_id %s is outside the vocabulary of %d tokens and ignored; correct config.json or "
            "generation_config.json",
            path,
            ", ".join(map(str, outside)),
            config.vocab_size,
        )
    return tuple(token for token in config.eos_token_ids if token not in outside)
