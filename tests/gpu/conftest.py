"""Figures of the GPU tests, printed at the end of a run."""

from collections import Counter
from typing import Any

import torch

from tests.properties.summary import recorded, spelled, table, total

FIGURES, NEAR_TIES, PROFILE = "gpu_figures", "gpu_near_ties", "gpu_profile"
BATCHES, EQUALITIES = "gpu_batches", "gpu_equalities"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not torch.cuda.is_available():
        return
    compared = recorded(terminalreporter, NEAR_TIES)
    figures = [
        *count_lines(terminalreporter.stats.get("passed", [])),
        *recorded(terminalreporter, FIGURES),
        *batch_lines(recorded(terminalreporter, BATCHES)),
        *equality_lines(recorded(terminalreporter, EQUALITIES)),
    ]
    if figures:
        terminalreporter.section(f"on {torch.cuda.get_device_name()}, torch {torch.__version__}")
    for line in figures:
        terminalreporter.write_line(line)
    if compared:
        terminalreporter.section("first differences, under teacher forcing")
        for line in near_tie_lines(compared):
            terminalreporter.write_line(line)
    for lines in recorded(terminalreporter, PROFILE):
        terminalreporter.section("profiler")
        for line in lines:
            terminalreporter.write_line(line)


def count_lines(passed: list[Any]) -> list[str]:
    """Tests that have the marker, or stand in this folder, by file."""
    files = Counter(report.nodeid.split("::")[0] for report in passed if "gpu" in report.keywords)
    return [f"{count} passed in {file}" for file, count in sorted(files.items())]


def batch_lines(runs: list[dict[str, Any]]) -> list[str]:
    return [f"rounds that equal eager bit for bit, by batch: {spelled(total(runs, 'replayed'))}"] if runs else []


def equality_lines(runs: list[dict[str, Any]]) -> list[str]:
    lines = []
    for name in sorted({run["name"] for run in runs}):
        group = [run for run in runs if run["name"] == name]
        lengths = total(group, "lengths")
        rounds, tokens = lengths.total(), sum(length * count for length, count in lengths.items())
        lines.append(
            f"the three equalities, {name}: {len(group)} layouts, {sum(run['launches'] for run in group)} launches, "
            f"{rounds} rounds of a request, mean accept length {tokens / max(rounds, 1):.2f}"
        )
    return lines


def near_tie_lines(compared: list[dict[str, Any]]) -> list[str]:
    lines = [
        f"{run['name']}: {run['requests']} requests, {run['tokens']} tokens, {len(run['ties'])} first differences, "
        f"{sum(tie[-1] != 'near-tie' for tie in run['ties'])} unexplained{largest_gap(run['ties'])}"
        for run in compared
    ]
    rows = [(run["name"], *tie) for run in compared for tie in run["ties"]]
    header = ("run", "request", "position", "one", "other", "gap", "bound", "")
    return [*lines, *(table([header, *rows]) if rows else ())]


def largest_gap(ties: list[list[str]]) -> str:
    return f", gaps up to {max(float(tie[4]) / float(tie[5]) for tie in ties):.2g} of the bound" if ties else ""
