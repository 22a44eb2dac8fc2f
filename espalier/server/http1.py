"""One HTTP connection: uvicorn's, with this server's error format and support for half-closed connections."""

import asyncio
import logging
import socket
from http.client import responses
from typing import Any

import msgspec
from starlette.types import Scope
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from espalier.server.connections import Room
from espalier.server.errors import ApiError
from espalier.server.heads import UNREADABLE, Frames
from espalier.server.logs import new_request_id, request_id

log = logging.getLogger("espalier.server")
# A half-closed connection is checked every CHECK_S.  Check FIRST_PROBE, and every CHECKS_PER_PROBE after it, sends an
# interim response.
CHECK_S = 0.1
FIRST_PROBE = 3
CHECKS_PER_PROBE = 100
LINGER_S = 2.0
# RFC 9110, section 15.2: an HTTP/1.1 client ignores interim responses that it did not ask for, whatever their number.
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"


class Connection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]  # whichever of uvicorn's parsers is installed
    """A connection on which a client that sends FIN after a whole request still gets its response.

    FIN does not say whether the client still reads.  Data written to a client that is gone causes a TCP reset.  That
    data is a stream's events or, before the response starts, an interim response.  FIN counts as a disconnect on
    HTTP/1.0, which has no interim responses, inside a request, and if several requests are pipelined.
    """

    half_closed = False
    # Once an error was sent for what is no HTTP: what else comes is dropped.
    is_refused = False
    app_state: dict[str, Any]

    def __init__(self, *args: Any, room: Room, **named: Any):
        super().__init__(*args, **named)
        self.room = room
        # uvicorn gives each request a copy: connection_of.
        self.app_state = {**self.app_state, "connection": self}
        self.frames = Frames()

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.room.enter(self, self.loop.time())

    def connection_lost(self, exc: Exception | None) -> None:
        self.room.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.is_refused:
            return
        # uvicorn learns of the data also if none of it passes yet: its timer of idle connections ends.
        passed = False
        try:
            for part in self.frames.take(data):
                passed = True
                super().data_received(part)
                if self.is_refused or self.transport.is_closing():
                    return
            if not passed:
                super().data_received(b"")
        except ApiError as error:
            self._refuse(error)

    @property
    def takes_chunks(self) -> bool:
        """Whether what is written now leaves at once, or soon."""
        return not (self.flow.write_paused or self.transport.is_closing())

    def write_chunk(self, data: bytes) -> None:
        """Write a part of a response whose head was sent by uvicorn and whose end will be: as uvicorn would."""
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def eof_received(self) -> bool:
        """Whether the connection stays open."""
        if self.is_refused:
            return False
        cycle = self.cycle
        self.half_closed = (
            cycle is not None
            and not cycle.more_body
            and not cycle.response_complete
            and self.scope["http_version"] != "1.0"
            and not getattr(self, "pipeline", ())
        )
        if self.half_closed:
            self.loop.call_later(CHECK_S, self._check, 0)
        return self.half_closed

    def _check(self, count: int) -> None:
        cycle = self.cycle
        if self.transport.is_closing() or cycle.response_complete:
            return
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        if not cycle.response_started and count % CHECKS_PER_PROBE == FIRST_PROBE:
            self.transport.write(INTERIM)
        self.loop.call_later(CHECK_S, self._check, count + 1)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.room.renew(self)
        # After FIN no request follows, except one that was pipelined and now runs.
        if self.half_closed and self.cycle.response_complete:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """What uvicorn calls for malformed HTTP."""
        self._refuse(ApiError(400, UNREADABLE))

    def _refuse(self, error: ApiError) -> None:
        """Send an error and close, unless a response to an unfinished request has started on this connection.

        The client would read a second response as the next request's.
        """
        cycle = self.cycle
        if cycle is None or not cycle.response_started or (cycle.response_complete and not cycle.more_body):
            self.transport.write(_refusal(error, self.client))
            self._linger()
        else:
            self.transport.close()

    def _linger(self) -> None:
        """Close, but read on for LINGER_S: a client that still sends would lose the response to a TCP reset."""
        self.is_refused = True
        if self.cycle is not None and not self.cycle.response_complete:
            # As uvicorn does where a connection is lost: nothing may be written behind the error.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.abort)


def connection_of(scope: Scope) -> Connection | None:
    """The connection of a request whose response is sent in chunks; None for any other."""
    return scope.get("state", {}).get("connection") if scope.get("http_version") == "1.1" else None


def _refusal(error: ApiError, client: tuple[str, int] | None) -> bytes:
    """The whole response, with a new request id.  The id of a request that ends in this context is restored."""
    before, status = request_id.set(new_request_id()), error.status_code
    place = f"{client[0]} port {client[1]}" if client else "an unknown address"
    log.info("refused HTTP from %s: %d: %s", place, status, error.detail)
    body = msgspec.json.encode(error.body())
    head = {
        "content-type": "application/json",
        "content-length": len(body),
        "x-request-id": request_id.get(),
        "connection": "close",
    }
    request_id.reset(before)
    lines = [f"HTTP/1.1 {status} {responses[status]}", *(f"{name}: {value}" for name, value in head.items()), "", ""]
    return "\r\n".join(lines).encode() + body
