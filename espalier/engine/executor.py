"""Runs tickets, in order, on one stream: `launch(ticket) -> handle; handle.result()` is all that others need.

`execute` is what every launch does, on any device, eagerly or captured; a staged round does the same in steps
(`Staged`).  On a CPU the stream of an overlapped engine is one worker thread, and that of a lock-step engine is the
caller's own; engine/cuda.py has the GPU's.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from espalier.engine.results import Reported, Results, read, read_trees
from espalier.engine.ticket import Row, Ticket
from espalier.engine.wire import Sent, pack
from espalier.errors import EspalierError
from espalier.sampling.prompt import PromptRows
from espalier.sampling.shape import Shaping
from espalier.speculate.round import Outcome, Round, Verified, prefill, propose, run, settle, verify

Trees = list[tuple[list[int], list[int]]]


class Handle(Protocol):
    def result(self) -> list[Row]:
        """What was decided, a row a slot of the ticket; waits for the launch."""
        ...


class StagedHandle(Handle, Protocol):
    def trees(self) -> Trees:
        """(tokens, parents) of each slot's tree; waits for the first stage."""
        ...

    def settle(self, masks: np.ndarray) -> None:
        """Go on with the last stage.  masks: [B, D, words] int32, which tokens may follow each node."""
        ...


class Executor(Protocol):
    """Owns the order in which device state is written, and everything that stands on the device."""

    @property
    def round(self) -> Round: ...

    def launch(self, ticket: Ticket) -> Handle: ...

    def launch_staged(self, ticket: Ticket) -> StagedHandle:
        """A round that waits for masks before its last stage; it must be settled before anything else is launched."""
        ...

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

    def launch_staged(self, ticket: Ticket) -> StagedHandle:
        raise EspalierError("the engine is closed; make another LLM")

    def close(self) -> None:
        pass


def execute(
    r: Round,
    results: Results,
    sent: Sent,
    width: int,
    shaping: Shaping,
    prompt_rows: PromptRows | None = None,
    masks: Tensor | None = None,
) -> Outcome:
    """One launch: apply the ticket, run a prefill pass of this width (0: a round), write its results."""
    sent.apply(r.table)
    if width:
        outcome = prefill(r, sent.slots, sent.lengths, width, shaping, prompt_rows, masks)
    else:
        outcome = run(r, sent.slots, shaping)
    results.write(sent.entry, outcome)
    return outcome


class Staged:
    """A round in stages, for the host to come between: `propose`, `verify`, then `settle` with masks.

    The same lines as `execute`, run eagerly or captured a stage at a time; what a stage leaves for the next stands
    here.
    """

    def __init__(self, r: Round, results: Results, sent: Sent, shaping: Shaping):
        self.runner = r
        self.results = results
        self.sent = sent
        self.shaping = shaping
        self.verified: Verified | None = None

    def propose(self) -> None:
        self.sent.apply(self.runner.table)
        self.proposed = propose(self.runner, self.sent.slots, self.shaping)
        self.results.write_trees(self.sent.entry, self.proposed.tree)

    def verify(self) -> None:
        self.verified = verify(self.proposed)

    def settle(self, masks: Tensor) -> None:
        assert self.verified is not None
        self.results.write(self.sent.entry, settle(self.verified, masks))


class CpuExecutor:
    def __init__(self, round: Round, overlap: bool):
        self.round = round
        self.results = Results(round.layout, 1, round.pages.dtype, round.pages.device)
        threads = torch.get_num_threads()
        self.worker = ThreadPoolExecutor(1, "espalier-stream", torch.set_num_threads, (threads,)) if overlap else None

    def launch(self, ticket: Ticket) -> Handle:
        return self.submit(self.run, ticket)

    def launch_staged(self, ticket: Ticket) -> StagedHandle:
        return CpuStagedHandle(self, ticket)

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        """Run work on the one stream, after what was submitted before."""
        if self.worker is not None:
            return self.worker.submit(work, *args)
        done: Future[Any] = Future()
        done.set_result(work(*args))
        return done

    @torch.inference_mode()
    def run(self, ticket: Ticket) -> list[Row]:
        masks = None if ticket.masks is None else torch.from_numpy(ticket.masks)
        sent = self._sent(ticket)
        outcome = execute(self.round, self.results, sent, ticket.width, ticket.shaping, ticket.prompt_rows, masks)
        return self._read(ticket, outcome)

    @torch.inference_mode()
    def propose(self, ticket: Ticket) -> Staged:
        staged = Staged(self.round, self.results, self._sent(ticket), ticket.shaping)
        staged.propose()
        return staged

    @torch.inference_mode()
    def settle(self, ticket: Ticket, staged: Staged, masks: np.ndarray) -> list[Row]:
        staged.verify()
        staged.settle(torch.from_numpy(masks))
        return self._read(ticket, None)

    def trees(self, ticket: Ticket) -> Trees:
        return read_trees(self.results.fields, self.results.ring[0, : len(ticket.slots)].numpy())

    def _sent(self, ticket: Ticket) -> Sent:
        self.round.prepare(ticket.committed)
        packed = pack(self.round.table, ticket, entry=0, batch=len(ticket.slots))
        return Sent.of(torch.from_numpy(packed.vector), packed.form)

    def _read(self, ticket: Ticket, outcome: Outcome | None) -> list[Row]:
        batch = len(ticket.slots)
        emitted = None if ticket.num_logprobs is None else tuple(part[0, :batch] for part in self.results.logprobs)
        reported = Reported(emitted, None if outcome is None else outcome.prompt_logprobs)
        return read(self.results.fields, self.results.ring[0, :batch].numpy(), reported, ticket)

    def close(self) -> None:
        if self.worker is not None:
            self.worker.shutdown()


class CpuStagedHandle:
    def __init__(self, executor: CpuExecutor, ticket: Ticket):
        self.executor = executor
        self.ticket = ticket
        self.work = executor.submit(executor.propose, ticket)

    def trees(self) -> Trees:
        self.work.result()
        return self.executor.trees(self.ticket)

    def settle(self, masks: np.ndarray) -> None:
        self.work = self.executor.submit(self.executor.settle, self.ticket, self.work.result(), masks)

    def result(self) -> list[Row]:
        return self.work.result()
