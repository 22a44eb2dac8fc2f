"""Prepares what a child process inherits: environment variables, and which signals are blocked."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def environment(**changes: str) -> dict[str, str]:
    """Returns the environment variables for a child process: os.environ with `changes`.

    PYTHONSAFEPATH keeps `python -m` in the child from importing another copy of espalier in the working directory.
    """
    is_here = Path(__file__).parents[1] == Path.cwd()
    return {**os.environ, **({} if is_here else {"PYTHONSAFEPATH": "1"}), **changes}


@contextmanager
def signals_blocked(*signals: int) -> Iterator[None]:
    """Blocks signals during the `with` block.  A child process that starts in the block starts with blocked signals.
    Otherwise Ctrl-C, which reaches the whole process group, would make a child print a traceback during its imports."""
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
