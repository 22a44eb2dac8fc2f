"""What is served: endpoints by path and method, and the errors for any other path."""

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from espalier.server.errors import ApiError
from espalier.server.front import Front, Fronts

# One model, or several.
Server = Front | Fronts
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
OBJECT: dict[str, Any] = {"type": "object", "additionalProperties": True}
JSON: Mapping[str, Any] = {"application/json": {"schema": OBJECT}}


@dataclass(frozen=True)
class Endpoint:
    """One method of one path.

    handle: from the request, and the record of its body if it has one, to the response; body: the record's model.  The
    rest is for the OpenAPI page: about: one line, "" leaves the endpoint out; answers: statuses without an error, with
    the content types and schemas of each; errors: the other statuses.
    """

    method: str
    path: str
    handle: Callable[..., Awaitable[Response]]
    about: str = ""
    body: type[BaseModel] | None = None
    errors: Sequence[int] = ()
    answers: Mapping[int, Mapping[str, Any]] = field(default_factory=lambda: {200: JSON})


def make_router(server: Server, endpoints: Sequence[Endpoint]) -> Router:
    """The application without its gate, which answers the ApiErrors that this one raises."""
    by_path: dict[str, dict[str, Endpoint]] = {}
    for endpoint in endpoints:
        by_path.setdefault(endpoint.path, {})[endpoint.method] = endpoint

    async def default(scope: Scope, receive: Receive, send: Send) -> None:
        raise not_served(scope["path"], by_path)

    # No redirects for a trailing slash: behind a proxy their http:// URL with this host would be wrong.
    routes = [Route(path, Path(server, path, by_method)) for path, by_method in by_path.items()]
    return Router(routes, redirect_slashes=False, default=default)


class Path:
    """The endpoints of one path, as an ASGI application."""

    def __init__(self, server: Server, path: str, by_method: Mapping[str, Endpoint]):
        self.server = server
        self.path = path
        self.by_method = by_method

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ApiError."""
        endpoint = self.by_method.get(scope["method"])
        if endpoint is None:
            raise self._wrong_method(scope)
        # The gate counts requests by it.
        scope["state"]["route"] = self.path
        http = Request(scope, receive)
        try:
            body = () if endpoint.body is None else (await self.server.bodies.read(http, endpoint.body),)
            response = await endpoint.handle(http, *body)
        except ClientDisconnect:
            self.server.metrics.disconnects.inc()
        else:
            await response(scope, receive, send)

    def _wrong_method(self, scope: Scope) -> ApiError:
        # The gate serves HEAD as GET.
        allowed = ", ".join("GET, HEAD" if each == "GET" else each for each in self.by_method)
        error = ApiError(405, f"{scope['method']} {scope['path']} is not served; use {allowed}")
        error.headers = {"allow": allowed}
        return error


def not_served(path: str, served: Collection[str]) -> ApiError:
    """The error for a path that is not among those that are served."""
    if (meant := path.rstrip("/")) != path and meant in served:
        return ApiError(404, f"{path} is not served; use {meant}, without the slash at the end")
    refused = ((prefix, why) for prefix, why in REFUSED_PATHS.items() if prefix not in served)
    why = next((why for prefix, why in refused if path.startswith(prefix)), None)
    if why is not None:
        return ApiError(404, f"OpenAI's {path} is not supported: {why}", code="unsupported")
    batches = "/v1/files, /v1/batches, " if "/v1/batches" in served else ""
    use = (
        f"use /v1/models, /v1/completions, /v1/chat/completions, /v1/responses, {batches}/tokenize, /detokenize, "
        "/health, /metrics, /version, /openapi.json or /docs"
    )
    # As by a base URL without /v1, or with it where the client adds it.
    near = [one for one in served if one.strip("/") and (one == f"/v1{path}" or path.endswith(one))]
    if near:
        use = f"use {max(near, key=len)}, and check the client's base URL"
    return ApiError(404, f"{path} is not served; {use}")
