"""The target's own text: text that the target generates, as answers to conversations or continuations of documents.

A training run generates the text once and saves it in the work folder.  `espalier train own-text` generates the text
before training; processes with different seeds may do so at the same time.  A run reads the text of all seeds in its
work folder.  Each file records the target, data and settings of its text.  Unfinished text is in a separate file
(unfinished_text.py), so that an interrupted run can continue.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch

from espalier.errors import EspalierError, one_line
from espalier.train.configs import read_target
from espalier.train.data import UserText
from espalier.train.settings import OwnTextConfig, TrainConfig, fixed_settings, length_advice
from espalier.train.target import training_device
from espalier.train.unfinished_text import TextBatch, UnfinishedText
from espalier.train.windows import StreamWindows, TextList, require_windows
from espalier.train.work import origin_of, replace_file, require_same_origin
from espalier.train.writer import TargetWriter

# A seed is multiplied by this factor and increased by the number of a batch, so that no two batches have equal seeds.
WINDOW_SEED_FACTOR = 100_003
TRIAL_FLAGS = "--continuations 64 --continuation-tokens 64"
TRIAL_TRAINING_FLAGS = " --num-tokens 1e5 --batch 4 --length 256"


@dataclass
class OwnText:
    """The text that a target generated (its own text).  texts: prompts with continuations, in random order.
    greedy_counts: how often the target chose each token id greedily.  held_out: the held-out prompts with greedy
    continuations."""

    texts: TextList
    greedy_counts: np.ndarray
    held_out: TextList


def print_planned_work(config: OwnTextConfig, makes_text: bool) -> None:
    """Prints the device, the planned work and, on a CPU, flags for a shorter run.  makes_text: whether text is made."""
    device, work, trial = training_device(), [], TRIAL_FLAGS
    if makes_text:
        most = "" if config.text_seconds is None else f" within {format_minutes(config.text_seconds)}"
        work.append(f"{config.continuations} continuations of up to {config.continuation_tokens} tokens{most}")
    if isinstance(config, TrainConfig):
        steps = f"steps of {config.batch} x {config.length} tokens"
        num_steps = int(config.num_tokens / (config.batch * config.length))
        limit = config.max_seconds
        work.append(f"{num_steps} {steps}" if limit is None else f"{steps} for {format_minutes(limit)}")
        trial += TRIAL_TRAINING_FLAGS
    limits = [config.text_seconds] * makes_text + [getattr(config, "max_seconds", 0)]
    is_long = device.type == "cpu" and None in limits
    hint = f"; on a CPU this may take days: for a trial give {trial}" if is_long else ""
    print(f"on {device}: {', then '.join(work)}{hint}", file=sys.stderr)


def format_minutes(seconds: float) -> str:
    """Returns a time for a message, in minutes, or in seconds if it is short."""
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


def require_prompts(data: UserText, config: OwnTextConfig, target: Path) -> None:
    """Raises EspalierError if the data have too few prompts, or if a prompt with its continuation is too long."""
    data, prompts = data.split_held_out()
    positions = int(read_target(target)["max_position_embeddings"])
    if (longest := longest_text(data, config, prompts)) > positions:
        prompt = longest - config.continuation_tokens
        raise EspalierError(
            f"--continuation-tokens={config.continuation_tokens} is too long: a prompt has up to {prompt} tokens, and "
            f"the target {positions} positions; {length_advice(prompt, positions)}"
        )
    if data.conversations:
        return
    num_tokens = len(data.stream)
    for length, size in config.prompt_batches():
        remedy = "give more text, or a smaller --generate-batch"
        require_windows(f"--data holds {num_tokens} tokens", num_tokens, length, size, remedy)
    if config.continuations > num_tokens:
        raise EspalierError(
            f"--continuations={config.continuations} is more than --data has prompts: it holds {num_tokens} tokens; "
            f"use at most {num_tokens}, or give more text"
        )


def make_own_text(writer: TargetWriter, data: UserText, config: OwnTextConfig, unfinished: UnfinishedText) -> None:
    """Generates continuations, batch by batch, until there are config.continuations, or until text_seconds have passed.
    A continued run generates the same text as an uninterrupted one: a batch depends only on its number, its size and
    the prompt lengths.  If generate_batch changes, the remaining text differs, but no batch is generated twice."""
    if num_old := unfinished.num_texts:
        print(f"{unfinished.path} has {num_old} continuations, {config.continuations - num_old} are left", flush=True)
    started_at, num_made, seconds, max_seconds = time.perf_counter(), 0, 0.0, config.text_seconds or math.inf
    while (num_texts := unfinished.num_texts) < config.continuations and seconds < max_seconds:
        number, size = len(unfinished.batches), min(config.generate_batch, config.continuations - num_texts)
        prompts = (
            _cut_prompts(data, config, number, size)
            if not data.conversations
            else _conversation_prompts(data, config, num_texts, size)
        )
        # A further answer to a conversation is sampled, because a greedy one would equal the first answer.
        is_new = not data.conversations or config.seed * config.continuations + num_texts < len(data.conversations)
        is_sampled = int((number + 1) * config.sampled_share) > int(number * config.sampled_share) or not is_new
        seed = config.seed * WINDOW_SEED_FACTOR + 1 + number
        texts = writer.continuations(prompts, config.continuation_tokens, 1.0 if is_sampled else 0.0, seed)
        unfinished.append(TextBatch([len(prompt) for prompt in prompts], is_sampled, texts))
        num_made += size
        seconds = time.perf_counter() - started_at
        left = min((config.continuations - unfinished.num_texts) * seconds / num_made, max(0.0, max_seconds - seconds))
        print(f"continued {unfinished.num_texts} prompts, {seconds:.0f} s, {format_minutes(left)} left", flush=True)


def _cut_prompts(data: UserText, config: OwnTextConfig, batch_number: int, num_prompts: int) -> list[np.ndarray]:
    """Returns prompts of one length for a batch, cut from the documents.  Batches take the lengths of prompt_batches()
    in turn.  require_prompts has checked that the documents have enough tokens."""
    lengths = [length for length, _ in config.prompt_batches()]
    length, seed = lengths[batch_number % len(lengths)], config.seed * WINDOW_SEED_FACTOR + 1 + batch_number
    windows = StreamWindows(data.stream, length, torch.device("cpu"), seed)
    return list(next(windows.batches(num_prompts))[:, :length].numpy())


def _conversation_prompts(data: UserText, config: OwnTextConfig, num_done: int, num_prompts: int) -> list[np.ndarray]:
    """Returns the prompts of a batch, in a random order that is the same for all seeds.  The prompts of seed n begin
    where those of seed n - 1 end.  num_done: how many prompts of this seed are done."""
    order = np.random.default_rng(0).permutation(len(data.conversations))
    positions = config.seed * config.continuations + num_done + np.arange(num_prompts)
    return [data.conversations[order[position % len(order)]].tokens for position in positions]


def collect_texts(batches: Sequence[TextBatch], vocab_size: int, seed: int) -> tuple[TextList, np.ndarray]:
    """Returns (the texts of the batches in random order, the counts of greedy tokens)."""
    texts = [(text, first) for batch in batches for text, first in zip(batch.texts, batch.firsts, strict=True)]
    counts = np.zeros(vocab_size, dtype=np.int64)
    for batch in batches:
        if not batch.sampled:
            continuations = [text[first:] for text, first in zip(batch.texts, batch.firsts, strict=True)]
            counts += np.bincount(np.concatenate(continuations), minlength=vocab_size)
    order = np.random.default_rng(seed).permutation(len(texts))
    return TextList.of([texts[i][0] for i in order], [texts[i][1] for i in order]), counts


def write_own_text(
    target: Path, data: UserText, config: OwnTextConfig, work_dir: Path, origin: Mapping[str, str]
) -> None:
    """Generates the own text of this seed and writes it to the work folder.  origin: see work.origin_of."""
    work_dir.mkdir(parents=True, exist_ok=True)
    path, made_from = _own_text_file(work_dir, config), json.dumps({**origin, **fixed_settings(config, OwnTextConfig)})
    data, prompts = data.split_held_out()
    with open_unfinished(config, work_dir, origin) as unfinished:
        with TargetWriter(target, longest_text(data, config, prompts), config.generate_batch) as writer:
            make_own_text(writer, data, config, unfinished)
            held_out = writer.continuations(prompts, config.continuation_tokens, 0.0) if prompts else []
        texts, counts = collect_texts(unfinished.batches, int(read_target(target)["vocab_size"]), config.seed)
        parts = {"texts": texts, "held_out": TextList.of(held_out, [len(prompt) for prompt in prompts])}
        arrays = {f"{name}_{field}": array for name, part in parts.items() for field, array in vars(part).items()}
        # The file is replaced at once, because another run may read it.
        remedy = "free some space there, or give another --work"
        with replace_file(path, remedy) as new_file, new_file.open("wb") as file:
            np.savez(file, greedy_counts=counts, made_from=np.array(made_from), **arrays)
            # The text must be on disk before the unfinished text is removed.
            file.flush()
            os.fsync(file.fileno())
        unfinished.path.unlink()


def longest_text(data: UserText, config: OwnTextConfig, prompts: Sequence[np.ndarray] = ()) -> int:
    """Returns the length of the longest prompt with its continuation.  prompts: further prompts, not in `data`."""
    conversations = [each.tokens for each in data.conversations]
    cut_lengths = [] if conversations else [length for length, _ in config.prompt_batches()]
    return max([*map(len, conversations), *map(len, prompts), *cut_lengths]) + config.continuation_tokens


def open_unfinished(config: OwnTextConfig, work_dir: Path, origin: Mapping[str, str]) -> UnfinishedText:
    """Opens the unfinished text of config.seed.  origin: see work.origin_of.  Raises EspalierError."""
    return UnfinishedText(_unfinished_file(work_dir, config), {**origin, **fixed_settings(config, OwnTextConfig)})


def require_unfinished(config: OwnTextConfig, work_dir: Path, origin: Mapping[str, str]) -> None:
    """Raises EspalierError, before the target is loaded, if this run cannot continue the unfinished text."""
    if _unfinished_file(work_dir, config).exists():
        with open_unfinished(config, work_dir, origin):
            pass


def own_text_command(target_dir: Path, data: UserText, config: OwnTextConfig, work_dir: Path) -> None:
    """Runs `espalier train own-text`.  Checks everything before the target is loaded.  Raises EspalierError."""
    origin = origin_of(target_dir, data.all_tokens)
    require_prompts(data, config, target_dir)
    saved_texts(config, work_dir, origin)
    require_unfinished(config, work_dir, origin)
    print_planned_work(config, makes_text=True)
    write_own_text(target_dir, data, config, work_dir, origin)


def load_own_text(
    target: Path, data: UserText, config: OwnTextConfig, work_dir: Path, origin: Mapping[str, str]
) -> OwnText:
    """Returns the own text of all seeds in the work folder.  If there is none, generates this seed's text."""
    if not (saved := saved_texts(config, work_dir, origin)):
        write_own_text(target, data, config, work_dir, origin)
        saved = saved_texts(config, work_dir, origin)
    files = [np.load(path) for path in saved]
    texts = TextList(*(np.concatenate([file[f"texts_{f.name}"] for file in files]) for f in fields(TextList)))
    held_out = TextList(*(files[0][f"held_out_{f.name}"] for f in fields(TextList)))
    return OwnText(texts, np.sum([file["greedy_counts"] for file in files], 0), held_out)


def saved_texts(config: OwnTextConfig, work_dir: Path, origin: Mapping[str, str]) -> list[Path]:
    """Returns the files of own text in the work folder.  origin: see work.origin_of.
    Raises EspalierError for a file of another target or of other data, and for this seed's file with other settings."""
    paths = sorted(work_dir.glob("own_text-*.npz"))
    for path in paths:
        try:
            with np.load(path) as saved:
                made_from = json.loads(str(saved["made_from"])) if "texts_firsts" in saved else None
        except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
            raise EspalierError(f"{path} cannot be read ({one_line(error)}); delete it to make it anew") from None
        is_this_seed = path == _own_text_file(work_dir, config)
        expected = {**origin, **fixed_settings(config, OwnTextConfig)} if is_this_seed else origin
        require_same_origin(path, made_from, expected, "give the same flags, or another --work")
    return paths


def _own_text_file(work_dir: Path, config: OwnTextConfig) -> Path:
    return work_dir / f"own_text-{config.seed}.npz"


def _unfinished_file(work_dir: Path, config: OwnTextConfig) -> Path:
    return work_dir / f"own_text-{config.seed}.unfinished"
