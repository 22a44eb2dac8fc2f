"""Reads the header of GGUF files (llama.cpp): the metadata, and the place of each tensor.

Files may come from strangers, so every length is held to the file's before it is used.  What a model needs of the
metadata is espalier/models/gguf_config.py's.  The package `gguf` reads the same, but each string of a vocabulary takes
it some ten microseconds, and a server's processes all read the file.
"""

import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

from espalier.errors import EspalierError, shown
from espalier.model_files import MAX_SIZE, require_regular

SUFFIX = ".gguf"
MAGIC, VERSIONS = b"GGUF", (2, 3)
# The format of the values of each type, by its number; then the types that have none.
VALUES = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
FLOAT32, STRING, ARRAY = 6, 8, 9
MAX_DIMENSIONS, ALIGNMENT = 4, 32
# Of one model in several files, as llama.cpp names them.
SPLIT = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
DOWNLOAD = "download the file again"


@dataclass(frozen=True)
class Place:
    """Where a tensor lies.  shape: the last dimension's values are neighbours; type: its number; begin: in the file."""

    file: Path
    shape: tuple[int, ...]
    type: int
    begin: int


@dataclass(frozen=True)
class GGUF:
    """The header of a model.

    metadata: by key; of an array of strings only their number, as an int.  tensors: by their names in the file.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Place]


def is_gguf(path: Path) -> bool:
    """Whether a path is named as a GGUF file, whose header `read_gguf` reads."""
    return path.suffix.lower() == SUFFIX


def gguf_in(directory: Path) -> Path:
    """The GGUF file of a directory, the first of those of one model.  Raises EspalierError for several models."""
    files = sorted(file for file in directory.iterdir() if is_gguf(file))
    first = [file for file in files if not (split := SPLIT.fullmatch(file.name)) or int(split["number"]) == 1]
    if len(first) != 1:
        names = ", ".join(file.name for file in first or files)
        raise EspalierError(f"{directory} holds {len(first)} models in GGUF ({names}); give the path of one file")
    return first[0]


def read_gguf(path: Path) -> GGUF:
    """The header of a file, and of the others of its model.  Raises EspalierError naming what is wrong."""
    files = _files_of(path)
    headers = []
    for file in files:
        try:
            require_regular(file)
            found = file.stat()
            headers.append(_read(file, found.st_mtime_ns, found.st_size))
        except OSError as error:
            raise EspalierError(f"{file} cannot be read ({error.strerror}); {DOWNLOAD}") from None
    count = headers[0].metadata.get("split.count", 1)
    if count != len(files):
        raise EspalierError(
            f"{path} is one of {shown(count)} files of a model; give the first, named as ...-00001-of-{len(files):05}"
        )
    tensors: dict[str, Place] = {}
    for header in headers:
        if twice := next((name for name in header.tensors if name in tensors), None):
            raise EspalierError(f"tensor {shown(twice)} is in two files of {path}; {DOWNLOAD}")
        tensors |= header.tensors
    return GGUF(path, headers[0].metadata, tensors)


def _files_of(path: Path) -> list[Path]:
    split = SPLIT.fullmatch(path.name)
    if split is None:
        return [path]
    if int(split["number"]) != 1:
        raise EspalierError(f"{path} is not the first file of its model; give the one with 00001 in its name")
    numbers = range(1, int(split["count"]) + 1)
    files = [path.with_name(f"{split['stem']}-{number:05}-of-{split['count']}{path.suffix}") for number in numbers]
    if missing := next((file for file in files if not file.exists()), None):
        raise EspalierError(f"{missing} is missing; the model in {path.parent} has {len(files)} files: download all")
    return files


@lru_cache(maxsize=8)
def _read(path: Path, changed: int, size: int) -> GGUF:
    """changed, size: of the file, so that a file that changes is read again."""
    if size < len(MAGIC):
        raise EspalierError(f"{path} is no GGUF file: it has {size} bytes; {DOWNLOAD}")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        try:
            return _Reader(path, content).header()
        except (UnicodeDecodeError, struct.error, OverflowError):
            raise EspalierError(f"{path} has a header that cannot be read; {DOWNLOAD}") from None


class _Reader:
    """Reads a file's header from its begin to its end."""

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self.path, self.content, self.at = path, content, 0

    def header(self) -> GGUF:
        if (magic := self._bytes(4)) != MAGIC:
            raise EspalierError(f"{self.path} is no GGUF file: it begins with {magic!r}; {DOWNLOAD}")
        [version] = self._numbers("I")
        if version not in VERSIONS:
            raise EspalierError(
                f"{self.path} is of GGUF version {version}; supported are {' and '.join(map(str, VERSIONS))}, in "
                "little-endian bytes: convert the model again"
            )
        num_tensors, num_fields = self._numbers("QQ")
        metadata: dict[str, Any] = {}
        for _ in range(num_fields):
            name = self._string()
            if name in metadata:
                raise EspalierError(f"{self.path} has field {shown(name)} twice; {DOWNLOAD}")
            [kind] = self._numbers("I")
            metadata[name] = self._value(name, kind)
        return GGUF(self.path, metadata, self._tensors(num_tensors, metadata.get("general.alignment", ALIGNMENT)))

    def _tensors(self, count: int, alignment: Any) -> dict[str, Place]:
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise EspalierError(f"{self.path}: general.alignment = {shown(alignment)}; a power of two is needed")
        found: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(count):
            name = self._string()
            [dimensions] = self._numbers("I")
            if name in found or not 1 <= dimensions <= MAX_DIMENSIONS:
                raise EspalierError(
                    f"{self.path}: tensor {shown(name)} is there twice or has {dimensions} dimensions; {DOWNLOAD}"
                )
            shape = self._numbers(f"{dimensions}Q")
            if not 0 < prod(shape) <= MAX_SIZE**2:
                raise EspalierError(f"{self.path}: tensor {shown(name)} has the shape {list(shape)}; {DOWNLOAD}")
            type, begin = self._numbers("IQ")
            found[name] = shape[::-1], type, begin
        data = -(-self.at // alignment) * alignment
        return {name: Place(self.path, shape, type, data + begin) for name, (shape, type, begin) in found.items()}

    def _value(self, name: str, kind: int) -> Any:
        if kind in VALUES:
            [value] = self._numbers(VALUES[kind])
            # The decimal that was written: the shortest that rounds to this float32.
            return _shortest(value) if kind == FLOAT32 else value
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            return self._array(name)
        raise EspalierError(f"{self.path}: field {shown(name)} is of the unknown type {kind}; {DOWNLOAD}")

    def _array(self, name: str) -> Any:
        kind, count = self._numbers("IQ")
        if kind in VALUES:
            numbers = self._bytes(count * struct.calcsize(f"<{VALUES[kind]}"))
            return list(struct.unpack(f"<{count}{VALUES[kind]}", numbers))
        if kind != STRING:
            raise EspalierError(f"{self.path}: field {shown(name)} is an array of type {kind}; {DOWNLOAD}")
        for _ in range(count):
            self._bytes(*self._numbers("Q"))
        return count

    def _string(self) -> str:
        return self._bytes(*self._numbers("Q")).decode("utf-8")

    def _numbers(self, form: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{form}", self._bytes(struct.calcsize(f"<{form}")))

    def _bytes(self, count: int) -> bytes:
        begin, self.at = self.at, self.at + count
        if self.at > len(self.content):
            raise EspalierError(f"{self.path} is cut short: its header is longer than the file; {DOWNLOAD}")
        return self.content[begin : self.at]


def _shortest(value: float) -> float:
    """The float of the fewest digits that is `value` in float32."""
    for digits in range(1, 9):
        short = float(f"{value:.{digits}g}")
        if struct.pack("<f", short) == struct.pack("<f", value):
            return short
    return value
