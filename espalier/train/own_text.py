"""The target's own text: its continuations of prompts that are cut from the given text.

A trainer makes it once and keeps it in its work folder.  `python -m espalier.train own-text` makes it before, in as
many processes as there are seeds; runs that share the work folder read all of it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from espalier.config import option
from espalier.train.packing import Windows
from espalier.train.target import FrozenTarget

PROMPT_LENGTHS = (48, 96, 192, 384)
# Windows of two seeds differ.
WINDOW_SEEDS = 100_003


@dataclass(frozen=True)
class OwnTextConfig:
    """The settings of the target's own text.  The command line shows what each is."""

    continuations: int = option("number of prompts, cut from the data, that the target continues", 40960)
    continuation_tokens: int = option("most tokens of a continuation", 256)
    generate_batch: int = option("number of prompts that are continued at once", 64)
    sampled_share: float = option(
        "share of these batches, 0 to 1, that is sampled at temperature 1; the others are greedy", 0.35
    )
    seed: int = option("seed of every random choice; the own text of several seeds adds up in the work folder", 0)


@dataclass
class OwnText:
    """The target's continuations as one stream, and how often it chose each token id greedily."""

    stream: np.ndarray
    greedy_counts: np.ndarray


def make_own_text(target: FrozenTarget, stream: np.ndarray, config: OwnTextConfig) -> OwnText:
    """Continue prompts cut from `stream`.  A batch has prompts of one length."""
    torch.manual_seed(config.seed)
    parts: list[np.ndarray] = []
    counts = np.zeros(int(target.config["vocab_size"]), dtype=np.int64)
    begun = time.perf_counter()
    num_prompts = max(1, config.continuations)
    for number, before in enumerate(range(0, num_prompts, config.generate_batch)):
        length = PROMPT_LENGTHS[number % len(PROMPT_LENGTHS)]
        windows = Windows(stream, length, target.device, config.seed * WINDOW_SEEDS + 1 + number)
        prompts = next(windows.batches(min(config.generate_batch, num_prompts - before)))[:, :length]
        sampled = int((number + 1) * config.sampled_share) > int(number * config.sampled_share)
        texts = target.continuations(prompts, config.continuation_tokens, 1.0 if sampled else 0.0)
        parts += texts
        if not sampled:
            counts += np.bincount(np.concatenate([t[length:] for t in texts]), minlength=len(counts))
        print(f"continued {len(parts)} prompts, {time.perf_counter() - begun:.0f} s", flush=True)
    order = np.random.default_rng(config.seed).permutation(len(parts))
    return OwnText(np.concatenate([parts[i] for i in order]).astype(stream.dtype), counts)


def write_own_text(target: FrozenTarget, stream: np.ndarray, config: OwnTextConfig, work: Path) -> None:
    """Make the own text of this seed, and keep it in the work folder."""
    work.mkdir(parents=True, exist_ok=True)
    own, path = make_own_text(target, stream, config), work / f"own_text-{config.seed}.npz"
    # A run that starts now must not read half a file.
    unfinished = path.with_name(f"unfinished-{path.name}")
    np.savez(unfinished, stream=own.stream, greedy_counts=own.greedy_counts)
    unfinished.replace(path)


def load_own_text(target: FrozenTarget, stream: np.ndarray, config: OwnTextConfig, work: Path) -> OwnText:
    """The own text of all seeds in the work folder.  If there is none, that of this seed is made and kept there."""
    if not list(work.glob("own_text-*.npz")):
        write_own_text(target, stream, config, work)
    saved = [np.load(path) for path in sorted(work.glob("own_text-*.npz"))]
    return OwnText(np.concatenate([s["stream"] for s in saved]), np.sum([s["greedy_counts"] for s in saved], 0))
