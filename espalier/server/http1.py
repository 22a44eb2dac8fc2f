"""One HTTP/1 connection: h11 reads requests, and the ASGI application runs once for each request.

The head of a request is its first line and its headers.  The head is checked before h11 parses it, because h11 accepts
heads that this server refuses, and is slow for many lines.  The header `Upgrade` is ignored (RFC 9110, section 7.8).
"""

import asyncio
import logging
import re
import socket
from collections.abc import Iterable
from email.utils import formatdate
from http import HTTPStatus
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote, urlsplit

import h11
from starlette.types import ASGIApp, Message, Scope

from espalier.server.connections import OpenConnections, peer_address
from espalier.server.errors import ApiError
from espalier.server.logs import new_request_id, request_id

MAX_HEAD_BYTES = 65536
MAX_HEAD_LINES = 256
MALFORMED_HTTP = (
    "malformed HTTP: the request line, a header or the framing of the body is invalid; "
    "send plain HTTP/1.1 (http://, not https://)"
)
HEAD_END = b"\r\n\r\n"
# Matches the beginning of a request, even if only a part of the first line has arrived.
BEGINNING_PATTERN = re.compile(rb"[A-Z-]{0,24}(?:\Z| (?:\Z|[^ \r\n]+(?:\Z| (?:HTTP/1\.[01]\r\n|[HTP/1.0\r]{0,9}\Z))))")
# Matches a line feed without carriage return, or a line that continues the header of the line before.
BAD_LINE_BREAK_PATTERN = re.compile(rb"(?<!\r)\n|\r\n[ \t]")
log = logging.getLogger("espalier.server")
# The limit of a chunk's size line, and of the trailers after the last chunk.  A chunked body is passed to h11 in pieces
# of this size.
MAX_LINE_BYTES = 4096
# A body with more chunks must have MIN_CHUNK_BYTES per chunk on average, because a chunk costs the event loop 0.01 ms.
MAX_SMALL_CHUNKS = 4096
MIN_CHUNK_BYTES = 32
# The most unread bytes of one body.  More bytes wait in the socket until the application reads.
MAX_UNREAD_BYTES = 65536
STATUS_LINES = MappingProxyType(
    {each.value: f"HTTP/1.1 {each.value} {each.phrase}\r\n".encode() for each in HTTPStatus}
)
LAST_CHUNK = b"0\r\n\r\n"
CONTINUE_RESPONSE = STATUS_LINES[100] + b"\r\n"
# A connection is half-closed when its client has sent FIN, and is checked every HALF_CLOSED_CHECK_S seconds.  A probe
# (an interim response) is sent at check number FIRST_PROBE_CHECK, counted from 0, and every CHECKS_PER_PROBE checks.
HALF_CLOSED_CHECK_S = 0.1
FIRST_PROBE_CHECK = 3
CHECKS_PER_PROBE = 100
LINGER_S = 2.0
# The name of an ASGI extension in the scope.  Its value is an HttpExchange, to which the application writes events.
EXCHANGE_EXTENSION = "espalier.exchange"


def head_length(data: bytes) -> int | None:
    """Returns the length of the head at the start of the data; None if the head is incomplete.  Raises ApiError."""
    end = data.find(HEAD_END)
    head = data if end < 0 else data[: end + len(HEAD_END)]
    if len(head) > MAX_HEAD_BYTES:
        raise ApiError(431, f"the request's head is larger than {MAX_HEAD_BYTES} bytes; send fewer headers")
    if head.count(b"\n") > MAX_HEAD_LINES:
        raise ApiError(431, f"the request's head has more than {MAX_HEAD_LINES} lines; send fewer headers")
    if not BEGINNING_PATTERN.match(head) or (end >= 0 and BAD_LINE_BREAK_PATTERN.search(head)):
        raise ApiError(400, MALFORMED_HTTP)
    if end < 0:
        return None
    if head.startswith(b"CONNECT "):
        raise ApiError(405, "CONNECT is not served: this server is no proxy")
    first, *lines = head.lower().split(b"\r\n")[:-2]
    headers = [line.partition(b":") for line in lines]
    if first.endswith(b"1.1") and [name for name, *_ in headers].count(b"host") != 1:
        raise ApiError(400, "an HTTP/1.1 request has one Host header; send it once")
    codings = [value.strip() for name, _, value in headers if name == b"transfer-encoding"]
    if codings and codings != [b"chunked"]:
        # The last coding must be chunked (RFC 9112, section 6.1).
        joined = b",".join(codings)
        *_, last = names = [name.strip(b" \t") for name in joined.split(b",")]
        if last == b"chunked" and names.count(last) == 1:
            raise ApiError(501, f"transfer-encoding {joined.decode('latin-1')} is not supported; use chunked alone")
        raise ApiError(400, "transfer-encoding must be chunked alone, or left out: the body's end would not be known")
    return len(head)


class Connection(asyncio.Protocol):
    """One HTTP/1 connection.  app: the ASGI application.  connections: all open connections of the server.

    A client may send FIN after its whole request (half-closed), and still read the response.  FIN alone does not tell
    whether the client has gone.  But data for a client that has gone causes a TCP reset.  So the connection goes on
    writing: interim responses as probes until the response starts, then the response.  In three cases FIN counts as a
    disconnect: before a request is complete, on HTTP/1.0 (no interim responses), and if a further request has arrived.
    """

    transport: asyncio.Transport

    def __init__(self, app: ASGIApp, connections: OpenConnections):
        self.app = app
        self.connections = connections
        self.loop = asyncio.get_running_loop()
        # The bytes of the next request's head that have arrived so far.
        self.head = b""
        self.h11_connection: h11.Connection | None = None
        # The request in progress, or the last request.
        self.exchange: HttpExchange | None = None
        self.task: asyncio.Task[None] | None = None
        self.can_write = asyncio.Event()
        self.can_write.set()
        self.is_half_closed = False
        # True after the error response to data that is not HTTP.  Further data is not read.
        self.is_closing_after_error = False
        # True if the connection ends after the response in progress.
        self.ends_after_response = False
        # For OpenConnections: when the connection became idle, and whether no data came after the last response.
        self.idle_since = self.loop.time()
        self.got_no_data_since_response = False
        self.num_written = 0

    # Methods that asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.connections.add(self, self.loop.time())

    def connection_lost(self, exc: Exception | None) -> None:
        self.connections.remove(self)
        self.can_write.set()
        self._disconnect()

    def pause_writing(self) -> None:
        self.can_write.clear()

    def resume_writing(self) -> None:
        self.can_write.set()

    def data_received(self, data: bytes) -> None:
        if self.got_no_data_since_response:
            self.got_no_data_since_response, self.idle_since = False, self.loop.time()
        self._receive_data(data)

    def eof_received(self) -> bool:
        """Returns whether the connection stays open."""
        exchange, h11_connection = self.exchange, self.h11_connection
        self.is_half_closed = (
            exchange is not None
            and h11_connection is not None
            and not (self.is_closing_after_error or exchange.more_body or exchange.is_ended)
            and exchange.scope["http_version"] != "1.0"
            and not h11_connection.trailing_data[0]
        )
        if self.is_half_closed:
            self.loop.call_later(HALF_CLOSED_CHECK_S, self._check_half_closed, 0)
        return self.is_half_closed

    # Reading

    def _receive_data(self, data: bytes) -> None:
        """Handle received data.  Sends an error response to data that is not HTTP."""
        try:
            if not self.is_closing_after_error:
                self._pass_to_h11(data)
        except ApiError as error:
            self._send_error_and_close(error)
        except h11.RemoteProtocolError as error:
            too_large = error.error_status_hint == 431
            why = f"a chunk's line or the trailers are larger than {MAX_LINE_BYTES} bytes; send less"
            self._send_error_and_close(ApiError(431, why) if too_large else ApiError(400, MALFORMED_HTTP))

    def _pass_to_h11(self, data: bytes) -> None:
        """Pass data to h11.  Chunked data is passed in pieces, because h11 does not limit lines that arrive whole."""
        while True:
            is_chunked = self.h11_connection is not None and self.exchange is not None and self.exchange.is_chunked
            size = MAX_LINE_BYTES if is_chunked else len(data)
            part, data = data[:size], data[size:]
            if self.h11_connection is None:
                self.head += part
            elif part:
                self.h11_connection.receive_data(part)
            self._handle_arrived_requests()
            if not data:
                return

    def _handle_arrived_requests(self) -> None:
        """Handle the requests and body parts that h11 has parsed.  Raises ApiError, or h11's errors."""
        while not (self.is_closing_after_error or self.transport.is_closing()):
            if self.h11_connection is None and not self._begin_request():
                return
            assert self.h11_connection is not None
            event = self.h11_connection.next_event()
            if event is h11.NEED_DATA:
                return
            if event is h11.PAUSED:  # the next request has arrived before the response to this request has ended
                self.transport.pause_reading()
                return
            if self.exchange is not None and isinstance(event, h11.Data):
                self.exchange.add_body_part(event)
            elif self.exchange is not None and isinstance(event, h11.EndOfMessage):
                self.exchange.more_body = False
                self.exchange.state_changed.set()
                if self.exchange.is_ended:
                    self._reset_for_next_request()

    def _begin_request(self) -> bool:
        """Start a request if its complete head has arrived, and return whether it was started.  Raises ApiError."""
        self.head = self.head.lstrip(b"\r\n")
        end = head_length(self.head)
        if end is None:
            return False
        head, rest, self.head = self.head[:end], self.head[end:], b""
        self.h11_connection = h11.Connection(h11.SERVER, MAX_LINE_BYTES)
        self.h11_connection.receive_data(head)
        request = self.h11_connection.next_event()
        assert isinstance(request, h11.Request)
        self.exchange = HttpExchange(self, request)
        self.task = self.loop.create_task(self._run_app(self.exchange))
        if rest:
            self._pass_to_h11(rest)
        return self.h11_connection is not None

    async def _run_app(self, exchange: "HttpExchange") -> None:
        try:
            await self.app(exchange.scope, exchange.receive, exchange.send)
        except Exception:
            log.exception("the application failed")
        if not exchange.is_ended:
            self.transport.close()

    def _reset_for_next_request(self) -> None:
        """Prepare for the next request.  The last request must have been read and answered completely."""
        assert self.h11_connection is not None
        self.head, self.h11_connection = self.h11_connection.trailing_data[0], None

    @property
    def is_idle(self) -> bool:
        """Whether no request is in progress."""
        return self.exchange is None or self.exchange.is_ended

    @property
    def waits_for_client(self) -> bool:
        """Whether the client must still send a request, or the rest of its request."""
        return self.exchange is None or self.exchange.is_ended or self.exchange.more_body

    def _disconnect(self) -> None:
        """Tell the application that the client has gone."""
        if self.exchange is not None and not self.exchange.is_ended:
            self.exchange.is_disconnected = True
            self.exchange.state_changed.set()

    # Writing

    def write(self, data: bytes) -> None:
        self.num_written += len(data)
        self.transport.write(data)

    def response_ended(self, exchange: "HttpExchange") -> None:
        self.idle_since, self.got_no_data_since_response = self.loop.time(), True
        self.connections.mark_idle(self)
        # The connection closes also after FIN, because the client can send no further request.
        if self.ends_after_response or self.is_half_closed or not exchange.keeps_alive:
            self.transport.close()
            return
        self.transport.resume_reading()
        if not exchange.more_body:
            self._reset_for_next_request()
            self._receive_data(b"")

    def close_after_response(self) -> None:
        """Close the connection after the response in progress, or now if no response is in progress."""
        self.ends_after_response = True
        if self.is_idle:
            self.transport.close()

    def _check_half_closed(self, check_number: int) -> None:
        """Abort if a half-closed client has gone.  Called periodically, with check_number counted from 0."""
        exchange = self.exchange
        assert exchange is not None
        if self.transport.is_closing() or exchange.is_ended:
            return
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        if not exchange.is_started and check_number % CHECKS_PER_PROBE == FIRST_PROBE_CHECK:
            # A client ignores any number of interim responses that it did not request (RFC 9110, section 15.2).
            self.write(CONTINUE_RESPONSE)
        self.loop.call_later(HALF_CLOSED_CHECK_S, self._check_half_closed, check_number + 1)

    def _send_error_and_close(self, error: ApiError) -> None:
        """Send an error and close.  If a response has started, only close, because the client would read the error as a
        part of this response."""
        exchange = self.exchange
        if exchange is None or not exchange.is_started or (exchange.is_ended and not exchange.more_body):
            self.write(_error_bytes(error, self.transport))
            self._close_after_error()
        else:
            self.transport.close()

    def _close_after_error(self) -> None:
        """Close for writing, and read for LINGER_S.  Otherwise a TCP reset could destroy the error response."""
        self.is_closing_after_error = True
        # The application must not write after the error.
        self._disconnect()
        self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.abort)


class HttpExchange:
    """One request and its response, with the `receive` and `send` of the ASGI application.

    more_body: whether a part of the request's body is still to come.  is_started, is_ended: whether the response has
    started or ended.  keeps_alive: whether another request may follow on the connection."""

    def __init__(self, connection: Connection, request: h11.Request):
        headers = dict(request.headers)
        if b"content-length" in headers and b"transfer-encoding" in headers:
            # The two headers may disagree about the body's end, and a proxy may use one header and h11 the other.
            raise ApiError(400, MALFORMED_HTTP)
        self.connection = connection
        self.scope = _asgi_scope(request, connection.transport)
        self.scope["extensions"] = {EXCHANGE_EXTENSION: self}
        self.is_chunked = b"transfer-encoding" in headers
        self.is_http_1_1 = request.http_version == b"1.1"
        self.keeps_alive = self.is_http_1_1 and b"close" not in headers.get(b"connection", b"").lower()
        self.awaits_continue = self.is_http_1_1 and headers.get(b"expect", b"").lower() == b"100-continue"
        self.body = bytearray()
        self.more_body, self.is_body_delivered = True, False
        self.is_started = self.is_ended = self.is_disconnected = False
        self.state_changed = asyncio.Event()
        self.num_chunks = self.num_body_bytes = 0
        self.head = b""
        self.sends_body, self.sends_chunked = request.method != b"HEAD", False

    def add_body_part(self, data: h11.Data) -> None:
        """Add a part of the body.  Raises ApiError."""
        self.num_chunks += data.chunk_start
        self.num_body_bytes += len(data.data)
        self.awaits_continue = False
        if self.num_chunks > MAX_SMALL_CHUNKS and self.num_body_bytes < MIN_CHUNK_BYTES * self.num_chunks:
            raise ApiError(400, f"{MAX_SMALL_CHUNKS} chunks of less than {MIN_CHUNK_BYTES} bytes; send larger ones")
        # After the response, the rest of the body is dropped.
        if not self.is_ended:
            self.body += data.data
            self.state_changed.set()
            if len(self.body) > MAX_UNREAD_BYTES:
                self.connection.transport.pause_reading()

    async def receive(self) -> Message:
        """Returns the next message of the request, as ASGI defines."""
        if self.awaits_continue and not self.is_started:
            self.awaits_continue = False
            self.connection.write(CONTINUE_RESPONSE)
        while not (self.is_disconnected or self.is_ended):
            if self.body or not (self.more_body or self.is_body_delivered):
                data, self.body = bytes(self.body), bytearray()
                self.is_body_delivered = not self.more_body
                if self.more_body:
                    self.connection.transport.resume_reading()
                return {"type": "http.request", "body": data, "more_body": self.more_body}
            self.state_changed.clear()
            await self.state_changed.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Send a message, as ASGI defines.  First waits until the client has read enough output, or has gone."""
        await self.connection.can_write.wait()
        if self.is_disconnected or self.is_ended:
            return
        if message["type"] == "http.response.start":
            # The head is sent with the body's first part, so that both are one packet.
            self.head, self.is_started = self._response_head(message), True
            return
        data, self.head = self.head + self._as_chunk(message.get("body", b"")), b""
        self.is_ended = not message.get("more_body", False)
        self.connection.write(data + LAST_CHUNK if self.is_ended and self.sends_chunked else data)
        if self.is_ended:
            self.state_changed.set()
            self.connection.response_ended(self)

    def _response_head(self, message: Message) -> bytes:
        """Returns the bytes before the body.  message: ASGI's http.response.start."""
        status, headers = message["status"], [(b"date", formatdate(usegmt=True).encode()), *message["headers"]]
        value_of_header = dict(headers)
        if self.sends_body and b"content-length" not in value_of_header and status not in (204, 304):
            self.sends_chunked = self.is_http_1_1
            self.keeps_alive &= self.is_http_1_1
            headers += [(b"transfer-encoding", b"chunked")] * self.sends_chunked
        self.keeps_alive &= value_of_header.get(b"connection") != b"close"
        if not self.keeps_alive and b"connection" not in value_of_header:
            headers.append((b"connection", b"close"))
        return _head_bytes(status, headers)

    @property
    def is_client_reading(self) -> bool:
        """Whether the client reads what is written, so that unsent data does not grow."""
        connection = self.connection
        return not self.is_disconnected and connection.can_write.is_set() and not connection.transport.is_closing()

    def write(self, data: bytes) -> None:
        """Write a part of the response's body.  The first and the last part must go through `send` instead."""
        self.connection.write(self._as_chunk(data))

    def _as_chunk(self, data: bytes) -> bytes:
        if not (data and self.sends_body):
            return b""
        return b"%x\r\n%b\r\n" % (len(data), data) if self.sends_chunked else data


def _asgi_scope(request: h11.Request, transport: asyncio.Transport) -> Scope:
    target = request.target
    if not target.startswith((b"/", b"*")):
        # Clients of proxies send a whole URL instead of a path (RFC 9112, section 3.2.2).
        url = urlsplit(target)
        target = (url.path or b"/") + (b"?" + url.query if url.query else b"")
    raw_path, _, query = target.partition(b"?")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": request.http_version.decode(),
        "method": request.method.decode(),
        "scheme": "http",
        "path": unquote(raw_path.decode("latin-1")),
        "raw_path": raw_path,
        "query_string": query,
        "root_path": "",
        "headers": list(request.headers),
        "client": _host_and_port(transport.get_extra_info("peername")),
        "server": _host_and_port(transport.get_extra_info("sockname")),
        "state": {},
    }


def _host_and_port(address: Any) -> tuple[str, int] | None:
    """Returns (host, port) of a socket address; None for a Unix socket."""
    return (address[0], address[1]) if isinstance(address, tuple) else None


def _head_bytes(status: int, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    return b"".join([STATUS_LINES[status], *(b"%b: %b\r\n" % header for header in headers), b"\r\n"])


def _error_bytes(error: ApiError, transport: asyncio.Transport) -> bytes:
    """Returns the bytes of an error response with a new request id.  Also logs the error."""
    context_token = request_id.set(new_request_id())
    log.info("refused HTTP from %s: %d: %s", peer_address(transport), error.status_code, error.detail)
    response, extra = error.response(), [(b"x-request-id", request_id.get().encode()), (b"connection", b"close")]
    request_id.reset(context_token)
    return _head_bytes(error.status_code, [*response.raw_headers, *extra]) + bytes(response.body)
