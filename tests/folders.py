"""Folders that one test makes and later tests read, such as random checkpoints.  They go with the run."""

import atexit
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

_roots: list[Path] = []


@contextmanager
def under(root: Path) -> Iterator[None]:
    """Make new folders below this one, which is removed at the end."""
    _roots.append(root)
    try:
        yield
    finally:
        _roots.remove(root)
        rmtree(root, ignore_errors=True)


def new_folder(prefix: str) -> Path:
    """An empty folder.  Scripts, and tests while they are collected, have no root: then the process removes it."""
    folder = Path(mkdtemp(prefix=prefix, dir=_roots[-1] if _roots else None))
    if not _roots:
        atexit.register(rmtree, folder, ignore_errors=True)
    return folder
