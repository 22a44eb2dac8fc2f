"""What child processes inherit: environment variables with which they import their parent's espalier, and signals."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def environment(**changes: str) -> dict[str, str]:
    """Returns a copy of os.environ with changes.

    `python -m` imports from the working directory first, which may hold another espalier, such as a clone.
    """
    is_here = Path(__file__).parents[1] == Path.cwd()
    return {**os.environ, **({} if is_here else {"PYTHONSAFEPATH": "1"}), **changes}


@contextmanager
def signals_blocked(*signals: int) -> Iterator[None]:
    """Blocks signals during the `with` block.  A child process that starts in the block starts with blocked signals.
    Ctrl-C reaches the whole process group, and a child would print a traceback during its imports."""
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
