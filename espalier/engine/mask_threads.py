"""Threads that ask grammars, and are left behind where a grammar takes too long.

xgrammar cannot be interrupted, and releases the GIL.  So the engine waits for a thread.  A thread that has used
GRAMMAR_S for one request is abandoned: it goes on at a low priority until its call returns, another thread takes its
place, and what it finds is dropped.
"""

import itertools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from espalier.cores import available_cores, lower_priority

# The processor time that the grammar of one request may take in a round, half of what it took in the round before
# included.  Then the engine goes on without it.  Ordinary grammars take less than a hundredth.
GRAMMAR_S = 0.25
# While so many abandoned threads run, requests with a grammar are refused.
MAX_ABANDONED = 4
# Threads at once, abandoned ones not counted.
MAX_THREADS = 8

# The result of a piece of work whose thread was abandoned.
TOO_SLOW: Any = object()
Work = Callable[[int], Any]


class MaskThreads:
    """A pool of threads that can be abandoned.  limit_s: the processor time that one request may take in a round."""

    def __init__(self, limit_s: float = GRAMMAR_S):
        self.limit_s = limit_s
        self.threads: set[_MaskThread] = set()
        self.queue = _Queue()
        self._end = weakref.finalize(self, self.queue.end)

    @property
    def num_abandoned(self) -> int:
        """Abandoned threads that still run."""
        return self.queue.num_abandoned

    def run(
        self, work: Work, count: int, *, at_once: bool = False, limits_s: Sequence[float] | None = None
    ) -> list[Any]:
        """work(0) to work(count - 1), each its result or TOO_SLOW.  Raises what a piece of work raises.

        limits_s: of each piece of work, by default limit_s.  at_once: several threads begin; else one does, and others
        help once one is too slow.
        """
        call = _Call(work, count, limits_s or [self.limit_s] * count)
        self._send(call, min(count, available_cores()) if at_once else min(count, 1))
        wait_s = max(min(call.limits_s, default=0.0), self.limit_s / 10)
        while call.left and not call.ended.acquire(timeout=wait_s):
            wait_s = self._abandon_slow(call)
        if call.error is not None:
            raise call.error
        return call.results

    def _send(self, call: "_Call", num_threads: int) -> None:
        for _ in range(min(num_threads, MAX_THREADS)):
            self.queue.put(call)
        while len(self.threads) < min(num_threads, MAX_THREADS):
            thread = _MaskThread(self.queue)
            self.threads.add(thread)
            thread.start()

    def _abandon_slow(self, call: "_Call") -> float:
        """Abandon the threads that took too long.  Returns the seconds until another thread may have."""
        wait_s = self.limit_s
        with call.lock:
            for thread in [each for each in self.threads if each.job is not None and each.job[0] is call]:
                left_s = thread.left_s()
                if left_s <= 0:
                    self._abandon(thread)
                    call.left -= 1
                else:
                    # At least a tenth of the limit, because a thread that waits for a core uses no time.
                    wait_s = min(wait_s, max(left_s, self.limit_s / 10))
        self._send(call, call.left)
        return wait_s

    def _abandon(self, thread: "_MaskThread") -> None:
        self.threads.remove(thread)
        self.queue.abandon(thread)
        assert thread.native_id is not None
        lower_priority(thread.native_id)

    def close(self) -> None:
        """End the threads.  Abandoned ones end by themselves.  Idempotent."""
        self._end()


class _Queue:
    """What the threads share.  They do not hold the pool, so that one that nobody closed ends with its owner.

    Threads wait in a pipe.  To wake one takes half as long as with queue.SimpleQueue, because writing releases the GIL.
    num_threads: those that take calls; num_abandoned: abandoned threads that still run.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.waiting: deque[_Call | None] = deque()
        self.ends: tuple[int, int] | None = None
        self.num_threads = self.num_abandoned = 0

    def put(self, call: "_Call | None") -> None:
        """Give one thread a call; None ends it."""
        if self.ends is None:
            self.ends = os.pipe()
        self.waiting.append(call)
        os.write(self.ends[1], b".")

    def get(self) -> "_Call | None":
        assert self.ends is not None
        os.read(self.ends[0], 1)
        return self.waiting.popleft()

    def enter(self) -> None:
        with self.lock:
            self.num_threads += 1

    def leave(self) -> None:
        """A thread ends.  The last one closes the pipe."""
        with self.lock:
            self.num_threads -= 1
            if not self.num_threads:
                self._close()

    def _close(self) -> None:
        for end in self.ends or ():
            os.close(end)
        self.ends = None

    def abandon(self, thread: "_MaskThread") -> None:
        thread.is_abandoned = True
        with self.lock:
            self.num_threads -= 1
            self.num_abandoned += 1

    def forget(self) -> None:
        """An abandoned thread ends."""
        with self.lock:
            self.num_abandoned -= 1

    def end(self) -> None:
        """End the threads that take calls."""
        if not self.num_threads:
            self._close()
        for _ in range(self.num_threads):
            self.put(None)


class _Call:
    """One call of MaskThreads.run.

    places: the numbers that no thread has taken; left: how many have no result; lock: of what a thread leaves here.
    """

    def __init__(self, work: Work, count: int, limits_s: Sequence[float]):
        self.work = work
        self.limits_s = limits_s
        self.places = itertools.count()
        self.count = count
        self.left = count
        self.results: list[Any] = [TOO_SLOW] * count
        self.error: BaseException | None = None
        self.lock = threading.Lock()
        self.ended = threading.Lock()
        self.ended.acquire()


class _MaskThread(threading.Thread):
    """A thread of the pool.  job: (call, the thread's time at which it is too slow) of its piece of work."""

    def __init__(self, queue: _Queue):
        # A daemon: the interpreter does not wait for it.
        super().__init__(name="espalier-masks", daemon=True)
        self.queue = queue
        self.is_abandoned = False
        self.job: tuple[_Call, float] | None = None
        queue.enter()

    def left_s(self) -> float:
        """Processor time that its piece of work may still take."""
        assert self.job is not None
        return self.job[1] - _thread_time(self)

    def run(self) -> None:
        call = self.queue.get()
        while call is not None:
            while not self.is_abandoned and (place := next(call.places)) < call.count:
                self._do(call, place)
            if self.is_abandoned:
                self.queue.forget()
                return
            # What the call holds must not live on while this waits.
            del call
            call = self.queue.get()
        self.queue.leave()

    def _do(self, call: _Call, place: int) -> None:
        result, error = None, None
        self.job = call, _thread_time(self) + call.limits_s[place]
        try:
            result = call.work(place)
        except BaseException as raised:
            error = raised
        with call.lock:
            self.job = None
            if self.is_abandoned:
                return
            call.results[place], call.error = result, call.error or error
            call.left -= 1
            if not call.left:
                call.ended.release()


def _thread_time(thread: threading.Thread) -> float:
    """Processor time of a thread in seconds; the time of day where the system does not tell that of another thread."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return time.monotonic()
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
