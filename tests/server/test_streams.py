"""The bytes of a stream that its run writes to the connection, against those of the reader's way through ASGI."""

import asyncio
import json

import pytest

from espalier.bench.clients import HttpResponse, post_request_bytes
from espalier.request import OutputChunk
from espalier.server import active_requests, chat_responses, response_builders
from espalier.server.api import ApiOptions, make_app
from espalier.server.frontend import FrontendOptions, ModelFrontend
from espalier.server.http1 import HttpExchange
from espalier.server.protocol import Generation, OutputPart
from tests.server.connected import connected
from tests.server.scripted import ScriptedClient
from tests.tool_calls.families import FAMILIES

TEXT = "Ein Spalier hält den Baum – flach, \U0001f333 an der Wand. " * 4
CHAT = {"messages": [{"role": "user", "content": "x"}]}
BODIES = {
    "text": ("/v1/completions", {"prompt": "x"}),
    "two prompts, two samples": ("/v1/completions", {"prompt": ["x", "y"], "n": 2}),
    "token ids": ("/v1/completions", {"prompt": "x", "return_token_ids": True, "echo": True}),
    "usage": ("/v1/completions", {"prompt": "x", "stream_options": {"include_usage": True}}),
    "stop string": ("/v1/completions", {"prompt": "x", "stop": ["flach"]}),
    "chat": ("/v1/chat/completions", CHAT),
    "response": ("/v1/responses", {"input": "x"}),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = FAMILIES["hermes"].tokenizer()
    tokenizer.hf.save_pretrained(folder)
    return folder, tokenizer


@pytest.fixture
def ask(tokenizer, monkeypatch):
    """From (path, body) to the response's bytes."""
    for module in (response_builders, chat_responses):
        if hasattr(module, "time"):
            monkeypatch.setattr(module.time, "time", lambda: 1e9)

    def ask(path, body, pauses=False):
        async def run():
            engines = ScriptedClient(*tokenizer, lambda *_: TEXT, 3)
            app, _ = make_app(ModelFrontend(engines, FrontendOptions(("m",))), ApiOptions())
            connection, transport = connected(app, pauses)
            connection.data_received(
                post_request_bytes(path, {"model": "m", "stream": True, **body}, {"x-request-id": "same"})
            )
            async with asyncio.timeout(30):
                while not transport.data.endswith(b"\r\n0\r\n\r\n"):
                    await asyncio.sleep(0)
            return HttpResponse(0.0, received=transport.data, arrivals=[(0.0, len(transport.data))])

        return asyncio.run(run())

    return ask


def named_events(body):
    """(name, data) of each event."""
    return [tuple(line.partition(": ")[2] for line in each.split("\n")) for each in body.decode().split("\n\n")[:-1]]


def through_asgi(monkeypatch):
    monkeypatch.setattr(active_requests, "EXCHANGE_EXTENSION", "none")


@pytest.mark.parametrize("pauses", [False, True], ids=["reads", "pauses"])
@pytest.mark.parametrize("what", BODIES)
def test_both_ways_send_the_same_bytes(ask, monkeypatch, what, pauses):
    written = ask(*BODIES[what], pauses)
    through_asgi(monkeypatch)
    sent = ask(*BODIES[what])
    assert written.head == sent.head
    assert written.body() == sent.body()
    assert b"[DONE]" in sent.body() or what == "response"


def test_the_run_writes_one_chunk_for_the_parts_that_came_together(ask, monkeypatch):
    writes = []
    write = HttpExchange.write
    monkeypatch.setattr(HttpExchange, "write", lambda self, data: (writes.append(data), write(self, data)))
    body = ask(*BODIES["two prompts, two samples"]).body()
    # The first message goes through ASGI, and so does the last, which ends the response.
    _, written, last = body.partition(b"".join(writes))
    assert written and last.count(b"data: [DONE]") == 1 and b'finish_reason":"' in last
    # One message has a part of each sample that runs.
    assert max(data.count(b"data: ") for data in writes) >= 2
    assert len(writes) < body.count(b"data: ")


@pytest.mark.parametrize("what", BODIES)
def test_the_last_events_and_the_end_of_the_response_are_one_message(ask, monkeypatch, what):
    messages, make = [], active_requests._body_message
    monkeypatch.setattr(active_requests, "_body_message", lambda *about: messages.append(make(*about)) or messages[-1])
    body = ask(*BODIES[what]).body()
    assert [message["more_body"] for message in messages] == [True, False]
    assert messages[1]["body"] and body.endswith(messages[1]["body"])


def test_a_defect_while_the_run_writes_ends_the_stream_with_an_error_event(ask, monkeypatch):
    events, build = [], response_builders.CompletionResponseBuilder.add_output_as_event

    def fails(self, *args):
        events.append(args)
        if len(events) == 4:
            raise ValueError("a defect")
        return build(self, *args)

    monkeypatch.setattr(response_builders.CompletionResponseBuilder, "add_output_as_event", fails)
    *_, last = [data for _, data in ask(*BODIES["text"]).events()]
    assert json.loads(last)["error"]["type"] == "server_error"
    assert len(events) == 4


def test_an_error_amid_the_events_of_a_response_is_one_of_them(ask, monkeypatch):
    takes = iter((chat_responses.ResponsesApiBuilder.add_output,))
    monkeypatch.setattr(chat_responses.ResponsesApiBuilder, "add_output", lambda *part: next(takes)(*part))
    events = [(kind, json.loads(data)) for kind, data in named_events(ask(*BODIES["response"]).body())]
    assert [kind for kind, _ in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1][0] == "error" and events[-2][0].endswith("delta")
    assert all(kind == data["type"] and i == data["sequence_number"] for i, (kind, data) in enumerate(events))
    error = events[-1][1]
    assert error["message"] == error["error"]["message"] and error["param"] is error["code"] is None


def test_while_the_reader_sends_the_run_writes_nothing():
    async def run():
        generation, listened, read, go_on = Generation(None, ["x"], 1), [], [], asyncio.Event()

        async def reader():
            async for parts in generation.iter_parts(None):
                read.extend(parts)
                await go_on.wait()

        reading = asyncio.create_task(reader())
        first, second, third = (OutputPart("x", OutputChunk("x.0", 0, [token])) for token in range(3))
        generation.add(first)
        await asyncio.sleep(0.01)
        generation.listener = lambda parts: bool(listened.extend(parts)) or True
        generation.add(second)
        await asyncio.sleep(0.01)
        assert (read, listened) == ([first], [])
        go_on.set()
        await asyncio.sleep(0.01)
        generation.add(third)
        await asyncio.sleep(0.01)
        assert (read, listened) == ([first, second], [third])
        reading.cancel()

    asyncio.run(run())
