"""Requests of all kinds at once, many of which leave: everyone who stays is answered and nothing is left behind."""

import asyncio
import random
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from espalier import SpeculationConfig
from espalier.cli.main import parse
from espalier.errors import EspalierError
from espalier.server.api import ApiOptions
from espalier.terminal.flags import engine_settings
from lab.bench import bad_host as bad_host_module
from lab.bench.bad_host import ATTACKS, SHORT_REQUEST, Attack, measure_bad_host
from lab.bench.server import Server, flags_of, stop_process
from lab.bench.soak import RequestCounts, SoakClient, soak_server
from tests import warm
from tests.server.serving import TREE
from tests.worded import worded

STREAM = b'HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: {"choices":[],"usage":null}\n\n'


@pytest.fixture
def copies(monkeypatch):
    """Servers for measurements find their imports done (tests/warm.py)."""
    server = warm.server()

    def started(command, stdout, stderr):
        assert command[:3] == [sys.executable, "-m", "espalier"]
        return server.start("espalier", command[3:], server.environment, stdout, stderr)

    instead = SimpleNamespace(Popen=started, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr("lab.bench.server.subprocess", instead)


def test_a_soak_leaves_nobody_unanswered_and_nothing_behind(copies):
    target, draft = map(str, worded())
    sizes = {"max_batch": 4, "max_context": 512, "num_pages": 64, "speculation": SpeculationConfig(**TREE)}
    found = soak_server({"model": target, "draft": draft, **sizes}, count=16, seed=1)
    assert found.requests == found.answered + found.disconnects
    assert found.disconnects > 3 and found.aborts > 0 and set(found.errors_given) <= {400, 429}
    assert (found.unanswered, found.leaked_pages, found.leaked_processes) == (0, 0, 0)


@pytest.fixture
def on_that_server(served, monkeypatch):
    server = Server(served.port, served.process.pid, 0)
    monkeypatch.setattr(bad_host_module, "WATCH_SECONDS", 0.1)
    sleep = asyncio.sleep
    # No warm-up of two seconds: what is measured is not compared with anything.
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: sleep(min(seconds, 0.2)))
    monkeypatch.setattr(bad_host_module, "running_server", lambda settings, *flags: nullcontext(server))
    for name in ("SHORT_REQUEST", "STREAM_REQUEST"):
        monkeypatch.setitem(getattr(bad_host_module, name), "model", "bundled")


def test_beside_each_bad_request_everybody_is_watched(on_that_server):
    attacks = [
        Attack("too long", 2, "/v1/completions", lambda: SHORT_REQUEST | {"prompt": "a " * 50_000}),
        Attack("half-closed", 3, "/v1/completions", lambda: SHORT_REQUEST, half_closed=True),
    ]
    found = measure_bad_host({}, attacks, num_streams=2)
    assert [(beside.name, beside.count, beside.answers) for beside in found] == [
        ("too long", 2, {400: 4}),
        ("half-closed", 3, {200: 6}),
    ]
    for beside in found:
        assert min(beside.busy.one_token, beside.busy.health, beside.idle.one_token, beside.idle.health) > 0
        assert beside.busy.stream_gap > 0 == beside.idle.stream_gap


@pytest.mark.parametrize("name", ["SHORT_REQUEST", "STREAM_REQUEST"])
def test_who_is_refused_beside_a_bad_host_is_no_short_wait(on_that_server, monkeypatch, name):
    monkeypatch.setattr(bad_host_module, name, getattr(bad_host_module, name) | {"max_tokens": -1})
    with pytest.raises(EspalierError, match="during the bad requests"):
        measure_bad_host({}, ATTACKS[:1], num_streams=2)


def test_the_bodies_of_a_bad_host_are_below_the_usual_limit():
    for attack in ATTACKS:
        assert attack.stays_open or len(attack.request().partition(b"\r\n\r\n")[2]) <= ApiOptions().max_body_bytes, (
            attack.name
        )


def test_settings_become_the_flags_that_mean_them():
    tree = SpeculationConfig(steps=3, topk=2)
    settings = {
        "max_batch": 4,
        "prefix_cache": False,
        "overlap": True,
        "speculation": tree,
        "model_overrides": {"a": 1},
    }
    assert engine_settings(parse(["serve", *flags_of(settings)])) == settings


@pytest.mark.parametrize(
    ("answer", "unanswered"),
    [
        (STREAM + b"data: [DONE]\n\n", 0),
        (STREAM + b'data: {"error":{"message":"x"}}\n\n', 0),
        (STREAM, 1),
        (b'HTTP/1.1 200 OK\r\n\r\n{"choices":[],"usage":{"prompt_tokens":1}}', 0),
        (b'HTTP/1.1 200 OK\r\n\r\n{"choices":[{"text":"half of', 1),
        (b'HTTP/1.1 429 Too Many Requests\r\n\r\n{"error":{}}', 0),
        (b"HTTP/1.1 429 Too Many Requests\r\n\r\n[DONE]", 1),
        (b"", 1),
    ],
)
def test_an_answer_without_its_end_is_none(answer, unanswered):
    tally = RequestCounts()

    async def read():
        reader = asyncio.StreamReader()
        reader.feed_data(answer)
        reader.feed_eof()
        await SoakClient(Server(0, 0, 0), random.Random(0), tally)._read_response("stream", reader)

    asyncio.run(read())
    assert tally.unanswered == unanswered and tally.statuses.total() == 1


def test_a_server_that_does_not_leave_is_ended_and_named():
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE)
    assert process.stdout.readline()
    with pytest.raises(EspalierError, match=r"did not leave within 0\.2 s of SIGTERM"):
        stop_process(process, 0.2)
    assert process.returncode == -9
    process.stdout.close()
