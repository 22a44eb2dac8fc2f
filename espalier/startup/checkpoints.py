"""Finds a model's files: bundled with the package, in a directory, in a GGUF file, or on the Hugging Face hub."""

import logging
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from espalier.errors import EspalierError, one_line
from espalier.gguf_file import gguf_in, is_gguf
from espalier.model_files import read_json, require_files, require_regular
from espalier.models.config import ModelConfig
from espalier.request import CHECKS, GENERATION_CONFIG_NAMES

BUNDLED = "bundled"
BUNDLED_FILES = Path(__file__).parents[1] / BUNDLED
# The bundled model's drafts by algorithm; where none is set, eagle3's is used.
BUNDLED_DRAFTS = {"eagle3": BUNDLED_FILES / "draft", "mtp": BUNDLED_FILES / "mtp", "block": BUNDLED_FILES / "block"}
FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
# A draft is refused if it has the last of these files (espalier/models/block_config.py:MASK_EMBEDDING).
FILES_OF_DRAFT = [*FILES, "pytorch_model*.bin", "mask_embedding.pt"]
# Folders, and the copy of all weights under the publisher's own names that Mistral's repositories have.
NOT_DOWNLOADED = ["*/*", "consolidated*.safetensors"]
# Fields of generation_config.json that transformers honours and Espalier does not, with the values that change nothing.
NOT_HONOURED: Mapping[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "no_repeat_ngram_size": (None, 0),
    "bad_words_ids": (None, []),
    "suppress_tokens": (None, []),
    "begin_suppress_tokens": (None, []),
    "sequence_bias": (None,),
    "typical_p": (None, 1, 1.0),
    "epsilon_cutoff": (None, 0, 0.0),
    "eta_cutoff": (None, 0, 0.0),
    "penalty_alpha": (None, 0),
    "guidance_scale": (None, 1, 1.0),
    "exponential_decay_length_penalty": (None,),
    "encoder_repetition_penalty": (None, 1, 1.0),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "min_length": (None, 0),
    "renormalize_logits": (None, False),
    "stop_strings": (None, []),
    "token_healing": (None, False),
    "top_h": (None,),
    "watermarking_config": (None,),
}
log = logging.getLogger("espalier")


def find_target(name: str | PathLike[str], what: str = "model") -> Path:
    """The directory of a target, or its GGUF file.  what: the setting that names it.  Raises EspalierError."""
    return _find(what, name, BUNDLED_FILES / "target", FILES)


def find_draft(name: str | PathLike[str], algorithm: str = "auto", what: str = "draft") -> Path:
    """The directory of a draft.  Raises EspalierError.

    algorithm: the one that the user sets, which chooses among the bundled drafts; what: the setting that names it.
    """
    bundled = BUNDLED_DRAFTS.get(algorithm, BUNDLED_DRAFTS["eagle3"])
    return _find(what, name, bundled, FILES_OF_DRAFT)


def require_names(named: Mapping[str, str | PathLike[str]]) -> None:
    """Refuse a path that find_target or find_draft would refuse, before PyTorch is imported.  named: by setting.

    Nothing is downloaded: what may be a Hugging Face id passes.
    """
    for what, name in named.items():
        if str(name) != BUNDLED:
            _local(what, name)


def _find(what: str, name: str | PathLike[str], bundled: Path, files: list[str]) -> Path:
    if str(name) == BUNDLED:
        if not (bundled / "config.json").exists():
            raise EspalierError(
                f"{what}='bundled' is not in this installation ({bundled} is missing); install espalier again"
            )
        return bundled
    return _local(what, name) or _download(what, str(name), files)


def _local(what: str, name: str | PathLike[str]) -> Path | None:
    """The directory or GGUF file; None if there is none and the name may be a hub id.  Raises EspalierError."""
    path = Path(name).expanduser()
    if (gguf := _gguf(what, path)) is not None:
        return gguf
    if _is_directory(what, path):
        return path
    if not _may_be_hub_id(str(name)):
        raise EspalierError(
            f"{what}={str(name)!r} is not a directory; use one with config.json and *.safetensors, a GGUF file, a "
            "Hugging Face id or 'bundled'"
        )
    return None


def _gguf(what: str, path: Path) -> Path | None:
    """The GGUF file that `path` is or, as the only weights in a directory, holds.  Raises EspalierError."""
    try:
        if path.is_dir() and _holds_gguf(path):
            path = gguf_in(path)
        if not is_gguf(path):
            return None
        if what.endswith("draft"):
            raise EspalierError(
                f"{what}={str(path)!r} is in the GGUF format, in which drafts are not read; give the directory that "
                "holds a draft's config.json and weights"
            )
        require_regular(path)
        if not path.exists():
            raise EspalierError(f"{what}={str(path)!r} does not exist; give the path of a GGUF file")
        return path
    except OSError as error:
        raise _unreadable(what, path, error) from None


def _is_directory(what: str, path: Path) -> bool:
    """Whether `path` is a directory.  Raises EspalierError for a file, or a directory that is no checkpoint."""
    files = "a draft's config.json and weights" if what.endswith("draft") else "config.json and *.safetensors"
    try:
        if path.is_file():
            raise EspalierError(f"{what}={str(path)!r} is a file; give the directory that holds {files}")
        if not path.is_dir():
            return False
        if not (path / "config.json").exists():
            raise EspalierError(f"{what}={str(path)!r} holds no config.json; give the directory that holds {files}")
        require_files(path)
    except OSError as error:
        raise _unreadable(what, path, error) from None
    return True


def _unreadable(what: str, path: Path, error: OSError) -> EspalierError:
    return EspalierError(f"{what}={str(path)!r} cannot be read ({error.strerror}); give a directory that you can read")


def _holds_gguf(path: Path) -> bool:
    """Whether the only weights in a directory are GGUF files."""
    files = list(path.iterdir())
    return any(map(is_gguf, files)) and not {file.suffix.lower() for file in files} & {".safetensors", ".bin"}


def _may_be_hub_id(name: str) -> bool:
    owner, _, repository = name.partition("/")
    return bool(owner and repository) and "/" not in repository and not name.startswith((".", "~"))


def _download(what: str, name: str, files: list[str]) -> Path:
    """The directory with the hub's files of this id.  Files in the local hub cache are not downloaded again."""
    from huggingface_hub import snapshot_download

    try:
        path = Path(snapshot_download(name, allow_patterns=files, ignore_patterns=NOT_DOWNLOADED))
    except Exception as error:  # no network, no such repository, no permission, no space: each has another class
        raise EspalierError(
            f"{what}={name!r} is not a directory, and the download from the Hugging Face hub failed "
            f"({one_line(error)}); check the name and the network, or give a directory"
        ) from None
    if not (path / "config.json").exists():
        raise EspalierError(
            f"{what}={name!r} has no config.json on the Hugging Face hub, as repositories of GGUF files have none; "
            "give the id of the model that it was made from, or download one file and give its path"
        )
    require_files(path)
    return path


def generation_config(path: Path) -> dict[str, Any]:
    """The content of the model's generation_config.json, {} without one.  Logs the fields that are not honoured.

    Raises EspalierError for a default that no request may have.
    """
    file = path / "generation_config.json"
    if not file.exists():
        return {}
    read = read_json(file)
    for theirs, ours in GENERATION_CONFIG_NAMES.items():
        if (value := read.get(theirs)) is not None:
            try:
                CHECKS[ours](theirs, value)
            except EspalierError as error:
                raise EspalierError(f"{file}: {error}; correct the file, or remove this field from it") from None
    dropped = [f"{name}={read[name]!r}" for name, neutral in NOT_HONOURED.items() if read.get(name) not in neutral]
    if dropped:
        log.warning("%s sets %s, which is not supported and ignored", file, ", ".join(dropped))
    return read


def end_tokens(path: Path, config: ModelConfig) -> tuple[int, ...]:
    """The model's end tokens.  One that is outside the vocabulary is ignored, with a warning."""
    beyond = [token for token in config.eos_token_ids if not 0 <= token < config.vocab_size]
    if beyond:
        log.warning(
            "%s: eos_token_id %s is outside the vocabulary of %d tokens and ignored; correct config.json or "
            "generation_config.json",
            path,
            ", ".join(map(str, beyond)),
            config.vocab_size,
        )
    return tuple(token for token in config.eos_token_ids if token not in beyond)
