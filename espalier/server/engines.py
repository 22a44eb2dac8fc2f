"""What a front asks of the engines of one model: to run prompts, to say how they are, and to end.

client.EngineClient is one engine in a process of its own; serve_ray/pool.py:EnginePool is N of them behind Ray Serve.
All code runs on the front's event loop.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from espalier.errors import EspalierError
from espalier.inputs import ModelFacts
from espalier.server.protocol import Part, Refused, Report, Submit

SHUTTING_DOWN = "the server is shutting down"


class EngineGone(Exception):
    """There is no engine process.  Raised to requests in flight and to new ones."""


class EngineBusy(EspalierError):
    """An engine does not take a prompt now.  It may take the same prompt later."""


def error_of(refused: Refused) -> EspalierError:
    return EngineBusy(refused.error) if refused.busy else EspalierError(refused.error)


@dataclass
class Figures:
    """One engine's figures for /metrics.

    labels: tell it from the other engines, {} where there is one; up: whether it is ready; num_restarts: engine
    processes started after the first; abort_steps: number of aborts by the engine steps that they took.
    """

    labels: Mapping[str, str]
    up: bool
    num_restarts: int
    report: Report
    abort_steps: Mapping[int, int] = field(default_factory=Counter)


class Engines(Protocol):
    """The engines of one model.

    facts: None until `start` has returned; state: "ready", or why no engine is ready in one word; why: the same as a
    sentence, "" if one is ready; num_slots: samples that all engines together can run now; max_slots: the same with as
    many engines as there may be; open_samples: samples that are queued or running, as the front knows them.
    """

    @property
    def facts(self) -> ModelFacts | None: ...
    @property
    def state(self) -> str: ...
    @property
    def why(self) -> str: ...
    @property
    def num_slots(self) -> int: ...
    @property
    def max_slots(self) -> int: ...
    @property
    def open_samples(self) -> int: ...

    def require_up(self) -> None:
        """Raises EngineGone if a prompt that is submitted now could not run."""

    def submit(self, prompts: Sequence[list[int]], asked: Submit) -> "Generation":
        """Queue prompts.  asked: the same for all; its name is the beginning of theirs.  Raises EngineGone."""

    async def sent(self) -> None:
        """Return when the prompts queued so far have left, after at least one turn of the event loop."""

    def forget(self, generation: "Generation") -> None:
        """Abort the samples that still run, and drop their output."""

    def figures(self) -> list[Figures]: ...

    async def close(self) -> None:
        """End all requests with EngineGone, and let go of the engines."""


class Generation:
    """The output of one HTTP request's prompts.

    num_running: number of samples that still run, by name, in the order of the prompts.

    Unread parts are buffered here, at most max_tokens for each sample, so a slow reader does not block others.  The
    caller must close it in every case; that aborts the samples that still run.

    listener: gets new parts while the reader of `parts` waits, without waking it, which would cost as much as sending
    them.  It returns whether it took them; if not, the reader gets them.  The reader gets the last ones.
    """

    def __init__(self, engines: "Engines", names: Sequence[str], samples: int):
        self.engines = engines
        self.num_running = dict.fromkeys(names, samples)
        self.unread: list[Part] = []
        self.error: Exception | None = None
        self.news = asyncio.Event()
        self.listener: Callable[[list[Part]], bool] | None = None
        self._is_waiting = False

    @property
    def done(self) -> bool:
        return not any(self.num_running.values())

    async def parts(self, deadline: float | None) -> AsyncIterator[list[Part]]:
        """Yield the new parts, until all samples have ended.

        deadline: on the event loop's clock.  Raises TimeoutError, EngineGone, or EspalierError if the engine refuses
        (EngineBusy if a retry may succeed).
        """
        # One timer for all waits: asyncio.timeout_at at each wait costs more than the rest of the loop.
        timer = None if deadline is None else asyncio.get_running_loop().call_at(deadline, self._expire)
        try:
            ended = False
            while not ended:
                self._is_waiting = True
                try:
                    await self.news.wait()
                finally:
                    self._is_waiting = False
                self.news.clear()
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

    def take(self, part: Part) -> None:
        if part.output.finish_reason is not None:
            self.num_running[part.name] -= 1
        if self.error is not None:
            # Parts before this one may be lost, so it is of no use.
            return
        self.unread.append(part)
        if self.listener is None or self.done:
            self.news.set()
        elif len(self.unread) == 1:
            # The parts of one message come in one turn of the loop, and are read together in the next.
            asyncio.get_running_loop().call_soon(self._offer, self.listener)

    def _offer(self, listener: Callable[[list[Part]], bool]) -> None:
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
            self.news.set()

    def fail(self, error: Exception) -> None:
        """End the reading with an error.  The samples run on until `close`, so num_running still counts them."""
        self.error = error
        self.news.set()

    def close(self) -> None:
        self.engines.forget(self)
