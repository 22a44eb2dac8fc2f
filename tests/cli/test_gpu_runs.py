"""The list of GPU measurements: its commands exist, and a run ends at its limit with all that it started."""

import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from espalier.cli.main import make_parser
from lab.__main__ import make_parser as make_lab
from lab.bench.cells import parse_cells
from scripts import gpu_runs
from scripts.gpu_runs import RUNS, Run, main

ROOT = Path(__file__).parents[2]
PARSERS = {"espalier": make_parser, "lab": make_lab}
OWN = sorted(name for name, run in RUNS.items() if run.words[2] in PARSERS)


@pytest.mark.parametrize("name", OWN)
def test_a_command_is_one_of_ours(name):
    _, _, program, *words = RUNS[name].words
    asked = PARSERS[program]().parse(words)
    if "cells" in asked and asked.cells:
        assert parse_cells(asked.cells, (64,))


def test_a_run_ends_at_its_limit(tmp_path, monkeypatch, capsys):
    endless = "python -c 'import time; print(1 + 1); time.sleep(600)'"
    runs = {"slow": Run(6, endless), "long": Run(100, endless), "quick": Run(9, "python -c 'print(2 + 1)'")}
    monkeypatch.setattr(gpu_runs, "RUNS", runs)
    start = time.monotonic()
    assert main(["slow", "long", "quick", "--gpus", "0,1", "--seconds", "30", "--out", str(tmp_path)]) == 1
    assert time.monotonic() - start < 300
    shown = capsys.readouterr().out
    assert "slow: stopped at its limit" in shown and "long: not started" in shown and "quick: exit 0" in shown
    assert (tmp_path / "slow.log").read_text().splitlines()[-1] == "2"


def test_the_status_says_whether_all_runs_succeeded(tmp_path, monkeypatch):
    runs = {"good": Run(60, "python -c pass"), "bad": Run(60, "python -c 'raise SystemExit(3)'")}
    monkeypatch.setattr(gpu_runs, "RUNS", runs)
    assert main(["good", "--out", str(tmp_path)]) == 0
    assert main(["bad", "good", "--out", str(tmp_path)]) == 1
    assert main(["good", "--seconds", "1", "--out", str(tmp_path)]) == 1, "it was not started"


@pytest.mark.parametrize(("visible", "shown"), [("3", "3"), ("", ""), (None, "0")])
def test_runs_take_the_gpus_that_are_visible(tmp_path, monkeypatch, visible, shown):
    """Also none, which hides all of them."""
    monkeypatch.setattr(
        gpu_runs, "RUNS", {"shown": Run(60, "python -c 'import os; print(os.environ[\"CUDA_VISIBLE_DEVICES\"])'")}
    )
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert main(["shown", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "shown.log").read_text().splitlines()[-1] == shown


def test_files_that_need_a_gpu_of_their_own_are_left_out_of_the_other_runs():
    """By a flag for each: pytest would take a second file after one flag as a file to run."""
    alone = [word for word in RUNS["tests-alone"].words if word.endswith(".py")]
    for name in ("tests", "kernel-tests"):
        words = RUNS[name].words
        assert [word for before, word in pairwise(words) if before == "--ignore"] == alone
        assert len(alone) > 1 and all((ROOT / file).exists() for file in alone)


def test_each_run_takes_the_package_of_another_checkout_first(tmp_path, monkeypatch, capsys):
    (tmp_path / "old" / "espalier").mkdir(parents=True)
    with pytest.raises(SystemExit):
        main(["table", "--before", str(tmp_path / "old")])
    assert "holds no package espalier" in capsys.readouterr().err
    (tmp_path / "old" / "espalier" / "__init__.py").write_text("print('of another checkout')")
    monkeypatch.setattr(gpu_runs, "RUNS", {"shown": Run(60, "python -c 'import espalier'")})
    asked = ["shown", "--before", str(tmp_path / "old"), "--out", str(tmp_path)]
    assert main(asked) == 0
    before, now = (tmp_path / name for name in ("shown-before.log", "shown.log"))
    assert "of another checkout" in before.read_text() and "of another checkout" not in now.read_text()
    assert main([*asked, "--seconds", "100"]) == 1
    assert "shown-before: not started, as shown needs 120 s" in capsys.readouterr().out, "both fit, or none"


def test_an_unknown_run_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["no-such-run"])
    assert "there is no run 'no-such-run'" in capsys.readouterr().err


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_the_runs_and_starts_no_other(tmp_path):
    program = (
        # Also where this process was started to ignore Ctrl-C, as a job in the background is.
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "import sys; from scripts import gpu_runs; from scripts.gpu_runs import Run\n"
        "gpu_runs.RUNS = {n: Run(500, 'python -c \"import time; time.sleep(500)\"') for n in ('one', 'two')}\n"
        f"sys.exit(gpu_runs.main(['one', 'two', '--out', {str(tmp_path)!r}]))"
    )
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE)
    try:
        while not (tmp_path / "one.log").exists():
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        shown, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130 and b"one: stopped" in shown
    assert not (tmp_path / "two.log").exists()
