"""A batch against servers that refuse, break off or die: each line is answered once, or the run ends and can go on."""

import asyncio
import json
import os
from collections import Counter

import httpx
import pytest

from espalier.batch_jobs import sender as sender_module
from espalier.batch_jobs.files import Journal, scan_input
from espalier.batch_jobs.sender import MAX_TIMES_LOST, Sender, http_client, require_reachable, run_batch
from espalier.errors import EspalierError
from tests.batch_jobs.sample import line, outcomes, write


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch):
    monkeypatch.setattr(sender_module, "FIRST_RETRY_PAUSE_S", 1e-4)
    monkeypatch.setattr(sender_module, "MAX_RETRY_PAUSE_S", 1e-3)


def batch(tmp_path, lines, answer, concurrency=4, **options):
    """Run a batch against servers whose answers are answer(number of the server, body)."""
    path = tmp_path / "out.jsonl"
    num_servers = options.pop("num_servers", 1)

    def server(index):
        async def handle(request):
            result = answer(index, json.loads(request.content))
            return await result if asyncio.iscoroutine(result) else result

        return httpx.AsyncClient(transport=httpx.MockTransport(handle), base_url="http://server")

    async def main():
        journal = Journal(path, scan_input(write(tmp_path / "in.jsonl", lines)))
        try:
            await run_batch(journal, Sender([server(i) for i in range(num_servers)], **options), concurrency)
        finally:
            journal.close()

    asyncio.run(main())
    return outcomes(path)


def ok(body):
    return httpx.Response(200, json={"echo": body["prompt"]})


def error(status, code=None, **headers):
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.Response(status, json={"error": {"message": "why", "code": code}}, headers=named)


def test_lines_are_answered_at_once_and_each_once(tmp_path):
    now = peak = 0

    async def answer(index, body):
        nonlocal now, peak
        now += 1
        peak = max(peak, now)
        await asyncio.sleep(0)
        now -= 1
        return ok(body)

    lines = [line(i) for i in range(1, 40)] + ["{bad"]
    assert batch(tmp_path, lines, answer) == dict.fromkeys(range(1, 40), 200) | {40: "invalid_json_line"}
    assert peak == 4
    answers = [json.loads(each) for each in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert all(
        each["response"]["body"] == {"echo": f"def f{each['custom_id'][1:]}("} for each in answers if each["response"]
    )


def test_what_is_no_answer_is_tried_again_and_a_refusal_is_an_answer(tmp_path):
    tries = Counter()

    def answer(index, body):
        tries[body["prompt"]] += 1
        number, count = body["max_tokens"], tries[body["prompt"]]
        if number == 6:
            return error(400)
        if number == 7:
            return httpx.Response(200, text="<html>")
        if number == 8:
            return error(404)
        if number == 9:
            return httpx.Response(404, json={"object": "error", "message": "no such model"})
        if number == 10:
            return httpx.Response(404, json={"error": "no such model"})
        if count > 6:
            return ok(body)
        if number == 1 and count < 3:
            raise httpx.ReadError("gone")
        if number in (2, 3, 4):
            return error((429, 503, 502)[number - 2], retry_after="0")
        if number == 5:
            raise httpx.ConnectError("nobody")
        return ok(body)

    lines = [line(i, body={"prompt": f"p{i}", "max_tokens": i}) for i in range(1, 11)]
    refused = {6: 400, 7: "invalid_response", 8: 404, 9: 404, 10: 404}
    assert batch(tmp_path, lines, answer) == dict.fromkeys(range(1, 6), 200) | refused
    assert [tries[f"p{i}"] for i in range(1, 11)] == [3, 7, 7, 7, 7, 1, 1, 1, 1, 1]


def test_a_line_that_ends_the_server_each_time_does_not_end_the_batch(tmp_path):
    tries = Counter()

    def answer(index, body):
        tries[body["prompt"]] += 1
        if body["prompt"] == "poison":
            return error(503, "engine_gone")
        return ok(body)

    lines = [line(1), line(2, body={"prompt": "poison"}), line(3)]
    assert batch(tmp_path, lines, answer) == {1: 200, 2: "no_answer", 3: 200}
    assert tries["poison"] == MAX_TIMES_LOST


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (lambda body: error(401), "refuses the API key"),
        (lambda body: error(503, "engine_gone", x_should_retry="false"), "status 503: why"),
        (lambda body: error(429), "no line was answered for 0 s"),
        (
            lambda body: httpx.Response(404, json={"detail": "Not Found"}),
            "http://server/v1/completions answers 404 .*Not Found",
        ),
        (lambda body: httpx.Response(404, text="<html>"), "nothing is served there; correct --url"),
    ],
    ids=["key", "engine", "silence", "no endpoint", "no server"],
)
def test_a_batch_ends_where_no_line_can_be_answered_and_goes_on_later(tmp_path, answer, why):
    lines = [line(i) for i in range(1, 7)]

    def dies(index, body):
        return ok(body) if body["prompt"] in ("def f1(", "def f3(") else answer(body)

    with pytest.raises(EspalierError, match=why):
        batch(tmp_path, lines, dies, give_up_s=0.0)
    first = outcomes(tmp_path / "out.jsonl")
    assert set(first) <= {1, 3}
    sent = []
    assert batch(tmp_path, lines, lambda index, body: sent.append(body["prompt"]) or ok(body)) == dict.fromkeys(
        range(1, 7), 200
    )
    assert sorted(sent) == sorted(f"def f{i}(" for i in range(1, 7) if i not in first)


def test_servers_take_turns_and_a_dead_one_costs_no_line(tmp_path):
    served = Counter()

    def answer(index, body):
        if index == 2:
            raise httpx.ConnectError("nobody")
        served[index] += 1
        return ok(body)

    assert batch(tmp_path, [line(i) for i in range(1, 31)], answer, num_servers=3) == dict.fromkeys(range(1, 31), 200)
    assert served[0] and served[1] and served.total() == 30


def test_a_disk_that_fails_ends_the_batch(tmp_path, monkeypatch):
    """Its answers would not be kept, so no further line is sent."""

    def fail(file):
        raise OSError(5, "Input/output error")

    async def answer(index, body):
        asked.append(body)
        monkeypatch.setattr(os, "fsync", fail)
        await asyncio.sleep(0.02)
        return ok(body)

    asked: list = []
    monkeypatch.setattr(sender_module, "SYNC_INTERVAL_S", 1e-3)
    with pytest.raises(EspalierError, match=r"cannot be written \(Input/output error\)"):
        batch(tmp_path, [line(i) for i in range(1, 101)], answer, concurrency=1)
    assert len(asked) < 50


def test_a_priority_is_added_where_the_line_has_none(tmp_path):
    sent = {}

    def answer(index, body):
        sent[body["prompt"]] = body.get("priority")
        return ok(body)

    lines = [line(1, body={"prompt": "own", "priority": -3}), line(2, body={"prompt": "none"})]
    batch(tmp_path, lines, answer, priority=9)
    assert sent == {"own": -3, "none": 9}


@pytest.mark.parametrize(
    ("url", "sent_to"),
    [("http://x:1/v1/", "http://x:1/v1/completions"), ("https://x/llm", "https://x/llm/v1/completions")],
)
def test_an_address_may_have_a_path_and_v1(url, sent_to):
    assert str(http_client(url, None, 1).build_request("POST", "/v1/completions").url) == sent_to


def test_a_path_without_a_server_is_refused_before_a_line_is_sent():
    nothing = httpx.MockTransport(lambda request: httpx.Response(404, json={"detail": "Not Found"}))
    client = httpx.AsyncClient(transport=nothing, base_url="http://server/foo")
    with pytest.raises(EspalierError, match=r"http://server/foo/ has no /v1/models: .*; correct the path"):
        asyncio.run(require_reachable([client]))


def test_an_address_that_is_none_is_refused():
    ports, hosts = (
        ("http://x:port", "http://x:0", "http://x:99999"),
        ("http://[::1", "http://[v1.x]", "http://\u2603.x"),
    )
    for url in ("localhost:8000", "ftp://x", "http://", "http://x?y", "http://x/#y", "http://x\ny", *ports, *hosts):
        with pytest.raises(EspalierError, match="use an address such as"):
            http_client(url, None, 1)


def test_a_key_is_sent_as_the_server_reads_it():
    sent = http_client("http://x", "s\u00e9cret", 1).build_request("GET", "/v1/models").headers.raw
    assert dict(sent)[b"authorization"] == "Bearer s\u00e9cret".encode()
