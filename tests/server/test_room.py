"""A process's file descriptors are enough: connections above its limit are closed, those idle longest first."""

import asyncio
import errno
import logging
import resource
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.errors import EspalierError
from espalier.server import connections
from espalier.server.connections import OpenConnections
from espalier.server.http1 import Connection

# What a connection is in, best to close first: nothing, output that waits, a body that comes, an answer.
QUIET, UNREAD, SENDING, BUSY = range(4)


class Made:
    """A connection in a state, as OpenConnections sees it."""

    def __init__(self, state, aborted):
        self.state = state
        self.is_idle, self.waits_for_client = state in (QUIET, UNREAD), state != BUSY
        self.transport = SimpleNamespace(
            abort=lambda: aborted.append(self), get_write_buffer_size=lambda: int(state == UNREAD)
        )


@given(st.lists(st.sampled_from((QUIET, UNREAD, SENDING, BUSY)), min_size=1, max_size=12), st.integers(1, 6), st.data())
def test_the_oldest_that_nobody_waits_for_is_closed(states, limit, data):
    room, held, aborted = OpenConnections(None, limit, None, None), [], []
    for number, state in enumerate(states):
        before, made = list(held), Made(state, aborted)
        room.add(made, float(number))
        held.append(made)
        if len(held) > limit:
            quiet = [each for each in before if each.state == QUIET]
            waits = [each for each in before if each.state in (UNREAD, SENDING)]
            [closed] = aborted
            assert closed is [*quiet, *waits, made][0]
            held.remove(closed)
        else:
            assert not aborted
        aborted.clear()
        if held and data.draw(st.booleans()):
            ended = data.draw(st.sampled_from(held))
            room.mark_idle(ended)
            held.remove(ended)
            held.append(ended)
        if held and data.draw(st.booleans()):
            room.remove(left := data.draw(st.sampled_from(held)))
            held.remove(left)


def test_idle_connections_shut_nobody_out(caplog):
    """Hundreds are opened; the request behind them is answered, one that runs goes on, and the log has one line."""

    async def app(scope, receive, send):
        if scope["path"] == "/slow":
            await asyncio.sleep(0.3)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    async def flood():
        room = OpenConnections(None, 8, None, None)
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Connection(app, room), "127.0.0.1", 0, backlog=4)
        port = server.sockets[0].getsockname()[1]

        async def answer(path):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET %s HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n" % path)
            read = await reader.read(-1)
            writer.close()
            return read[:15]

        slow = asyncio.create_task(answer(b"/slow"))
        await asyncio.sleep(0.05)
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(200)]
        assert await answer(b"/") == b"HTTP/1.1 200 OK"
        assert await slow == b"HTTP/1.1 200 OK"
        # All but the last ones are closed, the first ones first.
        await asyncio.sleep(0.05)
        is_closed = [reader.at_eof() or reader.exception() is not None for reader, _ in idle]
        assert is_closed == sorted(is_closed, reverse=True) and 190 <= sum(is_closed) < 200
        for _, writer in idle:
            writer.close()
        server.close()

    with caplog.at_level(logging.WARNING, "espalier.server"):
        asyncio.run(asyncio.wait_for(flood(), 60))
    assert [record.getMessage() for record in caplog.records] == [
        "more than 8 connections (ulimit -n): those idle longest are closed, 1 since the last such line"
    ]


def test_the_limit_of_connections_follows_from_that_of_open_files(monkeypatch):
    monkeypatch.setattr(connections.os, "listdir", lambda _: range(30))
    limit = 256
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, 10**6))
    assert connections.max_connections() == 256 - 30 - connections.RESERVED_DESCRIPTORS
    limit = resource.RLIM_INFINITY
    assert connections.max_connections() is None
    limit = 64
    with pytest.raises(EspalierError, match=r"limit of 64 open files is too low; set it to \d+ or more"):
        connections.max_connections()


def test_accepts_that_fail_are_logged_once_a_minute_without_a_traceback(caplog):
    seconds, passed = iter((0.0, *map(float, range(1, 70)))), []
    loop = SimpleNamespace(time=lambda: next(seconds), default_exception_handler=passed.append)
    loop.set_exception_handler = lambda handle: setattr(loop, "handle", handle)
    connections.log_failed_accepts_rarely(loop)
    for _ in range(70):
        loop.handle(loop, {"exception": OSError(errno.EMFILE, "Too many open files")})
    lines = [(record.getMessage(), record.exc_info) for record in caplog.records]
    assert [(line.partition(", ")[2], trace) for line, trace in lines] == [
        ("1 times since the last such line", None),
        ("60 times since the last such line", None),
    ]
    other = {"exception": ValueError()}
    loop.handle(loop, other)
    assert passed == [other]
