"""`espalier bench round --shape`: rounds of a named shape, compared with their roofline and with plain decoding.

Each cell has an engine of its own layout; the weights are made once.  A cell enters its prompts by real prefill,
decodes greedily until every round runs the full batch, and times only such rounds.
"""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from rich.text import Text

from espalier.bench.cells import EXAMPLES, WARM_UP, Cell, parse_cells, with_plain
from espalier.bench.instrument import LaunchRecord
from espalier.bench.linears import shape_named
from espalier.bench.plot import Bars, plot
from espalier.bench.roofline import Roofline, RoundRoofline
from espalier.bench.synthetic_models import Start, SyntheticModels, recipe_of
from espalier.bench.timing import Ceilings
from espalier.engine.engine import Engine
from espalier.errors import EspalierError
from espalier.request import Request, SamplingParams
from espalier.synthetic.shapes import SHAPES
from espalier.terminal.console import QUIET, print_table, progress, stdout, write_json
from espalier.terminal.flags import flag_of, given_flags
from espalier.terminal.machine import require_gpu

ROUNDS = 40
ENGINE_FLAGS = ("page_size", "attention", "overlap", "chunk_size", "seed")
DEFAULT_CELLS = ["1x1024:5,8,64"]


@dataclass(frozen=True)
class Settings:
    """How every cell runs.  rounds: rounds that are timed; all_buckets: capture every bucket, as `LLM` does."""

    rounds: int = ROUNDS
    chunk_size: int = 2048
    attention: str | None = None
    overlap: bool = True
    all_buckets: bool = False


@dataclass(frozen=True)
class Rounds:
    """Full-batch rounds of one cell.

    context: tokens of a request, the mean over requests and rounds; round_ms: median by the wall clock; gpu_ms and
    idle_share: by events around the CUDA graphs, None without graphs; host_ms: time a round in which the host did not
    wait for results; replays: CUDA graphs a round; follows: requests whose output is the chain's.
    """

    context: float
    round_ms: float
    gpu_ms: float | None
    idle_share: float | None
    host_ms: float
    replays: float
    accept_length: float
    tokens_per_second: float
    follows: int


@dataclass(frozen=True)
class Measured:
    """A cell.  roofline and ceilings: None without a GPU; seconds: taken to measure the cell."""

    cell: Cell
    rounds: Rounds
    start: Start
    roofline: RoundRoofline | None
    ceilings: Ceilings | None
    seconds: float

    @property
    def over_roofline(self) -> float | None:
        return self.rounds.round_ms / self.roofline.ms if self.roofline else None

    def as_dict(self, plain: "Measured | None") -> dict[str, Any]:
        """For --json.  plain: plain decoding of the same batch and context, None if it was not measured."""
        steps, topk, nodes = self.cell.tree
        rate = plain.rounds.tokens_per_second if plain else None
        return {
            "cell": self.cell.name,
            "batch": self.cell.batch,
            "context": self.cell.context,
            "steps": steps,
            "topk": topk,
            "num_draft_tokens": nodes,
            "page_size": self.cell.page_size,
            "rounds": asdict(self.rounds),
            "floor": asdict(self.roofline) if self.roofline else None,
            "round_over_floor": self.over_roofline,
            "plain_tokens_per_second": rate,
            "tree_over_plain": self.rounds.tokens_per_second / rate if rate and self.cell.drafts else None,
            "start": asdict(self.start),
            "seconds": self.seconds,
        }


def add_flags(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("synthetic models of a named shape, on a GPU")
    group.add_argument("--shape", metavar="NAME", help=f"one of {', '.join(SHAPES)}")
    group.add_argument("--cells", nargs="+", metavar="CELL", help=f"such as {EXAMPLES}; plain decoding is added")
    group.add_argument(
        "--figures", type=Path, metavar="FILE", help="measure nothing: plot the figures that --json wrote"
    )
    group.add_argument("--rounds", type=int, metavar="N", help=f"full-batch rounds to time ({ROUNDS})")
    group.add_argument("--all-buckets", action="store_true", help="capture the rounds of every bucket")


def run(asked: Namespace, settings: dict[str, Any], page_sizes: list[int]) -> None:
    """Measure, print and plot.  page_sizes: of the cells that name none.  Raises EspalierError."""
    refused = [flag_of(name) for name in given_flags(asked) if name not in ENGINE_FLAGS]
    if refused:
        raise EspalierError(f"{refused[0]} is not for --shape: cells say batch, context and tree; leave it out")
    device = require_gpu("bench round --shape")
    rounds = ROUNDS if asked.rounds is None else asked.rounds
    if rounds < 2:
        raise EspalierError(f"--rounds={rounds} is not supported; use 2 or more")
    cells = with_plain(parse_cells(asked.cells or DEFAULT_CELLS, page_sizes))
    given = {name: settings[name] for name in ("attention", "overlap", "chunk_size") if name in settings}
    cell_settings = Settings(rounds=rounds, all_buckets=asked.all_buckets, **given)
    rows = max(cell.layout(cell_settings.chunk_size, rounds).position_rows for cell in cells)
    recipe = recipe_of(asked.shape, settings.get("seed", 0), asked.accept_length)
    models = SyntheticModels(recipe, torch.bfloat16 if device.type == "cuda" else torch.float32, device, rows)
    stdout().print(Text(models.title, QUIET))
    roofline = Roofline(shape_named(asked.shape)) if device.type == "cuda" else None
    figures = _measure_and_print(models, cells, cell_settings, roofline, asked.json)
    plot([_bars(figure) for figure in figures["cells"]], models.title, asked.plot)


def _measure_and_print(
    models: SyntheticModels,
    cells: Sequence[Cell],
    settings: Settings,
    roofline: Roofline | None,
    json_file: Path | None,
) -> dict[str, Any]:
    """Measure the cells; returns the figures.  Those of the cells so far are kept and printed if a later one fails."""
    measured: list[Measured] = []
    figures: dict[str, Any] = {}
    try:
        with progress("measuring", len(cells)) as advance:
            for cell in measure(models, cells, settings, roofline):
                measured.append(cell)
                ceilings = asdict(cell.ceilings) if cell.ceilings else None
                about = {**models.about, "settings": asdict(settings), "ceilings": ceilings}
                figures = {**about, "cells": as_dicts(measured)}
                write_json(json_file, figures)
                advance()
    finally:
        if measured:
            print_table(table(measured))
    return figures


def draw(figures: Path, picture: Path | None) -> None:
    """`--figures`: plot the figures that an earlier run wrote.  Raises EspalierError."""
    if picture is None:
        raise EspalierError("--figures plots earlier figures, and no file for the plot is given; give --plot")
    try:
        measured = json.loads(figures.read_text())
        bars, about = [_bars(figure) for figure in measured["cells"]], measured["recipe"]
        title = f"{about['shape']}, the draft's skill {about['skill']}; {measured['machine'].get('cuda', 'no GPU')}"
    except OSError as error:
        raise EspalierError(f"--figures {figures} cannot be read ({error.strerror}); name a file of --json") from None
    except (ValueError, KeyError, TypeError):
        raise EspalierError(f"--figures {figures} holds no cells; name what --shape wrote with --json") from None
    plot(bars, title, picture)


def measure(
    models: SyntheticModels, cells: Sequence[Cell], settings: Settings, roofline: Roofline | None
) -> Iterator[Measured]:
    """Measure cell after cell.  roofline: of the same shape; None without a GPU."""
    ceilings = roofline.ceilings() if roofline else None
    for cell in cells:
        begun = perf_counter()
        layout = cell.layout(settings.chunk_size, settings.rounds)
        options = (settings.attention, settings.overlap, settings.all_buckets)
        with models.engine(layout, *options) as (engine, launches, start):
            rounds = full_rounds(engine, launches, models, cell, settings.rounds)
        of_cell = None
        if roofline is not None and ceilings is not None:
            of_cell = roofline.round(cell.batch, rounds.context, *cell.tree, ceilings, cell.drafts)
        yield Measured(cell, rounds, start, of_cell, ceilings, perf_counter() - begun)


def full_rounds(engine: Engine, launches: LaunchRecord, models: SyntheticModels, cell: Cell, num_rounds: int) -> Rounds:
    """Enter the cell's prompts, time num_rounds rounds of all of them, and abort them."""
    prompts = models.prompts([cell.context] * cell.batch)
    requests = enter(engine, prompts, engine.layout.max_context - cell.context)
    for _ in range(WARM_UP):
        engine.step()
    before = [request.num_tokens for request in requests]
    launches.reset()
    times = []
    for _ in range(num_rounds):
        begun = perf_counter()
        engine.step()
        times.append(perf_counter() - begun)
    after = [request.num_tokens for request in requests]
    all_full = launches.rounds == [cell.batch] * num_rounds
    if launches.prefills or not all_full or engine.scheduler.num_preempted:
        raise AssertionError(
            f"{cell.name}: not every round was of the full batch: {launches.prefills}, {launches.rounds}"
        )
    gpu_ms, idle_share = launches.gpu_times() if launches.replays else (None, None)
    num_tokens = sum(after) - sum(before)
    rounds = Rounds(
        context=(sum(after) + sum(before)) / 2 / cell.batch,
        round_ms=1e3 * median(times),
        gpu_ms=gpu_ms,
        idle_share=idle_share,
        host_ms=1e3 * (sum(times) - launches.waited_seconds) / num_rounds,
        replays=len(launches.replays) / num_rounds,
        accept_length=num_tokens / cell.batch / num_rounds,
        tokens_per_second=num_tokens / sum(times),
        follows=sum(models.follows(request.prompt, request.output) for request in requests),
    )
    leave(engine, requests)
    return rounds


def enter(engine: Engine, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[Request]:
    """Add requests, and step until each has its first token."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens).resolve({}, ())
    requests = [Request(f"in{i}", list(prompt), params, seed=i, arrival=i) for i, prompt in enumerate(prompts)]
    for request in requests:
        engine.add(request)
    while not all(request.output for request in requests):
        engine.step()
    return requests


def leave(engine: Engine, requests: Sequence[Request]) -> None:
    """Abort the requests, and step until the engine is empty."""
    for request in requests:
        engine.abort(request.id)
    while engine.has_work:
        engine.step()


def plain_beside(all_measured: Sequence[Measured], one: Measured) -> Measured | None:
    """Plain decoding of the same batch and context, preferably at the same page size; None if there is none."""
    same = [
        each
        for each in all_measured
        if not each.cell.drafts and (each.cell.batch, each.cell.context) == (one.cell.batch, one.cell.context)
    ]
    return min(same, key=lambda each: each.cell.page_size != one.cell.page_size, default=None)


def _bars(figure: dict[str, Any]) -> Bars:
    floor, rounds = figure["floor"], figure["rounds"]
    rates = rounds["tokens_per_second"], figure["plain_tokens_per_second"]
    return Bars(figure["cell"], rounds["round_ms"], floor and floor["ms"], *rates)


def as_dicts(measured: Sequence[Measured]) -> list[dict[str, Any]]:
    return [each.as_dict(plain_beside(measured, each)) for each in measured]


HEADS = (
    "cell", "round ms", "GPU ms", "idle", "host ms", "floor ms", "of floor", "bytes ms", "kernels",
    "accept", "tokens/s", "over plain", "chain's", "start s", "graphs MiB", "staging MiB", "pages GiB", "took s",
)  # fmt: skip


def table(measured: Sequence[Measured]) -> list[list[str]]:
    """One row a cell."""
    rows = [list(HEADS)]
    for each, figures in zip(measured, as_dicts(measured), strict=True):
        timed, roofline, start = each.rounds, each.roofline, each.start
        rows.append(
            [
                each.cell.name,
                f"{timed.round_ms:.2f}",
                _or_nothing(timed.gpu_ms, "{:.2f}"),
                _or_nothing(timed.idle_share, "{:.1%}"),
                f"{timed.host_ms:.2f}",
                _or_nothing(roofline.ms if roofline else None, "{:.2f}"),
                _or_nothing(each.over_roofline, "{:.2f}"),
                _or_nothing(roofline.weight_bytes_ms if roofline else None, "{:.2f}"),
                _or_nothing(start.kernels, "{}"),
                f"{timed.accept_length:.2f}",
                f"{timed.tokens_per_second:.0f}",
                _or_nothing(figures["tree_over_plain"], "{:.2f}"),
                f"{timed.follows}/{each.cell.batch}",
                f"{start.seconds:.1f}",
                _or_nothing(start.graphs_bytes and start.graphs_bytes / 2**20, "{:.0f}"),
                f"{start.staging_bytes / 2**20:.1f}",
                f"{start.pages_bytes / 2**30:.2f}",
                f"{each.seconds:.1f}",
            ]
        )
    return rows


def _or_nothing(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)
