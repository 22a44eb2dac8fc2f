"""Every module that a front starts as its engine process, the stand-ins under tools/ among them."""

import re
import tempfile
from pathlib import Path

from espalier.server.worker import BROKEN
from tests import warm

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r'worker="(.*?)"')


def modules():
    """The worker of the default, of `serve --shape`, and of the tools."""
    found = {name for path in (ROOT / "tools").glob("*.py") for name in NAMED.findall(path.read_text())}
    assert len(found) >= 2
    return sorted(found | {warm.WORKER, "espalier.cli.shape_worker"})


def test_it_takes_what_the_front_gives_and_ends_without_a_front(tmp_path):
    server = warm.server()
    with tempfile.TemporaryFile("w+") as said:
        args = [f"ipc://{tmp_path}/none", "1"]
        started = {name: server.start(name, args, server.environment, said, said) for name in modules()}
        ends = {name: process.wait(60) for name, process in started.items()}
        said.seek(0)
        lines = said.read()
    # A traceback has this status too.
    assert ends == dict.fromkeys(ends, BROKEN), lines
    assert "Traceback" not in lines, lines
