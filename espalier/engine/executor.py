"""Executors run launches in order on one stream: `launch(launch_input)` returns a handle, `handle.result()` waits.

`run_launch` is the body of every launch, on any device, eager or captured in a CUDA graph.  A staged round runs the
same work in four stages (`StagedRound`).  This file has the CPU executor.  With overlap, it runs launches on one worker
thread; without overlap, on the caller's thread.  The GPU executor is in engine/cuda.py."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from espalier.engine.launch_buffer import LaunchBuffer, pack_launch
from espalier.engine.launch_input import LaunchInput, RequestResult
from espalier.engine.masks import AskBeamMasks, DraftGuideRows, HostTrees, NodeMasks
from espalier.engine.results import ResultsRing, read_results, read_trees
from espalier.errors import EspalierError
from espalier.kernels.ops.sampling import pack_logprob_rows
from espalier.layout import LaunchForm
from espalier.sampling.logit_processors import SamplingFeatures
from espalier.sampling.mask import DraftGuide
from espalier.sampling.prompt import PromptRows
from espalier.speculate.round import (
    BegunRound,
    ModelRunner,
    RoundOutput,
    VerifiedRound,
    begin,
    decode_round,
    prefill,
    propose,
    settle,
    verify,
)


class LaunchHandle(Protocol):
    def wait(self) -> None:
        """Waits until the launch has run, without reading its result."""
        ...

    def result(self) -> list[RequestResult]:
        """Waits for the launch and returns one result for each slot of the launch input."""
        ...


class StagedRoundHandle(LaunchHandle, Protocol):
    """A round whose begin stage was started.  No other launch may be started before `settle`."""

    def resume(self, guide: DraftGuideRows | None, ask_beam_masks: AskBeamMasks) -> None:
        """Starts the propose and the verify stage.

        guide: the forced tokens and masks that grammars give to the draft; None without grammars.
        ask_beam_masks: a function that returns which tokens may follow the draft's beams.  The executor may call this
        function while the draft runs."""
        ...

    def trees(self) -> HostTrees:
        """Waits for the propose stage and returns (tokens, parents) of each slot's tree."""
        ...

    def settle(self, masks: NodeMasks) -> None:
        """Starts the settle stage.  masks: the tokens that may follow each node."""
        ...


class LaunchObserver(Protocol):
    """Callbacks for measurements (Engine.observer).  The engine calls them for each launch, on the engine's thread."""

    def on_launch(self, launch_input: LaunchInput) -> None:
        """Called before each launch."""
        ...

    def before_result(self, handle: LaunchHandle) -> None:
        """Called before the result of a launch is read.  The observer may time `handle.wait()`."""
        ...


class Executor(Protocol):
    """Owns all device state, and the order of all writes to the device."""

    @property
    def runner(self) -> ModelRunner: ...

    @property
    def captured_passes(self) -> tuple[LaunchForm, ...]:
        """The forms of prefill passes that are CUDA graphs, in the order of ModelRunner.captured_passes."""
        ...

    @property
    def runs_any_tree(self) -> bool:
        """Whether a round may have a tree of any size up to the configured tree.

        Then a smaller tree also takes less time.  If False, a round must have a tree of RoundLayout.for_batch or
        RoundLayout.choices, and a staged round must have that of RoundLayout.for_batch.  Kernels and CUDA graphs exist
        only for these trees."""
        ...

    @property
    def failure(self) -> Exception | None:
        """The error of another rank that has failed; None if none has failed.  After a failure, no launch can run."""
        ...

    def launch(self, launch_input: LaunchInput) -> LaunchHandle:
        """Starts a launch.  For a staged round (LaunchInput.is_staged), starts only the begin stage.

        The handle of a staged round is a StagedRoundHandle.  The round must be resumed and settled before the next
        launch."""
        ...

    def close(self) -> None:
        """Waits for the launches in flight."""
        ...


class ClosedExecutor:
    """Replaces the executor of a closed engine, so that the engine holds no device memory any more."""

    failure: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        raise EspalierError("the engine is closed; make another LLM")

    def close(self) -> None:
        pass


def run_launch(
    runner: ModelRunner,
    results: ResultsRing,
    device_launch: LaunchBuffer,
    width: int,
    sampling_features: SamplingFeatures,
    prompt_rows: PromptRows | None = None,
    masks: Tensor | None = None,
) -> RoundOutput:
    """Runs one launch: updates the slot table, runs a round or a prefill pass, and writes the results.

    device_launch: the packed launch input on the device.  width: the rows of each piece of a prefill pass; 0 for a
    round.  prompt_rows: the rows whose log-probabilities are wanted.  masks: LaunchInput.masks, on the device."""
    device_launch.update_slot_table(runner.table)
    launch, snapshots = device_launch, device_launch.snapshots
    if width:
        arguments = (launch.lengths, width, sampling_features, launch.pieces, prompt_rows, masks)
        output = prefill(runner, launch.slots, *arguments, snapshots)
    else:
        output = decode_round(runner, launch.slots, sampling_features, launch.appended_pages, snapshots)
    results.write(device_launch.ring_entry, output)
    return output


class StagedRound:
    """A round in four stages: `begin`, `propose`, `verify`, then `settle` with masks that the host made from the trees.

    The stages are the same as in `decode_round`.  The stages run eagerly or as CUDA graphs.  This object holds the
    tensors that one stage passes to the next."""

    def __init__(
        self,
        runner: ModelRunner,
        results: ResultsRing,
        device_launch: LaunchBuffer,
        sampling_features: SamplingFeatures,
    ):
        self.runner = runner
        self.results = results
        self.device_launch = device_launch
        self.sampling_features = sampling_features
        self.begun: BegunRound | None = None
        self.verified: VerifiedRound | None = None

    def begin(self) -> None:
        self.device_launch.update_slot_table(self.runner.table)
        launch = self.device_launch
        self.begun = begin(self.runner, launch.slots, self.sampling_features, launch.appended_pages, launch.snapshots)

    def propose(self, guide: DraftGuide | None) -> None:
        """Drafts the trees and writes them to the ring.  guide: what grammars let the draft propose; None: all."""
        # `begun` is dropped before the stage ends, because it holds the draft's first logits, which may be large.
        begun, self.begun = self.begun, None
        assert begun is not None
        self.proposed = propose(begun, guide)
        self.results.write_trees(self.device_launch.ring_entry, self.proposed.tree)

    def verify(self) -> None:
        self.verified = verify(self.proposed)

    def settle(self, masks: Tensor) -> None:
        """masks: [B, D, words] int32, the tokens that may follow each node (sampling/mask.py)."""
        assert self.verified is not None
        self.results.write(self.device_launch.ring_entry, settle(self.verified, masks))


def make_draft_guide(guide_rows: DraftGuideRows, batch: int, ask_beam_masks: AskBeamMasks) -> DraftGuide:
    """Returns the DraftGuide of a batch: the tokens that grammars let the draft propose, as tensors on the host.

    ask_beam_masks: a function that returns which tokens may follow the draft's beams."""
    forced, masks, levels = map(torch.from_numpy, guide_rows.for_full_batch(batch))

    def ask_allowed_tokens(tokens: Tensor, ancestor_bits: Tensor) -> tuple[Tensor, Tensor]:
        """Returns forced tokens and masks of the beams.  Arguments: see AskBeamMasks."""
        forced_tokens, masks = ask_beam_masks(tokens, ancestor_bits).for_full_batch(batch)
        return torch.from_numpy(forced_tokens), torch.from_numpy(masks)

    return DraftGuide(forced, masks, levels, ask_allowed_tokens)


class CpuExecutor:
    captured_passes: tuple[LaunchForm, ...] = ()
    runs_any_tree = True
    failure: Exception | None = None

    def __init__(self, runner: ModelRunner, overlap: bool):
        self.runner = runner
        self.results = ResultsRing(runner.layout, runner.target.config.vocab_size, 1, runner.pages.device)
        threads = torch.get_num_threads()
        self.worker = ThreadPoolExecutor(1, "espalier-stream", torch.set_num_threads, (threads,)) if overlap else None

    def launch(self, launch_input: LaunchInput) -> LaunchHandle:
        if launch_input.is_staged:
            return CpuStagedHandle(self, launch_input)
        return CpuLaunchHandle(self.submit(self.run, launch_input))

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        """Runs `work` on the worker thread, after all earlier work; without a worker thread, runs it now."""
        if self.worker is not None:
            return self.worker.submit(work, *args)
        result_future: Future[Any] = Future()
        result_future.set_result(work(*args))
        return result_future

    @torch.inference_mode()
    def run(self, launch_input: LaunchInput) -> list[RequestResult]:
        """Runs a launch that is not staged, and reads its results."""
        masks = None if launch_input.masks is None else torch.from_numpy(launch_input.masks)
        device_launch = self._to_device(launch_input)
        arguments = (launch_input.width, launch_input.sampling_features, launch_input.prompt_rows, masks)
        output = run_launch(self._runner_for(launch_input), self.results, device_launch, *arguments)
        return self.read_results(launch_input, output)

    @torch.inference_mode()
    def begin_staged(self, launch_input: LaunchInput) -> StagedRound:
        runner, device_launch = self._runner_for(launch_input), self._to_device(launch_input)
        staged = StagedRound(runner, self.results, device_launch, launch_input.sampling_features)
        staged.begin()
        return staged

    def _runner_for(self, launch_input: LaunchInput) -> ModelRunner:
        """Returns the runner for the tree of the launch."""
        runner = self.runner.for_tree(launch_input.tree)
        return replace(runner, trims_trees=True) if runner.layout.steps else runner

    def _to_device(self, launch_input: LaunchInput) -> LaunchBuffer:
        """Prepares caches and attention for a launch.  Returns the packed launch."""
        form = launch_input.form(self.captured_passes)
        self.runner.prepare(launch_input.committed_lengths.padded_to(form.pieces or form.batch))
        self.runner.cache.before_launch(launch_input.cleared_pages, launch_input.state_copies)
        packed = pack_launch(self.runner.table, launch_input, ring_entry=0, form=form)
        return packed.with_vector(torch.from_numpy(packed.vector))

    def read_results(self, launch_input: LaunchInput, output: RoundOutput | None) -> list[RequestResult]:
        """Reads the results of a launch.  output: None for a staged round, which has no prompt log-probabilities."""
        batch = len(launch_input.slots)
        logprobs = None if output is None else output.prompt_logprobs
        prompt_logprobs = None if logprobs is None else pack_logprob_rows(*logprobs)
        return read_results(self.results.columns, self.results.ring[0, :batch].numpy(), prompt_logprobs, launch_input)

    def close(self) -> None:
        if self.worker is not None:
            self.worker.shutdown()


@dataclass
class CpuLaunchHandle:
    result_future: Future[list[RequestResult]]

    def wait(self) -> None:
        wait_for((self.result_future,))

    def result(self) -> list[RequestResult]:
        return self.result_future.result()


class CpuStagedHandle(CpuLaunchHandle):
    """A staged round on a CPU.  With overlap the worker thread runs the stages, one after another, while the caller
    continues."""

    def __init__(self, executor: CpuExecutor, launch_input: LaunchInput):
        self.executor = executor
        self.launch_input = launch_input
        self.begun: Future[StagedRound] = executor.submit(executor.begin_staged, launch_input)

    def resume(self, guide: DraftGuideRows | None, ask_beam_masks: AskBeamMasks) -> None:
        self.proposed: Future[HostTrees] = self.executor.submit(self._propose, guide, ask_beam_masks)
        self.verified: Future[None] = self.executor.submit(self._verify)

    def trees(self) -> HostTrees:
        return self.proposed.result()

    def settle(self, masks: NodeMasks) -> None:
        self.result_future = self.executor.submit(self._settle, masks)

    # Tasks run in order.  So inside a task, `result` of an earlier task returns at once, or raises that task's error.

    @torch.inference_mode()
    def _propose(self, guide: DraftGuideRows | None, ask_beam_masks: AskBeamMasks) -> HostTrees:
        """Runs the propose stage.  Returns (tokens, parents) of each tree.  guide: None without grammars."""
        batch, results = len(self.launch_input.slots), self.executor.results
        self.begun.result().propose(None if guide is None else make_draft_guide(guide, batch, ask_beam_masks))
        return read_trees(results.columns, results.ring[0, :batch].numpy())

    @torch.inference_mode()
    def _verify(self) -> None:
        self.proposed.result()
        self.begun.result().verify()

    @torch.inference_mode()
    def _settle(self, masks: NodeMasks) -> list[RequestResult]:
        """Runs the last stage.  masks: the tokens that may follow each node."""
        self.verified.result()
        staged, batch = self.begun.result(), len(self.launch_input.slots)
        nodes = staged.proposed.runner.layout.num_draft_tokens
        staged.settle(torch.from_numpy(masks.for_full_batch(batch)[:, :nodes]))
        return self.executor.read_results(self.launch_input, None)
