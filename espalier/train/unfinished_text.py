"""The text that the target has generated so far (unfinished own text): a file to which batches are appended.

The first line has the target, data and settings of the text.  Every other line is a batch.  After a killed process, the
last line may be incomplete.  The next run removes that line and generates the missing batches.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from espalier.batch_jobs.files import open_locked
from espalier.errors import EspalierError, one_line
from espalier.train.work import require_same_origin


@dataclass(frozen=True)
class TextBatch:
    """A batch of prompts with continuations.  firsts: the length of each prompt, which is the index where its
    continuation begins.  sampled: True for sampled continuations, False for greedy ones."""

    firsts: list[int]
    sampled: bool
    texts: list[np.ndarray]


class UnfinishedText:
    """The open file of unfinished text, locked against other processes.

    batches: the batches in the file, in the order in which they were made.  made_from: the target, data and settings
    that determine the text, by flag.
    Raises EspalierError if another process has the file open, if the file cannot be read, or if its made_from differs.
    """

    def __init__(self, path: Path, made_from: Mapping[str, str | None]) -> None:
        self.path = path
        self.batches: list[TextBatch] = []
        self._file = open_locked(path, "trainer", "give another --work")
        try:
            self._recover(made_from)
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> UnfinishedText:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._file)

    @property
    def num_texts(self) -> int:
        return sum(len(batch.texts) for batch in self.batches)

    def append(self, batch: TextBatch) -> None:
        """Appends a batch.  Raises OSError if writing fails; earlier batches stay in the file."""
        self._write({**vars(batch), "texts": [text.tolist() for text in batch.texts]})
        self.batches.append(batch)

    def _write(self, record: Mapping[str, Any]) -> None:
        """Appends a record as one line of JSON, and waits until it is on the disk.  Raises OSError."""
        data = json.dumps(record).encode() + b"\n"
        try:
            while data:
                data = data[os.write(self._file, data) :]
            os.fsync(self._file)
        except OSError as error:
            remedy = "free some space there, and start again to go on"
            raise OSError(f"{self.path} cannot be written ({error.strerror}); {remedy}") from None

    def _recover(self, made_from: Mapping[str, str | None]) -> None:
        """Reads the batches in the file, and removes a damaged last line.  made_from: see the class."""
        lines = self.path.read_bytes().splitlines(keepends=True)
        if lines and not _is_whole(lines[-1]):
            os.ftruncate(self._file, sum(map(len, lines[:-1])))
            lines.pop()
        if not lines:
            self._write(made_from)
            return
        try:
            first, *records = map(json.loads, lines)
            self.batches += [
                TextBatch(list(each["firsts"]), each["sampled"], [np.array(text, np.int32) for text in each["texts"]])
                for each in records
            ]
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            raise EspalierError(f"{self.path} cannot be read ({one_line(error)}); delete it to make it anew") from None
        said = first if isinstance(first, dict) else None
        require_same_origin(self.path, said, made_from, "go on with the command that began it, or give another --work")


def _is_whole(line: bytes) -> bool:
    """Whether a line is complete.  After a power failure, a line may have its newline, but lack earlier bytes."""
    try:
        json.loads(line)
    except ValueError:
        return False
    return line.endswith(b"\n")
