"""The target's own text: its continuations of prompts that are cut from the given text.

A trainer makes it once and keeps it in its work folder.  `python -m espalier.train own-text` makes it before, in as
many processes as there are seeds; runs that share the work folder read all of it.  Each file says what it was made
from.  A run that is interrupted keeps its continuations, and the same command goes on from there.
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


@dataclass
class Continuations:
    """The continuations made so far, each with its prompt, and how often the target chose each token id greedily."""

    texts: list[np.ndarray]
    greedy_counts: np.ndarray

    def in_random_order(self, seed: int) -> OwnText:
        order = np.random.default_rng(seed).permutation(len(self.texts))
        # Not the data's dtype: the target may say ids that the data's dtype does not hold.
        return OwnText(np.concatenate([self.texts[i] for i in order]).astype(np.int32), self.greedy_counts)


def continue_prompts(target: FrozenTarget, stream: np.ndarray, config: OwnTextConfig, made: Continuations) -> None:
    """Continue prompts cut from `stream` until there are config.continuations.  A batch has prompts of one length."""
    begun = time.perf_counter()
    while (before := len(made.texts)) < config.continuations:
        number = before // config.generate_batch
        length = PROMPT_LENGTHS[number % len(PROMPT_LENGTHS)]
        # Seeds of the batch alone: a run that was interrupted makes the same text.
        seed = config.seed * WINDOW_SEEDS + 1 + number
        torch.manual_seed(seed)
        windows = Windows(stream, length, target.device, seed)
        prompts = next(windows.batches(min(config.generate_batch, config.continuations - before)))[:, :length]
        sampled = int((number + 1) * config.sampled_share) > int(number * config.sampled_share)
        texts = target.continuations(prompts, config.continuation_tokens, 1.0 if sampled else 0.0)
        if not sampled:
            counts = np.bincount(np.concatenate([t[length:] for t in texts]), minlength=len(made.greedy_counts))
            made.greedy_counts = made.greedy_counts + counts
        made.texts += texts
        print(f"continued {len(made.texts)} prompts, {time.perf_counter() - begun:.0f} s", flush=True)


def write_own_text(
    target: FrozenTarget, stream: np.ndarray, config: OwnTextConfig, work: Path, origin: Mapping[str, str]
) -> None:
    """Make the own text of this seed, and keep it in the work folder.  origin: see work.origin_of."""
    work.mkdir(parents=True, exist_ok=True)
    path, part = _file(work, config), _part(work, config)
    made_from = {**origin, **fixed_settings(config, OwnTextConfig)}
    made = Continuations([], np.zeros(int(target.config["vocab_size"]), dtype=np.int64))
    if part.exists():
        _require_made_from(part, made_from)
        saved = np.load(part)
        made = Continuations(np.split(saved["stream"], saved["ends"][:-1]), saved["greedy_counts"])
    try:
        continue_prompts(target, stream, config, made)
    except BaseException:
        if made.texts:
            ends = np.cumsum([len(text) for text in made.texts])
            _write(part, made_from, stream=np.concatenate(made.texts), greedy_counts=made.greedy_counts, ends=ends)
            print(f"{part} keeps {len(made.texts)} continuations; the same command goes on from there", flush=True)
        raise
    own = made.in_random_order(config.seed)
    _write(path, made_from, stream=own.stream, greedy_counts=own.greedy_counts)
    part.unlink(missing_ok=True)


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
    of_this_seed = {**origin, **fixed_settings(config, OwnTextConfig)}
    if _part(work, config).exists():
        _require_made_from(_part(work, config), of_this_seed)
    for path in paths:
        _require_made_from(path, of_this_seed if path == _file(work, config) else origin)
    return paths


def _require_made_from(path: Path, now: Mapping[str, str | None]) -> None:
    """Raises EspalierError if a file of own text cannot be read, or was made from something else."""
    try:
        with np.load(path) as saved:
            made_from = json.loads(str(saved["made_from"])) if "made_from" in saved else None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise EspalierError(f"{path} cannot be read ({one_line(error)}); delete it to make it anew") from None
    require_same(path, made_from, now, "give the same flags, or another --work")


def _write(path: Path, made_from: Mapping[str, str | None], **arrays: np.ndarray) -> None:
    # A run that starts now must not read half a file.
    with whole_file(path, "free some space there, or give another --work") as unfinished, unfinished.open("wb") as file:
        np.savez(file, made_from=np.array(json.dumps(made_from)), **arrays)  # type: ignore[arg-type]


def _file(work: Path, config: OwnTextConfig) -> Path:
    return work / f"own_text-{config.seed}.npz"


def _part(work: Path, config: OwnTextConfig) -> Path:
    """The file of a run that was interrupted."""
    return work / f"own_text-{config.seed}.part"
