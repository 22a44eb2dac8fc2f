"""Plots bars of rounds beside the floor and plain decoding."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from espalier.bench.report import save_plot


@dataclass(frozen=True)
class Bars:
    """The figures of one cell.  floor_ms, plain_tokens_per_second (of plain decoding): None if not measured."""

    name: str
    round_ms: float
    floor_ms: float | None
    tokens_per_second: float
    plain_tokens_per_second: float | None


def plot_bars(bars: Sequence[Bars], title: str, path: Path | None) -> None:
    """Write the plot if a path is given.  Raises EspalierError."""
    if path is None:
        return
    # pyplot would look for a display and keep the figure.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(6.0, 1.2 + 0.9 * len(bars)), 8.0), layout="constrained")
    times, rates = figure.subplots(2, 1, sharex=True)
    _plot_pairs(times, [(each.round_ms, each.floor_ms) for each in bars], "ms a round", ("measured", "floor"))
    rate_pairs = [(each.tokens_per_second, each.plain_tokens_per_second) for each in bars]
    _plot_pairs(rates, rate_pairs, "tokens/s", ("this layout", "plain"))
    rates.set_xticks(range(len(bars)), [each.name for each in bars], rotation=60, ha="right")
    figure.suptitle(title)
    save_plot(figure, path)


def _plot_pairs(axes: Any, pairs: Sequence[tuple[float, float | None]], unit: str, labels: tuple[str, str]) -> None:
    """Two bars for each pair; None is left out."""
    for side, (label, colour) in enumerate(zip(labels, ("tab:blue", "tab:gray"), strict=True)):
        values = [(i, pair[side]) for i, pair in enumerate(pairs) if pair[side] is not None]
        if values:
            axes.bar([i + 0.4 * side - 0.2 for i, _ in values], [v for _, v in values], 0.4, label=label, color=colour)
    axes.set_ylabel(unit)
    axes.legend()
