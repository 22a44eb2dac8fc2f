"""The pages say what is there: every file, function, test, fault, link and command that they name is resolved."""

import ast
import re
import shlex
import tomllib
from dataclasses import fields
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest

from espalier.attention import BACKENDS
from espalier.cli.main import parse
from espalier.models.config import NEUTRAL_VALUES, Family
from espalier.models.stored_names import Experts
from lab.__main__ import make_parser as make_lab
from lab.faults.command import COMMANDS
from lab.faults.planted import FAULTS, find_fault
from scripts.make_support import PAGE, render
from tests.architecture.test_imports import FLOORS, MAX_FILE_LINES, MAX_FUNCTION_LINES

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
FENCE = re.compile(r"^```.*?^```$", re.M | re.S)
SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
PATH = r"(?:espalier|lab|tests|scripts|docs|\.ci)/[\w./-]*"
REFERENCE = re.compile(rf"({PATH}?)(?:::?([A-Za-z_][\w.:]*))?")
ESPALIER = re.compile(r"^(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?espalier (.+)$", re.M)
LAB = re.compile(r"^(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?python -m lab (.+)$", re.M)
EXTRAS = re.compile(r"""['"]\.\[([\w,]+)\]['"]""")
MAKE = re.compile(r"^make (?:[A-Z_]+=\S+ )*([a-z][a-z-]*)", re.M)

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def test_ci_runs_the_tests_of_the_laboratory_and_of_the_package_once():
    makes = re.findall(r"make --no-print-directory ([a-z-]+)", (ROOT / ".ci" / "run").read_text())
    assert makes == ["lint", "types", "test-lab", "test"], "the summary of `make test` is the last thing printed"
    rules = dict(re.findall(r"^([a-z-]+):.*\n\t@(.*)$", (ROOT / "Makefile").read_text(), re.M))
    runs = re.fullmatch(r"\$\(PYTEST\) (\S+) \$\(PYTEST_ARGS\)", rules["test-lab"])
    assert runs and rules["test"] == f"$(PYTEST) --ignore={runs[1]} $(PYTEST_ARGS)"
    assert list((ROOT / runs[1]).rglob("test_*.py"))


def spans(page: Path) -> list[str]:
    return SPAN.findall(FENCE.sub("", page.read_text(encoding="utf-8")))


def commands(page: Path) -> str:
    """Every code block and every code span, one a line."""
    text = page.read_text(encoding="utf-8")
    return "\n".join([line.strip() for block in FENCE.findall(text) for line in block.splitlines()] + spans(page))


@cache
def names(path: Path) -> frozenset[str]:
    """Qualified names that a module defines: functions, classes, methods, assigned names and fields."""
    found = set()

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(prefix + node.name)
                visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found.update(prefix + t.id for t in targets if isinstance(t, ast.Name))

    visit(ast.parse(path.read_text(encoding="utf-8")).body, "")
    return frozenset(found)


def anchors(page: Path) -> set[str]:
    """Headings of a page as code forges spell their anchors."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def unresolved(reference: str) -> str | None:
    """Why a reference `path`, `path:Qualified.name` or `tests/path.py::test_name` names nothing, or None."""
    match = REFERENCE.fullmatch(reference)
    if match is None:
        return "is not written as path, path:name or path::test"
    path, name = match.groups()
    if not (ROOT / path).exists():
        return "names no file"
    if name and name.replace("::", ".") not in names(ROOT / path):
        return f"names nothing in {path}"
    return None


def references(page: Path) -> list[str]:
    return [span for span in spans(page) if re.match(PATH, span)]


@pages
def test_files_functions_and_tests_exist(page: Path):
    assert {r: why for r in references(page) if (why := unresolved(r))} == {}


@pages
def test_links_resolve(page: Path):
    broken = []
    for link in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if link.startswith(("https://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@pages
def test_make_targets_exist(page: Path):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(MAKE.findall(commands(page))) - targets == set()


def test_extras_that_are_named_exist_and_the_package_is_installed_from_a_clone():
    """In pages, messages and images: the package is on no index."""
    known = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    images = [path for folder in ("docker", "deploy") for path in (ROOT / folder).iterdir()]
    sources = [path for folder in ("espalier", "lab", "scripts") for path in (ROOT / folder).rglob("*.py")]
    named = set()
    for path in [*PAGES, *images, *sources]:
        text = path.read_text(encoding="utf-8")
        assert f"{known['name']}[" not in text, path
        named |= set(",".join(EXTRAS.findall(text)).split(","))
        named |= set(re.findall(r"""install_command\(['"](\w+)""", text))
    named |= {kind.support.library.pip_extra for kind in BACKENDS.values() if kind.support.library is not None}
    assert {"ray", "bench", "fa3"} <= named <= {*known["optional-dependencies"], ""}


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "log.md"], ids=lambda page: page.name)
def test_commands_parse(page: Path):
    """Those of the log are of their day."""
    for command in ESPALIER.findall(commands(page)):
        assert parse(shlex.split(command, comments=True)).run, command
    for command in LAB.findall(commands(page)):
        asked = make_lab().parse(shlex.split(command, comments=True))
        if asked.command == "fault":
            assert find_fault(asked.fault) and parse(asked.planted).command in COMMANDS, command


def test_the_picture_of_the_demo_is_whole_and_fetches_nothing():
    svg = (ROOT / "docs" / "demo.svg").read_text(encoding="utf-8")
    shown = "".join(ElementTree.fromstring(svg).itertext()).replace("\xa0", " ")
    for said in ("$ espalier demo", "prompt 1 of 1", "identical:", "one round", "tokens/s", "try next"):
        assert said in shown
    assert re.findall(r"\w+://[^\"')]+", svg) == ["http://www.w3.org/2000/svg"]


def test_python_blocks_of_the_readme_are_python():
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    assert [ast.parse(block) for block in blocks]


def test_every_fault_stands_on_the_page_of_reports_under_those_it_answers_to():
    sections = re.split(r"^## ", (ROOT / "docs" / "seeds.md").read_text(encoding="utf-8"), flags=re.M)[1:]
    named, by_report = set(), set()
    for section in sections:
        faults = set(re.findall(r"`fault:([\w-]+)`", section))
        named |= faults
        by_report |= {
            (fault, number) for fault in faults for number in re.findall(r"\d{5}", section.partition("\n")[0])
        }
    assert named == set(FAULTS)
    assert {(fault.name, number) for fault in FAULTS.values() for number in fault.reports} <= by_report


def test_the_design_lists_packages_in_the_order_that_imports_keep():
    """Section 8: the table's rows from above are the floors from below, and the limits are those that are checked."""
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    section = re.split(r"^## ", page, flags=re.M)[8]
    rows = [set(re.findall(r"`(\w+)`", cell)) for cell in re.findall(r"^\| (`[^|]*) \|", section, re.M)]
    public = {"", "__main__"}
    assert rows == [set(floor) for floor in reversed(FLOORS) if not public & set(floor)]
    assert f"at most {MAX_FILE_LINES} lines, a function at most {MAX_FUNCTION_LINES}" in " ".join(section.split())


def test_the_table_of_a_familys_fields_names_fields():
    page = (ROOT / "docs" / "development.md").read_text(encoding="utf-8")
    table = page.partition("| what | field of `Family` | example |\n")[2].partition("\n\n")[0]
    cells = " ".join(row.split(" | ")[1] for row in table.splitlines()[1:])
    known = {each.name for each in fields(Family)} | {f"Experts.{each.name}" for each in fields(Experts)}
    named = set(re.findall(r"`([A-Za-z_][\w.]*)`", cells))
    assert "experts" in named and named - known - {*NEUTRAL_VALUES, "head_dim", "layer_types"} == set()


def test_support_is_what_the_code_declares():
    assert PAGE.read_text(encoding="utf-8") == render(), "run: python scripts/make_support.py"


@pytest.mark.parametrize(
    "reference",
    [
        "espalier/nowhere.py",
        "espalier/layout.py:RoundLayout.nothing",
        "tests/test_docs.py::test_nothing",
        "docs/a b",
    ],
)
def test_a_wrong_reference_is_found(reference: str):
    assert unresolved(reference)


def test_right_references_are_not():
    for right in (
        "espalier/layout.py",
        "espalier/layout.py:RoundLayout.tree",
        "tests/test_docs.py::test_links_resolve",
    ):
        assert unresolved(right) is None
