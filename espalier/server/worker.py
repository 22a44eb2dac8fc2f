"""The engine process: receives messages from the API server, runs the engine's steps, and sends the output.

The process ends on Shutdown, or when the API server has ended.  The process ignores SIGINT, and after the model is
loaded also SIGTERM.  The API server handles both signals: it lets requests finish before it ends this process.
"""

import gc
import logging
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq

from espalier.config import EngineConfig, SpeculationConfig
from espalier.engine.round_trees import tree_label
from espalier.errors import EspalierError
from espalier.layout import padded_batch
from espalier.llm import LLM, is_acceptance_low, prepare_engine
from espalier.masking.compile import CompiledGrammar, CompilerBusy
from espalier.request import OutputChunk, Request
from espalier.server import logs, protocol
from espalier.server.protocol import EngineFailed, OutputPart, PromptRefused, StartEngine, SubmittedPrompt
from espalier.slots import ALL_SOURCES

if TYPE_CHECKING:
    from espalier.learn.learner import Learner

log = logging.getLogger("espalier.server")
START_TIMEOUT_MS = 60_000
API_SERVER_CHECK_MS = 500
# Seconds between two reports of a busy engine.  A report in each step would double the cost of sending output.
REPORT_INTERVAL_S = 0.1
# The longest wait for a message while a grammar is being compiled.
GRAMMAR_CHECK_MS = 5
EXIT_OK, EXIT_REFUSED, EXIT_FAILED = 0, 2, 1


@dataclass
class RunningPrompt:
    """The samples of one submitted prompt.

    requests: one for each sample.  num_unfinished: how many samples still run.  private: whether online learning must
    not keep the text.  abort_step: the engine's step number when an abort arrived, None without an abort.
    """

    requests: list[Request]
    num_unfinished: int
    private: bool
    abort_step: int | None = None


class EngineWorker:
    """Runs the engine for an API server.

    socket: a connected PAIR socket.  start: the API server's first message.  api_server_pid: the API server's process
    id; `run` returns when the API server has ended.  learner: attached to the engine; None without online learning.
    """

    def __init__(
        self, socket: zmq.Socket, llm: LLM, start: StartEngine, api_server_pid: int, learner: "Learner | None" = None
    ):
        self.socket = socket
        self.llm = llm
        self.heartbeat_ms = int(1000 * start.heartbeat_s)
        self.api_server_pid = api_server_pid
        self.learner = learner
        self.running_prompts: dict[str, RunningPrompt] = {}
        # Prompts whose grammars are being compiled in threads.
        self.compiling_prompts: dict[str, tuple[SubmittedPrompt, Future[CompiledGrammar]]] = {}
        self.num_steps = 0
        self.abort_steps: list[int] = []
        self.next_report_at = 0.0
        self.batch_buckets = llm.engine.layout.batch_buckets(llm.config.graph_batch)

    def run(self) -> None:
        """Run until Shutdown.  If the engine raises an error, send its output so far, and raise the error again."""
        while os.getppid() == self.api_server_pid and self._receive_messages():
            if self.learner is not None:
                self.learner.swap_between_steps(self.llm.engine)
            chunks: list[OutputChunk] = []
            try:
                self.llm.engine.raise_rank_failure()
                if self.llm.engine.has_work:
                    chunks = self.llm.step()
                    self.num_steps += 1
            except Exception:
                self._send(self.llm.engine.scheduler.pop_chunks())
                raise
            self._send(chunks)

    def _receive_messages(self) -> bool:
        """Handle all received messages.  If no request runs, first wait for a message.  Returns False at Shutdown."""
        wait_ms = min(self.heartbeat_ms, GRAMMAR_CHECK_MS) if self.compiling_prompts else self.heartbeat_ms
        wait_ms = 0 if self.llm.engine.has_work else wait_ms
        while self.socket.poll(wait_ms):
            message = protocol.decode_to_engine(self.socket.recv())
            if isinstance(message, protocol.SubmitPrompts):
                for submitted in message.prompts:
                    self._submit(submitted)
            elif isinstance(message, protocol.AbortPrompt):
                self._abort(message.name)
            else:
                return False
            wait_ms = 0
        self._start_compiled()
        return True

    def _submit(self, submitted: SubmittedPrompt) -> None:
        """Start a prompt.  If it has a grammar, compile the grammar in a thread first."""
        compiling = self.llm.start_compile(submitted.params.grammar)
        if compiling is None:
            self._start_prompt(submitted, None)
        else:
            self.compiling_prompts[submitted.name] = (submitted, compiling)

    def _start_compiled(self) -> None:
        """Start or refuse the prompts whose grammars have been compiled."""
        for name, (submitted, compiling) in list(self.compiling_prompts.items()):
            if not compiling.done():
                continue
            del self.compiling_prompts[name]
            try:
                grammar = compiling.result()
            except EspalierError as error:
                self.socket.send(protocol.encode(PromptRefused(name, str(error), isinstance(error, CompilerBusy))))
            else:
                self._start_prompt(submitted, grammar)

    def _start_prompt(self, submitted: SubmittedPrompt, grammar: CompiledGrammar | None) -> None:
        """Add a prompt's samples to the engine.  grammar: the prompt's grammar, compiled; None without one."""
        values = (submitted.prompt, submitted.params, submitted.name, submitted.priority, submitted.detokenize)
        try:
            requests = self.llm.new_requests(*values, grammar, submitted.client, submitted.streamed)
            for request in requests:
                self.llm.engine.add(request)
        except EspalierError as error:
            # The engine refuses either all samples of a prompt or none, so no sample of this prompt runs.
            self.socket.send(protocol.encode(PromptRefused(submitted.name, str(error))))
            return
        self.running_prompts[submitted.name] = RunningPrompt(requests, len(requests), submitted.private)

    def _abort(self, prompt_name: str) -> None:
        self.compiling_prompts.pop(prompt_name, None)
        if prompt_name in self.running_prompts:
            self.running_prompts[prompt_name].abort_step = self.num_steps
            for request in self.running_prompts[prompt_name].requests:
                self.llm.engine.abort(request.id)

    def _send(self, chunks: list[OutputChunk]) -> None:
        """Send the output chunks of one step to the API server, with a report if one is due."""
        parts = [self._output_part(chunk) for chunk in chunks]
        is_due = self.abort_steps or not self.llm.engine.has_work or time.monotonic() >= self.next_report_at
        self.socket.send(protocol.encode(protocol.StepOutput(parts, self._make_report() if is_due else None)))

    def _output_part(self, chunk: OutputChunk) -> OutputPart:
        """Returns the message with a chunk.  After a sample's last chunk, the sample does not count as running."""
        name = chunk.request_id.rpartition(".")[0]
        if chunk.finish_reason is None:
            return OutputPart(name, chunk)
        running_prompt = self.running_prompts[name]
        request = running_prompt.requests[chunk.index]
        if chunk.error is not None:
            log.error("%s", chunk.error, extra=logs.log_extra(chunk.request_id))
        if self.learner is not None and not running_prompt.private:
            self.learner.keep_text(request)
        running_prompt.num_unfinished -= 1
        if not running_prompt.num_unfinished:
            del self.running_prompts[name]
            if running_prompt.abort_step is not None:
                self.abort_steps.append(self.num_steps - running_prompt.abort_step)
        return OutputPart(name, chunk, request.usage, request.stats)

    def _make_report(self) -> protocol.EngineReport:
        self.next_report_at = time.monotonic() + REPORT_INTERVAL_S
        engine = self.llm.engine
        scheduler, pool = engine.scheduler, engine.pool
        abort_steps, self.abort_steps = self.abort_steps, []
        cached = 0 if engine.prefix_tree is None else len(engine.prefix_tree)
        return protocol.EngineReport(
            num_steps=self.num_steps,
            num_waiting=len(scheduler.waiting) + len(self.compiling_prompts),
            num_running=len(scheduler.running),
            pages_free=pool.num_free,
            pages_cached=cached,
            pages_owned=pool.num_pages - 1 - pool.num_free - cached,
            num_preempted=scheduler.num_preempted,
            rounds_by_bucket=self._rounds_by_bucket(),
            rounds_by_tree=[(tree_label(tree), count) for tree, count in scheduler.round_trees.num_rounds.items()],
            tree_changes=scheduler.round_trees.chooser.num_changes,
            by_source=dict(zip(ALL_SOURCES, scheduler.guess_sources.counts_by_source.tolist(), strict=True)),
            speculation=engine.totals,
            low_acceptance=is_acceptance_low(engine.totals),
            abort_steps=abort_steps,
            learn_stats=None if self.learner is None else self.learner.figures,
        )

    def _rounds_by_bucket(self) -> list[tuple[int, bool, int]]:
        """Returns (padded batch size, whether CUDA graphs exist for this size, number of rounds) for each size."""
        counts: Counter[int] = Counter()
        for batch, count in self.llm.engine.scheduler.num_rounds.items():
            counts[padded_batch(batch, self.batch_buckets)] += count
        return [(bucket, bucket in self.batch_buckets, count) for bucket, count in sorted(counts.items())]


def unpack_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the keyword arguments of LLM.  settings: the same arguments as plain values (StartEngine.settings)."""
    speculation = settings.get("speculation")
    return {**settings, "speculation": SpeculationConfig(**speculation)} if isinstance(speculation, dict) else settings


def load_model(settings: dict[str, Any]) -> LLM:
    """Returns the loaded model.  settings: as in unpack_settings."""
    return LLM(**unpack_settings(settings))


def _load_learning(settings: dict[str, Any], learn: dict[str, Any], stack: ExitStack) -> "tuple[LLM, Learner]":
    """Load the model and attach a learner.  `stack` closes both.  Raises EspalierError.  A wrong folder is refused
    before the weights are loaded."""
    # These modules are imported only for online learning, because they take seconds to import.
    from espalier.learn.folder import LearnConfig
    from espalier.learn.learner import Learner

    prepared = prepare_engine(EngineConfig(**unpack_settings(settings)))
    learner = Learner(LearnConfig(**learn), prepared)
    stack.callback(learner.close)
    llm = stack.enter_context(LLM.from_prepared(prepared))
    # The learner must be closed before the engine, because it uses the engine's thread.  `close` may be called twice.
    stack.callback(learner.close)
    learner.attach(llm)
    return llm, learner


ModelLoader = Callable[[dict[str, Any]], AbstractContextManager[LLM]]


def main(address: str, api_server_pid: int, load: ModelLoader = load_model) -> int:
    """Connect to the API server, load the model and serve.  Returns the exit code.  A failure is sent as EngineFailed.

    address: of the ZeroMQ socket.  api_server_pid: the API server's process id.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        # A slow API server must not block the engine, so the send queue has no limit.  At exit, zmq sends for 1 s more.
        socket.set_hwm(0)
        socket.linger = 1000
        socket.connect(address)
        try:
            start = wait_for_start(socket, api_server_pid)
            if start is None:
                return EXIT_FAILED
            logs.set_up_logging(start.log_level, start.log_json)
            _serve(socket, start, api_server_pid, load, Path(address.removeprefix("ipc://")))
        except Exception as error:
            refused = isinstance(error, EspalierError)
            if not refused:
                log.exception("the engine stopped")
            socket.send(
                protocol.encode(EngineFailed(f"{error}" if refused else f"{type(error).__name__}: {error}", refused))
            )
            return EXIT_REFUSED if refused else EXIT_FAILED
        finally:
            if os.getppid() != api_server_pid:
                _remove_socket(Path(address.removeprefix("ipc://")))
    return EXIT_OK


def wait_for_start(socket: zmq.Socket, api_server_pid: int) -> StartEngine | None:
    """Returns the API server's first message.  Returns None if the API server has ended, sends nothing for
    START_TIMEOUT_MS, or sends another message than StartEngine."""
    for _ in range(START_TIMEOUT_MS // API_SERVER_CHECK_MS):
        if socket.poll(API_SERVER_CHECK_MS):
            start = protocol.decode_to_engine(socket.recv())
            return start if isinstance(start, StartEngine) else None
        if os.getppid() != api_server_pid:
            break
    return None


def _remove_socket(path: Path) -> None:
    """Remove the socket file that a killed API server left, and the file's folder if the folder is then empty."""
    with suppress(OSError):
        path.unlink(missing_ok=True)
        path.parent.rmdir()


@contextmanager
def _exit_with_api_server(api_server_pid: int, socket_path: Path) -> Iterator[None]:
    """During the block, which may load for minutes, ends this process soon after the API server has ended."""
    is_over = threading.Event()

    def watch_api_server() -> None:
        while not is_over.wait(API_SERVER_CHECK_MS / 1000):
            if os.getppid() != api_server_pid:
                _remove_socket(socket_path)
                os._exit(EXIT_FAILED)

    threading.Thread(target=watch_api_server, daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def _serve(socket: zmq.Socket, start: StartEngine, api_server_pid: int, load: ModelLoader, socket_path: Path) -> None:
    """Load the model and run the engine until the process must end."""
    began = time.perf_counter()
    with ExitStack() as stack:
        learner = None
        with _exit_with_api_server(api_server_pid, socket_path):
            if start.learn is None:
                llm = stack.enter_context(load(start.settings))
            else:
                llm, learner = _load_learning(start.settings, start.learn, stack)
        # From now on, the API server lets requests finish after SIGTERM, so this process must go on.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        log.info("engine process %d: %s loaded in %.1f s", os.getpid(), llm.config.model, time.perf_counter() - began)
        socket.send(protocol.encode(protocol.EngineReady(llm.inputs.model_info, llm.config.as_dict())))
        worker = EngineWorker(socket, llm, start, api_server_pid, learner)
        # The loaded model lives as long as the process, so the garbage collector need not search it.
        gc.collect()
        gc.freeze()
        worker.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
