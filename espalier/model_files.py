"""Opens the files of a model's directory.  The files may come from strangers, so this module refuses files that are not
regular or too large, and JSON that is nested too deeply.

Symbolic links are followed, because the Hugging Face cache consists of them.  If one file names another, as an index of
weight files does, the named file must be in the same directory.
"""

import json
import mmap
import os
import re
import stat
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

from espalier.errors import EspalierError, one_line, shown

# Published files have at most 1 MB (config.json), 10 MB (an index) and 40 MB (tokenizer.json).
MAX_CONFIG_BYTES = 8 * 2**20
MAX_FILE_BYTES = 128 * 2**20
# The most levels of nested objects and lists.  Published files have at most 10.
MAX_JSON_DEPTH = 64
# The largest accepted values in a config: number of layers, size of an attention head, and any other size.
MAX_LAYERS = 1024
MAX_HEAD_SIZE = 2**14
MAX_SIZE = 2**31 - 1
# The largest accepted number in a field that is not a size.  float32 can hold this number and its square.
MAX_NUMBER = 1e15
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt")
# Suffixes of the files that libraries read.  All must be regular files.  All except weights have a limited size.
LIBRARY_FILE_SUFFIXES = (".json", ".jinja", ".model", ".txt", *WEIGHT_SUFFIXES)
TEMPLATE_DIRECTORY = "additional_chat_templates"
IRREGULAR_FILE_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (lambda mode: stat.S_ISCHR(mode) or stat.S_ISBLK(mode), "a device"),
)
GGUF_SUFFIX = ".gguf"
GGUF_MAGIC, GGUF_VERSIONS = b"GGUF", (2, 3)
# The struct format of each numeric GGUF value type, by the type's number.
NUMBER_FORMATS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
GGUF_FLOAT32, GGUF_STRING, GGUF_ARRAY = 6, 8, 9
MAX_DIMENSIONS, DEFAULT_ALIGN_BYTES = 4, 32
# Matches a file of a model that is split into several files, as llama.cpp names them.
SPLIT_PATTERN = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
REDOWNLOAD = "download the file again"


def require_regular(path: Path, max_bytes: int | None = None) -> None:
    """Refuse a path that exists and is not a regular file, or is above max_bytes.  Raises EspalierError, OSError."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return
    kind = next((name for is_kind, name in IRREGULAR_FILE_KINDS if is_kind(status.st_mode)), None)
    if kind is not None:
        raise EspalierError(f"{path} is {kind}, not a regular file; download the model again")
    if max_bytes is not None and status.st_size > max_bytes:
        raise _too_large_error(path, max_bytes)


def require_files(directory: Path) -> None:
    """Check all files of a model's directory that this package or a library reads.  Raises EspalierError."""
    for folder in (directory, directory / TEMPLATE_DIRECTORY):
        try:
            names = os.listdir(folder) if folder.is_dir() else []
            for path in (folder / name for name in names if name.endswith(LIBRARY_FILE_SUFFIXES)):
                require_regular(path, None if path.suffix in WEIGHT_SUFFIXES else MAX_FILE_BYTES)
        except OSError as error:
            raise EspalierError(f"{folder} cannot be read ({error.strerror}); make its files readable") from None


def read_json(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """Returns the JSON object of a file.

    Raises EspalierError naming the file if it is missing, no regular file, too large, too deep, or no JSON object."""
    try:
        require_regular(path, max_bytes)
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise _too_large_error(path, max_bytes)
        value = json.loads(content.decode("utf-8"), parse_constant=_parse_json_constant)
    except FileNotFoundError:
        raise EspalierError(
            f"{path} does not exist; give the path of a Hugging Face model directory with config.json and *.safetensors"
        ) from None
    except EspalierError:
        raise
    except RecursionError:
        raise _too_deep_error(path) from None
    except (OSError, ValueError) as error:
        raise EspalierError(f"{path} is not readable JSON ({one_line(error)}); download the file again") from None
    if not isinstance(value, dict):
        raise EspalierError(f"{path} holds a {type(value).__name__}, not a JSON object; download it again")
    if _is_nested_deeper(value, MAX_JSON_DEPTH):
        raise _too_deep_error(path)
    return value


@contextmanager
def add_path_to_errors(path: Path) -> Iterator[None]:
    """Turns an error of the `with` block into an EspalierError that names `path`.  The block reads config.json."""
    try:
        yield
    except EspalierError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise EspalierError(
            f"{path}: config.json has a value of the wrong kind ({type(error).__name__}: {one_line(error)}); download "
            "it again"
        ) from None


def named_file(directory: Path, name: Any, source: Path) -> Path:
    """Returns the path of a file that the file `source` names.  Raises EspalierError for a name with a directory."""
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise EspalierError(f"{source} names {name!r}, which is no file of its directory; download {source.name} again")
    return directory / name


def _parse_json_constant(name: str) -> float:
    """Returns the float for `name`, Infinity or -Infinity.  Refuses NaN."""
    if name == "NaN":
        raise ValueError("NaN is no value")
    return float(name)


def _is_nested_deeper(value: Any, levels: int) -> bool:
    """Whether objects and lists are nested in more than `levels` levels."""
    level = [value]
    for _ in range(levels):
        members = (item.values() if isinstance(item, dict) else item for item in level)
        level = [item for values in members for item in values if isinstance(item, dict | list)]
    return bool(level)


def _too_large_error(path: Path, max_bytes: int) -> EspalierError:
    return EspalierError(f"{path} is larger than {max_bytes // 2**20} MiB, as no such file is; download it again")


def _too_deep_error(path: Path) -> EspalierError:
    return EspalierError(f"{path} is nested in more than {MAX_JSON_DEPTH} levels; download the file again")


@dataclass(frozen=True)
class TensorInfo:
    """The place of a tensor in a file.  begin: the offset of its first byte in the file.  type: GGUF's number for the
    tensor's data format.  shape: values along the last dimension are neighbours in the file."""

    file: Path
    shape: tuple[int, ...]
    type: int
    begin: int


@dataclass(frozen=True)
class GGUF:
    """The header of a model in one or several GGUF files.

    metadata: values by field name.  An array of strings is represented by its length, an int.  tensors: by name."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]


def is_gguf(path: Path) -> bool:
    """Whether a path has the suffix of a GGUF file.  The file is not read."""
    return path.suffix.lower() == GGUF_SUFFIX


def find_gguf(directory: Path) -> Path:
    """Returns a directory's GGUF file, or the first file of a split model.  Raises EspalierError for several models."""
    files = sorted(file for file in directory.iterdir() if is_gguf(file))
    heads = [file for file in files if not (split := SPLIT_PATTERN.fullmatch(file.name)) or int(split["number"]) == 1]
    if len(heads) != 1:
        names = ", ".join(file.name for file in heads or files)
        raise EspalierError(f"{directory} holds {len(heads)} models in GGUF ({names}); give the path of one file")
    return heads[0]


def read_gguf(path: Path) -> GGUF:
    """Returns a model's header, read from all files of a split model.  Raises EspalierError naming the fault."""
    files = _split_model_files(path)
    headers = []
    for file in files:
        try:
            require_regular(file)
            status = file.stat()
            headers.append(_read_header(file, status.st_mtime_ns, status.st_size))
        except OSError as error:
            raise EspalierError(f"{file} cannot be read ({error.strerror}); {REDOWNLOAD}") from None
    count = headers[0].metadata.get("split.count", 1)
    if count != len(files):
        raise EspalierError(
            f"{path} is one of {shown(count)} files of a model; give the first, named as ...-00001-of-{len(files):05}"
        )
    tensors: dict[str, TensorInfo] = {}
    for header in headers:
        if duplicate := next((name for name in header.tensors if name in tensors), None):
            raise EspalierError(f"tensor {shown(duplicate)} is in two files of {path}; {REDOWNLOAD}")
        tensors |= header.tensors
    return GGUF(path, headers[0].metadata, tensors)


def _split_model_files(path: Path) -> list[Path]:
    """Returns all files of a split model.  path: the first of these files, or the only file of a model."""
    split = SPLIT_PATTERN.fullmatch(path.name)
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
def _read_header(path: Path, modified_ns: int, size: int) -> GGUF:
    """Returns the header of one file.  modified_ns, size: part of lru_cache's key, so a changed file is read again."""
    if size < len(GGUF_MAGIC):
        raise EspalierError(f"{path} is no GGUF file: it has {size} bytes; {REDOWNLOAD}")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        try:
            return _GGUFHeaderReader(path, content).read_header()
        except (UnicodeDecodeError, struct.error, OverflowError):
            raise EspalierError(f"{path} has a header that cannot be read; {REDOWNLOAD}") from None


class _GGUFHeaderReader:
    """Reads the header of one GGUF file.  offset: the position of the next byte to read."""

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self.path, self.content, self.offset = path, content, 0

    def read_header(self) -> GGUF:
        if (magic := self._read_bytes(4)) != GGUF_MAGIC:
            raise EspalierError(f"{self.path} is no GGUF file: it begins with {magic!r}; {REDOWNLOAD}")
        [version] = self._read_numbers("I")
        if version not in GGUF_VERSIONS:
            raise EspalierError(
                f"{self.path} is of GGUF version {version}; supported are {' and '.join(map(str, GGUF_VERSIONS))}, in "
                "little-endian bytes: convert the model again"
            )
        num_tensors, num_fields = self._read_numbers("QQ")
        metadata: dict[str, Any] = {}
        for _ in range(num_fields):
            name = self._read_string()
            if name in metadata:
                raise EspalierError(f"{self.path} has field {shown(name)} twice; {REDOWNLOAD}")
            [kind] = self._read_numbers("I")
            metadata[name] = self._read_value(name, kind)
        return GGUF(
            self.path,
            metadata,
            self._read_tensors(num_tensors, metadata.get("general.alignment", DEFAULT_ALIGN_BYTES)),
        )

    def _read_tensors(self, num_tensors: int, alignment: Any) -> dict[str, TensorInfo]:
        """Reads where the tensors are.  alignment: general.alignment; the data begin at a multiple of so many bytes."""
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise EspalierError(f"{self.path}: general.alignment = {shown(alignment)}; a power of two is needed")
        entries: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(num_tensors):
            name = self._read_string()
            [dimensions] = self._read_numbers("I")
            if name in entries or not 1 <= dimensions <= MAX_DIMENSIONS:
                raise EspalierError(
                    f"{self.path}: tensor {shown(name)} is there twice or has {dimensions} dimensions; {REDOWNLOAD}"
                )
            shape = self._read_numbers(f"{dimensions}Q")
            if not 0 < prod(shape) <= MAX_SIZE**2:
                raise EspalierError(f"{self.path}: tensor {shown(name)} has the shape {list(shape)}; {REDOWNLOAD}")
            type_number, begin = self._read_numbers("IQ")
            entries[name] = shape[::-1], type_number, begin
        data_begin = -(-self.offset // alignment) * alignment
        return {
            name: TensorInfo(self.path, shape, type_number, data_begin + begin)
            for name, (shape, type_number, begin) in entries.items()
        }

    def _read_value(self, name: str, kind: int) -> Any:
        """Reads the value of the metadata field `name`.  kind: the number by which GGUF names the value's type."""
        if kind in NUMBER_FORMATS:
            [value] = self._read_numbers(NUMBER_FORMATS[kind])
            # The shortest decimal that rounds to this float32 is the decimal that the model's author wrote.
            return _shortest_decimal(value) if kind == GGUF_FLOAT32 else value
        if kind == GGUF_STRING:
            return self._read_string()
        if kind == GGUF_ARRAY:
            return self._read_array(name)
        raise EspalierError(f"{self.path}: field {shown(name)} is of the unknown type {kind}; {REDOWNLOAD}")

    def _read_array(self, name: str) -> Any:
        """Returns the numbers in the array field `name`; of an array of strings, only the number of strings."""
        kind, count = self._read_numbers("IQ")
        if kind in NUMBER_FORMATS:
            numbers = self._read_bytes(count * struct.calcsize(f"<{NUMBER_FORMATS[kind]}"))
            return list(struct.unpack(f"<{count}{NUMBER_FORMATS[kind]}", numbers))
        if kind != GGUF_STRING:
            raise EspalierError(f"{self.path}: field {shown(name)} is an array of type {kind}; {REDOWNLOAD}")
        for _ in range(count):
            self._read_bytes(*self._read_numbers("Q"))
        return count

    def _read_string(self) -> str:
        return self._read_bytes(*self._read_numbers("Q")).decode("utf-8")

    def _read_numbers(self, struct_format: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{struct_format}", self._read_bytes(struct.calcsize(f"<{struct_format}")))

    def _read_bytes(self, num_bytes: int) -> bytes:
        begin, self.offset = self.offset, self.offset + num_bytes
        if self.offset > len(self.content):
            raise EspalierError(f"{self.path} is cut short: its header is longer than the file; {REDOWNLOAD}")
        return self.content[begin : self.offset]


def _shortest_decimal(value: float) -> float:
    """Returns the float with the fewest digits that is `value` in float32."""
    for digits in range(1, 9):
        shortened = float(f"{value:.{digits}g}")
        if struct.pack("<f", shortened) == struct.pack("<f", value):
            return shortened
    return value
