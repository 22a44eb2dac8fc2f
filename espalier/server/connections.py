"""Connections whose other side does nothing: one that takes nothing of its answer, one that sends no whole request.

A transport that is closed keeps its socket until its last byte has gone, for ever where nobody reads, and asyncio has
no limit for that.  uvicorn closes a connection on which nothing comes after an answer; one on which nothing ever came,
headers that trickle and the rest of a body whose answer is out have no limit.  So all are looked at from time to time.

Connections are uvicorn's protocols, of whichever kind: they have a transport, the scope of their last request, `cycle`,
which answers it (None before the first), and `timeout_keep_alive_task` from an answer's end to what comes next.
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
    """limit_s: how long a reader may take nothing of what waits for it, None for no limit; closed: those that did."""

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
                message = "its reader took nothing for %.0f s: the connection is closed, %d bytes unread"
                _abort(connection, self.closed, message, now - since, size)
            else:
                waiting[connection] = size, taken, since
        self._waiting = waiting


class Senders:
    """limit_s: how long a connection may be without a request that is being answered, None for no limit; closed: those
    that were.  A body that an endpoint waits for is not its matter: its request is being answered (gate.Upload).
    """

    def __init__(self, limit_s: float | None, closed: Counter):
        self.limit_s = limit_s
        self.closed = closed
        # Of each without one: what answered its last, and since when.
        self._without: dict[Any, tuple[Any, float]] = {}

    def sweep(self, connections: Iterable[Any], now: float) -> None:
        """Look at all connections that are open.  now: in seconds."""
        without = {}
        for connection in list(connections):
            cycle = connection.cycle
            if cycle is not None and not cycle.response_complete:
                continue
            # An answer that is out may still have to be taken, which is for Readers; where nothing came since, uvicorn
            # itself waits a moment for the next request, and closes.
            if connection.transport.get_write_buffer_size() or connection.timeout_keep_alive_task is not None:
                continue
            last, since = self._without.get(connection, (cycle, now))
            since = since if last is cycle else now
            if self.limit_s is not None and now - since >= self.limit_s:
                message = "no whole request came in %.0f s: the connection from %s is closed"
                _abort(connection, self.closed, message, now - since, _address(connection.transport))
            else:
                without[connection] = cycle, since
        self._without = without


def _abort(connection: Any, closed: Counter, message: str, *values: Any) -> None:
    request_id = (connection.scope or {}).get("state", {}).get("request_id", NO_REQUEST)
    log.warning(message, *values, extra=about(request_id))
    closed.inc()
    # Not close(), which waits for the other side.
    connection.transport.abort()


def _address(transport: Any) -> str:
    """The other side's, as the system has it; there is none for a socket that is a file."""
    peer = transport.get_extra_info("peername")
    return f"{peer[0]} port {peer[1]}" if isinstance(peer, tuple) else "nowhere"


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
