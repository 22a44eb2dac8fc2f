"""The directory of files and batches (--batch-dir).  What it holds outlives the server.

`files/ID.json` describes a file and `files/ID` is its content; `batches/ID.json` describes a batch and
`batches/ID.jsonl` holds the answers that it has so far.
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
from typing import BinaryIO, TypeVar

import msgspec

from espalier.batch_jobs.journal import sync_folder
from espalier.errors import EspalierError
from espalier.server.batch_objects import Batch, StoredFile

log = logging.getLogger("espalier.server")
T = TypeVar("T", StoredFile, Batch)
# The end of the name of a file that is being written.
UNFINISHED = ".new"


def new_id(kind: str) -> str:
    """Ids sort by the time at which they were made."""
    return f"{kind}{time.time_ns():016x}{uuid.uuid4().hex[:16]}"


class Store:
    """files, batches: by id, the oldest first.  Raises EspalierError if the directory cannot be used."""

    def __init__(self, folder: Path):
        self.folder = folder
        try:
            for inner in ("files", "batches"):
                (folder / inner).mkdir(parents=True, exist_ok=True)
            sync_folder(folder)
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for unfinished in folder.glob(f"*/*{UNFINISHED}"):
                unfinished.unlink()
        except BlockingIOError:
            raise EspalierError(f"--batch-dir {folder} is used by another server; name another directory") from None
        except OSError as error:
            why = f"--batch-dir {folder} cannot be used ({error.strerror}); name another directory"
            raise EspalierError(why) from None
        self.files = self._read(folder / "files", StoredFile)
        self.batches = self._read(folder / "batches", Batch)
        self._remove_orphans()

    def _read(self, folder: Path, kind: type[T]) -> dict[str, T]:
        try:
            found = [msgspec.json.decode(path.read_bytes(), type=kind) for path in folder.glob("*.json")]
        except (OSError, msgspec.DecodeError) as error:
            raise EspalierError(f"--batch-dir {folder} has a file that cannot be read: {error}; remove it") from None
        return {each.id: each for each in sorted(found, key=lambda each: (each.created_at, each.id))}

    def _remove_orphans(self) -> None:
        """Remove what a killed server left: content without a description, which nothing lists or removes."""
        kept = set(self.files) | {f"{id}.jsonl" for id in self.batches}
        for path in (*self.folder.glob("files/file-*"), *self.folder.glob("batches/batch_*")):
            if path.suffix != ".json" and path.name not in kept:
                log.warning("%s is left over from a server that was killed; it is removed", path)
                with suppress(OSError):
                    path.unlink()

    def list_files(self) -> list[StoredFile]:
        """At once: a thread may add one."""
        return list(self.files.values())

    def content(self, id: str) -> Path:
        return self.folder / "files" / id

    def answers(self, id: str) -> Path:
        return self.folder / "batches" / f"{id}.jsonl"

    def add(self, source: BinaryIO, filename: str, purpose: str, id: str | None = None) -> StoredFile:
        """Copy a file into the store, whole or not at all.  May run beside the event loop, in a thread.

        id: None for a new one; of a file that is there, it replaces that one.  Raises OSError.
        """
        id = id or new_id("file-")
        with _whole_file(self.content(id)) as copy:
            shutil.copyfileobj(source, copy)
            size = copy.tell()
        try:
            file = StoredFile(id, size, int(time.time()), filename, purpose)
            _write(self.folder / "files" / f"{id}.json", msgspec.json.encode(file))
        except BaseException:
            if id not in self.files:
                self.content(id).unlink()
            raise
        self.files[id] = file
        return file

    def remove(self, id: str) -> None:
        """Delete a file.  Its description goes first: a content without one is nobody's."""
        del self.files[id]
        (self.folder / "files" / f"{id}.json").unlink()
        self.content(id).unlink()

    def save(self, batch: Batch) -> None:
        _write(self.folder / "batches" / f"{batch.id}.json", msgspec.json.encode(batch))
        self.batches[batch.id] = batch

    def close(self) -> None:
        os.close(self._lock)


def _write(path: Path, data: bytes) -> None:
    with _whole_file(path) as file:
        file.write(data)


@contextmanager
def _whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file that becomes `path` at the end of the block, and is on the disk then.

    If the block fails, `path` stays as it was.
    """
    unfinished = path.with_name(path.name + UNFINISHED)
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


def split(answers: Path, folder: Path) -> list[tuple[Path, int]]:
    """Copy a batch's answers into two new files: those with status 200, and all others.  (file, lines) of each."""
    names = [folder / f"{answers.stem}.{kind}" for kind in ("ok", "failed")]
    counts = [0, 0]
    with answers.open("rb") as lines, names[0].open("wb") as ok, names[1].open("wb") as failed:
        for line in lines:
            response = msgspec.json.decode(line)["response"]
            is_failed = response is None or response["status_code"] != 200
            counts[is_failed] += 1
            (failed if is_failed else ok).write(line)
    return list(zip(names, counts, strict=True))
