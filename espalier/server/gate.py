"""What every HTTP request passes before any endpoint: an id, the key, the size of its body; at the end, a log line.

Plain ASGI, so that a client's disconnect reaches the endpoints as the server sees it.
"""

import hmac
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from espalier.server.errors import ApiError
from espalier.server.logs import request_id

log = logging.getLogger("espalier.server")
GIVEN_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
# Times max_body_bytes.
DROPPED_AT_MOST = 4
# What a load balancer and Prometheus read without a key.
OPEN_PATHS = ("/health", "/metrics")


class Gate:
    """Around an app.  answered(path, status): called as each answer ends.  num_open: requests still being answered."""

    def __init__(self, app: ASGIApp, api_key: str | None, max_body_bytes: int, answered: Callable[[str, int], None]):
        self.app = app
        self.api_key = api_key
        self.max_body_bytes = max_body_bytes
        self.answered = answered
        self.num_open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await receive()
                await send({"type": "websocket.close", "code": 1008})
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id.set(given if GIVEN_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}")
        began, answer = time.perf_counter(), Answering(send)
        # As it was sent: a line break that it decodes to is not to begin a log line.
        path = quote(scope["path"])
        self.num_open += 1
        try:
            self._check_key(scope["path"], headers)
            await self._check_length(headers, receive)
            await self.app(scope, self._limited(receive), answer)
        except ApiError as error:
            if not answer.status:
                await JSONResponse(error.body(), error.status_code, error.headers)(scope, receive, answer)
        except Exception:
            log.exception("%s %s failed", scope["method"], path)
            if not answer.status:
                failed = ApiError(500, "the server failed on this request; its log says more, under this request_id")
                await JSONResponse(failed.body(), 500)(scope, receive, answer)
        finally:
            self.num_open -= 1
            seconds = time.perf_counter() - began
            log.info("%s %s %d %.3f s", scope["method"], path, answer.status, seconds)
            route = scope.get("route")
            self.answered(getattr(route, "path", "other"), answer.status)

    def _check_key(self, path: str, headers: Headers) -> None:
        if self.api_key is not None and path not in OPEN_PATHS:
            # Header bytes come as latin-1, whatever they were.
            scheme, _, key = headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(key.encode("latin-1"), self.api_key.encode()):
                message = "the API key is missing or wrong; send it as Authorization: Bearer KEY"
                raise ApiError(401, message, code="invalid_api_key")

    async def _check_length(self, headers: Headers, receive: Receive) -> None:
        length = headers.get("content-length", "0")
        if not (length.isdecimal() and int(length) > self.max_body_bytes):
            return
        # Who is still sending reads no answer: a body that is a little too long is taken in, and dropped.
        if int(length) <= DROPPED_AT_MOST * self.max_body_bytes:
            while (await receive()).get("more_body"):
                pass
        raise self._too_large()

    def _limited(self, receive: Receive) -> Callable[[], Awaitable[Message]]:
        """A body without a length is counted as it comes."""
        taken = 0

        async def counted() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self.max_body_bytes:
                raise self._too_large()
            return message

        return counted

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is above {self.max_body_bytes} bytes; send less, or raise --max-body-bytes")


class Answering:
    """A send that adds the request's id, and remembers the status (0: nothing was sent)."""

    def __init__(self, send: Send):
        self.send = send
        self.status = 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message)["x-request-id"] = request_id.get()
        await self.send(message)
