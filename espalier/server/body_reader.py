"""Reads bodies: small ones in the front, large ones in the body process, one at a time.

A large body holds the GIL for up to a second, so reading it in a thread would stop every stream.  This module is that
process's program too; it exits when the front does.  A frame in either direction is a length and a pickle.  Pickle is
safe here: only the front has the pipes' other ends.
"""

import pickle
import sys
from typing import Any

import msgspec
from pydantic import BaseModel
from starlette.requests import Request

from espalier.server.aside import Aside, AsideFailed, serve_frames
from espalier.server.bodies import BodyLimits, read_body
from espalier.server.errors import FAILED, ApiError

# The front reads any body of this size in a few milliseconds.
SMALL_BYTES = 65536
MAX_WAITING = 32
# The content-encoding of a body that is sent as it is.
IDENTITY = "identity"


class BodyReader:
    """Starts the body process with the first large body.

    num_aside: bodies that a body process has read so far.
    """

    def __init__(self, limits: BodyLimits):
        self.limits = limits
        self.num_aside = 0
        program = "espalier.server.body_reader", msgspec.json.encode(limits).decode()
        self.aside = Aside("body", MAX_WAITING, "large bodies are already waiting to be read", *program)

    async def read(self, http: Request, model: type[BaseModel]) -> Any:
        """The body as a record of `model`.  Raises ApiError or ClientDisconnect."""
        # Not http.body(), which would keep the bytes as long as the request.
        data, content_type = b"".join([part async for part in http.stream()]), http.headers.get("content-type", "")
        if (encoding := http.headers.get("content-encoding", IDENTITY)) != IDENTITY:
            raise ApiError(400, f"content-encoding {encoding} is not supported; send the body as plain JSON")
        if len(data) <= SMALL_BYTES:
            return read_body(model.__name__, content_type, data, self.limits)
        try:
            body, refused = pickle.loads(await self.aside.exchange(pickled((model.__name__, content_type, data))))
        except AsideFailed:
            raise ApiError(500, FAILED) from None
        self.num_aside += 1
        if refused is not None:
            raise ApiError(*refused)
        return body

    async def close(self) -> None:
        await self.aside.close()


def pickled(value: Any) -> bytes:
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def answer(frame: bytes, limits: BodyLimits) -> bytes:
    """From (model name, content type, bytes) to (body, None), or (None, arguments of the ApiError)."""
    name, content_type, data = pickle.loads(frame)
    try:
        return pickled((read_body(name, content_type, data, limits), None))
    except ApiError as error:
        return pickled((None, (error.status_code, error.detail, error.param, error.code)))


if __name__ == "__main__":
    limits = msgspec.json.decode(sys.argv[1], type=BodyLimits)
    serve_frames(lambda frame: answer(frame, limits))
