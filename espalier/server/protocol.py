"""The messages between API server and engine process, and the interface `Engines` of a model's engines.

A message is a typed struct, encoded with msgpack, in one ZeroMQ frame.  Messages contain the engine's own classes
ResolvedParams, OutputChunk, Usage and SpeculationStats, so their fields are not declared again here.  Log-probabilities
are sent as rows of numbers (espalier/logprobs.py).  The API server binds a PAIR socket and starts the engine process,
which connects to the socket.

Two classes implement Engines: client.EngineClient for one engine process, serve_ray/pool.py:EnginePool for replicas.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import numpy as np

from espalier.errors import EspalierError
from espalier.inputs import ModelInfo
from espalier.logprobs import TokenLogprobs
from espalier.request import OutputChunk, ResolvedParams
from espalier.stats import LearnStats, SpeculationStats, Usage

SHUTTING_DOWN = "the server is shutting down"


class StartEngine(msgspec.Struct, tag=True):
    """The first message from the API server.

    settings: the keyword arguments of EngineConfig, as plain values.  heartbeat_s: an idle engine sends a message after
    this time.  learn: the fields of LearnConfig; None for an engine without online learning.
    """

    settings: dict[str, Any]
    heartbeat_s: float
    log_level: str
    log_json: bool
    learn: dict[str, Any] | None = None


class SubmittedPrompt(msgspec.Struct):
    """A prompt for which the engine generates params.n samples.

    name: the id of the HTTP request and a number.  prompt: token ids.  detokenize: whether the engine process makes the
    text, to find stop strings.  client: the client's name, for a fair order among clients.  streamed: whether the
    client gets a stream.  private: whether online learning must not keep the text.
    """

    name: str
    prompt: list[int]
    params: ResolvedParams
    priority: int
    detokenize: bool
    client: str = ""
    streamed: bool = False
    private: bool = False

    def for_prompts(self, prompts: Sequence[list[int]], first_number: int) -> "list[SubmittedPrompt]":
        """Returns a copy for each prompt.  A copy's name ends with its number; the first is `first_number`."""
        names_and_prompts = ((f"{self.name}-{number}", prompt) for number, prompt in enumerate(prompts, first_number))
        return [msgspec.structs.replace(self, name=name, prompt=prompt) for name, prompt in names_and_prompts]


class SubmitPrompts(msgspec.Struct, tag=True):
    """Prompts that arrived together."""

    prompts: list[SubmittedPrompt]


class AbortPrompt(msgspec.Struct, tag=True):
    """Aborts all samples of a prompt, unless they have ended.  name: SubmittedPrompt.name."""

    name: str


class Shutdown(msgspec.Struct, tag=True):
    """Makes the engine process exit at once, without waiting for running requests."""


MessageToEngine = StartEngine | SubmitPrompts | AbortPrompt | Shutdown


class EngineReady(msgspec.Struct, tag=True):
    """Reports that the engine is loaded.  config: the resolved configuration."""

    model_info: ModelInfo
    config: dict[str, Any]


class PromptRefused(msgspec.Struct, tag=True):
    """Reports a prompt that the engine refused.  name: SubmittedPrompt.name.  error: the reason.  busy: whether the
    engine may accept the same prompt later."""

    name: str
    error: str
    busy: bool = False


class OutputPart(msgspec.Struct, array_like=True):
    """An output chunk of one sample.  name: SubmittedPrompt.name.  usage, speculation: the sample's totals, set only
    with the last chunk."""

    name: str
    output: OutputChunk
    usage: Usage | None = None
    speculation: SpeculationStats | None = None


class EngineReport(msgspec.Struct):
    """The engine's counters and gauges for /metrics.

    num_steps: engine steps so far.  num_waiting, num_running: in samples.  pages_owned: pages of running requests
    that are not in the prefix cache.  rounds_by_bucket: (padded batch size, whether CUDA graphs exist for this size,
    number of rounds).  rounds_by_tree: (a tree's sizes as text, number of rounds).  tree_changes: how often another
    tree was chosen.  by_source: for each source of draft tokens, by its name: [tokens verified, accepted tokens that
    the scores predict, tokens accepted].  low_acceptance: whether almost no draft token is accepted.  abort_steps: for
    each abort since the last report, the engine steps until the prompt's samples ended.  learn_stats: None without
    online learning.
    """

    num_steps: int = 0
    num_waiting: int = 0
    num_running: int = 0
    pages_free: int = 0
    pages_cached: int = 0
    pages_owned: int = 0
    num_preempted: int = 0
    rounds_by_bucket: list[tuple[int, bool, int]] = []
    rounds_by_tree: list[tuple[str, int]] = []
    tree_changes: int = 0
    by_source: dict[str, list[float]] = {}
    speculation: SpeculationStats = msgspec.field(default_factory=SpeculationStats)
    low_acceptance: bool = False
    abort_steps: list[int] = []
    learn_stats: LearnStats | None = None


class StepOutput(msgspec.Struct, tag=True):
    """The output of one engine step.  A message without parts is a heartbeat.  report: None in most messages, because a
    busy engine reports only every worker.REPORT_INTERVAL_S."""

    parts: list[OutputPart]
    report: EngineReport | None = None


class EngineFailed(msgspec.Struct, tag=True):
    """The last message of an engine process that cannot go on.  refused: True if wrong settings are the reason."""

    error: str
    refused: bool


MessageFromEngine = EngineReady | PromptRefused | StepOutput | EngineFailed


def _encode_logprobs(value: Any) -> Any:
    """Returns TokenLogprobs as (field of_prompt, number of columns, bytes of the rows), for _decode_logprobs."""
    if isinstance(value, TokenLogprobs):
        rows = value.joined()
        return value.of_prompt, rows.shape[1], rows.tobytes()
    raise NotImplementedError(f"{type(value).__name__} has no plain form")


def _decode_logprobs(target_type: Any, value: Any) -> Any:
    """Returns the TokenLogprobs of a tuple from _encode_logprobs.  target_type: passed by msgspec, not used."""
    of_prompt, width, data = value
    return TokenLogprobs((np.frombuffer(data, np.int64).reshape(-1, width),), of_prompt)


encode = msgspec.msgpack.Encoder(enc_hook=_encode_logprobs).encode
decode_to_engine = msgspec.msgpack.Decoder(MessageToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(MessageFromEngine, dec_hook=_decode_logprobs).decode


class EngineGone(Exception):
    """No engine can answer: the engine process has ended or is being started, or the server shuts down."""


class EngineBusy(EspalierError):
    """The engine refuses a prompt now, but may accept the same prompt later."""


def refusal_error(refused: PromptRefused) -> EspalierError:
    return EngineBusy(refused.error) if refused.busy else EspalierError(refused.error)


@dataclass
class EngineStats:
    """The metrics of one engine process, for /metrics.

    labels: metric labels that tell this engine from other engines; {} for a single engine.  num_restarts: how many
    processes were started after the first process.  abort_steps: how many aborts took N engine steps, by N.
    """

    labels: Mapping[str, str]
    is_ready: bool
    num_restarts: int
    report: EngineReport
    abort_steps: Mapping[int, int] = field(default_factory=Counter)


class Engines(Protocol):
    """The engines of one model.

    model_info: None before the engines are started.  state: "ready", or one word for why no engine is ready.
    unavailable_reason: this reason as a sentence; "" if an engine is ready.  num_slots: how many samples the engines
    can run at once now.  max_slots: num_slots when the largest number of engines runs.  open_samples: how many
    samples wait or run.
    """

    @property
    def model_info(self) -> ModelInfo | None: ...
    @property
    def state(self) -> str: ...
    @property
    def unavailable_reason(self) -> str: ...
    @property
    def num_slots(self) -> int: ...
    @property
    def max_slots(self) -> int: ...
    @property
    def open_samples(self) -> int: ...

    def require_running(self) -> None:
        """Raises EngineGone if the engines cannot run prompts."""

    def submit(self, prompts: Sequence[list[int]], template: SubmittedPrompt) -> "Generation":
        """Queue prompts, each as a copy of `template` (SubmittedPrompt.for_prompts).  Raises EngineGone."""

    async def wait_until_sent(self) -> None:
        """Wait until all queued prompts are sent, and for at least one iteration of the event loop."""

    def abort(self, generation: "Generation") -> None:
        """Abort the generation's running samples, and drop their output."""

    def engine_stats(self) -> list[EngineStats]: ...

    async def close(self) -> None:
        """Make all requests fail with EngineGone, and release the engines."""


class Generation:
    """The output of one HTTP request's prompts.

    num_running: how many samples of each prompt still run, by prompt name, in the order of the prompts.  Output parts
    that are not yet read are kept here, so a slow reader does not block other requests.  The caller must always call
    `close`, which aborts the running samples.

    listener: a function that may take new parts while the reader of `iter_parts` waits, because waking the reader costs
    as much as sending the parts.  The function returns whether it took the parts.  The reader gets the parts that the
    listener did not take, and always the last parts.
    """

    def __init__(self, engines: "Engines", prompt_names: Sequence[str], samples_per_prompt: int):
        self.engines = engines
        self.num_running = dict.fromkeys(prompt_names, samples_per_prompt)
        self.unread_outputs: list[OutputPart] = []
        self.error: Exception | None = None
        self.has_new_outputs = asyncio.Event()
        self.listener: Callable[[list[OutputPart]], bool] | None = None
        self._is_reader_waiting = False

    @property
    def has_ended(self) -> bool:
        return not any(self.num_running.values())

    async def iter_parts(self, deadline: float | None) -> AsyncIterator[list[OutputPart]]:
        """Yield the new parts, until all samples have ended.

        deadline: in seconds of the event loop's clock, None for no limit.  Raises TimeoutError after the deadline,
        EngineGone, or EspalierError for a refused prompt.
        """
        # One timer serves all waits, because asyncio.timeout_at in each wait would cost more than the rest of the loop.
        timer = None if deadline is None else asyncio.get_running_loop().call_at(deadline, self._expire)
        try:
            ended = False
            while not ended:
                self._is_reader_waiting = True
                try:
                    await self.has_new_outputs.wait()
                finally:
                    self._is_reader_waiting = False
                self.has_new_outputs.clear()
                parts, ended = self.unread_outputs, self.has_ended
                self.unread_outputs = []
                if parts:
                    yield parts
                if self.error is not None:
                    raise self.error
        finally:
            if timer is not None:
                timer.cancel()

    def _expire(self) -> None:
        """End the iteration of `iter_parts` at its deadline, with a TimeoutError."""
        if self.error is None and not self.has_ended:
            self.fail(TimeoutError())

    def add(self, part: OutputPart) -> None:
        """Take a new part of the output: keep it for the reader, or give it to the listener."""
        if part.output.finish_reason is not None:
            self.num_running[part.name] -= 1
        if self.error is not None:
            # The error may have lost earlier parts of the output, so this part is dropped too.
            return
        self.unread_outputs.append(part)
        if self.listener is None or self.has_ended:
            self.has_new_outputs.set()
        elif len(self.unread_outputs) == 1:
            # The listener is called in the next iteration of the event loop, when all parts of a message are here.
            asyncio.get_running_loop().call_soon(self._offer_to_listener, self.listener)

    def _offer_to_listener(self, listener: Callable[[list[OutputPart]], bool]) -> None:
        """Call the listener with the unread parts.  If the listener does not take them, wake the reader."""
        parts, self.unread_outputs = self.unread_outputs, []
        try:
            is_taken = self._is_reader_waiting and not self.has_ended and listener(parts)
        except Exception as error:
            self.fail(error)
            return
        if not is_taken:
            self.unread_outputs = parts
        if self.unread_outputs or self.has_ended:
            self.has_new_outputs.set()

    def fail(self, error: Exception) -> None:
        """Make `iter_parts` raise an error.  Until `close`, the samples still run, and num_running counts them."""
        self.error = error
        self.has_new_outputs.set()

    def close(self) -> None:
        self.engines.abort(self)
