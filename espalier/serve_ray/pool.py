"""The engine replicas of one model, for an API server.  Ray Serve's router chooses a replica for each submitted prompt.

If a replica ends before a prompt's first output token, the prompt is sent to another replica.  If a replica ends later,
the request fails with EngineGone.  The prompts of one HTTP request may go to different replicas.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from espalier.errors import EspalierError
from espalier.inputs import ModelInfo
from espalier.serve_ray.replica_chooser import RoutingHint, prefix_hashes
from espalier.server import protocol
from espalier.server.protocol import SHUTTING_DOWN, EngineGone, EngineStats, Generation, SubmittedPrompt

log = logging.getLogger("espalier.server")
# The most replicas to which a prompt is sent, one after another.
MAX_REPLICAS_TRIED = 3
# Seconds between two reads of the replicas' metrics, and the time limit of a read.
POLL_INTERVAL_S = 1.0
POLL_TIMEOUT_S = 5.0
NO_REPLICA_REASON = "no replica is ready; Ray Serve is starting one"


@dataclass
class PooledPrompt:
    """A submitted prompt.  generation: receives the output.  has_begun: whether output has arrived."""

    submitted: SubmittedPrompt
    generation: Generation
    has_begun: bool = False

    @property
    def is_done(self) -> bool:
        return self.generation.num_running[self.submitted.name] == 0


@dataclass(eq=False)
class EnginePool:
    """The engine replicas of one model.  Implements protocol.Engines.

    handle: Ray Serve's DeploymentHandle of replica.EngineReplica.  name: the model's name, a label in the metrics.
    max_replicas: the upper limit of autoscaling.  slot_share: this API server's share of the engines' batch slots, 1 /
    number of API servers.  is_replica_lost: returns whether an exception of a call means that the replica has ended."""

    handle: Any
    name: str
    max_replicas: int
    slot_share: float
    is_replica_lost: Callable[[BaseException], bool]
    model_info: ModelInfo | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    _engine_stats: list[EngineStats] = field(default_factory=list)
    _closed: bool = False
    _num_submitted: int = 0
    # By prompt name: (receiver of the output, task that runs the prompt).
    _open_prompts: dict[str, tuple[Generation, asyncio.Task[None]]] = field(default_factory=dict)
    _poll_task: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self.generate_handle = self.handle.options(method_name="generate", stream=True)

    async def start(self) -> None:
        """Wait until a replica is ready."""
        ready = protocol.decode_from_engine(await self.handle.get_model_info.remote())
        assert isinstance(ready, protocol.EngineReady)
        self.model_info, self.config = ready.model_info, ready.config
        await self._poll_engine_stats()
        self._poll_task = asyncio.create_task(self._keep_polling())

    @property
    def num_replicas(self) -> int:
        """The number of ready replicas at the last read of the metrics."""
        return sum(figures.is_ready for figures in self._engine_stats)

    @property
    def state(self) -> str:
        return "closed" if self._closed else "ready" if self.num_replicas else "starting"

    @property
    def unavailable_reason(self) -> str:
        return SHUTTING_DOWN if self._closed else "" if self.num_replicas else NO_REPLICA_REASON

    @property
    def num_slots(self) -> int:
        return self._num_slots_of(max(self.num_replicas, 1))

    @property
    def max_slots(self) -> int:
        return self._num_slots_of(self.max_replicas)

    def _num_slots_of(self, num_replicas: int) -> int:
        """Returns this API server's share of the batch slots of `num_replicas` replicas."""
        return max(1, int(num_replicas * int(self.config["max_batch"]) * self.slot_share))

    @property
    def open_samples(self) -> int:
        """The number of samples that wait or run."""
        return sum(generation.num_running[name] for name, (generation, _) in self._open_prompts.items())

    def require_running(self) -> None:
        """Raises EngineGone if the pool is closed.  While no replica is ready, requests wait instead."""
        if self._closed:
            raise EngineGone(SHUTTING_DOWN)

    def submit(self, prompts: Sequence[list[int]], template: SubmittedPrompt) -> Generation:
        """Run prompts (token ids) on replicas.  template: the other fields of each SubmittedPrompt."""
        self.require_running()
        submitted_prompts = template.for_prompts(prompts, self._num_submitted)
        self._num_submitted += len(prompts)
        generation = Generation(self, [submitted.name for submitted in submitted_prompts], template.params.n)
        for submitted in submitted_prompts:
            task = asyncio.create_task(self._run(PooledPrompt(submitted, generation)))
            self._open_prompts[submitted.name] = generation, task
        return generation

    async def wait_until_sent(self) -> None:
        await asyncio.sleep(0)

    def abort(self, generation: Generation) -> None:
        for name in generation.num_running:
            if (open_prompt := self._open_prompts.pop(name, None)) is not None:
                open_prompt[1].cancel()

    def engine_stats(self) -> list[EngineStats]:
        return self._engine_stats

    async def close(self) -> None:
        self._closed = True
        if self._poll_task is not None:
            self._poll_task.cancel()
        for generation, _ in list(self._open_prompts.values()):
            self.abort(generation)
            generation.fail(EngineGone(SHUTTING_DOWN))

    # One prompt

    async def _run(self, prompt: PooledPrompt) -> None:
        """Run a prompt until its output is complete.  After an error, the prompt's Generation fails with this error."""
        try:
            await self._try_replicas(prompt)
        except Exception as error:
            if not isinstance(error, EngineGone | EspalierError):
                log.exception("a prompt failed in the API server")
            self._open_prompts.pop(prompt.submitted.name, None)
            self.abort(prompt.generation)
            prompt.generation.fail(error)

    async def _try_replicas(self, prompt: PooledPrompt) -> None:
        """Run a prompt on a replica.  If the replica is lost before any output, try another one."""
        submitted = prompt.submitted
        encoded_prompt = msgspec.msgpack.encode(submitted)
        hint = RoutingHint(prefix_hashes(submitted.prompt, int(self.config["page_size"])), submitted.params.n)
        for num_tries in range(1, MAX_REPLICAS_TRIED + 1):
            why_lost = await self._stream_from_replica(prompt, encoded_prompt, hint)
            if why_lost is None:
                return
            if num_tries == MAX_REPLICAS_TRIED or prompt.has_begun:
                raise EngineGone(why_lost)
            log.warning("%s before the first token: trying another replica", why_lost)

    async def _stream_from_replica(self, prompt: PooledPrompt, encoded_prompt: bytes, hint: RoutingHint) -> str | None:
        """Send a prompt to a replica and pass on the output.  Returns why the replica was lost; None on success."""
        # Ray Serve takes a call's request id from the context.  In an empty context, it makes a new id for each prompt.
        stream = Context().run(self.generate_handle.remote, encoded_prompt, hint)
        try:
            async for data in stream:
                reply = protocol.decode_from_engine(data)
                if isinstance(reply, protocol.EngineFailed):
                    return reply.error
                if isinstance(reply, protocol.PromptRefused):
                    raise protocol.refusal_error(reply)
                assert isinstance(reply, protocol.StepOutput)
                prompt.has_begun = True
                for part in reply.parts:
                    prompt.generation.add(part)
                if prompt.is_done:
                    self._open_prompts.pop(prompt.submitted.name, None)
        except asyncio.CancelledError:
            stream.cancel()
            raise
        except Exception as error:
            if not self.is_replica_lost(error):
                raise
            # The replica may have ended after the complete output, but before the end of the call.
            return None if prompt.is_done else f"the replica is gone ({type(error).__name__})"
        return None if prompt.is_done else "the replica ended the stream early"

    # All replicas

    async def _keep_polling(self) -> None:
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            await self._poll_engine_stats()

    async def _poll_engine_stats(self) -> None:
        """Read all replicas' metrics.  A replica that does not answer, or has another version's format, is left out."""
        results: list[Any] = []
        # The call raises an error if no replica is ready.
        with suppress(Exception):
            answers = self.handle.broadcast("engine_stats")
            results = await answers.results_async(timeout_s=POLL_TIMEOUT_S, return_exceptions=True)
        stats_of_replicas = []
        for data in (each for each in results if isinstance(each, bytes)):
            with suppress(msgspec.MsgspecError):
                stats = msgspec.msgpack.decode(data, type=EngineStats)
                stats_of_replicas.append(replace(stats, labels={"model": self.name, **stats.labels}))
        self._engine_stats = sorted(stats_of_replicas, key=lambda each: each.labels["replica"])
