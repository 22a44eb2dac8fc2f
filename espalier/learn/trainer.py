"""The training process: `python -m espalier.learn.trainer DIR` trains the served draft further once, and ends.

It reads DIR/run.json and the sample, measures both drafts on held-back traffic, and writes the new draft with its
manifest.  The server says on stdin when this process may compute.  When stdin is closed, the server has ended, and this
process ends too.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from espalier.errors import EspalierError, one_line
from espalier.learn.folder import publish, remove, texts_of
from espalier.train import block, eagle3, mtp
from espalier.train.checkpoint import load_draft, save_draft
from espalier.train.data import Data
from espalier.train.draft_run import DraftRun, Loss, RunFiles, print_measure, run_steps, training_rows
from espalier.train.evaluate import AcceptReport, measure
from espalier.train.mtp_checkpoint import load_mtp, save_mtp
from espalier.train.own_text import OwnText
from espalier.train.settings import BlockConfig, Eagle3Config, MtpConfig, TrainConfig
from espalier.train.state import SavedState
from espalier.train.target import Eagle3Target, FrozenTarget, training_device
from espalier.train.windows import Texts

GO, WAIT = b"1", b"0"
# Tokens of a row, by the device's type; how often the sample is read; and the steps of one reading, if it has enough
# rows: a few large batches teach nothing.
LENGTHS, PASSES, STEPS = MappingProxyType({"cpu": 256, "cuda": 1024}), 3, 50
# How many texts are measured, and how many tokens of each before and after the beginning of the output.
MEASURED_SIDE, MOST_MEASURED = 256, 64
# A training reads the newest texts with older ones, REPLAYED times as many in all, so that older topics stay.
REPLAYED = 2
# Far lower than the rates of a new draft, which would first undo what the draft has learned.
RATES = MappingProxyType({"matrix_lr": 1e-3, "other_lr": 5e-4})
FAILED = 1
# The process's niceness: it gets a tenth of a core while requests use all cores.
NICE = 10
Tree = tuple[int, int, int]


@dataclass(frozen=True)
class Kind:
    """How a kind of draft is trained further.  "module" is the trainer's module of the draft.

    config: (module, settings of every run) -> config; loss: (module, target, config) -> the loss of a batch;
    measure: (module, target, texts, firsts, (steps, topk, num_draft_tokens)) -> accept lengths;
    save: (module, target, the target's directory, out); depth: (module, tree) -> tokens of its longest path.
    """

    load: Callable[[Path], Any]
    target: Callable[[Path, torch.device], FrozenTarget]
    config: Callable[[Any, dict[str, Any]], TrainConfig]
    loss: Callable[[Any, Any, Any], Loss]
    measure: Callable[[Any, Any, list[np.ndarray], list[int], Tree], AcceptReport]
    save: Callable[[Any, Any, Path, Path], None]
    rows_of: Callable[[FrozenTarget, Tensor], tuple[Tensor, Tensor, Tensor]] = training_rows
    depth: Callable[[Any, Tree], int] = lambda draft, tree: tree[0]


EAGLE3 = Kind(
    load=load_draft,
    target=Eagle3Target,
    config=lambda draft, common: Eagle3Config(**common),
    loss=eagle3.loss_of_batch,
    measure=lambda draft, target, texts, firsts, tree: measure(draft, target, texts, firsts, *tree),
    save=lambda draft, target, target_dir, out: save_draft(draft, out),
)
# MTP heads are measured as chains, because the trainer grows no trees for them.
MTP = Kind(
    load=load_mtp,
    target=FrozenTarget,
    config=lambda head, common: MtpConfig(
        layers=(layers := head.shape.num_hidden_layers), form=head.form, ttt_steps=max(3, layers), **common
    ),
    loss=mtp.loss_of_batch,
    measure=lambda head, target, texts, firsts, tree: mtp.measure_mtp(head, target, texts, firsts, tree[0])[0],
    save=lambda head, target, target_dir, out: save_mtp(head, target_dir, out),
)
BLOCK = Kind(
    load=block.load_block,
    target=Eagle3Target,
    config=lambda head, common: BlockConfig(
        block_size=(size := head.shape.block_size), anchors=min(64, common["length"] - size + 1), **common
    ),
    loss=block.loss_of_batch,
    measure=lambda head, target, texts, firsts, tree: block.measure_block(
        head, target, texts, firsts, {"tree": tree[1:]}
    )["tree"],
    save=block.save_block,
    rows_of=block.token_rows,
    depth=lambda head, tree: head.shape.block_size,
)
CONTINUED = MappingProxyType({"eagle3": EAGLE3, "mtp": MTP, "block": BLOCK})


class Turn:
    """Listens to the server on stdin, for GO or WAIT.  The end of stdin ends this process, even during a step."""

    def __init__(self, stdin: Any) -> None:
        self._may = threading.Event()
        threading.Thread(target=self._listen, args=(stdin,), daemon=True).start()

    def _listen(self, stdin: Any) -> None:
        while said := os.read(stdin.fileno(), 1):
            self._may.set() if said == GO else self._may.clear()
        os._exit(FAILED)

    def wait(self) -> None:
        self._may.wait()


def texts_in(folder: Path, kind: str, num_texts: int, before: int, behind: int | None = None) -> Texts:
    """The newest texts of the sample, each cut to `before` and `behind` tokens around the beginning of its output."""
    tokens, firsts = [], []
    for text in islice(texts_of(sorted(folder.glob(f"{kind}.*.npy"))), num_texts):
        begin = max(0, text.first - before)
        tokens.append(text.tokens[begin : None if behind is None else text.first + behind])
        firsts.append(text.first - begin)
    return Texts.of(tokens, firsts)


def settings_of(num_tokens: int, length: int, device: torch.device, max_seconds: int, seed: int) -> dict[str, Any]:
    """The settings of a run over a sample of num_tokens tokens.  Raises EspalierError if these are too few."""
    # A row uses up fewer tokens than two rows hold: the rest of its last text is left out.
    batch = min(32 if device.type == "cuda" else 4, max(1, num_tokens // (STEPS * length)))
    if num_tokens < 2 * length + 2:
        raise EspalierError(f"the sample has {num_tokens} tokens to train on; {2 * length + 2} are needed")
    common = {"length": length, "batch": batch, "num_tokens": max(PASSES * num_tokens, batch * length)}
    return {**common, **RATES, "save_every": 10**9, "max_seconds": max_seconds, "seed": seed}


def train_once(folder: Path, turn: Turn) -> Path:
    """Train a draft further: the served or the given draft, whichever accepts more of the newest held-back traffic.

    run.json names both drafts.  Returns the new draft's directory, with its manifest.  If it raises EspalierError or
    OSError, no directory has the new draft's name.
    """
    begun, run = time.monotonic(), json.loads((folder / "run.json").read_text())
    kind, out, unfinished = CONTINUED[run["kind"]], Path(run["out"]), folder / "drafts" / "unfinished"
    remove(unfinished)
    served = run_of(kind, folder / "sample", run, unfinished, int(out.name))
    served.target.model.get_decoder().register_forward_pre_hook(lambda *_: turn.wait())
    before = given = accept_length(served)
    training = served
    if run["given"] != run["draft"]:
        of_given = of_draft(kind, Path(run["given"]), served.target, served.files, run, int(out.name))
        given = accept_length(of_given)
        training = of_given if given > before else served
    after, num_tokens = run_steps(training)[2]["tree"].every_root, len(training.files.own.texts.tokens)
    publish(unfinished, out, (given, before, after), num_tokens, time.monotonic() - begun)
    return out


def accept_length(run: DraftRun) -> float:
    """The accept length of a run's draft on the held-back traffic.  Raises EspalierError if no text is long enough."""
    if not (found := print_measure(run)):
        raise EspalierError("the held-back traffic has no outputs long enough to measure a draft")
    return found["tree"].every_root


def run_of(kind: Kind, sample: Path, run: dict[str, Any], out: Path, seed: int) -> DraftRun:
    """A run that trains the served draft on the newest texts and as many before these, prompts and outputs."""
    target_dir, device = Path(run["target"]), training_device()
    target = kind.target(target_dir, device)
    side = length_of(target) // 2
    texts = texts_in(sample, "train", REPLAYED * run["texts"]["train"], side)
    num_measured = min(run["texts"]["held-back"], MOST_MEASURED)
    held_out = texts_in(sample, "held-back", num_measured, MEASURED_SIDE, MEASURED_SIDE)
    own, nothing = OwnText(texts, np.zeros(0, np.int64), held_out), Data(np.zeros(0, np.int32))
    files = RunFiles(run["kind"], target_dir, out, nothing, own, SavedState(out / "state.pt", {}))
    return of_draft(kind, Path(run["draft"]), target, files, run, seed)


def length_of(target: FrozenTarget) -> int:
    """The tokens of a row of this target's batches."""
    return min(LENGTHS[target.device.type], int(target.config["max_position_embeddings"]))


def of_draft(
    kind: Kind, directory: Path, target: FrozenTarget, files: RunFiles, run: dict[str, Any], seed: int
) -> DraftRun:
    draft, tree = kind.load(directory).to(target.device), tuple(run["tree"])
    num_tokens = len(files.own.texts.tokens)
    config = kind.config(draft, settings_of(num_tokens, length_of(target), target.device, run["seconds"], seed))

    def measured(texts: list[np.ndarray], firsts: list[int]) -> dict[str, AcceptReport]:
        written = deepcopy(draft).bfloat16().to(target.head.dtype)
        return {"tree": kind.measure(written, target, texts, firsts, tree)}

    save = partial(kind.save, draft, target, files.target, files.out)
    parts = draft, target, kind.loss(draft, target, config), save, measured
    return DraftRun(*parts, files, config, kind.rows_of, kind.depth(draft, tree))


def main(folder: Path) -> int:
    os.nice(NICE)
    disable_progress_bar()  # its lines would hide the last line of the log, which says why a training failed
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
