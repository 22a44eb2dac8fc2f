"""Train an EAGLE-3 draft for a frozen target, by training-time test, on given text and on what the target itself says.

`train_eagle3` is what `python -m espalier.train eagle3` runs.  An interrupted run goes on where it stood when it is
started again with the same `out`.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from espalier.train.checkpoint import draft_shape, save_draft
from espalier.train.draft import Eagle3Draft, training_loss
from espalier.train.optim import make_optimizers, schedule, set_rate
from espalier.train.packing import Windows
from espalier.train.target import FrozenTarget


@dataclass(frozen=True)
class DraftConfig:
    draft_vocab: int = 4096
    intermediate_size: int | None = None
    length: int = 1024
    batch: int = 32
    num_tokens: float = 1.5e8
    ttt_steps: int = 6
    decay: float = 0.9
    own_share: float = 0.6
    continuations: int = 16384
    continuation_tokens: int = 256
    sampled_share: float = 0.35
    matrix_lr: float = 4e-3
    other_lr: float = 2e-3
    weight_decay: float = 0.05
    seed: int = 0
    log_every: int = 50
    save_every: int = 500


def own_text(target: FrozenTarget, stream: np.ndarray, config: DraftConfig, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """(prompts and continuations as one stream, how often the target chose each id greedily)."""
    parts: list[np.ndarray] = []
    counts = np.zeros(int(target.config["vocab_size"]), dtype=np.int64)
    lengths, begun = (48, 96, 192, 384), time.perf_counter()
    for number in range(max(1, config.continuations // batch)):
        length = lengths[number % len(lengths)]
        prompts = next(Windows(stream, length, target.device, config.seed + 1 + number).batches(batch))[:, :length]
        sampled = int((number + 1) * config.sampled_share) > int(number * config.sampled_share)
        texts = target.continuations(prompts, config.continuation_tokens, 1.0 if sampled else 0.0)
        parts += texts
        if not sampled:
            counts += np.bincount(np.concatenate([t[length:] for t in texts]), minlength=len(counts))
        print(f"continued {len(parts)} prompts, {time.perf_counter() - begun:.0f} s", flush=True)
    np.random.default_rng(config.seed).shuffle(parts)  # type: ignore[arg-type]
    return np.concatenate(parts).astype(stream.dtype), counts


def choose_vocabulary(stream: np.ndarray, greedy_counts: np.ndarray, size: int) -> tuple[np.ndarray, float]:
    """(the ids drafted, ascending; the share of the target's greedy tokens they cover)."""
    counts = np.bincount(stream, minlength=len(greedy_counts)) / len(stream)
    own = greedy_counts / max(1, greedy_counts.sum())
    ids = np.sort(np.argsort(-(own + 0.1 * counts), kind="stable")[:size])
    return ids, float(own[ids].sum())


def mixed_batches(streams: list[Windows], sizes: list[int], first: int):
    sources = [s.batches(n, first) for s, n in zip(streams, sizes, strict=True) if n]
    while True:
        yield torch.cat([next(source) for source in sources])


def prepare_draft(target: FrozenTarget, ids: np.ndarray, config: DraftConfig) -> Eagle3Draft:
    torch.manual_seed(config.seed)
    shape = draft_shape(target.config, len(ids), {"intermediate_size": config.intermediate_size})
    draft = Eagle3Draft(shape).to(target.device)
    draft.set_vocabulary(torch.from_numpy(ids).to(target.device), target.head.detach().float())
    if shape.hidden_size == shape.target_hidden_size:
        draft.norm.weight.data.copy_(target.final_norm)
    return draft


def draft_step(loss_of, draft: Eagle3Draft, target: FrozenTarget, tokens: Tensor, config: DraftConfig) -> tuple[Tensor, Tensor]:
    """tokens [B, T].  Row p pairs the feature at p with token p + 1 and learns the target's logits at p + 1."""
    features, logits = target(tokens)
    embeds = target.embed(tokens[:, 1:])
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
        loss, agreement = loss_of(draft, embeds, features[:, :-1], logits[:, 1:], config.ttt_steps, config.decay)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
    return loss.detach(), agreement


def load_or_make_own_text(
    target: FrozenTarget, stream: np.ndarray, config: DraftConfig, work: Path, generate_batch: int
) -> tuple[np.ndarray, np.ndarray]:
    path = work / "own_text.npz"
    if not path.exists():
        own, counts = own_text(target, stream, config, generate_batch)
        np.savez(path, own=own, counts=counts)
    saved = np.load(path)
    return saved["own"], saved["counts"]


def train_eagle3(
    target_dir: Path, stream: np.ndarray, out: Path, work: Path, config: DraftConfig, generate_batch: int = 64
) -> dict[str, float]:
    """Train, save to `out`, and return what the card says.  stream: token ids of the text to train on."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    work.mkdir(parents=True, exist_ok=True)
    target = FrozenTarget(target_dir, device)
    own, counts = load_or_make_own_text(target, stream, config, work, generate_batch)
    ids, coverage = choose_vocabulary(stream, counts, min(config.draft_vocab, len(counts)))
    print(f"draft vocabulary {len(ids)} of {len(counts)}: {coverage:.2%} of the target's greedy tokens")
    draft = prepare_draft(target, ids, config)
    optimizers = make_optimizers(draft, config.matrix_lr, config.other_lr, config.weight_decay)
    num_own = round(config.own_share * config.batch)
    streams = [Windows(s, config.length, device, config.seed) for s in (own, stream)]
    num_steps = max(1, int(config.num_tokens / (config.batch * config.length)))
    first = resume(work / "draft.pt", draft, optimizers)
    loss_of = torch.compile(training_loss) if device.type == "cuda" else training_loss
    print(f"{sum(p.numel() for p in draft.parameters()):,} parameters, {len(own):,} own tokens, {num_steps} steps")
    begun = time.perf_counter()
    batches = mixed_batches(streams, [num_own, config.batch - num_own], first)
    for step, batch in zip(range(first, num_steps), batches, strict=False):
        set_rate(optimizers, schedule(step / num_steps))
        loss, agreement = draft_step(loss_of, draft, target, batch, config)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if (step + 1) % config.log_every == 0 or step + 1 == num_steps:
            depths = " ".join(f"{a:.3f}" for a in agreement.tolist())
            rate = batch.numel() * (step + 1 - first) / (time.perf_counter() - begun)
            print(f"step {step + 1}/{num_steps} loss {float(loss):.3f} top-1 by depth {depths}, {rate / 1e6:.3f} M tokens/s", flush=True)
        if (step + 1) % config.save_every == 0:
            save_state(work / "draft.pt", draft, optimizers, step + 1)
            save_draft(draft, out)
    save_draft(draft, out)
    result = {"coverage": coverage, "own_tokens": float(len(own)), "seen_tokens": float(num_steps * config.batch * config.length)}
    (work / "draft.json").write_text(json.dumps(result | {"config": asdict(config)}, indent=1) + "\n")
    return result


def save_state(path: Path, draft: Eagle3Draft, optimizers: list[torch.optim.Optimizer], step: int) -> None:
    state = {"draft": draft.state_dict(), "optimizers": [o.state_dict() for o in optimizers], "step": step}
    torch.save(state, path.with_suffix(".part"))
    path.with_suffix(".part").replace(path)


def resume(path: Path, draft: Eagle3Draft, optimizers: list[torch.optim.Optimizer]) -> int:
    if not path.exists():
        return 0
    state = torch.load(path, map_location=draft.d2t.device, weights_only=True)
    draft.load_state_dict(state["draft"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    print(f"resumed at step {state['step']}")
    return int(state["step"])
