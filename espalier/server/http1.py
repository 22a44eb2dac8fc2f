"""One HTTP connection: uvicorn's, with our words where it answers by itself, before the gate and any endpoint."""

import logging
import socket
from http.client import responses

import msgspec
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from espalier.server.errors import ApiError
from espalier.server.logs import new_request_id, request_id

log = logging.getLogger("espalier.server")
UNREADABLE = (
    "this is no HTTP that can be read: its first line, a header or the framing of its body is malformed or too long; "
    "send plain HTTP/1.1 (http://, not https://)"
)


# A half-closed connection is looked at so often; an interim answer is sent at one look of so many.
LOOK_S = 0.1
FIRST_PROBE = 3
LOOKS_A_PROBE = 100
# RFC 9110, section 15.2: a client reads over any number of interim answers, asked for or not, from HTTP/1.1 on.
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"


class Connection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]  # whichever of uvicorn's parsers is installed
    """A client that sends FIN behind a whole request gets its answer.

    FIN alone does not say whether the client reads on or is gone.  What is written to one that is gone comes back as a
    reset: a stream's events, or an interim answer as long as there is none.  FIN is leaving on HTTP/1.0, which has no
    interim answers, where a request is not whole, and where several wait.
    """

    half_closed = False

    def eof_received(self) -> bool:
        """Whether the connection stays open."""
        cycle = self.cycle
        self.half_closed = (
            cycle is not None
            and not cycle.more_body
            and not cycle.response_complete
            and self.scope["http_version"] != "1.0"
            and not getattr(self, "pipeline", ())
        )
        if self.half_closed:
            self.loop.call_later(LOOK_S, self._look, 0)
        return self.half_closed

    def _look(self, count: int) -> None:
        cycle = self.cycle
        if self.transport.is_closing() or cycle.response_complete:
            return
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        if not cycle.response_started and count % LOOKS_A_PROBE == FIRST_PROBE:
            self.transport.write(INTERIM)
        self.loop.call_later(LOOK_S, self._look, count + 1)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # Nothing more comes, unless it is there already.
        if self.half_closed and self.cycle.response_complete:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP; where an answer is out whose request goes on, another would be taken for the next."""
        cycle = self.cycle
        if cycle is None or not cycle.response_started or (cycle.response_complete and not cycle.more_body):
            self.transport.write(_unreadable(self.client))
        self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        # uvicorn advises to install a WebSocket library, which would change nothing here.
        log.debug("an upgrade of the connection is asked for; there is none, and it is answered without")


def _unreadable(client: tuple[str, int] | None) -> bytes:
    """The whole answer.  It may come amid another request's end, whose id stays its own."""
    before = request_id.set(new_request_id())
    log.info("what %s sent is no HTTP: 400", f"{client[0]} port {client[1]}" if client else "somebody")
    error = ApiError(400, UNREADABLE)
    body = msgspec.json.encode(error.body())
    head = {
        "content-type": "application/json",
        "content-length": len(body),
        "x-request-id": request_id.get(),
        "connection": "close",
    }
    request_id.reset(before)
    lines = [f"HTTP/1.1 400 {responses[400]}", *(f"{name}: {value}" for name, value in head.items()), "", ""]
    return "\r\n".join(lines).encode() + body
