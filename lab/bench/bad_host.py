"""`python -m lab serve --bad-host`: how long other requests wait while one host sends large or hostile requests.

For each kind of bad request it measures the longest wait of a stream (its first token included), of a one-token request
and of /health, with streams running and idle.
"""

import asyncio
import json
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any

from espalier.errors import EspalierError
from espalier.terminal.console import print_table, write_json
from espalier.terminal.flags import with_minimum
from lab.bench.server import SERVED_NAME, running_server
from lab.bench.soak import ANSWER_SECONDS

NUM_STREAMS = 16
# Waits are measured for this long after each kind of bad request is sent, or until its last response.
WATCH_SECONDS = 5.0
SHORT_REQUEST = {"model": SERVED_NAME, "prompt": "x", "max_tokens": 1, "temperature": 0}
STREAM_REQUEST = {"model": SERVED_NAME, "prompt": "def f(x):\n", "max_tokens": 64, "ignore_eos": True, "stream": True}


@dataclass(frozen=True)
class Attack:
    """`count` equal POST requests that are sent at once.

    half_closed: each client sends FIN after its body and goes on reading; make_bytes: makes the whole request, in place
    of path and body; stays_open: the connections stay open, and no response is expected.
    """

    name: str
    count: int
    path: str = ""
    body: Callable[[], Mapping[str, Any]] = dict
    half_closed: bool = False
    make_bytes: Callable[[], bytes] | None = None
    stays_open: bool = False

    def request(self) -> bytes:
        if self.make_bytes is not None:
            return self.make_bytes()
        head = b"" if self.half_closed else b"connection: close\r\n"
        return _post_request(self.path, json.dumps(self.body(), separators=(",", ":")).encode(), head)


def _long_text(megabytes: int = 4) -> str:
    """A text of two characters a token.  With the JSON around it, the body has this many megabytes."""
    return "a " * (megabytes * 500_000 - 500)


def _many_content_parts() -> dict[str, Any]:
    part = {"type": "text", "text": "a"}
    return {"model": SERVED_NAME, "messages": [{"role": "user", "content": [part] * 100_000}]}


def _form_upload(charset: str) -> bytes:
    """An upload with a field of 300 KB in this charset."""
    field = b'--B\r\ncontent-disposition: form-data; name="purpose"\r\n\r\n-' + b"b" * 300_000 + b"\r\n--B--\r\n"
    head = f"POST /v1/files HTTP/1.1\r\nhost: bad\r\nconnection: close\r\ncontent-length: {len(field)}\r\n"
    return f"{head}content-type: multipart/form-data; boundary=B; charset={charset}\r\n\r\n".encode() + field


def _h2c_upgrade_offer() -> bytes:
    """Returns the request that the JDK's HttpClient sends to an http:// address."""
    offer = b"connection: Upgrade, HTTP2-Settings, close\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAAB\r\n"
    return _post_request("/v1/completions", json.dumps(SHORT_REQUEST).encode(), offer)


TOKENIZE_HEAD = b"POST /tokenize HTTP/1.1\r\nhost: bad\r\nconnection: close\r\n"
# Loops without end if a message contains "forever".
CHAT_TEMPLATE = (
    "{% if 'forever' in messages[0].content %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
    "{% endfor %}{% endif %}{{ messages[0].content }}"
)


def _ambiguous_grammar(root: str) -> dict[str, Any]:
    """A request whose grammar reads a text s in a number of ways that grows with its length."""
    return SHORT_REQUEST | {"max_tokens": 400, "guided_grammar": f'root ::= {root}\ns ::= s s | s s s | [ -~] | ""'}


ATTACKS = (
    Attack("nothing", 0, "/v1/completions", lambda: SHORT_REQUEST),
    Attack("4 MB prompt", 3, "/v1/completions", lambda: SHORT_REQUEST | {"prompt": _long_text()}),
    Attack("4 MB prompt", 6, "/v1/completions", lambda: SHORT_REQUEST | {"prompt": _long_text()}),
    Attack("4 MB to /tokenize", 3, "/tokenize", lambda: {"prompt": _long_text()}),
    Attack("100,000 content parts", 3, "/v1/chat/completions", _many_content_parts),
    Attack("1.3 million ids to /detokenize", 3, "/detokenize", lambda: {"tokens": [1] * 1_300_000}),
    Attack(
        "250,000 of logit_bias",
        3,
        "/v1/completions",
        lambda: SHORT_REQUEST | {"logit_bias": {str(i): 1 for i in range(250_000)}},
    ),
    Attack("ambiguous grammar", 3, "/v1/completions", lambda: _ambiguous_grammar("s")),
    # No check refuses this grammar, because its ambiguity begins after more tokens than the checks try.
    Attack("grammar ambiguous later", 3, "/v1/completions", lambda: _ambiguous_grammar(r'[\x02]{200} s "\x01"')),
    Attack("half-closed posts", 8, "/v1/completions", lambda: SHORT_REQUEST | {"max_tokens": 8}, half_closed=True),
    Attack("form in punycode", 3, make_bytes=lambda: _form_upload("punycode")),
    Attack("form in unicode_escape", 3, make_bytes=lambda: _form_upload("unicode_escape")),
    Attack("head of 10,000 lines", 8, make_bytes=lambda: TOKENIZE_HEAD + b"a: b\r\n" * 10_000 + b"\r\n"),
    Attack(
        "content-length of 5,000 digits",
        8,
        make_bytes=lambda: TOKENIZE_HEAD + b"content-length: %b\r\n\r\n" % (b"0" * 5000),
    ),
    Attack(
        "500,000 chunks of one byte",
        3,
        make_bytes=lambda: (
            TOKENIZE_HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 500_000 + b"0\r\n\r\n"
        ),
    ),
    Attack("offers of h2c", 8, make_bytes=_h2c_upgrade_offer),
    Attack(
        "chat template without end",
        3,
        "/v1/chat/completions",
        lambda: {"model": SERVED_NAME, "max_tokens": 1, "messages": [{"role": "user", "content": "forever"}]},
    ),
    Attack("idle connections", 600, stays_open=True),
)


@dataclass
class LongestWaits:
    """The longest wait of each kind, in ms."""

    stream_gap: float = 0.0
    one_token: float = 0.0
    health: float = 0.0


@dataclass
class AttackResult:
    """The waits during one kind of bad request, with streams running and idle.  answers: number of responses by status;
    0 is no response."""

    name: str
    count: int
    busy: LongestWaits = field(default_factory=LongestWaits)
    idle: LongestWaits = field(default_factory=LongestWaits)
    answers: dict[int, int] = field(default_factory=dict)


def run(args: Namespace, settings: dict[str, Any]) -> int:
    """Prints the waits.  Returns 1 if a bad request got no response, else 0."""
    # A slot for each stream, one for the short request, and one for each bad request at once.
    most = max(attack.count for attack in ATTACKS if not attack.stays_open)
    results = measure_bad_host(with_minimum(settings, {"max_batch": NUM_STREAMS + 1 + most}, max_batch=NUM_STREAMS + 1))
    write_json(args.json, {"bad_host": [asdict(result) for result in results]})
    rows = [["longest wait, ms", f"beside {NUM_STREAMS} streams:", "", "", "idle:", "", ""]]
    rows.append(["", "stream gap", "one token", "/health", "one token", "/health", "answers"])
    print_table([*rows, *(_result_row(result) for result in results)])
    return int(any(0 in result.answers for result in results))


def _result_row(result: AttackResult) -> list[str]:
    waits = (*astuple(result.busy), result.idle.one_token, result.idle.health)
    answers = ", ".join(f"{count} of {status or 'none'}" for status, count in result.answers.items())
    name = f"{result.count} x {result.name}" if result.count else result.name
    return [name, *(f"{wait:.0f}" for wait in waits), answers]


def measure_bad_host(
    settings: Mapping[str, Any], attacks: Sequence[Attack] = ATTACKS, num_streams: int = NUM_STREAMS
) -> list[AttackResult]:
    """Measures each kind of bad request on the same server, with `num_streams` streams and without streams."""
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder, "template.jinja")
        template.write_text(CHAT_TEMPLATE)
        flags = "--batch-dir", str(Path(folder, "batches")), "--chat-template", str(template)
        with running_server(settings, *flags) as server:
            return asyncio.run(_run_attacks(server.port, attacks, num_streams))


async def _run_attacks(port: int, attacks: Sequence[Attack], num_streams: int) -> list[AttackResult]:
    results = []
    for attack in attacks:
        data = attack.request()
        result, statuses = AttackResult(attack.name, attack.count), Counter[int]()
        for waits, number in ((result.busy, num_streams), (result.idle, 0)):
            async with _measure_waits(port, waits, number):
                end = asyncio.create_task(asyncio.sleep(WATCH_SECONDS))
                if attack.stays_open:
                    await asyncio.gather(*(_hold_connection(port, end) for _ in range(attack.count)))
                else:
                    sent = (_send_and_read_status(port, data, attack.half_closed) for _ in range(attack.count))
                    statuses.update(await asyncio.gather(*sent))
                await end
        result.answers = dict(sorted(statuses.items()))
        results.append(result)
    return results


def _post_request(path: str, body: bytes, headers: bytes = b"connection: close\r\n") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: bad\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return head.encode() + headers + b"\r\n" + body


@asynccontextmanager
async def _measure_waits(port: int, waits: LongestWaits, num_streams: int) -> AsyncIterator[None]:
    """Repeats streams, one-token requests and /health probes, and records their waits.

    Raises EspalierError if a request is not served, because a request that is refused at once has no wait."""
    short = _post_request("/v1/completions", json.dumps(SHORT_REQUEST).encode())
    probe = b"GET /health HTTP/1.1\r\nhost: bad\r\nconnection: close\r\n\r\n"
    tasks = [asyncio.create_task(_repeat_stream(port, waits)) for _ in range(num_streams)]
    tasks += [
        asyncio.create_task(_repeat_request(port, short, waits, "one_token")),
        asyncio.create_task(_repeat_request(port, probe, waits, "health")),
    ]
    # After the warm-up, in which all of them have begun, the waits start at 0.
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


async def _repeat_stream(port: int, waits: LongestWaits) -> None:
    data = _post_request("/v1/completions", json.dumps(STREAM_REQUEST).encode())
    while True:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(data)
        more, tail = b"begun", b""
        try:
            while more:
                began = time.perf_counter()
                try:
                    more = await reader.read(65536)
                finally:  # if cancelled here, it has waited at least this long
                    waits.stream_gap = max(waits.stream_gap, 1e3 * (time.perf_counter() - began))
                tail = (tail + more)[-64:]
        finally:
            writer.close()
        if b"data: [DONE]" not in tail:
            raise EspalierError("a stream ended early during the bad requests; read the server's log")


async def _repeat_request(port: int, data: bytes, waits: LongestWaits, name: str) -> None:
    while True:
        began = time.perf_counter()
        try:
            status = await _send_and_read_status(port, data)
        finally:  # if cancelled here, it has waited at least this long
            setattr(waits, name, max(getattr(waits, name), 1e3 * (time.perf_counter() - began)))
        if status != 200:
            raise EspalierError(f"{name} got status {status} during the bad requests; read the server's log")
        await asyncio.sleep(0.02)


async def _hold_connection(port: int, end: asyncio.Future[None]) -> None:
    """Keeps a connection open until `end`, unless the server closes it first."""
    with suppress(OSError):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.wait({end})
        writer.close()


async def _send_and_read_status(port: int, data: bytes, half_closed: bool = False) -> int:
    """The status of the response, 0 if there is none.  Interim responses (1xx) are skipped."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = b""
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
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
