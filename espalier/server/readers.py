"""Who takes what is written to them, and who does not: a connection whose reader takes nothing is closed.

A transport that is closed keeps its socket until its last byte has gone, for ever where nobody reads, and asyncio has
no limit for that.  So those in which bytes wait are looked at from time to time.
"""

import logging
import socket
import struct
from collections.abc import Iterable
from typing import Any

from prometheus_client import Counter

from espalier.server.logs import NO_REQUEST, about

log = logging.getLogger("espalier.server")
# Linux's, where tcp_info has tcpi_bytes_acked.
TCP_INFO = getattr(socket, "TCP_INFO", None)
ACKNOWLEDGED = struct.Struct("120xQ")


class Readers:
    """limit_s: how long a reader may take nothing of what waits for it, None for no limit; closed: counts the others.

    Connections are uvicorn's protocols, of whichever kind: they have a transport and the scope of their last request.
    """

    def __init__(self, limit_s: float | None, closed: Counter):
        self.limit_s = limit_s
        self.closed = closed
        # Of each that has bytes waiting: how many, how many were acknowledged, and since when none was taken.
        self._waiting: dict[Any, tuple[int, int, float]] = {}

    def sweep(self, connections: Iterable[Any], now: float, at_most_s: float | None = None) -> None:
        """Look at all connections that are open.  now: in seconds; at_most_s: a limit beside one's own."""
        limit = min((each for each in (self.limit_s, at_most_s) if each is not None), default=None)
        waiting = {}
        for connection in list(connections):
            size = connection.transport.get_write_buffer_size()
            if not size:
                continue
            taken = _acknowledged(connection.transport)
            size_before, taken_before, since = self._waiting.get(connection, (size, taken, now))
            # What waits may grow while a reader takes some, and shrinks only where the system's buffer has much room.
            since = now if size < size_before or taken > taken_before else since
            if limit is not None and now - since >= limit:
                self._close(connection, size, now - since)
            else:
                waiting[connection] = size, taken, since
        self._waiting = waiting

    def _close(self, connection: Any, size: int, seconds: float) -> None:
        request_id = (connection.scope or {}).get("state", {}).get("request_id", NO_REQUEST)
        message = "its reader took nothing for %.0f s: the connection is closed, %d bytes unread"
        log.warning(message, seconds, size, extra=about(request_id))
        self.closed.inc()
        # Not close(), which waits for the reader.
        connection.transport.abort()


def _acknowledged(transport: Any) -> int:
    """Bytes that the reader's side has ever taken in; 0 where the system does not say."""
    connected = transport.get_extra_info("socket")
    if connected is None or TCP_INFO is None:
        return 0
    try:
        info = connected.getsockopt(socket.IPPROTO_TCP, TCP_INFO, ACKNOWLEDGED.size)
    except OSError:
        return 0
    return int(ACKNOWLEDGED.unpack(info)[0]) if len(info) == ACKNOWLEDGED.size else 0
