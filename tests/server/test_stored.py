"""The directory of files and batches: every file in it is whole, or is not there."""

from io import BytesIO

import pytest

from espalier.server.stored import Store


class Full(BytesIO):
    """A source that fails after its first bytes, as a disk that is full."""

    def read(self, size: int | None = -1, /) -> bytes:
        if self.tell():
            raise OSError(28, "No space left on device")
        return super().read(1)


def names(store: Store) -> list[str]:
    return sorted(path.name for path in (store.folder / "files").iterdir())


def test_a_file_that_cannot_be_copied_whole_leaves_nothing(tmp_path):
    store = Store(tmp_path)
    store.add(BytesIO(b"whole"), "a.jsonl", "batch_output", "file-1")
    for id in (None, "file-1"):
        with pytest.raises(OSError, match="No space"):
            store.add(Full(b"torn"), "b.jsonl", "batch_output", id)
    assert list(store.files) == ["file-1"]
    assert names(store) == ["file-1", "file-1.json"]
    assert store.content("file-1").read_bytes() == b"whole", "a file is replaced whole"
    store.close()


def test_what_a_killed_server_had_not_finished_is_removed(tmp_path):
    Store(tmp_path).close()
    for folder in ("files", "batches"):
        (tmp_path / folder / "file-1.new").write_bytes(b"torn")
    store = Store(tmp_path)
    assert names(store) == [] and not any((tmp_path / "batches").iterdir())
    store.close()
