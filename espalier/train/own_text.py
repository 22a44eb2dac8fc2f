"""The target's own text: its continuations of prompts that are cut from the given text.

A trainer makes it once and keeps it in its work folder.  `python -m espalier.train own-text` makes it before, in as
many processes as there are seeds; runs that share the work folder read all of it.  Each file says what it was made
from.
"""

from __future__ import annotations

import json
import time
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from espalier.errors import EspalierError, one_line
from espalier.train.packing import Windows, require_windows
from espalier.train.settings import PROMPT_LENGTHS, OwnTextConfig, fixed_settings
from espalier.train.target import FrozenTarget, training_device
from espalier.train.work import origin_of, require_same, whole_file

# Windows of two seeds differ.
WINDOW_SEEDS = 100_003


@dataclass
class OwnText:
    """The target's continuations as one stream, and how often it chose each token id greedily."""

    stream: np.ndarray
    greedy_counts: np.ndarray


def require_prompts(num_tokens: int, config: OwnTextConfig) -> None:
    """Refuse more continuations than the data have prompts for.  Raises EspalierError."""
    for length, size in config.prompts():
        remedy = "give more text, or a smaller --generate-batch"
        require_windows(f"--data holds {num_tokens} tokens", num_tokens, length, size, remedy)
    if config.continuations > num_tokens:
        raise EspalierError(
            f"--continuations={config.continuations} is more than --data has prompts: it holds {num_tokens} tokens; "
            f"use at most {num_tokens}, or give more text"
        )


def make_own_text(target: FrozenTarget, stream: np.ndarray, config: OwnTextConfig) -> OwnText:
    """Continue prompts cut from `stream`.  A batch has prompts of one length."""
    torch.manual_seed(config.seed)
    parts: list[np.ndarray] = []
    counts = np.zeros(int(target.config["vocab_size"]), dtype=np.int64)
    begun = time.perf_counter()
    for number, before in enumerate(range(0, config.continuations, config.generate_batch)):
        length = PROMPT_LENGTHS[number % len(PROMPT_LENGTHS)]
        windows = Windows(stream, length, target.device, config.seed * WINDOW_SEEDS + 1 + number)
        prompts = next(windows.batches(min(config.generate_batch, config.continuations - before)))[:, :length]
        sampled = int((number + 1) * config.sampled_share) > int(number * config.sampled_share)
        texts = target.continuations(prompts, config.continuation_tokens, 1.0 if sampled else 0.0)
        parts += texts
        if not sampled:
            counts += np.bincount(np.concatenate([t[length:] for t in texts]), minlength=len(counts))
        print(f"continued {len(parts)} prompts, {time.perf_counter() - begun:.0f} s", flush=True)
    order = np.random.default_rng(config.seed).permutation(len(parts))
    # Not the data's dtype: the target may say ids that the data's dtype does not hold.
    return OwnText(np.concatenate([parts[i] for i in order]).astype(np.int32), counts)


def write_own_text(
    target: FrozenTarget, stream: np.ndarray, config: OwnTextConfig, work: Path, origin: Mapping[str, str]
) -> None:
    """Make the own text of this seed, and keep it in the work folder.  origin: see work.origin_of."""
    work.mkdir(parents=True, exist_ok=True)
    own, path = make_own_text(target, stream, config), _file(work, config)
    made_from = json.dumps({**origin, **fixed_settings(config, OwnTextConfig)})
    # A run that starts now must not read half a file.
    with whole_file(path, "free some space there, or give another --work") as unfinished, unfinished.open("wb") as file:
        np.savez(file, stream=own.stream, greedy_counts=own.greedy_counts, made_from=np.array(made_from))


def own_text_command(target_dir: Path, stream: np.ndarray, config: OwnTextConfig, work: Path) -> None:
    """`python -m espalier.train own-text`.  Raises EspalierError before the target is loaded."""
    require_prompts(len(stream), config)
    origin = origin_of(target_dir, stream)
    saved_texts(config, work, origin)
    write_own_text(FrozenTarget(target_dir, training_device()), stream, config, work, origin)


def load_own_text(
    target: FrozenTarget, stream: np.ndarray, config: OwnTextConfig, work: Path, origin: Mapping[str, str]
) -> OwnText:
    """The own text of all seeds in the work folder.  If there is none, that of this seed is made and kept there."""
    if not (saved := saved_texts(config, work, origin)):
        write_own_text(target, stream, config, work, origin)
        saved = saved_texts(config, work, origin)
    texts = [np.load(path) for path in saved]
    return OwnText(np.concatenate([s["stream"] for s in texts]), np.sum([s["greedy_counts"] for s in texts], 0))


def saved_texts(config: OwnTextConfig, work: Path, origin: Mapping[str, str]) -> list[Path]:
    """The files of own text in the work folder.

    Raises EspalierError for one of another target or other data, and for this seed's if its settings were others.
    """
    paths = sorted(work.glob("own_text-*.npz"))
    for path in paths:
        try:
            with np.load(path) as saved:
                made_from = json.loads(str(saved["made_from"])) if "made_from" in saved else None
        except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
            raise EspalierError(f"{path} cannot be read ({one_line(error)}); delete it to make it anew") from None
        is_this = path == _file(work, config)
        now = {**origin, **fixed_settings(config, OwnTextConfig)} if is_this else origin
        require_same(path, made_from, now, "give the same flags, or another --work")
    return paths


def _file(work: Path, config: OwnTextConfig) -> Path:
    return work / f"own_text-{config.seed}.npz"
