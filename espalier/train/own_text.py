"""The target's own text: its continuations of prompts that are cut from the given text.

A trainer makes it once and keeps it in its work folder.  `python -m espalier.train own-text` makes it before, in as
many processes as there are seeds; runs that share the work folder read all of it.  Each file says what it was made
from.  Until all of a seed's text is made, it is in a file of its own (unfinished_text.py), from which a run that was
ended goes on.
"""

from __future__ import annotations

import json
import os
import sys
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from espalier.errors import EspalierError, one_line
from espalier.train.settings import OwnTextConfig, TrainConfig, fixed_settings
from espalier.train.target import FrozenTarget, training_device
from espalier.train.unfinished_text import Batch, UnfinishedText
from espalier.train.windows import Windows, require_windows
from espalier.train.work import origin_of, require_same, whole_file

# Windows of two seeds differ.
WINDOW_SEEDS = 100_003
TRIAL = "--continuations 64 --continuation-tokens 64"
TRIAL_OF_TRAINING = " --num-tokens 1e5 --batch 4 --length 256"


@dataclass
class OwnText:
    """The target's continuations as one stream, and how often it chose each token id greedily."""

    stream: np.ndarray
    greedy_counts: np.ndarray


def print_work(config: OwnTextConfig, makes_text: bool) -> None:
    """The first line of a run: the device, the work ahead, and on a CPU how to make it small."""
    device, work, trial = training_device(), [], TRIAL
    if makes_text:
        work.append(f"{config.continuations} continuations of up to {config.continuation_tokens} tokens")
    if isinstance(config, TrainConfig):
        num_steps = int(config.num_tokens / (config.batch * config.length))
        work.append(f"{num_steps} steps of {config.batch} x {config.length} tokens")
        trial += TRIAL_OF_TRAINING
    hint = f"; on a CPU this may take days: for a trial give {trial}" if device.type == "cpu" else ""
    print(f"on {device}: {', then '.join(work)}{hint}", file=sys.stderr)


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


def make_own_text(
    target: FrozenTarget, stream: np.ndarray, config: OwnTextConfig, unfinished: UnfinishedText
) -> OwnText:
    """Continue prompts cut from `stream`, as many as are missing.  A batch has prompts of one length.

    A batch follows from its number, its size and the prompt lengths in use, so a run that was ended goes on to the same
    text.  With another generate_batch the rest of it is another, but no batch is made twice.
    """
    if found := unfinished.num_texts:
        print(f"{unfinished.path} has {found} continuations, {config.continuations - found} are left", flush=True)
    # Not all of PROMPT_LENGTHS if generate_batch is large; others were not checked against the target and the data.
    lengths = [length for length, _ in config.prompts()]
    begun = time.perf_counter()
    while (before := unfinished.num_texts) < config.continuations:
        number = len(unfinished.batches)
        length, seed = lengths[number % len(lengths)], config.seed * WINDOW_SEEDS + 1 + number
        torch.manual_seed(seed)
        windows = Windows(stream, length, target.device, seed)
        prompts = next(windows.batches(min(config.generate_batch, config.continuations - before)))[:, :length]
        sampled = int((number + 1) * config.sampled_share) > int(number * config.sampled_share)
        texts = target.continuations(prompts, config.continuation_tokens, 1.0 if sampled else 0.0)
        unfinished.append(Batch(length, sampled, texts))
        print(f"continued {unfinished.num_texts} prompts, {time.perf_counter() - begun:.0f} s", flush=True)
    return own_text_of(unfinished.batches, int(target.config["vocab_size"]), config.seed)


def own_text_of(batches: Sequence[Batch], vocab_size: int, seed: int) -> OwnText:
    """The texts in random order."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for batch in batches:
        if not batch.sampled:
            said = np.concatenate([text[batch.prompt_length :] for text in batch.texts])
            counts += np.bincount(said, minlength=vocab_size)
    texts = [text for batch in batches for text in batch.texts]
    order = np.random.default_rng(seed).permutation(len(texts))
    # Not the data's dtype: the target may say ids that the data's dtype does not hold.
    return OwnText(np.concatenate([texts[i] for i in order]).astype(np.int32), counts)


def write_own_text(
    target: FrozenTarget, stream: np.ndarray, config: OwnTextConfig, work: Path, origin: Mapping[str, str]
) -> None:
    """Make the own text of this seed, and keep it in the work folder.  origin: see work.origin_of."""
    work.mkdir(parents=True, exist_ok=True)
    path, made_from = _file(work, config), json.dumps({**origin, **fixed_settings(config, OwnTextConfig)})
    with open_unfinished(config, work, origin, len(stream)) as unfinished:
        own = make_own_text(target, stream, config, unfinished)
        # A run that starts now must not read half a file.
        remedy = "free some space there, or give another --work"
        with whole_file(path, remedy) as half, half.open("wb") as file:
            np.savez(file, stream=own.stream, greedy_counts=own.greedy_counts, made_from=np.array(made_from))
            # On disk before the unfinished text goes.
            file.flush()
            os.fsync(file.fileno())
        unfinished.path.unlink()


def open_unfinished(config: OwnTextConfig, work: Path, origin: Mapping[str, str], num_tokens: int) -> UnfinishedText:
    """num_tokens: of the data from which prompts are cut; a run may hold some out.  Raises EspalierError."""
    cut = {"--data cut to": f"{num_tokens} tokens"}
    return UnfinishedText(_unfinished(work, config), {**origin, **fixed_settings(config, OwnTextConfig), **cut})


def require_unfinished(config: OwnTextConfig, work: Path, origin: Mapping[str, str], num_tokens: int) -> None:
    """Refuse unfinished text that this run cannot go on with, before the target is loaded.  Raises EspalierError."""
    if _unfinished(work, config).exists():
        with open_unfinished(config, work, origin, num_tokens):
            pass


def own_text_command(target_dir: Path, stream: np.ndarray, config: OwnTextConfig, work: Path) -> None:
    """`python -m espalier.train own-text`.  Raises EspalierError before the target is loaded."""
    require_prompts(len(stream), config)
    origin = origin_of(target_dir, stream)
    saved_texts(config, work, origin)
    require_unfinished(config, work, origin, len(stream))
    print_work(config, makes_text=True)
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


def _unfinished(work: Path, config: OwnTextConfig) -> Path:
    return work / f"own_text-{config.seed}.unfinished"
