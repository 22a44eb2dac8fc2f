"""The run of every draft's trainer: text of the target, batches, steps, interruption and its settings.

A trainer brings its draft and the loss of a batch (DraftRun).  An interrupted run continues if it is started again
with the same flags.  Runs that share a work folder share the target's own text (own_text.py).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from espalier.errors import EspalierError
from espalier.train.configs import read_target
from espalier.train.optim import make_optimizers, schedule, set_rate
from espalier.train.own_text import print_work, require_prompts, require_unfinished, saved_texts
from espalier.train.settings import TrainConfig, fixed_settings
from espalier.train.state import SavedState
from espalier.train.target import FrozenTarget
from espalier.train.windows import Windows, require_windows
from espalier.train.work import origin_of, whole_file

# (embeddings [B, R, H], or what DraftRun.rows_of has in their place, what the draft reads of the target [B, R, F],
# target's logits [B, R, V])
# -> (loss, top-1 agreement by depth)
Loss = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class RunFiles:
    """What a run keeps in its work folder.  origin: of the own text and of the state, see work.origin_of."""

    origin: dict[str, str]
    state: SavedState


def prepare_run(
    kind: str,
    target: Path,
    stream: np.ndarray,
    out: Path,
    work: Path,
    config: TrainConfig,
    min_layers: int = 1,
    held_out: int = 0,
) -> RunFiles:
    """Refuse what does not fit together, before the target is loaded.  Raises EspalierError.

    held_out: tokens of the data that are not trained on.
    """
    config.require_target(read_target(target, min_layers))
    origin, num_tokens = origin_of(target, stream), len(stream)
    if num_tokens < 4 * held_out:
        raise EspalierError(
            f"--data holds {num_tokens} tokens; give at least {4 * held_out}, as {held_out} are held out"
        )
    num_tokens -= held_out
    what, remedy = f"--data holds {num_tokens} tokens to train on", "give more text, or a smaller --batch or --length"
    require_windows(what, num_tokens, config.length, config.batch - config.own_rows, remedy)
    makes_text = not saved_texts(config, work, origin)
    if makes_text:
        require_prompts(num_tokens, config)
        require_unfinished(config, work, origin, num_tokens)
        longest = config.continuations * (max(n for n, _ in config.prompts()) + config.continuation_tokens)
        require_own_rows(longest, config)
    # Runs that share the work folder have a state each, by what they write.
    state = SavedState(work / f"{kind}-{out.resolve().name}.pt", {**origin, **fixed_settings(config, type(config))})
    state.require_same()
    print_work(config, makes_text)
    return RunFiles(origin, state)


def require_own_rows(num_tokens: int, config: TrainConfig) -> None:
    """Refuse a text of the target that does not fill its share of a batch.  num_tokens: of the text, or the most."""
    remedy = "use more --continuations, or a smaller --own-share, --batch or --length"
    require_windows(
        f"the target's own text has {num_tokens} tokens at most", num_tokens, config.length, config.own_rows, remedy
    )


def training_rows(target: FrozenTarget, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The inputs of `Loss` for tokens [B, R + 1].

    Row p pairs what the draft reads of the target at p with token p + 1, and learns the target's logits at p + 1.
    """
    reads, logits = target(tokens)
    return target.embed(tokens[:, 1:]), reads[:, :-1], logits[:, 1:]


@dataclass(frozen=True)
class DraftRun:
    """One run.  loss_of: for a batch; save: writes the draft; state: of an unfinished run.

    rows_of: the inputs of loss_of for tokens [B, R + 1]; measure: a line on held-out text, printed when state is saved
    and at the end.
    """

    draft: nn.Module
    target: FrozenTarget
    loss_of: Loss
    save: Callable[[], None]
    state: SavedState
    config: TrainConfig
    rows_of: Callable[[FrozenTarget, Tensor], tuple[Tensor, Tensor, Tensor]] = training_rows
    measure: Callable[[], str] | None = None

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.draft.parameters())


def mixed_batches(own: Windows, given: Windows, config: TrainConfig, first: int) -> Iterator[Tensor]:
    """Batches [batch, length + 1]; `own_share` of their rows are the target's own text."""
    sizes = ((own, config.own_rows), (given, config.batch - config.own_rows))
    sources = [windows.batches(size, first) for windows, size in sizes if size]
    while True:
        yield torch.cat([next(source) for source in sources])


def backward(run: DraftRun, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """(loss, agreement by depth) of tokens [B, R + 1], with gradients."""
    rows = run.rows_of(run.target, tokens)
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
        loss, agreement = run.loss_of(*rows)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(run.draft.parameters(), 1.0)
    return loss.detach(), agreement


def train_draft(run: DraftRun, own: np.ndarray, given: np.ndarray, **more: float) -> dict[str, float]:
    """Train on the target's own text and the given text, save, and return the run's figures, with `more` added.

    The figures and the settings are also in a JSON file in the work folder.  The state is removed: a run that is
    finished does not go on.
    """
    require_own_rows(len(own), run.config)
    windows = [Windows(stream, run.config.length, run.target.device, run.config.seed) for stream in (own, given)]
    num_steps, agreement = run_steps(run, windows[0], windows[1])
    figures = {
        "parameters": float(run.num_parameters),
        **more,
        "own_tokens": float(len(own)),
        "given_tokens": float(len(given)),
        "seen_tokens": float(num_steps * run.config.batch * run.config.length),
    } | {f"agreement_{depth}": value for depth, value in enumerate(agreement, 1)}
    text = json.dumps(figures | {"config": asdict(run.config)}, indent=1)
    with whole_file(run.state.path.with_suffix(".json"), "free some space there") as unfinished:
        unfinished.write_text(text + "\n")
    run.state.remove()
    return figures


def run_steps(run: DraftRun, own: Windows, given: Windows) -> tuple[int, list[float]]:
    """Run the remaining steps, and save the draft; also if the run is interrupted after a step.

    Returns the number of steps done, and the last top-1 agreement by depth.
    """
    config, state = run.config, run.state
    optimizers = make_optimizers(run.draft, config.matrix_lr, config.other_lr, config.weight_decay)
    num_steps = int(config.num_tokens / (config.batch * config.length))
    first = done = state.load(run.draft, optimizers)
    agreement = torch.zeros(0)
    print(f"{run.num_parameters:,} parameters, steps {first} to {num_steps}")
    clock = StepClock(config.max_seconds)
    try:
        for batch in mixed_batches(own, given, config, first):
            progress = max(done / num_steps, clock.progress)
            if progress >= 1:
                break
            set_rate(optimizers, schedule(progress))
            loss, agreement = backward(run, batch)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            done += 1
            clock.count_step()
            if done % config.log_every == 0 or done == num_steps:
                log(done, num_steps, float(loss), agreement, config.batch * config.length * clock.steps_per_second)
                require_finite(done, math.isfinite(loss))
            if done % config.save_every == 0:
                save_step(run, optimizers, done)
                print_measure(run)
    except KeyboardInterrupt:
        if done > first:
            save_step(run, optimizers, done)
            run.save()
            print(f"stopped; {state.path} holds step {done}: start again to continue")
        raise
    save_finished(run, optimizers, done)
    print_measure(run)
    return done, agreement.tolist()


def require_finite(step: int, is_finite: bool) -> None:
    """Raises EspalierError for a run that has diverged."""
    if not is_finite:
        raise EspalierError(
            f"at step {step} the loss or a weight is no finite number, and nothing of it is saved; begin anew with a "
            "lower --matrix-lr and --other-lr"
        )


def save_step(run: DraftRun, optimizers: list[torch.optim.Optimizer], done: int) -> None:
    """Save the state; if that fails, the draft.  Raises OSError or EspalierError."""
    require_finite(done, all(bool(p.isfinite().all()) for p in run.draft.parameters()))
    try:
        run.state.save(run.draft, optimizers, done)
    except OSError:
        run.save()
        raise


def save_finished(run: DraftRun, optimizers: list[torch.optim.Optimizer], done: int) -> None:
    """Save the draft; if that fails, the state, from which the run started again saves it."""
    require_finite(done, all(bool(p.isfinite().all()) for p in run.draft.parameters()))
    try:
        run.save()
    except (OSError, EspalierError):
        run.state.save(run.draft, optimizers, done)
        print(f"{run.state.path} holds step {done}: start again to save the draft")
        raise


def print_measure(run: DraftRun) -> None:
    if run.measure is not None:
        print(run.measure(), flush=True)


class StepClock:
    """The time of a run's steps.  It starts after the first step, which compiles.

    max_seconds: the run's limit; None if it has none.
    """

    def __init__(self, max_seconds: int | None) -> None:
        self.max_seconds = max_seconds
        self.begun = time.perf_counter()
        self.num_steps = 0

    def count_step(self) -> None:
        self.num_steps += 1
        if self.num_steps == 1:
            self.begun = time.perf_counter()

    @property
    def progress(self) -> float:
        """The share of the limit that has passed; 0 without one."""
        if self.max_seconds is None or self.num_steps == 0:
            return 0.0
        return (time.perf_counter() - self.begun) / self.max_seconds

    @property
    def steps_per_second(self) -> float:
        """Without the first step; 0 if there was no other."""
        return (self.num_steps - 1) / (time.perf_counter() - self.begun)


def log(step: int, num_steps: int, loss: float, agreement: Tensor, rate: float) -> None:
    depths = " ".join(f"{a:.3f}" for a in agreement.tolist())
    print(f"step {step}/{num_steps} loss {loss:.3f} top-1 by depth {depths} {rate / 1e6:.4f} M tokens/s", flush=True)
