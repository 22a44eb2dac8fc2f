"""Hundreds of requests of all kinds at once, many of which leave: who was not answered, and what was left behind."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from espalier.bench.serve import NAME, Server, exists, serving

# A request that is answered at all is answered within this.
ANSWER_S = 240.0
KINDS = {
    "stream": 8,
    "whole": 4,
    "leaves early": 4,
    "leaves while waiting": 2,
    "slow reader": 2,
    "too long": 1,
    "bad": 1,
}
PROMPTS = ("def f(x):\n    ", "class Stack:\n    ", "import os\n", "for i in range(10):\n    ", "x = {")


@dataclass
class Tally:
    """kinds: requests sent, by kind; statuses: of those who stayed; unanswered: who stayed and got no end."""

    kinds: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    disconnects: int = 0
    unanswered: int = 0


@dataclass(frozen=True)
class Soaked:
    requests: int
    answered: int
    errors_given: dict[int, int]
    disconnects: int
    aborts: int
    slow_readers: int
    unanswered: int
    leaked_pages: int
    leaked_processes: int


class Client:
    """One request over a socket of its own, so that it can leave in any way."""

    def __init__(self, server: Server, chance: random.Random, tally: Tally):
        self.port = server.port
        self.chance = chance
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
                await self._leave(kind, reader)
            else:
                await self._stay(kind, reader)
        finally:
            writer.close()

    def _body(self, kind: str) -> dict[str, Any]:
        chance = self.chance
        body: dict[str, Any] = {
            "model": NAME,
            "prompt": chance.choice(PROMPTS) * chance.randint(1, 8),
            "max_tokens": chance.randint(1, 48),
            "temperature": chance.choice((0, 0.8)),
            "stream": kind != "whole" and kind != "leaves while waiting",
            "n": chance.choice((1, 1, 1, 2)),
            "priority": chance.randint(0, 1),
            "speculation": chance.random() < 0.8,
        }
        if kind == "too long":
            body["prompt"] = "x " * 20_000
        elif kind == "bad":
            body |= chance.choice(({"temperature": -1}, {"tools": [1]}, {"nothing": 0}, {"logit_bias": {"-1": 1}}))
        elif chance.random() < 0.2:
            body["stop"] = chance.choice(("return", "\n\n"))
        return body

    async def _leave(self, kind: str, reader: asyncio.StreamReader) -> None:
        self.tally.disconnects += 1
        if kind == "leaves while waiting":
            await asyncio.sleep(self.chance.random() / 2)
        else:
            await reader.read(self.chance.randint(1, 2000))

    async def _stay(self, kind: str, reader: asyncio.StreamReader) -> None:
        answer = bytearray()
        try:
            async with asyncio.timeout(ANSWER_S):
                while part := await reader.read(64 if kind == "slow reader" else 65536):
                    answer += part
                    if kind == "slow reader":
                        await asyncio.sleep(0.01)
        except (TimeoutError, OSError):
            self.tally.unanswered += 1
            return
        status = int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.1 ") else 0
        self.tally.statuses[status] += 1
        # What stands at the end of an answer alone: a stream that is cut off has neither.
        ended = [b'"error"', *([b"data: [DONE]", b'"usage":{'] if status == 200 else [])]
        if not any(mark in answer for mark in ended):
            self.tally.unanswered += 1


def soak(settings: Mapping[str, Any], count: int, seed: int) -> Soaked:
    """Send `count` requests at random moments, then look at what is left."""
    chance, tally = random.Random(seed), Tally()
    with serving(settings, "--max-queue", str(max(count // 4, 8))) as server:
        asyncio.run(_send(server, count, chance, tally))
        left = asyncio.run(_at_rest(server))
        pids = server.pid, server.engine_pid
    return Soaked(
        requests=count,
        answered=sum(tally.statuses.values()),
        errors_given={status: number for status, number in sorted(tally.statuses.items()) if status != 200},
        disconnects=tally.disconnects,
        aborts=int(left["espalier_abort_steps_count"]),
        slow_readers=tally.kinds["slow reader"],
        unanswered=tally.unanswered,
        leaked_pages=int(left['espalier_pages{state="owned"}']),
        leaked_processes=sum(exists(pid) for pid in pids),
    )


async def _send(server: Server, count: int, chance: random.Random, tally: Tally) -> None:
    kinds = chance.choices(list(KINDS), list(KINDS.values()), k=count)

    async def one(kind: str) -> None:
        await asyncio.sleep(chance.random() * count / 10)
        await Client(server, random.Random(chance.random()), tally).run(kind)

    results = await asyncio.gather(*(one(kind) for kind in kinds), return_exceptions=True)
    tally.unanswered += sum(isinstance(result, BaseException) for result in results)


async def _at_rest(server: Server) -> dict[str, float]:
    """Metrics once nothing is open; what they are at the end of patience otherwise."""
    for _ in range(200):
        metrics = await asyncio.to_thread(server.metrics)
        if not any(metrics[f"espalier_{name}"] for name in ("open_samples", "waiting_requests", "running_requests")):
            return metrics
        await asyncio.sleep(0.05)
    return metrics
