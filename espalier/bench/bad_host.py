"""What everybody else waits for while one host sends large, hostile or half-closed requests.

Beside each kind of bad request: the longest gap of a stream (its first token included), a one-token request and
/health, with streams and idle.
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from espalier.bench.serve import NAME, serving
from espalier.bench.soak import ANSWER_S
from espalier.errors import EspalierError

STREAMS = 16
# Each kind is sent once, and watched for so long or until its last answer.
WATCH_S = 5.0
SHORT = {"model": NAME, "prompt": "x", "max_tokens": 1, "temperature": 0}
STREAM = {"model": NAME, "prompt": "def f(x):\n", "max_tokens": 64, "ignore_eos": True, "stream": True}


@dataclass(frozen=True)
class Attack:
    """`count` posts of one body at once.  half_closed: each sends FIN behind its body and goes on reading."""

    name: str
    count: int
    path: str
    body: Callable[[], Mapping[str, Any]]
    half_closed: bool = False


def _text(megabytes: int = 4) -> str:
    """Two characters a token, with room in the body for what stands around it."""
    return "a " * (megabytes * 500_000 - 500)


def _parts() -> dict[str, Any]:
    part = {"type": "text", "text": "a"}
    return {"model": NAME, "messages": [{"role": "user", "content": [part] * 100_000}]}


ATTACKS = (
    Attack("nothing", 0, "/v1/completions", lambda: SHORT),
    Attack("4 MB prompt", 3, "/v1/completions", lambda: SHORT | {"prompt": _text()}),
    Attack("4 MB prompt", 6, "/v1/completions", lambda: SHORT | {"prompt": _text()}),
    Attack("4 MB to /tokenize", 3, "/tokenize", lambda: {"prompt": _text()}),
    Attack("100,000 content parts", 3, "/v1/chat/completions", _parts),
    Attack("1.3 million ids to /detokenize", 3, "/detokenize", lambda: {"tokens": [1] * 1_300_000}),
    Attack(
        "250,000 of logit_bias",
        3,
        "/v1/completions",
        lambda: SHORT | {"logit_bias": {str(i): 1 for i in range(250_000)}},
    ),
    Attack("half-closed posts", 8, "/v1/completions", lambda: SHORT | {"max_tokens": 8}, half_closed=True),
)


@dataclass
class Waits:
    """The longest of each, in ms."""

    stream_gap: float = 0.0
    one_token: float = 0.0
    health: float = 0.0


@dataclass
class Beside:
    """One kind of bad request.  answers: how many had each status, 0 being none."""

    name: str
    count: int
    busy: Waits = field(default_factory=Waits)
    idle: Waits = field(default_factory=Waits)
    answers: dict[int, int] = field(default_factory=dict)


def bad_host(settings: Mapping[str, Any], attacks: Sequence[Attack] = ATTACKS, streams: int = STREAMS) -> list[Beside]:
    """Each kind on the same server, beside `streams` streams and beside none."""
    with serving(settings) as server:
        return asyncio.run(_all(server.port, attacks, streams))


async def _all(port: int, attacks: Sequence[Attack], streams: int) -> list[Beside]:
    found = []
    for attack in attacks:
        head = b"" if attack.half_closed else b"connection: close\r\n"
        data = _request(attack.path, json.dumps(attack.body(), separators=(",", ":")).encode(), head)
        beside, statuses = Beside(attack.name, attack.count), Counter[int]()
        for waits, number in ((beside.busy, streams), (beside.idle, 0)):
            async with _watched(port, waits, number):
                end = asyncio.create_task(asyncio.sleep(WATCH_S))
                sent = (_post(port, data, attack.half_closed) for _ in range(attack.count))
                statuses.update(await asyncio.gather(*sent))
                await end
        beside.answers = dict(sorted(statuses.items()))
        found.append(beside)
    return found


def _request(path: str, body: bytes, headers: bytes = b"connection: close\r\n") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: bad\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return head.encode() + headers + b"\r\n" + body


@asynccontextmanager
async def _watched(port: int, waits: Waits, streams: int) -> AsyncIterator[None]:
    """Streams, one-token requests and probes come and go, one after another each; the waits are noted.

    Raises EspalierError where one is not served: what is refused at once has no wait.
    """
    short = _request("/v1/completions", json.dumps(SHORT).encode())
    probe = b"GET /health HTTP/1.1\r\nhost: bad\r\nconnection: close\r\n\r\n"
    tasks = [asyncio.create_task(_stream(port, waits)) for _ in range(streams)]
    tasks += [
        asyncio.create_task(_repeat(port, short, waits, "one_token")),
        asyncio.create_task(_repeat(port, probe, waits, "health")),
    ]
    # All of them have begun, and what the first of them warm up is no wait.
    await asyncio.sleep(2.0)
    waits.stream_gap = waits.one_token = waits.health = 0.0
    try:
        yield
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _stream(port: int, waits: Waits) -> None:
    data = _request("/v1/completions", json.dumps(STREAM).encode())
    while True:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(data)
        more, tail = b"begun", b""
        try:
            while more:
                began = time.perf_counter()
                try:
                    more = await reader.read(65536)
                finally:  # cancelled in its midst it has waited at least so long
                    waits.stream_gap = max(waits.stream_gap, 1e3 * (time.perf_counter() - began))
                tail = (tail + more)[-64:]
        finally:
            writer.close()
        if b"data: [DONE]" not in tail:
            raise EspalierError("a stream beside the bad host ended before its text; read the server's log")


async def _repeat(port: int, data: bytes, waits: Waits, name: str) -> None:
    while True:
        began = time.perf_counter()
        try:
            status = await _post(port, data)
        finally:  # cancelled in its midst it has waited at least so long
            setattr(waits, name, max(getattr(waits, name), 1e3 * (time.perf_counter() - began)))
        if status != 200:
            raise EspalierError(f"{name} beside the bad host was answered {status}; read the server's log")
        await asyncio.sleep(0.02)


async def _post(port: int, data: bytes, half_closed: bool = False) -> int:
    """The status of the last answer, 0 where there is none; interim ones (1xx) are read over."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = b""
    try:
        async with asyncio.timeout(ANSWER_S):
            writer.write(data)
            await writer.drain()
            if half_closed:
                writer.write_eof()
            answer = await reader.read(-1)
    except (TimeoutError, OSError):
        return 0
    finally:
        writer.close()
    while answer.startswith(b"HTTP/1.1 1"):
        answer = answer.partition(b"\r\n\r\n")[2]
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.1 ") else 0
