"""Plots lines of servers under load."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from espalier.bench.load import title_of
from espalier.errors import EspalierError, install_command

FORMATS = (".png", ".svg", ".pdf")
COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red")


def require_plot(path: Path | None) -> None:
    """Check, before anything is measured, that the plot can be drawn.  Raises EspalierError."""
    if path is None:
        return
    if path.suffix not in FORMATS:
        raise EspalierError(f"--plot {path} is not a kind of picture; name a file that ends in {', '.join(FORMATS)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise EspalierError(f"--plot needs matplotlib; in the clone, run {install_command('bench')}") from None


@dataclass(frozen=True)
class LoadPoint:
    """A server at one rate of arrivals.  times: percentiles in ms by what they measure; goodput, answered: requests a
    second."""

    server: str
    rate: float
    times: Mapping[str, Mapping[str, float] | None]
    goodput: float
    answered: float


def plot_load(points: Sequence[LoadPoint], limits: Mapping[str, float | None], path: Path | None) -> None:
    """Write the plot if a path is given: p50 and p99 of each time, and requests a second, by rate.

    limits: in ms, by the name of a time.  Raises EspalierError.
    """
    if path is None:
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13.0, 7.5), layout="constrained")
    *times, requests, legend = figure.subplots(2, 3).flat
    for name, axis in zip(points[0].times, times, strict=True):
        axis.set_title(f"{title_of(name)}, ms")
        if limits.get(name) is not None:
            axis.axhline(limits[name], color="tab:gray", linestyle=":")
    requests.set_title("requests/s: within the limits, answered")
    for colour, server in zip(cycle(COLOURS), dict.fromkeys(point.server for point in points), strict=False):
        own = sorted((point for point in points if point.server == server), key=lambda point: point.rate)
        _lines(own, colour, times, requests)
        legend.plot([], [], "o-", color=colour, label=f"{server}: p50, within the limits")
        legend.plot([], [], "^--", color=colour, label=f"{server}: p99, answered")
    legend.axis("off")
    legend.legend(loc="center")
    for axis in (*times, requests):
        axis.set_xlabel("arrivals a second")
        axis.set_ylim(bottom=0)
    save(figure, path)


def _lines(own: Sequence[LoadPoint], colour: str, times: Sequence[Any], requests: Any) -> None:
    """One server's lines.  A rate at which nothing was answered has no times."""
    for i, axis in enumerate(times):
        for percentile, style in (("p50", "o-"), ("p99", "^--")):
            known = [(point.rate, found[percentile]) for point in own if (found := list(point.times.values())[i])]
            axis.plot([rate for rate, _ in known], [ms for _, ms in known], style, color=colour)
    rates = [point.rate for point in own]
    requests.plot(rates, [point.goodput for point in own], "o-", color=colour)
    requests.plot(rates, [point.answered for point in own], "^--", color=colour)


def save(figure: Any, path: Path) -> None:
    """Raises EspalierError."""
    try:
        figure.savefig(path)
    except OSError as error:
        raise EspalierError(f"--plot {path} cannot be written ({error.strerror}); name another file") from None
