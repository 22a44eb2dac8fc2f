"""The GPU executor: one compute stream writes all device state.  Rounds and most prefill passes run as CUDA graphs.

A launch copies its launch input from a pinned buffer and replays the CUDA graph of its form (LaunchForm).  The batch of
a round is padded to a bucket size, and a prefill pass to one of ModelRunner.captured_passes.  Staged rounds have graphs
of their own (cuda_stages.py).  Other launches run the same code eagerly: batches above `graph_batch`, passes that fit
no captured form, and passes that a grammar masks or that report log-probabilities of the prompt.
The host waits only for results.  A second stream copies the launch's entry of the results ring to the host.  The entry
and its pinned buffers are used again only after that copy has ended.

All graphs are captured, and all kernels of graphs and of eager launches are compiled, before the first launch
(startup/measure_memory.py).  So no request waits for a compiler.
"""

import logging
import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from espalier.engine.cuda_stages import (
    CAPTURE_ERROR_MODE,
    EagerStages,
    RoundStages,
    StageMemory,
    no_garbage_collection,
)
from espalier.engine.cuda_streams import give_streams_back, take_streams
from espalier.engine.executor import LaunchHandle, run_launch
from espalier.engine.launch_buffer import LaunchBuffer, pack_launch
from espalier.engine.launch_input import ALL_SAMPLING_FEATURES, LaunchInput, RequestResult, dummy_launch
from espalier.engine.masks import AskBeamMasks, DraftGuideRows, HostTrees, NodeMasks
from espalier.engine.results import ResultsRing, read_results, read_trees
from espalier.errors import EspalierError
from espalier.kernels.ops.sampling import pack_logprob_rows
from espalier.kernels.runtime.precompile import precompile
from espalier.layout import MAX_ROUNDS_IN_FLIGHT, LaunchForm, padded_batch
from espalier.speculate.round import ModelRunner, RoundOutput

# At most MAX_ROUNDS_IN_FLIGHT launches are unread.  With one more entry, a launch never waits until an entry is copied.
RING_ENTRIES = MAX_ROUNDS_IN_FLIGHT + 1

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CapturedLaunch:
    """A captured launch.  vector: [n] int64 on the device, the packed launch input that a replay of `graph` reads.  The
    vector of a prefill pass has no slot-table updates (CudaExecutor._copy_to_graph)."""

    vector: Tensor
    graph: torch.cuda.CUDAGraph


@dataclass
class HostEntry:
    """The pinned host buffers for one entry of the results ring.

    vector: the packed launch.  results: the copy of the ring entry.  written_event: recorded when the entry is written.
    copied_event: recorded when `results` is complete, after which both buffers may be used again."""

    entry_index: int
    vector: Tensor
    results: Tensor
    written_event: torch.cuda.Event = field(default_factory=torch.cuda.Event)
    copied_event: torch.cuda.Event = field(default_factory=torch.cuda.Event)


@dataclass(frozen=True)
class CudaLaunchHandle:
    """A launch in flight.  prompt_logprobs: [N, words], pinned; complete after `host_entry.copied_event`."""

    results: ResultsRing
    host_entry: HostEntry
    launch_input: LaunchInput
    prompt_logprobs: Tensor | None

    def wait(self) -> None:
        self.host_entry.copied_event.synchronize()

    def result(self) -> list[RequestResult]:
        self.wait()
        entry = self.host_entry.results[: len(self.launch_input.slots)].numpy()
        return read_results(self.results.columns, entry, self.prompt_logprobs, self.launch_input)


@dataclass
class CudaStagedHandle:
    """A staged round in flight.  Its trees are on the host after `host_entry.copied_event`, while the GPU verifies.

    stages: the stages for this batch size; None once the round is settled."""

    executor: "CudaExecutor"
    host_entry: HostEntry
    launch_input: LaunchInput
    stages: RoundStages | None
    settled_handle: CudaLaunchHandle = field(init=False)

    @torch.inference_mode()
    def resume(self, guide: DraftGuideRows | None, ask_beam_masks: AskBeamMasks) -> None:
        """Runs propose with the grammars' guide, then runs verify while the trees are copied to the host.

        All requests wait while the draft asks the host.  So it asks only if at least half of them have a grammar."""
        assert self.stages is not None
        batch = len(self.launch_input.slots)
        asks = guide is not None and 2 * len(guide.rows) >= batch
        with torch.cuda.stream(self.executor.stream):
            self.stages.set_guide(guide)
            self.stages.propose(ask_beam_masks if asks else None)
            self.executor.copy_entry(self.host_entry, batch)
            self.stages.verify()

    def trees(self) -> HostTrees:
        self.host_entry.copied_event.synchronize()
        entry = self.host_entry.results[: len(self.launch_input.slots)].numpy()
        return read_trees(self.executor.results.columns, entry)

    @torch.inference_mode()
    def settle(self, masks: NodeMasks) -> None:
        assert self.stages is not None
        with torch.cuda.stream(self.executor.stream):
            self.stages.set_masks(masks)
            self.stages.settle()
            self.settled_handle = self.executor.start_readback(self.host_entry, self.launch_input, None)
        # If the round ran eagerly, this frees its tensors.  The next round may start before this round is read.
        self.stages = None

    def wait(self) -> None:
        self.settled_handle.wait()

    def result(self) -> list[RequestResult]:
        return self.settled_handle.result()


class CudaExecutor:
    """Runs launches on one GPU.

    graph_batch: the largest batch whose rounds are captured; 0: every launch runs eagerly.  Larger batches are padded
    to bucket sizes too, so that kernels are compiled for few sizes.
    keep_graphs: whether PyTorch keeps CUDAGraph.raw_cuda_graph, so that the kernels of graphs can be counted.
    overlap: whether a round may be launched before the previous round is read.  With overlap, attention is captured for
    lengths that the host does not know exactly.
    capture_stages: whether staged rounds (rounds with grammars) are captured too.  If False, they run eagerly.
    captured_passes: the forms of captured prefill passes; empty if no round is captured or no pass can be captured.
    replay_events: for measurements: the (start, end) CUDA events of each replay; None to record no events."""

    failure: Exception | None = None
    runs_any_tree = False

    def __init__(
        self,
        runner: ModelRunner,
        graph_batch: int,
        keep_graphs: bool = False,
        overlap: bool = True,
        capture_stages: bool = False,
    ):
        self.runner = runner
        self.overlap = overlap
        self.keep_graphs = keep_graphs
        self.capture_stages = capture_stages
        self.replay_events: list[tuple[torch.cuda.Event, torch.cuda.Event]] | None = None
        layout, self.device = runner.layout, runner.pages.device
        self.results = ResultsRing(layout, runner.target.config.vocab_size, RING_ENTRIES, self.device)
        self.captured_buckets = layout.batch_buckets(graph_batch)
        larger = (batch for batch in layout.batch_buckets(layout.max_batch) if batch > graph_batch)
        self.batch_buckets = (*self.captured_buckets, *larger)
        self.stream, self.copy_stream = streams = take_streams(self.device)
        self._give_streams_back = weakref.finalize(self, give_streams_back, self.device, streams)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        self.captured_passes = runner.captured_passes if graph_batch else ()
        max_size = len(self._pack(dummy_launch(layout.max_batch), 0, LaunchForm(layout.max_batch)).vector)
        pinned = partial(torch.zeros, dtype=torch.int64, pin_memory=True)
        results_shape = self.results.ring.shape[1:]
        self.host_ring = [HostEntry(entry, pinned(max_size), pinned(results_shape)) for entry in range(RING_ENTRIES)]
        self.num_launched = 0
        self.graphs: dict[LaunchForm, CapturedLaunch] = {}
        self.stage_graphs: dict[int, RoundStages] = {}
        self.stage_memory = StageMemory(self.device)
        # A capture synchronizes the current device, so make that the executor's device.
        with torch.cuda.device(self.device), no_garbage_collection():
            self._capture()

    @torch.inference_mode()
    def launch(self, launch_input: LaunchInput) -> LaunchHandle:
        if launch_input.is_staged:
            return self._launch_staged(launch_input)
        host_entry, form, packed = self._pack_into_ring(launch_input)
        graph = self.graph_of(launch_input)
        output = None
        with torch.cuda.stream(self.stream):
            self._prepare_launch(launch_input, form, graph is not None)
            if graph is None:
                output = self._run_eager_launch(launch_input, packed, form)
            else:
                self._copy_to_graph(launch_input.is_prefill, packed, host_entry.vector, graph)
                self._replay(graph.graph)
            return self.start_readback(host_entry, launch_input, output)

    def _copy_to_graph(
        self, is_prefill: bool, packed: LaunchBuffer, pinned_buffer: Tensor, graph: CapturedLaunch
    ) -> None:
        """Copies a launch to the vector that its graph reads.  A graph has fixed sizes, but a prefill pass has any
        number of slot-table updates.  So for a prefill pass, the slot table is updated before the graph runs."""
        if not is_prefill:
            graph.vector.copy_(_copy_to_pinned(pinned_buffer, packed), non_blocking=True)
            return
        device_launch = self._to_device(packed)
        device_launch.update_slot_table(self.runner.table)
        graph.vector.copy_(device_launch.vector[: len(graph.vector)])

    def _replay(self, graph: torch.cuda.CUDAGraph) -> None:
        if self.replay_events is None:
            graph.replay()
            return
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        self.replay_events.append((start, end))

    def _pack_into_ring(self, launch_input: LaunchInput) -> tuple[HostEntry, LaunchForm, LaunchBuffer]:
        """Waits until the next host buffers are free.  Returns these buffers, the padded form and the packed launch."""
        host_entry = self.host_ring[self.num_launched % RING_ENTRIES]
        self.num_launched += 1
        host_entry.copied_event.synchronize()
        form = self.form_of(launch_input)
        return host_entry, form, self._pack(launch_input, host_entry.entry_index, form)

    def _pack(self, launch_input: LaunchInput, ring_entry: int, form: LaunchForm) -> LaunchBuffer:
        """Packs a launch.  For a model with recurrent states, the vector always has the snapshot parts, because the
        CUDA graphs of such a model always read these parts."""
        has_snapshots = self.runner.cache.states is not None
        return pack_launch(self.runner.table, launch_input, ring_entry, form, has_snapshots)

    def _prepare_launch(
        self, launch_input: LaunchInput, form: LaunchForm, in_graph: bool, is_captured_now: bool = False
    ) -> None:
        """On the compute stream: clears pages, copies recurrent states, prepares attention for committed lengths."""
        self.runner.cache.before_launch(launch_input.cleared_pages, launch_input.state_copies)
        # A prefill pass has one committed length for each piece, a round one for each request.
        lengths = launch_input.committed_lengths.padded_to(form.pieces or form.batch)
        exact = not self.overlap if is_captured_now else lengths.exact
        self.runner.prepare(replace(lengths, exact=exact, in_graph=in_graph))

    def _launch_staged(self, launch_input: LaunchInput) -> CudaStagedHandle:
        host_entry, form, packed = self._pack_into_ring(launch_input)
        captured = self.stage_graphs.get(form.batch)
        with torch.cuda.stream(self.stream):
            self._prepare_launch(launch_input, form, captured is not None)
            if captured is None:
                stages = self._eager_stages(packed, form.batch).stages
            else:
                stages = captured
                stages.vector.copy_(_copy_to_pinned(host_entry.vector, packed), non_blocking=True)
            stages.begin()
        return CudaStagedHandle(self, host_entry, launch_input, stages)

    def _eager_stages(self, packed: LaunchBuffer, batch: int) -> EagerStages:
        return EagerStages(self.runner, self.results, packed, ALL_SAMPLING_FEATURES, batch, self.stage_memory)

    def copy_entry(self, host_entry: HostEntry, batch: int, prompt_logprobs: Tensor | None = None) -> Tensor | None:
        """Copies `batch` rows of a ring entry to the host on the copy stream, while the compute stream goes on.

        Called on the compute stream.  Returns a pinned copy of prompt_logprobs, complete after `copied_event`."""
        host_entry.written_event.record(self.stream)
        self.copy_stream.wait_event(host_entry.written_event)
        # `with torch.cuda.stream` would first look up the current stream and device, which takes longer than the copy.
        torch.cuda.set_stream(self.copy_stream)
        host_logprobs = None
        if prompt_logprobs is not None:
            prompt_logprobs.record_stream(self.copy_stream)
            host_logprobs = torch.empty(prompt_logprobs.shape, dtype=prompt_logprobs.dtype, pin_memory=True)
            host_logprobs.copy_(prompt_logprobs, non_blocking=True)
        host_entry.results[:batch].copy_(self.results.ring[host_entry.entry_index, :batch], non_blocking=True)
        host_entry.copied_event.record(self.copy_stream)
        torch.cuda.set_stream(self.stream)
        return host_logprobs

    @torch.inference_mode()
    def compile_kernels(self, launch_inputs: Iterable[LaunchInput]) -> None:
        """Compiles all kernels that these launches need, in parallel.

        launch_inputs: launches of dummy slots.  The Python code of a launch runs, but its Triton kernels are only
        compiled.  No data of other slots changes."""
        began_s, launches = time.perf_counter(), list(launch_inputs)
        with Console(stderr=True).status("compiling kernels"), precompile() as kernels:
            for launch_input in launches:
                self.run_eagerly(launch_input)
            requested_s = time.perf_counter() - began_s
        self.stream.synchronize()
        total_s = time.perf_counter() - began_s
        if kernels:
            text = "%d kernels compiled, or read from Triton's cache, in %.1f s; %d launches asked for them in %.1f s"
            log.info(text, len(kernels), total_s, len(launches), requested_s)

    @torch.inference_mode()
    def run_dummy_launch(self, launch_input: LaunchInput) -> None:
        """Runs a launch of dummy slots to its end, for measurements."""
        if launch_input.is_staged:
            self.run_eagerly(launch_input)
            self.stream.synchronize()
        else:
            self.launch(launch_input).result()

    def run_eagerly(self, launch_input: LaunchInput) -> None:
        """Runs a launch of dummy slots without a graph.  Inside precompile(), this only requests the kernels that the
        launch needs."""
        form = self.form_of(launch_input)
        packed = self._pack(launch_input, 0, form)
        with torch.cuda.stream(self.stream):
            self._prepare_launch(launch_input, form, in_graph=False)
            if launch_input.is_staged:
                self._eager_stages(packed, form.batch).run()
            else:
                self._run_eager_launch(launch_input, packed, form)

    def form_of(self, launch_input: LaunchInput) -> LaunchForm:
        """Returns the form that a launch is padded to, whether it runs eagerly or as a CUDA graph.

        The batch of a round is padded to a bucket.  A batch above max_batch stays as it is, and is refused later."""
        if launch_input.is_prefill:
            return launch_input.form(self.captured_passes)
        return LaunchForm(padded_batch(len(launch_input.slots), self.batch_buckets), tree=launch_input.tree)

    def graph_of(self, launch_input: LaunchInput) -> CapturedLaunch | None:
        """Returns the graph that a launch replays; None for an eager launch, even if a graph has the same form."""
        return None if launch_input.is_eager_only else self.graphs.get(self.form_of(launch_input))

    def _run_eager_launch(self, launch_input: LaunchInput, packed: LaunchBuffer, form: LaunchForm) -> RoundOutput:
        masks = None
        if launch_input.masks is not None:
            masks = torch.from_numpy(launch_input.masks).pin_memory().to(self.device, non_blocking=True)
        runner, device_launch = self.runner.for_tree(form.tree), self._to_device(packed)
        arguments = (launch_input.width, ALL_SAMPLING_FEATURES, launch_input.prompt_rows, masks)
        return run_launch(runner, self.results, device_launch, *arguments)

    def _to_device(self, packed: LaunchBuffer) -> LaunchBuffer:
        vector = torch.from_numpy(packed.vector).pin_memory().to(self.device, non_blocking=True)
        return packed.with_vector(vector)

    def start_readback(
        self, host_entry: HostEntry, launch_input: LaunchInput, output: RoundOutput | None
    ) -> CudaLaunchHandle:
        """Starts copying the results and the prompt's log-probabilities to the host.  Called on the compute stream.

        output: the output of an eager launch, for its prompt log-probabilities; None for other launches."""
        prompt_logprobs = None
        if output is not None and output.prompt_logprobs is not None:
            prompt_logprobs = pack_logprob_rows(*output.prompt_logprobs)
        host_logprobs = self.copy_entry(host_entry, len(launch_input.slots), prompt_logprobs)
        return CudaLaunchHandle(self.results, host_entry, launch_input, host_logprobs)

    def _capture(self) -> None:
        """Captures rounds, then prefill passes, each from large to small, so that later graphs reuse the memory."""
        if not self.captured_buckets:
            return
        began_s, reserved_before = time.perf_counter(), torch.cuda.memory_reserved(self.device)
        graph_pool, passes = torch.cuda.graph_pool_handle(), self.captured_passes[::-1]
        forms = [*self.runner.layout.round_forms(self.captured_buckets), *passes]
        subject = "a launch that compiles kernels"
        try:
            self.compile_kernels([*self.dummy_rounds, *(dummy_launch(*form) for form in passes)])
            for form in track(forms, "capturing CUDA graphs", console=Console(stderr=True), transient=True):
                subject = f"the CUDA graph of {form.name}"
                self.graphs[form] = self.capture_graph(form, graph_pool)
        except torch.OutOfMemoryError:
            raise EspalierError(
                f"{subject} does not fit into the memory of {self.device}; lower num_pages, graph_batch or max_batch"
            ) from None
        self._log_captured(
            f"{len(passes)} prefill passes and {len(forms) - len(passes)} rounds", began_s, reserved_before
        )
        if self.capture_stages:
            self._capture_stages(graph_pool)

    @property
    def dummy_rounds(self) -> list[LaunchInput]:
        """Rounds of dummy slots, one for each form of a round, the largest first."""
        rounds = [dummy_launch(*form) for form in self.runner.layout.round_forms(self.batch_buckets)]
        staged = self.batch_buckets[::-1] if self.capture_stages else ()
        return [*rounds, *(replace(dummy_launch(batch), is_staged=True) for batch in staged)]

    def _log_captured(self, subject: str, began_s: float, reserved_bytes: int) -> None:
        mib = (torch.cuda.memory_reserved(self.device) - reserved_bytes) / 2**20
        seconds, batches = time.perf_counter() - began_s, list(self.captured_buckets)
        log.info("captured CUDA graphs of %s, batches %s: %.1f s, %.0f MiB", subject, batches, seconds, mib)

    @torch.inference_mode()
    def capture_graph(self, form: LaunchForm, graph_pool: Any) -> CapturedLaunch:
        """Captures a launch of dummy slots with this form.  graph_pool: PyTorch's handle of the memory that all graphs
        share."""
        dummy_input, runner = dummy_launch(*form), self.runner.for_tree(form.tree)
        packed = self._pack(dummy_input, 0, form)
        with torch.cuda.stream(self.stream):
            self._prepare_launch(dummy_input, form, in_graph=True, is_captured_now=True)
            vector = torch.from_numpy(packed.vector).to(self.device)
            device_launch = packed.with_vector(vector)
            # Run once eagerly: libraries load kernels and allocate workspaces, which is not allowed in a capture.
            run_launch(runner, self.results, device_launch, form.width, ALL_SAMPLING_FEATURES)
            self.stream.synchronize()
        graph = torch.cuda.CUDAGraph(keep_graph=self.keep_graphs)
        with torch.cuda.graph(graph, pool=graph_pool, stream=self.stream, capture_error_mode=CAPTURE_ERROR_MODE):
            run_launch(runner, self.results, device_launch, form.width, ALL_SAMPLING_FEATURES)
        if self.keep_graphs:  # else PyTorch instantiated the graph when the capture ended
            graph.instantiate()
        return CapturedLaunch(vector, graph)

    def _capture_stages(self, graph_pool: Any) -> None:
        """Captures staged rounds of each bucket size, in `graph_pool`.  Sizes that do not fit there run eagerly."""
        began_s, reserved_before = time.perf_counter(), torch.cuda.memory_reserved(self.device)
        batch_buckets = self.captured_buckets[::-1]
        for batch in track(batch_buckets, "capturing staged rounds", console=Console(stderr=True), transient=True):
            try:
                self.stage_graphs[batch] = self._captured_stages(batch, graph_pool)
            except torch.OutOfMemoryError:
                log.warning("staged rounds of %d requests run without CUDA graphs, which do not fit into memory", batch)
        self._log_captured("staged rounds", began_s, reserved_before)

    @torch.inference_mode()
    def _captured_stages(self, batch: int, graph_pool: Any) -> RoundStages:
        dummy_input, form = dummy_launch(batch), LaunchForm(batch)
        packed = self._pack(dummy_input, 0, form)
        with torch.cuda.stream(self.stream):
            self._prepare_launch(dummy_input, form, in_graph=True, is_captured_now=True)
            eager = self._eager_stages(packed, batch)
        return eager.capture_stages(graph_pool, self.stream)

    def close(self) -> None:
        """Waits for the launches in flight, then frees the graphs and their memory."""
        try:
            torch.cuda.synchronize(self.device)
        finally:
            self.graphs.clear()
            self.stage_graphs.clear()
            self._give_streams_back()


def _copy_to_pinned(pinned_buffer: Tensor, packed: LaunchBuffer) -> Tensor:
    """Copies the packed vector to the start of a pinned buffer.  Returns the part of the buffer that holds it."""
    launch_part = pinned_buffer[: len(packed.vector)]
    np.copyto(launch_part.numpy(), packed.vector)
    return launch_part
