"""The files of a work folder: what each was made from, and files that are whole or not there.

A run that goes on, or that finds text of the target, must come from the same target and data, by the same settings.
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

# Bytes at the start, the middle and the end of each file of weights, by which two targets are told apart.
SAMPLED_BYTES = 2**20
DIGEST_CHARS = 16
# Kept as digests, which say nothing to a user.
ORIGIN = ("--target", "--data")


def origin_of(target: Path, tokens: np.ndarray) -> dict[str, str]:
    """What identifies a target, wherever it stands, and the token ids of the data."""
    return dict(zip(ORIGIN, (target_digest(target), text_digest(tokens)), strict=True))


def target_digest(directory: Path) -> str:
    whole = hashlib.sha256((directory / "config.json").read_bytes())
    for path in sorted([*directory.glob("*.safetensors"), *directory.glob("*.bin")]):
        size = path.stat().st_size
        whole.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for start in (0, size // 2, max(0, size - SAMPLED_BYTES)):
                file.seek(start)
                whole.update(file.read(SAMPLED_BYTES))
    return whole.hexdigest()[:DIGEST_CHARS]


def text_digest(stream: np.ndarray) -> str:
    return hashlib.sha256(stream.astype(np.int32).tobytes()).hexdigest()[:DIGEST_CHARS]


def require_same(
    path: Path, made_from: Mapping[str, str | None] | None, now: Mapping[str, str | None], remedy: str
) -> None:
    """Refuse a file that was made from something else than `now`.  Raises EspalierError, naming the difference."""
    if made_from is None:
        raise EspalierError(f"{path} does not say what it was made from; {remedy}, or delete it")
    for flag, value in now.items():
        before = made_from.get(flag)
        if before != value:
            how = f"{_said(flag, before)}, now it is {_said(flag, value)}"
            if flag in ORIGIN:
                how = f"from another {flag}"
            raise EspalierError(f"{path} was made {how}; {remedy}, or delete it")


def _said(flag: str, value: str | None) -> str:
    return f"with {flag} {value}" if value is not None else f"without {flag}"


def require_folder(flag: str, path: Path) -> None:
    """Make a folder, and check that files can be written there.  Raises EspalierError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise EspalierError(f"{flag} {path} cannot be written ({error.strerror}); use another folder") from None


@contextmanager
def whole_file(path: Path, remedy: str) -> Iterator[Path]:
    """Give the name under which a file is to be written; at the end of the block it becomes `path`.

    A block that fails leaves the file that was there before.  Raises OSError, naming the file and what to do.
    """
    unfinished = path.with_name(f"unfinished-{path.name}")
    try:
        yield unfinished
        unfinished.replace(path)
    except (OSError, RuntimeError, SafetensorError) as error:
        # PyTorch's error says that its writer failed; the one that it handles says why.
        first = error.__context__ if isinstance(error.__context__, OSError) else error
        why = (isinstance(first, OSError) and first.strerror) or one_line(error)
        raise OSError(f"{path} cannot be written ({why}); {remedy}") from None
    finally:
        unfinished.unlink(missing_ok=True)
