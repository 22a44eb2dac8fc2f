"""The scripts under scripts/ that measure start: their imports are there, and their flags can be read."""

import runpy
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "scripts"
# Scripts that make fixtures run in environments of their own.
MEASURE = sorted(
    path.stem
    for path in TOOLS.glob("*.py")
    if "ArgumentParser(" in path.read_text() and not path.stem.startswith("make_")
)


@pytest.mark.parametrize("name", MEASURE)
def test_a_tool_shows_its_flags(name, monkeypatch, capsys):
    file = TOOLS / f"{name}.py"
    monkeypatch.setattr(sys, "argv", [str(file), "--help"])
    monkeypatch.syspath_prepend(str(TOOLS))
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(file), run_name="__main__")
    assert end.value.code == 0
    assert "usage: " in capsys.readouterr().out
