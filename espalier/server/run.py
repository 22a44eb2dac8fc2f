"""Starts the server, and stops it after a signal.

SIGTERM drains: running requests finish within drain_timeout_s, and new requests are refused.  SIGINT ends running
requests with an error.  A second signal, or the end of the last engine process, ends draining at once.
"""

import asyncio
import gc
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from operator import le
from pathlib import Path
from types import MappingProxyType
from typing import Any

from starlette.types import ASGIApp

from espalier.errors import EspalierError, require_int, require_number
from espalier.limits import check_bool
from espalier.server.api import ApiOptions, make_app
from espalier.server.batch_store import BatchStore
from espalier.server.batches import BatchRunner
from espalier.server.client import ClientOptions, EngineClient
from espalier.server.connections import (
    MAX_ACCEPTS_PER_LOOP_TURN,
    OpenConnections,
    log_failed_accepts_rarely,
    max_connections,
)
from espalier.server.frontend import FrontendOptions, ModelFrontend
from espalier.server.http1 import Connection
from espalier.server.middleware import RequestMiddleware
from espalier.startup.checkpoints import BUNDLED, BUNDLED_FILES
from espalier.tokenizer_files import tokenizer_class

log = logging.getLogger("espalier.server")
# The time limit for sending pending output to clients at shutdown.
CLOSE_TIMEOUT_S = 5
# Clients that read nothing for these times are disconnected: when the server ends (CLOSE), and while it drains (DRAIN).
MAX_STALL_AT_CLOSE_S = 1.0
MAX_STALL_AT_DRAIN_S = 5.0
GC_THRESHOLD = 20_000
# If True, the template process starts with the server instead of with the first chat request.
PRESTARTS_TEMPLATE_PROCESS = True
# The most bytes that the system buffers for a slow client.
MAX_UNSENT_BYTES = 65536
# The most connections that may wait to be accepted.
ACCEPT_BACKLOG = 2048
# The smallest allowed value of each option that is a number.
MIN_OPTION_VALUES: Mapping[str, int] = MappingProxyType(
    dict.fromkeys("port max_queue request_timeout body_timeout send_timeout load_timeout drain_timeout".split(), 0)
    | dict.fromkeys("engine_timeout max_body_bytes max_file_bytes tokens_per_replica fronts".split(), 1)
)
BOOLEAN_OPTIONS = ("strict_fields", "allow_special_tokens_in_messages", "log_json")


@dataclass(frozen=True)
class ServeOptions:
    """Settings of a server process.

    port: 0 for a free port, which the log shows.  send_timeout_s: a client that reads nothing for this time is
    disconnected; None for no limit.  batch_dir: the directory for files and batches; None for a server without batches.
    """

    host: str
    port: int
    drain_timeout_s: float
    send_timeout_s: float | None
    client: ClientOptions
    frontend: FrontendOptions
    api: ApiOptions
    batch_dir: Path | None = None


def check_options(options: Mapping[str, Any], name_in_errors: Callable[[str], str] = str) -> None:
    """Refuse options with wrong values.  Raises EspalierError.

    options: values by option name; None for an option that was not given.  name_in_errors: turns an option's name into
    the name for error messages.
    """
    for name, least in MIN_OPTION_VALUES.items():
        if name.endswith("_timeout"):
            allowed = f"seconds, {least} or more"
            require_number(name_in_errors(name), options.get(name), partial(le, least), allowed, optional=True)
        else:
            require_int(name_in_errors(name), options.get(name), least, optional=True)
    for name in BOOLEAN_OPTIONS:
        if (value := options.get(name)) is not None:
            check_bool(name_in_errors(name), value)


@dataclass(eq=False)
class HttpServer:
    """Accepts connections until `should_exit` is set at the end of a shutdown (see the module's docstring)."""

    app: ASGIApp
    frontend: ModelFrontend
    middleware: RequestMiddleware
    connections: OpenConnections
    drain_timeout_s: float
    batches: BatchRunner | None = None
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    should_exit: asyncio.Event = field(default_factory=asyncio.Event)
    shutdown_task: asyncio.Task[None] | None = None

    def begin_shutdown(self, aborts_requests: bool) -> None:
        """Begin to drain.  aborts_requests: instead end the running requests at once, as a second call always does."""
        was_draining, self.frontend.draining = self.frontend.draining, True
        if not was_draining:
            self.middleware.drain()
            if self.batches is not None:
                self.batches.stop()
        if was_draining or aborts_requests:
            self.should_exit.set()
            # The task is kept in an attribute, because the event loop holds only a weak reference to it.
            self.shutdown_task = self.loop.create_task(self.frontend.engines.close())
            return
        log.info("draining: %d requests are in progress", self.middleware.num_open)
        self.shutdown_task = self.loop.create_task(self._drain())

    async def _drain(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self.drain_timeout_s):
                while self.middleware.num_open:
                    await asyncio.sleep(0.05)
        if self.middleware.num_open:
            log.warning(
                "%d requests did not finish within %g s: ending them", self.middleware.num_open, self.drain_timeout_s
            )
        await self.frontend.engines.close()
        self.should_exit.set()

    async def serve(self, listener: socket.socket) -> None:
        """Answer requests until `should_exit` is set.  Then send pending output, for CLOSE_TIMEOUT_S at most."""
        log_failed_accepts_rarely(self.loop)
        for number in (signal.SIGTERM, signal.SIGINT):
            self.loop.add_signal_handler(number, self.begin_shutdown, number == signal.SIGINT)
        connect = partial(Connection, self.app, self.connections)
        # asyncio accepts `backlog` connections per iteration of the event loop.  More connections wait in the kernel.
        accepting = await self.loop.create_server(connect, sock=listener, backlog=MAX_ACCEPTS_PER_LOOP_TURN)
        listener.listen(ACCEPT_BACKLOG)
        sweeping = self.loop.create_task(self._close_stalled_periodically())
        try:
            await self.should_exit.wait()
        finally:
            sweeping.cancel()
            accepting.close()
        await self._close_connections()
        for number in (signal.SIGTERM, signal.SIGINT):
            self.loop.remove_signal_handler(number)

    async def _close_stalled_periodically(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self.connections.close_stalled(self.loop.time(), MAX_STALL_AT_DRAIN_S if self.frontend.draining else None)

    async def _close_connections(self) -> None:
        """Send pending output for CLOSE_TIMEOUT_S at most, and close all connections."""
        for connection in self.connections:
            connection.close_after_response()
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                while self.connections:
                    self.connections.close_stalled(self.loop.time(), MAX_STALL_AT_CLOSE_S)
                    await asyncio.sleep(0.05)
        for connection in self.connections:
            connection.transport.abort()


def url_of(host: str, port: int) -> str:
    """Returns the server's URL.  In a URL, an IPv6 address is in brackets (RFC 3986, section 3.2.2)."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def serve(settings: Mapping[str, Any], options: ServeOptions) -> bool:
    """Serve until a signal, or until the last engine process has ended.  Returns whether a signal ended the server.

    settings: keyword arguments of EngineConfig.  Raises EspalierError if the server cannot start.
    """
    listener = bind_listener(options.host, options.port)
    store = None if options.batch_dir is None else BatchStore(options.batch_dir)
    client = EngineClient(settings, options.client)
    loading = asyncio.current_task()
    assert loading is not None
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, loading.cancel)
    try:
        # The tokenizer's module is slow to import, so it is imported while the engine process loads the model.
        await asyncio.gather(client.start(), asyncio.to_thread(_import_tokenizer, settings.get("model")))
        frontend = await asyncio.to_thread(ModelFrontend, client, options.frontend)
        loop.remove_signal_handler(signal.SIGTERM)
        frontend.render_in_helper_process()
        if PRESTARTS_TEMPLATE_PROCESS and frontend.template_process is not None:
            # The process is started early, because its imports take a second or two.
            await frontend.template_process.helper.start()
        batches = None if store is None else BatchRunner(store, _batch_concurrency(frontend))
        app, middleware = make_app(frontend, options.api, batches)
        limits = max_connections(), options.send_timeout_s, options.api.body_timeout_s
        connections = OpenConnections(frontend.metrics, *limits)
        server = HttpServer(app, frontend, middleware, connections, options.drain_timeout_s, batches)
        log.info("serving %s at %s/v1", ", ".join(frontend.names), url_of(*listener.getsockname()[:2]))
        # The application lives as long as the process, so the garbage collector need not search it.
        gc.collect()
        gc.freeze()
        # With the default threshold of 700 objects, a garbage collection would delay every few requests.
        gc.set_threshold(GC_THRESHOLD)
        if batches is not None:
            batches.start(middleware, options.api.api_key)
        # With this option, a later server may bind the port while old connections of this server still use the port.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        ending = asyncio.create_task(_shut_down_without_engine(client, server))
        await server.serve(listener)
        if batches is not None:
            await batches.close()
        await frontend.close()
        return await ending is None
    finally:
        await client.close()
        listener.close()


@asynccontextmanager
async def in_process_app(
    settings: Mapping[str, Any],
    client_options: ClientOptions,
    frontend_options: FrontendOptions,
    api_options: ApiOptions,
) -> AsyncIterator[tuple[ModelFrontend, ASGIApp]]:
    """Yields (the model's frontend, the ASGI application), for requests of this process, without sockets.

    settings: keyword arguments of EngineConfig.  Raises EspalierError if the model cannot be loaded.
    """
    client = EngineClient(settings, client_options)
    try:
        await client.start()
        frontend = await asyncio.to_thread(ModelFrontend, client, frontend_options)
        app, _ = make_app(frontend, api_options)
        try:
            yield frontend, app
        finally:
            await frontend.close()
    finally:
        await client.close()


async def _shut_down_without_engine(client: EngineClient, server: HttpServer) -> str | None:
    """Shut the server down when the last engine process has ended.  Returns the reason; None after a signal."""
    why = await client.wait_until_ended()
    if why is not None:
        log.error("the server ends without an engine: %s", why)
        server.begin_shutdown(aborts_requests=True)
    return why


def _batch_concurrency(frontend: ModelFrontend) -> int:
    """Returns how many requests of a batch run at once: 3/4 of the slots, but at most (slots + max_queue) / 2.

    A batch must not fill all slots, because other requests would wait until a request of the batch ends.
    """
    slots = frontend.engines.num_slots
    return max(1, min(slots - slots // 4, (slots + frontend.options.max_queue) // 2))


def _import_tokenizer(model: str | None) -> None:
    """Import the module that will load the tokenizer.

    model: the directory or id that the user gave, or None.  Imports AutoTokenizer if the tokenizer's class is unknown.
    """
    if model is not None:
        tokenizer_class(BUNDLED_FILES / "target" if model == BUNDLED else Path(model).expanduser())


def bind_listener(host: str, port: int) -> socket.socket:
    """Returns a bound socket.  Call this before the model is loaded, so that a port in use is refused at once."""
    # With SO_REUSEADDR, two servers that load at the same time could bind the same port.  So the first try is without
    # this option.  The second try sets it, because an ended server's old connections keep the port for a minute.
    with suppress(OSError, OverflowError):
        return _bind(host, port, reuse_address=False)
    try:
        return _bind(host, port, reuse_address=True)
    except (OSError, OverflowError) as error:
        raise EspalierError(f"--host {host} --port {port} cannot be used ({error}); choose another") from None


def _bind(host: str, port: int, reuse_address: bool) -> socket.socket:
    """Returns a bound socket.  Raises OSError, or OverflowError for a port that does not exist."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only on sockets made with IPPROTO_TCP.  Without TCP_NODELAY, an event waits up to 40 ms
    # for the acknowledgement of the event before.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse_address)
    # Accepted connections inherit this option.  The kernel then buffers little, so slow clients are noticed soon.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError):
        listener.close()
        raise
    return listener
