"""Closes connections whose client is stalled, and the oldest idle ones where there are too many.

A stalled client does not read its response, or does not send a whole request.

asyncio keeps a closed transport until its last byte is sent, forever if the client does not read.  uvicorn times out
only connections that are idle after a response.  It has no limit for a new connection without data, for slow headers,
or for the rest of a body whose response is already complete.  So the server checks all connections periodically.

Connections are uvicorn's protocol objects, with its h11 or httptools parser.  They have: transport; scope, of the last
request; cycle, which sends its response, None before the first request; timeout_keep_alive_task, set from the end of a
response until more data arrives.
"""

import logging
import socket
import struct
from collections.abc import Iterable
from typing import Any

from prometheus_client import Counter

from espalier.server.logs import NO_REQUEST, Seldom, about

log = logging.getLogger("espalier.server")
# Linux only.  ACKNOWLEDGED reads tcpi_bytes_acked from struct tcp_info.
TCP_INFO = getattr(socket, "TCP_INFO", None)
ACKNOWLEDGED = struct.Struct("120xQ")


class Readers:
    """Closes connections whose client does not read.

    limit_s: seconds for which the client may take no byte of pending output, None for no limit; closed: counts them.
    """

    def __init__(self, limit_s: float | None, closed: Counter):
        self.limit_s = limit_s
        self.closed = closed
        # For each connection with pending output: pending bytes, acknowledged bytes, and the time of the last progress.
        self._pending: dict[Any, tuple[int, int, float]] = {}

    def sweep(self, connections: Iterable[Any], now: float, at_most_s: float | None = None) -> None:
        """Check all open connections.  now: in seconds; at_most_s: a further limit, beside limit_s."""
        limit = min((each for each in (self.limit_s, at_most_s) if each is not None), default=None)
        pending = {}
        for connection in list(connections):
            size = connection.transport.get_write_buffer_size()
            if not size:
                continue
            taken = _acknowledged(connection.transport)
            size_before, taken_before, since = self._pending.get(connection, (size, taken, now))
            # The buffer's size alone does not show progress: it can grow while the client reads, and it shrinks only
            # when the kernel's send buffer has much room.
            since = now if size < size_before or taken > taken_before else since
            if limit is not None and now - since >= limit:
                message = "the client read nothing for %.0f s: the connection is closed, %d bytes were not sent"
                _abort(connection, self.closed, message, now - since, size)
            else:
                pending[connection] = size, taken, since
        self._pending = pending


class Senders:
    """Closes connections whose client does not send a whole request.

    limit_s: seconds for which a connection may have no request in progress, None for no limit; closed: counts them.
    A request whose body is still being read is in progress; gate.Upload limits that time.
    """

    def __init__(self, limit_s: float | None, closed: Counter):
        self.limit_s = limit_s
        self.closed = closed
        # For each connection without a request in progress: the cycle of its last request, and since when.
        self._idle: dict[Any, tuple[Any, float]] = {}

    def sweep(self, connections: Iterable[Any], now: float) -> None:
        """Check all open connections.  now: in seconds."""
        idle = {}
        for connection in list(connections):
            cycle = connection.cycle
            if not _is_idle(connection):
                continue
            # Readers handles output that is still pending.  uvicorn's keep-alive timeout handles a connection on which
            # nothing arrived since the response.
            if connection.transport.get_write_buffer_size() or connection.timeout_keep_alive_task is not None:
                continue
            last, since = self._idle.get(connection, (cycle, now))
            since = since if last is cycle else now
            if self.limit_s is not None and now - since >= self.limit_s:
                message = "no whole request arrived in %.0f s: the connection from %s is closed"
                _abort(connection, self.closed, message, now - since, _address(connection.transport))
            else:
                idle[connection] = cycle, since
        self._idle = idle


class Room:
    """Keeps the number of connections within a limit: above it, the one that has been idle longest is closed.

    Idle is a connection without a request in progress and without pending output: whoever has no key is never in a
    request for long.  Without an idle one, the oldest is closed whose request has not arrived whole or whose client has
    not read its response; without that, the new one.

    limit: None for no limit (descriptors.max_connections).
    """

    def __init__(self, limit: int | None):
        self.limit = limit
        # In the order in which they were made or became idle.
        self._open: dict[Any, None] = {}
        self._seldom = Seldom()

    def enter(self, connection: Any, now: float) -> None:
        """Count a new connection.  now: in seconds."""
        self._open[connection] = None
        if self.limit is None or len(self._open) <= self.limit:
            return
        # The new one comes last, and is idle itself.
        before = [each for each in self._open if each is not connection]
        chosen = next(filter(_is_quiet, before), None) or next(filter(_waits_for_client, before), connection)
        del self._open[chosen]
        if count := self._seldom.due(now):
            message = "more than %d connections (ulimit -n): those idle longest are closed, %d since the last such line"
            log.warning(message, self.limit, count)
        chosen.transport.abort()

    def renew(self, connection: Any) -> None:
        """A connection's request has ended."""
        if connection in self._open:
            del self._open[connection]
            self._open[connection] = None

    def leave(self, connection: Any) -> None:
        self._open.pop(connection, None)


def _is_idle(connection: Any) -> bool:
    return connection.cycle is None or connection.cycle.response_complete


def _is_quiet(connection: Any) -> bool:
    return _is_idle(connection) and not connection.transport.get_write_buffer_size()


def _waits_for_client(connection: Any) -> bool:
    return _is_idle(connection) or bool(connection.cycle.more_body)


def _abort(connection: Any, closed: Counter, message: str, *values: Any) -> None:
    request_id = (connection.scope or {}).get("state", {}).get("request_id", NO_REQUEST)
    log.warning(message, *values, extra=about(request_id))
    closed.inc()
    # Not close(), which waits for the client.
    connection.transport.abort()


def _address(transport: Any) -> str:
    """The client's address.  A Unix socket has none."""
    peer = transport.get_extra_info("peername")
    return f"{peer[0]} port {peer[1]}" if isinstance(peer, tuple) else "a Unix socket"


def _acknowledged(transport: Any) -> int:
    """Bytes that the client has acknowledged so far; 0 if the system does not report it."""
    connected = transport.get_extra_info("socket")
    if connected is None or TCP_INFO is None:
        return 0
    try:
        info = connected.getsockopt(socket.IPPROTO_TCP, TCP_INFO, ACKNOWLEDGED.size)
    except OSError:
        return 0
    return int(ACKNOWLEDGED.unpack(info)[0]) if len(info) == ACKNOWLEDGED.size else 0
