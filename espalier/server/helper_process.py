"""A helper process of the API server, for work that would block the event loop.

The API server sends frames to the process, and the process answers each frame with a frame.  A frame is a message: its
length, then its bytes.  The first frame starts the process.  The process exits when the API server exits.
"""

import asyncio
import logging
import signal
import struct
import sys
from collections.abc import Callable

from espalier.child_process import environment, signals_blocked
from espalier.server.errors import queue_full_error

log = logging.getLogger("espalier.server")
LENGTH_PREFIX = struct.Struct("<I")


def as_frame(data: bytes) -> bytes:
    """Returns the data as a frame: its length, then the data."""
    return LENGTH_PREFIX.pack(len(data)) + data


class HelperProcessFailed(Exception):
    """The helper process ended, or did not answer in time.  The next frame starts a new process."""


class HelperProcess:
    """Sends frames to a helper process, one at a time.

    process_name: for the log.  max_waiting: how many frames may wait.  refusal_reason: text for the error if more would
    wait, after the number max_waiting.  program: a module that calls run_helper_loop, and its arguments.
    """

    def __init__(self, process_name: str, max_waiting: int, refusal_reason: str, *program: str):
        self.process_name = process_name
        self.max_waiting = max_waiting
        self.refusal_reason = refusal_reason
        self.program = program
        self._num_unanswered = 0
        self._lock = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None

    async def call(self, data: bytes, limit_s: float | None = None) -> bytes:
        """Send `data` as a frame and return the answer.  limit_s: the time limit, None for no limit.

        Raises HelperProcessFailed, or ApiError if too many frames wait."""
        if self._num_unanswered > self.max_waiting:
            raise queue_full_error(f"{self.max_waiting} {self.refusal_reason}")
        self._num_unanswered += 1
        try:
            async with self._lock:
                return await self._exchange(data, limit_s)
        finally:
            self._num_unanswered -= 1

    async def _exchange(self, data: bytes, limit_s: float | None) -> bytes:
        """Send a frame and return the answer.  The caller holds `_lock`.  Any failure ends the process."""
        try:
            async with asyncio.timeout(limit_s):
                process = await self.start()
                assert process.stdin is not None and process.stdout is not None
                process.stdin.write(as_frame(data))
                await process.stdin.drain()
                (length,) = LENGTH_PREFIX.unpack(await process.stdout.readexactly(LENGTH_PREFIX.size))
                return await process.stdout.readexactly(length)
        except (OSError, EOFError, TimeoutError) as error:
            log.error("the %s process ended or is ended: %r", self.process_name, error)
            self._end_process()
            raise HelperProcessFailed from error
        except BaseException:
            self._end_process()
            raise

    async def start(self) -> asyncio.subprocess.Process:
        """Returns the running process, and starts it if necessary."""
        process = self._process
        if process is None or process.returncode is not None:
            pipe = asyncio.subprocess.PIPE
            # The read buffer has 4 MB.  With asyncio's default of 64 KB, a large frame would wake the loop many times.
            with signals_blocked(signal.SIGINT):  # only the API server ends this process
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", *self.program, stdin=pipe, stdout=pipe, limit=2**22, env=environment()
                )
            self._process = process
            log.info("the %s process has pid %d", self.process_name, process.pid)
        return process

    async def close(self) -> None:
        process = self._process
        self._end_process()
        if process is not None:
            await process.wait()

    def _end_process(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
        self._process = None


def run_helper_loop(answer: Callable[[bytes], bytes]) -> None:
    """The main loop of a helper process: sends answer(frame) for each frame from stdin, until the API server exits."""
    frames, answers = sys.stdin.buffer, sys.stdout.buffer
    while head := frames.read(LENGTH_PREFIX.size):
        answers.write(as_frame(answer(frames.read(*LENGTH_PREFIX.unpack(head)))))
        answers.flush()
