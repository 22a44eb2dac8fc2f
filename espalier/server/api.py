"""The HTTP endpoints.  An endpoint checks a request, tokenizes its prompts and passes them to the model's frontend."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from espalier import __version__
from espalier.chat import ChatOptions, RenderLoop, TextCheck
from espalier.errors import EspalierError
from espalier.inputs import InputProcessor
from espalier.request import ResolvedParams, SamplingParams
from espalier.server.batch_api import batch_endpoints
from espalier.server.batches import BatchRunner
from espalier.server.chat_responses import ChatResponseBuilder, ResponsesApiBuilder
from espalier.server.errors import ApiError, bad_request_error, json_response
from espalier.server.frontend import ModelFrontend, refuse_repeated
from espalier.server.logs import request_id
from espalier.server.middleware import CorsMiddleware, RequestMiddleware
from espalier.server.openai import ChatRequest, CompletionRequest, DetokenizeRequest, Message, TokenizeRequest
from espalier.server.response_builders import CompletionResponseBuilder
from espalier.server.responses import RESPONSES_FIELD_NAMES, ResponsesRequest, renaming_error_fields
from espalier.server.routes import JSON, Endpoint, Frontends, make_router, page_endpoints
from espalier.tool_calls.definitions import RequestTools
from espalier.tool_calls.formats import Formats
from espalier.tool_calls.plan import ChatPlan

NO_EFFECT_HEADER = "x-espalier-no-effect"
# The schema of a server-sent event.  The event's data is a chunk as JSON, or [DONE].
EVENT_SCHEMA = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
STREAM_RESPONSES = {200: {**JSON, "text/event-stream": {"schema": EVENT_SCHEMA}}}
COMMON_ERRORS = (401, 500)
BODY_ERRORS = (400, 404, 408, 413, 503, *COMMON_ERRORS)
GENERATION_ERRORS = (*BODY_ERRORS, 429, 504)
# Matches an origin as a browser sends it: no path, and no slash at the end.
ORIGIN_PATTERN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")


@dataclass(frozen=True)
class PreparedChat:
    """A checked chat request.  ignored_fields: the sent fields that have no effect.  plan: for parsing the output."""

    ignored_fields: list[str]
    prompt: list[int]
    params: ResolvedParams
    plan: ChatPlan


@contextmanager
def as_api_errors(field: str | None = None) -> Iterator[None]:
    """Turns an EspalierError that leaves the block into an ApiError.  field: the ApiError's param if the error's
    message names no field."""
    try:
        yield
    except EspalierError as error:
        raise bad_request_error(error, field) from None


async def prepare_chat(frontend: ModelFrontend, body: ChatRequest) -> PreparedChat:
    """Check a conversation and make its prompt.  Raises ApiError."""
    with as_api_errors(body.grammar_field):
        body.require_compatible_fields()
        requested_params = body.params()
        params = frontend.resolve(requested_params)
        plan = ChatPlan(frontend.inputs.tokenizer, frontend.formats, body.checked_request_tools())
    unread = [name for name in ("reasoning_effort", "tools") if getattr(body, name) and not plan.template_reads(name)]
    frontend.report_fields_without_effect(ignored_fields := body.fields_without_effect() + unread)
    if body.prediction is not None:
        text, run = body.prediction.text, frontend.tokenizer_threads.run
        params = await run(InputProcessor.with_prediction, params, text, size=len(text), field="prediction")
    if "reasoning_effort" in unread:
        body = body.model_copy(update={"reasoning_effort": None})
    with frontend.reserve_capacity(params.n):
        check_text = frontend.require_tokenizable
        size = num_characters([body.messages, body.tools, body.chat_template_kwargs])
        prompt = await frontend.conversation_tokens(_chat_steps, body, plan, check_text, size=size)
    # The answer's grammar was checked above, so a grammar error from here on is about the tools.
    with as_api_errors("tools" if body.tools else None):
        frontend.inputs.require_room(prompt, requested_params, body.output_limit_field)
        params = frontend.inputs.apply_plan(plan, params, prompt)
    return PreparedChat(ignored_fields, prompt, params, plan)


def _chat_steps(inputs: InputProcessor, body: ChatRequest, plan: ChatPlan, check_text: TextCheck) -> RenderLoop:
    """Returns a generator that makes the token ids of a chat request's prompt.  Raises EspalierError.

    The generator yields the arguments of the chat template, and is sent the rendered text (chat.RenderLoop).
    """
    keep_last = body.truncate_prompt_tokens
    check_text = inputs.require_text_fits if keep_last is None else check_text
    tokens = yield from message_steps(inputs, body.messages, body.options(), check_text, plan)
    return inputs.prompt_tokens(tokens, keep_last=keep_last)


def message_steps(
    inputs: InputProcessor,
    messages: Sequence[Message],
    options: ChatOptions,
    check_text: TextCheck,
    plan: ChatPlan,
) -> RenderLoop:
    """Returns a generator that tokenizes messages with the chat template (chat.RenderLoop).  Raises EspalierError."""
    template_messages = plan.template_messages([message.as_template_dict() for message in messages])
    return inputs.chat_steps(template_messages, check_text=check_text, **options)


def num_characters(value: Any) -> int:
    """Returns the number of characters in all strings inside `value`, a part of a request body."""
    count, uncounted_values = 0, [value]
    while uncounted_values:
        inner = uncounted_values.pop()
        if isinstance(inner, str):
            count += len(inner)
        elif isinstance(inner, list):
            uncounted_values += inner
        elif isinstance(inner, dict):
            uncounted_values += [*inner, *inner.values()]
        elif not isinstance(inner, bool | int | float | None):
            uncounted_values += vars(inner).values()  # a pydantic object
    return count


@dataclass(frozen=True)
class ApiOptions:
    """Settings of the HTTP API.

    api_key: None if clients need no key.  cors_origins: the origins of web pages that may call the server.
    body_timeout_s: the time limit for a request's headers, and again for its body; None for no limit.  max_file_bytes:
    the limit for one uploaded file.  additional_keys: further valid keys, one for each further client.
    """

    api_key: str | None = None
    cors_origins: Sequence[str] = ()
    max_body_bytes: int = 4 * 2**20
    body_timeout_s: float | None = 60.0
    max_file_bytes: int = 200 * 2**20
    additional_keys: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Refuse a CORS origin that is not the origin of a web page, or is given twice.  Raises EspalierError."""
        for origin in self.cors_origins:
            if origin not in ("*", "null") and not ORIGIN_PATTERN.fullmatch(origin):
                raise EspalierError(
                    f"--cors-origin={origin!r} is no origin of a page; use a scheme and a host, such as "
                    "https://page.example or http://localhost:3000, or *"
                )
        refuse_repeated("--cors-origin", self.cors_origins)


def make_app(
    frontends: Frontends, options: ApiOptions, batches: BatchRunner | None = None
) -> tuple[ASGIApp, RequestMiddleware]:
    """Returns (application, its RequestMiddleware).  batches: None for a server without batch endpoints."""
    endpoints = [
        *_generation_endpoints(frontends),
        *_tokenizer_endpoints(frontends),
        *_status_endpoints(frontends),
        *([] if batches is None else batch_endpoints(batches)),
    ]
    endpoints += page_endpoints(frontends, endpoints, options.api_key is not None)
    middleware = RequestMiddleware(
        make_router(frontends, endpoints),
        options.api_key,
        options.max_body_bytes,
        lambda path, status: frontends.metrics.responses.labels(path, str(status)).inc(),
        options.body_timeout_s,
        None if batches is None else options.max_file_bytes,
        options.additional_keys,
    )
    if not options.cors_origins:
        return middleware, middleware
    return CorsMiddleware(
        middleware,
        allow_origins=list(options.cors_origins),
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "retry-after", NO_EFFECT_HEADER],
    ), middleware


def _generation_endpoints(frontends: Frontends) -> list[Endpoint]:
    async def create_completion(http: Request, body: CompletionRequest) -> Response:
        frontend = frontends.frontend_for(body.model)
        with as_api_errors(body.grammar_field):
            body.require_compatible_fields()
            requested_params = body.params()
            params = frontend.resolve(requested_params)
            sent_prompts = body.prompts()
        frontend.report_fields_without_effect(ignored_fields := body.fields_without_effect())
        with frontend.reserve_capacity(len(sent_prompts) * params.n):
            run, size = frontend.tokenizer_threads.run, sum(map(len, sent_prompts))
            work = body, sent_prompts, requested_params, frontend.require_tokenizable
            prompts = await run(_prompt_ids, *work, size=size, field="prompt")
            echoed_prompts: list[str] = []
            if body.echo:
                shown = sent_prompts if body.truncate_prompt_tokens is None else prompts
                size = sum(len(prompt) for prompt in shown if not isinstance(prompt, str))
                echoed_prompts = await run(_prompt_texts, shown, params.skip_special_tokens, size=size)
        values = f"cmpl-{request_id.get()}", body, params, prompts, frontend.inputs.tokenizer, echoed_prompts
        response = await frontend.respond(http, body, prompts, params, partial(CompletionResponseBuilder, *values))
        return _with_no_effect_header(ignored_fields, response)

    async def create_chat_completion(http: Request, body: ChatRequest) -> Response:
        frontend = frontends.frontend_for(body.model)
        prepared = await prepare_chat(frontend, body)
        values = f"chatcmpl-{request_id.get()}", body, prepared.params, prepared.prompt, prepared.plan
        make_builder = partial(ChatResponseBuilder, *values)
        response = await frontend.respond(http, body, [prepared.prompt], prepared.params, make_builder)
        return _with_no_effect_header(prepared.ignored_fields, response)

    async def create_response(http: Request, body: ResponsesRequest) -> Response:
        frontend = frontends.frontend_for(body.model)
        frontend.report_fields_without_effect(ignored_fields := body.fields_without_effect())
        with renaming_error_fields(), as_api_errors():
            chat = body.as_chat_request()
            prepared = await prepare_chat(frontend, chat)
        ignored_fields += [RESPONSES_FIELD_NAMES.get(name, name) for name in prepared.ignored_fields]
        values = body, request_id.get(), chat, prepared.params, prepared.prompt, prepared.plan
        make_builder = partial(ResponsesApiBuilder, *values)
        response = await frontend.respond(http, chat, [prepared.prompt], prepared.params, make_builder)
        return _with_no_effect_header(ignored_fields, response)

    responses_summary = "Answer a conversation, in the form of OpenAI's Responses API"
    return [
        Endpoint("POST", path, handler, summary, body, GENERATION_ERRORS, STREAM_RESPONSES)
        for path, handler, summary, body in (
            ("/v1/completions", create_completion, "Continue a text", CompletionRequest),
            ("/v1/chat/completions", create_chat_completion, "Answer a conversation", ChatRequest),
            ("/v1/responses", create_response, responses_summary, ResponsesRequest),
        )
    ]


def _with_no_effect_header(ignored_fields: Sequence[str], response: Response) -> Response:
    """Returns the response with a header that lists the request's fields without effect."""
    if ignored_fields:
        response.headers[NO_EFFECT_HEADER] = ", ".join(ignored_fields)
    return response


def _prompt_ids(
    inputs: InputProcessor,
    body: CompletionRequest,
    prompts: Sequence[str | list[int]],
    requested_params: SamplingParams,
    check_text: TextCheck,
) -> list[list[int]]:
    """Returns the prompts' token ids.  Raises EspalierError.

    check_text: refuses a text that is too long.  Called only if prompts are truncated; else max_context limits them."""
    keep_last, token_lists = body.truncate_prompt_tokens, []
    for prompt in prompts:
        if keep_last is not None and isinstance(prompt, str):
            check_text(prompt)
        token_lists.append(inputs.prompt_tokens(prompt, body.add_special_tokens is not False, keep_last))
        inputs.require_room(token_lists[-1], requested_params, body.output_limit_field)
    return token_lists


def _prompt_texts(inputs: InputProcessor, prompts: Sequence[str | list[int]], skip_special_tokens: bool) -> list[str]:
    """Returns the text of each prompt, for echo.  Raises EspalierError."""
    return [
        prompt if isinstance(prompt, str) else inputs.require_tokenizer("echo").decode(prompt, skip_special_tokens)
        for prompt in prompts
    ]


def _tokenizer_endpoints(frontends: Frontends) -> list[Endpoint]:
    async def tokenize(http: Request, body: TokenizeRequest) -> Response:
        frontend = frontends.frontend_for(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "send either prompt or messages", "prompt")
        size = num_characters([body.prompt, body.messages, body.chat_template_kwargs])
        if body.messages is None:
            for name, value in body.options().items():
                if value is not None:
                    raise ApiError(400, f"{name} needs messages; send messages, or leave it out", name)
        limit = frontend.inputs.model_info.max_context
        if body.messages is None:
            run, check_text = frontend.tokenizer_threads.run, frontend.require_tokenizable
            tokens = await run(_tokenize_text, body, check_text, size=size, field="prompt")
        else:
            work = body, frontend.formats, frontend.require_tokenizable
            tokens = await frontend.conversation_tokens(_tokenize_conversation, *work, size=size)
        return json_response({"tokens": tokens, "count": len(tokens), "max_model_len": limit})

    async def detokenize(http: Request, body: DetokenizeRequest) -> Response:
        frontend = frontends.frontend_for(body.model)
        return await frontend.tokenizer_threads.run(_detokenize, body.tokens, size=len(body.tokens))

    tokenize_summary, detokenize_summary = "The tokens of a text or a conversation", "The text of tokens"
    return [
        Endpoint("POST", "/tokenize", tokenize, tokenize_summary, TokenizeRequest, BODY_ERRORS),
        Endpoint("POST", "/detokenize", detokenize, detokenize_summary, DetokenizeRequest, BODY_ERRORS),
    ]


def _tokenize_text(inputs: InputProcessor, body: TokenizeRequest, check_text: TextCheck) -> list[int]:
    """Returns the token ids of a text, for /tokenize.  check_text: refuses a text that is too long."""
    assert body.prompt is not None
    tokenizer = inputs.require_tokenizer("/tokenize")
    check_text(body.prompt)
    return tokenizer.encode(body.prompt, body.add_special_tokens is not False)


def _tokenize_conversation(
    inputs: InputProcessor, body: TokenizeRequest, formats: Formats, check_text: TextCheck
) -> RenderLoop:
    """Returns a generator that makes the token ids of a conversation for /tokenize (chat.RenderLoop)."""
    assert body.messages is not None
    options: ChatOptions = {**body.options(), "add_special_tokens": body.add_special_tokens}
    plan = ChatPlan(inputs.tokenizer, formats, RequestTools())
    return message_steps(inputs, body.messages, options, check_text, plan)


def _detokenize(inputs: InputProcessor, tokens: list[int]) -> Response:
    """Returns the response of /detokenize."""
    vocab_size = inputs.model_info.vocab_size
    if tokens and not (min(tokens) >= 0 and max(tokens) < vocab_size):
        invalid_token = next(token for token in tokens if not 0 <= token < vocab_size)
        raise EspalierError(f"tokens entry={invalid_token} is not supported; use 0 to {vocab_size - 1}")
    return json_response({"prompt": inputs.require_tokenizer("/detokenize").decode(tokens)})


def _status_endpoints(frontends: Frontends) -> list[Endpoint]:
    created = int(frontends.metrics.started_at)

    def model_card(name: str) -> dict[str, Any]:
        """Returns OpenAI's model object for the served model `name`."""
        max_context = frontends.frontend_for(name).inputs.model_info.max_context
        return {"id": name, "object": "model", "created": created, "owned_by": "espalier", "max_model_len": max_context}

    async def list_models(http: Request) -> Response:
        return json_response({"object": "list", "data": [model_card(name) for name in frontends.names]})

    async def get_model(http: Request) -> Response:
        if not (name := http.path_params["name"]):
            raise ApiError(404, "/v1/models/ is not served; use /v1/models, without the slash at the end")
        return json_response(model_card(name))

    async def get_health(http: Request) -> Response:
        return json_response(
            {"status": frontends.status, "why": frontends.unavailable_reason}, 200 if frontends.status == "ok" else 503
        )

    async def get_version(http: Request) -> Response:
        return json_response({"version": __version__})

    async def get_metrics(http: Request) -> Response:
        return Response(frontends.metrics.exposition_text(), media_type=CONTENT_TYPE_LATEST)

    health_summary, text = "Whether the server accepts requests", {200: {"text/plain": {"schema": {"type": "string"}}}}
    return [
        Endpoint("GET", "/v1/models", list_models, "The served models", errors=COMMON_ERRORS),
        Endpoint("GET", "/v1/models/{name:path}", get_model, "One served model", errors=(404, *COMMON_ERRORS)),
        Endpoint("GET", "/health", get_health, health_summary, errors=(500,), responses={200: JSON, 503: JSON}),
        Endpoint("GET", "/version", get_version, "The version of Espalier", errors=COMMON_ERRORS),
        Endpoint("GET", "/metrics", get_metrics, "Figures for Prometheus", errors=(500,), responses=text),
    ]
