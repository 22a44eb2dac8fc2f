"""`python -m lab round --shape`: rounds of a named shape, compared with their floor and with plain decoding.

The cells of one tree and page size run in one engine, with the sizes that LLM gives a user; the weights are made once.
With --own-size each cell has an engine as large as the cell.  full_rounds.py measures a cell.
"""

import json
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.text import Text

from espalier.config import SpeculationConfig
from espalier.errors import EspalierError
from espalier.layout import TreeShape
from espalier.shards import Shards
from espalier.speculate.drafters.registry import draft_shards
from espalier.terminal.console import DIM_STYLE, print_table, progress, require_gpu, stdout, write_json
from espalier.terminal.flags import flag_of, given_flags
from lab.bench.ceilings import GpuCeilings
from lab.bench.cells import RoundCell, parse_cells, with_plain_cells
from lab.bench.engine_sizes import CellEngineSizes, EngineSizes, EngineStats, UserEngineSizes
from lab.bench.engines import SETTINGS_OF_SHAPE, dtype_on
from lab.bench.floor import FloorMeter, RoundFloor, RoundSize, kv_value_bytes
from lab.bench.full_rounds import FullRounds, measure_full_rounds
from lab.bench.plot import Bars, plot_bars
from lab.bench.ranked_models import synthetic_models
from lab.bench.synthetic_models import SyntheticModels, recipe_sizes, recipe_with_accept_length
from lab.shape_flags import shape_settings
from lab.synthetic.checkpoint import Recipe

TIMED_ROUNDS = 40
# Engine settings that may be given with --own-size.
OWN_SIZE_SETTINGS = ("attention", "overlap", "chunk_size", "kv_dtype", "draft_kv_dtype")
OWN_SIZE_FLAGS = (*OWN_SIZE_SETTINGS, "page_size", "seed", "model_impl")
DEFAULT_CELLS = ["1x1024:5,8,64"]


@dataclass(frozen=True)
class MeasuredCell:
    """The figures of a cell.

    engine: the engine that ran the cell; floor: None without a GPU, or if the engine failed in a later cell; ceilings:
    None without a GPU; seconds: time to measure the cell, without the engine's startup.
    """

    cell: RoundCell
    rounds: FullRounds
    engine: EngineStats
    floor: RoundFloor | None
    ceilings: GpuCeilings | None
    seconds: float

    @property
    def over_floor(self) -> float | None:
        return self.rounds.round_ms / self.floor.ms if self.floor else None

    def as_dict(self, plain: "MeasuredCell | None") -> dict[str, Any]:
        """For --json.  plain: plain decoding of the same batch and context, None if it was not measured."""
        steps, topk, nodes = self.cell.tree
        rate = plain.rounds.tokens_per_second if plain else None
        return {
            "cell": self.cell.name,
            "engine": self.engine.name,
            "max_batch": self.engine.max_batch,
            "batch": self.cell.batch,
            "context": self.cell.context,
            "steps": steps,
            "topk": topk,
            "num_draft_tokens": nodes,
            "page_size": self.cell.page_size,
            "rounds": asdict(self.rounds),
            "floor": asdict(self.floor) if self.floor else None,
            "round_over_floor": self.over_floor,
            "plain_tokens_per_second": rate,
            "tree_over_plain": self.rounds.tokens_per_second / rate if rate and self.cell.has_draft else None,
            "seconds": self.seconds,
        }


def run(args: Namespace, settings: dict[str, Any], page_sizes: list[int]) -> None:
    """Measure, print and plot.  page_sizes: for cells without a page size.  Raises EspalierError."""
    _refuse_flags(args)
    device = require_gpu("round --shape")
    rounds = TIMED_ROUNDS if args.rounds is None else args.rounds
    if rounds < 2:
        raise EspalierError(f"--rounds={rounds} is not supported; use 2 or more")
    cells = with_plain_cells(parse_cells(args.cells or DEFAULT_CELLS, page_sizes))
    recipe = recipe_with_accept_length(**shape_settings(args, settings))
    sizes = _sizes(args, settings, recipe, device)
    rows = max(sizes.layout(cell, rounds).position_rows for cell in cells)
    models = synthetic_models(recipe, settings, dtype_on(device), device, rows)
    stdout().print(Text(models.title, DIM_STYLE))
    floors = None
    if device.type == "cuda":
        value_bytes = kv_value_bytes(settings.get("kv_dtype", "auto"), settings.get("draft_kv_dtype", "auto"))
        ranks = settings.get("tensor_parallel", 1)
        draft_ranks = draft_shards(recipe.draft_config, Shards(0, ranks)).count
        floors = FloorMeter(recipe_sizes(recipe), value_bytes=value_bytes, ranks=ranks, draft_ranks=draft_ranks)
    about = {"settings": {**settings, "rounds": rounds, "own_size": args.own_size}}
    figures = _measure_and_print(
        models, measure_cells(models, cells, sizes, rounds, floors), len(cells), about, args.json
    )
    plot_bars([_bars_of_figure(figure) for figure in figures["cells"]], models.title, args.plot)


def _refuse_flags(args: Namespace) -> None:
    """Raises EspalierError for a given flag that has no effect here."""
    tree = tuple(f.name for f in fields(SpeculationConfig))
    for name in given_flags(args):
        if name in (*SETTINGS_OF_SHAPE, *tree):
            raise EspalierError(f"{flag_of(name)} is not for --shape: cells say batch, context and tree; leave it out")
        if args.own_size and name not in OWN_SIZE_FLAGS:
            raise EspalierError(f"{flag_of(name)} is not for --own-size, where the cell decides; leave one out")
    if args.all_buckets and not args.own_size:
        raise EspalierError("--all-buckets is for --own-size: other engines capture every bucket; leave it out")
    if args.own_size and any(":auto" in text for text in args.cells or ()):
        raise EspalierError("--cells with auto are not for --own-size, whose engines have one tree; leave one out")


def _sizes(args: Namespace, settings: dict[str, Any], recipe: Recipe, device: torch.device) -> EngineSizes:
    if not args.own_size:
        return UserEngineSizes(recipe, settings, device)
    given = {name: settings[name] for name in OWN_SIZE_SETTINGS if name in settings}
    return CellEngineSizes(recipe.draft_config.spec, all_buckets=args.all_buckets, **given)


def _measure_and_print(
    models: SyntheticModels,
    cells: Iterator[MeasuredCell],
    num_cells: int,
    about: dict[str, Any],
    json_file: Path | None,
) -> dict[str, Any]:
    """Measure the cells, and return the figures.  If a cell fails, the earlier figures are kept and printed."""
    measured: list[MeasuredCell] = []
    figures: dict[str, Any] = {}
    try:
        with progress("measuring", num_cells) as advance:
            for cell in cells:
                measured.append(cell)
                ceilings = asdict(cell.ceilings) if cell.ceilings else None
                engines = [asdict(engine) for engine in engines_of_cells(measured)]
                figures = {**models.about, **about, "ceilings": ceilings, "engines": engines}
                figures["cells"] = as_dicts(measured)
                write_json(json_file, figures)
                advance()
    finally:
        if measured:
            print_table(cell_table(measured))
            stdout().print()
            print_table(engine_table(measured))
    return figures


def plot_figures(figures: Path, picture: Path | None) -> None:
    """`--figures`: plot the figures that an earlier run wrote.  Raises EspalierError."""
    if picture is None:
        raise EspalierError("--figures plots earlier figures, and no file for the plot is given; give --plot")
    try:
        measured = json.loads(figures.read_text())
        bars, about = [_bars_of_figure(figure) for figure in measured["cells"]], measured["recipe"]
        title = f"{about['shape']}, the draft's skill {about['skill']}; {measured['machine'].get('cuda', 'no GPU')}"
    except OSError as error:
        raise EspalierError(f"--figures {figures} cannot be read ({error.strerror}); name a file of --json") from None
    except (ValueError, KeyError, TypeError):
        raise EspalierError(f"--figures {figures} holds no cells; name what --shape wrote with --json") from None
    plot_bars(bars, title, picture)


def measure_cells(
    models: SyntheticModels, cells: Sequence[RoundCell], sizes: EngineSizes, num_rounds: int, floors: FloorMeter | None
) -> Iterator[MeasuredCell]:
    """Measure the cells, engine after engine.  floors: a meter for the same shape; None without a GPU."""
    ceilings = floors.ceilings() if floors else None
    names = list(dict.fromkeys(map(sizes.name, cells)))
    for name in names:
        group = [cell for cell in cells if sizes.name(cell) == name]
        ran, failure = [], None
        try:
            for each in _measure_in_one_engine(models, group, sizes, num_rounds):
                ran.append(each)
        except BaseException as error:
            # After Ctrl-C too, the figures are kept.  They have no floor, because the error keeps the engine, and
            # thus the memory, alive.
            failure = error
        for cell, rounds, engine, seconds in ran:
            of_cell = None
            if floors is not None and ceilings is not None and failure is None and not cell.is_auto:
                # The floor is measured after the engine has closed.  Before the engine runs, the number of touched
                # experts is not known; while it runs, it takes all memory.
                tree, touched = TreeShape(*cell.tree), rounds.experts_touched
                try:
                    size = RoundSize(cell.batch, tree, rounds.context, cell.has_draft, touched)
                    of_cell = floors.round(size, ceilings)
                except BaseException as error:
                    failure = error
            yield MeasuredCell(cell, rounds, engine, of_cell, ceilings, seconds)
        if failure is not None:
            raise failure


def _measure_in_one_engine(
    models: SyntheticModels, cells: Sequence[RoundCell], sizes: EngineSizes, num_rounds: int
) -> Iterator[tuple[RoundCell, FullRounds, EngineStats, float]]:
    """Measure cells that share an engine.  The engine's memory is freed when this function returns."""
    with sizes.open(models, cells[0], num_rounds) as (engine, start):
        figures = EngineStats.of(sizes.name(cells[0]), engine, start)
        for cell in cells:
            begun = perf_counter()
            rounds = measure_full_rounds(engine, models, cell, num_rounds)
            yield cell, rounds, figures, perf_counter() - begun


def plain_cell_beside(all_measured: Sequence[MeasuredCell], cell: MeasuredCell) -> MeasuredCell | None:
    """Plain decoding of the same batch and context, preferably at the same page size; None if there is none."""
    same = [
        each
        for each in all_measured
        if not each.cell.has_draft and (each.cell.batch, each.cell.context) == (cell.cell.batch, cell.cell.context)
    ]
    return min(same, key=lambda each: each.cell.page_size != cell.cell.page_size, default=None)


def best_rate_beside(all_measured: Sequence[MeasuredCell], cell: MeasuredCell) -> float:
    """Tokens a second of the fastest cell of the same batch and context."""
    same = cell.cell.batch, cell.cell.context
    return max(each.rounds.tokens_per_second for each in all_measured if (each.cell.batch, each.cell.context) == same)


def _bars_of_figure(figure: dict[str, Any]) -> Bars:
    floor, rounds = figure["floor"], figure["rounds"]
    rates = rounds["tokens_per_second"], figure["plain_tokens_per_second"]
    return Bars(figure["cell"], rounds["round_ms"], floor and floor["ms"], *rates)


def as_dicts(measured: Sequence[MeasuredCell]) -> list[dict[str, Any]]:
    return [each.as_dict(plain_cell_beside(measured, each)) for each in measured]


def engines_of_cells(measured: Sequence[MeasuredCell]) -> list[EngineStats]:
    """The engines that the cells ran in, each once."""
    return list({each.engine.name: each.engine for each in measured}.values())


CELL_COLUMNS = (
    "cell", "max batch", "round ms", "GPU ms", "idle", "host ms", "floor ms", "of floor", "bytes ms",
    "accept", "tokens/s", "over plain", "of best", "chain's", "experts", "took s",
)  # fmt: skip
ENGINE_COLUMNS = (
    "engine", "max batch", "max context", "start s", "graphs MiB", "kernels", "staging MiB", "pages GiB"
)  # fmt: skip


def cell_table(measured: Sequence[MeasuredCell]) -> list[list[str]]:
    """Returns one row for each cell.

    "of best": share of the rate of the fastest cell of this batch and context; "experts": touched per layer in a pass.
    """
    rows = [list(CELL_COLUMNS)]
    for each, figures in zip(measured, as_dicts(measured), strict=True):
        timed, floor = each.rounds, each.floor
        rows.append(
            [
                each.cell.name,
                f"{each.engine.max_batch}",
                f"{timed.round_ms:.2f}",
                _format_or_empty(timed.gpu_ms, "{:.2f}"),
                _format_or_empty(timed.idle_share, "{:.1%}"),
                f"{timed.host_ms:.2f}",
                _format_or_empty(floor.ms if floor else None, "{:.2f}"),
                _format_or_empty(each.over_floor, "{:.2f}"),
                _format_or_empty(floor.weight_bytes_ms if floor else None, "{:.2f}"),
                f"{timed.accept_length:.2f}",
                f"{timed.tokens_per_second:.0f}",
                _format_or_empty(figures["tree_over_plain"], "{:.2f}"),
                f"{timed.tokens_per_second / best_rate_beside(measured, each):.3f}",
                f"{timed.follows}/{each.cell.batch}",
                _format_or_empty(timed.experts_touched, "{:.1f}"),
                f"{each.seconds:.1f}",
            ]
        )
    return rows


def engine_table(measured: Sequence[MeasuredCell]) -> list[list[str]]:
    """Returns one row for each engine.  "kernels": in the graph of the largest batch."""
    rows = [list(ENGINE_COLUMNS)]
    for engine in engines_of_cells(measured):
        start = engine.start
        rows.append(
            [
                engine.name,
                f"{engine.max_batch}",
                f"{engine.max_context}",
                f"{start.seconds:.1f}",
                _format_or_empty(start.graphs_bytes and start.graphs_bytes / 2**20, "{:.0f}"),
                _format_or_empty(start.kernels, "{}"),
                f"{start.staging_bytes / 2**20:.1f}",
                f"{start.pages_bytes / 2**30:.2f}",
            ]
        )
    return rows


def _format_or_empty(value: float | None, format_spec: str) -> str:
    return "" if value is None else format_spec.format(value)
