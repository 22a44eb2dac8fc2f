"""OpenAI's objects of files and batches, and the directory that stores them (--batch-dir).

`files/ID.json` describes the file `files/ID`.  `batches/ID.json` describes a batch.  `batches/ID.jsonl` has the answers
of a batch that has not ended.
"""

import fcntl
import logging
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, TypeVar

import msgspec
from pydantic import Field

from espalier.batch_jobs.files import sync_folder
from espalier.errors import EspalierError
from espalier.server.fields import Metadata, RefusedField, RequestBody

log = logging.getLogger("espalier.server")
UNFINISHED_SUFFIX = ".new"
COMPLETION_WINDOW_S = 24 * 3600
INPUT_PURPOSE, OUTPUT_PURPOSE = "batch", "batch_output"
# A batch with one of these statuses never changes again.
ENDED_STATUSES = ("failed", "completed", "expired", "cancelled")


class StoredFile(msgspec.Struct):
    """OpenAI's file object.  purpose: INPUT_PURPOSE or OUTPUT_PURPOSE.  created_at: in seconds since 1970."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    object: str = "file"
    status: str = "processed"
    expires_at: int | None = None


class LineCounts(msgspec.Struct):
    """The counts of a batch's lines.  completed: answered with status 200.  failed: all other answers."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchError(msgspec.Struct):
    """The reason why a batch's input was refused."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(msgspec.Struct):
    data: list[BatchError]
    object: str = "list"


class Batch(msgspec.Struct):
    """OpenAI's batch object.  Times are in seconds since 1970."""

    id: str
    endpoint: str
    input_file_id: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    object: str = "batch"
    status: str = "validating"
    completion_window: str = "24h"
    errors: BatchErrors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: LineCounts = msgspec.field(default_factory=LineCounts)


class BatchRequest(RequestBody):
    """POST /v1/batches"""

    input_file_id: str = Field(description="a file from /v1/files with purpose batch")
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"] = Field(
        description="the url of every line"
    )
    completion_window: Literal["24h"] = Field(description="24h; lines without an answer by then get an error")
    metadata: Metadata = None
    output_expires_after: Annotated[None, RefusedField("files stay until they are deleted; leave it out")] = None


T = TypeVar("T", StoredFile, Batch)


def new_id(prefix: str) -> str:
    """Returns a new id that begins with `prefix`.  In sorted order, older ids come first."""
    return f"{prefix}{time.time_ns():016x}{uuid.uuid4().hex[:16]}"


class BatchStore:
    """The files and batches in `folder`, as dicts by id, oldest first.  Raises EspalierError for an unusable folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        try:
            for inner in ("files", "batches"):
                (folder / inner).mkdir(parents=True, exist_ok=True)
            sync_folder(folder)
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for unfinished in folder.glob(f"*/*{UNFINISHED_SUFFIX}"):
                unfinished.unlink()
        except BlockingIOError:
            raise EspalierError(f"--batch-dir {folder} is used by another server; name another directory") from None
        except OSError as error:
            why = f"--batch-dir {folder} cannot be used ({error.strerror}); name another directory"
            raise EspalierError(why) from None
        self.files = self._read_records(folder / "files", StoredFile)
        self.batches = self._read_records(folder / "batches", Batch)
        self._remove_orphans()

    def _read_records(self, folder: Path, record_type: type[T]) -> dict[str, T]:
        """Returns the records in the JSON files of `folder`, by id, oldest first."""
        try:
            records = [msgspec.json.decode(path.read_bytes(), type=record_type) for path in folder.glob("*.json")]
        except (OSError, msgspec.DecodeError) as error:
            raise EspalierError(f"--batch-dir {folder} has a file that cannot be read: {error}; remove it") from None
        return {each.id: each for each in sorted(records, key=lambda each: (each.created_at, each.id))}

    def _remove_orphans(self) -> None:
        """Remove what a killed server left: files without a JSON description, and answers of batches that have ended.

        No client could list or delete these files."""
        unfinished = [id for id, batch in self.batches.items() if batch.status not in ENDED_STATUSES]
        described = set(self.files) | {f"{id}.jsonl" for id in unfinished}
        for path in (*self.folder.glob("files/file-*"), *self.folder.glob("batches/batch_*")):
            if path.suffix != ".json" and path.name not in described:
                log.warning("%s is left over from a server that was killed; it is removed", path)
                with suppress(OSError):
                    path.unlink()

    def list_files(self) -> list[StoredFile]:
        """Returns a list of all files, made in one atomic step, because a thread may add a file at any time."""
        return list(self.files.values())

    def content_path(self, id: str) -> Path:
        """Returns the path of the content of the stored file with this id."""
        return self.folder / "files" / id

    def answers_path(self, id: str) -> Path:
        """Returns the path of the file that collects the answers of the batch with this id."""
        return self.folder / "batches" / f"{id}.jsonl"

    def add_file(self, source: BinaryIO, filename: str, purpose: str, id: str | None = None) -> StoredFile:
        """Copy a file into the store, completely or not at all.  May run in a thread.

        id: None for a new id; a stored file with this id is replaced.  Raises OSError.
        """
        id = id or new_id("file-")
        with _atomic_file(self.content_path(id)) as copy:
            shutil.copyfileobj(source, copy)
            size = copy.tell()
        try:
            file = StoredFile(id, size, int(time.time()), filename, purpose)
            _write_atomically(self.folder / "files" / f"{id}.json", msgspec.json.encode(file))
        except BaseException:
            if id not in self.files:
                self.content_path(id).unlink()
            raise
        self.files[id] = file
        return file

    def remove_file(self, id: str) -> None:
        """Delete a file, whose content may be gone already.  Raises OSError.

        The JSON description is deleted first.  If the server crashes then, `_remove_orphans` deletes the content."""
        (self.folder / "files" / f"{id}.json").unlink(missing_ok=True)
        del self.files[id]
        self.content_path(id).unlink(missing_ok=True)

    def save_batch(self, batch: Batch, **changes: Any) -> None:
        """Change fields of a batch on disk, then in memory.  Raises OSError if the disk fails; then nothing changes."""
        changed = msgspec.structs.replace(batch, **changes)
        _write_atomically(self.folder / "batches" / f"{batch.id}.json", msgspec.json.encode(changed))
        for name, value in changes.items():
            setattr(batch, name, value)
        self.batches[batch.id] = batch

    def close(self) -> None:
        os.close(self._lock)


def _write_atomically(path: Path, data: bytes) -> None:
    with _atomic_file(path) as file:
        file.write(data)


@contextmanager
def _atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Opens a temporary file.  If the block raises no error, the file is synced to the disk and renamed to `path`."""
    unfinished = path.with_name(path.name + UNFINISHED_SUFFIX)
    try:
        with unfinished.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
        sync_folder(path.parent)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def split_by_status(answers_file: Path, folder: Path) -> list[tuple[Path, int]]:
    """Copy a batch's answers into two files in `folder`: answers with status 200, and other answers.

    Returns (path, number of lines) of both files."""
    paths = [folder / f"{answers_file.stem}.{suffix}" for suffix in ("ok", "failed")]
    counts = [0, 0]
    with answers_file.open("rb") as lines, paths[0].open("wb") as ok, paths[1].open("wb") as failed:
        for line in lines:
            response = msgspec.json.decode(line)["response"]
            is_failed = response is None or response["status_code"] != 200
            counts[is_failed] += 1
            (failed if is_failed else ok).write(line)
    return list(zip(paths, counts, strict=True))
