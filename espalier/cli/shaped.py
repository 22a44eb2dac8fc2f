"""`espalier bench round --shape`: rounds of a named shape on a GPU, cell by cell, beside floor and plain decoding."""

import json
from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.text import Text

from espalier.bench.cells import EXAMPLES, parse_cells, with_plain
from espalier.bench.floor import FloorBench
from espalier.bench.linears import shape_named
from espalier.bench.machine import require_gpu
from espalier.bench.plot import Bars, plot
from espalier.bench.shaped import ROUNDS, Measured, Settings, measure, plain_beside
from espalier.bench.synthetic_models import SyntheticModels
from espalier.cli.console import QUIET, aligned, progress, stdout, write_json
from espalier.cli.flags import flag_of, given_flags
from espalier.errors import EspalierError
from espalier.synthetic.checkpoint import Recipe
from espalier.synthetic.shapes import SHAPES, find_shape

# Where the draft's skill is chosen.
TREE = (5, 8, 64)
ACCEPT_LENGTH = 4.0
HONOURED = ("page_size", "attention", "overlap", "chunk_size", "seed")
CELLS = ["1x1024:5,8,64"]


def add(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("a named shape on a GPU, its weights made from --seed, instead of a model")
    group.add_argument("--shape", metavar="NAME", help=f"one of {', '.join(SHAPES)}")
    group.add_argument("--cells", nargs="+", metavar="CELL", help=f"such as {EXAMPLES}; plain decoding is added")
    group.add_argument("--figures", type=Path, metavar="FILE", help="measure nothing: draw what --json wrote before")
    group.add_argument("--rounds", type=int, metavar="N", help=f"full-batch rounds that count ({ROUNDS})")
    group.add_argument("--all-buckets", action="store_true", help="capture the rounds of every batch, not a cell's own")


def run(asked: Namespace, settings: dict[str, Any], page_sizes: list[int]) -> None:
    refused = [flag_of(name) for name in given_flags(asked) if name not in HONOURED]
    if refused:
        raise EspalierError(f"{refused[0]} is not for --shape: cells say batch, context and tree; leave it out")
    device = require_gpu("bench round --shape")
    rounds = ROUNDS if asked.rounds is None else asked.rounds
    if rounds < 2:
        raise EspalierError(f"--rounds={rounds} is not supported; use 2 or more")
    cells = with_plain(parse_cells(asked.cells or CELLS, page_sizes))
    how = {name: settings[name] for name in ("attention", "overlap", "chunk_size") if name in settings}
    each = Settings(rounds=rounds, all_buckets=asked.all_buckets, **how)
    rows = max(cell.layout(each.chunk_size, rounds).position_rows for cell in cells)
    cast = make_cast(asked.shape, settings.get("seed", 0), asked.accept_length, device, rows)
    stdout().print(Text(told(cast), QUIET))
    floors = FloorBench(shape_named(asked.shape)) if device.type == "cuda" else None
    found: list[Measured] = []
    figures: dict[str, Any] = {}
    try:
        with progress("measuring", len(cells)) as advance:
            for measured in measure(cast, cells, each, floors):
                found.append(measured)
                ceilings = asdict(measured.ceilings) if measured.ceilings else None
                figures = {**cast.about, "settings": asdict(each), "ceilings": ceilings, "cells": as_dicts(found)}
                # What is measured is kept, whatever becomes of the cells to come.
                write_json(asked.json, figures)
                advance()
    finally:
        if found:
            stdout().print(Text(table(found)))
    plot([_bars(figure) for figure in figures["cells"]], told(cast), asked.plot)


def draw(figures: Path, picture: Path | None) -> None:
    """The picture of figures that a run wrote before.  Raises EspalierError."""
    if picture is None:
        raise EspalierError("--figures draws what was measured before, and nothing says where; give --plot")
    try:
        measured = json.loads(figures.read_text())
        bars, about = [_bars(figure) for figure in measured["cells"]], measured["recipe"]
        title = f"{about['shape']}, the draft's skill {about['skill']}; {measured['machine'].get('cuda', 'no GPU')}"
    except OSError as error:
        raise EspalierError(f"--figures {figures} cannot be read ({error.strerror}); name a file of --json") from None
    except (ValueError, KeyError, TypeError):
        raise EspalierError(f"--figures {figures} holds no cells; name what --shape wrote with --json") from None
    plot(bars, title, picture)


def make_cast(
    shape: str, seed: int, accept_length: float | None, device: torch.device, position_rows: int
) -> SyntheticModels:
    recipe = recipe_of(shape, seed, accept_length)
    return SyntheticModels(recipe, torch.bfloat16 if device.type == "cuda" else torch.float32, device, position_rows)


def recipe_of(shape: str, seed: int, accept_length: float | None) -> Recipe:
    """Of a named shape whose draft is made for that accept length, or for 4.  Raises EspalierError for one that is out
    of reach."""
    return Recipe(find_shape(shape), seed).with_accept_length(
        ACCEPT_LENGTH if accept_length is None else accept_length, *TREE
    )


def told(cast: SyntheticModels) -> str:
    about = f"{cast.recipe.shape.name}, {cast.weights_bytes / 1e9:.1f} GB of weights made in {cast.seconds:.1f} s"
    return f"{about}; the draft's skill {cast.recipe.skill}"


def _bars(figure: dict[str, Any]) -> Bars:
    floor, rounds = figure["floor"], figure["rounds"]
    rates = rounds["tokens_per_second"], figure["plain_tokens_per_second"]
    return Bars(figure["cell"], rounds["round_ms"], floor and floor["ms"], *rates)


def as_dicts(found: list[Measured]) -> list[dict[str, Any]]:
    return [each.as_dict(plain_beside(found, each)) for each in found]


HEADS = (
    "cell", "round ms", "GPU ms", "idle", "host ms", "floor ms", "of floor", "bytes ms", "kernels",
    "accept", "tokens/s", "over plain", "chain's", "start s", "graphs MiB", "staging MiB", "pages GiB", "took s",
)  # fmt: skip


def table(found: list[Measured]) -> str:
    """A line a cell."""
    lines = [list(HEADS)]
    for each, figures in zip(found, as_dicts(found), strict=True):
        r, floor, start = each.rounds, each.floor, each.start
        beside = figures["tree_over_plain"]
        lines.append(
            [
                each.cell.name,
                f"{r.round_ms:.2f}",
                _or_nothing(r.gpu_ms, "{:.2f}"),
                _or_nothing(r.idle_share, "{:.1%}"),
                f"{r.host_ms:.2f}",
                _or_nothing(floor.ms if floor else None, "{:.2f}"),
                _or_nothing(each.over_floor, "{:.2f}"),
                _or_nothing(floor.weight_bytes_ms if floor else None, "{:.2f}"),
                _or_nothing(start.kernels, "{}"),
                f"{r.accept_length:.2f}",
                f"{r.tokens_per_second:.0f}",
                _or_nothing(beside, "{:.2f}"),
                f"{r.follows}/{each.cell.batch}",
                f"{start.seconds:.1f}",
                _or_nothing(start.graphs_bytes and start.graphs_bytes / 2**20, "{:.0f}"),
                f"{start.staging_bytes / 2**20:.1f}",
                f"{start.pages_bytes / 2**30:.2f}",
                f"{each.seconds:.1f}",
            ]
        )
    return aligned(lines)


def _or_nothing(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)
