"""Turns at an engine: one thread at a time, and parts of a turn that nothing may come in between.

Ctrl-C may come at any line.  So may the end of a stream that nobody reads any more: Python's garbage collector closes
it in the middle of whatever a thread does, also of a thread that runs a launch for another one.
"""

import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class EngineLock:
    """`with turn.postponing(), turn.lock:` is a turn.  A thread may take its turn again within its turn.

    lock: `with` takes and releases it in C.  In a method written in Python, Ctrl-C could come after the lock is taken
    or before it is released, and every other thread would wait forever.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._in_whole = False
        self._postponed: deque[Callable[[], None]] = deque()

    @contextmanager
    def postponing(self) -> Iterator[None]:
        """What `run` postpones within the block runs after it.  It does not take the lock."""
        try:
            yield
        finally:
            self._run_postponed()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """A turn that nothing interrupts; Ctrl-C comes after it.  Not to be taken within itself."""
        with self.postponing(), self.lock, _interrupt_deferred():
            assert not self._in_whole
            self._in_whole = True
            try:
                yield
            finally:
                self._in_whole = False

    def run(self, action: Callable[[], None]) -> None:
        """Run `action` in a turn: now, or when this thread's `whole` or another thread's turn is over.  Never waits."""
        self._postponed.append(action)
        self._run_postponed()

    def _run_postponed(self) -> None:
        # Who fails to take the lock leaves its action to the thread that holds it, which comes here after its turn.
        while self._postponed:
            with _interrupt_deferred():
                if not self.lock.acquire(blocking=False):
                    return
                try:
                    if self._in_whole:
                        return
                    # Another thread may have taken the last one, and a third have left a new one meanwhile.
                    if self._postponed:
                        self._postponed.popleft()()
                finally:
                    self.lock.release()


@contextmanager
def _interrupt_deferred() -> Iterator[None]:
    """Delay Ctrl-C to the end of the block.  A second Ctrl-C takes effect at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed = []
    before = signal.getsignal(signal.SIGINT)

    def press(number: int, frame: Any) -> None:
        pressed.append(number)
        signal.signal(signal.SIGINT, before)

    if not callable(before):
        yield
        return
    signal.signal(signal.SIGINT, press)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        before(pressed[0], None)
