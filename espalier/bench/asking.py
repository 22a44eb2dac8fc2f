"""Asks a server with OpenAI's API for one streamed answer after another, and notes when its tokens came."""

import asyncio
import json
import re
import ssl
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from espalier.bench.clients import Address, Exchange, connect, request_of
from espalier.bench.load import Timeline
from espalier.bench.traffic import PATHS, Conversation, bodies
from espalier.errors import EspalierError, one_line

OK = 200
METRICS_S = 10.0
ROUNDS = re.compile(r'^espalier_rounds_by_accept_length_total\{length="(\d+)"\} (\S+)$', re.MULTILINE)
# What to do where /v1/models answers with this status.
REMEDIES = {401: "give the server's key, with --api-key", 404: "correct the path of --url"}


@dataclass
class Asked:
    """One request.  error: why it has no whole answer, "" if it has one; text: of the answer."""

    timeline: Timeline
    error: str = ""
    category: str = ""
    text: str = ""
    num_prompt: int = 0
    num_output: int = 0

    @property
    def later(self) -> int:
        """Tokens behind the first chunk."""
        return self.num_output - self.timeline.chunks[0][1]


@dataclass(frozen=True)
class Target:
    """A server.  same: fields of every request."""

    address: Address
    headers: Mapping[str, str]
    same: Mapping[str, Any]
    endpoint: str
    timeout_s: float
    think_s: float

    async def ask(self, body: Mapping[str, Any], due: float) -> Asked:
        """Send a request now.  due: when it should have been sent, on perf_counter's clock."""
        asked = Asked(Timeline(due))
        request = request_of(self.address.prefix + PATHS[self.endpoint], body, self.headers)
        try:
            async with asyncio.timeout(self.timeout_s):
                connection = await connect(self.address)
                try:
                    take(await connection.send(request), asked)
                finally:
                    connection.transport.abort()
        except TimeoutError:
            asked.error = f"no whole answer within {self.timeout_s:g} s"
        except (OSError, ssl.SSLError, EspalierError) as error:
            asked.error = one_line(error)
        return asked

    async def converse(self, talk: Conversation, due: float) -> list[Asked]:
        """Send the turns of a conversation, the first when it is due.  It ends at a turn without an answer."""
        results: list[Asked] = []
        answers: list[str] = []
        for body in bodies(talk, self.endpoint, answers, self.same):
            await asyncio.sleep(due - perf_counter())
            results.append(await self.ask(body, due))
            results[-1].category = talk.category
            if results[-1].error:
                break
            answers.append(results[-1].text)
            due = perf_counter() + self.think_s
        return results


def take(exchange: Exchange, asked: Asked) -> None:
    """Read a response.  A chunk counts as its token ids, or as one token, and the last one as those of `usage` that are
    left."""
    if exchange.status != OK:
        asked.error = f"status {exchange.status}: {_message(exchange.body())}"
        return
    texts, is_ended = [], False
    for time, data in exchange.events():
        if data == b"[DONE]":
            is_ended = True
            break
        event = json.loads(data)
        if "error" in event:
            asked.error = f"the stream ended early: {_message(data)}"
            return
        usage = event.get("usage") or {}
        asked.num_prompt = usage.get("prompt_tokens", asked.num_prompt)
        asked.num_output = usage.get("completion_tokens", asked.num_output)
        text, num_ids = _text(event), _num_ids(event)
        if text or num_ids:
            texts.append(text)
            asked.timeline.chunks.append((time, num_ids or 1))
    chunks = asked.timeline.chunks
    if not is_ended or not chunks:
        asked.error = "the answer has no text" if is_ended else "the stream has no end"
        return
    before = sum(count for _, count in chunks[:-1])
    asked.text, asked.num_output = "".join(texts), asked.num_output or before + chunks[-1][1]
    chunks[-1] = chunks[-1][0], max(1, asked.num_output - before)


def _text(event: Mapping[str, Any]) -> str:
    """What an event adds to the answer: text, reasoning, or a call's arguments."""
    parts: list[str] = []
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        calls = [call.get("function", {}).get("arguments") for call in delta.get("tool_calls") or ()]
        shown = (choice.get("text"), delta.get("reasoning_content"), delta.get("reasoning"), delta.get("content"))
        parts += [part for part in (*shown, *calls) if part]
    return "".join(parts)


def _num_ids(event: Mapping[str, Any]) -> int:
    """Token ids of an event; 0 where the server does not give them."""
    return sum(len(choice.get("token_ids") or ()) for choice in event.get("choices") or ())


def _message(data: bytes) -> str:
    try:
        return str(json.loads(data)["error"]["message"])[:200]
    except (ValueError, KeyError, TypeError):
        return data[:200].decode(errors="replace") or "no message"


async def require_reachable(address: Address) -> None:
    """Raises EspalierError for a server to which there is no connection."""
    try:
        connection = await connect(address)
    except (OSError, EspalierError) as error:
        raise _unreachable(address, error) from None
    connection.transport.abort()


def _unreachable(address: Address, error: Exception) -> EspalierError:
    return EspalierError(f"--url {address} cannot be reached ({one_line(error)}); start a server there, or correct it")


async def _get(address: Address, headers: Mapping[str, str], path: str) -> Exchange:
    lines = [f"GET {address.prefix}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    try:
        connection = await connect(address)
        exchange = await connection.send("\r\n".join([*lines, "", ""]).encode())
        connection.transport.abort()
    except (OSError, EspalierError) as error:
        raise _unreachable(address, error) from None
    return exchange


async def rounds_by_length(address: Address, headers: Mapping[str, str]) -> Counter[int] | None:
    """How many rounds the server has run by accept length; None for a server that does not say it as Espalier does."""
    try:
        exchange = await asyncio.wait_for(_get(address, headers, "/metrics"), METRICS_S)
        found = ROUNDS.findall(exchange.body().decode()) if exchange.status == OK else []
    except (EspalierError, TimeoutError, UnicodeDecodeError):
        return None
    return Counter({int(length): int(float(count)) for length, count in found}) if found else None


async def first_model(address: Address, headers: Mapping[str, str]) -> str:
    """The first of the server's models.  Raises EspalierError."""
    exchange = await _get(address, headers, "/v1/models")
    if exchange.status != OK:
        remedy = REMEDIES.get(exchange.status, "look at the server's log")
        raise EspalierError(f"--url {address}/v1/models answers {exchange.status}; {remedy}")
    try:
        return str(json.loads(exchange.body())["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise EspalierError(f"--url {address}/v1/models names no model; name it with --model") from None
