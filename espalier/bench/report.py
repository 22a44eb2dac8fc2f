"""Writes the report of a load: command line, Markdown tables, the table of categories, and plots."""

import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from espalier.bench.load import LATENCY_TIMES, time_title
from espalier.errors import EspalierError, install_command
from espalier.terminal.console import machine_line

CATEGORY_COLUMNS = ("requests", "tokens out", "accept length", "ms a round", "tokens/s of a request")
KEY_FLAG = "--api-key"
PLOT_SUFFIXES = (".png", ".svg", ".pdf")
PLOT_COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red")


def command_line() -> str:
    """Returns the command line of this process, without the value of --api-key."""
    words = [word if not word.startswith(f"{KEY_FLAG}=") else f"{KEY_FLAG}=..." for word in sys.argv[1:]]
    pairs = zip(["", *words], words, strict=False)
    shown_words = ["..." if previous == KEY_FLAG else word for previous, word in pairs]
    return shlex.join(["espalier", *shown_words])


def json_value(value: Any) -> Any:
    """Returns a flag's value as a JSON value."""
    return str(value) if isinstance(value, Path) else value


def category_table(title: str, categories: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Returns the rows of a table with the figures of each category.  categories: from load.py:figures_by_category."""
    waits = [f"{name}, p50 / p99 ms" for name in ("ttft", "between pieces")]
    rows = [[title, *CATEGORY_COLUMNS, *waits]]
    for name, values in categories.items():
        numbers = (values["accept_length"], values["step_ms"], values["tokens_per_second"])
        cells = ["-" if number is None else f"{number:.2f}" for number in numbers]
        times = [values[key] and f"{values[key]['p50']:.1f} / {values[key]['p99']:.1f}" for key in CATEGORY_LATENCIES]
        counts = (str(values["requests"]), str(values["tokens_out"]))
        rows.append([name or "-", *counts, *cells, *(t or "-" for t in times)])
    return rows


CATEGORY_LATENCIES = ("ttft_ms", "between_pieces_ms")


def latency_rows(figures: Iterable[Mapping[str, Any]]) -> list[list[str]]:
    """Returns a table row for each latency in LATENCY_TIMES.  figures: for each column, {latency: percentiles}."""
    columns = list(figures)
    return [
        [
            f"{time_title(name)}, p50 / p90 / p99 ms",
            *(" / ".join(f"{ms:.1f}" for ms in (column[name] or {}).values()) or "-" for column in columns),
        ]
        for name in LATENCY_TIMES
    ]


def write_markdown(path: Path | None, tables: Sequence[Sequence[Sequence[str]]]) -> None:
    """Write the command line, the machine and the tables to `path`, if it is given.  Raises EspalierError."""
    if path is None:
        return
    blocks = [f"`{command_line()}`", machine_line()]
    for first, *rows in tables:
        lines = [first, ["---"] * len(first), *rows]
        blocks.append("\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines))
    try:
        path.write_text("\n\n".join(blocks) + "\n", encoding="utf-8")
    except OSError as error:
        raise EspalierError(f"--markdown {path} cannot be written ({error.strerror}); use another file") from None


def check_plot_path(path: Path | None) -> None:
    """Check before the measurements that the plot can be drawn and saved.  Raises EspalierError."""
    if path is None:
        return
    if path.suffix not in PLOT_SUFFIXES:
        suffixes = ", ".join(PLOT_SUFFIXES)
        raise EspalierError(f"--plot {path} is not a kind of picture; name a file that ends in {suffixes}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise EspalierError(f"--plot needs matplotlib; in the clone, run {install_command('bench')}") from None


@dataclass(frozen=True)
class LoadPoint:
    """The figures of a server at one rate of arrivals.  latencies: percentiles in ms, by the names in LATENCY_TIMES.
    answered_per_second: all answered requests.  goodput_per_second: answered requests within the limits."""

    server: str
    rate: float
    latencies: Mapping[str, Mapping[str, float] | None]
    goodput_per_second: float
    answered_per_second: float


def plot_load(points: Sequence[LoadPoint], limits: Mapping[str, float | None], path: Path | None) -> None:
    """Plots p50 and p99 of each latency, and requests a second, over the rate.  path: the file; None for no plot.
    limits: in ms, by the names in LATENCY_TIMES.  Raises EspalierError."""
    if path is None:
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13.0, 7.5), layout="constrained")
    *times, requests, legend = figure.subplots(2, 3).flat
    for name, axis in zip(points[0].latencies, times, strict=True):
        axis.set_title(f"{time_title(name)}, ms")
        if limits.get(name) is not None:
            axis.axhline(limits[name], color="tab:gray", linestyle=":")
    requests.set_title("requests/s: within the limits, answered")
    for colour, server in zip(cycle(PLOT_COLOURS), dict.fromkeys(point.server for point in points), strict=False):
        server_points = sorted((point for point in points if point.server == server), key=lambda point: point.rate)
        _plot_lines(server_points, colour, times, requests)
        legend.plot([], [], "o-", color=colour, label=f"{server}: p50, within the limits")
        legend.plot([], [], "^--", color=colour, label=f"{server}: p99, answered")
    legend.axis("off")
    legend.legend(loc="center")
    for axis in (*times, requests):
        axis.set_xlabel("arrivals a second")
        axis.set_ylim(bottom=0)
    save_plot(figure, path)


def _plot_lines(points: Sequence[LoadPoint], colour: str, latency_axes: Sequence[Any], request_axis: Any) -> None:
    """Plots one server's lines.  At a rate without answered requests, there are no latencies to plot."""
    for i, axis in enumerate(latency_axes):
        for percentile, style in (("p50", "o-"), ("p99", "^--")):
            latencies = [(point.rate, list(point.latencies.values())[i]) for point in points]
            measured = [(rate, latency[percentile]) for rate, latency in latencies if latency]
            axis.plot([rate for rate, _ in measured], [ms for _, ms in measured], style, color=colour)
    rates = [point.rate for point in points]
    request_axis.plot(rates, [point.goodput_per_second for point in points], "o-", color=colour)
    request_axis.plot(rates, [point.answered_per_second for point in points], "^--", color=colour)


def save_plot(figure: Any, path: Path) -> None:
    """Save a figure.  Raises EspalierError if the file cannot be written."""
    try:
        figure.savefig(path)
    except OSError as error:
        raise EspalierError(f"--plot {path} cannot be written ({error.strerror}); name another file") from None
