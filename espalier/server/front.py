"""What stands between an endpoint and the engine process: admission, tokens, time limits, and one way to run a body.

A body is run to its whole answer or as a stream of events; both abort what still runs, however they end.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from espalier.errors import EspalierError
from espalier.inputs import InputProcessor
from espalier.server.answers import Answer
from espalier.server.bodies import BodyLimits
from espalier.server.body_reader import BodyReader
from espalier.server.client import EngineClient, EngineGone, Generation
from espalier.server.errors import FAILED, RETRY_AFTER_S, ApiError, full, refusal
from espalier.server.lanes import Lanes
from espalier.server.logs import request_id
from espalier.server.metrics import Metrics
from espalier.server.openai import Generating
from espalier.server.protocol import Part
from espalier.text import load_tokenizer

log = logging.getLogger("espalier.server")
T = TypeVar("T")
# Characters of /tokenize and of a prompt that is truncated, or so many for each token of the context if that is more.
MOST_TOKENIZED = 2**20
TOKENIZED_A_TOKEN = 8
# Token ids of /detokenize, or as many as the context holds if that is more.
MOST_DETOKENIZED = 2**18
# A stream whose reader takes nothing is ended so long after its time is up.
SEND_GRACE_S = 10.0
# Nobody reads this answer; the number is what proxies log for it.
CLIENT_LEFT = 499


@dataclass(frozen=True)
class FrontOptions:
    """names: of the model, its directory's where there is none; chat_template: in place of the tokenizer's own;
    request_timeout_s: of one request, None for no limit; max_queue: samples that may wait beside those in a slot;
    strict_fields: refuse what has no effect."""

    names: tuple[str, ...]
    chat_template: str | None = None
    max_queue: int = 256
    request_timeout_s: float | None = 600.0
    strict_fields: bool = False
    allow_special_tokens_in_messages: bool = False


class ClientLeft(Exception):
    pass


class Front:
    """The client must be ready.  draining: what is new is refused, what runs is finished."""

    def __init__(self, client: EngineClient, options: FrontOptions):
        if client.facts is None:
            raise ValueError("start the client first")
        self.client = client
        self.options = options
        self.names = options.names or (Path(client.facts.model).name,)
        self.metrics = Metrics(client)
        self.draining = False
        tokenizer = load_tokenizer(Path(client.facts.model), client.facts.vocab_size)
        self.inputs = InputProcessor(client.facts, tokenizer, options.allow_special_tokens_in_messages)
        if options.chat_template is not None:
            self.inputs.text_of("--chat-template").hf.chat_template = options.chat_template
        self.lanes = Lanes(self.inputs)
        facts, room = client.facts, int(client.config["max_batch"]) + options.max_queue
        self.bodies = BodyReader(BodyLimits(facts.vocab_size, facts.max_context, room, self.most_detokenized))
        self._num_entering = 0
        self._fields_named: set[str] = set()

    @property
    def most_detokenized(self) -> int:
        """Token ids of one call."""
        return max(MOST_DETOKENIZED, self.inputs.facts.max_context)

    @property
    def status(self) -> str:
        """ "ok", or why requests are not taken."""
        return "draining" if self.draining else "ok" if self.client.state == "ready" else self.client.state

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self.names:
            served = ", ".join(self.names)
            raise ApiError(404, f"model {name!r} is not served here; use {served}", "model", "model_not_found")

    def check_effect(self, names: Sequence[str]) -> None:
        """Name fields that change nothing, each once in the log.  Raises ApiError with strict_fields."""
        if names and self.options.strict_fields:
            why = f"{names[0]} has no effect here and the server runs with --strict-fields; leave it out"
            raise ApiError(400, why, names[0], "unsupported")
        for name in names:
            if name not in self._fields_named:
                self._fields_named.add(name)
                log.info("the field %s has no effect here: it is accepted, and not named again", name)

    def require_tokenizable(self, text: str) -> None:
        """Refuse a text that is too long where the context does not bound it.  Raises EspalierError."""
        most = max(MOST_TOKENIZED, TOKENIZED_A_TOKEN * self.inputs.facts.max_context)
        if len(text) > most:
            raise EspalierError(f"a text of {len(text)} characters is not supported; use {most} at most")

    async def respond(self, http: Request, body: Generating, prompts: Sequence[list[int]], answer: Answer) -> Response:
        """Run a body.  Raises ApiError, for a stream as long as nothing has been sent."""
        loop = asyncio.get_running_loop()
        limit = self.options.request_timeout_s
        run = Run(self, answer, self._submit(body, prompts, answer), None if limit is None else loop.time() + limit)
        try:
            if not body.stream:
                return await _until_left(http, run.whole())
            events = run.events()
            # The status must be known before the first byte: refused, or begun.
            first = await _until_left(http, anext(events))
        except ClientLeft:
            self.metrics.disconnects.inc()
            run.close()
            return Response(status_code=CLIENT_LEFT)
        except BaseException:
            run.close()
            raise
        return EventStream(run, first, events)

    @contextmanager
    def entering(self, wanted: int) -> Iterator[None]:
        """Samples whose prompts are being read take room as well.  Raises ApiError where there is none for them."""
        self._require_room(wanted)
        self._num_entering += wanted
        try:
            yield
        finally:
            self._num_entering -= wanted

    def _require_room(self, wanted: int) -> None:
        """SlotInit: what is beyond the slots and the queue comes again later."""
        if self.draining:
            raise ApiError(503, "the server is shutting down; ask another", retry_after_s=RETRY_AFTER_S)
        if self.client.state != "ready":
            raise self._gone(self.client.why or "the engine process is not there")
        room = int(self.client.config["max_batch"]) + self.options.max_queue
        if wanted > room:
            raise ApiError(400, f"{wanted} samples are more than the {room} that run and wait here; ask for fewer", "n")
        held = self.client.open_samples + self._num_entering
        if held + wanted > room:
            raise full(f"{held} samples run and wait and there is room for {room}")

    def _submit(self, body: Generating, prompts: Sequence[list[int]], answer: Answer) -> Generation:
        self._require_room(len(prompts) * answer.params.n)
        name = request_id.get()
        try:
            return self.client.submit(name, prompts, answer.params, body.priority or 0, answer.detokenize_there)
        except EngineGone as error:
            raise self._gone(str(error)) from None

    def _gone(self, why: str) -> ApiError:
        if self.client.options.restart:
            return ApiError(503, f"{why}; come again later", code="engine_gone", retry_after_s=RETRY_AFTER_S)
        return ApiError(
            503, f"{why}; start the server again, or with --restart-engine", code="engine_gone", retry=False
        )

    async def close(self) -> None:
        self.lanes.close()
        await self.bodies.close()


class Run:
    """One body on its way.  deadline: of the loop's clock."""

    def __init__(self, front: Front, answer: Answer, generation: Generation, deadline: float | None):
        self.metrics = front.metrics
        self.timeout_s = front.options.request_timeout_s
        self.answer = answer
        self.generation = generation
        self.deadline = deadline
        self.places = {name: at for at, name in enumerate(generation.left)}
        self.began = asyncio.get_running_loop().time()
        self.last: dict[tuple[str, int], float] = {}

    async def whole(self) -> Response:
        """The answer in one piece.  Raises ApiError."""
        async for parts in self._parts():
            for part in parts:
                self.answer.take(self.places[part.name], part)
        self.close()
        return Response(msgspec.json.encode(self.answer.whole()), media_type="application/json")

    async def events(self) -> AsyncIterator[bytes]:
        """The answer as server-sent events.  Raises ApiError."""
        opening = self.answer.opening()
        async for parts in self._parts():
            taken = [self.answer.take(self.places[part.name], part) for part in parts]
            chunks = [chunk for choice, delta in taken if (chunk := self.answer.chunk(choice, delta)) is not None]
            if opening or chunks:
                yield b"".join(event(chunk) for chunk in (*opening, *chunks))
            opening = []
        yield b"".join([*(event(chunk) for chunk in self.answer.closing()), b"data: [DONE]\n\n"])

    async def _parts(self) -> AsyncIterator[list[Part]]:
        try:
            async for parts in self.generation.parts(self.deadline):
                for part in parts:
                    self._measure(part)
                    if part.piece.error is not None:
                        raise ApiError(500, part.piece.error, retry=False)
                yield parts
        except TimeoutError:
            self.metrics.timeouts.inc()
            message = (
                f"the answer took longer than {self.timeout_s:g} s; ask for fewer tokens, or raise --request-timeout"
            )
            raise ApiError(504, message, retry=False) from None
        except EngineGone as error:
            raise ApiError(503, f"{error}; send the request again", code="engine_gone") from None
        except EspalierError as error:
            raise refusal(error) from None

    def _measure(self, part: Part) -> None:
        metrics, piece, now = self.metrics, part.piece, asyncio.get_running_loop().time()
        key, count = (part.name, piece.index), len(piece.token_ids)
        if count:
            metrics.generated.inc(count)
            if key not in self.last:
                metrics.first_token.observe(now - self.began)
            else:
                for _ in range(count):
                    metrics.between_tokens.observe((now - self.last[key]) / count)
            self.last[key] = now
        if part.usage is not None:
            metrics.finished.labels(piece.finish_reason).inc()
            metrics.prompt_tokens.inc(part.usage.prompt_tokens)
            metrics.cached_tokens.inc(part.usage.cached_tokens)

    def close(self) -> None:
        """Whoever asked has the answer, or does not want it: what still runs is aborted."""
        self.generation.close()
        self.metrics.duration.observe(asyncio.get_running_loop().time() - self.began)


class EventStream(StreamingResponse):
    """A run's events, the first of which is there already.  An error in their midst is an event of its own."""

    def __init__(self, run: Run, first: bytes, rest: AsyncIterator[bytes]):
        super().__init__(self._body(first, rest), media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self.run = run
        self.ended = False

    async def _body(self, first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        yield first
        try:
            async for events in rest:
                yield events
        except ApiError as error:
            log.warning("ended in its midst: %s", error.detail)
            yield self._failed(error)
        except Exception:
            # The status has been sent: whoever reads must not take a defect of ours for the end of the text.
            log.exception("failed in its midst")
            yield self._failed(ApiError(500, FAILED))
        self.ended = True

    def _failed(self, error: ApiError) -> bytes:
        body = error.body()
        self.run.metrics.stream_errors.labels(body["error"]["type"]).inc()
        return event(body)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        limit = None if self.run.deadline is None else self.run.deadline + SEND_GRACE_S
        try:
            async with asyncio.timeout_at(limit):
                await super().__call__(scope, receive, send)
        except TimeoutError:
            log.warning("its reader took nothing for too long: the connection is closed")
        finally:
            if not self.ended:
                self.run.metrics.disconnects.inc()
            self.run.close()


def event(chunk: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


async def _until_left(http: Request, work: Awaitable[T]) -> T:
    """The result of `work`, cancelled as the client disconnects.  Raises ClientLeft."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.create_task(_left(http))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeft
        return working.result()
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()


async def _left(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
