"""Runs launches, in order, on one stream: `launch(launch_input) -> handle; handle.result()` is all that others need.

`execute` is what every launch does, on any device, eagerly or captured; a staged round does the same in steps
(`Staged`).  On a CPU the stream of an overlapped engine is one worker thread, and that of a lock-step engine is the
caller's own; engine/cuda.py has the GPU's.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from espalier.engine.launch_buffer import DeviceLaunch, pack_launch
from espalier.engine.launch_input import LaunchInput, Row
from espalier.engine.results import Reported, Results, read, read_trees
from espalier.errors import EspalierError
from espalier.sampling.logit_processors import SamplingNeeds
from espalier.sampling.prompt import PromptRows
from espalier.speculate.round import ModelRunner, RoundOutput, Verified, prefill, propose, run, settle, verify

Trees = list[tuple[list[int], list[int]]]


class Handle(Protocol):
    def wait(self) -> None:
        """Wait until the launch has run, and read nothing."""
        ...

    def result(self) -> list[Row]:
        """What was decided, a row a slot of the launch input; waits for the launch."""
        ...


class StagedHandle(Handle, Protocol):
    def trees(self) -> Trees:
        """(tokens, parents) of each slot's tree; waits for the first stage."""
        ...

    def settle(self, masks: np.ndarray) -> None:
        """Go on with the last stage.  masks: [B, D, words] int32, which tokens may follow each node."""
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
    """Owns the order in which device state is written, and everything that stands on the device."""

    @property
    def runner(self) -> ModelRunner: ...

    def launch(self, launch_input: LaunchInput) -> Handle: ...

    def launch_staged(self, launch_input: LaunchInput) -> StagedHandle:
        """A round that waits for masks before its last stage; it must be settled before anything else is launched."""
        ...

    def close(self) -> None:
        """Wait for what is in flight."""
        ...


class Closed:
    """Takes an executor's place when its engine is closed, so that nothing on the device is held any more."""

    @property
    def runner(self) -> ModelRunner:
        raise EspalierError("the engine is closed; make another LLM")

    def launch(self, launch_input: LaunchInput) -> Handle:
        raise EspalierError("the engine is closed; make another LLM")

    def launch_staged(self, launch_input: LaunchInput) -> StagedHandle:
        raise EspalierError("the engine is closed; make another LLM")

    def close(self) -> None:
        pass


def execute(
    r: ModelRunner,
    results: Results,
    device_launch: DeviceLaunch,
    width: int,
    needs: SamplingNeeds,
    prompt_rows: PromptRows | None = None,
    masks: Tensor | None = None,
) -> RoundOutput:
    """One launch: apply the launch input, run a prefill pass of this width (0: a round), write its results."""
    device_launch.apply(r.table)
    if width:
        outcome = prefill(r, device_launch.slots, device_launch.lengths, width, needs, prompt_rows, masks)
    else:
        outcome = run(r, device_launch.slots, needs)
    results.write(device_launch.entry, outcome)
    return outcome


class Staged:
    """A round in stages, for the host to come between: `propose`, `verify`, then `settle` with masks.

    The same lines as `execute`, run eagerly or captured a stage at a time; what a stage leaves for the next stands
    here.
    """

    def __init__(self, r: ModelRunner, results: Results, device_launch: DeviceLaunch, needs: SamplingNeeds):
        self.runner = r
        self.results = results
        self.device_launch = device_launch
        self.needs = needs
        self.verified: Verified | None = None

    def propose(self) -> None:
        self.device_launch.apply(self.runner.table)
        self.proposed = propose(self.runner, self.device_launch.slots, self.needs)
        self.results.write_trees(self.device_launch.entry, self.proposed.tree)

    def verify(self) -> None:
        self.verified = verify(self.proposed)

    def settle(self, masks: Tensor) -> None:
        assert self.verified is not None
        self.results.write(self.device_launch.entry, settle(self.verified, masks))


class CpuExecutor:
    def __init__(self, runner: ModelRunner, overlap: bool):
        self.runner = runner
        self.results = Results(runner.layout, 1, runner.pages.dtype, runner.pages.device)
        threads = torch.get_num_threads()
        self.worker = ThreadPoolExecutor(1, "espalier-stream", torch.set_num_threads, (threads,)) if overlap else None

    def launch(self, launch_input: LaunchInput) -> Handle:
        return CpuHandle(self.submit(self.run, launch_input))

    def launch_staged(self, launch_input: LaunchInput) -> StagedHandle:
        return CpuStagedHandle(self, launch_input)

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        """Run work on the one stream, after what was submitted before."""
        if self.worker is not None:
            return self.worker.submit(work, *args)
        done: Future[Any] = Future()
        done.set_result(work(*args))
        return done

    @torch.inference_mode()
    def run(self, launch_input: LaunchInput) -> list[Row]:
        masks = None if launch_input.masks is None else torch.from_numpy(launch_input.masks)
        device_launch = self._sent(launch_input)
        outcome = execute(
            self.runner,
            self.results,
            device_launch,
            launch_input.width,
            launch_input.needs,
            launch_input.prompt_rows,
            masks,
        )
        return self._read(launch_input, outcome)

    @torch.inference_mode()
    def propose(self, launch_input: LaunchInput) -> Staged:
        staged = Staged(self.runner, self.results, self._sent(launch_input), launch_input.needs)
        staged.propose()
        return staged

    @torch.inference_mode()
    def settle(self, launch_input: LaunchInput, staged: Staged, masks: np.ndarray) -> list[Row]:
        staged.verify()
        staged.settle(torch.from_numpy(masks))
        return self._read(launch_input, None)

    def trees(self, launch_input: LaunchInput) -> Trees:
        return read_trees(self.results.fields, self.results.ring[0, : len(launch_input.slots)].numpy())

    def _sent(self, launch_input: LaunchInput) -> DeviceLaunch:
        self.runner.prepare(launch_input.committed)
        packed = pack_launch(self.runner.table, launch_input, entry=0, batch=len(launch_input.slots))
        return DeviceLaunch.of(torch.from_numpy(packed.vector), packed.form)

    def _read(self, launch_input: LaunchInput, outcome: RoundOutput | None) -> list[Row]:
        batch = len(launch_input.slots)
        emitted = (
            None if launch_input.num_logprobs is None else tuple(part[0, :batch] for part in self.results.logprobs)
        )
        reported = Reported(emitted, None if outcome is None else outcome.prompt_logprobs)
        return read(self.results.fields, self.results.ring[0, :batch].numpy(), reported, launch_input)

    def close(self) -> None:
        if self.worker is not None:
            self.worker.shutdown()


@dataclass(frozen=True)
class CpuHandle:
    work: Future[list[Row]]

    def wait(self) -> None:
        wait_for((self.work,))

    def result(self) -> list[Row]:
        return self.work.result()


class CpuStagedHandle:
    def __init__(self, executor: CpuExecutor, launch_input: LaunchInput):
        self.executor = executor
        self.launch_input = launch_input
        self.work = executor.submit(executor.propose, launch_input)

    def trees(self) -> Trees:
        self.work.result()
        return self.executor.trees(self.launch_input)

    def settle(self, masks: np.ndarray) -> None:
        self.work = self.executor.submit(self.executor.settle, self.launch_input, self.work.result(), masks)

    def wait(self) -> None:
        wait_for((self.work,))

    def result(self) -> list[Row]:
        return self.work.result()
