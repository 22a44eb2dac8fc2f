"""`python -m lab serve --soak`: many requests of all kinds at once, some of which disconnect early.

It counts the requests that got no response, and the pages and processes that are left at the end.
"""

import asyncio
import json
import random
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.text import Text

from espalier.terminal.console import stdout, write_json
from lab.bench.server import SERVED_NAME, Server, children_of, is_running, running_server
from lab.shape_flags import seed_of

# A request without a response after this time counts as unanswered.
ANSWER_SECONDS = 240.0
# Kinds of requests, and how often each is sent relative to the others.
KIND_WEIGHTS = {
    "stream": 8,
    "whole": 4,
    "leaves early": 4,
    "leaves while waiting": 2,
    "slow reader": 2,
    "too long": 1,
    "bad": 1,
}
PROMPT_PIECES = ("def f(x):\n    ", "class Stack:\n    ", "import os\n", "for i in range(10):\n    ", "x = {")


@dataclass
class RequestCounts:
    """Counts of requests.

    kinds: sent requests by kind; statuses: of the responses that were read; disconnects: requests whose client left
    early; unanswered: requests that got no complete response although their client stayed.
    """

    kinds: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    disconnects: int = 0
    unanswered: int = 0


@dataclass(frozen=True)
class SoakFigures:
    """The counts at the end.  leaked_pages: still owned by requests; leaked_processes: still running."""

    requests: int
    answered: int
    errors_given: dict[int, int]
    disconnects: int
    aborts: int
    slow_readers: int
    unanswered: int
    leaked_pages: int
    leaked_processes: int


class SoakClient:
    """Sends one request over its own socket, so that it can disconnect at any time."""

    def __init__(self, server: Server, rng: random.Random, tally: RequestCounts):
        self.port = server.port
        self.rng = rng
        self.tally = tally

    async def run(self, kind: str) -> None:
        self.tally.kinds[kind] += 1
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=2**14)
        try:
            body = json.dumps(self._body(kind)).encode()
            head = b"POST /v1/completions HTTP/1.1\r\nhost: soak\r\nconnection: close\r\n"
            about = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            writer.write(head + about.encode() + body)
            await writer.drain()
            if kind.startswith("leaves"):
                await self._disconnect_early(kind, reader)
            else:
                await self._read_response(kind, reader)
        finally:
            writer.close()

    def _body(self, kind: str) -> dict[str, Any]:
        rng = self.rng
        body: dict[str, Any] = {
            "model": SERVED_NAME,
            "prompt": rng.choice(PROMPT_PIECES) * rng.randint(1, 8),
            "max_tokens": rng.randint(1, 48),
            "temperature": rng.choice((0, 0.8)),
            "stream": kind != "whole" and kind != "leaves while waiting",
            "n": rng.choice((1, 1, 1, 2)),
            "priority": rng.randint(0, 1),
            "speculation": rng.random() < 0.8,
        }
        if kind == "too long":
            body["prompt"] = "x " * 20_000
        elif kind == "bad":
            body |= rng.choice(({"temperature": -1}, {"tools": [1]}, {"nothing": 0}, {"logit_bias": {"-1": 1}}))
        elif rng.random() < 0.2:
            body["stop"] = rng.choice(("return", "\n\n"))
        return body

    async def _disconnect_early(self, kind: str, reader: asyncio.StreamReader) -> None:
        self.tally.disconnects += 1
        if kind == "leaves while waiting":
            await asyncio.sleep(self.rng.random() / 2)
        else:
            await reader.read(self.rng.randint(1, 2000))

    async def _read_response(self, kind: str, reader: asyncio.StreamReader) -> None:
        answer = bytearray()
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                while part := await reader.read(64 if kind == "slow reader" else 65536):
                    answer += part
                    if kind == "slow reader":
                        await asyncio.sleep(0.01)
        except (TimeoutError, OSError):
            self.tally.unanswered += 1
            return
        status = int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.1 ") else 0
        self.tally.statuses[status] += 1
        # Only a complete response contains one of these texts.
        end_marks = [b'"error"', *([b"data: [DONE]", b'"usage":{'] if status == 200 else [])]
        if not any(mark in answer for mark in end_marks):
            self.tally.unanswered += 1


def run(args: Namespace, settings: Mapping[str, Any]) -> int:
    """Prints the counts.  Returns 1 if a request got no response, or if pages or processes leaked, else 0."""
    counts = soak_server(settings, args.soak, seed_of(settings))
    write_json(args.json, {"soak": asdict(counts)})
    for name, value in asdict(counts).items():
        stdout().print(Text(f"  {name.replace('_', ' '):<18} {value}"))
    return int(bool(counts.unanswered or counts.leaked_pages or counts.leaked_processes))


def soak_server(settings: Mapping[str, Any], count: int, seed: int) -> SoakFigures:
    """Send `count` requests at random times, then count what is left."""
    rng, tally = random.Random(seed), RequestCounts()
    with running_server(settings, "--max-queue", str(max(count // 4, 8))) as server:
        asyncio.run(_send_all(server, count, rng, tally))
        metrics = asyncio.run(_metrics_when_idle(server))
        # With several ranks, the engine's children are the others.
        pids = server.pid, server.engine_pid, *children_of(server.engine_pid)
    return SoakFigures(
        requests=count,
        answered=sum(tally.statuses.values()),
        errors_given={status: number for status, number in sorted(tally.statuses.items()) if status != 200},
        disconnects=tally.disconnects,
        aborts=int(metrics["espalier_abort_steps_count"]),
        slow_readers=tally.kinds["slow reader"],
        unanswered=tally.unanswered,
        leaked_pages=int(metrics['espalier_pages{state="owned"}']),
        leaked_processes=sum(is_running(pid) for pid in pids),
    )


async def _send_all(server: Server, count: int, rng: random.Random, tally: RequestCounts) -> None:
    kinds = rng.choices(list(KIND_WEIGHTS), list(KIND_WEIGHTS.values()), k=count)

    async def one(kind: str) -> None:
        await asyncio.sleep(rng.random() * count / 10)
        await SoakClient(server, random.Random(rng.random()), tally).run(kind)

    results = await asyncio.gather(*(one(kind) for kind in kinds), return_exceptions=True)
    tally.unanswered += sum(isinstance(result, BaseException) for result in results)


async def _metrics_when_idle(server: Server) -> dict[str, float]:
    """The metrics once no request is open, or after 200 tries."""
    for _ in range(200):
        metrics = await asyncio.to_thread(server.metrics)
        if not any(metrics[f"espalier_{name}"] for name in ("open_samples", "waiting_requests", "running_requests")):
            return metrics
        await asyncio.sleep(0.05)
    return metrics
