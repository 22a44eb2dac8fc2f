"""A connection of the server without a socket: what a client sends goes in, and what it would read is kept."""

import asyncio
from types import SimpleNamespace

from espalier.server.connections import OpenConnections
from espalier.server.http1 import Connection


class Counted:
    """As much of the metrics as connections count."""

    def __init__(self):
        self.stalled_readers, self.stalled_senders = (SimpleNamespace(inc=self.inc) for _ in range(2))
        self.count = 0

    def inc(self):
        self.count += 1


class Transport(asyncio.Transport):
    """Keeps what is written.  pauses: after each write its client reads nothing for some turns of the loop."""

    def __init__(self, pauses=False):
        super().__init__()
        self.data, self.pauses = bytearray(), pauses
        self.connection = None
        self.is_closed = False

    def write(self, data):
        self.data += data
        if data and self.pauses and self.connection.can_write.is_set():
            self.connection.pause_writing()
            self.resume(3)

    def resume(self, turns):
        if turns:
            asyncio.get_running_loop().call_soon(self.resume, turns - 1)
        else:
            self.connection.resume_writing()

    def get_extra_info(self, name, default=None):
        return default

    def is_closing(self):
        return self.is_closed

    def close(self):
        self.is_closed = True

    abort = close

    def write_eof(self):
        pass

    def pause_reading(self):
        pass

    def resume_reading(self):
        pass


def connected(app, pauses=False):
    """A connection to an application, and its transport.  In a running event loop."""
    connection, transport = Connection(app, OpenConnections(Counted(), None, None, None)), Transport(pauses)
    transport.connection = connection
    connection.connection_made(transport)
    return connection, transport
