"""The folder of --learn: a sample of the served texts, the drafts learned from it, and digests of target and draft.

The sample has only token ids, 4 bytes a token.  A training also needs hidden states and the target's distribution,
hundreds of kilobytes a token.  The trainer computes these two again.  A crash leaves no incomplete file in the sample.
trained.json says how many texts the trainings have read, so a restarted server knows which texts are new.
"""

import fcntl
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import numpy as np

from espalier.config import check_fields, option
from espalier.errors import EspalierError
from espalier.train.work import replace_file, require_folder

DISK_REMEDY = "free some space there"
# One of HELD_BACK_INTERVAL prompts is held back: texts with this prompt measure drafts, and do not train drafts.
# Held-back texts get the same share of the bytes.
HELD_BACK_INTERVAL = 8
TEXT_KINDS = ("train", "held-back")
NONE_TRAINED = MappingProxyType(dict.fromkeys(TEXT_KINDS, 0))
# A file has at most 1 / NUM_FILES of the bytes of its kind.  The oldest files are removed until a new file fits.
NUM_FILES = 16
# Texts with shorter outputs are not kept, because they say little about a draft.
MIN_OUTPUT_TOKENS = 16
HEADER_LENGTH = 2
MANIFEST = "manifest.json"


def flag_of(field: str) -> str:
    """Returns the flag of a field of LearnConfig."""
    return "--learn" if field == "folder" else f"--learn-{field}"


@dataclass(frozen=True)
class LearnConfig:
    """The options of `espalier serve --learn`.  Raises EspalierError for a bad value."""

    folder: str
    bytes: int = option("largest size of the kept sample", 64 * 2**20, low=2**16)
    tokens: int = option("tokens of new traffic after which the draft is trained", 2**16, low=2**10)
    seconds: int = option("longest time of the steps of a training", 600, low=1)

    def __post_init__(self) -> None:
        check_fields(self, flag_of)


@dataclass(frozen=True)
class Text:
    """A served text.  tokens: the ids of prompt and output.  output_start: the index of the output's first token."""

    tokens: np.ndarray
    output_start: int


class KeptTexts:
    """The sample of served texts, in files of int32.  A text is (length of the prompt, length of the text, tokens).
    The number in a file's name is the number of texts of its kind that were kept before.

    `add` only queues; `flush` writes.  Different threads may call `add` and `flush`.
    max_bytes: for each kind of texts, the maximum size of its files and its queue together.
    Kinds are "train" and "held-back".  num_trained: for each kind, how many texts trainings had read at the start.
    texts_per_kind: for each kind, how many texts were kept since the folder was made.  num_tokens: the tokens of all
    texts after the first num_trained of each kind.  num_held_back_tokens: the output tokens of the held-back ones."""

    def __init__(self, folder: Path, max_bytes: int, num_trained: Mapping[str, int] = NONE_TRAINED) -> None:
        """Raises EspalierError if a file with new texts is damaged."""
        self.folder = folder
        held_back = max_bytes // HELD_BACK_INTERVAL
        self.max_bytes = {"train": max_bytes - held_back, "held-back": held_back}
        self.texts_per_kind, self.num_tokens, self.num_held_back_tokens = dict(num_trained), 0, 0
        self._queued: dict[str, list[np.ndarray]] = {kind: [] for kind in TEXT_KINDS}
        self._lock = threading.Lock()
        folder.mkdir(mode=0o700, exist_ok=True)
        for kind in TEXT_KINDS:
            self._count_written(kind, num_trained[kind])

    def add(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Queue a text (token ids).  The text is left out if its output is too short, or if the queue is full."""
        if len(output) < MIN_OUTPUT_TOKENS:
            return
        row = np.array([len(prompt), len(prompt) + len(output), *prompt, *output], dtype=np.int32)
        # A digest of the prompt decides the kind, so texts with equal prompts are of the same kind.
        digest = hashlib.blake2b(row[HEADER_LENGTH : HEADER_LENGTH + len(prompt)].tobytes(), digest_size=1).digest()
        kind = TEXT_KINDS[digest[0] % HELD_BACK_INTERVAL == 0]
        with self._lock:
            if self._queued_bytes(kind) + row.nbytes <= self.max_bytes[kind] // NUM_FILES:
                self._queued[kind].append(row)
                self._count_texts(kind, [row], 1)

    def must_flush(self) -> bool:
        """Whether the queued texts of some kind would fill half a file."""
        return any(self._queued_bytes(kind) * 2 * NUM_FILES >= self.max_bytes[kind] for kind in TEXT_KINDS)

    def flush(self) -> None:
        """Writes the queued texts, and removes the oldest files beyond the limit.  Raises OSError if the texts
        of a kind cannot be written; they are lost and no longer counted.  Raises EspalierError for a damaged file."""
        for kind in TEXT_KINDS:
            with self._lock:
                rows, self._queued[kind] = self._queued[kind], []
                num_before = self.texts_per_kind[kind] - len(rows)
            try:
                self._write(kind, rows, num_before)
            except (OSError, EspalierError):
                with self._lock:
                    self._count_texts(kind, rows, -1)
                raise

    def _write(self, kind: str, rows: Sequence[np.ndarray], num_before: int) -> None:
        """Adds rows, one for each text, to the newest file, or to a new file if they do not fit there.
        num_before: how many texts of this kind were kept before these."""
        if not rows:
            return
        files, target = self.files(kind), self.folder / f"{kind}.{num_before:08}.npy"
        num_bytes = sum(row.nbytes for row in rows)
        if files and files[-1].stat().st_size + num_bytes <= self.max_bytes[kind] // NUM_FILES:
            target = files.pop()
            rows = [_load_rows(target), *rows]
        room = self.max_bytes[kind] * (NUM_FILES - 1) // NUM_FILES - sum(row.nbytes for row in rows) - 256
        while files and sum(file.stat().st_size for file in files) > room:
            files.pop(0).unlink()
        with replace_file(target, DISK_REMEDY) as path, path.open("wb") as file:
            np.save(file, np.concatenate(rows))
            file.flush()
            os.fsync(file.fileno())  # else a file may be empty under its name after a power failure

    def _count_written(self, kind: str, num_trained: int) -> None:
        """Counts the texts in the files of a kind.
        num_trained: how many texts of this kind the trainings have read, those of deleted files included."""
        for file in reversed(self.files(kind)):
            num_before, texts = _num_texts_before(file), list(read_texts([file]))
            num_kept = num_before + len(texts)
            self.texts_per_kind[kind] = max(self.texts_per_kind[kind], num_kept)
            new_texts = texts[: max(0, num_kept - num_trained)]
            self.num_tokens += sum(len(text.tokens) for text in new_texts)
            if kind == "held-back":
                self.num_held_back_tokens += sum(len(text.tokens) - text.output_start for text in new_texts)
            if num_before <= num_trained:
                break

    def _count_texts(self, kind: str, rows: Sequence[np.ndarray], sign: int) -> None:
        """Adds texts to the counts, or subtracts them.  rows: one for each text.  sign: 1 or -1."""
        self.texts_per_kind[kind] += sign * len(rows)
        self.num_tokens += sign * sum(int(row[1]) for row in rows)
        self.num_held_back_tokens += sign * sum(int(row[1] - row[0]) for row in rows if kind == "held-back")

    def files(self, kind: str) -> list[Path]:
        """Returns the files of one kind of texts, the oldest first.  kind: "train" or "held-back"."""
        return sample_files(self.folder, kind)

    @property
    def num_bytes(self) -> int:
        """Bytes of all files and of the queued texts."""
        files = sum(file.stat().st_size for kind in TEXT_KINDS for file in self.files(kind))
        return files + sum(self._queued_bytes(kind) for kind in TEXT_KINDS)

    def _queued_bytes(self, kind: str) -> int:
        return sum(row.nbytes for row in self._queued[kind])


def _num_texts_before(file: Path) -> int:
    """Returns the number in a file's name: how many texts of the file's kind were kept before its first text."""
    return int(file.stem.rpartition(".")[2])


def sample_files(folder: Path, kind: str) -> list[Path]:
    """Returns the files of a kind of texts, the oldest first."""
    return sorted(folder.glob(f"{kind}.*.npy"), key=_num_texts_before)


def _load_rows(file: Path) -> np.ndarray:
    """Returns a file's numbers, [N] int32.  Raises EspalierError for a damaged file."""
    with suppress(ValueError, EOFError):
        numbers: np.ndarray = np.load(file)
        if numbers.dtype == np.int32 and numbers.ndim == 1:
            return numbers
    raise _damage_error(file)


def _damage_error(file: Path) -> EspalierError:
    return EspalierError(f"{file} is no whole file of texts; delete it")


def read_texts(files: Sequence[Path]) -> Iterator[Text]:
    """Yields the texts of a sample's files, the newest first.  files: the oldest first.
    Raises EspalierError for a damaged file."""
    for file in reversed(files):
        try:
            rows, begin, texts = _load_rows(file), 0, []
        except FileNotFoundError:
            continue  # the server removes the oldest files while the trainer reads
        while begin < len(rows):
            prompt_length, length = int(rows[begin]), int(rows[begin + 1]) if begin + 1 < len(rows) else -1
            end = begin + HEADER_LENGTH + length
            if not (0 <= prompt_length <= length and end <= len(rows)):
                raise _damage_error(file)
            texts.append(Text(rows[begin + HEADER_LENGTH : end], prompt_length))
            begin = end
        yield from reversed(texts)


@dataclass(frozen=True)
class Manifest:
    """The facts about a learned draft.  digest: the digest of the draft's files.

    given, before, after: accept lengths on the same held-back texts, of the draft given at startup, of the draft that
    was served during the training, and of this draft.  num_tokens, seconds: the size and the time of the training."""

    digest: str
    given: float
    before: float
    after: float
    num_tokens: int
    seconds: float


class LearnFolder:
    """The folder of --learn, locked for this process.

    origin: digests of the target and of the draft given at startup.
    Raises EspalierError if the folder belongs to another model, is in use, or holds other files."""

    def __init__(self, path: Path, origin: Mapping[str, str]) -> None:
        self.path = path
        require_folder("--learn", path)
        origin_file, names = path / "learn.json", {each.name for each in path.iterdir()}
        if "learn.json" not in names and names - {"lock"}:
            raise EspalierError(f"--learn {path} holds other files; give a new folder")
        self._lock = _lock_folder(path)
        try:
            _require_origin(origin_file, origin)
        except BaseException:
            self.close()
            raise
        self.drafts = path / "drafts"
        self.drafts.mkdir(mode=0o700, exist_ok=True)

    def close(self) -> None:
        self._lock.close()

    def served_draft(self) -> Path | None:
        """Returns the learned draft to serve; None for the draft given at startup.  Raises EspalierError if the learned
        draft is damaged."""
        try:
            name = json.loads((self.path / "served.json").read_text())["draft"]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError):
            raise EspalierError(f"{self.path / 'served.json'} cannot be read; delete it") from None
        read_manifest(self.drafts / str(name))
        return self.drafts / str(name)

    def num_trained(self) -> dict[str, int]:
        """Returns for each kind how many kept texts the trainings have read.  Raises EspalierError."""
        file = self.path / "trained.json"
        try:
            saved_counts = json.loads(file.read_text())
            counts = {kind: saved_counts[kind] for kind in TEXT_KINDS}
        except FileNotFoundError:
            return dict(NONE_TRAINED)
        except (OSError, ValueError, KeyError, TypeError):
            counts = {}
        if not counts or not all(type(count) is int and count >= 0 for count in counts.values()):
            raise EspalierError(f"{file} cannot be read; delete it, and all kept texts count as new")
        return counts

    def record_trained(self, num_trained: Mapping[str, int]) -> None:
        """Records what `num_trained` returns after a restart.  Raises OSError."""
        _write_json(self.path / "trained.json", dict(num_trained))

    def new_draft_path(self) -> Path:
        numbers = [int(each.name) for each in self.drafts.iterdir() if each.name.isdecimal()]
        return self.drafts / str(max(numbers, default=0) + 1)

    def record_served(self, draft: Path) -> None:
        """Records the draft to serve after a restart, and removes all other learned drafts.  Raises OSError.

        draft: a learned draft, or the draft given at startup, which is outside of this folder."""
        if draft.parent == self.drafts:
            _write_json(self.path / "served.json", {"draft": draft.name})
        else:
            (self.path / "served.json").unlink(missing_ok=True)
        for old_draft in self.drafts.iterdir():
            if old_draft != draft:
                remove_draft(old_draft)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    with replace_file(path, DISK_REMEDY) as unfinished, unfinished.open("w") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())  # else the file may be empty after a power failure


def _lock_folder(path: Path) -> IO[str]:
    """Returns the folder's lock file, locked against other servers.  Raises EspalierError."""
    lock = (path / "lock").open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise EspalierError(f"--learn {path} is in use by another server; give another folder") from None
    return lock


def _require_origin(origin_file: Path, origin: Mapping[str, str]) -> None:
    """Raises EspalierError unless the file records `origin` (see LearnFolder).  A missing file is written."""
    if not origin_file.exists():
        _write_json(origin_file, dict(origin))
        return
    try:
        saved_origin = dict(json.loads(origin_file.read_text()))
    except (OSError, ValueError, TypeError):
        raise EspalierError(f"{origin_file} cannot be read; give another folder for --learn") from None
    for model_role, digest in origin.items():
        if saved_origin.get(model_role) != digest:
            raise EspalierError(f"--learn {origin_file.parent} was made with another {model_role}; give another folder")


def remove_draft(draft: Path) -> None:
    with suppress(OSError):
        shutil.rmtree(draft)


def publish_draft(
    unfinished: Path, draft: Path, lengths: tuple[float, float, float], num_tokens: int, seconds: float
) -> None:
    """Write the manifest of a complete draft, and move the draft from the folder `unfinished` to the folder `draft`.
    lengths: (given, before, after) of Manifest.  seconds: the time of the training.  Raises OSError."""
    manifest = Manifest(_digest(unfinished), *lengths, num_tokens, seconds)
    (unfinished / MANIFEST).write_text(json.dumps(asdict(manifest), indent=1))
    for file in unfinished.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
    unfinished.rename(draft)


def read_manifest(draft: Path) -> Manifest:
    """Returns a draft's manifest.  Raises EspalierError if the digest of the draft's files is not the manifest's."""
    with suppress(OSError, ValueError, TypeError):
        manifest = Manifest(**json.loads((draft / MANIFEST).read_text()))
        if manifest.digest == _digest(draft):
            return manifest
    raise EspalierError(f"{draft} is no whole draft: its files are not as its {MANIFEST} says")


def _digest(draft: Path) -> str:
    """Returns the digest of the names and bytes of all files in the folder `draft`, except the manifest."""
    digest = hashlib.sha256()
    for file in sorted(draft.iterdir()):
        if file.name != MANIFEST:
            with file.open("rb") as opened:
                digest.update(f"{file.name} {hashlib.file_digest(opened, 'sha256').hexdigest()} ".encode())
    return digest.hexdigest()
