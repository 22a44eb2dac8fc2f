"""Launches on a GPU: one stream for all device state, and rounds replayed as CUDA graphs.

A launch copies one ticket from a ring of pinned buffers and replays the graph of its bucket, or runs the same lines
eagerly: prefill passes, rounds that report log-probabilities, and batches above the largest bucket.  The host waits for
nothing but results: a second stream copies a launch's entry of the results' ring, and entry and buffers are used again
only after that copy's event.
"""

import logging
import time
import weakref
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from espalier.engine.executor import Handle, execute
from espalier.engine.results import Results, read
from espalier.engine.ticket import Row, Ticket
from espalier.engine.wire import Packed, Sent, pack
from espalier.errors import EspalierError
from espalier.kernels.together import together
from espalier.layout import ROUNDS_IN_FLIGHT, bucket_of
from espalier.sampling.pick import Logprobs
from espalier.sampling.shape import Shaping
from espalier.speculate.round import Round

# Kernels read every parameter on the device, so that one graph serves all requests.
EVERYTHING = Shaping(sampled=True, filtered=True, penalised=True, biased=True)
# One more than can be unread, so that a launch never waits for the copy of the one before it.
RING = ROUNDS_IN_FLIGHT + 1

# (compute, copies) that an executor has left.  PyTorch keeps cuBLAS's workspace of a stream, 32 MiB on Hopper, as long
# as the process runs: if every executor had new streams, each would leave some memory behind.
IDLE_STREAMS: dict[torch.device, list[tuple[torch.cuda.Stream, torch.cuda.Stream]]] = defaultdict(list)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Graph:
    """A captured round: replaying it reads `ticket`, [n] int64 on the device, in the form that its batch gives."""

    batch: int
    ticket: Tensor
    graph: torch.cuda.CUDAGraph


@dataclass
class Place:
    """One entry of the ring, on the host: pinned buffers, and the event after which they may be used again."""

    entry: int
    ticket: Tensor
    results: Tensor
    copied: torch.cuda.Event = field(default_factory=torch.cuda.Event)


@dataclass(frozen=True)
class CudaHandle:
    """A launch on its way.  logprobs: pinned, there when the place's event is."""

    results: Results
    place: Place
    batch: int
    traced: bool
    logprobs: Logprobs | None

    def result(self) -> list[Row]:
        self.place.copied.synchronize()
        entry = self.place.results[: self.batch].numpy()
        return read(self.results.fields, entry, self.logprobs, self.traced)


class CudaExecutor:
    """graph_batch: the largest batch whose rounds are captured; 0 captures none, and every launch is eager."""

    def __init__(self, round: Round, graph_batch: int):
        self.round = round
        layout, self.device = round.layout, round.pages.device
        self.results = Results(layout, RING, self.device)
        self.buckets = layout.batch_buckets(graph_batch)
        idle = IDLE_STREAMS[self.device]
        streams = idle.pop() if idle else (torch.cuda.Stream(self.device), torch.cuda.Stream(self.device))
        self.stream, self.copies = streams
        self._give_streams_back = weakref.finalize(self, idle.append, streams)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        widest = len(pack(round.table, of_dummies(layout.max_batch), 0, layout.max_batch).vector)
        self.ring = [
            Place(
                entry,
                torch.zeros(widest, dtype=torch.int64, pin_memory=True),
                torch.zeros(layout.max_batch, self.results.fields.width, dtype=torch.int64, pin_memory=True),
            )
            for entry in range(RING)
        ]
        self.num_launched = 0
        self.graphs: dict[int, Graph] = {}
        # A capture waits for the current device, which need not be ours.
        with torch.cuda.device(self.device):
            self._capture()

    @torch.inference_mode()
    def launch(self, ticket: Ticket) -> Handle:
        place = self.ring[self.num_launched % RING]
        self.num_launched += 1
        place.copied.synchronize()
        batch = self._batch(ticket)
        packed = pack(self.round.table, ticket, place.entry, batch)
        self.round.prepare(ticket.committed)
        graph = None if ticket.is_prefill or ticket.num_logprobs is not None else self.graphs.get(batch)
        with torch.cuda.stream(self.stream):
            if graph is not None:
                graph.ticket.copy_(_pinned(place.ticket, packed), non_blocking=True)
                graph.graph.replay()
                logprobs = None
            else:
                logprobs = self._eager(ticket, packed)
        return self._handed_back(place, ticket, logprobs)

    @torch.inference_mode()
    def compile(self, tickets: Iterable[Ticket]) -> None:
        """Have every kernel that launches of these tickets need, before they run: compiled side by side.

        tickets: of dummies.  The same lines run as in a launch, on the same stream; no kernel does, and of what they
        write only the dummy request's cells stay.
        """
        began = time.perf_counter()
        with Console(stderr=True).status("compiling kernels"), torch.cuda.stream(self.stream), together() as asked:
            for ticket in tickets:
                self.round.prepare(ticket.committed)
                self._eager(ticket, pack(self.round.table, ticket, 0, self._batch(ticket)))
        self.stream.synchronize()
        if asked:
            log.info(
                "%d kernels compiled, or read from Triton's cache, in %.1f s", len(asked), time.perf_counter() - began
            )

    def bucket(self, batch: int) -> int:
        """What a round is padded to, run eagerly or not."""
        return bucket_of(batch, self.buckets)

    def _batch(self, ticket: Ticket) -> int:
        return len(ticket.slots) if ticket.is_prefill else self.bucket(len(ticket.slots))

    def _eager(self, ticket: Ticket, packed: Packed) -> Logprobs | None:
        vector = torch.from_numpy(packed.vector).pin_memory().to(self.device, non_blocking=True)
        sent = Sent.of(vector, packed.form)
        return execute(self.round, self.results, sent, ticket.width, EVERYTHING, ticket.num_logprobs)

    def _handed_back(self, place: Place, ticket: Ticket, logprobs: Logprobs | None) -> CudaHandle:
        """Bring the entry to the host beside whatever the compute stream does next."""
        batch = len(ticket.slots)
        self.copies.wait_stream(self.stream)
        with torch.cuda.stream(self.copies):
            place.results[:batch].copy_(self.results.ring[place.entry, :batch], non_blocking=True)
            there = None if logprobs is None else Logprobs(*(self._to_host(part) for part in logprobs))
            place.copied.record(self.copies)
        return CudaHandle(self.results, place, batch, ticket.traced, there)

    def _to_host(self, value: Tensor) -> Tensor:
        value.record_stream(self.copies)
        there = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        return there.copy_(value, non_blocking=True)

    def _capture(self) -> None:
        """One graph a bucket, the largest first, so that the others find its memory in their pool."""
        if not self.buckets:
            return
        began, before = time.perf_counter(), torch.cuda.memory_reserved(self.device)
        pool = torch.cuda.graph_pool_handle()
        console = Console(stderr=True)
        batches = self.buckets[::-1]
        batch = batches[0]
        try:
            self.compile(map(of_dummies, batches))
            for batch in track(batches, "capturing CUDA graphs", console=console, transient=True):
                self.graphs[batch] = self._captured(batch, pool)
        except torch.OutOfMemoryError:
            raise EspalierError(
                f"the graph of batch {batch} does not fit {self.device}; lower num_pages, graph_batch or max_batch"
            ) from None
        taken = (torch.cuda.memory_reserved(self.device) - before) / 2**20
        seconds = time.perf_counter() - began
        log.info("captured rounds of %s as CUDA graphs: %.1f s, %.0f MiB", list(self.buckets), seconds, taken)

    @torch.inference_mode()
    def _captured(self, batch: int, pool: Any) -> Graph:
        dummies = of_dummies(batch)
        packed = pack(self.round.table, dummies, 0, batch)
        self.round.prepare(dummies.committed)
        with torch.cuda.stream(self.stream):
            ticket = torch.from_numpy(packed.vector).to(self.device)
            sent = Sent.of(ticket, packed.form)
            # Loads libraries' kernels and sizes workspaces, which a capture cannot.
            execute(self.round, self.results, sent, 0, EVERYTHING, None)
            self.stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=self.stream):
            execute(self.round, self.results, sent, 0, EVERYTHING, None)
        return Graph(batch, ticket, graph)

    def close(self) -> None:
        """Waits for what is in flight, then lets go of the graphs and their memory."""
        try:
            torch.cuda.synchronize(self.device)
        finally:
            self.graphs.clear()
            self._give_streams_back()


def of_dummies(batch: int, width: int = 0) -> Ticket:
    """A launch that changes nobody: so many rows of the dummy request, a round or a prefill pass of `width`."""
    dummies = (0,) * batch
    return Ticket(slots=dummies, shaping=EVERYTHING, lengths=dummies if width else (), width=width)


def _pinned(buffer: Tensor, packed: Packed) -> Tensor:
    """The packed vector in a pinned buffer of its length or more."""
    used = buffer[: len(packed.vector)]
    np.copyto(used.numpy(), packed.vector)
    return used
