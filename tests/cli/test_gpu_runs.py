"""The list of GPU measurements: its commands exist, and a run ends at its limit with all that it started."""

import time

import pytest

from espalier.bench.cells import parse_cells
from espalier.cli.main import parse
from tools import gpu_runs
from tools.gpu_runs import RUNS, Run, main

OWN = sorted(name for name, run in RUNS.items() if run.command.startswith("espalier"))


@pytest.mark.parametrize("name", OWN)
def test_a_command_is_one_of_ours(name):
    asked = parse(RUNS[name].words[3:])
    if "cells" in asked and asked.cells:
        assert parse_cells(asked.cells, (64,))


def test_a_run_ends_at_its_limit(tmp_path, monkeypatch, capsys):
    endless = "python -c 'import time; print(1 + 1); time.sleep(600)'"
    runs = {"slow": Run(6, endless), "long": Run(100, endless), "quick": Run(9, "python -c 'print(2 + 1)'")}
    monkeypatch.setattr(gpu_runs, "RUNS", runs)
    start = time.monotonic()
    assert main(["slow", "long", "quick", "--gpus", "0,1", "--seconds", "30", "--out", str(tmp_path)]) == 0
    assert time.monotonic() - start < 300
    shown = capsys.readouterr().out
    assert "slow: stopped at its limit" in shown and "long: not started" in shown and "quick: exit 0" in shown
    assert (tmp_path / "slow.log").read_text().splitlines()[-1] == "2"


def test_an_unknown_run_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["generate"])
    assert "there is no run 'generate'" in capsys.readouterr().err
