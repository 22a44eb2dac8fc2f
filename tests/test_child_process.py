"""Own processes run the package that their parent runs, whatever the working directory holds."""

import subprocess
import sys

from espalier.child_process import environment


def test_a_folder_of_the_same_name_is_not_imported(tmp_path, monkeypatch):
    (tmp_path / "espalier").mkdir()
    (tmp_path / "espalier" / "__init__.py").write_text("print('another')\n")
    (tmp_path / "espalier" / "cores.py").write_text("")
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-m", "espalier.cores"]
    assert subprocess.run(command, capture_output=True, text=True).stdout == "another\n"
    assert subprocess.run(command, capture_output=True, text=True, env=environment()).stdout == ""


def test_changes_and_the_environment_are_kept(monkeypatch):
    monkeypatch.setenv("OF_THE_USER", "1")
    kept = environment(OMP_NUM_THREADS="2")
    assert (kept["OF_THE_USER"], kept["OMP_NUM_THREADS"]) == ("1", "2")
