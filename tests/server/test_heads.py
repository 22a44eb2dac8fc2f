"""Requests, however they are cut: heads are refused or read, bodies arrive whole, and `Upgrade` has no effect."""

import asyncio
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.server.http1 import MAX_HEAD_BYTES, MAX_HEAD_LINES
from tests.server.connected import connected

BODIES = st.binary(max_size=40)
FIELDS = st.lists(
    st.sampled_from(
        [b"x: y", b"connection: Upgrade, HTTP2-Settings", b"X-Upgrade: h2c", b"accept:", b"HTTP2-Settings: AAEA"]
    ),
    max_size=4,
)
UPGRADES = st.lists(st.sampled_from([b"Upgrade: h2c", b"upgrade:TLS/1.0", b"UPGRADE: websocket"]), max_size=2)


@st.composite
def requests(draw):
    """(bytes as a client sends them; the body)"""
    body, fields = draw(BODIES), draw(FIELDS)
    framing, sent = b"content-length: %d" % len(body), body
    if draw(st.booleans()):
        chunks = draw(st.lists(BODIES.filter(bool), max_size=3))
        body, framing = b"".join(chunks), b"Transfer-Encoding: Chunked"
        trailer = draw(st.sampled_from([b"", b"a: b\r\n"]))
        sent = b"".join(b"%X;e=1\r\n%b\r\n" % (len(each), each) for each in chunks) + b"0\r\n" + trailer + b"\r\n"
    lines = [b"POST /v1/x?a=b HTTP/1.1", b"Host: x", *draw(UPGRADES), *fields, framing, b"", sent]
    return b"\r\n".join(lines), body


def answered(sent, edges):
    """What the application reads of what is sent in parts: (headers, body) of each request; and what it writes."""
    read = []

    async def app(scope, receive, send):
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message["body"], message["more_body"]
        read.append((scope["path"], dict(scope["headers"]), body))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def run():
        connection, transport = connected(app)
        for start, end in pairwise(edges):
            connection.data_received(sent[start:end])
            for _ in range(4):
                await asyncio.sleep(0)
        for _ in range(100):
            await asyncio.sleep(0)
        return bytes(transport.data)

    return read, asyncio.run(run())


@given(st.lists(requests(), min_size=1, max_size=3), st.lists(st.integers(0, 400), max_size=6))
def test_every_body_arrives_whole_and_no_upgrade_is_followed_however_requests_are_cut(sent, cuts):
    # An empty line between requests is allowed.
    data = b"\r\n".join(each[0] for each in sent)
    edges = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    read, written = answered(data, edges)
    assert [body for *_, body in read] == [each[1] for each in sent]
    assert {path for path, *_ in read} == {"/v1/x"}
    assert written.count(b"HTTP/1.1 200 OK") == len(sent) and written.endswith(b"ok")


def head(*lines, start=b"POST / HTTP/1.1"):
    return b"\r\n".join([start, *lines, b"", b""])


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (head(), 400),
        (head(b"host: a", b"host: b"), 400),
        (head(b"host: x", b"transfer-encoding: gzip, chunked"), 501),
        (head(b"host: x", b"transfer-encoding: gzip", b"transfer-encoding: chunked"), 501),
        (head(b"host: x", b"transfer-encoding: chunked, gzip"), 400),
        (head(b"host: x", b"transfer-encoding: identity"), 400),
        (head(b"host: x", b"transfer-encoding: "), 400),
        (head(b"host: x", b"transfer-encoding: chunked, chunked"), 400),
        (head(b"host: x", b"transfer-encoding:", b"\tchunked"), 400),
        (head(b"host: x", b"content-length: " + b"0" * 5000), 400),
        (head(b"host: x", *[b"a: b"] * MAX_HEAD_LINES), 431),
        (head(b"host: x", b"a: " + b"b" * MAX_HEAD_BYTES), 431),
        (b"POST /" + b"b" * MAX_HEAD_BYTES, 431),
        (head(b"host: x", b"transfer-encoding: chunked", b"content-length: 3"), 400),
        (head(b"host: x", b"transfer-encoding: chunked") + b"g\r\n", 400),
        (head(b"host: x", b"transfer-encoding: chunked") + b"1;" + b"x" * MAX_HEAD_BYTES, 431),
        (head(b"host: x", b"transfer-encoding: chunked") + b"0\r\n" + b"a: b\r\n" * 11_000, 431),
        (head(b"host: x", b"transfer-encoding: chunked") + b"1;\r\na\r\n" * 17_000, 400),
        (head(start=b"CONNECT x:1 HTTP/1.1"), 405),
        (b"GET / HTTP/1.1\nhost: x\n\n", 400),
        (b"GET / HTTP/2", 400),
        (b"GET  /", 400),
        (b"\x16\x03\x01", 400),
    ],
)
def test_what_must_not_be_read_is_refused_however_it_is_cut(sent, status):
    for size in (len(sent), 4099):
        _, written = answered(sent, [*range(0, len(sent), size), len(sent)])
        assert written.startswith(b"HTTP/1.1 %d " % status) and b"connection: close" in written


@pytest.mark.parametrize(
    ("sent", "path"),
    [
        (head(start=b"GET / HTTP/1.0"), "/"),
        (b"\r\n" + head(b"host:"), "/"),
        (head(b"host: x", b"TE: gzip"), "/"),
        (head(b"host: x", start=b"GET http://x/a%20b?c HTTP/1.1"), "/a b"),
    ],
)
def test_what_http_allows_is_answered(sent, path):
    [(found, _, body)], written = answered(sent, [0, len(sent)])
    assert (found, body) == (path, b"") and written.startswith(b"HTTP/1.1 200 ")
