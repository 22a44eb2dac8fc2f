"""The middleware around all endpoints: request ids, the API key, limits on the body's size and time, the access log.

The middleware is plain ASGI, so that endpoints receive the client's disconnect directly from the server.
"""

import asyncio
import hmac
import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from espalier.errors import shown
from espalier.server.errors import INTERNAL_ERROR, RETRY_AFTER_S, ApiError
from espalier.server.frontend import BATCH_CLIENT, NO_TIMEOUT
from espalier.server.logs import client_name, new_request_id, request_id
from espalier.server.protocol import SHUTTING_DOWN

log = logging.getLogger("espalier.server")
CLIENT_REQUEST_ID_PATTERN = re.compile(r"[\w.:-]{1,128}", re.ASCII)
# nginx's status for a client that disconnected.  Only the log has this status.
STATUS_CLIENT_DISCONNECTED = 499
# The number of digits of 2**63, the largest content-length.
MAX_LENGTH_DIGITS = 19
# A body that is larger than LimitedReceive.max_bytes is still read and dropped, up to this multiple of max_bytes.
MAX_DROPPED_BODY_MULTIPLE = 4
# Bodies for this path have their own size limit (max_file_bytes).
FILES_PATH = "/v1/files"
# Paths that need no API key: load balancers, Prometheus and browsers (routes.py) read them.
PATHS_WITHOUT_KEY = ("/health", "/metrics", "/", "/docs")


@dataclass(eq=False)
class RequestMiddleware:
    """The ASGI middleware that checks and logs every request.

    on_response_end(path, status): called at the end of each response.  body_timeout_s: the time limit for reading a
    body; None for no limit.  max_file_bytes: the limit for an uploaded file; None for a server without files.
    additional_keys: further valid keys; with several keys, a client is identified by its key.  num_open: the number of
    requests in progress.  draining: whether `drain` was called.  body_timeouts: the timers of bodies being received.
    """

    app: ASGIApp
    api_key: str | None
    max_body_bytes: int
    on_response_end: Callable[[str, int], None]
    body_timeout_s: float | None = None
    max_file_bytes: int | None = None
    additional_keys: Sequence[str] = ()
    num_open: int = 0
    draining: bool = False
    body_timeouts: set[asyncio.Timeout] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.keys = [key.encode() for key in (self.api_key, *self.additional_keys) if key is not None]

    def drain(self) -> None:
        """From now on, refuse requests whose body has not arrived completely."""
        self.draining = True
        for timeout in self.body_timeouts:
            if not timeout.expired():
                timeout.reschedule(asyncio.get_running_loop().time())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method = scope["method"]
        if method == "HEAD":
            # A HEAD request is answered like GET, and http1.py leaves out the body.
            scope = {**scope, "method": "GET"}
        headers = Headers(scope=scope)
        set_request_id(headers)
        # connections.py reads the id from the scope.
        scope.setdefault("state", {})["request_id"] = request_id.get()
        client_name.set(BATCH_CLIENT if NO_TIMEOUT in scope["state"] else (scope.get("client") or ("",))[0])
        api_error: ApiError | None = None
        began_at, response_sender, limited_receive = (
            time.perf_counter(),
            ResponseSender(send),
            LimitedReceive(self, receive, scope["path"]),
        )
        scope["state"]["upload"] = limited_receive
        self.num_open += 1
        try:
            try:
                self._check_key(scope["path"], headers)
                await limited_receive.check_length(headers)
                await self.app(scope, limited_receive, response_sender)
            except ApiError as error:
                api_error = error
            except Exception:
                log.exception("%s %s failed", method, _quoted_path(scope))
                api_error = ApiError(500, INTERNAL_ERROR)
            if api_error is not None and not response_sender.status:
                await api_error.response()(scope, receive, response_sender)
        finally:
            self.num_open -= 1
            seconds = time.perf_counter() - began_at
            # No status was sent if the client disconnected, or if the batch that made the request was stopped.
            status = response_sender.status or STATUS_CLIENT_DISCONNECTED
            # Health probes are logged at DEBUG, because they would fill the log.
            level = (
                logging.DEBUG if scope["path"] in PATHS_WITHOUT_KEY and response_sender.status == 200 else logging.INFO
            )
            log.log(level, "%s %s %d %.3f s%s", method, _quoted_path(scope), status, seconds, _log_reason(api_error))
            self.on_response_end(scope["state"].get("route", "other"), status)

    def _check_key(self, path: str, headers: Headers) -> None:
        """Raises ApiError for a missing or wrong API key.  Sets the client's name if there are several keys."""
        if self.keys and path not in PATHS_WITHOUT_KEY:
            # Starlette decodes header bytes as latin-1.
            scheme, _, key = headers.get("authorization", "").partition(" ")
            matches = [hmac.compare_digest(key.encode("latin-1"), each) for each in self.keys]
            if scheme.lower() != "bearer" or not any(matches):
                message = "the API key is missing or wrong; send it as Authorization: Bearer KEY"
                raise ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
            if len(self.keys) > 1 and client_name.get() != BATCH_CLIENT:
                client_name.set(f"key {matches.index(True)}")


class CorsMiddleware(CORSMiddleware):
    """Starlette's CORS middleware around RequestMiddleware.  A refused preflight gets an error in OpenAI's format."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except ApiError as error:
            # preflight_response raised the error, because RequestMiddleware handles all errors of endpoints.
            set_request_id(Headers(scope=scope))
            log.info("%s %s %d%s", scope["method"], _quoted_path(scope), error.status_code, _log_reason(error))
            await error.response()(scope, receive, ResponseSender(send))

    def preflight_response(self, request_headers: Headers) -> Response:
        """Returns the answer to a browser that asks whether a page may call this server.  Raises ApiError if not."""
        response = super().preflight_response(request_headers)
        if response.status_code == 200:
            return response
        origin, method = request_headers["origin"], request_headers["access-control-request-method"]
        if not self.is_allowed_origin(origin):
            message = f"pages of the origin {shown(origin)} may not call this server; allow it with --cors-origin"
        elif method not in self.allow_methods:
            message = f"access-control-request-method={shown(method)} is not supported; use GET, POST or DELETE"
        else:
            message = "a page of a public address may not call this server; open the page at a private address"
        headers = {name: value for name, value in response.headers.items() if not name.startswith("content-")}
        raise ApiError(400, message, headers=headers)


def set_request_id(headers: Headers) -> None:
    client_id = headers.get("x-request-id", "")
    request_id.set(client_id if CLIENT_REQUEST_ID_PATTERN.fullmatch(client_id) else new_request_id())


def _quoted_path(scope: Scope) -> str:
    """Returns the path for a log line, quoted, so that a line break in the path cannot forge a log line."""
    return quote(scope["path"])


def _log_reason(api_error: ApiError | None) -> str:
    """Returns the end of a failed request's log line.  Line breaks from the client are escaped."""
    if api_error is None:
        return ""
    message = "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(api_error.detail))
    return f": {message}" if api_error.param is None else f": {message} [field {api_error.param!r}]"


class LimitedReceive:
    """An ASGI `receive` that limits the size and time of a request's body.  Raises ApiError above a limit.
    path: the path of the request; an uploaded file has its own limit."""

    def __init__(self, middleware: RequestMiddleware, receive: Receive, path: str):
        self.middleware = middleware
        self.receive = receive
        self.max_bytes, self.limit_flag = middleware.max_body_bytes, "--max-body-bytes"
        if path == FILES_PATH and middleware.max_file_bytes is not None:
            self.max_bytes, self.limit_flag = middleware.max_file_bytes, "--max-file-bytes"
        self.num_received = 0
        self.is_complete = False
        limit = middleware.body_timeout_s
        self.deadline = None if limit is None else asyncio.get_running_loop().time() + limit

    async def __call__(self) -> Message:
        message = await self._next_message()
        if self.num_received > self.max_bytes:
            await self._refuse_too_large()
        return message

    async def check_length(self, headers: Headers) -> None:
        """Refuse a body whose Content-Length is too large.  Raises ApiError."""
        length = headers.get("content-length", "0")
        # int() raises for thousands of digits, so only the first digits are read.
        if length.isdecimal() and (number := int(length.lstrip("0")[:MAX_LENGTH_DIGITS] or "0")) > self.max_bytes:
            await self._refuse_too_large(number)

    async def finish(self) -> None:
        """Read and drop the rest of the body, because some clients send all before they read.  Raises ApiError."""
        while not self.is_complete:
            await self()

    async def _refuse_too_large(self, length: int = 0) -> None:
        """Raises ApiError.  Before that, reads and drops a body that is only slightly too large, like `finish`.

        length: the header content-length; 0 if unknown."""
        limit = self.max_bytes
        while not self.is_complete and max(self.num_received, length) <= MAX_DROPPED_BODY_MULTIPLE * limit:
            await self._next_message()
        raise ApiError(413, f"the body is larger than {limit} bytes; send less, or raise {self.limit_flag}")

    async def _next_message(self) -> Message:
        if self.is_complete:  # the next message is the client's disconnect, for which there is no time limit
            return await self.receive()
        deadline = asyncio.get_running_loop().time() if self.middleware.draining else self.deadline
        try:
            # After the deadline, a message that has already arrived is still returned.
            async with asyncio.timeout_at(deadline) as timeout:
                self.middleware.body_timeouts.add(timeout)
                try:
                    message = await self.receive()
                finally:
                    self.middleware.body_timeouts.discard(timeout)
        except TimeoutError:
            raise self._body_too_slow_error() from None
        self.num_received += len(message.get("body", b""))
        self.is_complete = not message.get("more_body", False)
        return message

    def _body_too_slow_error(self) -> ApiError:
        # The connection must close, because a next request could be read only after the rest of this body.
        headers = {"connection": "close"}
        if self.middleware.draining:
            message = f"{SHUTTING_DOWN} and the body had not arrived; retry on another server"
            return ApiError(503, message, retry_after_s=RETRY_AFTER_S, headers=headers)
        limit = self.middleware.body_timeout_s
        message = f"the body did not arrive within {limit:g} s; send it faster, or raise --body-timeout"
        return ApiError(408, message, retry=False, headers=headers)


@dataclass
class ResponseSender:
    """An ASGI `send` that adds the request id to the headers.  status: the response's status, 0 before it starts."""

    send: Send
    status: int = 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message)["x-request-id"] = request_id.get()
        await self.send(message)
