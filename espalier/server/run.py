"""Starts the server, and ends it on a signal.

SIGTERM drains: running requests finish, for at most drain_timeout_s, and new ones are refused.  SIGINT ends running
requests with an error.  A second signal of either kind ends draining at once.  So does the last engine process's end.
"""

import asyncio
import gc
import logging
import signal
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from espalier.errors import EspalierError
from espalier.server.api import ApiOptions, make_app
from espalier.server.batches import Batches
from espalier.server.client import ClientOptions, EngineClient
from espalier.server.connections import Readers, Room, Senders
from espalier.server.descriptors import MAX_ACCEPTED, max_connections, report_full_rarely
from espalier.server.front import Front, FrontOptions
from espalier.server.gate import Gate
from espalier.server.http1 import Connection
from espalier.server.stored import Store
from espalier.startup.checkpoints import BUNDLED, BUNDLED_FILES
from espalier.tokenizer_files import tokenizer_class

log = logging.getLogger("espalier.server")
# Limit for sending pending output to clients at the end.
CLOSE_S = 5
# A client that reads nothing for this long loses its connection, at the end and while draining.
STALLED_AT_CLOSE_S = 1.0
STALLED_AT_DRAIN_S = 5.0
# New objects after which the youngest generation is collected.
COLLECT_AFTER = 20_000
# Whether the template process starts before the first conversation.
STARTS_TEMPLATES = True
# Connections that wait to be accepted.
BACKLOG = 2048
# uvicorn ticks ten times a second.
TICKS_PER_SWEEP = 10


@dataclass(frozen=True)
class ServeOptions:
    """port: 0 chooses a free one, which the log shows; send_timeout_s: how long a client may read nothing, None for no
    limit; batch_dir: for files and batches, None for a server without them."""

    host: str
    port: int
    drain_timeout_s: float
    send_timeout_s: float | None
    client: ClientOptions
    front: FrontOptions
    api: ApiOptions
    batch_dir: Path | None = None


class Server(uvicorn.Server):
    """uvicorn with the shutdown that the module describes."""

    def __init__(
        self,
        config: uvicorn.Config,
        front: Front,
        gate: Gate,
        readers: Readers,
        senders: Senders,
        drain_timeout_s: float,
        batches: Batches | None = None,
    ):
        super().__init__(config)
        self.batches = batches
        self.front = front
        self.gate = gate
        self.readers = readers
        self.senders = senders
        self.drain_timeout_s = drain_timeout_s
        self.loop = asyncio.get_running_loop()
        self.ending: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The signal handler.  It may interrupt anything, so it only schedules `leave` on the event loop."""
        self.loop.call_soon_threadsafe(self.leave, sig == signal.SIGINT)

    def leave(self, at_once: bool) -> None:
        again, self.front.draining = self.front.draining, True
        if not again:
            self.gate.drain()
            if self.batches is not None:
                self.batches.stop()
        if again or at_once:
            self.should_exit = True
            # Kept: the event loop alone would not keep a task alive.
            self.ending = self.loop.create_task(self.front.engines.close())
            return
        log.info("draining: %d requests are in progress", self.gate.num_open)
        self.ending = self.loop.create_task(self._drain())

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        report_full_rarely(self.loop)
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)

    async def _drain(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self.drain_timeout_s):
                while self.gate.num_open:
                    await asyncio.sleep(0.05)
        if self.gate.num_open:
            log.warning("%d requests did not finish within %g s: ending them", self.gate.num_open, self.drain_timeout_s)
        await self.front.engines.close()
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        if counter % TICKS_PER_SWEEP == 0:
            self._sweep(STALLED_AT_DRAIN_S if self.front.draining else None)
            self.senders.sweep(self.server_state.connections, self.loop.time())
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Send pending output, for at most CLOSE_S, and close connections whose client does not read."""
        sweeping = self.loop.create_task(self._sweep_often())
        try:
            await super().shutdown(sockets)
        finally:
            sweeping.cancel()
            self._sweep(0.0)

    async def _sweep_often(self) -> None:
        while True:
            self._sweep(STALLED_AT_CLOSE_S)
            await asyncio.sleep(0.1)

    def _sweep(self, at_most_s: float | None) -> None:
        self.readers.sweep(self.server_state.connections, self.loop.time(), at_most_s)


def url_of(host: str, port: int) -> str:
    """The server's URL.  In a URL an IPv6 address is in brackets (RFC 3986, section 3.2.2)."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def serve(settings: Mapping[str, Any], options: ServeOptions) -> bool:
    """Serve until a signal, or until there is no engine process and will be none.  Returns whether it was a signal.

    settings: keywords of EngineConfig.  Raises EspalierError before anything is served.
    """
    listener = _bound(options.host, options.port)
    store = None if options.batch_dir is None else Store(options.batch_dir)
    client = EngineClient(settings, options.client)
    loading = asyncio.current_task()
    assert loading is not None
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, loading.cancel)
    try:
        # Import the slow module of the front while the engine process loads.
        await asyncio.gather(client.start(), asyncio.to_thread(_import_tokenizer, settings.get("model")))
        front = await asyncio.to_thread(Front, client, options.front)
        loop.remove_signal_handler(signal.SIGTERM)
        front.render_aside()
        if STARTS_TEMPLATES and front.templates is not None:
            await front.templates.start()
        batches = None if store is None else Batches(store, _batch_concurrency(front))
        app, gate = make_app(front, options.api, batches)
        config = uvicorn.Config(
            app,
            # uvicorn calls it for each connection.
            http=partial(Connection, room=Room(max_connections())),  # type: ignore[arg-type]
            log_config=None,
            access_log=False,
            server_header=False,
            # Nothing here depends on a client's address that a proxy adds.
            proxy_headers=False,
            lifespan="off",
            # A WebSocket request gets a normal 404.
            ws="none",
            timeout_graceful_shutdown=CLOSE_S,
            # asyncio accepts as many in one turn; Server.startup lets more of them wait.
            backlog=MAX_ACCEPTED,
        )
        readers = Readers(options.send_timeout_s, front.metrics.stalled_readers)
        senders = Senders(options.api.body_timeout_s, front.metrics.stalled_senders)
        server = Server(config, front, gate, readers, senders, options.drain_timeout_s, batches)
        log.info("serving %s at %s/v1", ", ".join(front.names), url_of(*listener.getsockname()[:2]))
        # The application lives as long as the process: garbage collections must not search it.
        gc.collect()
        gc.freeze()
        # The default, 700 objects, is a few requests: those that arrive together would wait for collections.
        gc.set_threshold(COLLECT_AFTER)
        if batches is not None:
            batches.start(gate, options.api.api_key)
        _allow_reuse(listener)
        ending = asyncio.create_task(_leave_without_engine(client, server))
        await server.serve(sockets=[listener])
        if batches is not None:
            await batches.close()
        await front.close()
        return await ending is None
    finally:
        await client.close()
        listener.close()


async def _leave_without_engine(client: EngineClient, server: Server) -> str | None:
    """End the server once there will be no further engine process.  Returns why, None after a signal."""
    why = await client.ended()
    if why is not None:
        log.error("the server ends without an engine: %s", why)
        server.leave(at_once=True)
    return why


def _batch_concurrency(front: Front) -> int:
    """Requests of a batch at once: three quarters of the slots, and at most half of what the server holds.

    No running request makes way for an arrival, so without free slots every other request would wait.
    """
    slots = front.engines.num_slots
    return max(1, min(slots - slots // 4, (slots + front.options.max_queue) // 2))


def _import_tokenizer(model: str | None) -> None:
    """Import the class that will load the tokenizer.

    model: as the user names it; None for one without a tokenizer.  For an id of the Hugging Face hub, whose files are
    not known yet, AutoTokenizer is imported.
    """
    if model is not None:
        tokenizer_class(BUNDLED_FILES / "target" if model == BUNDLED else Path(model).expanduser())


def _bound(host: str, port: int) -> socket.socket:
    """The listening socket, bound before the model is loaded so that a port in use fails at once."""
    # First without SO_REUSEADDR: with it two servers that load at the same time could both bind.  Then with it: the
    # connections of a server that has ended keep its port for a minute.
    with suppress(OSError, OverflowError):
        return _bind(host, port, reuse=False)
    try:
        return _bind(host, port, reuse=True)
    except (OSError, OverflowError) as error:
        raise EspalierError(f"--host {host} --port {port} cannot be used ({error}); choose another") from None


def _allow_reuse(listener: socket.socket) -> None:
    """Let the next server bind the port while connections of this one keep it.  For a socket that listens soon."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


def _bind(host: str, port: int, reuse: bool) -> socket.socket:
    """Raises OSError, or OverflowError for a port that does not exist."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only on sockets that name their protocol.  Without it an event waits for the client's
    # acknowledgement of the event before, which comes up to 40 ms late.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError):
        listener.close()
        raise
    return listener
