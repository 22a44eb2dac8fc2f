"""One HTTP connection: uvicorn's, with our words where it answers by itself, before the gate and any endpoint."""

import logging
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


class Connection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]  # whichever of uvicorn's parsers is installed
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
