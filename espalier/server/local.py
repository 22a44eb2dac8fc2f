"""The server without its sockets: an engine process, the front and the endpoints, for callers in this process."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from starlette.types import ASGIApp

from espalier.server.api import ApiOptions, make_app
from espalier.server.client import ClientOptions, EngineClient
from espalier.server.front import Front, FrontOptions


@asynccontextmanager
async def local_app(
    settings: Mapping[str, Any], client_options: ClientOptions, front_options: FrontOptions, api_options: ApiOptions
) -> AsyncIterator[tuple[Front, ASGIApp]]:
    """settings: keywords of EngineConfig.  Raises EspalierError if the model cannot be loaded."""
    client = EngineClient(settings, client_options)
    try:
        await client.start()
        front = await asyncio.to_thread(Front, client, front_options)
        app, _ = make_app(front, api_options)
        try:
            yield front, app
        finally:
            await front.close()
    finally:
        await client.close()
