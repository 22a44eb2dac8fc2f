"""`espalier train auto`: tries each kind of draft for a short time, trains the fastest kind, and measures the result.

It prints and runs the commands that a user would run, each in a separate process: generating text, a trial of each
kind, the training, and `espalier bench choose`, which measures tokens per second.  The folder OUT/work stores the
results of finished steps.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from espalier.child_process import environment
from espalier.errors import EspalierError
from espalier.model_files import read_json
from espalier.text import load_tokenizer
from espalier.train.configs import read_target
from espalier.train.data import read_data
from espalier.train.own_text import format_minutes
from espalier.train.target import training_device
from espalier.train.work import require_same_origin, target_digest
from espalier.train.writer import TargetWriter

# SIZE_FLAGS: flags of all trainings, by device.  RECIPE_FLAGS: further flags, by kind of draft.
# BATCH_ROWS: the rows of a batch on a GPU, by kind of draft.
SIZE_FLAGS = {"cuda": "--length 1024 --save-every 400", "cpu": "--length 128 --batch 2 --log-every 5 --save-every 100"}
RECIPE_FLAGS = {"eagle3": "", "mtp": "--layers 3 --ttt-steps 5", "block": "--edge-kind rnn"}
BATCH_ROWS = {"eagle3": 16, "mtp": 8, "block": 16}
# Shares of the total time for generating questions, for generating text, and for the training steps of all trials.  The
# final training gets the remaining time.
QUESTIONS_SHARE, TEXT_SHARE, TRIALS_SHARE = 0.04, 0.12, 0.10
MAX_QUESTIONS = {"cuda": 20000, "cpu": 64}
QUESTION_TOKENS, ANSWER_TOKENS = {"cuda": 256, "cpu": 64}, {"cuda": 256, "cpu": 48}
# The number of prompts that the target continues before the time is checked again.
PROMPTS_PER_BATCH = {"cuda": 512, "cpu": 16}
# Flags of `espalier bench choose`: batch sizes for the finished draft, numbers of tokens and of repeats.
BATCH_SIZE_FLAGS = {"cuda": "1,8,64", "cpu": "1,4"}
BENCH_RUN_FLAGS = {"cuda": "--tokens 64 --repeats 8", "cpu": "--tokens 24 --repeats 2"}
MAX_CONTEXT = 1024


@dataclass(frozen=True)
class DraftSpeed:
    """A draft's speed for one request, measured by `bench choose`, with the fastest tree and with plain decoding.

    If plain decoding was measured several times, the fastest measurement counts."""

    tokens_per_second: float
    plain_tokens_per_second: float
    accept_length: float

    def __str__(self) -> str:
        ratio = self.tokens_per_second / self.plain_tokens_per_second
        return f"{self.tokens_per_second:.0f} tokens/s, {ratio:.2f} times plain, accept length {self.accept_length:.2f}"


def train_auto(target: Path, data: Path | None, out: Path, max_minutes: float, kinds: list[str]) -> None:
    """Runs `espalier train auto`.  kinds: the kinds of drafts to try, names in train/kinds.py:DRAFT_KINDS.
    Raises EspalierError for invalid input, and OSError if a command fails."""
    device, work, clock = training_device().type, out / "work", TimeBudget(max_minutes * 60)
    made_from = {"--target": target_digest(target), "--data": None if data is None else str(data.resolve())}
    require_same_run(out, work / "auto.json", made_from | {"--kinds": " ".join(kinds), "--minutes": f"{max_minutes:g}"})
    source = f"--data {data}" if data else "questions that the target asks itself"
    hint = "; on a CPU this is a trial of the chain, a GPU makes a draft that is worth its time" * (device == "cpu")
    print(
        f"on {device}: text from {source}, trials of {', '.join(kinds)}, training, trees: {max_minutes:g} min{hint}",
        flush=True,
    )
    data = data or write_own_questions(target, work / "questions.jsonl", device, QUESTIONS_SHARE * clock.max_seconds)
    common = ["--target", str(target), "--data", str(data), "--work", str(work)]
    text_flags = make_own_text(common, work, device, TEXT_SHARE * clock.max_seconds)
    prompt_flags = write_held_out_prompts(target, data, work / "held_out.jsonl")
    measure = partial(measure_draft, target, [*prompt_flags, *BENCH_RUN_FLAGS[device].split()])
    trials: dict[str, DraftSpeed] = {}
    step_seconds, overhead = max(1, int(TRIALS_SHARE * clock.max_seconds / len(kinds))), 0.0
    for kind in kinds:
        # Assume that the next trial, and then the training, each take as long as the longest trial so far.
        if trials and 2 * (overhead + step_seconds) > clock.remaining:
            left, needed = format_minutes(clock.remaining), format_minutes(2 * (overhead + step_seconds))
            print(f"{kind} is not tried: with the training it would take {needed}, and {left} are left", flush=True)
            continue
        clock.print_progress(f"trial of {kind}")
        started_at, trial_dir = clock.elapsed, work / f"trial-{kind}"
        train_kind(kind, [*common, *text_flags, "--out", str(trial_dir)], device, step_seconds)
        trials[kind] = measure(trial_dir, work / f"trial-{kind}-trees.json", ["--batch", "1"])
        overhead = max(overhead, clock.elapsed - started_at - step_seconds)
        print(f"trial of {kind}: {trials[kind]}", flush=True)
    best = max(trials, key=lambda kind: trials[kind].tokens_per_second)
    clock.print_progress(f"training of {best}")
    # Assume that the training needs the same time outside its steps as a trial.  Its draft is measured at more batch
    # sizes, but the kernels are compiled already.
    seconds = max(step_seconds, int(clock.remaining - overhead))
    train_kind(best, [*common, *text_flags, "--out", str(out)], device, seconds)
    trees = out / "trees.json"
    clock.print_progress("measurement")
    final_speed = measure(out, work / "trees.json", ["--batch", BATCH_SIZE_FLAGS[device], "--out", str(trees)])
    lines = [f"trial of {kind}: {speed}" for kind, speed in trials.items()]
    lines += [f"chosen: {best}", f"predicted: at least {trials[best]}", f"found: {final_speed}"]
    lines += [f"in {format_minutes(clock.elapsed)} on {device}"]
    if final_speed.tokens_per_second <= final_speed.plain_tokens_per_second:
        lines.append("plain decoding is faster here: train for longer, or on a GPU, or serve without this draft")
    with (out / "README.md").open("a", encoding="utf-8") as card:
        card.write("\n## How it was chosen\n\n" + "".join(f"- {line}\n" for line in lines))
    print("\n".join(lines))
    model = ["--draft", str(out), "--by-batch", str(trees)]
    print("use it:")
    for command in (
        ["serve", str(target), *model],
        ["generate", "--model", str(target), *model, "--chat", "Why is the sky blue?"],
        ["bench", "load", "--model", str(target), *model],
    ):
        print("  " + shlex.join(["espalier", *command]))


class TimeBudget:
    """A clock that limits the time of the whole command, in seconds."""

    def __init__(self, max_seconds: float) -> None:
        self.max_seconds, self.started_at = max_seconds, time.perf_counter()

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.started_at

    @property
    def remaining(self) -> float:
        return self.max_seconds - self.elapsed

    def print_progress(self, phase: str) -> None:
        """Prints how much of the time has passed.  phase: what has just ended."""
        print(f"{phase}: {format_minutes(self.elapsed)} of {format_minutes(self.max_seconds)} have passed", flush=True)


def require_same_run(out: Path, path: Path, made_from: dict[str, str | None]) -> None:
    """Raises EspalierError if `out` has files of another run, which this run would take for its own.  path: the file
    in the work folder that records `made_from`.  made_from: target, data and settings of this run, by flag."""
    if path.exists():
        require_same_origin(path, read_json(path), made_from, "give another --out")
        return
    if foreign := next((name for name in ("config.json", "README.md") if (out / name).exists()), None):
        raise EspalierError(f"--out {out} holds a {foreign} of something else; give another folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(made_from) + "\n")


def run_espalier(*command: str) -> None:
    """Prints and runs an espalier command.  Raises OSError if the command fails."""
    print("$ " + shlex.join(["espalier", *command]), flush=True)
    status = subprocess.run([sys.executable, "-m", "espalier", *command], env=environment()).returncode
    if status in (-2, 130):
        raise KeyboardInterrupt
    if status:
        why = f"ended with status {status}, as it says above; what is done before it is kept for another start"
        raise OSError(f"espalier {command[0]} {command[1]} {why}")


def make_own_text(common_flags: list[str], work_dir: Path, device: str, max_seconds: float) -> list[str]:
    """Generates training text with the target (its own text).  Returns the flags that a training needs to use it."""
    flags = ["--continuation-tokens", str(ANSWER_TOKENS[device]), "--generate-batch", str(PROMPTS_PER_BATCH[device])]
    if not (work_dir / "own_text-0.npz").exists():
        run_espalier("train", "own-text", *common_flags, *flags, "--text-seconds", str(max(1, int(max_seconds))))
    return [*flags, *SIZE_FLAGS[device].split()]


def train_kind(kind: str, flags: list[str], device: str, seconds: int) -> None:
    """Runs one training, whose steps take `seconds`.  flags: of the command.  A finished trial is not run again."""
    out = Path(flags[flags.index("--out") + 1])
    if (out / "README.md").exists():
        print(f"{out} is finished: kept")
        return
    batch_flags = [] if device == "cpu" else ["--batch", str(BATCH_ROWS[kind])]
    anchor_flags = ["--anchors", "16"] if (kind, device) == ("block", "cpu") else []
    limit_flags = ["--num-tokens", "1e12", "--max-seconds", str(seconds)]
    run_espalier("train", kind, *flags, *RECIPE_FLAGS[kind].split(), *batch_flags, *anchor_flags, *limit_flags)


def write_held_out_prompts(target: Path, data: Path, path: Path) -> list[str]:
    """Writes the held-out prompts to a file.  Returns the flags for measuring drafts on these prompts."""
    _, prompts = read_data(data, target).split_held_out()
    path.write_text("".join(json.dumps({"token_ids": prompt.tolist()}) + "\n" for prompt in prompts))
    fitting = [len(prompt) for prompt in prompts if len(prompt) <= MAX_CONTEXT]
    return ["--dataset", str(path), "--context", str(max(fitting))] if fitting else []


def measure_draft(
    target: Path, common_flags: Sequence[str], draft: Path, figures_file: Path, more_flags: Sequence[str]
) -> DraftSpeed:
    """Measures a draft with `bench choose`, unless figures_file already has the results.  common_flags, more_flags:
    flags for all drafts, and for this draft."""
    if not figures_file.exists():
        models = ["--model", str(target), "--draft", str(draft)]
        run_espalier("bench", "choose", *models, *common_flags, *more_flags, "--json", str(figures_file))
    cells: list[dict[str, Any]] = [cell for cell in json.loads(figures_file.read_text())["cells"] if cell["batch"] == 1]
    speed = itemgetter("tokens_per_second")
    plain = max((cell for cell in cells if not cell["steps"]), key=speed)
    best = max((cell for cell in cells if cell["steps"]), key=speed)
    return DraftSpeed(best["tokens_per_second"], plain["tokens_per_second"], best["accept_length"])


def write_own_questions(target: Path, path: Path, device: str, max_seconds: float) -> Path:
    """Writes questions to the file `path`, and returns `path`.  The target generates them itself, as the text after the
    beginning of a user message (Magpie, arXiv 2406.08464).  Raises EspalierError without a chat template."""
    if path.exists():
        return path
    tokenizer = load_tokenizer(target, int(read_target(target)["vocab_size"]))
    if tokenizer is None or not tokenizer.template.source:
        raise EspalierError(f"--target {target} has no chat template, so it asks no questions; give --data")
    placeholder = "MARK-OF-THE-QUESTION"
    chat_text = tokenizer.hf.apply_chat_template([{"role": "user", "content": placeholder}], tokenize=False)
    prompt_start = np.array(tokenizer.encode(chat_text.partition(placeholder)[0], add_special_tokens=False), np.int32)
    num_tokens, batch_size, questions, rounds = QUESTION_TOKENS[device], PROMPTS_PER_BATCH[device], dict[str, None](), 0
    with TargetWriter(target, len(prompt_start) + num_tokens, batch_size) as writer:
        started_at, seconds_passed = time.perf_counter(), 0.0
        while seconds_passed < max_seconds and rounds * batch_size < MAX_QUESTIONS[device]:
            rounds += 1
            texts = writer.continuations([prompt_start] * batch_size, num_tokens, 1.0, seed=rounds)
            texts_of_target = (tokenizer.decode(text[len(prompt_start) :].tolist()).strip() for text in texts)
            questions |= dict.fromkeys(text for text in texts_of_target if text)
            seconds_passed = time.perf_counter() - started_at
            print(f"{len(questions)} questions of the target itself, {seconds_passed:.0f} s", flush=True)
    lines = [{"kind": "own question", "messages": [{"role": "user", "content": text}]} for text in questions]
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    shutil.move(unfinished, path)
    return path
