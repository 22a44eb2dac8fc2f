"""Bars of rounds: ms beside the floor, tokens a second beside plain decoding's."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from espalier.errors import EspalierError

FORMATS = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class Bars:
    """One cell.  floor_ms: None where none was measured; plain: tokens/s of plain decoding beside it."""

    name: str
    round_ms: float
    floor_ms: float | None
    tokens_per_second: float
    plain: float | None


def require_plot(path: Path | None) -> None:
    """Check, before anything is measured, that such a picture can be drawn.  Raises EspalierError."""
    if path is None:
        return
    if path.suffix not in FORMATS:
        raise EspalierError(f"--plot {path} is not a kind of picture; name a file that ends in {', '.join(FORMATS)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise EspalierError("--plot needs matplotlib; run `pip install espalier-llm[bench]`") from None


def plot(bars: Sequence[Bars], title: str, path: Path | None) -> None:
    """Write the picture where a path is given.  Raises EspalierError."""
    if path is None:
        return
    # Without pyplot: no display is looked for, no figure outlives the call.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(6.0, 1.2 + 0.9 * len(bars)), 8.0), layout="constrained")
    times, rates = figure.subplots(2, 1, sharex=True)
    _pairs(times, [(each.round_ms, each.floor_ms) for each in bars], "ms a round", ("measured", "floor"))
    _pairs(rates, [(each.tokens_per_second, each.plain) for each in bars], "tokens/s", ("this layout", "plain"))
    rates.set_xticks(range(len(bars)), [each.name for each in bars], rotation=60, ha="right")
    figure.suptitle(title)
    try:
        figure.savefig(path)
    except OSError as error:
        raise EspalierError(f"--plot {path} cannot be written ({error.strerror}); name another file") from None


def _pairs(axes: Any, pairs: Sequence[tuple[float, float | None]], unit: str, labels: tuple[str, str]) -> None:
    for at, (label, colour) in enumerate(zip(labels, ("tab:blue", "tab:gray"), strict=True)):
        there = [(i, pair[at]) for i, pair in enumerate(pairs) if pair[at] is not None]
        if there:
            axes.bar([i + 0.4 * at - 0.2 for i, _ in there], [v for _, v in there], 0.4, label=label, color=colour)
    axes.set_ylabel(unit)
    axes.legend()
