"""The directory of files and batches: every file in it is whole, or is not there."""

import os
from io import BytesIO
from pathlib import Path

import pytest

from espalier.server.batch_store import Batch, BatchStore


class Full(BytesIO):
    """A source that fails after its first bytes, as a disk that is full."""

    def read(self, size: int | None = -1, /) -> bytes:
        if self.tell():
            raise OSError(28, "No space left on device")
        return super().read(1)


@pytest.fixture
def on_disk(monkeypatch):
    """What would be there after a loss of power: the paths whose names were synced after they were given."""
    synced, replace, fsync = set(), os.replace, os.fsync

    def renamed(source, target):
        replace(source, target)
        synced.discard(target)

    def sync(handle):
        fsync(handle)
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        synced.update(path.iterdir() if path.is_dir() else ())

    monkeypatch.setattr(os, "replace", renamed)
    monkeypatch.setattr(os, "fsync", sync)
    return synced


def names(store: BatchStore) -> list[str]:
    return sorted(path.name for path in (store.folder / "files").iterdir())


def test_a_file_that_cannot_be_copied_whole_leaves_nothing(tmp_path):
    store = BatchStore(tmp_path)
    store.add_file(BytesIO(b"whole"), "a.jsonl", "batch_output", "file-1")
    for id in (None, "file-1"):
        with pytest.raises(OSError, match="No space"):
            store.add_file(Full(b"torn"), "b.jsonl", "batch_output", id)
    with pytest.raises(UnicodeError):  # the description fails, after the content
        store.add_file(BytesIO(b"torn"), "\ud800", "batch")
    assert list(store.files) == ["file-1"]
    assert names(store) == ["file-1", "file-1.json"]
    assert store.content_path("file-1").read_bytes() == b"whole", "a file is replaced whole"
    store.close()


def test_what_a_killed_server_had_not_finished_is_removed(tmp_path):
    store = BatchStore(tmp_path)
    file = store.add_file(BytesIO(b"whole"), "a.jsonl", "batch")
    store.save_batch(Batch("batch_1", "/v1/completions", file.id, 0, 0))
    store.answers_path("batch_1").write_bytes(b"{}")
    store.save_batch(Batch("batch_0", "/v1/completions", file.id, 0, 0, status="completed"))
    store.close()
    kept = set(tmp_path.rglob("*"))
    left = ["files/file-1.new", "files/file-2", "batches/batch_1.new", "batches/batch_1.ok", "batches/batch_2.jsonl"]
    left.append("batches/batch_0.jsonl")
    for name in left:
        (tmp_path / name).write_bytes(b"torn")
    store = BatchStore(tmp_path)
    assert set(tmp_path.rglob("*")) == kept
    store.close()


def test_what_was_acknowledged_outlives_a_loss_of_power(tmp_path, on_disk):
    """A file's own fsync does not keep its name."""
    store = BatchStore(tmp_path)
    file = store.add_file(BytesIO(b"whole"), "a.jsonl", "batch")
    store.save_batch(Batch("batch_1", "/v1/completions", file.id, 0, 0))
    kept = {tmp_path / name for name in ("files", "batches")}
    kept |= {store.content_path(file.id), tmp_path / "files" / f"{file.id}.json", tmp_path / "batches" / "batch_1.json"}
    assert kept <= on_disk
    store.close()
