"""Clients of a server, all on one event loop.  They record when each part of a response came, and read it afterwards.

With a thread for each client, or a parser while responses come, the clients would wait for each other, and the
measurement would be theirs.
"""

import asyncio
import json
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from espalier.batch_jobs.sender import split_url
from espalier.errors import EspalierError

# Long enough for a server to load its model.
START_S = 600.0
HEAD_END, LAST_CHUNK = b"\r\n\r\n", b"\r\n0\r\n\r\n"
LENGTH, CHUNKED = b"content-length:", b"transfer-encoding: chunked"
FIRST_REQUEST = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"


@dataclass(frozen=True)
class Address:
    """prefix: of every path, without /v1."""

    host: str
    port: int
    tls: bool = False
    prefix: str = ""

    def __str__(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.host}:{self.port}{self.prefix}"


def address_of(url: str) -> Address:
    """The address of a server.  url: with or without /v1.  Raises EspalierError."""
    parts = split_url(url)
    port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    return Address(parts.hostname or "", port, parts.scheme == "https", parts.path.rstrip("/").removesuffix("/v1"))


@dataclass
class Exchange:
    """A response as it arrives.  Times are perf_counter's: the request was sent, bytes first arrived, the response was
    complete.  arrivals: (time, number of bytes received by then)."""

    sent_at: float
    first_at: float = 0.0
    ended_at: float = 0.0
    received: bytearray = field(default_factory=bytearray)
    arrivals: list[tuple[float, int]] = field(default_factory=list)

    @property
    def status(self) -> int:
        return int(self.received[9:12])

    @property
    def head(self) -> bytes:
        return bytes(self.received[: max(self.received.find(HEAD_END), 0)]).lower()

    @property
    def length(self) -> int | None:
        """Of the whole response, where its head says it."""
        lengths = [int(line[len(LENGTH) :]) for line in self.head.split(b"\r\n") if line.startswith(LENGTH)]
        return len(self.head) + len(HEAD_END) + lengths[0] if lengths else None

    @property
    def is_complete(self) -> bool:
        return self.received.endswith(LAST_CHUNK) or self.length == len(self.received)

    def body(self) -> bytes:
        return b"".join(data for _, data in self._pieces())

    def events(self) -> Iterator[tuple[float, bytes]]:
        """(time at which it was complete, data) of each server-sent event of the response."""
        rest = b""
        for time, data in self._pieces():
            *lines, rest = (rest + data).split(b"\n")
            yield from ((time, line[5:].strip()) for line in lines if line.startswith(b"data:"))

    def _pieces(self) -> Iterator[tuple[float, bytes]]:
        """(time at which it was complete, bytes) of each chunk, or of what came at once where there are no chunks."""
        start, ends = len(self.head) + len(HEAD_END), [size for _, size in self.arrivals]
        if CHUNKED not in self.head:
            for time, end in self.arrivals:
                yield time, bytes(self.received[start:end])
                start = max(start, end)
            return
        while (line_end := self.received.find(b"\r\n", start)) >= 0:
            size = int(self.received[start:line_end].partition(b";")[0], 16)
            end = line_end + 2 + size
            if not size or end > len(self.received):
                return
            yield self.arrivals[bisect_left(ends, end)][0], bytes(self.received[line_end + 2 : end])
            start = end + 2


class Connection(asyncio.Protocol):
    """An open connection, for one request after another."""

    transport: asyncio.Transport
    exchange: Exchange
    ended: asyncio.Future[Exchange]

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def send(self, request: bytes) -> asyncio.Future[Exchange]:
        """Send now.  The result comes with the last byte of the response.

        Raises EspalierError if the connection ends before.
        """
        self.ended = asyncio.get_running_loop().create_future()
        self.exchange = Exchange(perf_counter())
        self.transport.write(request)
        return self.ended

    def data_received(self, data: bytes) -> None:
        now, exchange = perf_counter(), self.exchange
        exchange.first_at = exchange.first_at or now
        exchange.received += data
        exchange.arrivals.append((now, len(exchange.received)))
        exchange.ended_at = now
        if exchange.is_complete and not self.ended.done():
            self.ended.set_result(exchange)

    def connection_lost(self, error: Exception | None) -> None:
        if not hasattr(self, "ended") or self.ended.done():
            return
        # A response without a length and without chunks ends with the connection.
        if self.exchange.head and CHUNKED not in self.exchange.head and self.exchange.length is None:
            self.ended.set_result(self.exchange)
        else:
            message = "the server closed a connection before the response was complete; see its log"
            self.ended.set_exception(EspalierError(message))


async def connect(address: Address) -> Connection:
    """Raises OSError."""
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(Connection, address.host, address.port, ssl=address.tls or None)
    return connection


def request_of(path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> bytes:
    """A POST request with a JSON body."""
    data = json.dumps(body).encode()
    head = {"host": "127.0.0.1", "content-type": "application/json", "content-length": len(data), **(headers or {})}
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in head.items()), "", ""]
    return "\r\n".join(lines).encode() + data


def exchange_all(port: int, requests: Sequence[bytes]) -> list[Exchange]:
    """Send the requests, each on an open connection of its own, and read the responses.  Raises EspalierError."""
    return asyncio.run(_exchange_all(Address("127.0.0.1", port), requests))


async def _exchange_all(address: Address, requests: Sequence[bytes]) -> list[Exchange]:
    connections = [await connect(address) for _ in requests]
    try:
        # The server has accepted a connection once it has answered on it.
        await _answered([connection.send(FIRST_REQUEST) for connection in connections])
        pairs = zip(connections, requests, strict=True)
        return await _answered([connection.send(request) for connection, request in pairs])
    finally:
        for connection in connections:
            connection.transport.abort()


async def _answered(ended: Sequence[asyncio.Future[Exchange]]) -> list[Exchange]:
    try:
        async with asyncio.timeout(START_S):
            return await asyncio.gather(*ended)
    except TimeoutError:
        raise EspalierError(f"the server did not answer within {START_S:g} s; see its log") from None
