"""What nobody ends by themselves ends all the same: readers that take nothing, uploads without end, loads that hang."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import Counter

from espalier.errors import EspalierError
from espalier.server.active_requests import EventStream
from espalier.server.client import ClientOptions, EngineClient
from espalier.server.connections import OpenConnections
from espalier.server.errors import ApiError
from espalier.server.http1 import Connection
from espalier.server.middleware import LimitedReceive, RequestMiddleware
from espalier.server.response_builders import sse_event
from espalier.server.run import bind_listener
from tests import warm
from tests.server.connected import Counted
from tests.server.serving import (
    FLAGS,
    HEAD,
    ROOT,
    announce_body,
    answer,
    ask_large,
    connected,
    events,
    exists,
    is_told_of_the_end,
    opened,
    until,
)

WITH_KEY = HEAD + "authorization: Bearer secret\r\n"
LIMITS = ("--send-timeout", "1", "--body-timeout", "1.5", "--drain-timeout", "60", "--api-key", "secret")


@pytest.fixture
def limited(servers):
    return servers(*LIMITS)


def sockets(served):
    """Of the API server, as many as it holds open."""
    found = 0
    for path in Path(f"/proc/{served.process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since the folder was listed
            found += os.readlink(path).startswith("socket:")
    return found


def test_a_reader_that_takes_nothing_loses_its_connection_also_after_its_requests_end(limited):
    before = sockets(limited)
    with connected(limited) as slow:
        ask_large(slow, "authorization: Bearer secret\r\nx-request-id: asleep\r\n")
        limited.until(lambda: limited.metric("http_requests_total", path="/detokenize", status="200") == 1)
        limited.until(lambda: limited.metric("stalled_readers_total") == 1)
        limited.until(lambda: sockets(limited) <= before)
        assert re.search(
            r"\[asleep\] the client read nothing for \d+ s: .* bytes were not sent", limited.log.read_text()
        )


def test_a_slow_upload_is_refused_and_its_connection_closed(limited):
    with connected(limited) as slow:
        slow.sendall(f"{WITH_KEY}content-length: 1000\r\n\r\n{{".encode())
        status, head, error = answer(slow)
        assert (status, error["type"]) == (408, "timeout_error") and "--body-timeout" in error["message"]
        assert "connection: close" in head and f"x-request-id: {error['request_id']}" in head


def uploaded(limit_s, parts, pause_s):
    """The status of an upload through the middleware; None of parts: it never ends."""
    left, statuses = parts, []

    async def receive():
        nonlocal left
        if pause_s:
            await asyncio.sleep(pause_s)
        left = None if left is None else left - 1
        return {"type": "http.request", "body": b" ", "more_body": left != 0}

    async def app(scope, receive, send):
        while (await receive())["more_body"]:
            pass
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message):
        statuses.append(message.get("status"))

    middleware = RequestMiddleware(app, None, 10**9, lambda path, status: None, limit_s)
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    asyncio.run(asyncio.wait_for(middleware(scope, receive, send), 20))
    assert not middleware.body_timeouts
    return statuses[0]


def test_the_limit_is_for_the_whole_of_an_upload():
    assert uploaded(0.3, None, 0.02) == 408
    assert uploaded(20.0, 10, 0.02) == uploaded(None, 10, 0.02) == 200
    # What is there already is taken, whatever the time.
    assert uploaded(0.0, 1, 0) == 200


def test_a_body_may_run_out_of_time_as_the_drain_begins():
    """Both in one turn of the loop, the limit first."""

    async def close_after_response():
        loop, errors = asyncio.get_running_loop(), []
        loop.set_exception_handler(lambda _, context: errors.append(context))
        middleware = RequestMiddleware(None, None, 10, lambda path, status: None, 0.0)

        async def receive():
            loop.call_soon(middleware.drain)
            await asyncio.sleep(60)

        with pytest.raises(ApiError, match="503: the server is shutting down"):
            await LimitedReceive(middleware, receive, "/v1/completions")()
        assert middleware.draining and errors == []

    asyncio.run(close_after_response())


class Made:
    """A connection as OpenConnections sees it."""

    def __init__(self):
        self.exchange, self.is_idle, self.got_no_data_since_response = None, False, False
        self.idle_since, self.num_written, self.closed = 0.0, 0, []
        self.transport, self.size, self.now = self, 0, 0.0

    def get_write_buffer_size(self):
        return self.size

    def abort(self):
        self.closed.append(self.now)

    close = abort

    def get_extra_info(self, name):
        return ("::1", 80, 0, 0)


def swept(made, send_timeout_s=None, body_timeout_s=None):
    """A function that checks the connection at a time."""
    connections = OpenConnections(counted := Counted(), None, send_timeout_s, body_timeout_s)
    connections.add(made, 0.0)

    def sweep(now):
        made.now = now
        if not made.closed:
            connections.close_stalled(now)
        return counted.count

    return sweep


def test_progress_is_what_a_reader_takes():
    """Bytes written so far and those of them that wait, at each second, and when the connection is closed under a limit
    of three.  Others that are written meanwhile are no progress, and hide none."""
    for seconds, closed_at in (
        ("9/9 9/9 9/9 9/9 9/9", 3),
        ("9/9 9/8 9/8 9/8 9/8 9/8", 4),
        ("9/9 9/9 9/0 19/10 19/10 19/10 19/10", 6),
        ("9/9 19/19 29/29 39/39", 3),
        ("5/5 9/8 11/9 13/10 15/11 17/12", None),
    ):
        made, count = Made(), 0
        sweep = swept(made, send_timeout_s=3.0)
        for now, state in enumerate(seconds.split()):
            made.num_written, made.size = map(int, state.split("/"))
            count = sweep(float(now))
        assert made.closed == ([] if closed_at is None else [closed_at]), seconds
        assert count == len(made.closed)


def test_who_is_without_a_request_for_too_long_is_closed():
    """At each second what answers (its name, in capitals once it is done), + where some of it waits for its reader, and
    ~ from its end until something comes; the limit is three, and five for those who are silent after an answer."""
    for seconds, closed_at in (
        ("- - - - -", 3),
        ("- - a a a a a a", None),
        ("- - a A A A A", 6),
        ("a A A b B B c C C d", None),
        ("A A B B C C", None),
        ("A A A+ A+ A A A A", 6),
        ("- - -+ - - - -", 5),
        ("A~ A~ A~ A~ A~", None),
        ("A~ A~ A~ A~ A~ A~", 5),
        ("a A~ A~ A A A A", 6),
    ):
        made, before = Made(), ""
        sweep, unlimited = swept(made, body_timeout_s=3.0), swept(other := Made())
        for now, state in enumerate(seconds.split()):
            made.is_idle = not state[0].islower()
            made.got_no_data_since_response = "~" in state
            made.size = made.num_written = state.count("+")
            # As of Connection: a request ends, or something comes after an answer.
            if (made.is_idle and state[0] != before[:1]) or ("~" in before and "~" not in state):
                made.idle_since = float(now)
            before, count = state, sweep(float(now))
        assert made.closed == ([] if closed_at is None else [closed_at]), seconds
        # Silence is not counted: such a client owes nothing.
        assert count == (len(made.closed) if not made.got_no_data_since_response else 0)
        other.is_idle = True
        assert unlimited(10.0**9) == 0 and other.closed == []


def test_a_slow_reader_keeps_its_connection_and_one_that_stops_loses_it():
    """Over a socket: what the system takes is progress."""

    async def run():
        async def app(scope, receive, send):
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b" " * 2**23})

        connections = OpenConnections(Counted(), None, 1.0, None)
        with bind_listener("127.0.0.1", 0) as listener, socket.socket() as client:
            loop = asyncio.get_running_loop()
            server = await loop.create_server(lambda: Connection(app, connections), sock=listener)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
            client.setblocking(False)
            await loop.sock_connect(client, listener.getsockname())
            await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            # The clock goes on by a tenth of the limit a turn, however long the machine takes for one.
            for turn in range(30):
                await loop.sock_recv(client, 2**16)
                await asyncio.sleep(0.01)
                connections.close_stalled(turn / 10)
            assert len(connections) == 1 and connections.metrics.count == 0
            for turn in range(30, 60):
                connections.close_stalled(turn / 10)
                await asyncio.sleep(0.01)
            assert len(connections) == 0 and connections.metrics.count == 1
            server.close()

    asyncio.run(asyncio.wait_for(run(), 30))


def trickled(connection, first, status):
    """Send the first part, read an answer where one is due, and then send a byte now and then; seconds to the end."""
    connection.settimeout(60)
    connection.sendall(first.encode())
    if status:
        assert connection.recv(65536).startswith(f"HTTP/1.1 {status} ".encode())
    began = time.monotonic()
    connection.settimeout(0.1)
    with suppress(ConnectionError):
        while time.monotonic() - began < 60:
            connection.sendall(b"x")
            with suppress(TimeoutError):
                if not connection.recv(65536):
                    break
    return time.monotonic() - began


TO_NOWHERE = HEAD.replace("completions", "none")
UNREAD = "content-length: 1000000000\r\n"
TRICKLES = {
    "headers": (HEAD + "x-request-id: ", 0),
    "a request line": ("GET /health?", 0),
    "headers after an answer": ("GET /health HTTP/1.1\r\nhost: x\r\n\r\nGET /", 200),
    "a body after 401": (f"{HEAD}{UNREAD}\r\n", 401),
    "a body after 404": (f"{TO_NOWHERE}authorization: Bearer secret\r\ncontent-length: 1000\r\n\r\n", 404),
    "a body after 413": (f"{HEAD}authorization: Bearer secret\r\n{UNREAD}\r\n", 413),
}


def test_who_trickles_what_nobody_waits_for_loses_the_connection(limited):
    before, stalled, log_end = sockets(limited), limited.metric("stalled_senders_total"), len(limited.log.read_text())
    with socket.create_connection(("127.0.0.1", limited.port)) as silent, ThreadPoolExecutor(8) as several:
        connections = [socket.create_connection(("127.0.0.1", limited.port)) for _ in TRICKLES]
        seconds = list(several.map(trickled, connections, *zip(*TRICKLES.values(), strict=True)))
        silent.settimeout(60)
        assert silent.recv(1) == b""
    for connection in connections:
        connection.close()
    assert max(seconds) < 45, dict(zip(TRICKLES, seconds, strict=True))
    limited.until(lambda: sockets(limited) <= before)
    assert limited.metric("stalled_senders_total") == stalled + len(TRICKLES) + 1
    line = r"no whole request arrived in \d+ s: the connection from 127\.0\.0\.1 port (\d+) is closed"
    assert len(set(re.findall(line, limited.log.read_text()[log_end:]))) == len(TRICKLES) + 1


def test_ctrl_c_tells_what_runs_and_leaves_nothing(limited):
    """Last of this server's tests."""
    _, stream = opened(limited, {"authorization": "Bearer secret"})
    with connected(limited) as upload:
        announce_body(upload, "authorization: Bearer secret\r\n")
        # The engine, the reader of large bodies and the API server, as a terminal sends it to a whole group.
        group = [*children(limited.process.pid), limited.process.pid]
        for pid in group:
            os.kill(pid, signal.SIGINT)
        assert "shutting down" in json.loads(events(stream)[-1])["error"]["message"]
        assert is_told_of_the_end(upload)
        assert limited.process.wait(60) == 0
    assert len(group) > 1 and not any(map(exists, group)) and "Traceback" not in limited.log.read_text()


def test_an_engine_that_hangs_while_it_loads_is_ended(monkeypatch, tmp_path):
    real = asyncio.create_subprocess_exec
    hung = []

    async def hang(*command, **options):
        hung.append(await real(sys.executable, "-c", "import time; time.sleep(600)", **options))
        return hung[0]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", hang)

    async def run():
        client = EngineClient({}, ClientOptions(load_timeout_s=0.3))
        with pytest.raises(EspalierError, match=r"did not load its model within 0\.3 s .* raise --load-timeout"):
            await client.start()
        assert not client._socket_folder.exists() and not exists(hung[0].pid)
        await client.close()

    asyncio.run(run())


def started(tmp_path, *flags, copied=False):
    """A server that has just been started: (process, its log).  copied: it finds its imports done (tests/warm.py)."""
    log = tmp_path / "log"
    arguments = ["serve", "bundled", "--port", "0", *FLAGS, *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    with log.open("w") as lines:
        if copied:
            return warm.server().start("espalier", arguments, environment, lines, lines), log
        command = [sys.executable, "-m", "espalier", *arguments]
        return subprocess.Popen(command, stderr=lines, stdout=lines, env=environment, cwd=ROOT), log


def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as found:
        return [int(child) for child in found.read().split()]


def test_a_load_that_takes_too_long_ends_the_command_with_an_error(tmp_path):
    process, log = started(tmp_path, "--load-timeout", "0.01", copied=True)
    try:
        assert process.wait(60) == 2
    finally:
        process.kill()
    assert "raise --load-timeout" in log.read_text() and "Traceback" not in log.read_text()
    assert list(tmp_path.iterdir()) == [log]


def command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def test_sigterm_while_the_model_loads_leaves_nothing(tmp_path):
    process, log = started(tmp_path)
    # One that has not yet become its own program would hold up the one that starts it.
    [engine] = until(lambda: [child for child in children(process.pid) if command(child) != command(process.pid)])
    # It stays where it is: loading.
    os.kill(engine, signal.SIGSTOP)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    assert not exists(engine) and list(tmp_path.iterdir()) == [log]
    assert "serving" not in log.read_text() and "Traceback" not in log.read_text()


@pytest.mark.parametrize(
    ("raised", "kind", "message"),
    [
        (ValueError("a defect"), "server_error", "internal server error; the server's log has the details"),
        (ApiError(504, "too long"), "timeout_error", "too long"),
    ],
)
def test_what_is_raised_in_a_streams_midst_ends_it_with_an_error_event(raised, kind, message, caplog):
    counter = Counter("stream_errors", "", ["type"], registry=None)
    run = SimpleNamespace(metrics=SimpleNamespace(stream_errors=counter), deadline=None, close=lambda: None)
    run.response_builder, run.has_ended = SimpleNamespace(error_event=sse_event), False

    async def rest():
        yield b"second"
        raise raised

    async def read():
        stream, sent = EventStream(run, b"first", rest()), []

        async def send(message):
            sent.append(message)

        await stream({}, None, send)
        assert [message.get("more_body") for message in sent] == [None, True, True, True, False]
        return [message["body"] for message in sent[1:]], stream.has_ended

    (first, second, last, end), ended = asyncio.run(read())
    assert (first, second, end, ended) == (b"first", b"second", b"", True)
    error = json.loads(last.removeprefix(b"data: "))["error"]
    assert (error["type"], error["message"].startswith(message)) == (kind, True)
    assert counter.labels(kind)._value.get() == 1
    [record] = caplog.records
    assert (record.exc_info is not None) == isinstance(raised, ValueError)
