"""However a request or a process ends, nobody is left without an answer and nothing is left behind."""

import http.client
import json
import os
import re
import signal
import socket
import threading

import openai
import pytest
from openai import OpenAI

from espalier.server.worker import _remove_socket
from tests.server.serving import (
    LONG,
    announce_body,
    ask_large,
    connected,
    events,
    exists,
    is_told_of_the_end,
    opened,
    serving,
)
from tests.worded import worded


@pytest.fixture
def own(servers):
    """A server that may be broken.  At its end it waits for a reader that takes nothing one second, not five."""
    flags = ("--max-queue", "2", "--drain-timeout", "60", "--send-timeout", "0")
    return servers(*flags, MAX_STALL_AT_DRAIN_S=1.0)


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    path = tmp_path_factory.mktemp("template") / "template"
    path.write_text("{% for m in messages %}<{{ m['role'] }}>{% endfor %}")
    return path


@pytest.fixture
def guarded(servers, template):
    """A server with a key, names, a template and a time limit of its own."""
    names = ("--served-model-name", "a", "--served-model-name", "b")
    limits = ("--request-timeout", "0.2", "--api-key", "secret", "--cors-origin", "https://page.example")
    target, draft = map(str, worded())
    own = ("--chat-template", str(template), "--log-json", "--strict-fields")
    return servers(target, "--draft", draft, *names, *limits, *own)


def idle(served):
    return served.metric("open_samples") == served.metric("running_requests") == served.metric("waiting_requests") == 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_frees_its_pages_at_the_next_harvest(served, stream):
    served.until(lambda: idle(served))
    aborts, left = served.metric("abort_steps_count"), served.metric("disconnects_total")
    within_one = served.metric("abort_steps_bucket", le="1.0")
    if stream:
        connection, answer = opened(served)
    else:
        connection = http.client.HTTPConnection("127.0.0.1", served.port)
        connection.request("POST", "/v1/completions", json.dumps(LONG), {"content-type": "application/json"})
    # The first text may come before the figure.
    served.until(lambda: served.metric("running_requests") == 1)
    if stream:
        answer.close()
    connection.close()
    # A report may come between the abort and its count.
    served.until(lambda: idle(served) and served.metric("abort_steps_count") == aborts + 1)
    assert served.metric("pages", state="owned") == 0
    assert served.metric("abort_steps_bucket", le="1.0") == within_one + 1
    assert served.metric("disconnects_total") == left + 1


def test_a_slow_reader_holds_up_nobody(served, client):
    with socket.create_connection(("127.0.0.1", served.port)) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        body = json.dumps({**LONG, "max_tokens": 40, "logprobs": 5, "stream": True, "return_token_ids": True}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        )
        slow.sendall(head.encode() + b"\r\n\r\n" + body)
        # While it still reads nothing.
        answer = client.completions.create(model="bundled", prompt="x = ", max_tokens=4)
        assert answer.usage.completion_tokens > 0
        # It ends all the same, and its reader finds all of it.
        served.until(lambda: idle(served))
        read = b""
        while b"[DONE]" not in read:
            read += slow.recv(65536)


def test_a_full_queue_is_429_with_a_time_to_come_again(own):
    finished = own.metric("finished_samples_total", reason="length")
    streams = [opened(own) for _ in range(4)]
    waiting = [threading.Thread(target=own.request, args=("/v1/completions", {**LONG, "max_tokens": 2})) for _ in "ab"]
    for thread in waiting:
        thread.start()
    own.until(lambda: own.metric("open_samples") == 6)
    status, headers, body = own.request("/v1/completions", LONG)
    assert (status, headers["retry-after"], body["error"]["type"]) == (429, "1", "rate_limit_error")
    with OpenAI(base_url=f"{own.base}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(model="bundled", prompt="x", max_tokens=2)
        assert caught.value.code == "rate_limit_exceeded"
    for connection, _ in streams:
        connection.close()
    for thread in waiting:
        thread.join()
    own.until(lambda: idle(own))
    assert own.metric("finished_samples_total", reason="length") == finished + 2


def test_a_killed_engine_is_told_and_started_again(own):
    first = own.engine_pid()
    _, answer = opened(own)
    with OpenAI(base_url=f"{own.base}/v1", api_key="none", max_retries=0) as client:
        chunks = client.completions.create(
            stream=True,
            extra_body={"ignore_eos": True},
            **{name: value for name, value in LONG.items() if name != "ignore_eos"},
        )
        next(chunks)
        os.kill(first, signal.SIGKILL)
        with pytest.raises(openai.APIError, match="was killed by signal 9; retry the request"):
            list(chunks)
    last = json.loads(events(answer)[-1])["error"]
    assert (last["type"], last["code"]) == ("overloaded_error", "engine_gone")
    status, _, health = own.request("/health")
    assert (status, health["status"]) == (503, "gone") and "signal 9" in health["why"]
    assert own.request("/v1/completions", LONG)[0] == 503
    own.until(lambda: own.request("/health")[0] == 200)
    assert own.engine_pid() != first and own.metric("engine_restarts_total") == 1
    assert own.request("/v1/completions", {**LONG, "max_tokens": 3})[2]["usage"]["completion_tokens"] == 3


def test_a_silent_engine_counts_as_gone_and_the_server_ends_where_it_starts_no_other(tmp_path):
    with serving(tmp_path, "--engine-timeout", "3", "--no-restart-engine", copied=True) as served:
        engine = served.engine_pid()
        _, answer = opened(served)
        os.kill(engine, signal.SIGSTOP)
        error = json.loads(events(answer)[-1])["error"]
        assert "sent nothing for" in error["message"] and error["code"] == "engine_gone"
        assert served.process.wait(60) == 1 and not exists(engine)
        assert "the server ends without an engine: the engine process sent nothing" in served.log.read_text()


def test_sigterm_finishes_what_runs_and_waits_for_nothing_else(own):
    """It refuses new requests, and waits for no body and for no reader that takes nothing."""
    engine = own.engine_pid()
    kept = http.client.HTTPConnection("127.0.0.1", own.port)
    kept.request("GET", "/health")
    assert kept.getresponse().read()
    with connected(own) as slow, connected(own) as upload:
        ask_large(slow)
        # The next on this connection cannot be answered: it stays open.
        slow.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        own.until(lambda: own.metric("http_requests_total", path="/detokenize", status="200") == 1)
        announce_body(upload)
        _, stream = opened(own, max_tokens=150)
        own.process.send_signal(signal.SIGTERM)
        # The stream too, unless it has ended by now.
        own.until(lambda: re.search("draining: [23] requests are in progress", own.log.read_text()))
        status, _, refused = own.request("/v1/completions", LONG)
        # Its body, which this client sends apart, may not be there yet, and is not waited for.
        assert status == 503 and re.fullmatch(
            "the server is shutting down.*; retry on another server", refused["error"]["message"]
        )
        assert own.request("/health")[2] == {
            "status": "draining",
            "why": "the server is shutting down, and finishes the requests that run",
        }
        assert is_told_of_the_end(upload)
        ended = events(stream)
        assert ended[-1] == b"[DONE]" and json.loads(ended[-2])["choices"][0]["finish_reason"] == "length"
        assert own.process.wait(60) == 0
        assert not exists(engine)


def test_timeouts_keys_names_and_templates(guarded):
    status, headers, _ = guarded.request("/v1/models")
    assert (status, headers["www-authenticate"]) == (401, "Bearer")
    with (
        pytest.raises(openai.AuthenticationError) as caught,
        OpenAI(base_url=f"{guarded.base}/v1", api_key="x") as client,
    ):
        client.models.list()
    assert caught.value.code == "invalid_api_key"
    key = {"authorization": "Bearer secret"}
    assert [card["id"] for card in guarded.request("/v1/models", **key)[2]["data"]] == ["a", "b"]
    turns = [{"role": role, "content": "x"} for role in ("developer", "user")]
    tokens = guarded.request("/tokenize", {"messages": turns}, **key)[2]["tokens"]
    assert guarded.request("/detokenize", {"tokens": tokens}, **key)[2]["prompt"] == "<system><user>"
    status, headers, body = guarded.request("/v1/completions", {**LONG, "model": "b"}, **key)
    assert (status, body["error"]["type"], headers["x-should-retry"]) == (504, "timeout_error", "false")
    guarded.until(lambda: idle(guarded))
    assert guarded.metric("timeouts_total") == 1
    refused = guarded.request("/v1/completions", {**LONG, "model": "b", "user": "me"}, **key)[2]
    assert "this server runs with --strict-fields" in refused["error"]["message"]
    assert guarded.request("/v1/models", origin="https://page.example", **key)[1]["access-control-allow-origin"]
    assert all(json.loads(line)["request_id"] for line in guarded.log.read_text().splitlines())


def test_an_engine_does_not_outlive_its_front(guarded):
    engine = guarded.engine_pid()
    guarded.process.kill()
    guarded.process.wait()
    guarded.until(lambda: not exists(engine))


def test_the_folder_of_a_dead_fronts_socket_goes_only_if_nothing_else_is_in_it(tmp_path):
    own, shared = tmp_path / "own", tmp_path / "shared"
    for folder in (own, shared):
        folder.mkdir()
        (folder / "1").touch()
    (shared / "letter").touch()
    for folder in (own, shared):
        _remove_socket(folder / "1")
    assert not own.exists()
    assert [path.name for path in shared.iterdir()] == ["letter"]
