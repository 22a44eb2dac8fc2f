"""The frames of HTTP/1, however they are cut: heads are refused or pass, bodies pass, and no `Upgrade` does."""

from itertools import pairwise

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.server.errors import ApiError
from espalier.server.heads import MAX_HEAD_BYTES, MAX_HEAD_LINES, Frames

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
    """(bytes as a client sends them, with `Upgrade`; the same without; the body)"""
    body, fields = draw(BODIES), draw(FIELDS)
    framing, sent = b"content-length: %d" % len(body), body
    if draw(st.booleans()):
        chunks = draw(st.lists(BODIES.filter(bool), max_size=3))
        body, framing = b"".join(chunks), b"Transfer-Encoding: Chunked"
        trailer = draw(st.sampled_from([b"", b"a: b\r\n"]))
        sent = b"".join(b"%X;e=1\r\n%b\r\n" % (len(each), each) for each in chunks) + b"0\r\n" + trailer + b"\r\n"
    both = []
    for upgrades in (draw(UPGRADES), []):
        lines = [b"POST /v1/x?a=b HTTP/1.1", b"Host: x", *upgrades, *fields, framing, b"", sent]
        both.append(b"\r\n".join(lines))
    return *both, body


class Parsed:
    """What the parser that the server uses reads: the bodies."""

    def __init__(self):
        self.bodies = []

    def on_message_begin(self):
        self.bodies.append(b"")

    def on_body(self, body):
        self.bodies[-1] += body


@given(st.lists(requests(), min_size=1, max_size=3), st.lists(st.integers(0, 400), max_size=6))
def test_requests_pass_whole_without_upgrade_however_they_are_cut(sent, cuts):
    data, wanted = b"".join(each[0] for each in sent), b"".join(each[1] for each in sent)
    edges = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    frames, parsed, passed = Frames(), Parsed(), b""
    parser = httptools.HttpRequestParser(parsed)
    for start, end in pairwise(edges):
        for part in frames.take(data[start:end]):
            parser.feed_data(part)
            passed += part
    assert passed == wanted
    assert parsed.bodies == [each[2] for each in sent]


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
def test_a_head_that_the_parser_must_not_read_is_refused_however_it_is_cut(sent, status):
    for size in (len(sent), 4099):
        frames = Frames()
        with pytest.raises(ApiError) as refused:
            for start in range(0, len(sent), size):
                list(frames.take(sent[start : start + size]))
        assert refused.value.status_code == status


@pytest.mark.parametrize(
    "sent", [head(start=b"GET / HTTP/1.0"), b"\r\n" + head(b"host:"), head(b"host: x", b"TE: gzip")]
)
def test_what_http_allows_passes(sent):
    assert b"".join(Frames().take(sent)) == sent.lstrip()
