"""Threads that ask grammars, and are left behind where grammars take too long.

xgrammar cannot be interrupted, and releases the GIL.  So the engine waits for threads.  A thread whose grammar has used
its share of the round's time makes room for another.  Once such grammars have used what the shares leave, their threads
are abandoned: they go on at a low priority until their calls return, and what they find is dropped.
"""

import itertools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from espalier.cores import available_cores, lower_priority, wait_at_exit

# The processor time that all grammars of a round may take together.  Half of the time of the round before counts too.
# After that the engine goes on without grammars that took more than their share.  Ordinary grammars take less than a
# fiftieth.  Another request may wait for two such rounds: the one that runs, and its own.
GRAMMAR_S = 0.125
# Half of the time is divided among the grammars.  A share is never less than 1 / MAX_SHARES of that half.
MAX_SHARES = 8
# While this many abandoned threads run, requests with a grammar are refused.
MAX_ABANDONED = 4
# Threads at once, abandoned ones not counted.
MAX_THREADS = 8

# The result of a piece of work whose thread was abandoned.
TOO_SLOW: Any = object()
Work = Callable[[int], Any]


class MaskThreads:
    """A pool of threads that can be abandoned.  limit_s: the processor time that the work of one round may take."""

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
        self,
        work: Work,
        count: int,
        *,
        at_once: bool = False,
        used_s: list[float] | None = None,
        spent_s: Callable[[float], float] = lambda share_s: 0.0,
    ) -> list[Any]:
        """work(0) to work(count - 1), each its result or TOO_SLOW.  Raises what a piece of work raises.

        used_s: what each has used in this round before; what it uses is added.  spent_s: what others of the round have
        used beyond a share.  at_once: several threads begin; else one does, and others help if it does not end soon.
        """
        share_s = self.limit_s / 2 / min(max(count, 1), MAX_SHARES)
        call = _Call(work, count, share_s, [0.0] * count if used_s is None else used_s, has_help=at_once)
        self._send(call, min(count, available_cores()) if at_once else min(count, 1))
        while call.left and not call.ended.acquire(timeout=self.limit_s / 2 / MAX_SHARES):
            self._look(call, spent_s)
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

    def _look(self, call: "_Call", spent_s: Callable[[float], float]) -> None:
        """Let other threads go on in place of slow ones.  Abandon those once they have used up the limit."""
        with call.lock:
            running = [(each, each.job) for each in self.threads if each.job is not None and each.job.call is call]
            slow = [(thread, job) for thread, job in running if job.used_s(thread) > call.share_s]
            beyond_s = sum(job.used_s(thread) - call.share_s for thread, job in slow)
            beyond_s += sum(max(0.0, used - call.share_s) for used in call.ended_s) + spent_s(call.share_s)
            if beyond_s > self.limit_s / 2:
                for thread, job in slow:
                    call.used_s[job.place] = job.used_s(thread)
                    call.ended_s.append(call.used_s[job.place])
                    self._abandon(thread)
                    call.left -= 1
            elif call.has_help and all(job.is_slow for _, job in slow):
                return
            for _, job in slow:
                job.is_slow = True
        self._send(call, call.left if slow else min(call.left, available_cores()))
        call.has_help = True

    def _abandon(self, thread: "_MaskThread") -> None:
        self.threads.remove(thread)
        self.queue.abandon(thread)
        assert thread.native_id is not None
        lower_priority(thread.native_id)

    def close(self) -> None:
        """End the threads.  Abandoned ones end by themselves.  Idempotent."""
        self._end()


class _Queue:
    """The data that the threads share.  The threads do not hold the pool, so a pool that nobody closed ends with its
    owner.

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

    places: the numbers that no thread has taken; left: how many have no result; lock: of what a thread leaves here;
    ended_s: what the pieces of work that ended or were abandoned have used in this round; has_help: whether several
    threads were sent.
    """

    def __init__(self, work: Work, count: int, share_s: float, used_s: list[float], has_help: bool):
        self.work = work
        self.has_help = has_help
        self.share_s = share_s
        self.used_s = used_s
        self.ended_s: list[float] = []
        self.places = itertools.count()
        self.count = count
        self.left = count
        self.results: list[Any] = [TOO_SLOW] * count
        self.error: BaseException | None = None
        self.lock = threading.Lock()
        self.ended = threading.Lock()
        self.ended.acquire()


@dataclass(slots=True)
class _Job:
    """A piece of work that a thread does.  begun_s: the thread's time then; is_slow: it has made room for another."""

    call: _Call
    place: int
    begun_s: float
    is_slow: bool = False

    def used_s(self, thread: "_MaskThread") -> float:
        """Processor time that it has used in this round, before too."""
        return self.call.used_s[self.place] + _thread_time(thread) - self.begun_s


class _MaskThread(threading.Thread):
    """A thread of the pool.  job: its piece of work.  clock: of its processor time, None where the system has none."""

    def __init__(self, queue: _Queue):
        # A daemon: the interpreter does not wait for it.
        super().__init__(name="espalier-masks", daemon=True)
        self.queue = queue
        self.is_abandoned = False
        self.job: _Job | None = None
        self.clock: int | None = None
        queue.enter()

    def run(self) -> None:
        if hasattr(time, "pthread_getcpuclockid"):
            self.clock = time.pthread_getcpuclockid(threading.get_ident())
        call = self.queue.get()
        while call is not None:
            # Read once for each piece of work: reading it is a system call.
            now_s = _thread_time(self)
            while not self.is_abandoned and (place := next(call.places)) < call.count:
                now_s = self._do(_Job(call, place, now_s))
            if self.is_abandoned:
                self.queue.forget()
                return
            # The objects that the call holds must not live on while this thread waits.
            del call
            call = self.queue.get()
        self.queue.leave()

    def _do(self, job: _Job) -> float:
        """Do a piece of work.  Returns the thread's time behind it."""
        call, place, result, error = job.call, job.place, None, None
        self.job = job
        try:
            result = call.work(place)
        except BaseException as raised:
            error = raised
        now_s = _thread_time(self)
        with call.lock:
            self.job = None
            if self.is_abandoned:
                return now_s
            call.used_s[place] += now_s - job.begun_s
            call.ended_s.append(call.used_s[place])
            call.results[place], call.error = result, call.error or error
            call.left -= 1
            if not call.left:
                call.ended.release()
        return now_s


wait_at_exit(lambda thread: isinstance(thread, _MaskThread) and thread.job is not None)


def _thread_time(thread: _MaskThread) -> float:
    """Processor time of a thread in seconds; the time of day where the system does not tell that of another thread."""
    return time.monotonic() if thread.clock is None else time.clock_gettime(thread.clock)
