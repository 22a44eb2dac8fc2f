"""Many clients of one server in one thread: each sends a request at the same time and reads its response to the end.

A thread for each client would measure the clients: they would wait for each other's lock, while the server waits.
"""

import json
import selectors
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from espalier.errors import EspalierError

READ_BYTES = 2**18
HEAD_END, LAST_CHUNK = b"\r\n\r\n", b"\r\n0\r\n\r\n"
LENGTH = b"content-length: "


@dataclass
class Exchange:
    """A request, and its response as it arrives.  Times are perf_counter's.

    sent_at: when the first byte was sent; arrivals: when a part of the response was read; ended_at: when the response
    was complete.
    """

    request: bytes
    sent_at: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    received: bytearray = field(default_factory=bytearray)
    ended_at: float = 0.0

    @property
    def head(self) -> bytes:
        return bytes(self.received[: self.received.find(HEAD_END)])

    @property
    def status(self) -> int:
        return int(self.received[9:12])

    @property
    def is_complete(self) -> bool:
        if self.received.endswith(LAST_CHUNK):
            return True
        head = self.head.lower()
        at = head.find(LENGTH)
        if at < 0:
            return False
        length = int(head[at + len(LENGTH) :].split(b"\r", 1)[0])
        return len(self.received) == len(head) + len(HEAD_END) + length


def request_of(path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> bytes:
    """A POST request of a JSON body."""
    data = json.dumps(body).encode()
    head = {"host": "127.0.0.1", "content-type": "application/json", "content-length": len(data), **(headers or {})}
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in head.items()), "", ""]
    return "\r\n".join(lines).encode() + data


def exchange_all(connections: Sequence[socket.socket], requests: Sequence[bytes]) -> list[Exchange]:
    """Send one request on each connection, and read all responses.  Raises EspalierError if a connection ends early."""
    exchanges = [Exchange(request) for request in requests]
    with selectors.DefaultSelector() as selector:
        for connection, each in zip(connections, exchanges, strict=True):
            selector.register(connection, selectors.EVENT_READ, each)
        for connection, each in zip(connections, exchanges, strict=True):
            each.sent_at = perf_counter()
            connection.sendall(each.request)
        num_left = len(exchanges)
        while num_left:
            for key, _ in selector.select():
                num_left -= _read(selector, key)
    return exchanges


def _read(selector: selectors.BaseSelector, key: selectors.SelectorKey) -> bool:
    """Read what has arrived.  Returns whether the response is complete."""
    each, connection = key.data, key.fileobj
    assert isinstance(connection, socket.socket)
    data = connection.recv(READ_BYTES)
    if not data:
        raise EspalierError("the server closed a connection before its response was complete; see the server's log")
    each.arrivals.append(perf_counter())
    each.received += data
    if not each.is_complete:
        return False
    each.ended_at = each.arrivals[-1]
    selector.unregister(connection)
    return True
