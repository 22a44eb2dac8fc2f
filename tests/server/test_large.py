"""Large bodies and long prompts are somebody else's work: another process reads them, another thread tokenizes them."""

import asyncio
import json
import threading
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from starlette.requests import ClientDisconnect, Request
from starlette.testclient import TestClient

import espalier
from espalier.errors import EspalierError
from espalier.inputs import InputProcessor, ModelInfo, TextLimit
from espalier.server import bodies, tokenizer_threads
from espalier.server.api import ApiOptions, make_app, prepare_chat
from espalier.server.bodies import (
    MAX_ENTRIES_PER_FIELD,
    MAX_INLINE_BYTES,
    MAX_MESSAGES,
    BodyLimits,
    BodyReader,
    read_body,
)
from espalier.server.errors import ApiError
from espalier.server.openai import ChatRequest, CompletionRequest, DetokenizeRequest
from espalier.server.tokenizer_threads import MAX_INLINE_SIZE, MAX_SHORT_SIZE, TokenizerThreads
from espalier.text import load_tokenizer
from espalier.tool_calls.formats import Formats

TOKENIZER = Path(espalier.__file__).parent / "bundled" / "target"
LIMITS = BodyLimits(vocab_size=1000, max_context=100_000, max_prompts=100, max_token_ids=1000)
PART = {"type": "text", "text": "ab"}


class Posted(Request):
    """A request, as far as its body is read."""

    def __init__(self, body):
        super().__init__({"type": "http", "headers": [(b"content-type", b"application/json")]}, self.next_message)
        data = json.dumps(body).encode()
        # In two parts, and with the fields that an ASGI server may leave out.
        self.messages = [
            {"type": "http.request", "body": data[:20], "more_body": True},
            {"type": "http.request", "more_body": True},
            {"type": "http.request", "body": data[20:]},
        ]

    async def next_message(self):
        return self.messages.pop(0)


def test_a_client_that_leaves_within_its_body_is_not_read_further():
    posted = Posted(text("a"))
    posted.messages[1:] = [{"type": "http.disconnect"}]
    with pytest.raises(ClientDisconnect):
        asyncio.run(BodyReader(LIMITS).read(posted, CompletionRequest))


def read_in_turn(*posted):
    """What each (model, body) becomes: a record, or its error."""

    async def read():
        reader = BodyReader(LIMITS)
        found = []
        for model, body in posted:
            try:
                found.append(await reader.read(Posted(body), model))
            except ApiError as error:
                found.append(error)
        await reader.helper.close()
        return found, reader.num_large_bodies_read

    return asyncio.run(read())


def chat(content, **more):
    return {"model": "m", "messages": [{"role": "user", "content": content}], **more}


def text(prompt, **more):
    return {"model": "m", "prompt": prompt, **more}


LARGE = [
    (ChatRequest, chat([PART] * 5000, temperature=0.5)),
    (ChatRequest, chat("é" * MAX_INLINE_BYTES)),
    (CompletionRequest, text(list(range(1000)) * 50, n=2)),
    (CompletionRequest, text(["a" * 1000] * 70)),
]


def test_large_bodies_are_read_in_another_process_and_mean_the_same(monkeypatch):
    here = [read_body(model, "application/json", json.dumps(body).encode(), LIMITS) for model, body in LARGE]
    monkeypatch.setattr(bodies, "read_body", None)
    assert read_in_turn(*LARGE) == (here, len(LARGE))


def test_a_small_body_is_read_at_once():
    found, num_large_bodies_read = read_in_turn((CompletionRequest, text("a")), (ChatRequest, chat([PART, PART])))
    assert num_large_bodies_read == 0 and [each.as_template_dict() for each in found[1].messages] == [
        {"role": "user", "content": "abab"}
    ]


MANY = dict.fromkeys(map(str, range(70_000)), 1)
REFUSED = {
    "parts": (ChatRequest, chat([PART] * 100_000), "messages", "more than 65536 entries"),
    "messages": (ChatRequest, chat("") | {"messages": chat("")["messages"] * 5000}, "messages", "more than 4096"),
    "logit_bias": (CompletionRequest, text("a", logit_bias=MANY), "logit_bias", "65536"),
    "a few too many of logit_bias": (
        CompletionRequest,
        text("a" * MAX_INLINE_BYTES, logit_bias=dict.fromkeys(map(str, range(600)), 1)),
        "logit_bias",
        "use at most 512",
    ),
    "nested": (ChatRequest, chat("a", metadata=[[[0] * 1000] * 1000]), "metadata", "more than 65536 entries"),
    "prompts": (CompletionRequest, text([""] * 100_000), "prompt", "more than 100 entries"),
    "ids": (CompletionRequest, text([1] * 200_000), "prompt", "the prompt is too long: it has 200000 tokens"),
    "an id": (CompletionRequest, text([1000] * 50_000), "prompt", "prompt token id=1000 is not supported"),
    "/detokenize": (DetokenizeRequest, {"tokens": [1] * 100_000}, "tokens", "more than 1000 entries"),
    "no number": (CompletionRequest, text("a" * MAX_INLINE_BYTES, temperature="hot"), "temperature", "valid number"),
    "unknown": (CompletionRequest, text("a" * MAX_INLINE_BYTES, heat=1), "heat", "has no 'heat'"),
}


@pytest.fixture(scope="module")
def refused():
    """The errors of all refused bodies, by name: one process reads them in turn."""
    errors, num_large_bodies_read = read_in_turn(*((model, body) for model, body, _, _ in REFUSED.values()))
    assert num_large_bodies_read == len(REFUSED)
    return dict(zip(REFUSED, errors, strict=True))


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_with_a_large_body_is_told_as_for_any(name, refused):
    model, body, param, message = REFUSED[name]
    error = refused[name]
    with pytest.raises(ApiError) as here:
        read_body(model, "application/json", json.dumps(body).encode(), LIMITS)
    assert (error.status_code, error.detail, error.code) == (400, here.value.detail, here.value.code)
    assert message in error.detail
    assert error.param == here.value.param == param


def test_what_a_small_body_can_hold_is_below_every_limit_but_the_models():
    assert MAX_INLINE_BYTES // len('{"role":"user","content":""},') < MAX_MESSAGES
    assert MAX_INLINE_BYTES // len("0,") <= MAX_ENTRIES_PER_FIELD


def test_a_body_process_that_dies_takes_one_body_with_it():
    async def run():
        reader = BodyReader(LIMITS)
        read = lambda: reader.read(Posted(text("a" * MAX_INLINE_BYTES)), CompletionRequest)  # noqa: E731
        first = await read()
        dead = await reader.helper.start()
        dead.kill()
        with pytest.raises(ApiError, match="500: internal server error"):
            await read()
        assert await read() == first
        assert (await reader.helper.start()).pid != dead.pid
        await reader.helper.close()

    asyncio.run(run())


def test_only_so_many_large_bodies_wait(monkeypatch):
    monkeypatch.setattr(bodies, "MAX_WAITING_BODIES", 2)

    async def run():
        reader = BodyReader(LIMITS)
        reads = (reader.read(Posted(text("a" * MAX_INLINE_BYTES)), CompletionRequest) for _ in range(5))
        found = await asyncio.gather(*reads, return_exceptions=True)
        await reader.helper.close()
        return [getattr(each, "status_code", 200) for each in found]

    # One is read, two wait.
    assert asyncio.run(run()) == [200, 200, 200, 429, 429]


def test_the_framework_reads_no_body_itself():
    """What is no JSON at all arrives, read by whoever stands at `body_reader`."""

    class Refusing:
        names = ("m",)
        metrics = SimpleNamespace(started_at=0, responses=SimpleNamespace(labels=lambda *of: SimpleNamespace(inc=list)))

        class body_reader:
            async def read(http, model):
                raise ApiError(400, f"{model.__name__} of {len(await http.body())} bytes")

    app, _ = make_app(Refusing, ApiOptions())
    client = TestClient(app)
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        answer = client.post(path, content=b"\0" * 7, headers={"content-type": "application/json"})
        assert answer.json()["error"]["message"].endswith("Request of 7 bytes"), path


class Recording:
    """A tokenizer that notes what it is asked to encode."""

    backend = None

    def __init__(self):
        self.encoded = []

    def encode(self, text, add_special_tokens):
        self.encoded.append(len(text))
        return [1] * len(text)


def test_a_text_that_cannot_fit_is_never_tokenized():
    inputs = InputProcessor(ModelInfo("m", 10, 64), Recording())
    inputs.text_limit = TextLimit(load_tokenizer(TOKENIZER, 6144).backend)
    with pytest.raises(EspalierError, match="the prompt is too long: it has 4000000 characters"):
        inputs.prompt_tokens("a " * 2_000_000)
    assert inputs.tokenizer.encoded == []
    assert len(inputs.prompt_tokens("a " * 30)) == 60 and inputs.tokenizer.encoded == [60]
    # Its last tokens may fit, whatever comes before them.
    assert len(inputs.prompt_tokens("a " * 2_000_000, keep_last=9)) == 9 and inputs.tokenizer.encoded == [60, 4_000_000]


def test_a_conversation_that_cannot_fit_is_never_tokenized(monkeypatch):
    tokenizer = load_tokenizer(TOKENIZER, 6144)
    inputs = InputProcessor(ModelInfo("m", 6144, 64), tokenizer)
    encoded = []
    monkeypatch.setattr(tokenizer.hf, "encode", lambda text, **_: encoded.append(text) or [1])
    messages = [{"role": "user", "content": "a " * 100_000}]
    offline, served = inputs.prepare_conversation, partial(inputs.chat_tokens, check_text=inputs.require_text_fits)
    for call in (served, partial(offline, params=None)):
        with pytest.raises(EspalierError, match=r"the prompt is too long: it has 2000\d\d characters"):
            call(messages)
    monkeypatch.setattr(tokenizer.hf, "chat_template", "{{ 'a'|center(2 * 10**7) }}")
    inputs.text_limit = TextLimit(None)
    with pytest.raises(EspalierError, match="not finished within 16777216 characters"):
        offline(messages, None)
    monkeypatch.undo()
    monkeypatch.setattr(tokenizer.hf, "encode", lambda text, **_: encoded.append(text) or [1])
    assert encoded == []
    assert (
        inputs.chat_tokens([{"role": "user", "content": "a"}], check_text=inputs.require_text_fits) == [1]
        and len(encoded) == 1
    )


def test_a_conversation_is_as_long_as_all_its_texts():
    """By this its lane is chosen: what is not counted would be read on the event loop."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "' + 1000 * "x" + '"}'}}
    asked = [{"role": "user", "content": 1000 * "x"}]
    asked += [{"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": 2000 * "x"}]
    tool = {"type": "function", "function": {"name": "f", "description": 4000 * "x"}}
    chat = {"model": "m", "messages": asked, "tools": [tool], "tool_choice": "none"}
    sizes = []

    async def rendered(*work, size):
        sizes.append(size)
        raise ApiError(400, "messages")

    frontend = SimpleNamespace(
        resolve=lambda params: SimpleNamespace(n=1), report_fields_without_effect=lambda names: None, formats=Formats()
    )
    frontend.inputs, frontend.conversation_tokens = SimpleNamespace(tokenizer=None), rendered
    frontend.reserve_capacity, frontend.require_tokenizable = lambda samples: nullcontext(), None
    with pytest.raises(ApiError, match="messages"):
        asyncio.run(prepare_chat(frontend, ChatRequest.model_validate(chat)))
    assert 8000 < sizes[0] < 8200


@pytest.fixture
def two_lanes():
    found = TokenizerThreads(InputProcessor(ModelInfo("m", 10, 64), Recording()))
    yield found
    found.close()


def test_a_short_prompt_does_not_wait_behind_long_ones(two_lanes):
    go_on = threading.Event()

    async def run():
        long = [asyncio.create_task(two_lanes.run(lambda _: go_on.wait(60), size=MAX_SHORT_SIZE + 1)) for _ in range(3)]
        await asyncio.sleep(0)
        short = await two_lanes.run(lambda inputs: inputs.prompt_tokens("ab"), size=2)
        waited = not any(each.done() for each in long)
        go_on.set()
        return short, waited, await asyncio.gather(*long)

    assert asyncio.run(run()) == ([1, 1], True, [True] * 3)


def test_each_lane_has_a_thread_and_a_tokenizer_of_its_own(two_lanes):
    def who(inputs):
        return threading.get_ident(), id(inputs.tokenizer)

    async def run():
        return [
            await two_lanes.run(who, size=size)
            for size in (MAX_INLINE_SIZE + 1, MAX_SHORT_SIZE, MAX_SHORT_SIZE + 1, 10**6)
        ]

    one, same, other, same_other = asyncio.run(run())
    assert one == same and other == same_other
    assert one[0] != other[0] and one[1] != other[1] and threading.get_ident() not in (one[0], other[0])


def test_a_tiny_prompt_needs_no_thread_unless_its_lane_is_busy(two_lanes):
    def where(inputs):
        return threading.get_ident(), id(inputs.tokenizer)

    async def run():
        go_on = threading.Event()
        idle = await two_lanes.run(where, size=MAX_INLINE_SIZE)
        busy = asyncio.create_task(two_lanes.run(lambda _: go_on.wait(60), size=MAX_SHORT_SIZE))
        await asyncio.sleep(0)
        waits = asyncio.create_task(two_lanes.run(where, size=MAX_INLINE_SIZE))
        await asyncio.sleep(0)
        go_on.set()
        await busy
        return idle, await waits, await two_lanes.run(where, size=MAX_INLINE_SIZE)

    idle, waited, after = asyncio.run(run())
    assert idle == after and idle[0] == threading.get_ident() != waited[0] and idle[1] == waited[1]


def test_a_lane_whose_request_was_cancelled_is_busy_until_its_thread_is_done(two_lanes):
    async def run():
        go_on = threading.Event()
        cancelled = asyncio.create_task(two_lanes.run(lambda _: go_on.wait(60), size=MAX_SHORT_SIZE))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        # On the event loop it would use the tokenizer beside the thread.
        waits = asyncio.create_task(two_lanes.run(lambda _: threading.get_ident(), size=MAX_INLINE_SIZE))
        await asyncio.sleep(0)
        go_on.set()
        return await waits, await two_lanes.run(lambda _: threading.get_ident(), size=MAX_INLINE_SIZE)

    waited, after = asyncio.run(run())
    assert waited != after == threading.get_ident()


def test_only_so_many_long_prompts_wait(two_lanes, monkeypatch):
    monkeypatch.setattr(tokenizer_threads, "MAX_WAITING_PROMPTS", 2)
    go_on = threading.Event()

    async def run():
        long = [asyncio.create_task(two_lanes.run(lambda _: go_on.wait(60), size=10**6)) for _ in range(4)]
        await asyncio.sleep(0)
        go_on.set()
        return [getattr(each, "status_code", 200) for each in await asyncio.gather(*long, return_exceptions=True)]

    # One runs, two wait.
    assert asyncio.run(run()) == [200, 200, 200, 429]
