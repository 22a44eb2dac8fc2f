"""Who takes what is written to them, and who does not: a connection whose reader takes nothing is closed.

A transport that is closed keeps its socket until its last byte has gone, for ever where nobody reads, and asyncio has
no limit for that.  So the bytes that wait in each are looked at from time to time.
"""

import logging
from collections.abc import Iterable
from typing import Any

from prometheus_client import Counter

from espalier.server.logs import NO_REQUEST, about

log = logging.getLogger("espalier.server")


class Readers:
    """limit_s: how long a reader may take nothing of what waits for it, None for no limit; closed: counts the others.

    Connections are uvicorn's protocols, of whichever kind: they have a transport and the scope of their last request.
    """

    def __init__(self, limit_s: float | None, closed: Counter):
        self.limit_s = limit_s
        self.closed = closed
        # Of each that has bytes waiting: how many, and since when none was taken.
        self._waiting: dict[Any, tuple[int, float]] = {}

    def sweep(self, connections: Iterable[Any], now: float, at_most_s: float | None = None) -> None:
        """Look at all connections that are open.  now: in seconds; at_most_s: a limit beside one's own."""
        limit = min((each for each in (self.limit_s, at_most_s) if each is not None), default=None)
        waiting = {}
        for connection in list(connections):
            size = connection.transport.get_write_buffer_size()
            if not size:
                continue
            before, since = self._waiting.get(connection, (size + 1, now))
            since = now if size < before else since
            if limit is not None and now - since >= limit:
                self._close(connection, size, now - since)
            else:
                waiting[connection] = size, since
        self._waiting = waiting

    def _close(self, connection: Any, size: int, seconds: float) -> None:
        request_id = (connection.scope or {}).get("state", {}).get("request_id", NO_REQUEST)
        message = "its reader took nothing for %.0f s: the connection is closed, %d bytes unread"
        log.warning(message, seconds, size, extra=about(request_id))
        self.closed.inc()
        # Not close(), which waits for the reader.
        connection.transport.abort()
