"""The files of a work folder: checks the target, data and settings that a file was made from, and replaces files
atomically.

A run may continue, or train on saved text, only if its target, data and settings are those that the file records.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from safetensors import SafetensorError

from espalier.errors import EspalierError, one_line

# The number of bytes that are read at the beginning, the middle and the end of each weight file, to identify a target.
SAMPLED_BYTES = 2**20
DIGEST_CHARS = 16
# Files record digests for these flags.  Error messages do not print digests.
ORIGIN_FLAGS = ("--target", "--data")


def origin_of(target: Path, tokens: np.ndarray) -> dict[str, str]:
    """Returns digests of a target's files and of the token ids of the data."""
    return dict(zip(ORIGIN_FLAGS, (target_digest(target), text_digest(tokens)), strict=True))


def target_digest(directory: Path) -> str:
    """Returns a digest of the config.json and of parts of the weight files in a target's directory."""
    digest = hashlib.sha256((directory / "config.json").read_bytes())
    for path in sorted([*directory.glob("*.safetensors"), *directory.glob("*.bin")]):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for start in (0, size // 2, max(0, size - SAMPLED_BYTES)):
                file.seek(start)
                digest.update(file.read(SAMPLED_BYTES))
    return digest.hexdigest()[:DIGEST_CHARS]


def text_digest(tokens: np.ndarray) -> str:
    return hashlib.sha256(tokens.astype(np.int32).tobytes()).hexdigest()[:DIGEST_CHARS]


def require_same_origin(
    path: Path, made_from: Mapping[str, str | None] | None, expected: Mapping[str, str | None], remedy: str
) -> None:
    """Raises EspalierError if a file was made from other values than `expected`.  made_from: the values that the file
    records, by flag; None if it records none.  remedy: advice for the message."""
    if made_from is None:
        raise EspalierError(f"{path} does not say what it was made from; {remedy}, or delete it")
    for flag, value in expected.items():
        before = made_from.get(flag)
        if before != value:
            how = f"{_flag_text(flag, before)}, now it is {_flag_text(flag, value)}"
            if flag in ORIGIN_FLAGS:
                how = f"from another {flag}"
            raise EspalierError(f"{path} was made {how}; {remedy}, or delete it")


def _flag_text(flag: str, value: str | None) -> str:
    return f"with {flag} {value}" if value is not None else f"without {flag}"


def require_writable(flag: str, path: Path) -> None:
    """Raises EspalierError if files cannot be written to a folder, or to the folder in which it would be made."""
    try:
        with tempfile.TemporaryFile(dir=next(each for each in (path, *path.absolute().parents) if each.exists())):
            pass
    except OSError as error:
        raise EspalierError(f"{flag} {path} cannot be written ({error.strerror}); use another folder") from None


def require_folder(flag: str, path: Path) -> None:
    """Creates a folder.  Raises EspalierError if files cannot be written to the folder."""
    require_writable(flag, path)
    path.mkdir(parents=True, exist_ok=True)


@contextmanager
def replace_file(path: Path, remedy: str) -> Iterator[Path]:
    """Yields a temporary path, to write a file there.  At the end of the block, the file replaces `path`.  If writing
    fails, the old file stays, and OSError is raised.  remedy: the end of the error's message."""
    unfinished = path.with_name(f"unfinished-{path.name}")
    try:
        yield unfinished
        unfinished.replace(path)
    except (OSError, RuntimeError, SafetensorError) as error:
        # PyTorch's error only says that its writer failed.  The preceding error has the cause.
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        why = (isinstance(cause, OSError) and cause.strerror) or one_line(error)
        raise OSError(f"{path} cannot be written ({why}); {remedy}") from None
    finally:
        unfinished.unlink(missing_ok=True)
