"""The run of every draft's trainer: text of the target, batches, steps, interruption and its settings.

A trainer brings its draft and the loss of a batch (DraftRun).  An interrupted run continues if it is started again
with the same work folder.
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

from espalier.train.optim import make_optimizers, schedule, set_rate
from espalier.train.packing import Windows
from espalier.train.state import load_state, save_state
from espalier.train.target import FrozenTarget

# (embeddings [B, R, H], what the draft reads of the target [B, R, F], target's logits [B, R, V])
# -> (loss, top-1 agreement by depth)
Loss = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class TrainConfig:
    """The settings that every draft's run has."""

    intermediate_size: int | None = None
    length: int = 1024
    batch: int = 32
    num_tokens: float = 2.5e8
    decay: float = 0.9
    own_share: float = 0.6
    continuations: int = 40960
    continuation_tokens: int = 256
    generate_batch: int = 64
    sampled_share: float = 0.35
    matrix_lr: float = 4e-3
    other_lr: float = 2e-3
    weight_decay: float = 0.05
    seed: int = 0
    log_every: int = 50
    save_every: int = 500


@dataclass(frozen=True)
class DraftRun:
    """One run.  loss_of: for a batch; save: writes the draft; state: the file of an unfinished run."""

    draft: nn.Module
    target: FrozenTarget
    loss_of: Loss
    save: Callable[[], None]
    state: Path
    config: TrainConfig

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.draft.parameters())


def training_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass
class OwnText:
    """The target's continuations as one stream, and how often it chose each token id greedily."""

    stream: np.ndarray
    greedy_counts: np.ndarray


def make_own_text(target: FrozenTarget, stream: np.ndarray, config: TrainConfig) -> OwnText:
    """Continue prompts cut from `stream`.  A batch has prompts of one length; `sampled_share` of the batches are
    sampled at temperature 1."""
    parts: list[np.ndarray] = []
    counts = np.zeros(int(target.config["vocab_size"]), dtype=np.int64)
    lengths, begun = (48, 96, 192, 384), time.perf_counter()
    for number in range(max(1, config.continuations // config.generate_batch)):
        length = lengths[number % len(lengths)]
        windows = Windows(stream, length, target.device, config.seed + 1 + number)
        prompts = next(windows.batches(config.generate_batch))[:, :length]
        sampled = int((number + 1) * config.sampled_share) > int(number * config.sampled_share)
        texts = target.continuations(prompts, config.continuation_tokens, 1.0 if sampled else 0.0)
        parts += texts
        if not sampled:
            counts += np.bincount(np.concatenate([t[length:] for t in texts]), minlength=len(counts))
        print(f"continued {len(parts)} prompts, {time.perf_counter() - begun:.0f} s", flush=True)
    order = np.random.default_rng(config.seed).permutation(len(parts))
    return OwnText(np.concatenate([parts[i] for i in order]).astype(stream.dtype), counts)


def load_own_text(target: FrozenTarget, stream: np.ndarray, config: TrainConfig, work: Path) -> OwnText:
    """The target's own text from the work folder, or made and kept there."""
    work.mkdir(parents=True, exist_ok=True)
    path = work / "own_text.npz"
    if not path.exists():
        own = make_own_text(target, stream, config)
        np.savez(path, stream=own.stream, greedy_counts=own.greedy_counts)
    saved = np.load(path)
    return OwnText(saved["stream"], saved["greedy_counts"])


def mixed_batches(own: Windows, given: Windows, config: TrainConfig, first: int) -> Iterator[Tensor]:
    """Batches [batch, length + 1]; `own_share` of their rows are the target's own text."""
    num_own = round(config.own_share * config.batch)
    sizes = ((own, num_own), (given, config.batch - num_own))
    sources = [windows.batches(size, first) for windows, size in sizes if size]
    while True:
        yield torch.cat([next(source) for source in sources])


def training_rows(target: FrozenTarget, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The inputs of `Loss` for tokens [B, R + 1].

    Row p pairs what the draft reads of the target at p with token p + 1, and learns the target's logits at p + 1.
    """
    reads, logits = target(tokens)
    return target.embed(tokens[:, 1:]), reads[:, :-1], logits[:, 1:]


def backward(run: DraftRun, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """(loss, agreement by depth) of tokens [B, R + 1], with gradients."""
    rows = training_rows(run.target, tokens)
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
    agreement = run_steps(run, windows[0], windows[1])
    figures = {
        "parameters": float(run.num_parameters),
        **more,
        "own_tokens": float(len(own)),
        "given_tokens": float(len(given)),
        "seen_tokens": run.config.num_tokens,
    } | {f"agreement_{depth}": value for depth, value in enumerate(agreement, 1)}
    text = json.dumps(figures | {"config": asdict(run.config)}, indent=1)
    run.state.with_suffix(".json").write_text(text + "\n")
    return figures


def run_steps(run: DraftRun, own: Windows, given: Windows) -> list[float]:
    """Run the remaining steps; the draft is saved even on interruption.  Returns the last top-1 agreement by depth."""
    config, state = run.config, run.state
    optimizers = make_optimizers(run.draft, config.matrix_lr, config.other_lr, config.weight_decay)
    num_steps = max(1, int(config.num_tokens / (config.batch * config.length)))
    first = load_state(state, run.draft, optimizers)
    step, agreement = first, torch.zeros(0)
    print(f"{run.num_parameters:,} parameters, steps {first} to {num_steps}")
    begun = time.perf_counter()
    try:
        for step, batch in zip(range(first, num_steps), mixed_batches(own, given, config, first), strict=False):
            set_rate(optimizers, schedule(step / num_steps))
            loss, agreement = backward(run, batch)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            if (step + 1) % config.log_every == 0 or step + 1 == num_steps:
                rate = config.batch * config.length * (step + 1 - first) / (time.perf_counter() - begun)
                log(step + 1, num_steps, float(loss), agreement, rate)
            if (step + 1) % config.save_every == 0:
                save_state(state, run.draft, optimizers, step + 1)
    except KeyboardInterrupt:
        save_state(state, run.draft, optimizers, step)
        print(f"stopped; {state} holds step {step}: start again to continue")
        raise
    finally:
        run.save()
    return agreement.tolist()


def log(step: int, num_steps: int, loss: float, agreement: Tensor, rate: float) -> None:
    depths = " ".join(f"{a:.3f}" for a in agreement.tolist())
    print(f"step {step}/{num_steps} loss {loss:.3f} top-1 by depth {depths} {rate / 1e6:.4f} M tokens/s", flush=True)
