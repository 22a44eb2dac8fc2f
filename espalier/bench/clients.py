"""Clients of a server, all on one event loop.  They record when response data arrives, and parse the response later.

Threads, or parsing while responses arrive, would make the clients wait for each other.  The measurement would then show
the delay of the clients instead of the server's delay.
"""

import asyncio
import json
import re
import ssl
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from espalier.batch_jobs.sender import split_url
from espalier.bench.load import Timeline
from espalier.bench.traffic import ENDPOINT_PATHS, Conversation, request_bodies
from espalier.errors import EspalierError, one_line

HEAD_END, LAST_CHUNK = b"\r\n\r\n", b"\r\n0\r\n\r\n"
LENGTH_HEADER, CHUNKED_HEADER = b"content-length:", b"transfer-encoding: chunked"
STATUS_OK = 200
METRICS_TIMEOUT_S = 10.0
NO_TEXT_ERROR = 'the answer has no text; for a model without a tokenizer add "return_token_ids": true to --extra-body'
ROUNDS_METRIC_PATTERN = re.compile(r'^espalier_rounds_by_accept_length_total\{length="(\d+)"\} (\S+)$', re.MULTILINE)
# The advice for the user, by the HTTP status with which the server answers GET /v1/models.
REMEDY_BY_STATUS = {401: "give the server's key, with --api-key", 404: "correct the path of --url"}


@dataclass(frozen=True)
class Address:
    """The address of a server.  path_prefix: the path before /v1."""

    host: str
    port: int
    uses_tls: bool = False
    path_prefix: str = ""

    def __str__(self) -> str:
        return f"{'https' if self.uses_tls else 'http'}://{self.host}:{self.port}{self.path_prefix}"


def parse_address(url: str) -> Address:
    """Parse the URL of a server, with or without /v1.  Raises EspalierError."""
    parts = split_url(url)
    port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    return Address(parts.hostname or "", port, parts.scheme == "https", parts.path.rstrip("/").removesuffix("/v1"))


@dataclass
class HttpResponse:
    """A response, with the times at which its bytes arrived.  Times are values of perf_counter, in seconds.

    sent_at: when the request was sent.  first_at: when the first bytes arrived.  ended_at: when the last bytes arrived.
    received: all bytes so far, headers included.  arrivals: (time, bytes received until then) of each piece."""

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
        """The status line and the headers, in lower case; b"" until they have arrived completely."""
        return bytes(self.received[: max(self.received.find(HEAD_END), 0)]).lower()

    @property
    def total_length(self) -> int | None:
        """The length of the whole response in bytes; None if the response has no content-length."""
        lines = self.head.split(b"\r\n")
        lengths = [int(line[len(LENGTH_HEADER) :]) for line in lines if line.startswith(LENGTH_HEADER)]
        return len(self.head) + len(HEAD_END) + lengths[0] if lengths else None

    @property
    def is_complete(self) -> bool:
        return self.received.endswith(LAST_CHUNK) or self.total_length == len(self.received)

    def body(self) -> bytes:
        return b"".join(data for _, data in self._timed_chunks())

    def events(self) -> Iterator[tuple[float, bytes]]:
        """Yields (arrival time of the event's last byte, the event's data) for each server-sent event."""
        rest = b""
        for time, data in self._timed_chunks():
            *lines, rest = (rest + data).split(b"\n")
            yield from ((time, line[5:].strip()) for line in lines if line.startswith(b"data:"))

    def _timed_chunks(self) -> Iterator[tuple[float, bytes]]:
        """Yields (arrival time of the last byte, bytes) of each chunk of the body.  If the response is not chunked, it
        yields the pieces of data as they arrived."""
        start, arrival_ends = len(self.head) + len(HEAD_END), [size for _, size in self.arrivals]
        if CHUNKED_HEADER not in self.head:
            for time, end in self.arrivals:
                yield time, bytes(self.received[start:end])
                start = max(start, end)
            return
        while (line_end := self.received.find(b"\r\n", start)) >= 0:
            size = int(self.received[start:line_end].partition(b";")[0], 16)
            end = line_end + 2 + size
            if not size or end > len(self.received):
                return
            yield self.arrivals[bisect_left(arrival_ends, end)][0], bytes(self.received[line_end + 2 : end])
            start = end + 2


class Connection(asyncio.Protocol):
    """A client's connection, which sends one request after another."""

    transport: asyncio.Transport
    response: HttpResponse
    response_future: asyncio.Future[HttpResponse]

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def send(self, request: bytes) -> asyncio.Future[HttpResponse]:
        """Sends a request.  Returns a future of the response, which is done when the last byte arrives.  The future
        raises EspalierError if the connection ends before."""
        self.response_future = asyncio.get_running_loop().create_future()
        self.response = HttpResponse(perf_counter())
        self.transport.write(request)
        return self.response_future

    def data_received(self, data: bytes) -> None:
        now, response = perf_counter(), self.response
        response.first_at = response.first_at or now
        response.received += data
        response.arrivals.append((now, len(response.received)))
        response.ended_at = now
        if response.is_complete and not self.response_future.done():
            self.response_future.set_result(response)

    def connection_lost(self, error: Exception | None) -> None:
        if not hasattr(self, "response_future") or self.response_future.done():
            return
        # A response without content-length and without chunks ends when the server closes the connection.
        if self.response.head and CHUNKED_HEADER not in self.response.head and self.response.total_length is None:
            self.response_future.set_result(self.response)
        else:
            message = "the server closed a connection before the response was complete; see its log"
            self.response_future.set_exception(EspalierError(message))


async def connect(address: Address) -> Connection:
    """Open a connection.  Raises OSError."""
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(Connection, address.host, address.port, ssl=address.uses_tls or None)
    return connection


def post_request_bytes(path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> bytes:
    """Returns the bytes of a POST request with a JSON body."""
    data = json.dumps(body).encode()
    head = {"host": "127.0.0.1", "content-type": "application/json", "content-length": len(data), **(headers or {})}
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in head.items()), "", ""]
    return "\r\n".join(lines).encode() + data


@dataclass
class SentRequest:
    """One request and its result.  error: why the answer is incomplete; "" if it is complete.  text: of the answer."""

    timeline: Timeline
    error: str = ""
    category: str = ""
    text: str = ""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0

    @property
    def num_later_tokens(self) -> int:
        """The number of tokens that came after the first chunk."""
        return self.num_output_tokens - self.timeline.chunks[0][1]


@dataclass(frozen=True)
class LoadTarget:
    """A server that is measured.  shared_fields: the body fields that all requests share.  endpoint: "chat" or
    "completions".  think_time_s: seconds from an answer to the next turn of the conversation."""

    address: Address
    headers: Mapping[str, str]
    shared_fields: Mapping[str, Any]
    endpoint: str
    timeout_s: float
    think_time_s: float

    async def send_request(self, body: Mapping[str, Any], planned_at: float) -> SentRequest:
        """Send a request and await its answer.  planned_at: the planned time of sending, on perf_counter's clock."""
        sent_request = SentRequest(Timeline(planned_at))
        request = post_request_bytes(self.address.path_prefix + ENDPOINT_PATHS[self.endpoint], body, self.headers)
        try:
            async with asyncio.timeout(self.timeout_s):
                connection = await connect(self.address)
                try:
                    parse_response(await connection.send(request), sent_request)
                finally:
                    connection.transport.abort()
        except TimeoutError:
            sent_request.error = f"no whole answer within {self.timeout_s:g} s"
        except (OSError, ssl.SSLError, EspalierError) as error:
            sent_request.error = one_line(error)
        return sent_request

    async def run_conversation(self, conversation: Conversation, planned_at: float) -> list[SentRequest]:
        """Send the turns of a conversation, the first turn at `planned_at`.  Stops after a turn without an answer."""
        results: list[SentRequest] = []
        answers: list[str] = []
        for body in request_bodies(conversation, self.endpoint, answers, self.shared_fields):
            await asyncio.sleep(planned_at - perf_counter())
            results.append(await self.send_request(body, planned_at))
            results[-1].category = conversation.category
            if results[-1].error:
                break
            answers.append(results[-1].text)
            planned_at = perf_counter() + self.think_time_s
        return results


def parse_response(response: HttpResponse, sent_request: SentRequest) -> None:
    """Parse a response into the fields of `sent_request`.

    A chunk counts as many tokens as it has token ids, or one token if the server sends no ids.  If `usage` reports
    another total, the last chunk's number of tokens is changed so that the sum is this total."""
    if response.status != STATUS_OK:
        sent_request.error = f"status {response.status}: {_error_message(response.body())}"
        return
    texts, has_end = [], False
    for time, data in response.events():
        if data == b"[DONE]":
            has_end = True
            break
        event = json.loads(data)
        if "error" in event:
            sent_request.error = f"the stream ended early: {_error_message(data)}"
            return
        usage = event.get("usage") or {}
        sent_request.num_prompt_tokens = usage.get("prompt_tokens", sent_request.num_prompt_tokens)
        sent_request.num_output_tokens = usage.get("completion_tokens", sent_request.num_output_tokens)
        text, num_ids = _text_of_event(event), _num_token_ids(event)
        if text or num_ids:
            texts.append(text)
            sent_request.timeline.chunks.append((time, num_ids or 1))
    chunks = sent_request.timeline.chunks
    if not has_end or not chunks:
        sent_request.error = NO_TEXT_ERROR if has_end else "the stream has no end"
        return
    num_earlier_tokens = sum(count for _, count in chunks[:-1])
    sent_request.text = "".join(texts)
    sent_request.num_output_tokens = sent_request.num_output_tokens or num_earlier_tokens + chunks[-1][1]
    chunks[-1] = chunks[-1][0], max(1, sent_request.num_output_tokens - num_earlier_tokens)


def _text_of_event(event: Mapping[str, Any]) -> str:
    """Returns the text that an event adds to the answer: content, reasoning, or arguments of a tool call."""
    added_texts: list[str] = []
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        calls = [call.get("function", {}).get("arguments") for call in delta.get("tool_calls") or ()]
        texts = (choice.get("text"), delta.get("reasoning_content"), delta.get("reasoning"), delta.get("content"))
        added_texts += [text for text in (*texts, *calls) if text]
    return "".join(added_texts)


def _num_token_ids(event: Mapping[str, Any]) -> int:
    """Returns the number of token ids in an event; 0 if the server sends no ids."""
    return sum(len(choice.get("token_ids") or ()) for choice in event.get("choices") or ())


def _error_message(data: bytes) -> str:
    try:
        return str(json.loads(data)["error"]["message"])[:200]
    except (ValueError, KeyError, TypeError):
        return data[:200].decode(errors="replace") or "no message"


async def require_reachable(address: Address) -> None:
    """Check that the server accepts connections.  Raises EspalierError."""
    try:
        connection = await connect(address)
    except (OSError, EspalierError) as error:
        raise _unreachable_error(address, error) from None
    connection.transport.abort()


def _unreachable_error(address: Address, error: Exception) -> EspalierError:
    return EspalierError(f"--url {address} cannot be reached ({one_line(error)}); start a server there, or correct it")


async def _get_response(address: Address, headers: Mapping[str, str], path: str) -> HttpResponse:
    lines = [f"GET {address.path_prefix}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    try:
        connection = await connect(address)
        response = await connection.send("\r\n".join([*lines, "", ""]).encode())
        connection.transport.abort()
    except (OSError, EspalierError) as error:
        raise _unreachable_error(address, error) from None
    return response


async def fetch_rounds(address: Address, headers: Mapping[str, str]) -> Counter[int] | None:
    """Returns {accept length: the number of rounds with this accept length} since the server's start.  Returns None for
    a server that does not report Espalier's metric."""
    try:
        response = await asyncio.wait_for(_get_response(address, headers, "/metrics"), METRICS_TIMEOUT_S)
        counts = ROUNDS_METRIC_PATTERN.findall(response.body().decode()) if response.status == STATUS_OK else []
    except (EspalierError, TimeoutError, UnicodeDecodeError):
        return None
    return Counter({int(length): int(float(count)) for length, count in counts}) if counts else None


async def fetch_model(address: Address, headers: Mapping[str, str]) -> str:
    """Returns the name of the server's first model.  Raises EspalierError."""
    response = await _get_response(address, headers, "/v1/models")
    if response.status != STATUS_OK:
        remedy = REMEDY_BY_STATUS.get(response.status, "look at the server's log")
        raise EspalierError(f"--url {address}/v1/models answers {response.status}; {remedy}")
    try:
        return str(json.loads(response.body())["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise EspalierError(f"--url {address}/v1/models names no model; name it with --model") from None
