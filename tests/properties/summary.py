"""The figures of the properties, printed at the end of a run: cases, refused cells, accept length, coverage, requests
of schemathesis, planted faults.

A pytest plugin (named in tests/conftest.py): what tests put on record with `record_property` travels in their reports,
from a worker process too."""

from collections import Counter
from typing import Any

import pytest

CELL, REFUSED, COVERAGE, FAULT = "espalier_cell", "espalier_refused", "espalier_coverage", "espalier_fault"
ASKED = "espalier_asked"


def recorded(reporter: Any, name: str) -> list[Any]:
    """Values on record under a name, of tests that passed, in the order of tests' names."""
    passed = sorted(reporter.stats.get("passed", []), key=lambda report: report.nodeid)
    return [value for report in passed for key, value in report.user_properties if key == name]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    cells, refused = recorded(terminalreporter, CELL), recorded(terminalreporter, REFUSED)
    faults = recorded(terminalreporter, FAULT)
    if cells or refused:
        terminalreporter.section("layouts")
        for line in layout_lines(cells, recorded(terminalreporter, COVERAGE), len(refused)):
            terminalreporter.write_line(line)
    asked = recorded(terminalreporter, ASKED)
    if asked:
        failed = sum("schemathesis" in report.nodeid for report in terminalreporter.stats.get("failed", []))
        terminalreporter.section("schemathesis")
        terminalreporter.write_line(
            f"{sum(asked)} requests to {len(asked)} operations; operations that failed: {failed}"
        )
    if faults:
        terminalreporter.section("planted faults")
        for line in table([("fault", "report", "caught by"), *map(tuple, faults)]):
            terminalreporter.write_line(line)


def layout_lines(cells: list[dict[str, Any]], extra: list[dict[str, Any]], refused: int) -> list[str]:
    """extra: coverage of runs that are no cells."""
    lengths, depths, ranks = (total([*cells, *extra], name) for name in ("lengths", "depths", "ranks"))
    rounds = sum(lengths.values())
    mean = sum(length * count for length, count in lengths.items()) / max(rounds, 1)
    excess = max((cell["excess"] for cell in cells), default=0)
    return [
        f"{len(cells)} cells held every property, {refused} refused by the layout; {rounds} rounds of a request",
        f"mean accept length {mean:.2f}; largest excess of pages held over max_tokens_ahead: {excess}",
        f"accepted by depth: {spelled(depths)}",
        f"accepted by rank among siblings: {spelled(ranks)}",
    ]


def total(runs: list[dict[str, Any]], name: str) -> Counter[int]:
    counts: Counter[int] = Counter()
    for run in runs:
        counts.update({int(key): count for key, count in run[name].items()})
    return counts


def spelled(counts: Counter[int]) -> str:
    return ", ".join(f"{key}: {count}" for key, count in sorted(counts.items())) or "none"


def table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


@pytest.fixture
def put_on_record(record_property):
    """put_on_record(name, value) for the summary; value: what JSON takes."""
    return record_property
