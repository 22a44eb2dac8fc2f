"""The API server as Ray Serve's ingress deployment: the server's endpoints, with a pool of engine replicas per model.

Ray Serve's proxy handles HTTP, and passes each request as ASGI messages.  The code of espalier/server does the rest:
bodies, fields, errors, streams, the queue's limit, metrics.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from espalier.serve_ray.build import Service
from espalier.serve_ray.pool import EnginePool
from espalier.server import logs
from espalier.server.api import make_app
from espalier.server.frontend import ModelFrontend, MultiModelFrontend
from espalier.server.metrics import Metrics

log = logging.getLogger("espalier.server")


class ApiServerIngress:
    """The deployment of the API server.  handles: Ray's handles of the replica deployments, one per model."""

    def __init__(self, service: Service, handles: Sequence[Any]):
        logs.set_up_logging(service.log_level, service.log_json)
        self.service = service
        self.handles = handles
        self.pools: list[EnginePool] = []
        self.frontends: MultiModelFrontend | None = None

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """Wait until each model has a ready replica, then return the ASGI application.  Ray Serve calls this hook."""
        service, num_api_servers = self.service, self.service.num_api_servers
        for model, handle in zip(service.models, self.handles, strict=True):
            self.pools.append(
                EnginePool(handle, model.name, model.replicas.max_replicas, 1 / num_api_servers, is_replica_lost)
            )
        await asyncio.gather(*(pool.start() for pool in self.pools))
        metrics = Metrics(self.pools)
        frontends = []
        for pool, model in zip(self.pools, service.models, strict=True):
            # max_queue is for all API servers together, so each API server gets an equal share.
            options = replace(model.frontend, max_queue=-(-model.frontend.max_queue // num_api_servers))
            frontends.append(await asyncio.to_thread(ModelFrontend, pool, options, metrics))
            frontends[-1].render_in_helper_process()
        self.frontends = MultiModelFrontend(frontends, metrics)
        app, _ = make_app(self.frontends, service.api)
        log.info("the API server serves %s", ", ".join(self.frontends.names))
        return AppBehindProxy(app)

    async def __del__(self) -> None:
        for pool in self.pools:
            await pool.close()
        if self.frontends is not None:
            await self.frontends.close()


def is_replica_lost(error: BaseException) -> bool:
    """Returns whether an exception of a call to a replica means that the replica has ended.  A RayTaskError comes from
    the replica's own code, so the replica still runs."""
    return isinstance(error, RayError | RayServeException) and not isinstance(error, RayTaskError)


class AppBehindProxy:
    """Adapts an ASGI application to Ray Serve's proxy.

    The proxy adds the header x-request-id, so the application's x-request-id is removed.  The application gets paths
    without the route prefix."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _answer_lifespan(receive, send)
        elif scope["type"] == "http":
            await self._answer(scope, receive, send)
        else:
            await send({"type": "websocket.close"})

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_without_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [each for each in message["headers"] if each[0].lower() != b"x-request-id"]
            await send(message)

        route_prefix = scope.get("root_path", "")
        app_scope = {**scope, "path": scope["path"].removeprefix(route_prefix) or "/", "root_path": ""}
        await self.app(app_scope, receive, send_without_id)


async def _answer_lifespan(receive: Receive, send: Send) -> None:
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return
