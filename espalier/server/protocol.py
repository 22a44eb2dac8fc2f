"""The interface of a front to the engines of one model, and the messages between a front and an engine process.

The messages are typed structs, encoded with msgpack, one per ZeroMQ frame.  ResolvedParams, OutputChunk, Usage and
SpeculationStats are sent as they are, so no field is declared twice.  Log-probabilities are sent as rows of numbers
(espalier/logprobs.py).  The front binds a PAIR socket and starts the engine process, which connects to the socket.

client.EngineClient is one engine in its own process; serve_ray/pool.py:EnginePool is several engines behind Ray Serve.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import numpy as np

from espalier.errors import EspalierError
from espalier.inputs import ModelFacts
from espalier.logprobs import TokenLogprobs
from espalier.request import OutputChunk, ResolvedParams
from espalier.stats import LearnFigures, SpeculationStats, Usage

SHUTTING_DOWN = "the server is shutting down"


class Start(msgspec.Struct, tag=True):
    """The first message from the front.

    settings: what the worker loads; for a model, the keywords of EngineConfig.  heartbeat_s: seconds between messages
    of an idle engine.  learn: the fields of LearnConfig, None for an engine that does not learn.
    """

    settings: dict[str, Any]
    heartbeat_s: float
    log_level: str
    log_json: bool
    learn: dict[str, Any] | None = None


class SubmittedPrompt(msgspec.Struct):
    """A prompt with n samples.

    detokenize: the engine process makes the text, which stop strings need.  client: the client's name; the prompts of
    several clients take turns.  streamed: whether the client reads tokens as they come.  private: the engine does not
    learn from this prompt and its output.
    """

    name: str
    prompt: list[int]
    params: ResolvedParams
    priority: int
    detokenize: bool
    client: str = ""
    streamed: bool = False
    private: bool = False

    def for_prompts(self, prompts: Sequence[list[int]], first: int) -> "list[SubmittedPrompt]":
        """Returns a copy for each prompt.  Its name ends with the prompt's number, counted from `first`."""
        named = ((f"{self.name}-{number}", prompt) for number, prompt in enumerate(prompts, first))
        return [msgspec.structs.replace(self, name=name, prompt=prompt) for name, prompt in named]


class SubmitPrompts(msgspec.Struct, tag=True):
    """Prompts that arrived together."""

    prompts: list[SubmittedPrompt]


class AbortPrompt(msgspec.Struct, tag=True):
    """End all samples of one prompt.  name: of its SubmittedPrompt.  Ignored if they have ended: the messages may cross."""

    name: str


class Shutdown(msgspec.Struct, tag=True):
    """Makes the engine process exit at once.  The front has drained before, or does not wait."""


ToEngine = Start | SubmitPrompts | AbortPrompt | Shutdown


class EngineReady(msgspec.Struct, tag=True):
    """Reports that the engine is loaded.  config: the resolved configuration."""

    facts: ModelFacts
    config: dict[str, Any]


class PromptRefused(msgspec.Struct, tag=True):
    """Reports a prompt that the engine refused.

    name: of its SubmittedPrompt.  error: the reason.  busy: the prompt may run if the front submits it again later.
    """

    name: str
    error: str
    busy: bool = False


class OutputPart(msgspec.Struct, array_like=True):
    """An output chunk of one sample.  usage, speculation: the sample's totals, set only with its last chunk."""

    name: str
    output: OutputChunk
    usage: Usage | None = None
    speculation: SpeculationStats | None = None


class EngineReport(msgspec.Struct):
    """The engine's state.

    harvests: engine steps so far.  pages_owned: pages of running requests that are not in the prefix cache.  rounds:
    (bucket, whether a CUDA graph ran them, number of rounds).  trees: (sizes of a tree, number of rounds).
    tree_changes: TreeChooser.num_changes.  by_source: rows of GuessSources.by_source by name.  abort_steps: for each
    abort that was completed since the last report, the engine steps from its arrival to the release of its pages.
    learning: None if the engine does not learn.
    """

    harvests: int = 0
    waiting: int = 0
    running: int = 0
    pages_free: int = 0
    pages_cached: int = 0
    pages_owned: int = 0
    preempted: int = 0
    rounds: list[tuple[int, bool, int]] = []
    trees: list[tuple[str, int]] = []
    tree_changes: int = 0
    by_source: dict[str, list[float]] = {}
    totals: SpeculationStats = msgspec.field(default_factory=SpeculationStats)
    low_acceptance: bool = False
    abort_steps: list[int] = []
    learning: LearnFigures | None = None


class StepOutput(msgspec.Struct, tag=True):
    """The output of one engine step.  Without parts, the message is a heartbeat.

    report: None if the engine is busy and the last report is younger than worker.REPORT_S.
    """

    parts: list[OutputPart]
    report: EngineReport | None = None


class EngineFailed(msgspec.Struct, tag=True):
    """The last message of an engine process that cannot go on.

    refused: the cause is wrong settings, not the engine.
    """

    error: str
    refused: bool


FromEngine = EngineReady | PromptRefused | StepOutput | EngineFailed


def _encode_logprobs(value: Any) -> Any:
    """Returns log-probabilities as bytes: the front builds the objects, not the engine process."""
    if isinstance(value, TokenLogprobs):
        rows = value.joined()
        return value.of_prompt, rows.shape[1], rows.tobytes()
    raise NotImplementedError(f"{type(value).__name__} has no plain form")


def _decode_logprobs(kind: Any, value: Any) -> Any:
    of_prompt, width, data = value
    return TokenLogprobs((np.frombuffer(data, np.int64).reshape(-1, width),), of_prompt)


encode = msgspec.msgpack.Encoder(enc_hook=_encode_logprobs).encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine, dec_hook=_decode_logprobs).decode


class EngineGone(Exception):
    """There is no engine process.  Raised to requests in flight and to new requests."""


class EngineBusy(EspalierError):
    """An engine does not take a prompt now.  It may take the same prompt later."""


def refusal_error(refused: PromptRefused) -> EspalierError:
    return EngineBusy(refused.error) if refused.busy else EspalierError(refused.error)


@dataclass
class EngineFigures:
    """The figures of one engine for /metrics.

    labels: distinguish the engine from other engines; {} if there is one.  up: whether the engine is ready.
    num_restarts: engine processes started after the first.  abort_steps: how many aborts took each number of steps.
    """

    labels: Mapping[str, str]
    up: bool
    num_restarts: int
    report: EngineReport
    abort_steps: Mapping[int, int] = field(default_factory=Counter)


class Engines(Protocol):
    """The engines of one model.

    facts: None until `start` has returned.  state: "ready", or one word that tells why no engine is ready.
    unavailable_reason: the same as a sentence, "" if an engine is ready.  num_slots: how many samples all engines
    together can run now.  max_slots: the same for the largest number of engines.  open_samples: queued or running, as
    the front knows.
    """

    @property
    def facts(self) -> ModelFacts | None: ...
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
        """Raises EngineGone if a prompt submitted now could not run."""

    def submit(self, prompts: Sequence[list[int]], template: SubmittedPrompt) -> "Generation":
        """Queue prompts.  template: settings of all prompts; its name begins each prompt's name.  Raises EngineGone."""

    async def wait_until_sent(self) -> None:
        """Return when all prompts queued so far are sent, after at least one turn of the event loop."""

    def abort(self, generation: "Generation") -> None:
        """AbortPrompt the samples that still run, and drop their output."""

    def figures(self) -> list[EngineFigures]: ...

    async def close(self) -> None:
        """End all requests with EngineGone, and release the engines."""


class Generation:
    """The output of one HTTP request's prompts.

    num_running: how many samples still run, by prompt name, in the order of the prompts.

    Unread parts are buffered here, at most max_tokens for each sample, so a slow reader does not block other requests.
    The caller must close the generation in every case; that aborts the samples that still run.

    listener: gets new parts while the reader of `parts` waits.  The reader is not woken, which would cost as much as
    sending the parts.  The listener returns whether it took the parts; if not, the reader gets them.  The reader also
    gets the last parts.
    """

    def __init__(self, engines: "Engines", names: Sequence[str], samples: int):
        self.engines = engines
        self.num_running = dict.fromkeys(names, samples)
        self.unread: list[OutputPart] = []
        self.error: Exception | None = None
        self.new_parts = asyncio.Event()
        self.listener: Callable[[list[OutputPart]], bool] | None = None
        self._is_waiting = False

    @property
    def done(self) -> bool:
        return not any(self.num_running.values())

    async def parts(self, deadline: float | None) -> AsyncIterator[list[OutputPart]]:
        """Yield the new parts, until all samples have ended.

        deadline: a time on the event loop's clock.  Raises TimeoutError, EngineGone, or EspalierError if the engine
        refuses a prompt (EngineBusy if a retry may succeed).
        """
        # One timer serves all waits: asyncio.timeout_at for each wait costs more than the rest of the loop.
        timer = None if deadline is None else asyncio.get_running_loop().call_at(deadline, self._expire)
        try:
            ended = False
            while not ended:
                self._is_waiting = True
                try:
                    await self.new_parts.wait()
                finally:
                    self._is_waiting = False
                self.new_parts.clear()
                parts, ended = self.unread, self.done
                self.unread = []
                if parts:
                    yield parts
                if self.error is not None:
                    raise self.error
        finally:
            if timer is not None:
                timer.cancel()

    def _expire(self) -> None:
        if self.error is None and not self.done:
            self.fail(TimeoutError())

    def add(self, part: OutputPart) -> None:
        if part.output.finish_reason is not None:
            self.num_running[part.name] -= 1
        if self.error is not None:
            # Earlier parts of this sample may be lost, so this part is useless.
            return
        self.unread.append(part)
        if self.listener is None or self.done:
            self.new_parts.set()
        elif len(self.unread) == 1:
            # Parts of one message arrive in one turn of the event loop.  The next turn offers them together.
            asyncio.get_running_loop().call_soon(self._offer_to_listener, self.listener)

    def _offer_to_listener(self, listener: Callable[[list[OutputPart]], bool]) -> None:
        """Give the unread parts to the listener, or wake the reader."""
        parts, self.unread = self.unread, []
        try:
            is_taken = self._is_waiting and not self.done and listener(parts)
        except Exception as error:
            self.fail(error)
            return
        if not is_taken:
            self.unread = parts
        if self.unread or self.done:
            self.new_parts.set()

    def fail(self, error: Exception) -> None:
        """End the reading with an error.  The samples run until `close`, so num_running still counts them."""
        self.error = error
        self.new_parts.set()

    def close(self) -> None:
        self.engines.abort(self)
