"""The API server's side of the engine process, with a process that is none."""

import asyncio
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.testclient import TestClient

from espalier.engine.launch_input import NOT_FINITE_ERROR
from espalier.grammar.spec import NO_TOKEN_LEFT_ERROR, TOOK_TOO_LONG_ERROR
from espalier.inputs import InputProcessor, ModelInfo
from espalier.request import OutputChunk, ResolvedParams
from espalier.server import protocol, tokenizer_threads
from espalier.server.active_requests import ActiveRequest
from espalier.server.api import ApiOptions, make_app
from espalier.server.bodies import BodyLimits, BodyReader
from espalier.server.client import MAX_FAILED_STARTS, ClientOptions, EngineClient
from espalier.server.errors import ApiError
from espalier.server.frontend import ClientShares, ModelFrontend
from espalier.server.metrics import Metrics
from espalier.server.middleware import RequestMiddleware
from espalier.server.protocol import AbortPrompt, EngineGone, Generation, OutputPart, PromptRefused, SubmittedPrompt
from tests.folders import new_folder


class Process:
    """One that never leaves by itself."""

    pid = 1

    def __init__(self):
        self.returncode = None
        self.ended = asyncio.Event()

    async def wait(self):
        await self.ended.wait()

    def kill(self):
        self.returncode = -9
        self.ended.set()


class Socket:
    """recv hands out what it was given, and then nothing ever.  sent: what was sent, decoded."""

    def __init__(self, *messages):
        self.messages = list(messages)
        self.sent = []

    async def recv(self):
        return self.messages.pop(0) if self.messages else await asyncio.Event().wait()

    def send(self, message):
        self.sent.append(protocol.decode_to_engine(message))

    def close(self):
        pass


def ready(restart, *messages):
    client = EngineClient({}, ClientOptions(restart=restart))
    client.process, client._socket, client.state = Process(), Socket(*messages), "ready"
    client._socket_folder = new_folder("sockets-")
    return client


async def told(generation):
    with pytest.raises(EngineGone) as caught:
        async for _ in generation.iter_parts(asyncio.get_running_loop().time() + 5):
            pass
    return str(caught.value)


def test_what_cannot_be_read_ends_the_engine_and_tells_everyone():
    async def run():
        client = ready(False, b"\xc1 is no message")
        generation = client.submit([[1]], SubmittedPrompt("x", [], ResolvedParams(), 0, False))
        client._supervisor = asyncio.create_task(client._supervise())
        assert "an unreadable message" in await told(generation)
        await client._supervisor
        assert (client.state, client.process.returncode) == ("gone", -9)
        await client.close()

    asyncio.run(run())


@pytest.mark.parametrize(("busy", "status"), [(True, 429), (False, 400)])
def test_a_refusal_that_a_retry_may_change_says_so(busy, status):
    """Clients of OpenAI's API send 429 again by themselves, and 400 never."""

    async def run():
        client = ready(False, protocol.encode(PromptRefused("x-0", "the grammar waits", busy)))
        generation = client.submit([[1]], SubmittedPrompt("x", [], ResolvedParams(), 0, False))
        reading = asyncio.create_task(client._read_messages())
        with (
            pytest.raises(ApiError, match="the grammar waits") as caught,
            ActiveRequest._as_api_errors(SimpleNamespace(grammar_field="regex")),
        ):
            async for _ in generation.iter_parts(asyncio.get_running_loop().time() + 5):
                pass
        assert (caught.value.status_code, "retry-after" in caught.value.headers) == (status, busy)
        reading.cancel()
        client.process.kill()
        await client.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("error", "status"), [(TOOK_TOO_LONG_ERROR, 400), (NO_TOKEN_LEFT_ERROR, 400), (NOT_FINITE_ERROR, 500)]
)
def test_a_request_that_its_grammar_ends_is_the_clients_fault(error, status):
    async def run():
        part = OutputPart("x", OutputChunk("x.0", 0, finish_reason="abort", error=error))
        ActiveRequest._record_metrics(SimpleNamespace(metrics=Metrics([]), grammar_field="regex"), [part])

    with pytest.raises(ApiError, match=r"grammar|finite") as caught:
        asyncio.run(run())
    assert (caught.value.status_code, caught.value.headers) == (status, {"x-should-retry": "false"})
    assert caught.value.param == ("regex" if status == 400 else None)


def test_a_part_behind_the_failure_of_its_request_does_not_hide_the_sample_from_the_abort(monkeypatch):
    """The client leaves.  Before its request is closed, the engine sends another part."""
    monkeypatch.setattr("espalier.server.client.SHUTDOWN_TIMEOUT_S", 0.01)

    async def run():
        client = ready(False)
        generation = client.submit([[1]], SubmittedPrompt("x", [], ResolvedParams(), 0, False))
        [name] = generation.num_running
        generation.fail(ClientDisconnect())
        client._deliver(OutputPart(name, OutputChunk(f"{name}.0", 0, [7])))
        generation.close()
        assert client._socket.sent[-1] == AbortPrompt(name)
        assert client.open_samples == 0
        await client.close()

    asyncio.run(run())


def test_a_process_that_cannot_be_made_is_tried_again_a_few_times_in_a_row(monkeypatch):
    """Of the numbers, which starts succeed: the engine that they make is gone at once."""
    monkeypatch.setattr("espalier.server.client.FIRST_RESTART_PAUSE_S", 0.001)

    async def run(succeed):
        client, tries = ready(True, b"\xc1"), []

        async def start():
            tries.append(len(tries) + 1)
            if tries[-1] not in succeed:
                raise BlockingIOError("no more processes")
            client.process, client._socket, client.state = Process(), Socket(b"\xc1"), "ready"

        monkeypatch.setattr(client, "_start", start)
        client._supervisor = asyncio.create_task(client._supervise())
        async with asyncio.timeout(5):
            why = await client.wait_until_ended()
        assert "cannot be restarted: no more processes" in why
        await client.close()
        return len(tries)

    assert asyncio.run(run(())) == MAX_FAILED_STARTS
    # Failures count anew after an engine that was ready.
    assert asyncio.run(run((2, 3, MAX_FAILED_STARTS + 3))) == 2 * MAX_FAILED_STARTS + 3


@pytest.mark.parametrize("state", ["starting", "ready", "gone", "closed", "draining"])
def test_health_says_why_whenever_it_is_not_ok(state):
    async def run():
        client = ready(False) if state != "starting" else EngineClient({}, ClientOptions())
        if state == "gone":
            client._fail_all("the engine process was killed")
        if state == "closed":
            client.process.kill()
            await client.close()
        frontend = SimpleNamespace(engines=client, draining=state == "draining")
        status, why = ModelFrontend.status.fget(frontend), ModelFrontend.unavailable_reason.fget(frontend)
        assert status == ("ok" if state == "ready" else state) and bool(why) == (status != "ok")

    asyncio.run(run())


def test_who_closes_again_waits_for_the_same_end(monkeypatch):
    async def run(cut_short):
        client = ready(restart=False)
        process = client.process
        first = asyncio.create_task(client.close())
        await asyncio.sleep(0.01)
        if cut_short:
            client._close_task.cancel()
            await asyncio.wait({first})
        else:
            await client.close()
        assert process.returncode == -9 and not client._socket_folder.exists()
        await asyncio.wait({first})

    for seconds, cut_short in ((0.05, False), (600, True)):
        monkeypatch.setattr("espalier.server.client.SHUTDOWN_TIMEOUT_S", seconds)
        asyncio.run(asyncio.wait_for(run(cut_short), 20))


@pytest.mark.parametrize("sent", [b"Bearer s\xc3\xa9cret", b"bearer s\xc3\xa9cret"])
def test_a_key_may_hold_any_character(sent):
    reached, statuses = [], []

    async def app(scope, receive, send):
        reached.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message):
        statuses.append(message.get("status"))

    middleware = RequestMiddleware(app, "s\u00e9cret", 10, lambda path, status: None)
    scope = {"type": "http", "method": "GET", "path": "/v1/models", "headers": [(b"authorization", sent)]}
    asyncio.run(middleware(scope, None, send))
    assert reached and statuses == [200]


def test_an_echo_is_read_beside_the_loop_by_the_length_of_all_its_prompts(monkeypatch):
    monkeypatch.setattr(tokenizer_threads, "MAX_INLINE_SIZE", 2)
    threads = []

    class Echoing:
        """An API server that runs nothing."""

        names = ("m",)
        inputs = InputProcessor(
            ModelInfo("m", 10, 8),
            SimpleNamespace(
                backend=None,
                text_stream=lambda *of, **more: None,
                decode=lambda ids, skip: threads.append(threading.get_ident()) or "text",
            ),
        )
        resolve = inputs.resolve
        tokenizer_threads = tokenizer_threads.TokenizerThreads(inputs)
        body_reader = BodyReader(BodyLimits(10, 8, 4, 4))
        metrics = SimpleNamespace(started_at=0, responses=SimpleNamespace(labels=lambda *of: SimpleNamespace(inc=list)))

        def frontend_for(self, name):
            return self

        def report_fields_without_effect(self, names):
            pass

        def require_tokenizable(self, text):
            pass

        def reserve_capacity(self, wanted):
            return nullcontext()

        async def respond(self, http, body, prompts, params, make_builder):
            threads.append(threading.get_ident())
            return Response("".join(make_builder().echoed_prompts))

    app, _ = make_app(Echoing(), ApiOptions())
    # No lifespan: the middleware has none.
    answer = TestClient(app).post("/v1/completions", json={"model": "m", "prompt": [[1, 2], [3]], "echo": True})
    assert (answer.status_code, answer.text) == (200, "texttext")
    Echoing.tokenizer_threads.close()
    *decoding, loop = threads
    assert len(decoding) == 2 and loop not in decoding


def test_prompts_that_are_being_read_take_room():
    frontend = ModelFrontend.__new__(ModelFrontend)
    frontend.engines = SimpleNamespace(require_running=lambda: None, num_slots=2, open_samples=1)
    frontend.options, frontend.draining, frontend.client_shares = SimpleNamespace(max_queue=2), False, ClientShares()
    with frontend.reserve_capacity(2):
        with (
            pytest.raises(ApiError, match=r"3 of 4 samples") as caught,
            frontend.reserve_capacity(2),
        ):
            pass
        assert caught.value.status_code == 429
        with frontend.reserve_capacity(1):
            pass
    with frontend.reserve_capacity(3):
        pass


def test_an_answer_is_made_once_the_prompts_have_left():
    order = []

    def submit(prompts, asked):
        order.append("submitted")
        return Generation(frontend.engines, [asked.name], 1)

    async def sent():
        order.append("sent")

    def make_builder():
        order.append("answer")
        raise RuntimeError("enough")

    async def receive():
        await asyncio.sleep(60)

    frontend = ModelFrontend.__new__(ModelFrontend)
    ending = {"wait_until_sent": sent, "abort": lambda _: order.append("forgotten")}
    frontend.engines = SimpleNamespace(
        require_running=lambda: None, num_slots=2, open_samples=0, submit=submit, **ending
    )
    frontend.options = SimpleNamespace(max_queue=2, request_timeout_s=None)
    frontend.draining, frontend.client_shares, frontend.metrics = False, ClientShares(), Metrics([])
    http = SimpleNamespace(receive=receive, scope={"state": {}})
    asked = http, SimpleNamespace(grammar_field=None, stream=True, priority=None), [[1]], ResolvedParams()
    with pytest.raises(RuntimeError, match="enough"):
        asyncio.run(frontend.respond(*asked, make_builder))
    assert order == ["submitted", "sent", "answer", "forgotten"]


def test_probes_that_are_answered_are_no_lines_of_the_log(caplog):
    status = 200

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": status, "headers": []})

    async def send(message):
        pass

    caplog.set_level("INFO")
    middleware = RequestMiddleware(app, None, 10, lambda path, status: None)
    for status, path in ((200, "/health"), (200, "/metrics"), (503, "/health"), (200, "/v1/models")):  # noqa: B007
        asyncio.run(middleware({"type": "http", "method": "GET", "path": path, "headers": []}, None, send))
    assert [record.args[1:3] for record in caplog.records] == [("/health", 503), ("/v1/models", 200)]
