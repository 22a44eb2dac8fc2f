"""Finds the files of a model, which is bundled, in a directory, in a GGUF file, or on the Hugging Face hub."""

from collections.abc import Mapping
from os import PathLike
from pathlib import Path

from espalier.errors import EspalierError, one_line
from espalier.model_files import find_gguf, is_gguf, require_files, require_regular

BUNDLED = "bundled"
BUNDLED_FILES = Path(__file__).parents[1] / BUNDLED
# The bundled model's drafts by algorithm.  If the user sets no algorithm, eagle3's draft is used.
BUNDLED_DRAFTS = {"eagle3": BUNDLED_FILES / "draft", "mtp": BUNDLED_FILES / "mtp", "block": BUNDLED_FILES / "block"}
FILE_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
# mask_embedding.pt is downloaded so that a draft with this file can be refused (models/block.py:MASK_EMBEDDING).
DRAFT_FILE_PATTERNS = [*FILE_PATTERNS, "pytorch_model*.bin", "mask_embedding.pt"]
# Files that are not downloaded: folders, and the second copy of all weights in Mistral's repositories.
IGNORED_FILE_PATTERNS = ["*/*", "consolidated*.safetensors"]


def find_target(name: str | PathLike[str], setting: str = "model") -> Path:
    """Returns the directory of a target, or its GGUF file.

    setting: the name of the setting that contains `name`.  Raises EspalierError if the model cannot be found or read.
    """
    return _find_checkpoint(setting, name, BUNDLED_FILES / "target", FILE_PATTERNS)


def find_draft(name: str | PathLike[str], algorithm: str = "auto", setting: str = "draft") -> Path:
    """Returns the directory of a draft.
    algorithm: the user's algorithm, which selects a bundled draft.  setting: the name of the setting that contains
    `name`.  Raises EspalierError if the draft cannot be found or read."""
    bundled = BUNDLED_DRAFTS.get(algorithm, BUNDLED_DRAFTS["eagle3"])
    return _find_checkpoint(setting, name, bundled, DRAFT_FILE_PATTERNS)


def require_names(names_by_setting: Mapping[str, str | PathLike[str]]) -> None:
    """Raises EspalierError for a path that find_target or find_draft would refuse.  Does not import PyTorch.
    names_by_setting: {setting: path or Hugging Face id}.  Nothing is downloaded, so every name that looks like an id is
    accepted."""
    for setting, name in names_by_setting.items():
        if str(name) != BUNDLED:
            _local_checkpoint(setting, name)


def _find_checkpoint(setting: str, name: str | PathLike[str], bundled_path: Path, file_patterns: list[str]) -> Path:
    """Returns a checkpoint's directory.  setting: the config field.  name: its value, a path, Hub id or 'bundled'."""
    if str(name) == BUNDLED:
        if not (bundled_path / "config.json").exists():
            raise EspalierError(
                f"{setting}='bundled' is not in this installation ({bundled_path} is missing); install espalier again"
            )
        return bundled_path
    return _local_checkpoint(setting, name) or _download(setting, str(name), file_patterns)


def _local_checkpoint(setting: str, name: str | PathLike[str]) -> Path | None:
    """Returns the directory or GGUF file `name`; None if there is no such path and `name` may be a Hugging Face id.
    setting: for errors.  Raises EspalierError if `name` cannot be an id, or if the path is not a checkpoint."""
    path = Path(name).expanduser()
    if (gguf := _gguf_file(setting, path)) is not None:
        return gguf
    if _is_directory(setting, path):
        return path
    if not _may_be_hub_id(str(name)):
        raise EspalierError(
            f"{setting}={str(name)!r} is not a directory; use one with config.json and *.safetensors, a GGUF file, a "
            "Hugging Face id or 'bundled'"
        )
    return None


def _gguf_file(setting: str, path: Path) -> Path | None:
    """Returns the GGUF file `path`, or the GGUF file in the directory `path` if the directory has no other weights.
    Returns None for any other path.  Raises EspalierError if the file cannot be read or is used as a draft."""
    try:
        if path.is_dir() and _holds_gguf(path):
            path = find_gguf(path)
        if not is_gguf(path):
            return None
        if setting.endswith("draft"):
            raise EspalierError(
                f"{setting}={str(path)!r} is in the GGUF format, in which drafts are not read; give the directory that "
                "holds a draft's config.json and weights"
            )
        require_regular(path)
        if not path.exists():
            raise EspalierError(f"{setting}={str(path)!r} does not exist; give the path of a GGUF file")
        return path
    except OSError as error:
        raise _unreadable_error(setting, path, error) from None


def _is_directory(setting: str, path: Path) -> bool:
    """Returns whether `path` is a directory.  Raises EspalierError for a file, and for a directory without a model."""
    files = "a draft's config.json and weights" if setting.endswith("draft") else "config.json and *.safetensors"
    try:
        if path.is_file():
            raise EspalierError(f"{setting}={str(path)!r} is a file; give the directory that holds {files}")
        if not path.is_dir():
            return False
        if not (path / "config.json").exists():
            raise EspalierError(f"{setting}={str(path)!r} holds no config.json; give the directory that holds {files}")
        require_files(path)
    except OSError as error:
        raise _unreadable_error(setting, path, error) from None
    return True


def _unreadable_error(setting: str, path: Path, error: OSError) -> EspalierError:
    return EspalierError(
        f"{setting}={str(path)!r} cannot be read ({error.strerror}); give a directory that you can read"
    )


def _holds_gguf(path: Path) -> bool:
    """Returns whether a directory contains GGUF files and no other weights."""
    files = list(path.iterdir())
    return any(map(is_gguf, files)) and not {file.suffix.lower() for file in files} & {".safetensors", ".bin"}


def _may_be_hub_id(name: str) -> bool:
    """Returns whether the name has the form owner/repository."""
    owner, _, repository = name.partition("/")
    return bool(owner and repository) and "/" not in repository and not name.startswith((".", "~"))


def _download(setting: str, name: str, file_patterns: list[str]) -> Path:
    """Downloads the files of the Hugging Face id `name`, except those in the local cache.  Returns their directory."""
    from huggingface_hub import snapshot_download

    try:
        path = Path(snapshot_download(name, allow_patterns=file_patterns, ignore_patterns=IGNORED_FILE_PATTERNS))
    except Exception as error:  # no network, no such repository, no permission, no space: each raises another class
        raise EspalierError(
            f"{setting}={name!r} is not a directory, and the download from the Hugging Face hub failed "
            f"({one_line(error)}); check the name and the network, or give a directory"
        ) from None
    if not (path / "config.json").exists():
        raise EspalierError(
            f"{setting}={name!r} has no config.json on the Hugging Face hub, as repositories of GGUF files have none; "
            "give the id of the model that it was made from, or download one file and give its path"
        )
    require_files(path)
    return path
