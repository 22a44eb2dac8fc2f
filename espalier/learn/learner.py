"""Online learning in the engine's process: keeps texts, runs the trainer's process, and swaps drafts in.

All work that may wait for a disk or a process runs in a thread.  The engine's own thread calls `keep_text`
and `swap_between_steps`.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from espalier.child_process import environment
from espalier.engine.engine import Engine
from espalier.errors import EspalierError, one_line
from espalier.learn.folder import KeptTexts, LearnConfig, LearnFolder, Manifest, read_manifest, remove_draft
from espalier.learn.swap import Swap
from espalier.learn.trainer import GO_SIGNAL, WAIT_SIGNAL
from espalier.llm import LLM, PreparedEngine
from espalier.models.draft import DraftModel
from espalier.request import Request
from espalier.speculate.drafters.registry import load_draft
from espalier.stats import LearnStats
from espalier.train.configs import MIN_CAPTURED_LAYERS, captured_layers, read_draft_kind, read_target
from espalier.train.kinds import DRAFT_KINDS
from espalier.train.work import target_digest

log = logging.getLogger("espalier")
POLL_S = 0.5
# The pause after a failed training, in seconds.  The pause doubles with each failure, up to LONGEST_PAUSE_S.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 10.0, 600.0
# Texts are queued for at most this number of seconds before they are written.  A kill loses the queue.
FLUSH_INTERVAL_S = 10.0
# A draft is swapped in if it accepts MIN_GAIN more tokens a round.  A smaller gain may be chance.
MIN_GAIN = 0.02
# A training starts only after this number of new held-back output tokens, because drafts are compared on them.
MIN_HELD_BACK_TOKENS = 512
TRAINER_COMMAND = (sys.executable, "-m", "espalier.learn.trainer")


@dataclass(frozen=True)
class TrainerMachine:
    """The device on which the trainer runs.

    description: the device in words, for the log.  environment: the variables with which the trainer finds the device.
    idle_only: the trainer computes only while the engine has no work, because both share a GPU."""

    description: str
    environment: Mapping[str, str]
    idle_only: bool = False


def require_learnable(prepared: PreparedEngine) -> str:
    """Returns the kind of the draft.  Called before weights are loaded.

    Raises EspalierError, with the reason why the draft cannot be trained further or swapped in."""
    found, config = prepared.checkpoint, prepared.resolved
    if found.draft_path is None:
        raise EspalierError(f"--learn trains a draft model further, and {config.algorithm} has none; give --draft")
    if config.tensor_parallel > 1:
        raise EspalierError("--learn is for one rank: leave out --tensor-parallel, or --learn")
    if config.model_overrides:
        raise EspalierError("--learn trains beside the model as its files are; leave out --model-overrides, or --learn")
    if found.draft_path == found.target_path:
        raise EspalierError(
            f"--learn cannot swap MTP layers that are part of the target's files ({found.target_path}); give --draft"
        )
    kind = read_draft_kind(found.draft_path)
    if kind is None:
        raise EspalierError(
            f"--learn cannot train {found.draft_path} further: it is no draft of `espalier train` "
            f"({', '.join(DRAFT_KINDS)})"
        )
    target = read_target(found.target_path, MIN_CAPTURED_LAYERS if found.spec.target_output == "captured" else 1)
    if found.spec.target_output == "captured" and found.spec.captured_layers != (layers := captured_layers(target)):
        raise EspalierError(
            f"--learn cannot train {found.draft_path} further: it reads the target's layers "
            f"{found.spec.captured_layers}, and the trainer's drafts read {layers}"
        )
    _require_trainer_form(kind, found.draft_path)
    return kind


def _require_trainer_form(kind: str, draft: Path) -> None:
    """Raises EspalierError if the trainer's module cannot load the draft: names or shapes of weights differ."""
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            DRAFT_KINDS[kind].load(draft)
    except (RuntimeError, KeyError, TypeError, OSError) as error:
        raise EspalierError(f"--learn cannot train {draft} further ({one_line(error)})") from None


def trainer_machine(device: torch.device, num_pages: int | str | None) -> TrainerMachine:
    """Returns another GPU if there is one, else the engine's device.  num_pages: the setting of the engine.
    Raises EspalierError if the engine has the only GPU and num_pages is not set: the pages then take all its memory."""
    if device.type == "cpu":
        return TrainerMachine("the CPU, with one thread", {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"})
    gpu, count = device.index or 0, torch.cuda.device_count()
    ids = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
    if count > 1:
        other_gpu = next(i for i in range(count) if i != gpu)
        return TrainerMachine(f"cuda:{other_gpu}", {"CUDA_VISIBLE_DEVICES": ids[other_gpu]})
    if not isinstance(num_pages, int):
        raise EspalierError(
            "--learn beside the engine's only GPU needs memory for the trainer, and by default the pages take all; "
            "give --num-pages, or make a second GPU visible"
        )
    return TrainerMachine("the engine's GPU, while no request runs", {"CUDA_VISIBLE_DEVICES": ids[gpu]}, idle_only=True)


@dataclass(frozen=True)
class SampleCounts:
    """The counts of KeptTexts at one time: the texts of each kind, and the output tokens of held-back texts."""

    texts_per_kind: Mapping[str, int]
    num_held_back_tokens: int

    @classmethod
    def of(cls, kept_texts: KeptTexts) -> SampleCounts:
        return cls(dict(kept_texts.texts_per_kind), kept_texts.num_held_back_tokens)


@dataclass(frozen=True)
class Candidate:
    """A learned draft that is to be swapped in."""

    directory: Path
    manifest: Manifest
    swap: Swap


class Learner:
    """Keeps the texts that one engine serves, and trains its draft on them.

    A Learner is made before the weights are loaded, and attached to the engine afterwards.
    figures: the Learner's metrics.  trainer: the command of the training process, to which the folder is appended.
    given_draft: the draft given at startup.  draft_dir: the draft that is served."""

    def __init__(self, config: LearnConfig, prepared: PreparedEngine, trainer: Sequence[str] = TRAINER_COMMAND) -> None:
        """If this raises EspalierError, the folder of --learn is unchanged."""
        self.config, self.trainer, self.resolved = config, trainer, prepared.resolved
        self.kind, found = require_learnable(prepared), prepared.checkpoint
        assert found.draft_path is not None
        self.machine = trainer_machine(torch.device(prepared.resolved.device), prepared.config.num_pages)
        self.target_dir, self.draft_dir, self.given_draft = found.target_path, found.draft_path, found.draft_path
        origin = {"target": target_digest(found.target_path), "draft": target_digest(found.draft_path)}
        self.folder = LearnFolder(Path(config.folder).expanduser(), origin)
        num_trained = self.folder.num_trained()
        self.kept_texts = KeptTexts(self.folder.path / "sample", config.bytes, num_trained)
        self.figures = LearnStats()
        self._tokens_when_trained = self._num_failed = 0
        self._judged_counts = self._start_counts = SampleCounts(num_trained, 0)
        self._next_start_at = self._next_flush_at = 0.0
        self._has_flush_failed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._last_signal = b""
        self._is_busy = False
        # The learner's thread sets _candidate and takes _swapped_draft; the engine's thread does the reverse.
        self._candidate: Candidate | None = None
        self._swapped_draft: Candidate | None = None
        self._close_event = threading.Event()
        self._thread = threading.Thread(target=self._run_thread, name="learner", daemon=True)

    def attach(self, llm: LLM) -> None:
        """Serve the draft that was learned last, and start the thread.

        Raises EspalierError if the configured draft cannot be swapped."""
        runner = llm.engine.executor.runner
        self._target = runner.target
        # A PathMergingDrafter contains the drafter that has the model.
        drafter: Any = getattr(runner.drafter, "drafter", runner.drafter)
        self._served: DraftModel = drafter.draft
        Swap(self._served, self._load_draft(self.draft_dir))
        try:
            if (learned := self.folder.served_draft()) is not None:
                Swap(self._served, self._load_draft(learned)).copy_weights()
                self.draft_dir = learned
        except EspalierError as error:
            log.warning("learning: %s; the draft that was given is served", error)
        log.info(
            "learning is on: token ids of served texts are kept under %s, at most %d bytes, and the draft %s is "
            "trained further on %s",
            *(self.folder.path, self.config.bytes, self.draft_dir, self.machine.description),
        )
        self._thread.start()

    @property
    def training_pid(self) -> int | None:
        process = self._process
        return None if process is None else process.pid

    @property
    def is_swapping(self) -> bool:
        """Whether a draft waits to be swapped in, or a swapped draft waits to be recorded as the one to serve."""
        return self._candidate is not None or self._swapped_draft is not None

    def close(self) -> None:
        """End the training process and the thread, and write the queued texts.  Idempotent."""
        self._close_event.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._end_process()
        try:
            self.kept_texts.flush()
        except (OSError, EspalierError) as error:
            log.warning("learning: %s; the texts that were not written yet are lost", one_line(error))
        self.folder.close()

    # Methods for the engine's thread

    def keep_text(self, request: Request) -> None:
        """Keeps the text of a request that was not aborted."""
        if request.finish_reason in ("stop", "length"):
            self.kept_texts.add(request.prompt, request.output)

    def swap_between_steps(self, engine: Engine) -> None:
        """Swaps in the waiting draft, if any.

        Running requests keep the rows that the old draft wrote to the cache.  These rows may change what the new draft
        proposes, but never an output."""
        self._is_busy = engine.has_work
        if self._candidate is not None:
            engine.drain()
            self._candidate.swap.copy_weights()
            self._swapped_draft, self._candidate = self._candidate, None

    # Methods for the learner's thread

    def _run_thread(self) -> None:
        while not self._close_event.wait(POLL_S):
            try:
                self._poll()
            except (OSError, ValueError, RuntimeError) as error:
                self._record_failure(one_line(error))
        with suppress(OSError):
            self._record_swap()

    def _poll(self) -> None:
        self._record_swap()
        self._flush_when_due()
        self.figures.texts, self.figures.bytes = sum(self.kept_texts.texts_per_kind.values()), self.kept_texts.num_bytes
        if self._process is not None:
            self._check_process(self._process)
        elif self._candidate is None and time.monotonic() >= self._next_start_at:
            is_due = self.kept_texts.num_tokens - self._tokens_when_trained >= self.config.tokens
            num_held_back_tokens = self.kept_texts.num_held_back_tokens - self._judged_counts.num_held_back_tokens
            if is_due and num_held_back_tokens >= MIN_HELD_BACK_TOKENS:
                self.kept_texts.flush()
                self._start_training()

    def _flush_when_due(self) -> None:
        now = time.monotonic()
        if self._has_flush_failed and now < self._next_start_at:
            return  # after a failed write, the next one waits until a training may start again
        if now >= self._next_flush_at or self.kept_texts.must_flush():
            self._next_flush_at, self._has_flush_failed = now + FLUSH_INTERVAL_S, True
            self.kept_texts.flush()
            self._has_flush_failed = False

    def _start_training(self) -> None:
        tree = self.resolved.layout.tree
        self._out_directory, self._start_counts = self.folder.new_draft_path(), SampleCounts.of(self.kept_texts)
        judged_texts = self._judged_counts.texts_per_kind
        new_texts = {kind: count - judged_texts[kind] for kind, count in self._start_counts.texts_per_kind.items()}
        run_config = {
            "kind": self.kind,
            "target": str(self.target_dir),
            "draft": str(self.draft_dir),
            "given": str(self.given_draft),
            "tree": [tree.steps, tree.topk, tree.num_draft_tokens],
            "out": str(self._out_directory),
            "seconds": self.config.seconds,
            "texts": new_texts,
        }
        (self.folder.path / "run.json").write_text(json.dumps(run_config))
        num_tokens = self.kept_texts.num_tokens
        with (self.folder.path / "trainer.log").open("wb") as output:
            self._process = subprocess.Popen(
                [*self.trainer, str(self.folder.path)],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment(**self.machine.environment),
            )
        self._tokens_when_trained, self._last_signal = num_tokens, b""
        self._send_signal(self._process)
        log.info("learning: process %d trains the draft further on %s", self._process.pid, self.machine.description)

    def _send_signal(self, process: subprocess.Popen[bytes]) -> None:
        """Tell the trainer whether it may compute.  The trainer ends when its stdin is closed."""
        signal = WAIT_SIGNAL if self.machine.idle_only and self._is_busy else GO_SIGNAL
        if signal != self._last_signal and process.stdin is not None:
            with suppress(BrokenPipeError):
                process.stdin.write(signal)
            self._last_signal = signal

    def _check_process(self, process: subprocess.Popen[bytes]) -> None:
        """Send the training process its signal.  If it has ended, judge the new draft, or record the failure."""
        status = process.poll()
        if status is None:
            self._send_signal(process)
            return
        self._end_process()
        if status:
            how = f"was ended by signal {-status}" if status < 0 else f"ended: {self._last_log_line()}"
            self._record_failure(f"the training process {process.pid} {how}")
            return
        self._judge_draft(self._out_directory)
        self._judged_counts, self._num_failed = self._start_counts, 0
        self.figures.trainings += 1
        # During a swap, the texts still count as new, because the draft is lost if the server stops before the end.
        if not self.is_swapping:
            self.folder.record_trained(self._judged_counts.texts_per_kind)

    def _judge_draft(self, draft: Path) -> None:
        """Takes the better one of the new draft and the draft given at startup.  Makes a Candidate of it, if it accepts
        at least MIN_GAIN tokens more than the served draft.  Raises EspalierError if the new draft is damaged."""
        manifest = read_manifest(draft)
        self.figures.startup_accept_length, self.figures.served_accept_length, self.figures.trained_accept_length = (
            manifest.given,
            manifest.before,
            manifest.after,
        )
        is_better = manifest.after > manifest.given
        best_draft, accept_length = (draft, manifest.after) if is_better else (self.given_draft, manifest.given)
        if not accept_length >= manifest.before + MIN_GAIN:  # true if `accept_length` is not a number
            log.info(
                "learning: the new draft is not used: accept length %.3f on held-back traffic, the served one's %.3f",
                *(manifest.after, manifest.before),
            )
            remove_draft(draft)
            return
        self._candidate = Candidate(best_draft, manifest, Swap(self._served, self._load_draft(best_draft)))

    def _record_swap(self) -> None:
        """Records the draft that was swapped in, if any, as the one to serve after a restart.  If this raises OSError,
        a restart serves the previous draft, or trains again on the same texts."""
        candidate, self._swapped_draft = self._swapped_draft, None
        if candidate is None:
            return
        self.draft_dir, manifest = candidate.directory, candidate.manifest
        self.figures.swaps += 1
        is_back = self.draft_dir == self.given_draft
        log.info(
            "learning: swapped in %s: accept length %.3f on held-back traffic, before %.3f; trained on %d tokens "
            "in %.0f s",
            "the given draft again" if is_back else "a draft",
            manifest.given if is_back else manifest.after,
            *(manifest.before, manifest.num_tokens, manifest.seconds),
        )
        self.folder.record_served(self.draft_dir)
        self.folder.record_trained(self._judged_counts.texts_per_kind)

    def _load_draft(self, draft: Path) -> DraftModel:
        """Loads a draft as the engine does.  Half-precision weights are loaded on the CPU, to save memory of the GPU:
        they have the same layout on all devices, and are copied when the draft is swapped in."""
        dtype = getattr(torch, self.resolved.dtype)
        device = self.resolved.device if dtype.itemsize > 2 else "cpu"
        position_rows = self.resolved.layout.position_rows
        return load_draft(draft, self._target, dtype=dtype, device=device, position_rows=position_rows)

    def _record_failure(self, reason: str) -> None:
        """Log why a training failed.  The next training starts after a pause."""
        self._num_failed += 1
        self.figures.failures += 1
        pause = min(FIRST_PAUSE_S * 2 ** (self._num_failed - 1), LONGEST_PAUSE_S)
        self._next_start_at = time.monotonic() + pause
        # The next training waits only for the pause, not for new texts.
        self._tokens_when_trained = self.kept_texts.num_tokens - self.config.tokens
        log.warning("learning: %s; serving goes on, and the next try is in %g s", reason, pause)

    def _last_log_line(self) -> str:
        with suppress(OSError):
            lines = (self.folder.path / "trainer.log").read_text(errors="replace").split("\n")
            return next((line for line in reversed(lines) if line.strip()), "without a word")
        return "without a word"

    def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
