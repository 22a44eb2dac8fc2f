"""A process beside the front, for work that would hold up the event loop: one frame in, one frame out.

A frame is a length and bytes.  The process starts with the first frame, and again after it has failed.
"""

import asyncio
import logging
import struct
import sys

log = logging.getLogger("espalier.server")
LENGTH = struct.Struct("<I")


def framed(data: bytes) -> bytes:
    return LENGTH.pack(len(data)) + data


class AsideFailed(Exception):
    """The process ended or did not answer in time.  The next frame starts another."""


class Aside:
    """arguments: of the interpreter, `-m MODULE ...`; what: the process's name in the log."""

    def __init__(self, what: str, *arguments: str):
        self.what = what
        self.arguments = arguments
        self._process: asyncio.subprocess.Process | None = None

    async def exchange(self, data: bytes, limit_s: float | None = None) -> bytes:
        """Send a frame and receive its answer; one at a time.  Raises AsideFailed.  A failure ends the process."""
        try:
            async with asyncio.timeout(limit_s):
                process = await self.start()
                assert process.stdin is not None and process.stdout is not None
                process.stdin.write(framed(data))
                await process.stdin.drain()
                (length,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
                return await process.stdout.readexactly(length)
        except (OSError, EOFError, TimeoutError) as error:
            log.error("the %s process ended or is ended: %r", self.what, error)
            self._end()
            raise AsideFailed from error
        except BaseException:
            self._end()
            raise

    async def start(self) -> asyncio.subprocess.Process:
        """The process, started unless it runs."""
        process = self._process
        if process is None or process.returncode is not None:
            pipe = asyncio.subprocess.PIPE
            # With asyncio's default limit of 64 KB a large frame would wake the event loop many times.
            process = await asyncio.create_subprocess_exec(
                sys.executable, *self.arguments, stdin=pipe, stdout=pipe, limit=2**22
            )
            self._process = process
            log.info("the %s process has pid %d", self.what, process.pid)
        return process

    async def close(self) -> None:
        process = self._process
        self._end()
        if process is not None:
            await process.wait()

    def _end(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
        self._process = None
