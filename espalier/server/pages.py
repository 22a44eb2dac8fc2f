"""The pages for people: / shows what is served and how to ask for it, /docs lists the endpoints and their fields.

They fetch nothing, so they work offline.  A browser cannot send an API key, so they need none: where there is one, they
name no model.
"""

import json
import shlex
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple
from urllib.parse import quote

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment, PackageLoader

from espalier import __version__
from espalier.server.front import Front
from espalier.server.fronts import Fronts

TEMPLATES = "server/html"
# The browser fetches nothing, whatever a page holds.
HEADERS = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"}
KEY = '-H "authorization: Bearer $ESPALIER_API_KEY"'
# Of the framework, for bodies that it checks itself.
NOT_OURS = ("HTTPValidationError", "ValidationError")
MAX_TOKENS = 64


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


def add_pages(app: FastAPI, server: Front | Fronts, needs_key: bool) -> None:
    """Serve / and /docs.  Call it after all other endpoints are added."""
    environment = Environment(loader=PackageLoader("espalier", TEMPLATES), autoescape=True, trim_blocks=True)

    def page(name: str, **values: Any) -> HTMLResponse:
        text = environment.get_template(name).render(version=__version__, **values)
        return HTMLResponse(text, headers=HEADERS)

    @app.get("/", include_in_schema=False)
    async def start(http: Request) -> HTMLResponse:
        names = () if needs_key else server.names
        models = [(name, server.of(name).inputs.facts.max_context) for name in names]
        # The address as the browser wrote it.  What does not belong into a host is escaped, as the shell will read it.
        origin = f"http://{quote(http.headers.get('host', 'localhost'), safe='.:[]-_')}"
        asks = list(asks_of(server, needs_key))
        return page("start.html", models=models, operations=operations_of(app.openapi()), origin=origin, asks=asks)

    @cache
    def fields() -> HTMLResponse:
        described = app.openapi()
        return page("docs.html", operations=operations_of(described), schemas=schemas_of(described))

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return fields()


def asks_of(server: Front | Fronts, needs_key: bool) -> Iterator[tuple[str, str]]:
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
        if name not in NOT_OURS
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
    """A schema's name without the module that the framework puts before one of two equal names."""
    return ": ".join(schema.split("__")[-2:])
