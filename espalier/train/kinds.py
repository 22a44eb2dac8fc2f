"""The kinds of drafts, and the code that all kinds share: training a new draft and measuring a draft.

`espalier train` calls `train` and `evaluate`.  learn/trainer.py uses the same kinds to continue the training of a
served draft.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from espalier.models import read_config
from espalier.speculate.drafters.registry import read_draft
from espalier.train import block, eagle3, mtp
from espalier.train import evaluate as eagle3_measure
from espalier.train.block_head import block_loss
from espalier.train.checkpoint import load_draft, save_draft
from espalier.train.data import UserText
from espalier.train.draft import training_loss
from espalier.train.draft_run import DraftRun, LossFunction, RunFiles, prepare_run, train_draft, training_rows
from espalier.train.evaluate import AcceptReport, continue_prompts, make_report, print_reports, require_measurable
from espalier.train.mtp_checkpoint import load_mtp, save_mtp
from espalier.train.mtp_head import mtp_loss
from espalier.train.settings import BlockConfig, Eagle3Config, MtpConfig, TrainConfig
from espalier.train.target import Eagle3Target, FrozenTarget, training_device

# (steps, topk, num_draft_tokens)
Tree = tuple[int, int, int]


@dataclass(frozen=True)
class DraftKind:
    """The functions of a kind of draft.  In their arguments, `draft` is the training module.

    load: (directory) -> a saved draft.  target: the class that computes what such drafts read of the target.
    new_draft: (target, files, config) -> (a new draft, figures for its card).
    loss: the loss of a batch, which may be compiled.  make_loss: (draft, target, config, loss) -> a LossFunction.
    make_rows: see DraftRun.
    accept_lengths: (draft, target, tokens [T], first_root, *tree) -> lengths at roots n, first_root <= n < T - steps.
    trees: (draft) -> the trees to measure, by name.  depth: (draft, tree) -> tokens of the tree's longest path.
    save: (draft, target, the target's directory, out).
    config: (draft, common settings) -> the settings with which online learning trains the draft further.
    print_details: prints the other results of `evaluate`.  dtype: a draft's dtype in `evaluate`; None: the target's."""

    load: Callable[[Path], Any]
    target: type[FrozenTarget]
    new_draft: Callable[[Any, RunFiles, Any], tuple[Any, dict[str, float]]]
    loss: Callable[..., tuple[Tensor, Tensor]]
    make_loss: Callable[..., LossFunction]
    accept_lengths: Callable[..., Tensor]
    trees: Callable[[Any], Mapping[str, Tree]]
    save: Callable[[Any, Any, Path, Path], None]
    config: Callable[[Any, dict[str, Any]], TrainConfig]
    make_rows: Callable[[FrozenTarget, Tensor], tuple[Tensor, Tensor, Tensor]] = training_rows
    depth: Callable[[Any, Tree], int] = lambda draft, tree: tree[0]
    print_details: Callable[[Any, Any, list[np.ndarray], list[int]], None] = lambda *_: None
    dtype: torch.dtype | None = None


EAGLE3 = DraftKind(
    load=load_draft,
    target=Eagle3Target,
    new_draft=eagle3.new_draft_with_vocabulary,
    loss=training_loss,
    make_loss=eagle3.make_loss,
    accept_lengths=eagle3_measure.accept_lengths,
    trees=lambda _: eagle3_measure.MEASURED_TREES,
    save=lambda draft, target, target_dir, out: save_draft(draft, out),
    config=lambda draft, common: Eagle3Config(**common),
    dtype=torch.float32,
)
# MTP heads are measured with chains, because the trainer does not support trees for MTP heads.
MTP = DraftKind(
    load=load_mtp,
    target=FrozenTarget,
    new_draft=lambda target, files, config: (mtp.new_head(target, config), {}),
    loss=mtp_loss,
    make_loss=mtp.make_loss,
    accept_lengths=mtp.accept_lengths,
    trees=lambda head: {f"chain of {n}": (n, 1, n + 1) for n in (mtp.num_layers(head), mtp.num_layers(head) + 2)},
    save=lambda head, target, target_dir, out: save_mtp(head, target_dir, out),
    config=lambda head, common: MtpConfig(
        layers=mtp.num_layers(head), form=head.form, ttt_steps=max(3, mtp.num_layers(head)), **common
    ),
    print_details=mtp.print_agreement,
)
BLOCK = DraftKind(
    load=block.load_block,
    target=Eagle3Target,
    new_draft=lambda target, files, config: (block.new_head(target, config), {}),
    loss=block_loss,
    make_loss=block.make_loss,
    accept_lengths=lambda head, target, tokens, first, steps, *tree: block.accept_lengths(
        head, target, tokens, first, *tree
    ),
    trees=block.trees_to_measure,
    save=block.save_block,
    config=lambda head, common: BlockConfig(
        block_size=(size := head.shape.block_size), anchors=min(64, common["length"] - size + 1), **common
    ),
    make_rows=block.token_rows,
    depth=lambda head, tree: head.shape.block_size,
)
DRAFT_KINDS = MappingProxyType({"eagle3": EAGLE3, "mtp": MTP, "block": BLOCK})


def train(
    name: str, target_dir: Path, data: UserText, out: Path, work_dir: Path, config: TrainConfig
) -> dict[str, float]:
    """Trains a draft, saves it to `out`, and returns the run's figures.  name: the kind of the draft."""
    kind = DRAFT_KINDS[name]
    files = prepare_run(name, target_dir, data, out, work_dir, config, kind.target.min_layers)
    target = kind.target(target_dir, training_device())
    draft, figures = kind.new_draft(target, files, config)
    trees = kind.trees(draft)

    def measure_trees(texts: list[np.ndarray], output_starts: list[int]) -> dict[str, AcceptReport]:
        """Returns a report for each tree, by name.  output_starts: the index where each continuation begins."""
        return {name: measure(kind, draft, target, texts, output_starts, tree) for name, tree in trees.items()}

    loss = torch.compile(kind.loss) if target.device.type == "cuda" else kind.loss
    loss_of, depth = kind.make_loss(draft, target, config, loss), max(kind.depth(draft, t) for t in trees.values())
    functions = loss_of, lambda: kind.save(draft, target, target_dir, out), measure_trees
    return train_draft(DraftRun(draft, target, *functions, files, config, kind.make_rows, depth), **figures)


def measure(
    kind: DraftKind, draft: Any, target: FrozenTarget, texts: list[np.ndarray], output_starts: list[int], tree: Tree
) -> AcceptReport:
    """Measures a draft.  texts: prompts with greedy continuations of the target, longer than the tree is deep.
    output_starts: the index where each continuation begins."""
    tokens = (torch.from_numpy(text.astype(np.int64)).to(target.device) for text in texts)
    lengths = [kind.accept_lengths(draft, target, t, f, *tree) for t, f in zip(tokens, output_starts, strict=True)]
    return make_report(lengths, texts, output_starts)


def evaluate(
    name: str, draft_dir: Path, target_dir: Path, prompts: list[list[int]], num_tokens: int
) -> dict[str, AcceptReport]:
    """Measures a draft with the trees of its kind, without the engine.  Prints and returns the accept lengths.
    Raises EspalierError if the draft does not fit the target."""
    read_draft(draft_dir, read_config(target_dir))
    kind = DRAFT_KINDS[name]
    draft = kind.load(draft_dir)
    trees = kind.trees(draft)
    deepest = max(steps for steps, _, _ in trees.values())
    require_measurable(num_tokens, deepest)
    texts, output_starts = continue_prompts(target_dir, prompts, num_tokens, deepest)
    target = kind.target(target_dir, training_device())
    draft = draft.to(target.device, kind.dtype or target.lm_head.dtype).eval()
    reports = {name: measure(kind, draft, target, texts, output_starts, tree) for name, tree in trees.items()}
    print_reports([(name, *trees[name], report) for name, report in reports.items()])
    kind.print_details(draft, target, texts, output_starts)
    return reports
