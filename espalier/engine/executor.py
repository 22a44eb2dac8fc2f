"""Runs tickets, in order, on one stream: `launch(ticket) -> handle; handle.result()` is all that others need.

`execute` is what every launch does, on any device, eagerly or captured.  On a CPU the stream of an overlapped engine is
one worker thread, and that of a lock-step engine is the caller's own; engine/cuda.py has the GPU's.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch

from espalier.engine.results import Results, read
from espalier.engine.ticket import Row, Ticket
from espalier.engine.wire import Sent, pack
from espalier.errors import EspalierError
from espalier.sampling.pick import Logprobs
from espalier.sampling.shape import Shaping
from espalier.speculate.round import Round, prefill, run


class Handle(Protocol):
    def result(self) -> list[Row]:
        """What was decided, a row a slot of the ticket; waits for the launch."""
        ...


class Executor(Protocol):
    """Owns the order in which device state is written, and everything that stands on the device."""

    @property
    def round(self) -> Round: ...

    def launch(self, ticket: Ticket) -> Handle: ...

    def close(self) -> None:
        """Wait for what is in flight."""
        ...


class Closed:
    """Takes an executor's place when its engine is closed, so that nothing on the device is held any more."""

    @property
    def round(self) -> Round:
        raise EspalierError("the engine is closed; make another LLM")

    def launch(self, ticket: Ticket) -> Handle:
        raise EspalierError("the engine is closed; make another LLM")

    def close(self) -> None:
        pass


def execute(
    r: Round, results: Results, sent: Sent, width: int, shaping: Shaping, num_logprobs: int | None
) -> Logprobs | None:
    """One launch: apply the ticket, run a prefill pass of this width (0: a round), write its results."""
    sent.apply(r.table)
    if width:
        outcome = prefill(r, sent.slots, sent.lengths, width, shaping, num_logprobs)
    else:
        outcome = run(r, sent.slots, shaping, num_logprobs)
    results.write(sent.entry, outcome)
    return outcome.logprobs


class CpuExecutor:
    def __init__(self, round: Round, overlap: bool):
        self.round = round
        self.results = Results(round.layout, 1, round.pages.device)
        threads = torch.get_num_threads()
        self.worker = ThreadPoolExecutor(1, "espalier-stream", torch.set_num_threads, (threads,)) if overlap else None

    def launch(self, ticket: Ticket) -> Handle:
        if self.worker is not None:
            return self.worker.submit(self.run, ticket)
        done: Future[list[Row]] = Future()
        done.set_result(self.run(ticket))
        return done

    @torch.inference_mode()
    def run(self, ticket: Ticket) -> list[Row]:
        batch = len(ticket.slots)
        packed = pack(self.round.table, ticket, entry=0, batch=batch)
        self.round.prepare(ticket.committed)
        sent = Sent.of(torch.from_numpy(packed.vector), packed.form)
        logprobs = execute(self.round, self.results, sent, ticket.width, ticket.shaping, ticket.num_logprobs)
        return read(self.results.fields, self.results.ring[0, :batch].numpy(), logprobs, ticket.traced)

    def close(self) -> None:
        if self.worker is not None:
            self.worker.shutdown()
