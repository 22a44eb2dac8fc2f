"""Reads bodies: small ones in the front, large ones in the body process, one at a time.

A large body holds the GIL for up to a second, so reading it in a thread would stop every stream.  This module is that
process's program too; it exits when the front does.  A frame in either direction is a length and a pickle.  Pickle is
safe here: only the front has the pipes' other ends.
"""

import asyncio
import pickle
import signal
import sys
from typing import Any, BinaryIO

import msgspec
from pydantic import BaseModel
from starlette.requests import Request

from espalier.server.aside import LENGTH, Aside, AsideFailed, framed
from espalier.server.bodies import BodyLimits, read_body
from espalier.server.errors import FAILED, ApiError, full

# The front reads any body of this size in a few milliseconds.
SMALL_BYTES = 65536
MAX_WAITING = 32
# The content-encoding of a body that is sent as it is.
IDENTITY = "identity"


class BodyReader:
    """Starts the body process with the first large body.

    num_aside: bodies that a body process has read so far; _num_open: large bodies that wait or are being read.
    """

    def __init__(self, limits: BodyLimits):
        self.limits = limits
        self.num_aside = 0
        self._num_open = 0
        self.aside = Aside("body", "-m", "espalier.server.body_reader", msgspec.json.encode(limits).decode())
        self._turn = asyncio.Lock()

    async def read(self, http: Request, model: type[BaseModel]) -> Any:
        """The body as a record of `model`.  Raises ApiError or ClientDisconnect."""
        data, content_type = await http.body(), http.headers.get("content-type", "")
        if (encoding := http.headers.get("content-encoding", IDENTITY)) != IDENTITY:
            raise ApiError(400, f"content-encoding {encoding} is not supported; send the body as plain JSON")
        if len(data) <= SMALL_BYTES:
            return read_body(model.__name__, content_type, data, self.limits)
        if self._num_open > MAX_WAITING:
            raise full(f"{MAX_WAITING} large bodies are already waiting to be read")
        self._num_open += 1
        try:
            async with self._turn:
                frame = pickle.dumps((model.__name__, content_type, data), protocol=pickle.HIGHEST_PROTOCOL)
                body, refused = pickle.loads(await self.aside.exchange(frame))
                self.num_aside += 1
        except AsideFailed:
            raise ApiError(500, FAILED) from None
        finally:
            self._num_open -= 1
        if refused is not None:
            raise ApiError(*refused)
        return body

    async def close(self) -> None:
        await self.aside.close()


def answer(name: str, content_type: str, data: bytes, limits: BodyLimits) -> tuple[Any, tuple[Any, ...] | None]:
    """(body, None), or (None, arguments of the ApiError)."""
    try:
        return read_body(name, content_type, data, limits), None
    except ApiError as error:
        return None, (error.status_code, error.detail, error.param, error.code)


def serve(requests: BinaryIO, answers: BinaryIO, limits: BodyLimits) -> None:
    """Answer each frame, a (model name, content type, bytes), until `requests` ends."""
    while head := requests.read(LENGTH.size):
        name, content_type, data = pickle.loads(requests.read(*LENGTH.unpack(head)))
        found = answer(name, content_type, data, limits)
        answers.write(framed(pickle.dumps(found, protocol=pickle.HIGHEST_PROTOCOL)))
        answers.flush()


if __name__ == "__main__":
    # Ctrl-C reaches the whole process group, but the front decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(sys.stdin.buffer, sys.stdout.buffer, msgspec.json.decode(sys.argv[1], type=BodyLimits))
