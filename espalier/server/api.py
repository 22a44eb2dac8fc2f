"""The HTTP endpoints.  Each checks its request and passes it to the front of its model."""

import re
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from espalier import __version__
from espalier.chat import ChatOptions, Steps
from espalier.errors import EspalierError
from espalier.inputs import InputProcessor
from espalier.request import SamplingParams
from espalier.server.answers import TextAnswer
from espalier.server.batch_api import add_batches
from espalier.server.batches import Batches
from espalier.server.chat_answers import ChatAnswer
from espalier.server.conversing import chat_steps, converse, num_characters, refusing
from espalier.server.errors import FAILED, ApiError, ErrorBody
from espalier.server.front import CLIENT_LEFT, Front
from espalier.server.fronts import Fronts
from espalier.server.gate import Gate
from espalier.server.logs import request_id
from espalier.server.openai import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from espalier.server.pages import add_pages
from espalier.server.response_answers import ResponsesAnswer
from espalier.server.responses import NAMES, ResponsesRequest, naming_fields
from espalier.tool_calls.definitions import Tools
from espalier.tool_calls.formats import Formats
from espalier.tool_calls.plan import ChatPlan

_TEXT_ONLY = "this server only generates text"
_STATELESS = "the server stores nothing between requests"
_BATCH_DIR = "this server has no place for files and batches; start it with --batch-dir DIR"
# OpenAI's paths that are not served, each with the reason that its error gives.
REFUSED_PATHS = {
    "/v1/embeddings": _TEXT_ONLY,
    "/v1/responses/": "the server does not store responses",
    "/v1/moderations": _TEXT_ONLY,
    "/v1/audio": _TEXT_ONLY,
    "/v1/images": _TEXT_ONLY,
    "/v1/videos": _TEXT_ONLY,
    "/v1/realtime": "use /v1/chat/completions with stream",
    "/v1/files": _BATCH_DIR,
    "/v1/uploads": _STATELESS,
    "/v1/batches": _BATCH_DIR,
    "/v1/fine_tuning": "espalier train trains drafts",
    "/v1/assistants": "use /v1/chat/completions",
    "/v1/threads": "use /v1/chat/completions",
    "/v1/conversations": "use /v1/chat/completions",
    "/v1/vector_stores": _STATELESS,
    "/v1/containers": "the server runs no code",
    "/v1/evals": _STATELESS,
    "/v1/chat/completions/": "the server does not store completions",
}
# One model, or several.
Server = Front | Fronts
# The response header that lists the request's fields without effect.
IGNORED = "x-espalier-no-effect"
# The schema of a stream's event.  Its data is a chunk as JSON, or [DONE].
EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
EVENTS: dict[str, Any] = {"text/event-stream": {"schema": EVENT}}
STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": EVENTS, "description": "whole, or streamed"}}


def answers_with(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The error responses of an endpoint, for the OpenAPI page."""
    return {status: {"model": ErrorBody} for status in statuses}


# What the OpenAPI page says of each path.
SUMMARIES = {
    "/v1/completions": "Continue a text",
    "/v1/chat/completions": "Answer a conversation",
    "/v1/responses": "Answer a conversation, in the form of OpenAI's Responses API",
    "/tokenize": "The tokens of a text or a conversation",
    "/detokenize": "The text of tokens",
    "/v1/models": "The served models",
    "/v1/models/{name}": "One served model",
    "/health": "Whether the server accepts requests",
    "/version": "The version of Espalier",
    "/metrics": "Figures for Prometheus",
}
ALWAYS = (401, 500)
READS_A_BODY = (400, 404, 408, 413, 503, *ALWAYS)
GENERATES = (*READS_A_BODY, 429, 504)
# As a browser sends it: no path and no slash at the end.
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")


@dataclass(frozen=True)
class ApiOptions:
    """api_key: None if clients need none; cors_origins: origins whose pages may call the server; body_timeout_s: limit
    for reading the headers, and for reading the body, None for no limit; max_file_bytes: for an upload of a file;
    more_keys: of further clients, beside api_key."""

    api_key: str | None = None
    cors_origins: Sequence[str] = ()
    max_body_bytes: int = 4 * 2**20
    body_timeout_s: float | None = 60.0
    max_file_bytes: int = 200 * 2**20
    more_keys: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Raises EspalierError for an origin that no browser sends."""
        for origin in self.cors_origins:
            if origin not in ("*", "null") and not ORIGIN.fullmatch(origin):
                raise EspalierError(
                    f"--cors-origin={origin!r} is no origin of a page; use a scheme and a host, such as "
                    "https://page.example or http://localhost:3000, or *"
                )


def make_app(server: Server, options: ApiOptions, batches: Batches | None = None) -> tuple[ASGIApp, Gate]:
    """The application, and the gate that counts open requests.  batches: None for a server without them."""
    # No redirects for a trailing slash: behind a proxy their http:// URL with this host would be wrong.
    app = FastAPI(title="Espalier", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    _add_generation(app, server)
    _add_tokens(app, server)
    _add_state(app, server)
    if batches is not None:
        add_batches(app, batches, server.bodies.limits)
    _add_errors(app)
    _describe(app, server.names)
    add_pages(app, server, options.api_key is not None)
    gate = Gate(
        _shortcut(app),
        options.api_key,
        options.max_body_bytes,
        lambda path, status: _count(server, path, status),
        options.body_timeout_s,
        None if batches is None else options.max_file_bytes,
        options.more_keys,
    )
    if not options.cors_origins:
        return gate, gate
    return CORSMiddleware(
        gate,
        allow_origins=list(options.cors_origins),
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "retry-after", IGNORED],
    ), gate


def _shortcut(app: FastAPI) -> ASGIApp:
    """The application, without the framework's layers for the endpoints that generate: they cost more than the request.

    The gate answers errors just as the framework does here.
    """
    routes = {route.path: route for route in app.routes if isinstance(route, BodyRoute)}

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        route = routes.get(scope["path"]) if scope["method"] == "POST" else None
        if route is None:
            return await app(scope, receive, send)
        scope["route"] = route
        response = await route.handle_body(Request(scope, receive))
        return await response(scope, receive, send)

    return call


def _count(server: Server, path: str, status: int) -> None:
    server.metrics.answers.labels(path, str(status)).inc()


def _add_generation(app: FastAPI, server: Server) -> None:
    post = _posts(app, server)

    @post("/v1/completions", responses=STREAMED | answers_with(*GENERATES))
    async def complete(body: CompletionRequest, http: Request) -> Response:
        front = server.of(body.model)
        with refusing():
            body.check()
            asked = body.params()
            params = front.resolve(asked)
            sent_prompts = body.prompts()
        front.check_effect(ignored := body.without_effect())
        with front.entering(len(sent_prompts) * params.n):
            size, check = sum(map(len, sent_prompts)), front.require_tokenizable
            prompts = await front.lanes.run(_prompts, body, sent_prompts, asked, check, size=size, field="prompt")
            echo: list[str] = []
            if body.echo:
                shown = sent_prompts if body.truncate_prompt_tokens is None else prompts
                size = sum(len(prompt) for prompt in shown if not isinstance(prompt, str))
                echo = await front.lanes.run(_echo, shown, params.skip_special_tokens, size=size)

        def answer() -> TextAnswer:
            return TextAnswer(f"cmpl-{request_id.get()}", body, params, prompts, front.inputs.tokenizer, echo)

        return _naming(ignored, await front.respond(http, body, prompts, params, answer))

    @post("/v1/chat/completions", responses=STREAMED | answers_with(*GENERATES))
    async def chat(body: ChatRequest, http: Request) -> Response:
        front = server.of(body.model)
        talk = await converse(front, body)

        def answer() -> ChatAnswer:
            return ChatAnswer(f"chatcmpl-{request_id.get()}", body, *talk.answer_arguments)

        return _naming(talk.ignored, await front.respond(http, body, [talk.prompt], talk.params, answer))

    @post("/v1/responses", responses=STREAMED | answers_with(*GENERATES))
    async def respond(body: ResponsesRequest, http: Request) -> Response:
        front = server.of(body.model)
        front.check_effect(ignored := body.without_effect())
        with naming_fields(), refusing():
            chat = body.as_chat()
            talk = await converse(front, chat)

        def answer() -> ResponsesAnswer:
            return ResponsesAnswer(body, chat, request_id.get(), *talk.answer_arguments)

        ignored += [NAMES.get(name, name) for name in talk.ignored]
        return _naming(ignored, await front.respond(http, chat, [talk.prompt], talk.params, answer))


def _naming(ignored: Sequence[str], answer: Response) -> Response:
    """The response, with a header that lists the fields without effect."""
    if ignored:
        answer.headers[IGNORED] = ", ".join(ignored)
    return answer


class BodyRoute(APIRoute):
    """A route whose handler reads the body itself.  FastAPI only puts the body into the OpenAPI page.

    handle_body: from the HTTP request to the response.
    """

    server: Server

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        endpoint: Callable[..., Coroutine[Any, Any, Response]] = self.endpoint
        model, server = endpoint.__annotations__["body"], self.server

        async def handle(http: Request) -> Response:
            try:
                body = await server.bodies.read(http, model)
            except ClientDisconnect:
                server.metrics.disconnects.inc()
                return Response(status_code=CLIENT_LEFT)
            return await endpoint(body, http)

        self.handle_body = handle
        return handle


def _posts(app: FastAPI, server: Server) -> Callable[..., Any]:
    """app.post for endpoints with a body, which server.bodies reads."""
    route = type("BodyRoute", (BodyRoute,), {"server": server})

    def post(path: str, **about: Any) -> Callable[..., Any]:
        def add(endpoint: Callable[..., Any]) -> Callable[..., Any]:
            app.router.add_api_route(path, endpoint, methods=["POST"], route_class_override=route, **about)
            return endpoint

        return add

    return post


def _prompts(
    inputs: InputProcessor,
    body: CompletionRequest,
    prompts: Sequence[str | list[int]],
    asked: SamplingParams,
    check: Callable[[str], None],
) -> list[list[int]]:
    """The prompts' token ids.

    check: limits the length of a text that will be truncated; max_context limits any other.  Raises EspalierError.
    """
    keep, found = body.truncate_prompt_tokens, []
    for prompt in prompts:
        if keep is not None and isinstance(prompt, str):
            check(prompt)
        found.append(inputs.tokens(prompt, body.add_special_tokens is not False, keep))
        inputs.require_room(found[-1], asked, body.limit_name)
    return found


def _echo(inputs: InputProcessor, prompts: Sequence[str | list[int]], skip_special_tokens: bool) -> list[str]:
    """The text of each prompt.  Raises EspalierError."""
    return [
        prompt if isinstance(prompt, str) else _text(inputs, "echo", prompt, skip_special_tokens) for prompt in prompts
    ]


def _text(inputs: InputProcessor, what: str, tokens: list[int], skip_special_tokens: bool = True) -> str:
    return inputs.text_of(what).decode(tokens, skip_special_tokens)


def _add_tokens(app: FastAPI, server: Server) -> None:
    post = _posts(app, server)

    @post("/tokenize", response_model=dict[str, Any], responses=answers_with(*READS_A_BODY))
    async def tokenize(body: TokenizeRequest, http: Request) -> Response:
        front = server.of(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "send either prompt or messages", "prompt")
        size = num_characters([body.prompt, body.messages, body.chat_template_kwargs])
        if body.messages is None:
            for name, value in body.options().items():
                if value is not None:
                    raise ApiError(400, f"{name} needs messages; send messages, or leave it out", name)
        limit = front.inputs.facts.max_context
        if body.messages is None:
            tokens = await front.lanes.run(_tokenized, body, front.require_tokenizable, size=size, field="prompt")
        else:
            work = body, front.formats, front.require_tokenizable
            tokens = await front.rendered(_conversation_tokenized, *work, size=size)
        return _json(msgspec.json.encode({"tokens": tokens, "count": len(tokens), "max_model_len": limit}))

    @post("/detokenize", response_model=dict[str, Any], responses=answers_with(*READS_A_BODY))
    async def detokenize(body: DetokenizeRequest, http: Request) -> Response:
        front = server.of(body.model)
        return _json(await front.lanes.run(_detokenized, body.tokens, size=len(body.tokens)))


def _tokenized(inputs: InputProcessor, body: TokenizeRequest, check: Callable[[str], None]) -> list[int]:
    """The tokens of a text, for /tokenize."""
    assert body.prompt is not None
    tokenizer = inputs.text_of("/tokenize")
    check(body.prompt)
    return tokenizer.encode(body.prompt, body.add_special_tokens is not False)


def _conversation_tokenized(
    inputs: InputProcessor, body: TokenizeRequest, formats: Formats, check: Callable[[str], None]
) -> Steps:
    """To the tokens of a conversation, for /tokenize."""
    assert body.messages is not None
    options: ChatOptions = {**body.options(), "add_special_tokens": body.add_special_tokens}
    return chat_steps(inputs, body.messages, options, check, ChatPlan(inputs.tokenizer, formats, Tools()))


def _detokenized(inputs: InputProcessor, tokens: list[int]) -> bytes:
    """The response body of /detokenize."""
    vocab_size = inputs.facts.vocab_size
    if tokens and not (min(tokens) >= 0 and max(tokens) < vocab_size):
        wrong = next(token for token in tokens if not 0 <= token < vocab_size)
        raise EspalierError(f"tokens entry={wrong} is not supported; use 0 to {vocab_size - 1}")
    return msgspec.json.encode({"prompt": _text(inputs, "/detokenize", tokens)})


def _json(data: bytes) -> Response:
    return Response(data, media_type="application/json")


def _add_state(app: FastAPI, server: Server) -> None:
    created = int(server.metrics.began)

    def card(name: str) -> dict[str, Any]:
        max_context = server.of(name).inputs.facts.max_context
        return {"id": name, "object": "model", "created": created, "owned_by": "espalier", "max_model_len": max_context}

    @app.get("/v1/models", responses=answers_with(*ALWAYS))
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card(name) for name in server.names]}

    @app.get("/v1/models/{name:path}", responses=answers_with(404, *ALWAYS))
    async def model(name: str) -> dict[str, Any]:
        if not name:
            raise ApiError(404, "/v1/models/ is not served; use /v1/models, without the slash at the end")
        return card(name)

    @app.get("/health", responses={503: {"description": "the server does not accept requests"}, **answers_with(500)})
    async def health() -> JSONResponse:
        body = {"status": server.status, "why": server.why}
        return JSONResponse(body, 200 if server.status == "ok" else 503)

    @app.get("/version", responses=answers_with(*ALWAYS))
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}, **answers_with(500)})
    async def metrics() -> Response:
        return Response(server.metrics.text(), media_type=CONTENT_TYPE_LATEST)


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(HTTPException)
    async def refused(http: Request, error: HTTPException) -> JSONResponse:
        api_error = error if isinstance(error, ApiError) else _of_routing(http, error)
        http.scope["state"]["refused"] = api_error
        return JSONResponse(api_error.body(), api_error.status_code, api_error.headers)

    @app.exception_handler(Exception)
    async def failed(http: Request, error: Exception) -> JSONResponse:
        # Without this the framework answers in plain text.  It raises the error again, and the gate logs it.
        return JSONResponse(ApiError(500, FAILED).body(), 500)


def _of_routing(http: Request, error: HTTPException) -> ApiError:
    """The ApiError for a path or method that the framework refused."""
    path = http.url.path
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        # The gate serves HEAD as GET.
        allowed = "GET, HEAD" if allowed == "GET" else allowed
        api_error = ApiError(405, f"{http.method} {path} is not served; use {allowed}")
        api_error.headers = {"allow": allowed}
        return api_error
    if error.status_code == 404:
        if (meant := path.rstrip("/")) != path and any(meant == getattr(r, "path", "") for r in http.app.routes):
            return ApiError(404, f"{path} is not served; use {meant}, without the slash at the end")
        served_paths = {getattr(route, "path", "") for route in http.app.routes}
        refused = ((prefix, why) for prefix, why in REFUSED_PATHS.items() if prefix not in served_paths)
        why = next((why for prefix, why in refused if path.startswith(prefix)), None)
        batches = "/v1/files, /v1/batches, " if "/v1/batches" in served_paths else ""
        served = (
            f"use /v1/models, /v1/completions, /v1/chat/completions, /v1/responses, {batches}/tokenize, /detokenize, "
            "/health, /metrics, /version, /openapi.json or /docs"
        )
        # As by a base URL without /v1, or with it where the client adds it.
        near = [one for one in served_paths if one.strip("/") and (one == f"/v1{path}" or path.endswith(one))]
        if near:
            served = f"use {max(near, key=len)}, and check the client's base URL"
        reason = f"OpenAI's {path} is not supported: {why}" if why else f"{path} is not served; {served}"
        return ApiError(404, reason, code="unsupported" if why else None)
    return ApiError(error.status_code, str(error.detail))


def _describe(app: FastAPI, names: Sequence[str]) -> None:
    """Correct the OpenAPI page: a bad body gets 400 as at OpenAI, not 422; `model` is a served name; add SUMMARIES."""
    make = app.openapi

    def openapi() -> dict[str, Any]:
        page = make()
        for path, methods in page["paths"].items():
            for operation in methods.values():
                operation["responses"].pop("422", None)
                operation["summary"] = SUMMARIES.get(path, operation["summary"])
        for body in (CompletionRequest, ChatRequest, ResponsesRequest):
            page["components"]["schemas"][body.__name__]["properties"]["model"]["enum"] = list(names)
        return page

    app.openapi = openapi  # type: ignore[method-assign]
