"""What would be measured in vain is refused before anything is loaded, and what was measured is kept."""

import os
import sys

import pytest

from espalier.cli import choose
from espalier.cli.console import require_writable, stdout
from espalier.errors import EspalierError
from tests.cli.test_cli import run, tiny, tiny_heldout  # noqa: F401  (fixtures)
from tests.test_llm import paths  # noqa: F401  (a fixture)


@pytest.fixture
def model(tiny, tiny_heldout):  # noqa: F811
    return tiny


def refused(capsys, *arguments):
    """The one line that a command says that loads nothing."""
    assert run(*arguments) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


@pytest.fixture
def nothing_loads(monkeypatch):
    def load(*_, **__):
        raise AssertionError("a model is loaded")

    monkeypatch.setattr("espalier.llm.build_engine", load)
    monkeypatch.setattr("espalier.bench.serve.subprocess", None)


WRITES = [
    ["bench", "round", "--json"],
    ["bench", "round", "--acceptance", "--json"],
    ["bench", "round", "--choose", "--out"],
    ["bench", "prefill", "--json"],
    ["bench", "throughput", "--json"],
    ["bench", "latency", "--json"],
    ["bench", "serve", "--json"],
    ["bench", "kernels", "--json"],
    ["bench", "floor", "--json"],
]


@pytest.mark.parametrize("command", WRITES, ids=" ".join)
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(command, nothing_loads, tmp_path, capsys):
    assert f"{command[-1]} {tmp_path} cannot be written (it is a directory)" in refused(capsys, *command, tmp_path)
    assert "none is not a directory" in refused(capsys, *command, tmp_path / "none" / "file")


def test_a_table_of_linear_layers_that_cannot_be_written_or_read_is_refused_before_tuning(tmp_path, capsys):
    assert "cannot be written (it is a directory)" in refused(capsys, "doctor", "--tune", "--choices", tmp_path)
    (tmp_path / "table.json").write_text("[")
    said = refused(capsys, "doctor", "--tune", "--choices", tmp_path / "table.json")
    assert "is no table of linear layers" in said


def test_what_may_not_be_written_is_refused_and_nothing_else_is_touched(tmp_path, monkeypatch):
    there, new = tmp_path / "there", tmp_path / "new"
    there.write_text("kept")
    for path in (None, there, new):
        require_writable("--json", path)
    assert there.read_text() == "kept" and not new.exists()
    monkeypatch.setattr(os, "access", lambda *_: False)
    for path in (there, new):
        with pytest.raises(EspalierError, match="permission denied"):
            require_writable("--json", path)


MEASURED = [
    (["bench", "round"], "--json"),
    (["bench", "round", "--acceptance"], "--json"),
    (["bench", "round", "--choose", "--max-batch", "1"], "--json"),
    (["bench", "round", "--choose", "--max-batch", "1"], "--out"),
]


@pytest.mark.parametrize(("command", "flag"), MEASURED, ids=str)
def test_figures_are_kept_where_whoever_reads_the_table_has_left(command, flag, model, monkeypatch, tmp_path):
    def left(_):
        raise BrokenPipeError

    monkeypatch.setattr("espalier.cli.bench.aligned", left)
    monkeypatch.setattr(choose, "aligned", left)
    file = tmp_path / "figures.json"
    sizes = ["--tokens", "6"] if "--acceptance" in command else ["--tokens", "6", "--context", "8", "--repeats", "1"]
    with pytest.raises(BrokenPipeError):
        _run_through(*command, *sizes, flag, file, *model)
    assert file.read_text().startswith("{")


def _run_through(*arguments):
    """A command, without what main makes of a reader who has left: it would close this process's stdout."""
    from espalier.cli.main import parse

    asked = parse([str(argument) for argument in arguments])
    return asked.run(asked)


def test_a_reader_who_has_left_is_left_to_main(monkeypatch):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w", buffering=1) as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        with pytest.raises(BrokenPipeError):
            stdout().print("x")
        # Nothing is left to be written when it is closed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), write)
