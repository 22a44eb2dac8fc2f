"""Reads a batch's input once before anything is sent: counts lines, computes a digest, refuses repeated custom_ids."""

import hashlib
from array import array
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from espalier.batch_jobs.lines import custom_id_of, raw_lines
from espalier.errors import EspalierError, shown

DIGEST_CHARS = 16


@dataclass(frozen=True)
class InputScan:
    """digest: hex digits, of the lines; num_lines: lines that are not blank; last: the number of the last, from 1."""

    path: Path
    digest: str
    num_lines: int
    last: int


def scan_input(path: Path) -> InputScan:
    """Read the whole file.  Raises EspalierError if it cannot be read, has no line, or has a custom_id twice.

    Memory: eight bytes a line, the hash of its custom_id.  A second pass compares the custom_ids with equal hashes.
    """
    if not path.is_file():
        raise EspalierError(f"{path} is not a file; name a file with one request on each line")
    whole, hashes = hashlib.sha256(), array("Q")
    num_lines = last = 0
    try:
        with path.open("rb") as file:
            for number, data in raw_lines(file, path):
                whole.update(b"%d:" % number + data)
                num_lines, last = num_lines + 1, number
                custom_id = custom_id_of(data)
                if custom_id is not None:
                    hashes.append(_hash(custom_id))
        _refuse_equal_ids(path, hashes)
    except OSError as error:
        raise EspalierError(f"{path} cannot be read ({error.strerror}); use a text file") from None
    if not num_lines:
        raise EspalierError(f"{path} has no line; write one request on each line")
    return InputScan(path, whole.hexdigest()[:DIGEST_CHARS], num_lines, last)


def _hash(custom_id: str) -> int:
    return int.from_bytes(hashlib.blake2b(custom_id.encode(), digest_size=8).digest())


def _refuse_equal_ids(path: Path, hashes: array) -> None:
    """Raises EspalierError with the line numbers of the first custom_id that comes twice."""
    # Sorted in place: a copy would double the memory.
    order = np.frombuffer(hashes, dtype=np.uint64)
    order.sort()
    repeated = set(order[1:][order[1:] == order[:-1]].tolist())
    if repeated:
        _compare(path, repeated)


def _compare(path: Path, repeated: Collection[int]) -> None:
    seen: dict[str, int] = {}
    with path.open("rb") as file:
        for number, data in raw_lines(file, path):
            custom_id = custom_id_of(data)
            if custom_id is None or _hash(custom_id) not in repeated:
                continue
            if custom_id in seen:
                raise EspalierError(
                    f"{path}, line {number}: custom_id {shown(custom_id)} is on line {seen[custom_id]} too; "
                    "give each line its own"
                )
            seen[custom_id] = number
