"""Executors run launches in order on one stream: `launch(launch_input)` returns a handle, `handle.result()` waits.

`execute` is the body of every launch, on any device, eager or captured in a CUDA graph.  A staged round runs the same
work in three steps (`StagedRound`).  This file has the CPU executor: with overlap its stream is one worker thread, in
lock-step it is the caller's thread.  The GPU executor is engine/cuda.py.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from espalier.engine.launch_buffer import LaunchBuffer, pack_launch
from espalier.engine.launch_input import LaunchInput, RequestResult
from espalier.engine.masks import AskRows, GuideRows, RowMasks, Trees
from espalier.engine.results import Reported, Results, read, read_trees
from espalier.errors import EspalierError
from espalier.kernels.sampling.logprobs import rows_of
from espalier.sampling.logit_processors import SamplingNeeds
from espalier.sampling.mask import DraftGuide
from espalier.sampling.prompt import PromptRows
from espalier.speculate.round import ModelRunner, RoundOutput, Verified, decode_round, prefill, propose, settle, verify


class Handle(Protocol):
    def wait(self) -> None:
        """Wait until the launch has run, and read nothing."""
        ...

    def result(self) -> list[RequestResult]:
        """Wait for the launch and return one row for each slot of the launch input."""
        ...


class StagedHandle(Handle, Protocol):
    def trees(self) -> Trees:
        """Wait for the propose stage and return (tokens, parents) of each slot's tree."""
        ...

    def settle(self, masks: RowMasks) -> None:
        """Start the settle stage.  masks: the tokens that may follow each node."""
        ...


class LaunchObserver(Protocol):
    """Sees an engine's launches (Engine.observer), for measurements.  Called on the thread that steps the engine."""

    def on_launch(self, launch_input: LaunchInput) -> None:
        """Called before each launch."""
        ...

    def before_result(self, handle: Handle) -> None:
        """Called before a launch's result is read.  The observer may time `handle.wait()`."""
        ...


class Executor(Protocol):
    """Owns all state on the device, and the order in which it is written."""

    @property
    def runner(self) -> ModelRunner: ...

    def launch(self, launch_input: LaunchInput) -> Handle: ...

    def launch_staged(self, launch_input: LaunchInput, ask: AskRows) -> StagedHandle:
        """Start a round that waits for masks before its settle stage.  Settle it before the next launch.

        ask: what may follow draft rows, for an executor that can ask while it drafts.
        """
        ...

    def close(self) -> None:
        """Wait for the launches in flight."""
        ...


class ClosedExecutor:
    """Replaces the executor of a closed engine, so that the engine holds no device memory any more."""

    @property
    def runner(self) -> ModelRunner:
        raise EspalierError("the engine is closed; make another LLM")

    def launch(self, launch_input: LaunchInput) -> Handle:
        raise EspalierError("the engine is closed; make another LLM")

    def launch_staged(self, launch_input: LaunchInput, ask: AskRows) -> StagedHandle:
        raise EspalierError("the engine is closed; make another LLM")

    def close(self) -> None:
        pass


def execute(
    runner: ModelRunner,
    results: Results,
    device_launch: LaunchBuffer,
    width: int,
    needs: SamplingNeeds,
    prompt_rows: PromptRows | None = None,
    masks: Tensor | None = None,
) -> RoundOutput:
    """Run one launch: update the slot table, run a prefill pass of `width` (0: a round), write the results."""
    device_launch.apply(runner.table)
    if width:
        output = prefill(
            runner, device_launch.slots, device_launch.lengths, width, needs, device_launch.pieces, prompt_rows, masks
        )
    else:
        output = decode_round(runner, device_launch.slots, needs)
    results.write(device_launch.entry, output)
    return output


class StagedRound:
    """A round in three steps: `propose`, `verify`, then `settle` with masks that the host made from the trees.

    It runs the same code as `execute`.  The steps run eagerly or as one CUDA graph each; this object holds the
    tensors that one step leaves for the next.
    """

    def __init__(
        self,
        runner: ModelRunner,
        results: Results,
        device_launch: LaunchBuffer,
        needs: SamplingNeeds,
        guide: DraftGuide | None = None,
    ):
        self.runner = runner
        self.results = results
        self.device_launch = device_launch
        self.needs = needs
        self.guide = guide
        self.verified: Verified | None = None

    def propose(self) -> None:
        self.device_launch.apply(self.runner.table)
        self.proposed = propose(self.runner, self.device_launch.slots, self.needs, self.guide)
        self.results.write_trees(self.device_launch.entry, self.proposed.tree)

    def verify(self) -> None:
        self.verified = verify(self.proposed)

    def settle(self, masks: Tensor) -> None:
        assert self.verified is not None
        self.results.write(self.device_launch.entry, settle(self.verified, masks))


def guide_of(rows: GuideRows, batch: int, ask: AskRows | None = None) -> DraftGuide:
    """The guide of a batch, on the host."""
    forced, masks, levels = map(torch.from_numpy, rows.whole(batch))

    def ask_host(tokens: Tensor, ancestor_bits: Tensor) -> tuple[Tensor, Tensor]:
        assert ask is not None
        only, masks = ask(tokens, ancestor_bits).whole(batch)
        return torch.from_numpy(only), torch.from_numpy(masks)

    return DraftGuide(forced, masks, levels, None if ask is None else ask_host)


class CpuExecutor:
    def __init__(self, runner: ModelRunner, overlap: bool):
        self.runner = runner
        self.results = Results(runner.layout, 1, runner.pages.device)
        threads = torch.get_num_threads()
        self.worker = ThreadPoolExecutor(1, "espalier-stream", torch.set_num_threads, (threads,)) if overlap else None

    def launch(self, launch_input: LaunchInput) -> Handle:
        return CpuHandle(self.submit(self.run, launch_input))

    def launch_staged(self, launch_input: LaunchInput, ask: AskRows) -> StagedHandle:
        return CpuStagedHandle(self, launch_input, ask)

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        """Run work on the stream, after all work submitted before."""
        if self.worker is not None:
            return self.worker.submit(work, *args)
        done: Future[Any] = Future()
        done.set_result(work(*args))
        return done

    @torch.inference_mode()
    def run(self, launch_input: LaunchInput) -> list[RequestResult]:
        masks = None if launch_input.masks is None else torch.from_numpy(launch_input.masks)
        device_launch = self._to_device(launch_input)
        output = execute(
            self.runner,
            self.results,
            device_launch,
            launch_input.width,
            launch_input.needs,
            launch_input.prompt_rows,
            masks,
        )
        return self._read_rows(launch_input, output)

    @torch.inference_mode()
    def propose(self, launch_input: LaunchInput, ask: AskRows) -> StagedRound:
        guide = None if launch_input.guide is None else guide_of(launch_input.guide, len(launch_input.slots), ask)
        staged = StagedRound(self.runner, self.results, self._to_device(launch_input), launch_input.needs, guide)
        staged.propose()
        return staged

    @torch.inference_mode()
    def verify(self, staged: StagedRound) -> None:
        staged.verify()

    @torch.inference_mode()
    def settle(self, launch_input: LaunchInput, staged: StagedRound, masks: RowMasks) -> list[RequestResult]:
        nodes = self.runner.layout.at(len(launch_input.slots)).num_draft_tokens
        staged.settle(torch.from_numpy(masks.whole(len(launch_input.slots))[:, :nodes]))
        return self._read_rows(launch_input, None)

    def trees(self, launch_input: LaunchInput) -> Trees:
        return read_trees(self.results.fields, self.results.ring[0, : len(launch_input.slots)].numpy())

    def _to_device(self, launch_input: LaunchInput) -> LaunchBuffer:
        self.runner.prepare(launch_input.committed)
        self.runner.pages.clear(launch_input.cleared_pages)
        packed = pack_launch(self.runner.table, launch_input, entry=0, batch=len(launch_input.slots))
        return packed.on(torch.from_numpy(packed.vector))

    def _read_rows(self, launch_input: LaunchInput, output: RoundOutput | None) -> list[RequestResult]:
        batch = len(launch_input.slots)
        emitted = None if launch_input.num_logprobs is None else self.results.logprobs[0, :batch]
        of_prompt = None if output is None else output.prompt_logprobs
        reported = Reported(emitted, None if of_prompt is None else rows_of(*of_prompt))
        return read(self.results.fields, self.results.ring[0, :batch].numpy(), reported, launch_input)

    def close(self) -> None:
        if self.worker is not None:
            self.worker.shutdown()


@dataclass(frozen=True)
class CpuHandle:
    work: Future[list[RequestResult]]

    def wait(self) -> None:
        wait_for((self.work,))

    def result(self) -> list[RequestResult]:
        return self.work.result()


class CpuStagedHandle:
    def __init__(self, executor: CpuExecutor, launch_input: LaunchInput, ask: AskRows):
        self.executor = executor
        self.launch_input = launch_input
        self.work = executor.submit(executor.propose, launch_input, ask)

    def trees(self) -> Trees:
        self.staged: StagedRound = self.work.result()
        trees = self.executor.trees(self.launch_input)
        # With overlap the worker verifies while the caller makes the masks.
        self.verified = self.executor.submit(self.executor.verify, self.staged)
        return trees

    def settle(self, masks: RowMasks) -> None:
        self.verified.result()
        self.work = self.executor.submit(self.executor.settle, self.launch_input, self.staged, masks)

    def wait(self) -> None:
        wait_for((self.work,))

    def result(self) -> list[RequestResult]:
        return self.work.result()
