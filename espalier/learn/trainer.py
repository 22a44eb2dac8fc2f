"""The training process: `python -m espalier.learn.trainer DIR` trains the served draft further once, and ends.

It reads DIR/run.json and the sample, measures both drafts on held-back traffic, and writes the new one with its
manifest.  Its stdin says when it may compute.  When that is closed, the server is gone, and this process ends too.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from espalier.errors import EspalierError, one_line
from espalier.learn.folder import Text, publish, remove, texts_of
from espalier.train import block, evaluate, mtp
from espalier.train.checkpoint import load_draft, save_draft
from espalier.train.draft import training_loss
from espalier.train.draft_run import DraftRun, Loss, run_steps, training_rows
from espalier.train.mtp_checkpoint import load_mtp, save_mtp
from espalier.train.mtp_head import mtp_loss
from espalier.train.settings import BlockConfig, Eagle3Config, MtpConfig
from espalier.train.state import SavedState
from espalier.train.target import Eagle3Target, FrozenTarget, training_device
from espalier.train.windows import Windows, num_windows

GO, WAIT = b"1", b"0"
LENGTH, PASSES = 256, 3
# Tokens of a text on both sides of its output's start, and of all texts, that are measured.
MEASURED_SIDE, MEASURED = 256, 2**13
# Far fewer than a new draft's: the rates of a training from nothing would first undo what the draft has learned.
RATES = MappingProxyType({"matrix_lr": 1e-3, "other_lr": 5e-4})
FAILED = 1
# A tenth of a core where requests take all of them.
NICE = 10


@dataclass(frozen=True)
class Kind:
    """How a kind of draft is trained further.  The module is the trainer's.

    config: (module, settings of every run) -> config; loss: (module, target, config) -> the loss of a batch;
    lengths: (module, target, tokens [T], first, (steps, topk, num_draft_tokens)) -> accept lengths [roots];
    save: (module, target, the target's directory, out); depth: (module, tree) -> tokens behind a root that are needed.
    """

    load: Callable[[Path], Any]
    target: Callable[[Path, torch.device], FrozenTarget]
    config: Callable[[Any, dict[str, Any]], Any]
    loss: Callable[[Any, Any, Any], Loss]
    lengths: Callable[[Any, Any, Tensor, int, Sequence[int]], Tensor]
    save: Callable[[Any, Any, Path, Path], None]
    rows_of: Callable[[FrozenTarget, Tensor], tuple[Tensor, Tensor, Tensor]] = training_rows
    depth: Callable[[Any, Sequence[int]], int] = lambda draft, tree: tree[0]


EAGLE3 = Kind(
    load=load_draft,
    target=Eagle3Target,
    config=lambda draft, common: Eagle3Config(**common),
    loss=lambda draft, target, c: lambda e, f, logits: training_loss(draft, e, f, logits, c.ttt_steps, c.decay),
    lengths=lambda draft, target, tokens, first, tree: evaluate.accept_lengths(draft, target, tokens, first, *tree),
    save=lambda draft, target, target_dir, out: save_draft(draft, out),
)
# Measured as a chain: the trainer grows no trees of these.
MTP = Kind(
    load=load_mtp,
    target=FrozenTarget,
    config=lambda head, common: MtpConfig(
        layers=(layers := head.shape.num_hidden_layers), form=head.form, ttt_steps=max(3, layers), **common
    ),
    loss=lambda head, target, c: lambda e, h, logits: mtp_loss(head, target.head, e, h, logits, c.ttt_steps, c.decay),
    lengths=lambda head, target, tokens, first, tree: (
        1 + mtp.matches(head, target, tokens, first, tree[0]).cumprod(0).sum(0)
    ),
    save=lambda head, target, target_dir, out: save_mtp(head, target_dir, out),
)
BLOCK = Kind(
    load=block.load_block,
    target=Eagle3Target,
    config=lambda head, common: BlockConfig(
        block_size=head.shape.block_size, anchors=min(64, common["length"] - head.shape.block_size + 1), **common
    ),
    loss=block.loss_at_anchors,
    lengths=lambda head, target, tokens, first, tree: block.accept_lengths(head, target, tokens, first, *tree[1:]),
    save=block.save_block,
    rows_of=block.token_rows,
    depth=lambda head, tree: head.shape.block_size,
)
CONTINUED = MappingProxyType({"eagle3": EAGLE3, "mtp": MTP, "block": BLOCK})


class Turn:
    """What the server says on stdin: GO or WAIT; its end ends this process, also in the middle of a step."""

    def __init__(self, stdin: Any) -> None:
        self._may = threading.Event()
        threading.Thread(target=self._listen, args=(stdin,), daemon=True).start()

    def _listen(self, stdin: Any) -> None:
        while said := os.read(stdin.fileno(), 1):
            self._may.set() if said == GO else self._may.clear()
        os._exit(FAILED)

    def wait(self) -> None:
        self._may.wait()


def measured_texts(texts: Iterator[Text]) -> list[Text]:
    """What is measured of the newest texts: the start of each output, behind the end of its prompt."""
    found, left = [], MEASURED
    for text in texts:
        begin = max(0, text.first - MEASURED_SIDE)
        tokens = text.tokens[begin : text.first + MEASURED_SIDE]
        found.append(Text(tokens, text.first - begin))
        left -= len(tokens) - found[-1].first
        if left <= 0:
            break
    return found


@torch.no_grad()
def accept_length(kind: Kind, draft: Any, target: FrozenTarget, texts: Sequence[Text], tree: Any, turn: Turn) -> float:
    """The mean over every position of the outputs.  Raises EspalierError if the texts have none."""
    total = count = 0
    for text in texts:
        turn.wait()
        if len(text.tokens) > text.first + kind.depth(draft, tree):
            tokens = torch.from_numpy(text.tokens.astype(np.int64)).to(target.device)
            lengths = kind.lengths(draft, target, tokens, text.first, tree)
            total, count = total + int(lengths.sum()), count + lengths.numel()
    if not count:
        raise EspalierError("the held-back traffic has no outputs long enough to measure a draft")
    return total / count


def settings_of(num_tokens: int, device: torch.device, max_seconds: int, seed: int) -> dict[str, Any]:
    """The settings of a run over a sample of so many tokens.  Raises EspalierError for too few."""
    batch = min(32 if device.type == "cuda" else 4, num_windows(num_tokens, LENGTH))
    if not batch:
        raise EspalierError(f"the sample has {num_tokens} tokens; {3 * LENGTH} are needed")
    tokens = max(PASSES * num_tokens, batch * LENGTH)
    common = {"length": LENGTH, "batch": batch, "num_tokens": tokens, "own_share": 1.0, "save_every": 10**9}
    return {**common, **RATES, "max_seconds": max_seconds, "seed": seed}


def train_once(folder: Path, turn: Turn) -> Path:
    """Train the draft that run.json names further.  Returns the new one's directory, with its manifest.

    Raises EspalierError or OSError; then nothing has the new draft's name.
    """
    begun, run = time.monotonic(), json.loads((folder / "run.json").read_text())
    kind, target_dir, tree, out = CONTINUED[run["kind"]], Path(run["target"]), tuple(run["tree"]), Path(run["out"])
    sample, device, unfinished = folder / "sample", training_device(), folder / "drafts" / "unfinished"
    held_back = measured_texts(texts_of(sorted(sample.glob("held-back.*.npy"))))
    stream = np.concatenate([t.tokens for t in texts_of(sorted(sample.glob("train.*.npy")))] or [np.zeros(0, np.int32)])
    common = settings_of(len(stream), device, run["seconds"], int(out.name))
    target, draft = kind.target(target_dir, device), kind.load(Path(run["draft"])).to(device)
    config = kind.config(draft, common)
    before = accept_length(kind, draft.to(dtype=target.head.dtype), target, held_back, tree, turn)
    print(f"before: {before:.3f} on {len(held_back)} held-back texts", flush=True)
    remove(unfinished)

    def rows_of(target: FrozenTarget, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        turn.wait()
        return kind.rows_of(target, tokens)

    windows = Windows(stream, LENGTH, device, config.seed)
    state, draft = SavedState(unfinished / "state.pt", {}), draft.float()
    save = lambda: kind.save(draft, target, target_dir, unfinished)  # noqa: E731
    run_steps(DraftRun(draft, target, kind.loss(draft, target, config), save, state, config, rows_of), windows, windows)
    # As it was written, in bfloat16.
    learned = kind.load(unfinished).to(device, target.head.dtype)
    after = accept_length(kind, learned, target, held_back, tree, turn)
    print(f"after: {after:.3f}", flush=True)
    publish(unfinished, out, before, after, len(stream), time.monotonic() - begun)
    return out


def main(folder: Path) -> int:
    os.nice(NICE)
    disable_progress_bar()  # its lines would hide the last one, which says why a training failed
    if training_device().type == "cpu":
        torch.set_num_threads(1)
    try:
        train_once(folder, Turn(sys.stdin.buffer))
    except (OSError, ValueError, RuntimeError) as error:
        print(one_line(error), flush=True)
        return FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
