"""/openapi.json, and the pages for people: / shows how to ask for what is served, /docs lists endpoints and fields.

The pages fetch nothing, so they work offline.  A browser cannot send an API key, so they need none: where there is one,
they name no model.
"""

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple
from urllib.parse import quote

from jinja2 import Environment, PackageLoader
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from espalier import __version__
from espalier.server.errors import ErrorBody, as_json
from espalier.server.routes import Endpoint, Server

TEMPLATES = "server/html"
# The browser fetches nothing, whatever a page holds.
HEADERS = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"}
KEY = '-H "authorization: Bearer $ESPALIER_API_KEY"'
MAX_TOKENS = 64
PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")


class Field(NamedTuple):
    name: str
    kind: str
    about: str
    required: bool


class Operation(NamedTuple):
    """body: the name of its schema, "" without one."""

    method: str
    path: str
    about: str
    body: str
    statuses: str


def page_endpoints(server: Server, endpoints: Sequence[Endpoint], needs_key: bool) -> list[Endpoint]:
    """The endpoints of the pages that describe `endpoints`."""
    environment = Environment(loader=PackageLoader("espalier", TEMPLATES), autoescape=True, trim_blocks=True)

    def page(name: str, **values: Any) -> HTMLResponse:
        text = environment.get_template(name).render(version=__version__, **values)
        return HTMLResponse(text, headers=HEADERS)

    @cache
    def described() -> dict[str, Any]:
        return openapi(endpoints, server.names)

    @cache
    def fields() -> HTMLResponse:
        return page("docs.html", operations=operations_of(described()), schemas=schemas_of(described()))

    async def describe(http: Request) -> Response:
        return as_json(described())

    async def docs(http: Request) -> Response:
        return fields()

    async def start(http: Request) -> Response:
        names = () if needs_key else server.names
        models = [(name, server.of(name).inputs.facts.max_context) for name in names]
        # The address as the browser wrote it.  What does not belong into a host is escaped, as the shell will read it.
        origin = f"http://{quote(http.headers.get('host', 'localhost'), safe='.:[]-_')}"
        asks = list(asks_of(server, needs_key))
        return page("start.html", models=models, operations=operations_of(described()), origin=origin, asks=asks)

    handles = {"/": start, "/docs": docs, "/openapi.json": describe}
    return [Endpoint("GET", path, handle) for path, handle in handles.items()]


def openapi(endpoints: Sequence[Endpoint], names: Sequence[str]) -> dict[str, Any]:
    """The OpenAPI description.  names: of the served models."""
    shown = [each for each in endpoints if each.about]
    bodies = [each.body for each in shown if each.body is not None]
    models: list[type[BaseModel]] = [*bodies, ErrorBody]
    refs, found = models_json_schema(
        [(model, "validation") for model in models], ref_template="#/components/schemas/{model}"
    )
    schemas = found["$defs"]
    for body in bodies:
        model = schemas[refs[body, "validation"]["$ref"].rpartition("/")[2]]["properties"]["model"]
        if model.get("type") == "string":
            model["enum"] = list(names)
    paths: dict[str, Any] = {}
    for each in shown:
        of_error = {"application/json": {"schema": refs[ErrorBody, "validation"]}}
        answers = {status: ("an answer", content) for status, content in each.answers.items()}
        operation: dict[str, Any] = {
            "summary": each.about,
            "responses": {
                str(status): {"description": about, "content": content}
                for status, (about, content) in (dict.fromkeys(each.errors, ("an error", of_error)) | answers).items()
            },
        }
        if parameters := PARAMETER.findall(each.path):
            about = {"in": "path", "required": True, "schema": {"type": "string"}}
            operation["parameters"] = [{"name": name, **about} for name in parameters]
        if each.body is not None:
            content = {"application/json": {"schema": refs[each.body, "validation"]}}
            operation["requestBody"] = {"required": True, "content": content}
        paths.setdefault(PARAMETER.sub(r"{\1}", each.path), {})[each.method.lower()] = operation
    about = {"title": "Espalier", "version": __version__}
    return {"openapi": "3.1.0", "info": about, "paths": paths, "components": {"schemas": schemas}}


def asks_of(server: Server, needs_key: bool) -> Iterator[tuple[str, str]]:
    """(path, the rest of a curl command): each works as it stands, in a shell that has the key in its environment."""
    yield "/v1/models", KEY if needs_key else ""
    if needs_key:  # a request names its model, and this page does not
        return
    front = server.of(server.names[0])
    path, asked = "/v1/completions", dict[str, Any](prompt="Hello")
    if front.inputs.tokenizer is None:
        asked = {"prompt": [1]}
    elif front.inputs.tokenizer.template_text:
        path, asked = "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello!"}]}
    body = json.dumps({"model": server.names[0], **asked, "max_tokens": MAX_TOKENS}, ensure_ascii=False)
    yield path, f'-H "content-type: application/json" -d {shlex.quote(body)}'


def operations_of(described: dict[str, Any]) -> Iterator[Operation]:
    """described: the OpenAPI description."""
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            content = operation.get("requestBody", {}).get("content", {})
            body = next((_kind(kind["schema"]) for kind in content.values()), "")
            statuses = ", ".join(sorted(operation["responses"]))
            yield Operation(method.upper(), path, operation["summary"], body, statuses)


def schemas_of(described: dict[str, Any]) -> dict[str, list[Field]]:
    """The fields of each schema by name."""
    schemas = described.get("components", {}).get("schemas", {})
    return {
        _name(name): [
            Field(field, _kind(given), given.get("description", ""), field in schema.get("required", ()))
            for field, given in schema.get("properties", {}).items()
        ]
        for name, schema in schemas.items()
    }


def _kind(schema: dict[str, Any]) -> str:
    """What a JSON schema takes, in a few words."""
    if ref := schema.get("$ref"):
        return _name(ref.rpartition("/")[2])
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(_kind(each) for each in options))
    if "const" in schema:
        return json.dumps(schema["const"])
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    return str(schema.get("type", "any"))


def _name(schema: str) -> str:
    """A schema's name without the module that pydantic puts before one of two equal names."""
    return ": ".join(schema.split("__")[-2:])
