"""A lock that lets one thread at a time use an engine, and protects parts of its work from interruption.

Ctrl-C may come at any line.  Python's garbage collector may also close an abandoned stream at any line, in any thread.
That thread may be running a launch for another thread.
"""

import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class EngineLock:
    """`with lock.run_postponed_after(), lock.lock:` is a turn: only this thread uses the engine.  Turns may nest.

    lock: the `with` statement takes and releases this lock in C.  In a method written in Python, Ctrl-C could come
    after the lock is taken or before it is released, and every other thread would wait forever.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._is_uninterrupted = False
        self._postponed: deque[Callable[[], None]] = deque()

    @contextmanager
    def run_postponed_after(self) -> Iterator[None]:
        """Runs, after the block, the actions that `run_when_free` postponed during the block.  Does not take the
        lock."""
        try:
            yield
        finally:
            self._run_postponed()

    @contextmanager
    def uninterrupted_turn(self) -> Iterator[None]:
        """Takes a turn that nothing interrupts.  Ctrl-C takes effect after the turn.  Must not be nested."""
        with self.run_postponed_after(), self.lock, _defer_interrupts():
            assert not self._is_uninterrupted
            self._is_uninterrupted = True
            try:
                yield
            finally:
                self._is_uninterrupted = False

    def run_when_free(self, action: Callable[[], None]) -> None:
        """Runs `action` in a turn, without waiting: now, or after the turn that keeps it from running now."""
        self._postponed.append(action)
        self._run_postponed()

    def _run_postponed(self) -> None:
        # A thread that fails to take the lock leaves its action to the lock's owner, which comes here after its turn.
        while self._postponed:
            with _defer_interrupts():
                if not self.lock.acquire(blocking=False):
                    return
                try:
                    if self._is_uninterrupted:
                        return
                    # Another thread may have run the last action, and a third may have added a new one meanwhile.
                    if self._postponed:
                        self._postponed.popleft()()
                finally:
                    self.lock.release()


@contextmanager
def _defer_interrupts() -> Iterator[None]:
    """Delay Ctrl-C to the end of the block.  A second Ctrl-C takes effect at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupts = []
    before = signal.getsignal(signal.SIGINT)

    def record_interrupt(signal_number: int, frame: Any) -> None:
        interrupts.append(signal_number)
        signal.signal(signal.SIGINT, before)

    if not callable(before):
        yield
        return
    signal.signal(signal.SIGINT, record_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupts:
        before(interrupts[0], None)
