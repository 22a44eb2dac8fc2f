"""The front's body reader: small bodies are read in the front, large ones in the body process.

A large body holds the GIL for up to a second, so reading it in a thread would stop every stream.
"""

import asyncio
import pickle
from typing import Any

import msgspec
from pydantic import BaseModel
from starlette.requests import Request

from espalier.server.aside import Aside, AsideFailed
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
        self.aside = Aside("body", "-m", "espalier.server.body_process", msgspec.json.encode(limits).decode())
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
