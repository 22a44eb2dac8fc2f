"""What every HTTP request passes before any endpoint: an id, the key, the size of its body; at the end, a log line.

Plain ASGI, so that a client's disconnect reaches the endpoints as the server sees it.
"""

import asyncio
import hmac
import logging
import re
import time
from collections.abc import Callable
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from espalier.server.errors import FAILED, RETRY_AFTER_S, ApiError
from espalier.server.logs import new_request_id, request_id

log = logging.getLogger("espalier.server")
GIVEN_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
# Times max_body_bytes.
DROPPED_AT_MOST = 4
# What a load balancer and Prometheus read without a key.
OPEN_PATHS = ("/health", "/metrics")


class Gate:
    """Around an app.  answered(path, status): called as each answer ends.  num_open: requests still being answered.

    body_timeout_s: of one body, None for no limit.
    """

    def __init__(
        self,
        app: ASGIApp,
        api_key: str | None,
        max_body_bytes: int,
        answered: Callable[[str, int], None],
        body_timeout_s: float | None = None,
    ):
        self.app = app
        self.api_key = api_key
        self.max_body_bytes = max_body_bytes
        self.answered = answered
        self.body_timeout_s = body_timeout_s
        self.num_open = 0
        self.draining = False
        # Of the bodies that are waited for.
        self.waits: set[asyncio.Timeout] = set()

    def drain(self) -> None:
        """A body that is not there yet is not waited for, from now on."""
        self.draining = True
        for wait in self.waits:
            if not wait.expired():
                wait.reschedule(asyncio.get_running_loop().time())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method = scope["method"]
        if method == "HEAD":
            # The HTTP server leaves out the body: all else is GET's, probes included.
            scope = {**scope, "method": "GET"}
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id.set(given if GIVEN_ID.fullmatch(given) else new_request_id())
        # For what knows of a connection alone.
        scope.setdefault("state", {})["request_id"] = request_id.get()
        refused: ApiError | None = None
        began, answer, upload = time.perf_counter(), Answering(send), Upload(self, receive)
        # As it was sent: a line break that it decodes to is not to begin a log line.
        path = quote(scope["path"])
        self.num_open += 1
        try:
            self._check_key(scope["path"], headers)
            await upload.check_length(headers)
            await self.app(scope, upload, answer)
        except ApiError as error:
            refused = error
            if not answer.status:
                await JSONResponse(error.body(), error.status_code, error.headers)(scope, receive, answer)
        except Exception:
            log.exception("%s %s failed", method, path)
            if not answer.status:
                failed = ApiError(500, FAILED)
                await JSONResponse(failed.body(), 500)(scope, receive, answer)
        finally:
            self.num_open -= 1
            seconds = time.perf_counter() - began
            # Probes come every few seconds, for ever.
            level = logging.DEBUG if scope["path"] in OPEN_PATHS and answer.status == 200 else logging.INFO
            why = _reason(refused or scope["state"].get("refused"))
            log.log(level, "%s %s %d %.3f s%s", method, path, answer.status, seconds, why)
            route = scope.get("route")
            self.answered(getattr(route, "path", "other"), answer.status)

    def _check_key(self, path: str, headers: Headers) -> None:
        if self.api_key is not None and path not in OPEN_PATHS:
            # Header bytes come as latin-1, whatever they were.
            scheme, _, key = headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(key.encode("latin-1"), self.api_key.encode()):
                message = "the API key is missing or wrong; send it as Authorization: Bearer KEY"
                error = ApiError(401, message, code="invalid_api_key")
                error.headers = {"www-authenticate": "Bearer"}
                raise error


def _reason(refused: ApiError | None) -> str:
    """Why a request failed, for its log line: what of it a client wrote cannot begin another line."""
    if refused is None:
        return ""
    message = "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(refused.detail))
    return f": {message}" if refused.param is None else f": {message} [field {refused.param!r}]"


class Upload:
    """One request's body on its way in: a receive that counts bytes and time.

    Raises ApiError where it is too large, or too slow.
    """

    def __init__(self, gate: Gate, receive: Receive):
        self.gate = gate
        self.receive = receive
        self.taken = 0
        self.whole = False
        limit = gate.body_timeout_s
        self.deadline = None if limit is None else asyncio.get_running_loop().time() + limit

    async def __call__(self) -> Message:
        message = await self._next()
        if self.taken > self.gate.max_body_bytes:
            await self._drop()
        return message

    async def check_length(self, headers: Headers) -> None:
        """Refuse at once what says that it is too large."""
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self.gate.max_body_bytes:
            await self._drop(int(length))

    async def _drop(self, length: int = 0) -> None:
        """Who is still sending reads no answer: a body that is a little too large is taken in, and dropped."""
        most = self.gate.max_body_bytes
        while not self.whole and max(self.taken, length) <= DROPPED_AT_MOST * most:
            await self._next()
        raise ApiError(413, f"the body is above {most} bytes; send less, or raise --max-body-bytes")

    async def _next(self) -> Message:
        if self.whole:  # what comes now is the client's leaving, and may take any time
            return await self.receive()
        deadline = asyncio.get_running_loop().time() if self.gate.draining else self.deadline
        try:
            # What is there already is taken, whatever the time: a limit strikes where something is waited for.
            async with asyncio.timeout_at(deadline) as wait:
                self.gate.waits.add(wait)
                try:
                    message = await self.receive()
                finally:
                    self.gate.waits.discard(wait)
        except TimeoutError:
            raise self._late() from None
        self.taken += len(message.get("body", b""))
        self.whole = not message.get("more_body", False)
        return message

    def _late(self) -> ApiError:
        if self.gate.draining:
            message = "the server is shutting down and the body was not there yet; ask another"
            error = ApiError(503, message, retry_after_s=RETRY_AFTER_S)
        else:
            limit = self.gate.body_timeout_s
            error = ApiError(
                408, f"the body was not there after {limit:g} s; send it faster, or raise --body-timeout", retry=False
            )
        # What follows on this connection is the rest of the body: nothing more is read from there.
        error.headers = {**(error.headers or {}), "connection": "close"}
        return error


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
