"""The API server's client of the engine process.  Starts the process, submits prompts, and distributes the output.

All code runs on one event loop.  If the process exits or sends nothing for engine_timeout_s, every Generation in flight
fails with EngineGone.  With the option `restart`, a new process is then started.
"""

import asyncio
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from espalier.child_process import environment, signals_blocked
from espalier.errors import EspalierError
from espalier.inputs import ModelInfo
from espalier.server import logs, protocol
from espalier.server.protocol import SHUTTING_DOWN, EngineGone, EngineStats, Generation, OutputPart, SubmittedPrompt

# Collected prompts are sent after this many iterations of the event loop without a new prompt.  A request on a new
# connection needs five iterations: accept, make the transport, watch the socket, read, handle.
MAX_IDLE_LOOP_TURNS = 6
MAX_SEND_DELAY_S = 0.01
log = logging.getLogger("espalier.server")
ENGINE_PROCESS_MODULE = "espalier.server.worker"
SHUTDOWN_TIMEOUT_S = 10.0
# After this number of failed starts in a row, no process is started.  The pause between two starts doubles each time.
MAX_FAILED_STARTS = 5
FIRST_RESTART_PAUSE_S = 1.0
LOADING_LOG_INTERVAL_S = 30.0


class PromptBatcher:
    """Collects prompts, and sends them to the engine together.

    Prompts wait until no new prompt has arrived for MAX_IDLE_LOOP_TURNS iterations of the event loop, until they fill a
    prefill pass, or until MAX_SEND_DELAY_S is over.
    send: sends a list of prompts in one message.  tokens_per_prefill: how many tokens fill a prefill pass.
    """

    def __init__(self, send: Callable[[list[SubmittedPrompt]], None]):
        self.send = send
        self.tokens_per_prefill = 0
        self._unsent_prompts: list[SubmittedPrompt] = []
        self._num_unsent_tokens = 0
        self._send_deadline = 0.0
        self._num_idle_loop_turns = 0
        self._next_check: asyncio.Handle | None = None
        # Set when the waiting prompts are sent.  None until `add` is called for the first time.
        self._flush_event: asyncio.Event | None = None

    def add(self, submitted: SubmittedPrompt) -> None:
        """Queue a prompt.  The queued prompts are sent at once if they fill a prefill pass, else later."""
        loop = asyncio.get_running_loop()
        if not self._unsent_prompts:
            self._send_deadline, self._flush_event = loop.time() + MAX_SEND_DELAY_S, asyncio.Event()
        self._unsent_prompts.append(submitted)
        self._num_unsent_tokens += len(submitted.prompt)
        self._num_idle_loop_turns = 0
        if self._num_unsent_tokens >= self.tokens_per_prefill or loop.time() >= self._send_deadline:
            self.flush()
        elif self._next_check is None:
            self._next_check = loop.call_soon(self._flush_if_idle)

    async def wait_until_sent(self) -> None:
        """Wait until all added prompts are sent, and for at least one iteration of the event loop."""
        if self._unsent_prompts and self._flush_event is not None:
            await self._flush_event.wait()
        else:
            await asyncio.sleep(0)

    def flush(self) -> None:
        """Send the waiting prompts now."""
        if waiting := self.clear():
            self.send(waiting)

    def clear(self) -> list[SubmittedPrompt]:
        """Remove and return the waiting prompts."""
        if self._next_check is not None:
            self._next_check.cancel()
            self._next_check = None
        if self._flush_event is not None:
            self._flush_event.set()
        waiting, self._unsent_prompts, self._num_unsent_tokens = self._unsent_prompts, [], 0
        return waiting

    def _flush_if_idle(self) -> None:
        """Send the prompts if they have waited long enough, else check again in the event loop's next iteration."""
        loop = asyncio.get_running_loop()
        if self._num_idle_loop_turns == MAX_IDLE_LOOP_TURNS or loop.time() >= self._send_deadline:
            self.flush()
            return
        self._num_idle_loop_turns += 1
        self._next_check = loop.call_soon(self._flush_if_idle)


@dataclass(frozen=True)
class ClientOptions:
    """Settings of an EngineClient.

    restart: start a new engine process if the engine process ends.  heartbeat_s: an idle engine sends a message after
    this time.  engine_timeout_s: a loaded engine that sends nothing for this time is killed.  load_timeout_s: the time
    limit for loading the model, None for no limit.  worker_module: the Python module that the engine process runs.
    learn: the fields of LearnConfig; None for an engine without online learning.
    """

    restart: bool = False
    heartbeat_s: float = 1.0
    engine_timeout_s: float = 120.0
    load_timeout_s: float | None = 1800.0
    log_level: str = "info"
    log_json: bool = False
    worker_module: str = ENGINE_PROCESS_MODULE
    learn: dict[str, Any] | None = None


class EngineClient:
    """Runs one engine process.  settings: the keyword arguments of EngineConfig, as JSON values.

    state: "starting", "ready", "gone" or "closed".  unavailable_reason: the reason for a state other than "ready".
    abort_steps: how many aborts took N engine steps, by N.
    """

    def __init__(self, settings: Mapping[str, Any], options: ClientOptions):
        self.settings = dict(settings)
        self.options = options
        self.state = "starting"
        self.unavailable_reason = "the model is being loaded"
        self.model_info: ModelInfo | None = None
        self.config: dict[str, Any] = {}
        self.report = protocol.EngineReport()
        self.abort_steps: Counter[int] = Counter()
        self.num_restarts = 0
        self.process: asyncio.subprocess.Process | None = None
        self._generations: dict[str, Generation] = {}
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._prompt_batcher = PromptBatcher(lambda prompts: self._send(protocol.SubmitPrompts(prompts)))
        # The folder of the sockets, which only this user can read.  None before `start`.
        self._socket_folder: Path | None = None
        self._last_message_at = 0.0
        self._num_submitted = 0
        self._supervisor: asyncio.Task[None] | None = None
        self._close_task: asyncio.Task[None] | None = None

    @property
    def open_samples(self) -> int:
        return sum(generation.num_running[name] for name, generation in self._generations.items())

    @property
    def num_slots(self) -> int:
        return int(self.config["max_batch"])

    @property
    def max_slots(self) -> int:
        return self.num_slots

    def engine_stats(self) -> list[EngineStats]:
        return [EngineStats({}, self.state == "ready", self.num_restarts, self.report, self.abort_steps)]

    async def start(self) -> None:
        """Start the process and wait until its model is loaded.  Raises EspalierError if that fails."""
        self._socket_folder = Path(tempfile.mkdtemp(prefix="espalier-"))
        try:
            await self._start()
        except BaseException:
            try:
                await self._end_process()
            finally:
                self._close_socket()
                self._remove_folder()
            raise
        self._supervisor = asyncio.create_task(self._supervise())

    def require_running(self) -> None:
        if self.state != "ready":
            raise EngineGone(self.unavailable_reason)

    def submit(self, prompts: Sequence[list[int]], template: SubmittedPrompt) -> Generation:
        """Queue prompts (token ids) for the engine.  template: the other fields of each SubmittedPrompt."""
        self.require_running()
        submitted_prompts = template.for_prompts(prompts, self._num_submitted)
        self._num_submitted += len(prompts)
        generation = Generation(self, [submitted.name for submitted in submitted_prompts], template.params.n)
        for submitted in submitted_prompts:
            self._generations[submitted.name] = generation
            self._prompt_batcher.add(submitted)
        return generation

    async def wait_until_sent(self) -> None:
        await self._prompt_batcher.wait_until_sent()

    def abort(self, generation: Generation) -> None:
        """Abort the generation's running samples and drop their output."""
        for name in generation.num_running:
            if self._generations.pop(name, None) is not None and self.state == "ready":
                self._prompt_batcher.flush()
                self._send(protocol.AbortPrompt(name))

    async def wait_until_ended(self) -> str | None:
        """Wait until the last engine process has ended.  Returns the reason; None after `close`."""
        assert self._supervisor is not None
        await asyncio.wait({self._supervisor})
        return None if self.state == "closed" else self.unavailable_reason

    async def close(self) -> None:
        """End the engine process; kill it if it does not exit.  A second call waits until the first call has ended."""
        if self._close_task is None:
            self.state, self.unavailable_reason = "closed", SHUTTING_DOWN
            self._fail_all(SHUTTING_DOWN)
            self._close_task = asyncio.create_task(self._close())
        await asyncio.shield(self._close_task)

    async def _close(self) -> None:
        if self._supervisor is not None:
            self._supervisor.cancel()
            with suppress(asyncio.CancelledError):
                await self._supervisor
        try:
            await self._end_process()
        finally:
            self._close_socket()
            self._context.term()
            self._remove_folder()

    def _remove_folder(self) -> None:
        if self._socket_folder is not None:
            shutil.rmtree(self._socket_folder, ignore_errors=True)

    # The process

    async def _start(self) -> None:
        address = f"ipc://{self._socket_folder}/{self.num_restarts}"
        socket: zmq.asyncio.Socket = self._context.socket(zmq.PAIR)
        socket.set_hwm(0)
        socket.linger = 0
        socket.bind(address)
        self._socket = socket
        with signals_blocked(signal.SIGINT):
            self.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", self.options.worker_module, address, str(os.getpid())),
                stdin=asyncio.subprocess.DEVNULL,
                env=environment(),
            )
        options = self.options
        self._send(
            protocol.StartEngine(self.settings, options.heartbeat_s, options.log_level, options.log_json, options.learn)
        )
        reply = await self._first_message(socket, self.process)
        if not isinstance(reply, protocol.EngineReady):
            raise EspalierError(
                reply.error if isinstance(reply, protocol.EngineFailed) else "the engine process broke the protocol"
            )
        self.model_info, self.config, self.report = reply.model_info, reply.config, protocol.EngineReport()
        self._prompt_batcher.tokens_per_prefill = int(self.config["chunk_size"])
        self._last_message_at = asyncio.get_running_loop().time()
        self.state, self.unavailable_reason = "ready", ""

    async def _first_message(self, socket: zmq.asyncio.Socket, process: asyncio.subprocess.Process) -> Any:
        """Returns the engine process's first message.  Raises EspalierError if the process exits or is too slow."""
        message = asyncio.ensure_future(socket.recv())
        exited = asyncio.create_task(process.wait())
        limit_s, loop = self.options.load_timeout_s, asyncio.get_running_loop()
        began_at = loop.time()
        try:
            while not (message.done() or exited.done()):
                loading_s = loop.time() - began_at
                if limit_s is not None and loading_s >= limit_s:
                    raise EspalierError(
                        f"the engine process (pid {process.pid}) did not load its model within {limit_s:g} s and was "
                        "ended; if the model was still being read or downloaded, raise --load-timeout"
                    )
                if loading_s >= LOADING_LOG_INTERVAL_S:
                    log.info("the engine process (pid %d) is still loading, %.0f s so far", process.pid, loading_s)
                wait = LOADING_LOG_INTERVAL_S if limit_s is None else min(LOADING_LOG_INTERVAL_S, limit_s - loading_s)
                await asyncio.wait({message, exited}, timeout=wait, return_when=asyncio.FIRST_COMPLETED)
            if not message.done():
                # The last message may still be in transit.
                await asyncio.wait({message}, timeout=1.0)
            if not message.done():
                raise EspalierError(f"the engine process {_exit_description(process)} while it was loading")
            return protocol.decode_from_engine(message.result())
        finally:
            message.cancel()
            exited.cancel()

    async def _supervise(self) -> None:
        """Read messages until the process has ended.  With options.restart, then start a new process and read on."""
        num_failed_starts = 0
        while True:
            if self.state == "ready":
                self._fail_all(await self._read_until_process_ends())
                num_failed_starts = 0
            await self._end_process()
            self._close_socket()
            if not self.options.restart or num_failed_starts == MAX_FAILED_STARTS:
                return
            try:
                self.num_restarts += 1
                await self._start()
                log.warning("the engine process was restarted")
            except (EspalierError, OSError, msgspec.MsgspecError) as error:
                num_failed_starts += 1
                self.unavailable_reason = f"the engine process cannot be restarted: {error}"
                log.error("%s; this was try %d of %d", self.unavailable_reason, num_failed_starts, MAX_FAILED_STARTS)
                if num_failed_starts < MAX_FAILED_STARTS:
                    await asyncio.sleep(FIRST_RESTART_PAUSE_S * 2 ** (num_failed_starts - 1))

    async def _read_until_process_ends(self) -> str:
        """Read messages until the process has ended or is silent for engine_timeout_s.  Returns the reason as text."""
        assert self.process is not None
        reading = asyncio.create_task(self._read_messages())
        exited = asyncio.create_task(self.process.wait())
        try:
            while True:
                await asyncio.wait({reading, exited}, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
                if exited.done():
                    # Messages that the process sent before its exit may still be unread.
                    await asyncio.wait({reading}, timeout=1.0)
                if reading.done():
                    return _why_reading_ended(reading)
                if exited.done():
                    return f"the engine process {_exit_description(self.process)}"
                silence = asyncio.get_running_loop().time() - self._last_message_at
                if silence > self.options.engine_timeout_s:
                    return f"the engine process sent nothing for {silence:.0f} s and was ended"
        finally:
            reading.cancel()
            exited.cancel()

    async def _read_messages(self) -> str:
        """Pass on the engine's messages until it sends EngineFailed.  Returns the reason of the failure."""
        assert self._socket is not None
        while True:
            message = protocol.decode_from_engine(await self._socket.recv())
            self._last_message_at = asyncio.get_running_loop().time()
            if isinstance(message, protocol.StepOutput):
                if message.report is not None:
                    self.report = message.report
                    self.abort_steps.update(message.report.abort_steps)
                for part in message.parts:
                    self._deliver(part)
            elif isinstance(message, protocol.PromptRefused):
                self._fail_request(message.name, protocol.refusal_error(message))
            elif isinstance(message, protocol.EngineFailed):
                return f"the engine stopped: {message.error}"

    def _deliver(self, part: OutputPart) -> None:
        generation = self._generations.get(part.name)
        if generation is None:  # its request was closed
            return
        generation.add(part)
        if generation.num_running[part.name] == 0:
            del self._generations[part.name]

    def _fail_request(self, prompt_name: str, error: Exception) -> None:
        generation = self._generations.pop(prompt_name, None)
        if generation is not None:
            self.abort(generation)
            generation.fail(error)

    def _fail_all(self, why: str) -> None:
        """Make every Generation in flight fail with EngineGone.  why: the error's text."""
        self._prompt_batcher.clear()
        if self.state == "ready":
            self.state, self.unavailable_reason = "gone", why
            log.error("%s; %d requests in flight", why, len(self._generations))
        for name in list(self._generations):
            log.error("ended: %s", why, extra=logs.log_extra(name))
            self._fail_request(name, EngineGone(why))

    async def _end_process(self) -> None:
        process = self.process
        if process is None or process.returncode is not None:
            return
        try:
            if self.state == "closed" and self._socket is not None:
                self._send(protocol.Shutdown())
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(process.wait(), SHUTDOWN_TIMEOUT_S)
        finally:
            # The process is also killed if the wait above is cancelled.
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()

    def _send(self, message: protocol.MessageToEngine) -> None:
        """Send a message.  Sending never blocks, because the socket's queue has no size limit."""
        assert self._socket is not None
        self._socket.send(protocol.encode(message))

    def _close_socket(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _why_reading_ended(reading: asyncio.Task[str]) -> str:
    """Returns why `_read_messages` ended: the engine failed, or sent a message that cannot be decoded."""
    if (error := reading.exception()) is None:
        return reading.result()
    log.error("the engine process sent an unreadable message", exc_info=error)
    return f"the engine process sent an unreadable message ({type(error).__name__}: {error}) and was ended"


def _exit_description(process: asyncio.subprocess.Process) -> str:
    code = process.returncode
    if code is not None and code < 0:
        return f"(pid {process.pid}) was killed by signal {-code}"
    return f"(pid {process.pid}) ended with exit code {code}" if code is not None else f"(pid {process.pid}) is gone"
