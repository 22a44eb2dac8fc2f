"""Routes requests to endpoints by path and method, and serves descriptions of the endpoints.

/openapi.json is for programs.  The page / shows how to call the endpoints, and the page /docs lists endpoints and
fields.  Both pages load nothing else, so they work offline.  The pages need no API key, as a browser cannot send a key.
If the server needs a key, the pages name no model.
"""

import json
import re
import shlex
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple
from urllib.parse import quote

from jinja2 import Environment, PackageLoader
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from espalier import __version__
from espalier.errors import shown
from espalier.server.errors import ApiError, ErrorBody, json_response
from espalier.server.frontend import ModelFrontend, MultiModelFrontend

Frontends = ModelFrontend | MultiModelFrontend
_TEXT_ONLY_REASON = "this server only generates text"
_STATELESS_REASON = "the server stores nothing between requests"
_NO_BATCH_DIR = "this server has no place for files and batches; start it with --batch-dir DIR"
# For the error message: {the beginning of a path of OpenAI's API: why this server has no such paths}.
REFUSED_PATHS = {
    "/v1/embeddings": _TEXT_ONLY_REASON,
    "/v1/responses/": "the server does not store responses",
    "/v1/moderations": _TEXT_ONLY_REASON,
    "/v1/audio": _TEXT_ONLY_REASON,
    "/v1/images": _TEXT_ONLY_REASON,
    "/v1/videos": _TEXT_ONLY_REASON,
    "/v1/realtime": "use /v1/chat/completions with stream",
    "/v1/files": _NO_BATCH_DIR,
    "/v1/uploads": _STATELESS_REASON,
    "/v1/batches": _NO_BATCH_DIR,
    "/v1/fine_tuning": "espalier train trains drafts",
    "/v1/assistants": "use /v1/chat/completions",
    "/v1/threads": "use /v1/chat/completions",
    "/v1/conversations": "use /v1/chat/completions",
    "/v1/vector_stores": _STATELESS_REASON,
    "/v1/containers": "the server runs no code",
    "/v1/evals": _STATELESS_REASON,
    "/v1/chat/completions/": "the server does not store completions",
}
OBJECT_SCHEMA: dict[str, Any] = {"type": "object", "additionalProperties": True}
JSON: Mapping[str, Any] = {"application/json": {"schema": OBJECT_SCHEMA}}
TEMPLATE_FOLDER = "server/html"
# With these headers, the browser loads no other file for a page.
PAGE_HEADERS = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"}
KEY_ARGUMENT = '-H "authorization: Bearer $ESPALIER_API_KEY"'
EXAMPLE_MAX_TOKENS = 64
# Azure's clients send this parameter with every request.  The parameter has no effect, as this API has one version.
AZURE_PARAMETER = "api-version"
PATH_PARAMETER_PATTERN = re.compile(r"\{(\w+)(?::\w+)?\}")


@dataclass(frozen=True)
class Endpoint:
    """An HTTP endpoint: one method of one path.

    handler: takes the request and, if `body` is set, the parsed body; returns the response.  body: the body's pydantic
    class, None for no body.  The other fields are for /openapi.json, which leaves out an endpoint with summary "".
    errors: the possible error statuses.  responses: the responses without an error, as
    {status: {content type: {"schema": JSON schema}}}.
    """

    method: str
    path: str
    handler: Callable[..., Awaitable[Response]]
    summary: str = ""
    body: type[BaseModel] | None = None
    errors: Sequence[int] = ()
    responses: Mapping[int, Mapping[str, Any]] = field(default_factory=lambda: {200: JSON})


def make_router(frontends: Frontends, endpoints: Sequence[Endpoint]) -> Router:
    """Returns the ASGI application that calls the endpoints.  It raises ApiErrors, which the middleware answers."""
    by_path: dict[str, dict[str, Endpoint]] = {}
    for endpoint in endpoints:
        by_path.setdefault(endpoint.path, {})[endpoint.method] = endpoint

    async def raise_not_served(scope: Scope, receive: Receive, send: Send) -> None:
        raise path_not_served_error(scope["path"], by_path)

    # A path with a trailing slash is not redirected, because the URL of the redirect would be wrong behind a proxy.
    routes = [Route(path, PathEndpoints(frontends, path, by_method)) for path, by_method in by_path.items()]
    return Router(routes, redirect_slashes=False, default=raise_not_served)


@dataclass(frozen=True)
class PathEndpoints:
    """The endpoints of one path, as an ASGI application."""

    frontends: Frontends
    path: str
    by_method: Mapping[str, Endpoint]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the endpoint of the request's method.  Raises ApiError."""
        endpoint = self.by_method.get(scope["method"])
        if endpoint is None:
            # A path that has GET also has HEAD, because the middleware turns HEAD into GET.
            allowed = ", ".join("GET, HEAD" if each == "GET" else each for each in self.by_method)
            message = f"{scope['method']} {scope['path']} is not served; use {allowed}"
            raise ApiError(405, message, headers={"allow": allowed})
        # The middleware counts requests by this route.
        scope["state"]["route"] = self.path
        http = Request(scope, receive)
        if scope["method"] != "GET" and scope["query_string"]:
            query_parameters(http, (), "leave it out" if endpoint.body is None else "send it in the body")
        try:
            body = () if endpoint.body is None else (await self.frontends.body_reader.read(http, endpoint.body),)
            response = await endpoint.handler(http, *body)
        except ClientDisconnect:
            self.frontends.metrics.disconnects.inc()
        else:
            await response(scope, receive, send)


def query_parameters(http: Request, known: Sequence[str], advice: str) -> Mapping[str, str]:
    """Returns the parameters of the URL's query.  Raises ApiError for a parameter that is unknown or comes twice.

    known: the names of all parameters.  advice: what to do with an unknown parameter, for the error message."""
    for name, count in Counter(name for name, _ in http.query_params.multi_items()).items():
        if name not in (*known, AZURE_PARAMETER):
            raise ApiError(400, f"the query has no {shown(name)}; {advice}", name)
        if count > 1:
            raise ApiError(400, f"the query has {name} {count} times; send it once", name)
    return http.query_params


def path_not_served_error(path: str, served: Collection[str]) -> ApiError:
    """Returns the error for a path that is not served, with advice.  served: the served paths."""
    if (without_slash := path.rstrip("/")) != path and without_slash in served:
        return ApiError(404, f"{path} is not served; use {without_slash}, without the slash at the end")
    refused_paths = ((prefix, why) for prefix, why in REFUSED_PATHS.items() if prefix not in served)
    why = next((why for prefix, why in refused_paths if path.startswith(prefix)), None)
    if why is not None:
        return ApiError(404, f"OpenAI's {path} is not supported: {why}", code="unsupported")
    batches = "/v1/files, /v1/batches, " if "/v1/batches" in served else ""
    advice = (
        f"use /v1/models, /v1/completions, /v1/chat/completions, /v1/responses, {batches}/tokenize, /detokenize, "
        "/health, /metrics, /version, /openapi.json or /docs"
    )
    # The client's base URL may lack /v1, or have it twice.
    similar_paths = [one for one in served if one.strip("/") and (one == f"/v1{path}" or path.endswith(one))]
    if similar_paths:
        advice = f"use {max(similar_paths, key=len)}, and check the client's base URL"
    return ApiError(404, f"{path} is not served; {advice}")


class FieldRow(NamedTuple):
    """A field of a schema on the page /docs.  kind: the field's type as text."""

    name: str
    kind: str
    summary: str
    required: bool


class Operation(NamedTuple):
    """A method of a path on the page /docs.  body: the name of the body's schema; "" for no body."""

    method: str
    path: str
    summary: str
    body: str
    statuses: str


def page_endpoints(frontends: Frontends, endpoints: Sequence[Endpoint], needs_key: bool) -> list[Endpoint]:
    """Returns the endpoints of the pages that describe `endpoints`.  needs_key: whether clients need an API key."""
    environment = Environment(loader=PackageLoader("espalier", TEMPLATE_FOLDER), autoescape=True, trim_blocks=True)

    def render_page(name: str, **values: Any) -> HTMLResponse:
        """Returns the page of the template file `name`.  values: the variables of the template."""
        text = environment.get_template(name).render(version=__version__, **values)
        return HTMLResponse(text, headers=PAGE_HEADERS)

    @cache
    def openapi_json() -> dict[str, Any]:
        return openapi(endpoints, frontends.names)

    @cache
    def docs_page() -> HTMLResponse:
        return render_page("docs.html", operations=operations_of(openapi_json()), schemas=schemas_of(openapi_json()))

    async def get_openapi(http: Request) -> Response:
        return json_response(openapi_json())

    async def get_docs(http: Request) -> Response:
        return docs_page()

    async def get_start(http: Request) -> Response:
        names = () if needs_key else frontends.names
        models = [(name, frontends.frontend_for(name).inputs.model_info.max_context) for name in names]
        # The address at which the browser reached this server.  The address is quoted, as users copy it into a shell.
        origin = f"http://{quote(http.headers.get('host', 'localhost'), safe='.:[]-_')}"
        examples = list(example_requests(frontends, needs_key))
        return render_page(
            "start.html", models=models, operations=operations_of(openapi_json()), origin=origin, examples=examples
        )

    handler_of_path = {"/": get_start, "/docs": get_docs, "/openapi.json": get_openapi}
    return [Endpoint("GET", path, handler) for path, handler in handler_of_path.items()]


def openapi(endpoints: Sequence[Endpoint], names: Sequence[str]) -> dict[str, Any]:
    """Returns the OpenAPI description.  names: the names of the served models."""
    described = [each for each in endpoints if each.summary]
    bodies = [each.body for each in described if each.body is not None]
    models: list[type[BaseModel]] = [*bodies, ErrorBody]
    refs, schema_definitions = models_json_schema(
        [(model, "validation") for model in models], ref_template="#/components/schemas/{model}"
    )
    schemas = schema_definitions["$defs"]
    for body in bodies:
        model = schemas[refs[body, "validation"]["$ref"].rpartition("/")[2]]["properties"]["model"]
        if model.get("type") == "string":
            model["enum"] = list(names)
    paths: dict[str, Any] = {}
    for each in described:
        error_content = {"application/json": {"schema": refs[ErrorBody, "validation"]}}
        responses = {status: ("an answer", content) for status, content in each.responses.items()}
        operation: dict[str, Any] = {
            "summary": each.summary,
            "responses": {
                str(status): {"description": summary, "content": content}
                for status, (summary, content) in (
                    dict.fromkeys(each.errors, ("an error", error_content)) | responses
                ).items()
            },
        }
        if parameters := PATH_PARAMETER_PATTERN.findall(each.path):
            summary = {"in": "path", "required": True, "schema": {"type": "string"}}
            operation["parameters"] = [{"name": name, **summary} for name in parameters]
        if each.body is not None:
            content = {"application/json": {"schema": refs[each.body, "validation"]}}
            operation["requestBody"] = {"required": True, "content": content}
        paths.setdefault(PATH_PARAMETER_PATTERN.sub(r"{\1}", each.path), {})[each.method.lower()] = operation
    summary = {"title": "Espalier", "version": __version__}
    return {"openapi": "3.1.0", "info": summary, "paths": paths, "components": {"schemas": schemas}}


def example_requests(frontends: Frontends, needs_key: bool) -> Iterator[tuple[str, str]]:
    """Yields example requests as (path, further arguments of curl).  The key is in the shell's ESPALIER_API_KEY."""
    yield "/v1/models", KEY_ARGUMENT if needs_key else ""
    if needs_key:  # other examples contain the model's name, which only clients with a key may see
        return
    frontend = frontends.frontend_for(frontends.names[0])
    path, fields = "/v1/completions", dict[str, Any](prompt="Hello")
    if frontend.inputs.tokenizer is None:
        fields = {"prompt": [1]}
    elif frontend.inputs.tokenizer.template.source:
        path, fields = "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello!"}]}
    body = json.dumps({"model": frontends.names[0], **fields, "max_tokens": EXAMPLE_MAX_TOKENS}, ensure_ascii=False)
    yield path, f'-H "content-type: application/json" -d {shlex.quote(body)}'


def operations_of(openapi_json: dict[str, Any]) -> Iterator[Operation]:
    for path, methods in openapi_json["paths"].items():
        for method, operation in methods.items():
            content = operation.get("requestBody", {}).get("content", {})
            body = next((_type_text(kind["schema"]) for kind in content.values()), "")
            statuses = ", ".join(sorted(operation["responses"]))
            yield Operation(method.upper(), path, operation["summary"], body, statuses)


def schemas_of(openapi_json: dict[str, Any]) -> dict[str, list[FieldRow]]:
    """Returns the fields of each schema in an OpenAPI description, by the schema's name."""
    schemas = openapi_json.get("components", {}).get("schemas", {})
    return {
        _short_schema_name(name): [
            FieldRow(field, _type_text(info), info.get("description", ""), field in schema.get("required", ()))
            for field, info in schema.get("properties", {}).items()
        ]
        for name, schema in schemas.items()
    }


def _type_text(schema: dict[str, Any]) -> str:
    """Returns the type that a JSON schema accepts, as a short text for the page /docs."""
    if ref := schema.get("$ref"):
        return _short_schema_name(ref.rpartition("/")[2])
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(_type_text(each) for each in options))
    if "const" in schema:
        return json.dumps(schema["const"])
    if schema.get("type") == "array":
        return f"list of {_type_text(schema.get('items', {}))}"
    return str(schema.get("type", "any"))


def _short_schema_name(schema: str) -> str:
    """Returns a schema's name for the page.  Pydantic adds the module's path to a name that two modules have; of this
    path only the module stays: "responses: StreamOptions"."""
    return ": ".join(schema.split("__")[-2:])
