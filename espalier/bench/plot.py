"""Plots: bars of rounds beside the roofline and plain decoding, and lines of servers under load."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from espalier.bench.load import title_of
from espalier.errors import EspalierError

FORMATS = (".png", ".svg", ".pdf")
COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red")


@dataclass(frozen=True)
class Bars:
    """One cell.  roofline_ms: None if it was not measured; plain: tokens/s of plain decoding."""

    name: str
    round_ms: float
    roofline_ms: float | None
    tokens_per_second: float
    plain: float | None


def require_plot(path: Path | None) -> None:
    """Check, before anything is measured, that the plot can be drawn.  Raises EspalierError."""
    if path is None:
        return
    if path.suffix not in FORMATS:
        raise EspalierError(f"--plot {path} is not a kind of picture; name a file that ends in {', '.join(FORMATS)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise EspalierError("--plot needs matplotlib; run `pip install espalier-llm[bench]`") from None


def plot(bars: Sequence[Bars], title: str, path: Path | None) -> None:
    """Write the plot if a path is given.  Raises EspalierError."""
    if path is None:
        return
    # pyplot would look for a display and keep the figure.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(6.0, 1.2 + 0.9 * len(bars)), 8.0), layout="constrained")
    times, rates = figure.subplots(2, 1, sharex=True)
    _pairs(times, [(each.round_ms, each.roofline_ms) for each in bars], "ms a round", ("measured", "floor"))
    _pairs(rates, [(each.tokens_per_second, each.plain) for each in bars], "tokens/s", ("this layout", "plain"))
    rates.set_xticks(range(len(bars)), [each.name for each in bars], rotation=60, ha="right")
    figure.suptitle(title)
    _save(figure, path)


def _pairs(axes: Any, pairs: Sequence[tuple[float, float | None]], unit: str, labels: tuple[str, str]) -> None:
    """Two bars for each pair; None is left out."""
    for side, (label, colour) in enumerate(zip(labels, ("tab:blue", "tab:gray"), strict=True)):
        values = [(i, pair[side]) for i, pair in enumerate(pairs) if pair[side] is not None]
        if values:
            axes.bar([i + 0.4 * side - 0.2 for i, _ in values], [v for _, v in values], 0.4, label=label, color=colour)
    axes.set_ylabel(unit)
    axes.legend()


@dataclass(frozen=True)
class LoadPoint:
    """A server at one rate of arrivals.  times: percentiles in ms by what they measure; goodput, answered: requests a
    second."""

    server: str
    rate: float
    times: Mapping[str, Mapping[str, float] | None]
    goodput: float
    answered: float


def plot_load(points: Sequence[LoadPoint], path: Path | None) -> None:
    """Write the plot if a path is given: p50 and p99 of each time, and the goodput, by rate.  Raises EspalierError."""
    if path is None:
        return
    from matplotlib.figure import Figure

    names = list(points[0].times)
    figure = Figure(figsize=(5.0 * (len(names) + 1), 4.5), layout="constrained")
    axes = figure.subplots(1, len(names) + 1)
    for colour, server in zip(cycle(COLOURS), dict.fromkeys(point.server for point in points), strict=False):
        own = sorted((point for point in points if point.server == server), key=lambda point: point.rate)
        for axis, name in zip(axes, names, strict=False):
            for percentile, style in (("p50", "o-"), ("p99", "^--")):
                known = [(point.rate, times[percentile]) for point in own if (times := point.times[name])]
                if known:
                    axis.plot(*zip(*known, strict=True), style, color=colour, label=f"{server}, {percentile}")
            axis.set_title(f"{title_of(name)}, ms")
        rates = [point.rate for point in own]
        axes[-1].plot(rates, [point.goodput for point in own], "o-", color=colour, label=f"{server}, within the limits")
        axes[-1].plot(rates, [point.answered for point in own], "^--", color=colour, label=f"{server}, answered")
    axes[-1].set_title("requests/s")
    for axis in axes:
        axis.set_xlabel("arrivals a second")
        axis.set_ylim(bottom=0)
        axis.legend(fontsize="small")
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path)
    except OSError as error:
        raise EspalierError(f"--plot {path} cannot be written ({error.strerror}); name another file") from None
