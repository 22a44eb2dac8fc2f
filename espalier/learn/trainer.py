"""The training process: `python -m espalier.learn.trainer DIR` trains the served draft further once, and ends.

The process reads DIR/run.json and the sample, measures the drafts on held-back texts, and writes the new draft with its
manifest.  The server signals on stdin when this process may compute.  When stdin is closed, the server has ended,
and this process ends too.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from copy import deepcopy
from functools import partial
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from transformers.utils.logging import disable_progress_bar

from espalier.errors import EspalierError, one_line
from espalier.learn.folder import publish_draft, read_texts, remove_draft, sample_files
from espalier.train.data import UserText
from espalier.train.draft_run import DraftRun, RunFiles, print_measure, run_steps
from espalier.train.evaluate import AcceptReport
from espalier.train.kinds import DRAFT_KINDS, DraftKind, measure
from espalier.train.own_text import OwnText
from espalier.train.state import SavedState
from espalier.train.target import FrozenTarget, training_device
from espalier.train.windows import TextList

GO_SIGNAL, WAIT_SIGNAL = b"1", b"0"
# The tokens of a row of a batch, by device type.
ROW_LENGTHS = MappingProxyType({"cpu": 256, "cuda": 1024})
# A training reads the sample SAMPLE_PASSES times.  Each time it makes STEPS_PER_PASS optimizer steps, if the sample has
# enough rows.  With fewer steps, on larger batches, the draft learns nothing.
SAMPLE_PASSES, STEPS_PER_PASS = 3, 50
# Drafts are measured on at most MAX_MEASURED_TEXTS texts, with at most MEASURED_SIDE_TOKENS tokens
# before the output, and at most as many of the output.
MEASURED_SIDE_TOKENS, MAX_MEASURED_TEXTS = 256, 64
# A training reads REPLAY_FACTOR times as many texts as are new, so that the draft keeps what it learned from old texts.
REPLAY_FACTOR = 2
# These rates are far lower than for a new draft.  Higher rates would first undo what the draft has learned.
LEARNING_RATES = MappingProxyType({"matrix_lr": 1e-3, "other_lr": 5e-4})
FAILED_EXIT_CODE = 1
# The niceness of the process: while requests use all cores, the process gets a tenth of one core.
NICENESS = 10


class TrainSignal:
    """Reads GO_SIGNAL and WAIT_SIGNAL of the server from stdin.  The end of stdin ends this process at once."""

    def __init__(self, stdin: Any) -> None:
        self._may_train = threading.Event()
        threading.Thread(target=self._listen, args=(stdin,), daemon=True).start()

    def _listen(self, stdin: Any) -> None:
        while signal := os.read(stdin.fileno(), 1):
            self._may_train.set() if signal == GO_SIGNAL else self._may_train.clear()
        os._exit(FAILED_EXIT_CODE)

    def wait_until_allowed(self) -> None:
        self._may_train.wait()


def newest_texts(
    sample_dir: Path, kind: str, num_texts: int, tokens_before: int, tokens_after: int | None = None
) -> TextList:
    """Returns the newest `num_texts` texts of the files whose names begin with `kind` (folder.py).

    tokens_before: the maximum number of tokens of a text before its output.  tokens_after: the maximum number of tokens
    of the output; None for all."""
    cut_texts, output_starts = [], []
    for text in islice(read_texts(sample_files(sample_dir, kind)), num_texts):
        begin = max(0, text.output_start - tokens_before)
        cut_texts.append(text.tokens[begin : None if tokens_after is None else text.output_start + tokens_after])
        output_starts.append(text.output_start - begin)
    return TextList.of(cut_texts, output_starts)


def run_settings(num_tokens: int, length: int, device: torch.device, max_seconds: int, seed: int) -> dict[str, Any]:
    """Returns the settings of a run on num_tokens tokens, in rows of `length`.  Raises EspalierError for too few."""
    batch = min(32 if device.type == "cuda" else 4, max(1, num_tokens // (STEPS_PER_PASS * length)))
    # After each row, TextRows may leave out almost a row of tokens.  So one row may need the tokens of two rows.
    if num_tokens < 2 * length + 2:
        raise EspalierError(f"the sample has {num_tokens} tokens to train on; {2 * length + 2} are needed")
    sizes = {"length": length, "batch": batch, "num_tokens": max(SAMPLE_PASSES * num_tokens, batch * length)}
    return {**sizes, **LEARNING_RATES, "save_every": 10**9, "max_seconds": max_seconds, "seed": seed}


def train_once(folder: Path, train_signal: TrainSignal) -> Path:
    """Trains a draft further: the served draft, or the one given at startup if it accepts more on the newest held-back
    texts.  run.json has the paths of both drafts.  Returns the directory of the new draft and its manifest.  If it
    raises EspalierError or OSError, this directory does not exist."""
    started_at, config = time.monotonic(), json.loads((folder / "run.json").read_text())
    kind, out, unfinished = DRAFT_KINDS[config["kind"]], Path(config["out"]), folder / "drafts" / "unfinished"
    remove_draft(unfinished)
    served_run = make_run(kind, folder / "sample", config, unfinished, int(out.name))
    served_run.target.model.get_decoder().register_forward_pre_hook(lambda *_: train_signal.wait_until_allowed())
    before = given = accept_length(served_run)
    target, training_run = served_run.target, served_run
    if config["given"] != config["draft"]:
        given_run = make_draft_run(kind, Path(config["given"]), target, served_run.files, config, int(out.name))
        given = accept_length(given_run)
        training_run = given_run if given > before else served_run
    after, num_tokens = run_steps(training_run)[2]["tree"].every_root, len(training_run.files.own_text.texts.tokens)
    publish_draft(unfinished, out, (given, before, after), num_tokens, time.monotonic() - started_at)
    return out


def accept_length(draft_run: DraftRun) -> float:
    """Returns the accept length of a run's draft on held-back texts.  Raises EspalierError if all are too short."""
    if not (found := print_measure(draft_run)):
        raise EspalierError("the held-back traffic has no outputs long enough to measure a draft")
    return found["tree"].every_root


def make_run(kind: DraftKind, sample_dir: Path, run_config: dict[str, Any], out_directory: Path, seed: int) -> DraftRun:
    """Returns a run that trains the served draft on new and older texts (REPLAY_FACTOR).  run_config: from run.json."""
    target_dir, device = Path(run_config["target"]), training_device()
    target = kind.target(target_dir, device)
    prompt_tokens = row_length(target) // 2
    texts = newest_texts(sample_dir, "train", REPLAY_FACTOR * run_config["texts"]["train"], prompt_tokens)
    num_measured = min(run_config["texts"]["held-back"], MAX_MEASURED_TEXTS)
    held_out = newest_texts(sample_dir, "held-back", num_measured, MEASURED_SIDE_TOKENS, MEASURED_SIDE_TOKENS)
    own_text, user_text = OwnText(texts, np.zeros(0, np.int64), held_out), UserText(np.zeros(0, np.int32))
    state = SavedState(out_directory / "state.pt", {})
    files = RunFiles(run_config["kind"], target_dir, out_directory, user_text, own_text, state)
    return make_draft_run(kind, Path(run_config["draft"]), target, files, run_config, seed)


def row_length(target: FrozenTarget) -> int:
    """Returns the number of tokens of a row of this target's batches."""
    return min(ROW_LENGTHS[target.device.type], int(target.config["max_position_embeddings"]))


def make_draft_run(
    kind: DraftKind, draft_dir: Path, target: FrozenTarget, files: RunFiles, run_config: dict[str, Any], seed: int
) -> DraftRun:
    """Returns a run that trains the draft in draft_dir on files.own_text.  run_config: the contents of run.json."""
    draft, tree = kind.load(draft_dir).to(target.device), tuple(run_config["tree"])
    num_tokens = len(files.own_text.texts.tokens)
    settings = run_settings(num_tokens, row_length(target), target.device, run_config["seconds"], seed)
    config = kind.config(draft, settings)

    def measure_tree(texts: list[np.ndarray], output_starts: list[int]) -> dict[str, AcceptReport]:
        """Measures the draft with weights rounded as in the saved file.  output_starts: where each output begins."""
        saved_draft = deepcopy(draft).bfloat16().to(target.lm_head.dtype)
        return {"tree": measure(kind, saved_draft, target, texts, output_starts, tree)}

    save = partial(kind.save, draft, target, files.target, files.out)
    loss_function, depth = kind.make_loss(draft, target, config, kind.loss), kind.depth(draft, tree)
    return DraftRun(draft, target, loss_function, save, measure_tree, files, config, kind.make_rows, depth)


def main(folder: Path) -> int:
    """Trains a draft once in the folder of --learn.  Returns the exit code."""
    os.nice(NICENESS)
    disable_progress_bar()  # its lines would hide the last line of the log, which says why a training failed
    if training_device().type == "cpu":
        torch.set_num_threads(1)
    try:
        train_once(folder, TrainSignal(sys.stdin.buffer))
    except (OSError, ValueError, RuntimeError) as error:
        print(one_line(error), flush=True)
        return FAILED_EXIT_CODE
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
