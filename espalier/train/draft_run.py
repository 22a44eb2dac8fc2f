"""The run of every draft's trainer: text of the target, batches, steps, interruption and its settings.

A trainer brings its draft and the loss of a batch (DraftRun).  An interrupted run continues if it is started again
with the same work folder.  Runs that share a work folder share the target's own text (own_text.py).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from espalier.config import option
from espalier.train.optim import make_optimizers, schedule, set_rate
from espalier.train.own_text import OwnTextConfig
from espalier.train.packing import Windows
from espalier.train.state import load_state, save_state
from espalier.train.target import FrozenTarget

# (embeddings [B, R, H], or what DraftRun.rows_of has in their place, what the draft reads of the target [B, R, F],
# target's logits [B, R, V])
# -> (loss, top-1 agreement by depth)
Loss = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class TrainConfig(OwnTextConfig):
    """The settings that every draft's run has.  The command line shows what each is."""

    intermediate_size: int | None = option("width of the draft's MLP; by default the target's", None)
    length: int = option("tokens of a row of a batch", 1024)
    batch: int = option("rows of a batch", 32)
    num_tokens: float = option("tokens that the run trains on; text that is read again counts again", 2.5e8)
    max_seconds: int | None = option(
        "seconds after which the run ends, unless num-tokens ends it before; the learning rate falls to zero by then; "
        "the first step, which compiles, is not counted; by default no limit",
        None,
    )
    decay: float = option("weight of a depth's loss, relative to that of the depth before it", 0.9)
    own_share: float = option("share of a batch's rows, 0 to 1, that is the target's own text; the rest is data", 0.6)
    matrix_lr: float = option("highest learning rate of the matrices between hidden states, which Muon trains", 4e-3)
    other_lr: float = option("highest learning rate of the other weights, which AdamW trains", 2e-3)
    weight_decay: float = option("weight decay of the matrices that Muon trains", 0.05)
    log_every: int = option("steps between two lines with the loss", 50)
    save_every: int = option("steps between two saved states, from which an interrupted run goes on", 500)


def training_rows(target: FrozenTarget, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The inputs of `Loss` for tokens [B, R + 1].

    Row p pairs what the draft reads of the target at p with token p + 1, and learns the target's logits at p + 1.
    """
    reads, logits = target(tokens)
    return target.embed(tokens[:, 1:]), reads[:, :-1], logits[:, 1:]


@dataclass(frozen=True)
class DraftRun:
    """One run.  loss_of: for a batch; save: writes the draft; state: the file of an unfinished run.

    rows_of: the inputs of loss_of for tokens [B, R + 1]; measure: a line on held-out text, printed when state is saved
    and at the end.
    """

    draft: nn.Module
    target: FrozenTarget
    loss_of: Loss
    save: Callable[[], None]
    state: Path
    config: TrainConfig
    rows_of: Callable[[FrozenTarget, Tensor], tuple[Tensor, Tensor, Tensor]] = training_rows
    measure: Callable[[], str] | None = None

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.draft.parameters())


def training_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def mixed_batches(own: Windows, given: Windows, config: TrainConfig, first: int) -> Iterator[Tensor]:
    """Batches [batch, length + 1]; `own_share` of their rows are the target's own text."""
    num_own = round(config.own_share * config.batch)
    sizes = ((own, num_own), (given, config.batch - num_own))
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

    The figures and the settings are also in a JSON file beside the state.
    """
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
    run.state.with_suffix(".json").write_text(text + "\n")
    return figures


def run_steps(run: DraftRun, own: Windows, given: Windows) -> tuple[int, list[float]]:
    """Run the remaining steps; the draft is saved even on interruption.

    Returns the number of steps done, and the last top-1 agreement by depth.
    """
    config, state = run.config, run.state
    optimizers = make_optimizers(run.draft, config.matrix_lr, config.other_lr, config.weight_decay)
    num_steps = max(1, int(config.num_tokens / (config.batch * config.length)))
    first = done = load_state(state, run.draft, optimizers)
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
            if done % config.save_every == 0:
                save_state(state, run.draft, optimizers, done)
                print_measure(run)
    except KeyboardInterrupt:
        save_state(state, run.draft, optimizers, done)
        print(f"stopped; {state} holds step {done}: start again to continue")
        raise
    finally:
        run.save()
    print_measure(run)
    return done, agreement.tolist()


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
