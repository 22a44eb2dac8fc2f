"""Trains an EAGLE-3 draft for a frozen target by training-time test, on given text and on the target's own text.

`espalier train eagle3` runs `train_eagle3`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from espalier.train.checkpoint import draft_shape, save_draft
from espalier.train.configs import MIN_CAPTURED_LAYERS
from espalier.train.data import Data
from espalier.train.draft import Eagle3Draft, training_loss
from espalier.train.draft_run import DraftRun, Loss, prepare_run, train_draft
from espalier.train.evaluate import SETTINGS, AcceptReport, measure
from espalier.train.settings import Eagle3Config
from espalier.train.target import Eagle3Target, FrozenTarget, training_device


def choose_vocabulary(stream: np.ndarray, greedy_counts: np.ndarray, size: int) -> tuple[np.ndarray, float]:
    """(ascending token ids of the draft vocabulary, the share of the target's greedy tokens that these cover)."""
    counts = np.bincount(stream, minlength=len(greedy_counts)) / len(stream)
    own = greedy_counts / max(1, greedy_counts.sum())
    ids = np.sort(np.argsort(-(own + 0.1 * counts), kind="stable")[:size])
    return ids, float(own[ids].sum())


def new_draft(target: Eagle3Target, ids: np.ndarray, config: Eagle3Config) -> Eagle3Draft:
    torch.manual_seed(config.seed)
    shape = draft_shape(target.config, len(ids), config.intermediate_size)
    draft = Eagle3Draft(shape).to(target.device)
    draft.set_vocabulary(torch.from_numpy(ids).to(target.device), target.head.detach().float())
    draft.norm.weight.data.copy_(target.final_norm)
    return draft


def train_eagle3(target_dir: Path, data: Data, out: Path, work: Path, config: Eagle3Config) -> dict[str, float]:
    """Train a draft, save it to `out`, and return the run's figures."""
    files = prepare_run("eagle3", target_dir, data, out, work, config, MIN_CAPTURED_LAYERS)
    target, counts = Eagle3Target(target_dir, training_device()), files.own.greedy_counts
    seen = files.data.stream if len(files.data.stream) else files.own.texts.tokens
    ids, coverage = choose_vocabulary(seen, counts, min(config.draft_vocab, len(counts)))
    print(f"draft vocabulary {len(ids)} of {len(counts)}: {coverage:.2%} of the target's greedy tokens")
    draft = new_draft(target, ids, config)
    loss = torch.compile(training_loss) if target.device.type == "cuda" else training_loss

    def measured(texts: list[np.ndarray], firsts: list[int]) -> dict[str, AcceptReport]:
        return {name: measure(draft, target, texts, firsts, *tree) for name, tree in SETTINGS.items()}

    loss_of = loss_of_batch(draft, target, config, loss)
    run = DraftRun(draft, target, loss_of, lambda: save_draft(draft, out), measured, files, config)
    return train_draft(run, coverage=coverage)


def loss_of_batch(
    draft: Eagle3Draft,
    target: FrozenTarget,
    config: Eagle3Config,
    loss: Callable[..., tuple[Tensor, Tensor]] = training_loss,
) -> Loss:
    return lambda embeds, features, logits, learned: loss(
        draft, embeds, features, logits, learned, config.ttt_steps, config.decay
    )
