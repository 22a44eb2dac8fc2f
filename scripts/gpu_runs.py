"""The GPU measurements behind docs/log.md, each with a time limit: `python -m scripts.gpu_runs NAME... --out FOLDER`.

A GPU may be available for minutes only.  So each run states the seconds that it needs, and a run that does not fit the
time left is not started.  The GPUs take runs from one list, in its order.  FOLDER/NAME.log has a run's command and all
that it printed; with --before DIR, FOLDER/NAME-before.log that of the package in DIR.  The status is 1 if a run failed
or was not started.  Two GPUs share the CPU: do not time small models on one while tests run on the other.
"""

import argparse
import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

# Runs are told to stop this long before they are killed.
GRACE_SECONDS = 5
POLL_SECONDS = 0.1
LAST_LINES = 30


@dataclass(frozen=True)
class Run:
    """seconds: time limit on one H200, 60 of them for a start that compiles kernels; command: run without a shell."""

    seconds: int
    command: str

    @property
    def words(self) -> list[str]:
        """The command with this Python in the place of `espalier` and `python`."""
        first, *others = shlex.split(self.command)
        if first == "espalier":
            return [sys.executable, "-m", "espalier", *others]
        return [sys.executable if first == "python" else first, *others]


SHAPE = "--shape llama-3.1-8b --page-size 64"
GENERATE = f"python -m lab generate {SHAPE} --max-context 33792"
ROUND = "python -m lab round --rounds 20 --page-size 64"
CELLS = "1x1024:3,4,16 8x1024:3,4,16 32x1024:3,2,8 1x32768:3,4,16"
# Of "The table" in docs/log.md.
TABLE = (
    "1x32768:5,8,64@64,1 8x1024:5,8,64@1,64 64x1024:3,2,8@64 32x1024:3,2,8@64 8x1024:5,4,16@64 32x1024:5,4,16@64 "
    "1x1024:5,8,64@64,1,256 1x1024:5,4,16@64"
)
TREES = "8x1024:5,4,16 1x32768:5,8,64 1x1024:5,8,64"
# The two files that need a GPU of their own are a run of their own.
ALONE = ("tests/gpu/test_memory.py", "tests/gpu/test_first_start.py")
TESTS = f"python -m pytest -v -m gpu -n 20 {' '.join(f'--ignore {file}' for file in ALONE)}"
DRAFTS = "python -m scripts.compare_drafts --device cuda --prompts 28 --tokens 96 --turns 3"
RUNS = {
    "tests": Run(300, f"{TESTS} tests/gpu"),
    "tests-alone": Run(200, f"python -m pytest -v -m gpu {' '.join(ALONE)}"),
    "kernel-tests": Run(300, f"{TESTS} tests/kernels tests/attention"),
    "table": Run(180, f"python -m lab round {SHAPE} --rounds 20 --own-size --cells {TABLE}"),
    "trees": Run(120, f"python -m lab round {SHAPE} --rounds 20 --max-context 33792 --cells {TREES}"),
    "trees-own-size": Run(120, f"python -m lab round {SHAPE} --rounds 20 --own-size --cells {TREES}"),
    "bundled": Run(90, "python -m lab round --device cuda --batch 1,8"),
    # The default engine, as LLM.generate users have it.
    "generate": Run(240, f"{GENERATE} --tree 5,8,64 5,4,16 --prompts 1x1024 8x1024 1x32768"),
    "generate-batch": Run(150, f"{GENERATE} --tree 3,2,8 --prompts 32x1024 64x1024"),
    # A lone request should take as long in an engine for one request as in one for eight.
    **{
        f"generate-max-batch-{most}": Run(
            240, f"{GENERATE} --max-batch {most} --tree 5,8,64 5,4,16 --prompts 1x1024 1x32768"
        )
        for most in (1, 8)
    },
    "prefill": Run(100, f"python -m lab prefill {SHAPE} --prompts 1x8192 32x1024"),
    "latency": Run(120, f"python -m lab load {SHAPE} --rate 8 --requests 64"),
    "serve": Run(150, f"python -m lab serve {SHAPE} --concurrency 1,8,64"),
    "serve-bundled": Run(90, "python -m lab serve --device cuda --concurrency 16"),
    "serve-timeline": Run(120, "python -m scripts.serve_timeline --shape llama-3.1-8b --concurrency 8"),
    "grammar": Run(120, f"python -m lab grammar {SHAPE} --steps 5 --topk 4 --num-draft-tokens 16 --tokens 160"),
    "transformers": Run(120, "python -m lab round --device cuda --compare transformers --batch 1,8"),
    # Latent attention and experts.
    **{
        f"rounds-{shape}": Run(200, f"{ROUND} --shape {shape} --max-context 33280 --cells {CELLS}")
        for shape in ("deepseek-v2-lite", "qwen3-30b-a3b", "gpt-oss-20b")
    },
    **{
        f"prefill-{shape}": Run(120, f"python -m lab prefill --shape {shape} --page-size 64 --prompts 1x8192")
        for shape in ("deepseek-v2-lite", "qwen3-30b-a3b")
    },
    "correlated": Run(
        150, f"{ROUND} --shape qwen3-30b-a3b --routing-correlation 1 --cells 1x1024:3,4,16 8x1024:3,4,16"
    ),
    # Attention backends.
    **{
        f"rounds-{backend}": Run(
            120, f"{ROUND} --shape llama-3.1-8b --own-size --attention {backend} --cells 32x1024:3,2,8"
        )
        for backend in ("triton", "fa3", "flashinfer")
    },
    **{
        f"latent-{backend}": Run(
            240, f"{ROUND} --shape deepseek-v2-lite --own-size {how} --cells 1x1024:3,4,16 32x1024:3,2,8"
        )
        # FlashInfer's latent kernels need exact lengths, so no overlap.
        for backend, how in (
            ("triton", "--attention triton"),
            ("fa3", "--attention fa3"),
            ("flashinfer", "--attention flashinfer --no-overlap"),
        )
    },
    "attention": Run(240, "python -m lab attention"),
    # Block drafts.
    **{
        f"planted-block-{size}": Run(
            150, f"{ROUND} --shape llama-3.1-8b --own-size --block-size {size} --cells {cells}"
        )
        for size, cells in (
            (8, "1x1024:7,8,16 1x1024:7,8,32 1x1024:7,8,64"),
            (16, "1x1024:15,8,16 1x1024:15,8,32 1x1024:15,8,64 1x1024:15,8,256"),
        )
    },
    "drafts": Run(200, f"{DRAFTS} --draft plain --draft eagle3 --draft block --draft ngram"),
    # Quantised weights.
    **{
        f"tune-{weights}": Run(
            90, f"espalier doctor --tune --shapes llama-3.1-8b --weights {weights} --seconds 60 --choices choices.json"
        )
        for weights in ("fp8", "fp8-block", "int4", "mxfp4")
    },
    # Plans of the products of a round, compared in rounds.
    **{
        f"round-plans-{weights}-{rows}": Run(
            140,
            f"python -m scripts.round_plans {'' if weights == 'dense' else f'--weights {weights}'} {tree} "
            f"--rows {rows}",
        )
        for weights in ("dense", "fp8", "fp8-block", "int4")
        for rows, tree in ((1, ""), (64, "--tree 5,8,64"), (128, "--tree 5,4,16 --batch 8"))
    },
    "linears": Run(120, "python -m lab linears --rows 1,4,16,64,2048"),
    **{
        f"{command}-{weights}": Run(seconds, f"{line} --weights {weights}")
        for weights in ("fp8", "fp8-block", "int4", "mxfp4")
        for command, seconds, line in (
            ("prefill", 100, f"python -m lab prefill {SHAPE} --prompts 1x8192"),
            ("d64", 120, f"{GENERATE} --tree 5,8,64 --prompts 1x1024 1x32768"),
            ("d16", 100, f"{GENERATE} --tree 5,4,16 --prompts 8x1024"),
            ("d8", 100, f"{GENERATE} --tree 3,2,8 --prompts 32x1024"),
        )
    },
    "d64-fp8-kv8": Run(120, f"{GENERATE} --tree 5,8,64 --prompts 1x1024 1x32768 --weights fp8 --kv-dtype fp8_e4m3"),
    "d64-fp8-draft8": Run(120, f"{GENERATE} --tree 5,8,64 --prompts 1x1024 1x32768 --weights fp8 --draft-weights fp8"),
    "gpt-oss-mxfp4": Run(
        150, f"{ROUND} --shape gpt-oss-20b --own-size --weights mxfp4 --cells 1x1024:3,4,16 8x1024:3,4,16"
    ),
    "qwen3-moe-fp8": Run(
        150, f"{ROUND} --shape qwen3-30b-a3b --own-size --weights fp8 --cells 1x1024:3,4,16 8x1024:3,4,16"
    ),
}


@dataclass
class Session:
    """deadline: time.monotonic() at which every run must have ended; before: root of a checkout whose package each run
    takes first; failed: runs that failed or were not started; interrupted: set by Ctrl-C."""

    runs: "queue.Queue[str]"
    out: Path
    deadline: float
    before: Path | None = None
    failed: list[str] = field(default_factory=list)
    interrupted: threading.Event = field(default_factory=threading.Event)


def run_what_fits(session: Session, gpu: str) -> None:
    """Take runs on one GPU until the list is empty."""
    while not session.interrupted.is_set():
        try:
            name = session.runs.get_nowait()
        except queue.Empty:
            return
        # One after the other on one GPU: two GPUs, or two machines, differ by more than a change does.
        packages = {name: None} if session.before is None else {f"{name}-before": session.before, name: None}
        needed = len(packages) * RUNS[name].seconds
        fits = time.monotonic() + needed <= session.deadline
        for label, package in packages.items():
            if session.interrupted.is_set():
                return
            status = f"not started, as {name} needs {needed} s"
            if fits:
                status = measure(RUNS[name], gpu, session.out / f"{label}.log", session.interrupted, package)
            if not status.startswith("exit 0,"):
                session.failed.append(label)
            print(f"{label}: {status}", flush=True)


def measure(run: Run, gpu: str, log: Path, interrupted: threading.Event, package: Path | None = None) -> str:
    """Run the command on one GPU and write its output to `log`.  Returns its status and the last lines of the log.

    package: the root of the checkout that Python imports from; None: the working directory.
    """
    start = time.monotonic()
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": gpu, "PYTHONUNBUFFERED": "1"}
    with log.open("w", encoding="utf-8") as file:
        file.write(f"$ {run.command}\n")
        file.flush()
        # A process group of its own, so that all its processes end at the limit.
        process = subprocess.Popen(
            run.words, stdout=file, stderr=subprocess.STDOUT, env=environment, cwd=package, start_new_session=True
        )
        end = start + run.seconds - GRACE_SECONDS
        while process.poll() is None and time.monotonic() < end and not interrupted.wait(POLL_SECONDS):
            pass
        status = f"exit {process.returncode}"
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGTERM)
            status = "stopped" if interrupted.is_set() else "stopped at its limit"
            try:
                process.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n    ".join([f"{status}, {time.monotonic() - start:.0f} s", *lines[-LAST_LINES:]])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.gpu_runs", description="Without names: list the runs.")
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--out", type=Path, default=Path("gpu-runs"), help="folder for the logs (gpu-runs)")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    parser.add_argument("--gpus", default=visible, help=f"GPUs that share the runs, such as 0,1 ({visible})")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no run that would end later")
    parser.add_argument(
        "--before", type=Path, metavar="DIR", help="make each run with the package of another checkout first"
    )
    given = parser.parse_args(arguments)
    if given.before is not None and not (given.before / "espalier" / "__init__.py").is_file():
        parser.error(f"--before={given.before} holds no package espalier; give the root of a checkout (git worktree)")
    for name in given.names:
        if name not in RUNS:
            parser.error(f"there is no run {name!r}; without names, the runs are listed")
    if not given.names:
        for name, run in RUNS.items():
            print(f"{name:24} {run.seconds:4} s  {run.command}")
        return 0
    given.out.mkdir(parents=True, exist_ok=True)
    runs: queue.Queue[str] = queue.Queue()
    for name in given.names:
        runs.put(name)
    session = Session(runs, given.out, time.monotonic() + given.seconds, given.before)
    gpus = given.gpus.split(",")
    with ThreadPoolExecutor(len(gpus)) as threads:
        try:
            list(threads.map(run_what_fits, [session] * len(gpus), gpus))
        except KeyboardInterrupt:
            session.interrupted.set()
            return 130
    return 1 if session.failed else 0


if __name__ == "__main__":
    sys.exit(main())
