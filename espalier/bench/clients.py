"""Clients of one server, all in one thread: each sends a request at the same time and reads its response to the end.

With a thread for each client the clients would wait for each other, and the measurement would be theirs.
"""

import json
import selectors
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from espalier.bench.server import START_S
from espalier.errors import EspalierError

READ_BYTES = 2**18
HEAD_END, LAST_CHUNK = b"\r\n\r\n", b"\r\n0\r\n\r\n"
LENGTH = b"content-length:"
FIRST_REQUEST = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"


@dataclass
class Exchange:
    """A response as it arrives.  Times are perf_counter's: the request was sent, bytes first arrived, the response was
    complete."""

    sent_at: float
    first_at: float = 0.0
    ended_at: float = 0.0
    received: bytearray = field(default_factory=bytearray)

    @property
    def status(self) -> int:
        return int(self.received[9:12])

    @property
    def is_complete(self) -> bool:
        if self.received.endswith(LAST_CHUNK):
            return True
        head_end = self.received.find(HEAD_END)
        lines = bytes(self.received[: max(head_end, 0)]).lower().split(b"\r\n")
        lengths = [int(line[len(LENGTH) :]) for line in lines if line.startswith(LENGTH)]
        return bool(lengths) and len(self.received) == head_end + len(HEAD_END) + lengths[0]


def request_of(path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> bytes:
    """A POST request with a JSON body."""
    data = json.dumps(body).encode()
    head = {"host": "127.0.0.1", "content-type": "application/json", "content-length": len(data), **(headers or {})}
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in head.items()), "", ""]
    return "\r\n".join(lines).encode() + data


def exchange_all(port: int, requests: Sequence[bytes]) -> list[Exchange]:
    """Send the requests, each on an open connection of its own, and read the responses.  Raises EspalierError."""
    with ExitStack() as stack:
        connections = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=START_S)) for _ in requests
        ]
        # The server has accepted a connection once it has answered on it.
        _exchange(connections, [FIRST_REQUEST] * len(requests))
        return _exchange(connections, requests)


def _exchange(connections: Sequence[socket.socket], requests: Sequence[bytes]) -> list[Exchange]:
    exchanges = []
    with selectors.DefaultSelector() as selector:
        for connection, request in zip(connections, requests, strict=True):
            exchanges.append(Exchange(perf_counter()))
            selector.register(connection, selectors.EVENT_READ, exchanges[-1])
            connection.sendall(request)
        while selector.get_map():
            ready = selector.select(START_S)
            if not ready:
                raise EspalierError(f"the server sent nothing for {START_S:g} s; see its log")
            for key, _ in ready:
                if _read(key):
                    selector.unregister(key.fileobj)
    return exchanges


def _read(key: selectors.SelectorKey) -> bool:
    """Read what has arrived.  Returns whether the response is complete."""
    connection, exchange = key.fileobj, key.data
    assert isinstance(connection, socket.socket)
    data = connection.recv(READ_BYTES)
    if not data:
        raise EspalierError("the server closed a connection before the response was complete; see its log")
    now = perf_counter()
    exchange.first_at = exchange.first_at or now
    exchange.received += data
    exchange.ended_at = now
    return exchange.is_complete
