"""The layer between the endpoints and the engine process of a model: admission, tokenization and time limits.

Clients share the queue.  If one client fills the queue, other clients can still send some requests (ClientShares).
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from espalier.chat import RenderLoop, run_steps
from espalier.errors import EspalierError, shown
from espalier.inputs import InputProcessor
from espalier.request import ResolvedParams, SamplingParams
from espalier.server.active_requests import ActiveRequest, EventStream
from espalier.server.bodies import BodyLimits, BodyReader
from espalier.server.errors import RETRY_AFTER_S, ApiError, queue_full_error
from espalier.server.logs import client_name, request_id
from espalier.server.metrics import Metrics
from espalier.server.openai import GenerationRequest
from espalier.server.protocol import SHUTTING_DOWN, EngineGone, Engines, Generation, SubmittedPrompt
from espalier.server.response_builders import ResponseBuilder, engine_detokenizes
from espalier.server.template_process import TemplateProcess
from espalier.server.tokenizer_threads import TokenizerThreads
from espalier.text import load_tokenizer
from espalier.tool_calls.formats import AUTO, find_formats

log = logging.getLogger("espalier.server")
# A text for /tokenize, or a prompt that will be truncated, may have at most this number of characters, or
# CHARS_PER_TOKEN * max_context if that is more.
MAX_TEXT_CHARS = 2**20
CHARS_PER_TOKEN = 8
# A request to /detokenize may have at most this number of token ids, or max_context if that is more.
MAX_DETOKENIZED = 2**18
MAX_CACHED_PARAMS = 256


def refuse_repeated(flag: str, values: Sequence[str]) -> None:
    """Refuse equal values of a flag that may be given several times.  flag: for the error.  Raises EspalierError."""
    if len({*values}) < len(values):
        [(value, count)] = Counter(values).most_common(1)
        raise EspalierError(f"{flag} has {shown(value)} {count} times; give each value once")


@dataclass(frozen=True)
class FrontendOptions:
    """Settings of the frontend of a model.

    names: the model's names in the API; if empty, the name of its directory.  chat_template: used instead of the
    tokenizer's chat template.  max_queue: how many samples may wait for a slot.  request_timeout_s: the time limit of a
    request, None for no limit.  strict_fields: refuse fields without effect.  tool_format, reasoning_format: a format's
    name in espalier/tool_calls/formats, or "auto" for the format that fits the chat template.
    """

    names: tuple[str, ...]
    chat_template: str | None = None
    max_queue: int = 256
    request_timeout_s: float | None = 600.0
    strict_fields: bool = False
    allow_special_tokens_in_messages: bool = False
    tool_format: str = AUTO
    reasoning_format: str = AUTO

    def __post_init__(self) -> None:
        if not all(name.strip() for name in self.names):
            raise EspalierError("--served-model-name is empty; give a name, or leave the flag out")
        refuse_repeated("--served-model-name", self.names)
        find_formats("", self.tool_format, self.reasoning_format)


# The client name under which the requests of all batches are counted.
BATCH_CLIENT = "batches"
# When the queue is full, max_queue / SHARE_DIVISOR more samples are accepted, but only from clients with few samples.
SHARE_DIVISOR = 4
# A request with this key in its ASGI scope's state has no time limit.
NO_TIMEOUT = "unlimited"


class ClientShares:
    """Counts each client's samples from tokenization to their end, and decides whether a client may submit more."""

    def __init__(self) -> None:
        self._generations: dict[str, set[Generation]] = {}
        self._reserved: Counter[str] = Counter()

    def may_submit(self, num_samples: int, num_open_samples: int, capacity: int, max_queue: int) -> bool:
        """Returns whether the current client may submit `num_samples` more samples.

        num_open_samples: the samples of all clients that are being tokenized, wait or run.
        capacity: how many samples may run or wait (slots plus max_queue).
        Above the capacity, batches may not submit, and other clients only up to max_queue / SHARE_DIVISOR samples each.
        """
        if num_open_samples + num_samples <= capacity:
            return True
        share, client = -(-max_queue // SHARE_DIVISOR), client_name.get()
        is_small = self.num_samples_of(client) + num_samples <= share
        return is_small and client != BATCH_CLIENT and num_open_samples + num_samples <= capacity + share

    def num_samples_of(self, client: str) -> int:
        """Returns the number of a client's samples: reserved (being tokenized), waiting or running."""
        running = sum(sum(each.num_running.values()) for each in self._generations.get(client, ()))
        return running + self._reserved[client]

    def add_reserved(self, num_samples: int) -> None:
        """Count `num_samples` more samples of the current client, whose prompts are being tokenized."""
        self._reserved[client_name.get()] += num_samples

    def remove_reserved(self, num_samples: int) -> None:
        """Undo `add_reserved`, when the samples have been submitted or refused."""
        client = client_name.get()
        self._reserved[client] -= num_samples
        if not self._reserved[client]:
            del self._reserved[client]

    @property
    def num_reserved(self) -> int:
        return self._reserved.total()

    def add_generation(self, client: str, generation: Generation) -> None:
        self._generations.setdefault(client, set()).add(generation)

    def remove_generation(self, client: str, generation: Generation) -> None:
        if (generations := self._generations.get(client)) is not None:
            generations.discard(generation)
            if not generations:
                del self._generations[client]


def without_timeout(app: ASGIApp) -> ASGIApp:
    """Returns an app that answers like `app`, but without the limit --request-timeout."""

    async def call_app(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, "state": {NO_TIMEOUT: True}}, receive, send)

    return call_app


def unknown_model_error(name: str, served: Sequence[str]) -> ApiError:
    """Returns the error for a model that is not served."""
    message = f"this server has no model {name!r}; use {', '.join(served)}"
    return ApiError(404, message, "model", "model_not_found")


class ModelFrontend:
    """Serves one model in the API server: checks, tokenization, admission and responses.

    engines: already started.  metrics: shared by all models of the server; None for a server with one model.  draining:
    True while the server shuts down.  Then new requests are refused, and requests in progress finish.
    """

    def __init__(self, engines: Engines, options: FrontendOptions, metrics: Metrics | None = None):
        model_info = engines.model_info
        assert model_info is not None, "start the engines first"
        self.engines = engines
        self.options = options
        self.names = options.names or (Path(model_info.model).name,)
        self.metrics = metrics or Metrics([engines])
        self.draining = False
        tokenizer = load_tokenizer(Path(model_info.model), model_info.vocab_size)
        self.inputs = InputProcessor(model_info, tokenizer, options.allow_special_tokens_in_messages)
        if options.chat_template is not None:
            self.inputs.require_tokenizer("--chat-template").hf.chat_template = options.chat_template
        template = "" if tokenizer is None else tokenizer.template.source
        self.formats = find_formats(template, options.tool_format, options.reasoning_format)
        names = [each.name if each is not None else "none" for each in (self.formats.tools, self.formats.reasoning)]
        log.info("format of tool calls: %s; format of reasoning: %s", *names)
        self.tokenizer_threads = TokenizerThreads(self.inputs)
        capacity = engines.max_slots + options.max_queue
        max_context, max_detokenized = model_info.max_context, max(MAX_DETOKENIZED, model_info.max_context)
        limits = BodyLimits(model_info.vocab_size, max_context, capacity, max_detokenized, model_info.max_position)
        self.body_reader = BodyReader(limits)
        self.template_process: TemplateProcess | None = None
        self.client_shares = ClientShares()
        self._logged_fields: set[str] = set()
        self._resolved_params: dict[int, tuple[SamplingParams, ResolvedParams]] = {}

    def render_in_helper_process(self) -> None:
        """From now on, render chat templates in a separate process, and not in the tokenizer threads."""
        hf = None if self.inputs.tokenizer is None else self.inputs.tokenizer.hf
        if getattr(hf, "chat_template", None):
            self.template_process = TemplateProcess(hf)

    async def conversation_tokens(self, work: Callable[..., RenderLoop], *values: Any, size: int) -> list[int]:
        """Returns the token ids of a conversation.  Raises ApiError.

        work(InputProcessor, *values): returns the generator that renders and tokenizes the conversation
        (chat.RenderLoop).  size: the number of characters."""
        if self.template_process is not None:
            render = self.template_process.render
            return await self.tokenizer_threads.run_steps(work, *values, render=render, size=size, field="messages")

        def render_and_encode(inputs: InputProcessor) -> list[int]:
            return run_steps(work(inputs, *values), inputs.require_tokenizer("a conversation").template.render)

        return await self.tokenizer_threads.run(render_and_encode, size=size, field="messages")

    @property
    def status(self) -> str:
        """ "ok" if requests are accepted, else the state of the server, such as "draining"."""
        return "draining" if self.draining else "ok" if self.engines.state == "ready" else self.engines.state

    @property
    def unavailable_reason(self) -> str:
        """The reason why requests are refused; "" if the status is "ok"."""
        if self.draining:
            return f"{SHUTTING_DOWN}, and finishes the requests that run"
        return "" if self.engines.state == "ready" else self.engines.unavailable_reason

    def frontend_for(self, model: str | None) -> "ModelFrontend":
        """Returns this frontend.  Raises ApiError if `model` is the name of another model."""
        if model is not None and model not in self.names:
            raise unknown_model_error(model, self.names)
        return self

    def report_fields_without_effect(self, names: Sequence[str]) -> None:
        """Log each field without effect once.  With strict_fields, raises ApiError instead."""
        if names and self.options.strict_fields:
            why = f"{names[0]} has no effect, and this server runs with --strict-fields; leave it out"
            raise ApiError(400, why, names[0], "unsupported")
        for name in names:
            if name not in self._logged_fields:
                self._logged_fields.add(name)
                log.info("the field %s is accepted but has no effect (logged once)", name)

    def resolve(self, params: SamplingParams) -> ResolvedParams:
        """Returns `params` with all defaults filled in, from a cache if possible.  Raises EspalierError."""
        cached_params, resolved = self._resolved_params.get(id(params), (None, None))
        if resolved is None or cached_params is not params:
            resolved = self.inputs.resolve(params)
            if len(self._resolved_params) >= MAX_CACHED_PARAMS:
                self._resolved_params.clear()
            self._resolved_params[id(params)] = params, resolved
        return resolved

    def require_tokenizable(self, text: str) -> None:
        """Refuse a text that is too long to tokenize, if max_context does not limit the text.  Raises EspalierError."""
        limit = max(MAX_TEXT_CHARS, CHARS_PER_TOKEN * self.inputs.model_info.max_context)
        if len(text) > limit:
            raise EspalierError(f"a text of {len(text)} characters is not supported; use at most {limit}")

    async def respond(
        self,
        http: Request,
        body: GenerationRequest,
        prompts: Sequence[list[int]],
        params: ResolvedParams,
        make_builder: Callable[[], ResponseBuilder],
    ) -> Response:
        """Run the prompts and return the response.  A stream is returned when its first event is ready.

        make_builder: called when the prompts have been sent to the engine.  Raises ApiError or ClientDisconnect.
        """
        loop = asyncio.get_running_loop()
        limit_s = None if NO_TIMEOUT in http.scope["state"] else self.options.request_timeout_s
        generation = self._submit(body, prompts, params)
        deadline = None if limit_s is None else loop.time() + limit_s
        active_request = ActiveRequest(self, make_builder, generation, deadline, body.grammar_field)
        try:
            # The prompts are sent first, so that the engine computes while the rest of this function runs.
            await self.engines.wait_until_sent()
            active_request.watch_for_disconnect(http)
            if not body.stream:
                return await active_request.full_response()
            events = active_request.events()
            # Wait for the first event before the status is sent, because the engine may refuse the request.
            first_event = await anext(events)
        except BaseException:
            active_request.close()
            raise
        return EventStream(active_request, first_event, events)

    @contextmanager
    def reserve_capacity(self, num_samples: int) -> Iterator[None]:
        """Counts samples as queued while the block tokenizes their prompts.  Raises ApiError if the queue is full."""
        self._require_capacity(num_samples)
        self.client_shares.add_reserved(num_samples)
        try:
            yield
        finally:
            self.client_shares.remove_reserved(num_samples)

    def _require_capacity(self, num_samples: int) -> None:
        """Refuse samples if slots and queue have no room, the server drains, or no engine runs.  Raises ApiError."""
        if self.draining:
            message = f"{SHUTTING_DOWN}; retry on another server"
            raise ApiError(503, message, retry_after_s=RETRY_AFTER_S)
        try:
            self.engines.require_running()
        except EngineGone as error:
            raise _engine_gone_error(error) from None
        capacity = self.engines.num_slots + self.options.max_queue
        if num_samples > capacity:
            message = f"the request has {num_samples} samples and the server holds {capacity} at most; send fewer"
            raise ApiError(400, message, "n")
        num_open_samples = self.engines.open_samples + self.client_shares.num_reserved
        if not self.client_shares.may_submit(num_samples, num_open_samples, capacity, self.options.max_queue):
            raise queue_full_error(
                f"the queue is full ({num_open_samples} of {capacity} samples are running or waiting)"
            )

    def _submit(self, body: GenerationRequest, prompts: Sequence[list[int]], params: ResolvedParams) -> Generation:
        """Send prompts (token ids) to the engine.  Raises ApiError if the queue is full or no engine runs."""
        self._require_capacity(len(prompts) * params.n)
        prompt_fields = body.priority or 0, engine_detokenizes(params), client_name.get(), bool(body.stream)
        private = getattr(body, "store", None) is False
        try:
            return self.engines.submit(prompts, SubmittedPrompt(request_id.get(), [], params, *prompt_fields, private))
        except EngineGone as error:
            raise _engine_gone_error(error) from None

    async def close(self) -> None:
        self.tokenizer_threads.close()
        if self.template_process is not None:
            await self.template_process.helper.close()
        await self.body_reader.helper.close()


def _engine_gone_error(error: EngineGone) -> ApiError:
    return ApiError(503, f"{error}; retry later", code="engine_gone", retry_after_s=RETRY_AFTER_S)


class MultiModelFrontend:
    """The frontends of several models of one server.  Has the attributes of a ModelFrontend that endpoints use.

    frontends: at least one, all with the same Metrics object.  A body is read before its model is known.  So
    body_reader checks the largest limits of all models, and the model's frontend checks the model's own limits later.
    """

    def __init__(self, frontends: Sequence[ModelFrontend], metrics: Metrics):
        self.frontends = frontends
        self.metrics = metrics
        self.names = tuple(name for frontend in frontends for name in frontend.names)
        self._by_name = {name: frontend for frontend in frontends for name in frontend.names}
        if repeated_names := [name for name in self._by_name if self.names.count(name) > 1]:
            name = repeated_names[0]
            raise EspalierError(f"two models are served as {name!r}; give them different names (served_model_name)")
        limits = [frontend.body_reader.limits for frontend in frontends]
        names = ("vocab_size", "max_prompts", "max_token_ids")
        largest_limits = {name: max(getattr(each, name) for each in limits) for name in names}
        longest_context = max(limits, key=lambda each: each.max_context)
        self.body_reader = BodyReader(msgspec.structs.replace(longest_context, **largest_limits))

    def frontend_for(self, model: str | None) -> ModelFrontend:
        """Returns the frontend of `model`.  Raises ApiError."""
        if model is None and len(self.frontends) > 1:
            raise ApiError(400, f"model is missing; use one of {', '.join(self.names)}", "model")
        if model is None:
            return self.frontends[0]
        if model not in self._by_name:
            raise unknown_model_error(model, self.names)
        return self._by_name[model]

    @property
    def status(self) -> str:
        """ "ok" if all models are "ok", else the status of the first other model."""
        return next((frontend.status for frontend in self.frontends if frontend.status != "ok"), "ok")

    @property
    def unavailable_reason(self) -> str:
        """Why the first unavailable model is unavailable; "" if all models are available."""
        return next((frontend.unavailable_reason for frontend in self.frontends if frontend.unavailable_reason), "")

    async def close(self) -> None:
        for frontend in self.frontends:
            await frontend.close()
        await self.body_reader.helper.close()
