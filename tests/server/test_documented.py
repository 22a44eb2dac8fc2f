"""What the pages tell a reader to type: each command runs here as it stands, or has the reason why it does not.

tests/test_docs.py requires that every command parses and that what it names is there.  Names that stand for a reader's
own (STANDS_FOR) are replaced by a tiny model's, and a server's address by that of the server of these tests."""

import json
import re
import runpy
import shlex
import shutil
import sys
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from espalier.cli.main import main
from tests.server.serving import Served
from tests.server.test_pages import run_curl
from tests.test_docs import PAGES, ROOT, commands
from tests.worded import worded

# The log is history: its commands ran at the commits that it names.
READ = [page for page in PAGES if page.name != "log.md"]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
PROGRAMS = (
    "espalier python pytest make ruff mypy pip curl docker serve ray sudo systemctl journalctl git compute-sanitizer"
)
TYPED = re.compile(rf"(?:[A-Z_]+=\S+ )*(?:[\w./-]+/bin/)?((?:{'|'.join(PROGRAMS.split())}) .+)")
TOOL = re.compile(r"python -m scripts\.(\w+)")
ADDRESS = "http://127.0.0.1:8000"


class Why(Enum):
    """The reason why a command does not run in these tests."""

    GPU = "needs a GPU"
    NETWORK = "downloads, or makes an environment"
    RAY = "needs the extra ray, and most of it a cluster"
    MINUTES = "takes minutes on a CPU; its parts have tests of their own"
    TESTS = "runs tests"
    SYSTEM = "changes the machine, or reads its journal"
    ELSEWHERE = "a test of its own runs it"
    CHECKOUT = "writes into the checkout; a test compares what it would write"


# The first pattern that a command begins with decides.
NOT_RUN = {
    r"(espalier|python -m lab) \w+.* --device cuda": Why.GPU,
    r"python -m lab (?!foundry)\w+.* --shape": Why.GPU,
    r"python -m lab (kernels|attention|linears|loading|floor)": Why.GPU,
    r"espalier doctor --tune": Why.GPU,
    r"(python scripts/(gpu_runs|round_plans)|compute-sanitizer|make test-gpu)": Why.GPU,
    r"(python -m )?pytest": Why.TESTS,
    r"make ": Why.NETWORK,
    r"(pip|python -m venv|docker|git) ": Why.NETWORK,
    r"(ruff|mypy) ": Why.TESTS,
    r"(serve|ray) |python scripts/ray_shows|espalier serve .*--replicas": Why.RAY,
    r"(sudo|systemctl|journalctl) ": Why.SYSTEM,
    r"espalier bench |python -m lab (?!fault)": Why.MINUTES,
    r"espalier train\b|python -m lab\.chat\.prompts|python scripts/compare_drafts": Why.MINUTES,
    r"python scripts/(step_cost|front_cost|serve_timeline|make_demo_picture)\.py": Why.MINUTES,
    r"espalier demo|python scripts/any_model": Why.ELSEWHERE,
    r"espalier serve --model model\.gguf|espalier serve model\.gguf": Why.ELSEWHERE,
    r"python scripts/clients\.py": Why.NETWORK,
    r"python scripts/make_(support|server_fields)\.py": Why.CHECKOUT,
}
# Seconds each, by a process of its own or a comparison: `make test-full` runs them.
SLOW = re.compile(r"espalier (quantize|batch (?!.*--url))|python -m lab fault|python scripts/lines")
TARGET, DRAFT = "model", str(worded()[1])
STANDS_FOR = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": TARGET,
    "path/to/model": TARGET,
    "path/or/id": TARGET,
    "path/to/eagle3-head": DRAFT,
    "path/to/draft": DRAFT,
    "MODEL": TARGET,
    "DIR": "folder",
    ADDRESS: "ADDRESS",
}
TREES = '{"8": {"steps": 3, "topk": 2, "num_draft_tokens": 8}}'


def typed(page: Path) -> list[str]:
    """The commands of a page, each once, without its environment and the folder of its program.  A tool is its file."""
    found = (TYPED.fullmatch(line.strip()) for line in commands(page).splitlines())
    return list(dict.fromkeys(TOOL.sub(r"python scripts/\1.py", match[1]) for match in found if match))


def why_not(command: str) -> Why | None:
    return next((why for begin, why in NOT_RUN.items() if re.match(begin, command)), None)


ALL = list(dict.fromkeys(command for page in READ for command in typed(page)))
RUN = [command for command in ALL if why_not(command) is None]


def replaced(words: list[str], served: Served) -> list[str]:
    own = {**STANDS_FOR, ADDRESS: served.base}
    return [own.get(word, word.replace(ADDRESS, served.base)) for word in words]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The working directory of a reader who has done what the page says before."""
    monkeypatch.chdir(tmp_path)
    [line] = [
        line for line in (ROOT / "docs" / "server.md").read_text().splitlines() if line.startswith('{"custom_id"')
    ]
    (tmp_path / "in.jsonl").write_text(f"{line}\n")
    (tmp_path / "trees.json").write_text(TREES)
    shutil.copytree(worded()[0], tmp_path / TARGET)
    # A random model would not end its answer before the context does.
    path = tmp_path / TARGET / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_new_tokens": 16}))
    return tmp_path


@pytest.fixture
def served_with(monkeypatch) -> list[Any]:
    """What would be served: a server runs until it is ended, so none is started."""
    asked: list[Any] = []

    async def serve(settings: Any, options: Any) -> bool:
        asked.append((settings, options))
        return True

    monkeypatch.setattr("espalier.server.run.serve", serve)
    # Its handlers would outlive this test.
    monkeypatch.setattr("espalier.server.logs.set_up_logging", lambda *_: None)
    return asked


@pytest.mark.parametrize(
    "command", [pytest.param(each, marks=pytest.mark.full if SLOW.match(each) else ()) for each in RUN]
)
def test_a_documented_command_runs(command, served, folder, served_with, monkeypatch, capsys):
    program, *words = replaced(shlex.split(command, comments=True), served)
    if program == "curl":
        assert run_curl(served, shlex.join([program, *words]))[0] == 200
        return
    if program == "python":
        monkeypatch.syspath_prepend(str(ROOT))
        if words[0] == "-m":
            monkeypatch.setattr(sys, "argv", words[1:])
            with pytest.raises(SystemExit) as left:
                runpy.run_module(words[1], run_name="__main__", alter_sys=True)
            assert not left.value.code
            return
        monkeypatch.setattr(sys, "argv", [str(ROOT / words[0]), *words[1:]])
        runpy.run_path(str(ROOT / words[0]), run_name="__main__")
        assert capsys.readouterr().out
        return
    assert main(words) == 0, capsys.readouterr().err
    assert bool(served_with) == (words[0] == "serve")


@pytest.mark.parametrize("command", [command for command in ALL if command.startswith("python scripts/")])
def test_a_tool_has_the_flags_that_pages_name(command):
    """Those of `espalier` and of its trainer are parsed in tests/test_docs.py."""
    _, *words = shlex.split(command)
    text = (ROOT / words[0]).read_text()
    assert [word for word in words if word.startswith("--") and f'"{word}"' not in text] == []


def test_every_reason_is_needed_and_every_line_of_a_block_is_a_command():
    reasons = [next(begin for begin in NOT_RUN if re.match(begin, each)) for each in ALL if why_not(each)]
    assert set(reasons) == set(NOT_RUN)
    shown = [
        line
        for page in READ
        for language, block in FENCE.findall(page.read_text(encoding="utf-8"))
        for line in block.splitlines()
        if not language and not line.startswith(("{", "#"))
    ]
    assert [line for line in shown if TYPED.fullmatch(line.strip()) is None] == []


def blocks(page: str) -> list[str]:
    """The page's Python, but what waits for a batch: tests/server/test_batches.py does."""
    found = FENCE.findall((ROOT / page).read_text(encoding="utf-8"))
    return [block for language, block in found if language == "python" and "client.batches" not in block]


@pytest.mark.parametrize("page", ["README.md", "docs/server.md"])
def test_the_pages_python_runs(page, served, folder, capsys):
    names: dict[str, Any] = {}
    for block in blocks(page):
        for name, own in {**STANDS_FOR, ADDRESS: served.base}.items():
            block = block.replace(f'"{name}', f'"{own}')
        exec(compile(block, page, "exec"), names)
        assert capsys.readouterr().out or "print" not in block
    names["llm"].close()
