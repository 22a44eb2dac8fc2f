"""The process's file descriptors: how many connections its limit leaves room for, and what happens without one.

A connection that is accepted without a descriptor left would take the place of a journal, an upload or the next engine
process.  So the number of connections is limited, and connections.Room closes the ones above it.
"""

import asyncio
import errno
import logging
import os
import resource
from typing import Any

from espalier.errors import EspalierError
from espalier.server.logs import Seldom

log = logging.getLogger("espalier.server")
# Connections that asyncio accepts in one turn of its loop, before any can be closed.
MAX_ACCEPTED = 16
# A connection that is closed holds its descriptor for two turns more.
TURNS_TO_CLOSE = 3
# Uploads and downloads of files at once, and the files that one has open.
MAX_TRANSFERS = 8
FILES_PER_TRANSFER = 3
# Journals and their inputs, the next engine process with its socket, and the processes that read bodies and templates.
FILES_OF_SERVER = 40
RESERVED = MAX_ACCEPTED * TURNS_TO_CLOSE + MAX_TRANSFERS * FILES_PER_TRANSFER + FILES_OF_SERVER
MIN_CONNECTIONS = 16
FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def max_connections() -> int | None:
    """Connections that may be open beside what is open now and RESERVED; None without a limit.

    Raises EspalierError if the limit leaves room for too few.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    used = len(os.listdir("/dev/fd"))
    room = limit - used - RESERVED
    if room < MIN_CONNECTIONS:
        least = used + RESERVED + MIN_CONNECTIONS
        raise EspalierError(f"the limit of {limit} open files is too low; set it to {least} or more (ulimit -n)")
    return room


def report_full_rarely(loop: asyncio.AbstractEventLoop) -> None:
    """Log accepts that fail for want of a descriptor or memory once a minute, without tracebacks."""
    seldom = Seldom()

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in FULL):
            loop.default_exception_handler(context)
        elif count := seldom.due(loop.time()):
            log.error("a connection cannot be accepted (%s), %d times since the last such line", error.strerror, count)

    loop.set_exception_handler(handle)
