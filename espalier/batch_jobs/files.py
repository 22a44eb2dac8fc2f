"""The files of a batch: parses and checks the input file, in OpenAI's format, and writes the output file (Journal).

An input line is {"custom_id", "method", "url", "body"}.  An output line is {"id", "custom_id", "response", "error"};
`response` is {"status_code", "request_id", "body"}.  The output field `id` has a digest of the input file and the
number of the input line, so it tells which input line is answered.
"""

import errno
import fcntl
import hashlib
import json
import os
import threading
from array import array
from codecs import BOM_UTF8
from collections.abc import Collection, Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec
import numpy as np

from espalier.errors import EspalierError, shown, without_duplicate_keys

DEFAULT_URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
LINE_FIELDS = ("custom_id", "method", "url", "body")
MAX_LINE_BYTES = 64 * 2**20
MAX_CUSTOM_ID_CHARS = 512
DIGEST_CHARS = 16
STATUS_OK = 200


@dataclass(frozen=True)
class BatchLine:
    """One request of a batch: an input line.  line_number: from 1.  body: the JSON body of the HTTP request."""

    line_number: int
    custom_id: str
    url: str
    body: dict[str, Any]


class Response(NamedTuple):
    """The HTTP response to one line.  body: the decoded JSON."""

    status_code: int
    request_id: str
    body: Any


class LineError(Exception):
    """Why a line has no response.  code: OpenAI's error code.  custom_id: the line's, or None without a valid one."""

    def __init__(self, code: str, message: str, custom_id: str | None = None):
        super().__init__(message)
        self.code = code
        self.custom_id = custom_id


def numbered_lines(file: BinaryIO, path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields (line number, bytes) of each line that is not blank.  A byte order mark at the start of the file is
    skipped.  Raises EspalierError for a line that is too long."""
    line_number = 0
    while line_bytes := file.readline(MAX_LINE_BYTES + 1):
        line_number += 1
        if len(line_bytes) > MAX_LINE_BYTES:
            raise EspalierError(
                f"{path}, line {line_number}: it is longer than {MAX_LINE_BYTES} bytes; write one request on each line"
            )
        if line_number == 1:
            line_bytes = line_bytes.removeprefix(BOM_UTF8)
        if line_bytes and not line_bytes.isspace():
            yield line_number, line_bytes


def parse_line(line_number: int, line_bytes: bytes, urls: Collection[str] = DEFAULT_URLS) -> BatchLine:
    """Parses an input line.  urls: the allowed values of the field url.  Raises LineError."""
    try:
        value = msgspec.json.decode(line_bytes)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise _not_json_error(error) from None
    if not isinstance(value, dict):
        raise LineError("invalid_json_line", "the line is not a JSON object; write one with " + ", ".join(LINE_FIELDS))
    custom_id = value.get("custom_id")
    text_id = custom_id if isinstance(custom_id, str) else None
    _refuse_repeated_keys(line_bytes, text_id)
    try:
        _check_fields(value, urls)
    except LineError as error:
        raise LineError(error.code, str(error), text_id) from None
    return BatchLine(line_number, value["custom_id"], value["url"], value["body"])


def _not_json_error(error: Exception, custom_id: str | None = None) -> LineError:
    return LineError("invalid_json_line", f"the line is not JSON ({error}); write a JSON object", custom_id)


def _refuse_repeated_keys(line_bytes: bytes, custom_id: str | None) -> None:
    """Refuse a line in which a JSON object has the same key twice.  msgspec would keep only the last value of the key.

    custom_id: the line's custom_id as msgspec reads it.  Raises LineError with this custom_id, or without custom_id if
    the line has two custom_ids."""
    errors: list[EspalierError] = []
    custom_ids: list[Any] = []

    def check_object(pairs: list[tuple[str, Any]]) -> None:
        # json parses nested objects first and the whole line last, so the line's own custom_ids remain.
        custom_ids[:] = (value for name, value in pairs if name == "custom_id")
        try:
            without_duplicate_keys(pairs)
        except EspalierError as error:
            errors.append(error)

    try:
        json.loads(line_bytes, object_pairs_hook=check_object)
    except (ValueError, RecursionError) as error:  # json also refuses some texts that msgspec reads
        raise _not_json_error(error, custom_id) from None
    if len(custom_ids) > 1:
        raise LineError(
            "invalid_json_line", f"the line has {' and '.join(map(shown, custom_ids))} as custom_id; leave one out"
        )
    if errors:
        raise LineError("invalid_json_line", str(errors[0]), custom_id)


def _check_fields(fields: Mapping[str, Any], urls: Collection[str]) -> None:
    """Refuse a line with a missing, unknown or invalid field.  Raises LineError."""
    for name in LINE_FIELDS:
        if fields.get(name) is None:
            raise LineError("missing_required_parameter", f"{name} is missing; a line has {', '.join(LINE_FIELDS)}")
    for name in fields:
        if name not in LINE_FIELDS:
            raise LineError("unknown_parameter", f"a line has no {shown(name)}; use {', '.join(LINE_FIELDS)}")
    custom_id, method, url, body = (fields[name] for name in LINE_FIELDS)
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID_CHARS:
        message = f"custom_id={shown(custom_id)} is not supported; use text of 1 to {MAX_CUSTOM_ID_CHARS} characters"
        raise LineError("invalid_custom_id", message)
    if method != "POST":
        raise LineError("invalid_method", f"method={shown(method)} is not supported; use 'POST'")
    if url not in urls:
        raise LineError("invalid_url", f"url={shown(url)} is not supported; use {', '.join(urls)}")
    if not isinstance(body, dict):
        raise LineError("invalid_body", f"body={shown(body)} is not supported; use a JSON object")
    if body.get("stream"):
        raise LineError("invalid_body", "stream is not supported in a batch; leave it out")


def custom_id_of(line_bytes: bytes) -> str | None:
    """Returns the custom_id of a line; None if the line cannot be parsed or has no custom_id."""
    try:
        value = msgspec.json.decode(line_bytes)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    custom_id = value.get("custom_id") if isinstance(value, dict) else None
    return custom_id if isinstance(custom_id, str) else None


def id_prefix(digest: str) -> str:
    """Returns the part of a request's id before the line number.  digest: InputScan.digest."""
    return f"batch_req_{digest}_"


def output_line(digest: str, line_number: int, custom_id: str | None, answer: Response | LineError) -> bytes:
    """Returns the output line with the answer to input line `line_number`.  digest: InputScan.digest."""
    response, error = None, None
    if isinstance(answer, LineError):
        error = {"code": answer.code, "message": str(answer)}
    else:
        response = answer._asdict()
    line = {"id": f"{id_prefix(digest)}{line_number}", "custom_id": custom_id, "response": response, "error": error}
    return msgspec.json.encode(line) + b"\n"


@dataclass(frozen=True)
class InputScan:
    """A checked input file.  digest: the start of a SHA-256 over the lines, in hex.  num_lines: how many lines
    are not blank.  last_line_number: the number of the last line that is not blank."""

    path: Path
    digest: str
    num_lines: int
    last_line_number: int


def scan_input(path: Path) -> InputScan:
    """Read and check a whole input file.  Raises EspalierError if it cannot be read, is empty, or repeats a custom_id.

    Only an eight-byte hash of each custom_id is kept in memory.  If two hashes are equal, a second pass over the file
    compares the custom_ids."""
    if not path.is_file():
        raise EspalierError(f"{path} is not a file; name a file with one request on each line")
    digest, id_hashes = hashlib.sha256(), array("Q")
    num_lines = last_line_number = 0
    try:
        with path.open("rb") as file:
            for line_number, line_bytes in numbered_lines(file, path):
                digest.update(b"%d:" % line_number + line_bytes)
                num_lines, last_line_number = num_lines + 1, line_number
                custom_id = custom_id_of(line_bytes)
                if custom_id is not None:
                    id_hashes.append(_hash_of_id(custom_id))
        _refuse_repeated_ids(path, id_hashes)
    except OSError as error:
        raise EspalierError(f"{path} cannot be read ({error.strerror}); use a text file") from None
    if not num_lines:
        raise EspalierError(f"{path} has no line; write one request on each line")
    return InputScan(path, digest.hexdigest()[:DIGEST_CHARS], num_lines, last_line_number)


def _hash_of_id(custom_id: str) -> int:
    return int.from_bytes(hashlib.blake2b(custom_id.encode(), digest_size=8).digest())


def _refuse_repeated_ids(path: Path, id_hashes: array) -> None:
    """Raises EspalierError for a repeated custom_id, with both line numbers."""
    # The hashes are sorted in place, because a copy would double the memory.
    sorted_hashes = np.frombuffer(id_hashes, dtype=np.uint64)
    sorted_hashes.sort()
    repeated_hashes = set(sorted_hashes[1:][sorted_hashes[1:] == sorted_hashes[:-1]].tolist())
    if repeated_hashes:
        _refuse_first_repeated_id(path, repeated_hashes)


def _refuse_first_repeated_id(path: Path, repeated_hashes: Collection[int]) -> None:
    """Raises EspalierError for the first repeated custom_id.  repeated_hashes: the hashes that several lines have."""
    line_of_id: dict[str, int] = {}
    with path.open("rb") as file:
        for line_number, line_bytes in numbered_lines(file, path):
            custom_id = custom_id_of(line_bytes)
            if custom_id is None or _hash_of_id(custom_id) not in repeated_hashes:
                continue
            if custom_id in line_of_id:
                raise EspalierError(
                    f"{path}, line {line_number}: custom_id {shown(custom_id)} is on line {line_of_id[custom_id]} too; "
                    "give each line its own"
                )
            line_of_id[custom_id] = line_number


class Journal:
    """The output file of a batch, and a record in memory of the input lines that are answered.

    scan: the checked input file.  num_failed: the number of answers that are errors or have a status other than 200.
    Raises EspalierError if the output file cannot be written, or has answers to another input file."""

    def __init__(self, path: Path, scan: InputScan):
        self.path = path
        self.scan = scan
        self.num_answered = 0
        self.num_failed = 0
        self._prefix = id_prefix(scan.digest)
        self._is_answered = bytearray(scan.last_line_number + 1)
        self._has_unsynced_lines = False
        # The lock is needed because `sync` may run in a thread while `close` is called.
        self._sync_lock = threading.Lock()
        self._file = open_locked(path, "batch", "name another file")
        try:
            self._sync_parent_folder()
            self._recover()
        except BaseException:
            os.close(self._file)
            raise

    def is_answered(self, line_number: int) -> bool:
        return bool(self._is_answered[line_number])

    @property
    def num_unanswered(self) -> int:
        return self.scan.num_lines - self.num_answered

    def unanswered_lines(self) -> Generator[tuple[int, bytes]]:
        """Yields (line number, bytes) of each unanswered input line.  Reads the file line by line, not all at once."""
        with self.scan.path.open("rb") as file:
            for line_number, line_bytes in numbered_lines(file, self.scan.path):
                if not self.is_answered(line_number):
                    yield line_number, line_bytes

    def append(self, line_number: int, custom_id: str | None, answer: Response | LineError) -> None:
        """Append the answer to an input line.  Raises EspalierError if the output file cannot be written."""
        unwritten = line = output_line(self.scan.digest, line_number, custom_id, answer)
        try:
            while unwritten:
                unwritten = unwritten[os.write(self._file, unwritten) :]
        except OSError as error:
            # Remove a partly written line, because `_recover` accepts an incomplete line only at the file's end.
            with suppress(OSError):
                os.ftruncate(self._file, os.fstat(self._file).st_size - (len(line) - len(unwritten)))
            raise EspalierError(
                f"{self.path} cannot be written ({error.strerror}); make room and run it again"
            ) from None
        self._has_unsynced_lines = True
        self._count_answer(line_number, isinstance(answer, LineError) or answer.status_code != STATUS_OK)

    def sync(self) -> None:
        """Sync the written lines to the disk.  May run in a thread.  Raises EspalierError if the disk fails."""
        with self._sync_lock:
            if not self._has_unsynced_lines:
                return
            self._has_unsynced_lines = False
            try:
                os.fsync(self._file)
            except OSError as error:
                raise EspalierError(
                    f"{self.path} cannot be written ({error.strerror}); check the disk and run it again"
                ) from None

    def close(self) -> None:
        try:
            self.sync()
        finally:
            os.close(self._file)

    def _sync_parent_folder(self) -> None:
        try:
            sync_folder(self.path.parent)
        except OSError as error:
            raise EspalierError(f"{self.path.parent} cannot be synced ({error.strerror}); use another disk") from None

    def _count_answer(self, line_number: int, is_failed: bool) -> None:
        """Count the answer to an input line.  line_number: its number in the input file, from 1."""
        self._is_answered[line_number] = 1
        self.num_answered += 1
        self.num_failed += is_failed

    def _recover(self) -> None:
        """Read the answers that an earlier run wrote, and remove an incomplete last line."""
        with self.path.open("rb") as file:
            offset = 0
            for output_number, line_bytes in enumerate(file, 1):
                if not line_bytes.endswith(b"\n") and self._may_begin_output_line(line_bytes):
                    os.ftruncate(self._file, offset)
                    break
                self._read_answer(output_number, line_bytes)
                offset += len(line_bytes)

    def _may_begin_output_line(self, line_bytes: bytes) -> bool:
        """Returns whether `line_bytes`, an incomplete line, may be the beginning of an output line.

        Zero bytes at the end are ignored, because a crash may leave a disk block of zero bytes."""
        start, written = f'{{"id":"{self._prefix}'.encode(), line_bytes.rstrip(b"\0")
        return written.startswith(start) or start.startswith(written)

    def _read_answer(self, output_number: int, line_bytes: bytes) -> None:
        """Count the answer in a line of the output file.  Raises EspalierError if the line answers no input line."""
        try:
            line: Any = msgspec.json.decode(line_bytes)
            answer_id, response = line["id"], line["response"]
            line_number = int(answer_id.rpartition("_")[2])
            is_failed = response is None or response["status_code"] != STATUS_OK
        except (msgspec.DecodeError, TypeError, KeyError, ValueError, AttributeError):
            raise EspalierError(
                f"{self.path}, line {output_number}: this is not a batch's output; name another file for the output"
            ) from None
        if not answer_id.startswith(self._prefix) or not 0 < line_number <= self.scan.last_line_number:
            raise EspalierError(
                f"{self.path} has answers to another input than {self.scan.path}, or the input has changed since; "
                "name another file for the output"
            )
        if not self.is_answered(line_number):
            self._count_answer(line_number, is_failed)


def open_locked(path: Path, owner_noun: str, remedy: str) -> int:
    """Opens a file for appending, locked against other processes, and returns its descriptor.  Raises EspalierError.

    For error texts: owner_noun says what may hold the lock; remedy says what to do if the file cannot be opened."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise EspalierError(f"{path} cannot be written ({error.strerror}); {remedy}") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN):
            raise EspalierError(f"{path} is being written by another {owner_noun}; wait for it, or end it") from None
        raise EspalierError(f"{path} cannot be locked ({error.strerror}); use a local file system") from None
    return file


def sync_folder(folder: Path) -> None:
    """Sync a folder's entries to the disk, because fsync of a file does not sync the file's name.  Raises OSError."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems cannot sync a folder
            raise
    finally:
        os.close(handle)
