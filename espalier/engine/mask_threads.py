"""Threads that compute masks of grammars.  A thread whose grammar takes too long is abandoned.

A call of xgrammar (the library of grammars) cannot be interrupted, but it releases the GIL.  So the engine runs these
calls in threads and waits.
Half of the time limit of a round is divided into shares, one for each grammar.  When a grammar has used its share, a
further thread starts, so that other grammars need not wait.  When slow grammars have used the other half too, their
threads are abandoned.  An abandoned thread goes on at a low priority until its call returns; the result is dropped.
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
from espalier.grammar.spec import GRAMMAR_LIMIT_S

# The time is divided into at most this many shares.  With more grammars, shares do not become smaller.
MAX_TIME_SHARES = 8
# While this many abandoned threads run, requests with a grammar are refused.
MAX_ABANDONED_THREADS = 4
# The most threads at a time, not counting abandoned threads.
MAX_THREADS = 8

# The result of a piece of work whose thread was abandoned.
TOO_SLOW: Any = object()
# A function of a number i.  It does piece i of the work of a call, and returns the result of this piece.
IndexedWork = Callable[[int], Any]


class MaskThreadPool:
    """A pool of threads that can be abandoned.  limit_s: the most processor seconds for the work of one round."""

    def __init__(self, limit_s: float = GRAMMAR_LIMIT_S):
        self.limit_s = limit_s
        self.threads: set[_MaskThread] = set()
        self.queue = _CallQueue()
        self._end_threads = weakref.finalize(self, self.queue.end_threads)

    @property
    def num_abandoned(self) -> int:
        """The number of abandoned threads that still run."""
        return self.queue.num_abandoned

    def run(
        self,
        work: IndexedWork,
        num_pieces: int,
        *,
        all_threads: bool = False,
        used_s: list[float] | None = None,
        overrun_s: Callable[[float], float] = lambda time_share_s: 0.0,
    ) -> list[Any]:
        """Runs the pieces of work, work(0) to work(num_pieces - 1).  Returns their results, TOO_SLOW for an abandoned
        piece.  Raises the error of a piece.

        all_threads: whether several threads start at once.  If False, one thread starts, and others follow if it is
        slow.
        used_s: for each piece, the processor seconds of earlier calls in this round.  This call adds its own seconds.
        overrun_s: a function of the length of a share.  It returns how many seconds other work of this round has used
        in excess of such shares."""
        time_share_s = self.limit_s / 2 / min(max(num_pieces, 1), MAX_TIME_SHARES)
        call = _PoolCall(work, num_pieces, time_share_s, used_s or [0.0] * num_pieces, has_several_threads=all_threads)
        self._queue_call(call, min(num_pieces, available_cores()) if all_threads else min(num_pieces, 1))
        while call.num_unfinished and not call.all_done.acquire(timeout=self.limit_s / 2 / MAX_TIME_SHARES):
            self._handle_slow_threads(call, overrun_s)
        if call.error is not None:
            raise call.error
        return call.results

    def _queue_call(self, call: "_PoolCall", num_threads: int) -> None:
        """Gives the call to `num_threads` threads.  Starts threads if the pool has fewer."""
        for _ in range(min(num_threads, MAX_THREADS)):
            self.queue.put(call)
        while len(self.threads) < min(num_threads, MAX_THREADS):
            thread = _MaskThread(self.queue)
            self.threads.add(thread)
            thread.start()

    def _handle_slow_threads(self, call: "_PoolCall", overrun_s: Callable[[float], float]) -> None:
        """Starts further threads if threads are slow.  Abandons the slow threads if they have used up the limit."""
        with call.lock:
            running = [
                (thread, thread.job) for thread in self.threads if thread.job is not None and thread.job.call is call
            ]
            slow = [(thread, job) for thread, job in running if job.used_s(thread) > call.time_share_s]
            beyond_s = sum(job.used_s(thread) - call.time_share_s for thread, job in slow)
            beyond_s += sum(max(0.0, used - call.time_share_s) for used in call.used_s_of_ended_pieces)
            beyond_s += overrun_s(call.time_share_s)
            if beyond_s > self.limit_s / 2:
                for thread, job in slow:
                    call.used_s[job.index] = job.used_s(thread)
                    call.used_s_of_ended_pieces.append(call.used_s[job.index])
                    self._abandon(thread)
                    call.num_unfinished -= 1
            elif call.has_several_threads and all(job.is_slow for _, job in slow):
                return
            for _, job in slow:
                job.is_slow = True
        self._queue_call(call, call.num_unfinished if slow else min(call.num_unfinished, available_cores()))
        call.has_several_threads = True

    def _abandon(self, thread: "_MaskThread") -> None:
        """Gives a slow thread no more work, and lowers its priority.  The thread ends when its call returns."""
        self.threads.remove(thread)
        self.queue.abandon(thread)
        assert thread.native_id is not None
        lower_priority(thread.native_id)

    def close(self) -> None:
        """Ends the threads.  Abandoned threads end by themselves.  Idempotent."""
        self._end_threads()


class _CallQueue:
    """The queue from which the threads of a pool take calls.

    The threads refer to this queue, and not to the pool.  So if nobody closes a pool, its threads end when the pool is
    freed.  Threads wait by reading from a pipe.  With a pipe, waking a thread takes half as long as with
    queue.SimpleQueue, because a write to a pipe releases the GIL.
    num_threads: how many threads take calls.  num_abandoned: how many abandoned threads still run."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.waiting: deque[_PoolCall | None] = deque()
        self.pipe_ends: tuple[int, int] | None = None
        self.num_threads = self.num_abandoned = 0

    def put(self, call: "_PoolCall | None") -> None:
        """Gives a call to one thread.  None ends the thread."""
        if self.pipe_ends is None:
            self.pipe_ends = os.pipe()
        self.waiting.append(call)
        os.write(self.pipe_ends[1], b".")

    def get(self) -> "_PoolCall | None":
        assert self.pipe_ends is not None
        os.read(self.pipe_ends[0], 1)
        return self.waiting.popleft()

    def add_thread(self) -> None:
        with self.lock:
            self.num_threads += 1

    def remove_thread(self) -> None:
        """Called when a thread ends.  The last thread closes the pipe."""
        with self.lock:
            self.num_threads -= 1
            if not self.num_threads:
                self._close_pipe()

    def _close_pipe(self) -> None:
        for end in self.pipe_ends or ():
            os.close(end)
        self.pipe_ends = None

    def abandon(self, thread: "_MaskThread") -> None:
        thread.is_abandoned = True
        with self.lock:
            self.num_threads -= 1
            self.num_abandoned += 1

    def remove_abandoned_thread(self) -> None:
        """Called when an abandoned thread ends."""
        with self.lock:
            self.num_abandoned -= 1

    def end_threads(self) -> None:
        """Ends the threads that take calls."""
        if not self.num_threads:
            self._close_pipe()
        for _ in range(self.num_threads):
            self.put(None)


class _PoolCall:
    """One call of MaskThreadPool.run.

    indices: an iterator over the pieces; a thread takes the next piece.  num_unfinished: how many have no result yet.
    lock: protects the fields that threads write.  all_done: released when all pieces have results.
    time_share_s: the processor seconds that one piece may use before it counts as slow.
    used_s_of_ended_pieces: the seconds that each ended or abandoned piece has used in this round.
    has_several_threads: whether several threads were started for this call."""

    def __init__(
        self, work: IndexedWork, num_pieces: int, time_share_s: float, used_s: list[float], has_several_threads: bool
    ):
        self.work = work
        self.has_several_threads = has_several_threads
        self.time_share_s = time_share_s
        self.used_s = used_s
        self.used_s_of_ended_pieces: list[float] = []
        self.indices = itertools.count()
        self.num_pieces = num_pieces
        self.num_unfinished = num_pieces
        self.results: list[Any] = [TOO_SLOW] * num_pieces
        self.error: BaseException | None = None
        self.lock = threading.Lock()
        self.all_done = threading.Lock()
        self.all_done.acquire()


@dataclass(slots=True)
class _ThreadJob:
    """A piece of work that a thread is doing.

    index: the number of the piece.  start_s: the thread's processor time when the piece began.
    is_slow: whether the piece has used up its share of the time."""

    call: _PoolCall
    index: int
    start_s: float
    is_slow: bool = False

    def used_s(self, thread: "_MaskThread") -> float:
        """Returns the processor seconds that this piece has used in this round, including earlier calls."""
        return self.call.used_s[self.index] + _thread_time(thread) - self.start_s


class _MaskThread(threading.Thread):
    """A thread of the pool.  job: the piece of work that the thread is doing.  clock: the clock of the thread's
    processor time, None if the system has no such clock."""

    def __init__(self, queue: _CallQueue):
        # The thread is a daemon, so the interpreter does not wait for it at exit.
        super().__init__(name="espalier-masks", daemon=True)
        self.queue = queue
        self.is_abandoned = False
        self.job: _ThreadJob | None = None
        self.clock: int | None = None
        queue.add_thread()

    def run(self) -> None:
        if hasattr(time, "pthread_getcpuclockid"):
            self.clock = time.pthread_getcpuclockid(threading.get_ident())
        call = self.queue.get()
        while call is not None:
            # The time is read once for each piece of work, because reading it is a system call.
            now_s = _thread_time(self)
            while not self.is_abandoned and (index := next(call.indices)) < call.num_pieces:
                now_s = self._do_job(_ThreadJob(call, index, now_s))
            if self.is_abandoned:
                self.queue.remove_abandoned_thread()
                return
            # Drop the reference, so that the objects of the call are freed while this thread waits.
            del call
            call = self.queue.get()
        self.queue.remove_thread()

    def _do_job(self, job: _ThreadJob) -> float:
        """Does a piece of work.  Returns the thread's processor time afterwards, in seconds."""
        call, index, result, error = job.call, job.index, None, None
        self.job = job
        try:
            result = call.work(index)
        except BaseException as raised:
            error = raised
        now_s = _thread_time(self)
        with call.lock:
            self.job = None
            if self.is_abandoned:
                return now_s
            call.used_s[index] += now_s - job.start_s
            call.used_s_of_ended_pieces.append(call.used_s[index])
            call.results[index], call.error = result, call.error or error
            call.num_unfinished -= 1
            if not call.num_unfinished:
                call.all_done.release()
        return now_s


wait_at_exit(lambda thread: isinstance(thread, _MaskThread) and thread.job is not None)


def _thread_time(thread: _MaskThread) -> float:
    """Returns the processor time of a thread in seconds; elapsed time if the system has no clock for threads."""
    return time.monotonic() if thread.clock is None else time.clock_gettime(thread.clock)
