"""Launches on a GPU: one stream for all device state, and rounds replayed as CUDA graphs.

A launch copies one launch input from a ring of pinned buffers and replays the graph of its bucket, or runs the same
lines eagerly: prefill passes, staged rounds that were not captured, and batches above the largest bucket.  The host
waits for nothing but results: a second stream copies a launch's entry of the results' ring, and entry and buffers are
used again only after that copy's event.
"""

import logging
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from espalier.engine.executor import Handle, Staged, Trees, execute
from espalier.engine.launch_buffer import DeviceLaunch, PackedLaunch, pack_launch
from espalier.engine.launch_input import LaunchInput, Row
from espalier.engine.results import Reported, Results, read, read_trees
from espalier.errors import EspalierError
from espalier.kernels.runtime.precompile import precompile
from espalier.layout import ROUNDS_IN_FLIGHT, bucket_of
from espalier.sampling.logit_processors import SamplingNeeds
from espalier.sampling.mask import ALL_ALLOWED, mask_words
from espalier.sampling.pick import Logprobs
from espalier.speculate.round import ModelRunner, RoundOutput

# Kernels read every parameter on the device, so that one graph serves all requests.
ALL_SAMPLING = SamplingNeeds(sampled=True, filtered=True, penalised=True, biased=True)
# One more than can be unread, so that a launch never waits for the copy of the one before it.
RING = ROUNDS_IN_FLIGHT + 1

# (compute, copies) of executors that were closed, for those made later.  PyTorch keeps cuBLAS's workspace of a stream,
# 32 MiB on Hopper, until the process ends: if every executor had new streams, each would leave some memory behind.
# This stands in the module because those workspaces belong to the process too.  Clearing them, a private call, would
# free memory that another engine's graphs still use; with one pair of streams for all engines, a capture of one would
# record the launches of another.  It holds no state of an engine: nothing reads what an idle stream ran.
IDLE_STREAMS: dict[torch.device, list[tuple[torch.cuda.Stream, torch.cuda.Stream]]] = defaultdict(list)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Graph:
    """A captured round: replaying it reads `launch_input`, [n] int64 on the device, in the form that its batch
    gives."""

    batch: int
    launch_input: Tensor
    graph: torch.cuda.CUDAGraph


@dataclass
class Place:
    """One entry of the ring, on the host: pinned buffers, and the event after which they may be used again.

    logprobs: one buffer for each part of a LogprobRing.
    """

    entry: int
    launch_input: Tensor
    results: Tensor
    logprobs: tuple[Tensor, ...]
    copied: torch.cuda.Event = field(default_factory=torch.cuda.Event)


@dataclass(frozen=True)
class CudaHandle:
    """A launch on its way.  reported: pinned, there when the place's event is."""

    results: Results
    place: Place
    launch_input: LaunchInput
    reported: Reported

    def wait(self) -> None:
        self.place.copied.synchronize()

    def result(self) -> list[Row]:
        self.wait()
        entry = self.place.results[: len(self.launch_input.slots)].numpy()
        return read(self.results.fields, entry, self.reported, self.launch_input)


@dataclass(frozen=True)
class StageGraphs:
    """A staged round, captured a stage at a time.  masks: [batch, D, words] int32 on the device, which the last stage
    reads; staged: keeps what one graph leaves for the next."""

    launch_input: Tensor
    masks: Tensor
    propose: torch.cuda.CUDAGraph
    verify: torch.cuda.CUDAGraph
    settle: torch.cuda.CUDAGraph
    staged: Staged


@dataclass
class CudaStagedHandle:
    """A staged round on its way: its trees are on the host once the place's event is done, while the GPU verifies."""

    executor: "CudaExecutor"
    place: Place
    launch_input: LaunchInput
    settle_stage: Callable[[Tensor], None]
    num_nodes: int
    batch: int
    settled: CudaHandle | None = None

    def trees(self) -> Trees:
        self.place.copied.synchronize()
        return read_trees(self.executor.results.fields, self.place.results[: len(self.launch_input.slots)].numpy())

    @torch.inference_mode()
    def settle(self, masks: np.ndarray) -> None:
        """Trees of a batch's own shape have fewer nodes than the results hold; a bucket may have more requests."""
        padded = np.full((self.batch, self.num_nodes, masks.shape[2]), ALL_ALLOWED, dtype=np.int32)
        padded[: len(masks)] = masks[:, : self.num_nodes]
        with torch.cuda.stream(self.executor.stream):
            self.settle_stage(torch.from_numpy(padded).pin_memory())
        self.settled = self.executor.hand_back(self.place, self.launch_input, None)

    def wait(self) -> None:
        assert self.settled is not None
        self.settled.wait()

    def result(self) -> list[Row]:
        assert self.settled is not None
        return self.settled.result()


class CudaExecutor:
    """graph_batch: the largest batch whose rounds are captured; 0 captures none, and every launch is eager.

    capture_stages: whether staged rounds are captured too, three graphs a bucket.
    keep_graphs: PyTorch keeps what the rounds' graphs are made of (CUDAGraph.raw_cuda_graph), so that their kernels can
    be counted.
    replay_events: if it is a list, each replay of a round appends its (start, end) events, for measurements.
    """

    def __init__(self, runner: ModelRunner, graph_batch: int, capture_stages: bool = False, keep_graphs: bool = False):
        self.runner = runner
        self.keep_graphs = keep_graphs
        self.replay_events: list[tuple[torch.cuda.Event, torch.cuda.Event]] | None = None
        layout, self.device = runner.layout, runner.pages.device
        self.results = Results(layout, RING, runner.pages.dtype, self.device)
        self.buckets = layout.batch_buckets(graph_batch)
        idle = IDLE_STREAMS[self.device]
        streams = idle.pop() if idle else (torch.cuda.Stream(self.device), torch.cuda.Stream(self.device))
        self.stream, self.copies = streams
        self._give_streams_back = weakref.finalize(self, idle.append, streams)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        widest = len(pack_launch(runner.table, of_dummies(layout.max_batch), 0, layout.max_batch).vector)
        self.ring = [
            Place(
                entry,
                torch.zeros(widest, dtype=torch.int64, pin_memory=True),
                torch.zeros(layout.max_batch, self.results.fields.width, dtype=torch.int64, pin_memory=True),
                tuple(torch.zeros(part.shape[1:], dtype=part.dtype, pin_memory=True) for part in self.results.logprobs),
            )
            for entry in range(RING)
        ]
        self.num_launched = 0
        self.graphs: dict[int, Graph] = {}
        self.stage_graphs: dict[int, StageGraphs] = {}
        self.capture_stages = capture_stages
        # A capture waits for the current device, which need not be ours.
        with torch.cuda.device(self.device):
            self._capture()

    @torch.inference_mode()
    def launch(self, launch_input: LaunchInput) -> Handle:
        place, batch, packed = self._packed(launch_input)
        graph = None if launch_input.is_prefill else self.graphs.get(batch)
        outcome = None
        with torch.cuda.stream(self.stream):
            if graph is not None:
                graph.launch_input.copy_(_pinned(place.launch_input, packed), non_blocking=True)
                self._replay(graph.graph)
            else:
                outcome = self._eager(launch_input, packed)
        return self.hand_back(place, launch_input, outcome)

    def _replay(self, graph: torch.cuda.CUDAGraph) -> None:
        if self.replay_events is None:
            graph.replay()
            return
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        self.replay_events.append((start, end))

    def _packed(self, launch_input: LaunchInput) -> tuple[Place, int, PackedLaunch]:
        """The ring's next place, once it is free; the batch with its padding; the launch input as a vector."""
        place = self.ring[self.num_launched % RING]
        self.num_launched += 1
        place.copied.synchronize()
        batch = self._batch(launch_input)
        self.runner.prepare(launch_input.committed)
        return place, batch, pack_launch(self.runner.table, launch_input, place.entry, batch)

    @torch.inference_mode()
    def launch_staged(self, launch_input: LaunchInput) -> CudaStagedHandle:
        """Propose, bring the trees to the host, and verify meanwhile."""
        place, batch, packed = self._packed(launch_input)
        graphs = self.stage_graphs.get(batch)
        with torch.cuda.stream(self.stream):
            if graphs is None:
                staged = Staged(self.runner, self.results, self._sent(packed), ALL_SAMPLING)
                stages: tuple[Callable[[], None], ...] = (staged.propose, staged.verify)
                last = self._eager_settle(staged)
            else:
                graphs.launch_input.copy_(_pinned(place.launch_input, packed), non_blocking=True)
                stages = (graphs.propose.replay, graphs.verify.replay)
                last = _replayed_settle(graphs)
            stages[0]()
            self._copy_entry(place, len(launch_input.slots))
            stages[1]()
        nodes = self.runner.layout.at(batch).num_draft_tokens
        return CudaStagedHandle(self, place, launch_input, last, nodes, batch)

    def _eager_settle(self, staged: Staged) -> Callable[[Tensor], None]:
        return lambda masks: staged.settle(masks.to(self.device, non_blocking=True))

    def _copy_entry(self, place: Place, batch: int) -> None:
        """Bring an entry of the results to the host beside whatever the compute stream does next."""
        self.copies.wait_stream(self.stream)
        with torch.cuda.stream(self.copies):
            place.results[:batch].copy_(self.results.ring[place.entry, :batch], non_blocking=True)
            place.copied.record(self.copies)

    @torch.inference_mode()
    def compile(self, launch_inputs: Iterable[LaunchInput]) -> None:
        """Have every kernel that launches of these launch inputs need, before they run: compiled side by side.

        launch_inputs: of dummies.  The same lines run as in a launch, on the same stream; no kernel does, and of what
        they write only the dummy request's cells stay.
        """
        began = time.perf_counter()
        with Console(stderr=True).status("compiling kernels"), torch.cuda.stream(self.stream), precompile() as asked:
            for launch_input in launch_inputs:
                self.runner.prepare(launch_input.committed)
                self._eager(launch_input, pack_launch(self.runner.table, launch_input, 0, self._batch(launch_input)))
        self.stream.synchronize()
        if asked:
            log.info(
                "%d kernels compiled, or read from Triton's cache, in %.1f s", len(asked), time.perf_counter() - began
            )

    def bucket(self, batch: int) -> int:
        """What a round is padded to, run eagerly or not."""
        return bucket_of(batch, self.buckets)

    def _batch(self, launch_input: LaunchInput) -> int:
        return len(launch_input.slots) if launch_input.is_prefill else self.bucket(len(launch_input.slots))

    def _eager(self, launch_input: LaunchInput, packed: PackedLaunch) -> RoundOutput:
        masks = None
        if launch_input.masks is not None:
            masks = torch.from_numpy(launch_input.masks).pin_memory().to(self.device, non_blocking=True)
        device_launch = self._sent(packed)
        return execute(
            self.runner, self.results, device_launch, launch_input.width, ALL_SAMPLING, launch_input.prompt_rows, masks
        )

    def _sent(self, packed: PackedLaunch) -> DeviceLaunch:
        vector = torch.from_numpy(packed.vector).pin_memory().to(self.device, non_blocking=True)
        return DeviceLaunch.of(vector, packed.form)

    def hand_back(self, place: Place, launch_input: LaunchInput, outcome: RoundOutput | None) -> CudaHandle:
        """Copy what was decided, and the log-probabilities that were asked for, to the host.

        outcome: of a launch that ran eagerly, which alone can bring log-probabilities of a prompt.
        """
        batch, emitted, prompt = len(launch_input.slots), None, None
        of_prompt = None if outcome is None else outcome.prompt_logprobs
        self.copies.wait_stream(self.stream)
        with torch.cuda.stream(self.copies):
            if launch_input.num_logprobs is not None:
                emitted = tuple(part[:batch] for part in place.logprobs)
                for there, part in zip(emitted, self.results.logprobs, strict=True):
                    there.copy_(part[place.entry, :batch], non_blocking=True)
            if of_prompt is not None:
                prompt = Logprobs(*map(self._to_host, of_prompt))
            self._copy_entry(place, batch)
        return CudaHandle(self.results, place, launch_input, Reported(emitted, prompt))

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
                if self.capture_stages:
                    self.stage_graphs[batch] = self._captured_stages(batch, pool)
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
        packed = pack_launch(self.runner.table, dummies, 0, batch)
        self.runner.prepare(dummies.committed)
        with torch.cuda.stream(self.stream):
            launch_input = torch.from_numpy(packed.vector).to(self.device)
            device_launch = DeviceLaunch.of(launch_input, packed.form)
            # Loads libraries' kernels and sizes workspaces, which a capture cannot.
            execute(self.runner, self.results, device_launch, 0, ALL_SAMPLING)
            self.stream.synchronize()
        graph = torch.cuda.CUDAGraph(keep_graph=self.keep_graphs)
        with torch.cuda.graph(graph, pool=pool, stream=self.stream):
            execute(self.runner, self.results, device_launch, 0, ALL_SAMPLING)
        if self.keep_graphs:  # else PyTorch did so when the capture ended
            graph.instantiate()
        return Graph(batch, launch_input, graph)

    @torch.inference_mode()
    def _captured_stages(self, batch: int, pool: Any) -> StageGraphs:
        packed = pack_launch(self.runner.table, of_dummies(batch), 0, batch)
        nodes, words = self.runner.layout.at(batch).num_draft_tokens, mask_words(self.runner.target.config.vocab_size)
        with torch.cuda.stream(self.stream):
            launch_input = torch.from_numpy(packed.vector).to(self.device)
            masks = torch.full((batch, nodes, words), ALL_ALLOWED, dtype=torch.int32, device=self.device)
            warm = Staged(self.runner, self.results, DeviceLaunch.of(launch_input, packed.form), ALL_SAMPLING)
            warm.propose()
            warm.verify()
            warm.settle(masks)
            self.stream.synchronize()
        staged = Staged(self.runner, self.results, DeviceLaunch.of(launch_input, packed.form), ALL_SAMPLING)
        new = torch.cuda.CUDAGraph
        graphs = StageGraphs(launch_input, masks, new(), new(), new(), staged)
        stages = (graphs.propose, staged.propose), (graphs.verify, staged.verify)
        for graph, stage in (*stages, (graphs.settle, lambda: staged.settle(masks))):
            with torch.cuda.graph(graph, pool=pool, stream=self.stream):
                stage()
        return graphs

    def close(self) -> None:
        """Waits for what is in flight, then lets go of the graphs and their memory."""
        try:
            torch.cuda.synchronize(self.device)
        finally:
            self.graphs.clear()
            self.stage_graphs.clear()
            self._give_streams_back()


def _replayed_settle(graphs: StageGraphs) -> Callable[[Tensor], None]:
    def settle(masks: Tensor) -> None:
        graphs.masks.copy_(masks, non_blocking=True)
        graphs.settle.replay()

    return settle


def of_dummies(batch: int, width: int = 0) -> LaunchInput:
    """A launch that changes nobody: so many rows of the dummy request, a round or a prefill pass of `width`."""
    dummies = (0,) * batch
    return LaunchInput(slots=dummies, needs=ALL_SAMPLING, lengths=dummies if width else (), width=width)


def _pinned(buffer: Tensor, packed: PackedLaunch) -> Tensor:
    """The packed vector in a pinned buffer of its length or more."""
    used = buffer[: len(packed.vector)]
    np.copyto(used.numpy(), packed.vector)
    return used
