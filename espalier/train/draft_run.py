"""The training run of all kinds of drafts: prepares text and batches, runs the steps, and handles interruptions.

A kind of draft supplies a module and the loss of a batch (DraftRun).  An interrupted run continues when it is started
again with the same flags.  Runs with the same work folder train on the same text of the target (its own text).
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
from espalier.train.card import write_card
from espalier.train.configs import read_target
from espalier.train.data import UserText
from espalier.train.evaluate import MIN_MEASURED_TOKENS, AcceptReport
from espalier.train.optim import learning_rate_factor, make_optimizers, set_learning_rate
from espalier.train.own_text import (
    OwnText,
    format_minutes,
    load_own_text,
    longest_text,
    print_planned_work,
    require_prompts,
    require_unfinished,
    saved_texts,
)
from espalier.train.settings import TrainConfig, fixed_settings
from espalier.train.state import SavedState
from espalier.train.target import FrozenTarget
from espalier.train.windows import StreamWindows, TextList, TextRows, require_windows
from espalier.train.work import origin_of, replace_file

# (embeddings [B, R, H], or for a block draft tokens [B, R]; the target's features [B, R, F]; the target's logits
# [B, R, V]; the loss mask [B, R]) -> (loss, by depth: the share of rows whose likeliest token is the target's)
LossFunction = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
# (texts, for each text the index where its continuation begins) -> accept lengths by the trees' names
MeasureFunction = Callable[[list[np.ndarray], list[int]], dict[str, AcceptReport]]


@dataclass(frozen=True)
class RunFiles:
    """The files that a run reads and writes, and the texts of these files.  kind: the kind of the draft.
    data: the user's text without held-out prompts.  own_text: text that the target wrote.  state: see SavedState."""

    kind: str
    target: Path
    out: Path
    data: UserText
    own_text: OwnText
    state: SavedState


def prepare_run(
    kind: str, target: Path, data: UserText, out: Path, work_dir: Path, config: TrainConfig, min_layers: int = 1
) -> RunFiles:
    """Checks that all settings fit together, before the target is loaded.  Then generates the target's own text, if the
    work folder has none.  min_layers: how many layers the target needs.  Raises EspalierError for unfit settings."""
    config.require_target(read_target(target, min_layers))
    origin, (training_data, _) = origin_of(target, data.all_tokens), data.split_held_out()
    num_tokens, own_rows = len(training_data.stream), count_own_rows(config, training_data)
    text, remedy = f"--data holds {num_tokens} tokens to train on", "give more text, or a smaller --batch or --length"
    require_windows(text, num_tokens, config.length, config.batch - own_rows, remedy)
    makes_text = not saved_texts(config, work_dir, origin)
    if makes_text:
        require_prompts(data, config, target)
        require_unfinished(config, work_dir, origin)
        max_own_tokens = config.continuations * (longest_text(training_data, config))
        require_own_rows(max_own_tokens, config, own_rows)
    # Runs with the same work folder have separate state files, named after the draft's kind and directory.
    state = SavedState(work_dir / f"{kind}-{out.resolve().name}.pt", {**origin, **fixed_settings(config, type(config))})
    state.require_same_origin()
    print_planned_work(config, makes_text)
    return RunFiles(kind, target, out, training_data, load_own_text(target, data, config, work_dir, origin), state)


def count_own_rows(config: TrainConfig, data: UserText) -> int:
    """Returns how many rows of a batch are text that the target generated: all if the data have no documents."""
    return config.own_rows if len(data.stream) else config.batch


def require_own_rows(num_tokens: int, config: TrainConfig, own_rows: int) -> None:
    """Raises EspalierError if own text of `num_tokens` tokens at most is too short for `own_rows` rows of a batch."""
    remedy = "use more --continuations, or a smaller --own-share, --batch or --length"
    require_windows(
        f"the target's own text has {num_tokens} tokens at most", num_tokens, config.length, own_rows, remedy
    )


def training_rows(target: FrozenTarget, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the inputs of LossFunction, without the loss mask, for tokens [B, R + 1].
    Row p combines the target's feature at p with token p + 1, and learns the target's logits at p + 1."""
    features, logits = target(tokens)
    return target.embed(tokens[:, 1:]), features[:, :-1], logits[:, 1:]


@dataclass(frozen=True)
class DraftRun:
    """One training run.
    loss_function: the loss of a batch.  make_rows: makes the inputs of loss_function from tokens [B, R + 1].
    save: writes the draft.  measure: returns the draft's accept lengths, which are printed when the state is saved, and
    at the end.  depth: the most tokens of the draft that a round of `measure` may accept."""

    draft: nn.Module
    target: FrozenTarget
    loss_function: LossFunction
    save: Callable[[], None]
    measure: MeasureFunction
    files: RunFiles
    config: TrainConfig
    make_rows: Callable[[FrozenTarget, Tensor], tuple[Tensor, Tensor, Tensor]] = training_rows
    depth: int = MIN_MEASURED_TOKENS

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.draft.parameters())

    @property
    def held_out(self) -> TextList:
        return self.files.own_text.held_out


def mixed_batches(run: DraftRun, first_batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields (token ids [batch, length + 1], for each token whether it counts in the loss).
    count_own_rows(...) rows of a batch are the target's own text, the others are the user's text.  All tokens count,
    except those in the prompts of conversations.  first_batch: the number of the first batch to yield."""
    config, data, device = run.config, run.files.data, run.target.device
    own_rows = count_own_rows(config, data)
    user_rows = config.batch - own_rows
    own_batches = TextRows(run.files.own_text.texts, config.length, device, config.seed).batches(own_rows, first_batch)
    user_batches = StreamWindows(data.stream, config.length, device, config.seed).batches(user_rows, first_batch)
    while True:
        row_groups = []
        if own_rows:
            tokens, is_answer = next(own_batches)
            row_groups.append((tokens, is_answer if data.conversations else torch.ones_like(is_answer)))
        if user_rows:
            tokens = next(user_batches)
            row_groups.append((tokens, torch.ones_like(tokens, dtype=torch.bool)))
        yield torch.cat([tokens for tokens, _ in row_groups]), torch.cat([loss_mask for _, loss_mask in row_groups])


def backward(run: DraftRun, tokens: Tensor, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the gradients for tokens [B, R + 1].  Returns the results of run.loss_function."""
    rows = run.make_rows(run.target, tokens)
    # Row p predicts token p + 2.  Token R + 1 is not in the batch, so the last row uses the mask of token R.
    loss_mask = torch.cat((loss_mask[:, 2:], loss_mask[:, -1:]), 1)
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
        loss, agreement = run.loss_function(*rows, loss_mask)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(run.draft.parameters(), 1.0)
    return loss.detach(), agreement


def train_draft(run: DraftRun, **more_figures: float) -> dict[str, float]:
    """Trains and saves the draft.  Returns the run's figures, with `more_figures`.  Writes figures and settings to a
    JSON file in the work folder, and to the draft's card.  Removes the state: a finished run cannot continue."""
    own_texts, state = run.files.own_text.texts, run.files.state
    require_own_rows(len(own_texts.tokens), run.config, count_own_rows(run.config, run.files.data))
    num_steps, agreement, accept = run_steps(run)
    figures = {
        "parameters": float(run.num_parameters),
        **more_figures,
        "own_tokens": float(len(own_texts.tokens)),
        "given_tokens": float(len(run.files.data.stream)),
        "seen_tokens": float(num_steps * run.config.batch * run.config.length),
    }
    figures |= {f"agreement_{depth}": value for depth, value in enumerate(agreement, 1)}
    figures |= {f"accept_length_{name.replace(' ', '_')}": report.every_root for name, report in accept.items()}
    text = json.dumps(figures | {"config": asdict(run.config)}, indent=1)
    with replace_file(state.path.with_suffix(".json"), "free some space there") as unfinished:
        unfinished.write_text(text + "\n")
    write_card(run.files.out, run.files.kind, run.files.target, run.files.data, figures, run.config)
    state.remove()
    return figures


def run_steps(run: DraftRun) -> tuple[int, list[float], dict[str, AcceptReport]]:
    """Runs the remaining steps and saves the draft, also if the run is interrupted after a step.
    Returns the number of finished steps, the last top-1 agreement by depth, and the accept lengths."""
    config, state = run.config, run.files.state
    optimizers = make_optimizers(run.draft, config.matrix_lr, config.other_lr, config.weight_decay)
    num_steps = int(config.num_tokens / (config.batch * config.length))
    num_done_before = num_steps_done = state.load(run.draft, optimizers)
    agreement = torch.zeros(0)
    print(f"{run.num_parameters:,} parameters, step {num_done_before} comes first", flush=True)
    clock = StepClock(config.max_seconds)
    try:
        for tokens, loss_mask in mixed_batches(run, num_done_before):
            progress = max(num_steps_done / num_steps, clock.progress)
            if progress >= 1:
                break
            set_learning_rate(optimizers, learning_rate_factor(progress))
            loss, agreement = backward(run, tokens, loss_mask)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            num_steps_done += 1
            clock.count_step()
            if num_steps_done % config.log_every == 0 or num_steps_done == num_steps:
                print_step(num_steps_done, num_steps, float(loss), agreement, config.batch * config.length, clock)
                require_finite(num_steps_done, math.isfinite(loss))
            if num_steps_done % config.save_every == 0:
                save_step(run, optimizers, num_steps_done)
                print_measure(run)
    except KeyboardInterrupt:
        if num_steps_done > num_done_before:
            save_step(run, optimizers, num_steps_done)
            run.save()
            print(f"stopped; {state.path} holds step {num_steps_done}: start again to continue")
        raise
    save_finished(run, optimizers, num_steps_done)
    return num_steps_done, agreement.tolist(), print_measure(run)


def require_finite(step: int, is_finite: bool) -> None:
    """Raises EspalierError if the run has diverged.  is_finite: whether the loss and all weights are finite."""
    if not is_finite:
        raise EspalierError(
            f"at step {step} the loss or a weight is no finite number, and nothing of it is saved; begin anew with a "
            "lower --matrix-lr and --other-lr"
        )


def save_step(run: DraftRun, optimizers: list[torch.optim.Optimizer], num_steps_done: int) -> None:
    """Saves the state.  If that fails, saves the draft, and raises the OSError.  Raises EspalierError if the run has
    diverged."""
    require_finite(num_steps_done, all(bool(p.isfinite().all()) for p in run.draft.parameters()))
    try:
        run.files.state.save(run.draft, optimizers, num_steps_done)
    except OSError:
        run.save()
        raise


def save_finished(run: DraftRun, optimizers: list[torch.optim.Optimizer], num_steps_done: int) -> None:
    """Saves the draft.  If that fails, saves the state, so that another start of the run can save the draft."""
    require_finite(num_steps_done, all(bool(p.isfinite().all()) for p in run.draft.parameters()))
    try:
        run.save()
    except (OSError, EspalierError):
        run.files.state.save(run.draft, optimizers, num_steps_done)
        print(f"{run.files.state.path} holds step {num_steps_done}: start again to save the draft")
        raise


def print_measure(run: DraftRun) -> dict[str, AcceptReport]:
    """Measures the draft on the held-out continuations.  Prints and returns the result; {} if all are too short."""
    texts, starts = run.held_out.split(), run.held_out.firsts.tolist()
    long_enough = [i for i, text in enumerate(texts) if len(text) - starts[i] > max(MIN_MEASURED_TOKENS, run.depth)]
    if not long_enough:
        print("held out: nothing, as the target's continuations end or repeat at once", flush=True)
        return {}
    reports = run.measure([texts[i] for i in long_enough], [starts[i] for i in long_enough])
    lengths = ", ".join(f"{name} {report.every_root:.3f}" for name, report in reports.items())
    print(f"accept length on {len(long_enough)} held-out texts: {lengths}", flush=True)
    return reports


class StepClock:
    """Measures the time of a run's steps.  The clock starts after the first step, which compiles kernels.
    max_seconds: the time limit of the run; None for no limit."""

    def __init__(self, max_seconds: int | None) -> None:
        self.max_seconds = max_seconds
        self.started_at = time.perf_counter()
        self.num_steps = 0

    def count_step(self) -> None:
        self.num_steps += 1
        if self.num_steps == 1:
            self.started_at = time.perf_counter()

    @property
    def progress(self) -> float:
        """The share of the time limit that has passed; 0 if there is no limit."""
        if self.max_seconds is None or self.num_steps == 0:
            return 0.0
        return (time.perf_counter() - self.started_at) / self.max_seconds

    @property
    def steps_per_second(self) -> float:
        """The steps per second, without the first step; 0 before the second step ends."""
        return (self.num_steps - 1) / (time.perf_counter() - self.started_at)

    def seconds_left(self, num_steps: int) -> float | None:
        """Returns the seconds until a run with num_steps remaining steps ends; None while the speed is unknown."""
        until_last_step = num_steps / rate if (rate := self.steps_per_second) else None
        if self.max_seconds is None:
            return until_last_step
        until_limit = max(0.0, self.max_seconds * (1 - self.progress))
        return until_limit if until_last_step is None else min(until_limit, until_last_step)


def print_step(step: int, num_steps: int, loss: float, agreement: Tensor, num_tokens: int, clock: StepClock) -> None:
    """Prints a line about a step.  num_tokens: the number of tokens of a step.  agreement: by depth."""
    depths = " ".join(f"{a:.3f}" for a in agreement.tolist())
    rate, left = num_tokens * clock.steps_per_second / 1e6, clock.seconds_left(num_steps - step)
    end = "" if left is None else f", {format_minutes(left)} left"
    of_all = f"/{num_steps}" if clock.max_seconds is None else ""
    print(f"step {step}{of_all} loss {loss:.3f} top-1 by depth {depths} {rate:.4f} M tokens/s{end}", flush=True)
