"""The open connections.  Connections of stalled clients are closed.  If too many connections are open, one is closed.

A stalled client does not read its response, or does not send a whole request.  All connections are checked
periodically, because asyncio keeps even a closed transport until its last byte is sent.

The process's limit on file descriptors decides how many connections may be open.  Some descriptors are reserved for
journals, uploads and a new engine process.
"""

import asyncio
import errno
import logging
import os
import resource
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from espalier.errors import EspalierError
from espalier.server.logs import NO_REQUEST_ID, LogLimiter, log_extra
from espalier.server.metrics import Metrics

if TYPE_CHECKING:
    from espalier.server.http1 import Connection

log = logging.getLogger("espalier.server")
# A connection is closed if no data arrives within this time after a response.
KEEP_ALIVE_S = 5.0
# The most connections that asyncio accepts in one iteration of its loop.  The server cannot refuse, only close them.
MAX_ACCEPTS_PER_LOOP_TURN = 16
# A closed connection holds its descriptor for two more iterations of the loop.
LOOP_TURNS_TO_CLOSE = 3
# The most uploads and downloads at once, and the file descriptors of one upload or download.
MAX_TRANSFERS = 8
DESCRIPTORS_PER_TRANSFER = 3
# File descriptors for the journals and inputs of batches, a new engine process with its socket, and helper processes.
SERVER_DESCRIPTORS = 40
RESERVED_DESCRIPTORS = (
    MAX_ACCEPTS_PER_LOOP_TURN * LOOP_TURNS_TO_CLOSE + MAX_TRANSFERS * DESCRIPTORS_PER_TRANSFER + SERVER_DESCRIPTORS
)
MIN_CONNECTIONS = 16
OUT_OF_RESOURCES_ERRNOS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class OpenConnections:
    """The open connections of one server.

    max_open: the most open connections (max_connections), None for no limit.  If more are open, one is closed.  First
    choice: the connection that has been idle longest, without a request in progress or unsent output.  Second choice:
    the oldest connection whose client has not sent its whole request or read its whole response.  Third choice: the new
    connection.

    send_timeout_s: how long a client may leave output unread.  body_timeout_s: the time limit for a request's headers,
    from the request's first byte or the connection's start.  None for no limit.  middleware.py limits the body's time.
    """

    def __init__(
        self, metrics: Metrics, max_open: int | None, send_timeout_s: float | None, body_timeout_s: float | None
    ):
        self.metrics = metrics
        self.max_open = max_open
        self.send_timeout_s = send_timeout_s
        self.body_timeout_s = body_timeout_s
        # A dict as an ordered set.  The order: when a connection was opened or last became idle, oldest first.
        self._open: dict[Connection, None] = {}
        # By connection with unsent output: (number of bytes that the kernel has taken, when this number last grew).
        self._send_progress: dict[Connection, tuple[int, float]] = {}
        self._log_limiter = LogLimiter()

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator["Connection"]:
        return iter(list(self._open))

    def add(self, connection: "Connection", now: float) -> None:
        """Add a new connection, and close a connection if too many are open.  now: the event loop's time."""
        self._open[connection] = None
        if self.max_open is None or len(self._open) <= self.max_open:
            return
        # The new connection is idle too, and last in the order.
        older_connections = [each for each in self._open if each is not connection]
        idle = (each for each in older_connections if each.is_idle and not _num_unsent_bytes(each))
        waiting_for_client = (each for each in older_connections if each.waits_for_client)
        closed = next(idle, None) or next(waiting_for_client, connection)
        del self._open[closed]
        if count := self._log_limiter.num_to_report(now):
            message = "more than %d connections (ulimit -n): those idle longest are closed, %d since the last such line"
            log.warning(message, self.max_open, count)
        closed.transport.abort()

    def mark_idle(self, connection: "Connection") -> None:
        """Move a connection whose request has ended to the end of the order of `_open`."""
        if connection in self._open:
            del self._open[connection]
            self._open[connection] = None

    def remove(self, connection: "Connection") -> None:
        self._open.pop(connection, None)
        self._send_progress.pop(connection, None)

    def close_stalled(self, now: float, max_stall_s: float | None = None) -> None:
        """Close connections of stalled clients.

        now: the event loop's time.  max_stall_s: a second limit beside send_timeout_s; the shorter limit counts."""
        limits = [each for each in (self.send_timeout_s, max_stall_s) if each is not None]
        for connection in self:
            if num_unsent := _num_unsent_bytes(connection):
                self._abort_if_not_reading(connection, num_unsent, now, min(limits, default=None))
            else:
                self._send_progress.pop(connection, None)
                self._abort_if_not_sending(connection, now)

    def _abort_if_not_reading(self, connection: "Connection", num_unsent: int, now: float, limit: float | None) -> None:
        """Abort a connection whose client has read nothing for `limit` seconds.  num_unsent: in bytes."""
        # The connection's idle time begins only when all output is sent.
        connection.idle_since = now
        num_taken = connection.num_written - num_unsent
        num_taken_before, last_taken_at = self._send_progress.get(connection, (num_taken, now))
        last_taken_at = now if num_taken > num_taken_before else last_taken_at
        self._send_progress[connection] = num_taken, last_taken_at
        if limit is not None and now - last_taken_at >= limit:
            message = "the client read nothing for %.0f s: the connection is closed, %d bytes were not sent"
            _log_and_abort(connection, message, now - last_taken_at, num_unsent)
            self.metrics.stalled_readers.inc()

    def _abort_if_not_sending(self, connection: "Connection", now: float) -> None:
        """Close an idle connection after its time limit.  now: the time on the event loop's clock."""
        if not connection.is_idle:
            return
        seconds = now - connection.idle_since
        if connection.got_no_data_since_response:
            if seconds >= KEEP_ALIVE_S:
                connection.transport.close()
        elif self.body_timeout_s is not None and seconds >= self.body_timeout_s:
            message = "no whole request arrived in %.0f s: the connection from %s is closed"
            _log_and_abort(connection, message, seconds, peer_address(connection.transport))
            self.metrics.stalled_senders.inc()


def _num_unsent_bytes(connection: "Connection") -> int:
    return connection.transport.get_write_buffer_size()


def _log_and_abort(connection: "Connection", message: str, *values: Any) -> None:
    """Log a warning and abort the connection.  values: for the % formats in `message`."""
    scope = {} if connection.exchange is None else connection.exchange.scope
    log.warning(message, *values, extra=log_extra(scope.get("state", {}).get("request_id", NO_REQUEST_ID)))
    # transport.close() would wait until all output is sent.
    connection.transport.abort()


def peer_address(transport: Any) -> str:
    """Returns the client's address and port, or "a Unix socket", for log lines."""
    peer = transport.get_extra_info("peername")
    return f"{peer[0]} port {peer[1]}" if isinstance(peer, tuple) else "a Unix socket"


def max_connections() -> int | None:
    """Returns how many connections may be open: the file descriptors that are neither open nor reserved.

    Returns None if the system has no limit.  Raises EspalierError for less than MIN_CONNECTIONS.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    num_used = len(os.listdir("/dev/fd"))
    num_free = limit - num_used - RESERVED_DESCRIPTORS
    if num_free < MIN_CONNECTIONS:
        least = num_used + RESERVED_DESCRIPTORS + MIN_CONNECTIONS
        raise EspalierError(f"the limit of {limit} open files is too low; set it to {least} or more (ulimit -n)")
    return num_free


def log_failed_accepts_rarely(loop: asyncio.AbstractEventLoop) -> None:
    """From now on, log at most once a minute that no connection can be accepted, for lack of descriptors or memory."""
    log_limiter = LogLimiter()

    def handle_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in OUT_OF_RESOURCES_ERRNOS):
            loop.default_exception_handler(context)
        elif count := log_limiter.num_to_report(loop.time()):
            log.error("a connection cannot be accepted (%s), %d times since the last such line", error.strerror, count)

    loop.set_exception_handler(handle_loop_error)
