"""Train an EAGLE-3 draft for a frozen target by training-time test, on given text and on text of the target.

`python -m espalier.train eagle3` runs `train_eagle3`.  An interrupted run continues if it is started again with the
same work folder.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from espalier.train.checkpoint import draft_shape, save_draft
from espalier.train.draft import Eagle3Draft, training_loss
from espalier.train.optim import make_optimizers, schedule, set_rate
from espalier.train.packing import Windows
from espalier.train.state import load_state, save_state
from espalier.train.target import FrozenTarget

Loss = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class DraftConfig:
    """The settings of a run.  `python -m espalier.train eagle3` has a flag for each field."""

    draft_vocab: int = 4096
    intermediate_size: int | None = None
    length: int = 1024
    batch: int = 32
    num_tokens: float = 2.5e8
    ttt_steps: int = 6
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


@dataclass
class OwnText:
    """The target's continuations as one stream, and how often it chose each token id greedily."""

    stream: np.ndarray
    greedy_counts: np.ndarray


def make_own_text(target: FrozenTarget, stream: np.ndarray, config: DraftConfig) -> OwnText:
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


def load_own_text(target: FrozenTarget, stream: np.ndarray, config: DraftConfig, work: Path) -> OwnText:
    path = work / "own_text.npz"
    if not path.exists():
        own = make_own_text(target, stream, config)
        np.savez(path, stream=own.stream, greedy_counts=own.greedy_counts)
    saved = np.load(path)
    return OwnText(saved["stream"], saved["greedy_counts"])


def choose_vocabulary(stream: np.ndarray, greedy_counts: np.ndarray, size: int) -> tuple[np.ndarray, float]:
    """(token ids of the draft vocabulary, ascending; the share of the target's greedy tokens that they cover)."""
    counts = np.bincount(stream, minlength=len(greedy_counts)) / len(stream)
    own = greedy_counts / max(1, greedy_counts.sum())
    ids = np.sort(np.argsort(-(own + 0.1 * counts), kind="stable")[:size])
    return ids, float(own[ids].sum())


def new_draft(target: FrozenTarget, ids: np.ndarray, config: DraftConfig) -> Eagle3Draft:
    torch.manual_seed(config.seed)
    shape = draft_shape(target.config, len(ids), {"intermediate_size": config.intermediate_size})
    draft = Eagle3Draft(shape).to(target.device)
    draft.set_vocabulary(torch.from_numpy(ids).to(target.device), target.head.detach().float())
    draft.norm.weight.data.copy_(target.final_norm)
    return draft


def mixed_batches(own: Windows, given: Windows, config: DraftConfig, first: int) -> Iterator[Tensor]:
    """Batches [batch, length + 1]; `own_share` of their rows are the target's own text."""
    num_own = round(config.own_share * config.batch)
    sizes = ((own, num_own), (given, config.batch - num_own))
    sources = [windows.batches(size, first) for windows, size in sizes if size]
    while True:
        yield torch.cat([next(source) for source in sources])


def backward(
    loss_of: Loss, draft: Eagle3Draft, target: FrozenTarget, tokens: Tensor, config: DraftConfig
) -> tuple[Tensor, Tensor]:
    """(loss, agreement by depth) of tokens [B, T], with gradients.

    Row p pairs the feature at p with token p + 1, and learns the target's logits at p + 1.
    """
    features, logits = target(tokens)
    embeds = target.embed(tokens[:, 1:])
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
        loss, agreement = loss_of(draft, embeds, features[:, :-1], logits[:, 1:], config.ttt_steps, config.decay)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
    return loss.detach(), agreement


def train_eagle3(target_dir: Path, stream: np.ndarray, out: Path, work: Path, config: DraftConfig) -> dict[str, float]:
    """Train, save to `out`, and return the run's figures.  stream: token ids of the text to train on."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    work.mkdir(parents=True, exist_ok=True)
    target = FrozenTarget(target_dir, device)
    own = load_own_text(target, stream, config, work)
    ids, coverage = choose_vocabulary(stream, own.greedy_counts, min(config.draft_vocab, len(own.greedy_counts)))
    print(f"draft vocabulary {len(ids)} of {len(own.greedy_counts)}: {coverage:.2%} of the target's greedy tokens")
    draft = new_draft(target, ids, config)
    windows = [Windows(s, config.length, device, config.seed) for s in (own.stream, stream)]
    agreement = run_steps(draft, target, windows[0], windows[1], work / "draft.pt", out, config)
    figures = {
        "parameters": float(sum(p.numel() for p in draft.parameters())),
        "coverage": coverage,
        "own_tokens": float(len(own.stream)),
        "given_tokens": float(len(stream)),
        "seen_tokens": config.num_tokens,
    } | {f"agreement_{depth}": value for depth, value in enumerate(agreement, 1)}
    (work / "draft.json").write_text(json.dumps(figures | {"config": asdict(config)}, indent=1) + "\n")
    return figures


def run_steps(
    draft: Eagle3Draft, target: FrozenTarget, own: Windows, given: Windows, state: Path, out: Path, config: DraftConfig
) -> list[float]:
    """Run the remaining steps; the draft is saved even on interruption.  Returns the last top-1 agreement by depth."""
    optimizers = make_optimizers(draft, config.matrix_lr, config.other_lr, config.weight_decay)
    num_steps = max(1, int(config.num_tokens / (config.batch * config.length)))
    first = load_state(state, draft, optimizers)
    step, agreement = first, torch.zeros(config.ttt_steps)
    loss_of: Loss = torch.compile(training_loss) if target.device.type == "cuda" else training_loss
    print(f"{sum(p.numel() for p in draft.parameters()):,} parameters, steps {first} to {num_steps}")
    begun = time.perf_counter()
    try:
        for step, batch in zip(range(first, num_steps), mixed_batches(own, given, config, first), strict=False):
            set_rate(optimizers, schedule(step / num_steps))
            loss, agreement = backward(loss_of, draft, target, batch, config)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            if (step + 1) % config.log_every == 0 or step + 1 == num_steps:
                rate = config.batch * config.length * (step + 1 - first) / (time.perf_counter() - begun)
                log(step + 1, num_steps, float(loss), agreement, rate)
            if (step + 1) % config.save_every == 0:
                save_state(state, draft, optimizers, step + 1)
    except KeyboardInterrupt:
        save_state(state, draft, optimizers, step)
        print(f"stopped; {state} holds step {step}: start again to continue")
        raise
    finally:
        save_draft(draft, out)
    return agreement.tolist()


def log(step: int, num_steps: int, loss: float, agreement: Tensor, rate: float) -> None:
    depths = " ".join(f"{a:.3f}" for a in agreement.tolist())
    print(f"step {step}/{num_steps} loss {loss:.3f} top-1 by depth {depths} {rate / 1e6:.3f} M tokens/s", flush=True)
