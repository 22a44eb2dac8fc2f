"""`python -m lab bundled`: what is refused before anything is made."""

from pathlib import Path

import pytest

from lab.__main__ import main
from lab.bundle import bundle, command


def test_folders_that_are_not_there_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bundled", "--site-packages", "/no/such", "--out", str(tmp_path)]) == 2
    assert "--site-packages /no/such is not a directory" in capsys.readouterr().err


def test_a_stage_without_the_one_before_it_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bundled", "--out", str(tmp_path), "--only", "pack"]) == 2
    missing = tmp_path / "target" / "tokenizer.json"
    assert f"the stage pack needs {missing}, which a stage before it makes" in capsys.readouterr().err


def test_the_stages_of_the_bundled_model_are_those_of_the_flag() -> None:
    assert tuple(bundle.STAGES) == command.STAGES
