"""The front's body reader: small bodies are read in the front, large ones in the body process.

A large body holds the GIL for up to a second, so reading it in a thread would stop every stream.
"""

import asyncio
import logging
import pickle
import sys
from typing import Any

import msgspec
from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request

from espalier.server.bodies import BodyLimits, read_body
from espalier.server.body_process import LENGTH, framed
from espalier.server.errors import FAILED, ApiError, full

log = logging.getLogger("espalier.server")
# The front reads any body of this size in a few milliseconds.
SMALL_BYTES = 65536
MAX_WAITING = 32
# The content-encoding of a body that is sent as it is.
IDENTITY = "identity"


async def _received(http: Request) -> bytes:
    """The whole body.  Raises ClientDisconnect.  Starlette's own reading takes twice the time."""
    parts: list[bytes] = []
    while True:
        message = await http.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


class BodyReader:
    """Starts the body process with the first large body.

    num_aside: bodies that a body process has read so far; _num_open: large bodies that wait or are being read.
    """

    def __init__(self, limits: BodyLimits):
        self.limits = limits
        self.num_aside = 0
        self._num_open = 0
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def read(self, http: Request, model: type[BaseModel]) -> Any:
        """The body as a record of `model`.  Raises ApiError."""
        data, content_type = await _received(http), http.headers.get("content-type", "")
        if (encoding := http.headers.get("content-encoding", IDENTITY)) != IDENTITY:
            raise ApiError(400, f"content-encoding {encoding} is not supported; send the body as plain JSON")
        if len(data) <= SMALL_BYTES:
            return read_body(model.__name__, content_type, data, self.limits)
        if self._num_open > MAX_WAITING:
            raise full(f"{MAX_WAITING} large bodies are already waiting to be read")
        self._num_open += 1
        try:
            async with self._turn:
                body, refused = await self._exchange(framed((model.__name__, content_type, data)))
        finally:
            self._num_open -= 1
        if refused is not None:
            raise ApiError(*refused)
        return body

    async def _exchange(self, frame: bytes) -> Any:
        """Send a frame and receive its answer.  A failure ends the process; the next large body starts a new one."""
        process = self._process
        if process is None or process.returncode is not None:
            process = self._process = await self._start()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(frame)
            await process.stdin.drain()
            (length,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
            result = pickle.loads(await process.stdout.readexactly(length))
        except (OSError, EOFError) as error:
            self._end()
            log.error("the body process (pid %d) ended: %r", process.pid, error)
            raise ApiError(500, FAILED) from None
        except BaseException:
            self._end()
            raise
        self.num_aside += 1
        return result

    async def _start(self) -> asyncio.subprocess.Process:
        limits = msgspec.json.encode(self.limits).decode()
        command = (sys.executable, "-m", "espalier.server.body_process", limits)
        pipe = asyncio.subprocess.PIPE
        # With asyncio's default limit of 64 KB a large frame would wake the event loop many times.
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=2**22)
        log.info("the body process (pid %d) reads large bodies", process.pid)
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
