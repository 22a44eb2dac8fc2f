"""Opens the files of a model's directory, which may come from strangers: only regular files, of bounded size and depth.

Symbolic links are followed, because the Hugging Face cache consists of them.  A file that another file names, as an
index does, must be in the same directory.
"""

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from espalier.errors import EspalierError, one_line

# Published files have at most 1 MB (config.json), 10 MB (an index) and 40 MB (tokenizer.json).
MAX_CONFIG_BYTES = 8 * 2**20
MAX_BYTES = 128 * 2**20
# Levels of objects and lists.  Published files have at most 10.
MAX_DEPTH = 64
# Sizes in a config: of layers, of the values of a head, and of anything else.
MAX_LAYERS = 1024
MAX_HEAD_SIZE = 2**14
MAX_SIZE = 2**31 - 1
# Of other numbers: float32 has it, and its square.
MAX_NUMBER = 1e15
WEIGHTS = (".safetensors", ".bin", ".pt")
# Files that libraries read: their size is bounded, and of weights only the kind of file.
READ_BY_LIBRARIES = (".json", ".jinja", ".model", ".txt", *WEIGHTS)
TEMPLATES = "additional_chat_templates"
KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (lambda mode: stat.S_ISCHR(mode) or stat.S_ISBLK(mode), "a device"),
)


def require_regular(path: Path, max_bytes: int | None = None) -> None:
    """Refuse a path that exists and is no regular file, or a larger one.  Raises EspalierError, and OSError."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return
    kind = next((name for is_kind, name in KINDS if is_kind(found.st_mode)), None)
    if kind is not None:
        raise EspalierError(f"{path} is {kind}, not a regular file; download the model again")
    if max_bytes is not None and found.st_size > max_bytes:
        raise _too_large(path, max_bytes)


def require_files(directory: Path) -> None:
    """Check all files of a model's directory that are read, here or by a library.  Raises EspalierError."""
    for folder in (directory, directory / TEMPLATES):
        try:
            names = os.listdir(folder) if folder.is_dir() else []
            for path in (folder / name for name in names if name.endswith(READ_BY_LIBRARIES)):
                require_regular(path, None if path.suffix in WEIGHTS else MAX_BYTES)
        except OSError as error:
            raise EspalierError(f"{folder} cannot be read ({error.strerror}); make its files readable") from None


def read_json(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """The JSON object of a file.

    Raises EspalierError naming the file: for one that is missing, no regular file, too large, nested too deeply, or no
    JSON object.
    """
    try:
        require_regular(path, max_bytes)
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise _too_large(path, max_bytes)
        value = json.loads(content.decode("utf-8"), parse_constant=_constant)
    except FileNotFoundError:
        raise EspalierError(
            f"{path} does not exist; give the path of a Hugging Face model directory with config.json and *.safetensors"
        ) from None
    except EspalierError:
        raise
    except RecursionError:
        raise _too_deep(path) from None
    except (OSError, ValueError) as error:
        raise EspalierError(f"{path} is not readable JSON ({one_line(error)}); download the file again") from None
    if not isinstance(value, dict):
        raise EspalierError(f"{path} holds a {type(value).__name__}, not a JSON object; download it again")
    if _is_deeper(value, MAX_DEPTH):
        raise _too_deep(path)
    return value


@contextmanager
def naming_config(path: Path) -> Iterator[None]:
    """Turn what a value of the wrong kind raises, in a reader that names no field, into an EspalierError."""
    try:
        yield
    except EspalierError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise EspalierError(
            f"{path}: config.json has a value of the wrong kind ({type(error).__name__}: {one_line(error)}); download "
            "it again"
        ) from None


def file_named(directory: Path, name: Any, by: Path) -> Path:
    """The file of the directory that the file `by` names.  Raises EspalierError for a path, and for no name."""
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise EspalierError(f"{by} names {name!r}, which is no file of its directory; download {by.name} again")
    return directory / name


def _constant(name: str) -> float:
    if name == "NaN":
        raise ValueError("NaN is no value")
    return float(name)


def _is_deeper(value: Any, levels: int) -> bool:
    """Whether objects and lists stand inside each other in more than `levels` levels."""
    level = [value]
    for _ in range(levels):
        inner = (each.values() if isinstance(each, dict) else each for each in level)
        level = [each for values in inner for each in values if isinstance(each, dict | list)]
    return bool(level)


def _too_large(path: Path, max_bytes: int) -> EspalierError:
    return EspalierError(f"{path} is larger than {max_bytes // 2**20} MiB, as no such file is; download it again")


def _too_deep(path: Path) -> EspalierError:
    return EspalierError(f"{path} is nested in more than {MAX_DEPTH} levels; download the file again")
