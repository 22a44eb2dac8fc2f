"""A client that sends FIN behind a whole request and reads on is answered; one that is gone is not waited for."""

import json
import re
import socket

import pytest

from tests.server.serving import LONG

HEAD = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


def sent(served, body, head=HEAD, cut=0):
    """A connection on which a request was sent but for its last bytes, and closed on this side."""
    data = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", served.port))
    connection.settimeout(60)
    connection.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data[: len(data) - cut])
    connection.shutdown(socket.SHUT_WR)
    return connection


def answer(connection):
    """(status, the rest), to the end of the connection; interim answers are read over.  None: there is none."""
    read = b""
    with connection:
        while part := connection.recv(65536):
            read += part
    last = re.sub(rb"\A(HTTP/1\.1 100 Continue\r\n\r\n)+", b"", read)
    return (int(last.split()[1]), last.partition(b"\r\n\r\n")[2]) if last else None


def idle(served):
    return served.metric("open_samples") == served.metric("running_requests") == served.metric("waiting_requests") == 0


@pytest.mark.parametrize("max_tokens", [1, 200])
def test_a_whole_post_gets_its_whole_answer(served, max_tokens):
    status, body = answer(sent(served, LONG | {"max_tokens": max_tokens}))
    found = json.loads(body)
    assert (status, found["usage"]["completion_tokens"]) == (200, max_tokens)
    assert found["choices"][0]["finish_reason"] == "length"


def test_a_stream_comes_to_its_end(served):
    status, body = answer(sent(served, LONG | {"max_tokens": 40, "stream": True}))
    assert status == 200 and b"data: [DONE]" in body


def test_an_error_comes_as_well(served):
    status, body = answer(sent(served, LONG | {"temperature": -1}))
    assert status == 400 and b"temperature" in body


def test_several_on_one_connection_are_answered_in_order(served):
    data = json.dumps(LONG | {"max_tokens": 1}).encode()
    with socket.create_connection(("127.0.0.1", served.port)) as connection:
        connection.settimeout(60)
        connection.sendall(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        connection.sendall(f"{HEAD}content-length: {len(data)}\r\n\r\n".encode() + data)
        connection.shutdown(socket.SHUT_WR)
        status, body = answer(connection)
    assert status == 200 and json.loads(body)["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize(
    ("head", "cut"), [(HEAD, 1), (HEAD.replace("HTTP/1.1", "HTTP/1.0"), 0)], ids=["no whole body", "HTTP/1.0"]
)
def test_fin_is_leaving_where_nobody_can_be_asked(served, head, cut):
    served.until(lambda: idle(served))
    assert answer(sent(served, LONG, head, cut)) is None
    served.until(lambda: idle(served))


@pytest.mark.parametrize("stream", [True, False])
def test_who_is_gone_is_noticed_and_aborted(served, stream):
    """Also while it waits for a slot."""
    served.until(lambda: idle(served))
    ended, lengths = answers(served), served.metric("finished_samples_total", reason="length")
    for connection in [sent(served, LONG | {"stream": stream}) for _ in range(12)]:
        connection.close()
    served.until(lambda: answers(served) == ended + 12 and idle(served), 120)
    assert served.metric("finished_samples_total", reason="length") < lengths + 12


def answers(served):
    return sum(served.metric("http_requests_total", path="/v1/completions", status=each) for each in ("200", "499"))
