"""`espalier train auto`: tries each kind of draft for a short time, trains the fastest one, and measures it.

It runs the commands that a user would run, each in a process of its own, and prints them: the target's text, a trial of
each kind, the training, and `espalier bench choose`, whose tokens a second decide.  What is done is kept in OUT/work.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from espalier.child_process import environment
from espalier.errors import EspalierError
from espalier.model_files import read_json
from espalier.text import load_tokenizer
from espalier.train.configs import read_target
from espalier.train.own_text import minutes
from espalier.train.target import training_device
from espalier.train.work import require_same, target_digest
from espalier.train.writer import Writer

# Flags of every training; the recipe of each kind beside its defaults.
SIZES = {
    "cuda": "--length 1024 --save-every 400",
    "cpu": "--length 192 --batch 2 --log-every 5 --save-every 100",
}
RECIPES = {
    "eagle3": "--draft-vocab 16384",
    "mtp": "--layers 3 --ttt-steps 5",
    "block": "--edge-kind rnn",
}
ROWS = {"eagle3": 16, "mtp": 8, "block": 16}
# Shares of the time: text, all trials, training; the rest measures.
TEXT, TRIALS, TRAINING = 0.2, 0.25, 0.45
QUESTIONS = {"cuda": 20000, "cpu": 24}
QUESTION_TOKENS = 256
ANSWER_TOKENS = {"cuda": 256, "cpu": 48}


@dataclass(frozen=True)
class Speed:
    """Of one draft at one request, by `bench choose`: tokens a second of its fastest tree and of plain decoding."""

    tokens_per_second: float
    plain: float
    accept_length: float

    def __str__(self) -> str:
        ratio = self.tokens_per_second / self.plain
        return f"{self.tokens_per_second:.0f} tokens/s, {ratio:.2f} times plain, accept length {self.accept_length:.2f}"


def train_auto(target: Path, data: Path | None, out: Path, most_minutes: float, kinds: list[str]) -> None:
    """Raises EspalierError; OSError for a command that fails."""
    device, work, begun = training_device().type, out / "work", time.perf_counter()
    seconds = most_minutes * 60
    work.mkdir(parents=True, exist_ok=True)
    require_same_run(
        work / "auto.json", {"--target": target_digest(target), "--data": None if data is None else str(data.resolve())}
    )
    source = f"--data {data}" if data else "questions that the target asks itself"
    small = "; on a CPU this is a trial of the chain, a GPU makes a draft that is worth its time" * (device == "cpu")
    print(
        f"on {device}: text from {source}, trials of {', '.join(kinds)}, training, trees: {most_minutes:g} min{small}"
    )
    data = data or ask_itself(target, work / "questions.jsonl", QUESTIONS[device])
    common = ["--target", str(target), "--data", str(data), "--work", str(work)]
    text = [*make_text(common, work, device, TEXT * seconds), *SIZES[device].split()]
    trials = {}
    for kind in kinds:
        trial = work / f"trial-{kind}"
        train(kind, [*common, *text, "--out", str(trial)], device, int(TRIALS * seconds / len(kinds)))
        trials[kind] = measured(target, trial, work / f"trial-{kind}-trees.json")
        print(f"trial of {kind}: {trials[kind]}", flush=True)
    best = max(trials, key=lambda kind: trials[kind].tokens_per_second)
    train(best, [*common, *text, "--out", str(out)], device, int(TRAINING * seconds))
    found, trees = measured(target, out, work / "trees.json", out / "trees.json"), out / "trees.json"
    lines = [f"trial of {kind}: {speed}" for kind, speed in trials.items()]
    lines += [f"chosen: {best}", f"predicted: at least {trials[best]}", f"found: {found}"]
    lines += [f"in {minutes(time.perf_counter() - begun)} on {device}"]
    if found.tokens_per_second <= found.plain:
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


def require_same_run(path: Path, run: dict[str, str | None]) -> None:
    """Refuse the work folder of another run, whose trials would be taken for this one's.  Raises EspalierError."""
    if path.exists():
        require_same(path, read_json(path), run, "give another --out")
    else:
        path.write_text(json.dumps(run) + "\n")


def espalier(*command: str) -> None:
    """Run a command of espalier, and print it.  Raises OSError if it fails."""
    print("$ " + shlex.join(["espalier", *command]), flush=True)
    status = subprocess.run([sys.executable, "-m", "espalier", *command], env=environment()).returncode
    if status in (-2, 130):
        raise KeyboardInterrupt
    if status:
        raise OSError(f"espalier {command[0]} {command[1]} ended with status {status}; start again to go on behind it")


def make_text(common: list[str], work: Path, device: str, seconds: float) -> list[str]:
    """Make the target's own text, and return the flags of it, which the runs that follow must have too.

    A first part, of seed 1, says how much text the time allows.
    """
    size, tokens = (1024, 256) if device == "cuda" else (4, ANSWER_TOKENS["cpu"])
    flags = ["--continuation-tokens", str(tokens), "--generate-batch", str(size)]
    plan = work / "text.json"
    if not plan.exists():
        begun = time.perf_counter()
        espalier("train", "own-text", *common, *flags, "--continuations", str(size), "--seed", "1")
        took = time.perf_counter() - begun
        plan.write_text(json.dumps({"continuations": max(size, int(size * (seconds - took) / took) // size * size)}))
    flags += ["--continuations", str(json.loads(plan.read_text())["continuations"])]
    if not (work / "own_text-0.npz").exists():
        espalier("train", "own-text", *common, *flags)
    return flags


def train(kind: str, flags: list[str], device: str, seconds: int) -> None:
    """One training.  A trial that is finished is not run again."""
    out = Path(flags[flags.index("--out") + 1])
    if (out / "README.md").exists():
        print(f"{out} is finished: kept")
        return
    rows = [] if device == "cpu" else ["--batch", str(ROWS[kind])]
    extra = ["--anchors", "16"] if (kind, device) == ("block", "cpu") else []
    limit = ["--num-tokens", "1e12", "--max-seconds", str(max(1, seconds))]
    espalier("train", kind, *flags, *RECIPES[kind].split(), *rows, *extra, *limit)


def measured(target: Path, draft: Path, figures: Path, trees: Path | None = None) -> Speed:
    """trees: a file for the table of trees by batch; without it only one request is measured."""
    if not figures.exists():
        short = [] if trees else ["--batch", "1", "--tokens", "48", "--repeats", "2"]
        table = ["--out", str(trees)] if trees else []
        espalier(
            "bench", "choose", "--model", str(target), "--draft", str(draft), *short, *table, "--json", str(figures)
        )
    cells: list[dict[str, Any]] = [cell for cell in json.loads(figures.read_text())["cells"] if cell["batch"] == 1]
    plain = next(cell for cell in cells if not cell["steps"])
    best = max((cell for cell in cells if cell["steps"]), key=lambda cell: cell["tokens_per_second"])
    return Speed(best["tokens_per_second"], plain["tokens_per_second"], best["accept_length"])


def ask_itself(target: Path, path: Path, most: int) -> Path:
    """Questions that the target asks when its chat template opens a user's turn (Magpie, arXiv 2406.08464).

    Raises EspalierError for a target without a chat template.
    """
    if path.exists():
        return path
    tokenizer = load_tokenizer(target, int(read_target(target)["vocab_size"]))
    if tokenizer is None or not tokenizer.template_text:
        raise EspalierError(f"--target {target} has no chat template, so it asks no questions; give --data")
    mark = "MARK-OF-THE-QUESTION"
    whole = tokenizer.hf.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
    opening = np.array(tokenizer.encode(whole.partition(mark)[0], add_special_tokens=False), np.int32)
    with Writer(target, len(opening) + QUESTION_TOKENS, most) as writer:
        texts = writer.continuations([opening] * most, QUESTION_TOKENS, 1.0, seed=1)
    asked = dict.fromkeys(tokenizer.decode(text[len(opening) :].tolist()).strip() for text in texts)
    lines = [{"kind": "own question", "messages": [{"role": "user", "content": each}]} for each in asked if each]
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    shutil.move(unfinished, path)
    print(f"{len(lines)} questions of the target itself: {path}", flush=True)
    return path
