"""The output file of a batch: one line for each answer, in the order of the answers.

Each line is one append, so a killed process leaves whole lines and at most one torn line at the end.  The next run cuts
the torn line off.  A loss of power may also lose the lines since the last `sync`; the next run answers them again.
"""

import errno
import fcntl
import os
import threading
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from espalier.batch_jobs.lines import InputScan, LineError, Response, answer_line, id_prefix, raw_lines
from espalier.errors import EspalierError

OK = 200


class Journal:
    """num_answered: input lines with an answer; num_failed: those whose answer is an error or a status other than 200.

    Raises EspalierError if the file cannot be written, is another input's output, or is no batch's output.
    """

    def __init__(self, path: Path, scan: InputScan):
        self.path = path
        self.input = scan
        self.num_answered = 0
        self.num_failed = 0
        self._prefix = id_prefix(scan.digest)
        self._is_answered = bytearray(scan.last + 1)
        self._unsynced = False
        # A sync may run in a thread while the journal is closed.
        self._syncing = threading.Lock()
        self._file = open_alone(path, "batch", "name another file")
        try:
            self._keep_name()
            self._recover()
        except BaseException:
            os.close(self._file)
            raise

    def is_answered(self, number: int) -> bool:
        return bool(self._is_answered[number])

    @property
    def num_left(self) -> int:
        return self.input.num_lines - self.num_answered

    def unanswered(self) -> Generator[tuple[int, bytes]]:
        """(number, bytes) of the input's lines without an answer.  Read as they are needed."""
        with self.input.path.open("rb") as file:
            for number, data in raw_lines(file, self.input.path):
                if not self.is_answered(number):
                    yield number, data

    def append(self, number: int, custom_id: str | None, answer: Response | LineError) -> None:
        """Write the answer of a line.  Raises EspalierError if it cannot be written."""
        data = whole = answer_line(self.input.digest, number, custom_id, answer)
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            # Other lines may still be appended, and only the last line may be torn.
            with suppress(OSError):
                os.ftruncate(self._file, os.fstat(self._file).st_size - (len(whole) - len(data)))
            raise EspalierError(
                f"{self.path} cannot be written ({error.strerror}); make room and run it again"
            ) from None
        self._unsynced = True
        self._count(number, isinstance(answer, LineError) or answer.status_code != OK)

    def sync(self) -> None:
        """Wait until the lines are on the disk.  May run in a thread.  Raises EspalierError if they cannot be kept."""
        with self._syncing:
            if not self._unsynced:
                return
            self._unsynced = False
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

    def _keep_name(self) -> None:
        try:
            sync_folder(self.path.parent)
        except OSError as error:
            raise EspalierError(f"{self.path.parent} cannot be synced ({error.strerror}); use another disk") from None

    def _count(self, number: int, failed: bool) -> None:
        self._is_answered[number] = 1
        self.num_answered += 1
        self.num_failed += failed

    def _recover(self) -> None:
        """Read what an earlier run has written, and cut off a torn last line."""
        with self.path.open("rb") as file:
            offset = 0
            for count, data in enumerate(file, 1):
                if not data.endswith(b"\n") and self._is_torn(data):
                    os.ftruncate(self._file, offset)
                    break
                self._take(count, data)
                offset += len(data)

    def _is_torn(self, data: bytes) -> bool:
        """Whether bytes without an end are the start of a line of this output.  A lost block reads as zeros."""
        start, written = f'{{"id":"{self._prefix}'.encode(), data.rstrip(b"\0")
        return written.startswith(start) or start.startswith(written)

    def _take(self, count: int, data: bytes) -> None:
        try:
            line: Any = msgspec.json.decode(data)
            name, response = line["id"], line["response"]
            number = int(name.rpartition("_")[2])
            failed = response is None or response["status_code"] != OK
        except (msgspec.DecodeError, TypeError, KeyError, ValueError, AttributeError):
            raise EspalierError(
                f"{self.path}, line {count}: this is not a batch's output; name another file for the output"
            ) from None
        if not name.startswith(self._prefix) or not 0 < number <= self.input.last:
            raise EspalierError(
                f"{self.path} has answers to another input than {self.input.path}, or the input has changed since; "
                "name another file for the output"
            )
        if not self.is_answered(number):
            self._count(number, failed)


def open_alone(path: Path, writer: str, remedy: str) -> int:
    """The file, open for appending and locked against another process.  Raises EspalierError.

    writer: what the other process is; remedy: what to do if the file cannot be opened.
    """
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise EspalierError(f"{path} cannot be written ({error.strerror}); {remedy}") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN):
            raise EspalierError(f"{path} is being written by another {writer}; wait for it, or end it") from None
        raise EspalierError(f"{path} cannot be locked ({error.strerror}); use a local file system") from None
    return file


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk: a file's fsync does not cover its name.  Raises OSError."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems cannot sync a folder
            raise
    finally:
        os.close(handle)
