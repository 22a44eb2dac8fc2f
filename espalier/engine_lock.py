"""A lock that lets one thread at a time use an engine, and protects parts of that thread's work from interruption.

Ctrl-C may come at any line.  Python's garbage collector may also close an abandoned stream at any line, in any thread,
even in a thread that is in the middle of an engine step.
"""

import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class EngineLock:
    """In the block `with lock.run_postponed_after(), lock.lock:`, only this thread uses the engine.  Such a block is
    called a turn.  Turns may nest.

    lock: `with` takes and releases this lock in C, where Ctrl-C cannot interrupt.  A method written in Python could be
    ended by Ctrl-C after it took the lock and before the block begins.  Then all other threads would wait forever.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._in_uninterrupted_turn = False
        self._postponed_actions: deque[Callable[[], None]] = deque()

    @contextmanager
    def run_postponed_after(self) -> Iterator[None]:
        """After the block, runs the actions that `run_when_free` postponed.  Does not take the lock for the block."""
        try:
            yield
        finally:
            self._run_postponed()

    @contextmanager
    def uninterrupted_turn(self) -> Iterator[None]:
        """Takes a turn that nothing interrupts.  Ctrl-C takes effect after the turn.  Must not be nested."""
        with self.run_postponed_after(), self.lock, _defer_interrupts():
            assert not self._in_uninterrupted_turn
            self._in_uninterrupted_turn = True
            try:
                yield
            finally:
                self._in_uninterrupted_turn = False

    def run_when_free(self, action: Callable[[], None]) -> None:
        """Runs `action` in a turn, but never waits for the lock.  If another thread has a turn, or this thread has an
        uninterrupted turn, `action` runs after that turn."""
        self._postponed_actions.append(action)
        self._run_postponed()

    def _run_postponed(self) -> None:
        # A thread that cannot take the lock leaves its action in the queue.  The lock's owner runs the action after its
        # own turn.
        while self._postponed_actions:
            with _defer_interrupts():
                if not self.lock.acquire(blocking=False):
                    return
                try:
                    if self._in_uninterrupted_turn:
                        return
                    # Between the loop's test and this line, another thread may have run the last action.
                    if self._postponed_actions:
                        self._postponed_actions.popleft()()
                finally:
                    self.lock.release()


@contextmanager
def _defer_interrupts() -> Iterator[None]:
    """Delay Ctrl-C to the end of the block.  A second Ctrl-C takes effect at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupts = []
    old_handler = signal.getsignal(signal.SIGINT)

    def record_interrupt(signal_number: int, frame: Any) -> None:
        interrupts.append(signal_number)
        signal.signal(signal.SIGINT, old_handler)

    if not callable(old_handler):
        yield
        return
    signal.signal(signal.SIGINT, record_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, old_handler)
    if interrupts:
        old_handler(interrupts[0], None)
