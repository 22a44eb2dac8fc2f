"""Every module that an API server starts as its engine process, the stand-ins under scripts/ among them."""

import os
import re
import signal
import tempfile
from pathlib import Path

import pytest

from espalier.server.worker import EXIT_FAILED
from tests import warm
from tests.server.serving import exists, until

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r'worker_module="(.*?)"')


def modules():
    """The worker of the default, of `python -m lab server`, and of the scripts."""
    found = {name for path in (ROOT / "scripts").glob("*.py") for name in NAMED.findall(path.read_text())}
    assert len(found) >= 2
    return sorted(found | {warm.WORKER, "lab.shape_worker"})


def test_it_takes_what_the_front_gives_and_ends_without_a_front(tmp_path):
    server = warm.server()
    with tempfile.TemporaryFile("w+") as said:
        args = [f"ipc://{tmp_path}/none", "1"]
        started = {name: server.start(name, args, server.environment, said, said) for name in modules()}
        ends = {name: process.wait(60) for name, process in started.items()}
        said.seek(0)
        lines = said.read()
    # A traceback has this status too.
    assert ends == dict.fromkeys(ends, EXIT_FAILED), lines
    assert "Traceback" not in lines, lines


@pytest.mark.parametrize("end", ["the API server is killed", "it gets SIGTERM"])
def test_an_engine_that_is_loading_ends(tmp_path, end):
    folder, pid_file, server = tmp_path / "socket", tmp_path / "pid", warm.server()
    folder.mkdir()
    with tempfile.TemporaryFile("w+") as said:
        frontend = server.start("tests.server.loading", [f"{folder}/1", str(pid_file)], server.environment, said, said)
        try:
            engine = until(lambda: pid_file.exists() and int(pid_file.read_text() or 0))
            if end == "it gets SIGTERM":
                os.kill(engine, signal.SIGTERM)
            else:
                os.kill(frontend.pid, signal.SIGKILL)
            until(lambda: not exists(engine))
            assert folder.exists() == (end == "it gets SIGTERM"), "the API server removes the folder where it lives"
        finally:
            frontend.kill()
            frontend.wait(60)
