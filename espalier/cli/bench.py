"""`espalier bench round`: cost of a round beside a plain token; acceptance on held-out text; pages held.
`espalier bench kernels`: attention on a GPU beside its memory's bandwidth.  The others have files."""

from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.text import Text

from espalier.bench import acceptance, kernels, memory
from espalier.bench.machine import header, require_gpu
from espalier.bench.plot import Bars, plot, require_plot
from espalier.bench.round import Cell, RoundBench, as_dicts
from espalier.bench.timing import Stopwatch
from espalier.cli import bench_serve, choose, floor, foundry, serving, shaped
from espalier.cli.console import QUIET, aligned, progress, require_writable, stdout, write_json
from espalier.cli.flags import add_engine_flags, engine_settings, flag_of, given_flags, new_command, sized
from espalier.cli.modes import refuse_of_others
from espalier.errors import EspalierError
from espalier.layout import MAX_PAGE_SIZE

# Of what is measured with a model; --shape has its cells.
DEFAULTS = MappingProxyType({"batch": [1], "context": [128], "tokens": 96, "repeats": 5, "prompts": 16})


def add(commands: Any, name: str) -> None:
    about = "measurements"
    parser: ArgumentParser = commands.add_parser(name, help=about, description=about, allow_abbrev=False)
    measured = parser.add_subparsers(dest="measured", metavar="what", parser_class=type(parser))
    _add_round(measured)
    _add_kernels(measured)
    serving.add(measured)
    floor.add(measured)
    foundry.add(measured)
    bench_serve.add(measured)


def _add_round(commands: Any) -> None:
    parser = new_command(commands, "round", run, "a round beside a plain token: time, accept length, memory")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--acceptance", action="store_true", help="accept length on held-out text, several ways to draft")
    mode.add_argument("--memory", action="store_true", help="pages held by 50 mixed requests at page 256, topk 8")
    choose.add_flags(parser, mode)
    parser.add_argument("--batch", type=_numbers, metavar="N,N", help="batch sizes (1)")
    parser.add_argument("--context", type=_numbers, metavar="N,N", help="prompt lengths (128)")
    parser.add_argument("--tokens", type=int, metavar="N", help="tokens to generate for each prompt (96)")
    parser.add_argument("--repeats", type=int, metavar="N", help="turns of each way; medians are shown (5)")
    parser.add_argument("--prompts", type=int, metavar="N", help="held-out prompts of --acceptance (16)")
    parser.add_argument(
        "--page-size", type=_numbers, metavar="N,N", help="tokens a page of the cache; several with --shape (64 there)"
    )
    parser.add_argument("--compare", choices=("transformers",), help="let transformers.generate take turns too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the cells there, as .png, .svg or .pdf")
    shaped.add(parser)
    add_engine_flags(parser, leave_out=("page_size",))


def _add_kernels(commands: Any) -> None:
    parser = new_command(commands, "kernels", run_kernels, "attention on a GPU beside its memory's bandwidth")
    parser.add_argument(
        "--page-size", type=_numbers, default=[1, 16, 64, 256], metavar="N,N", help="page sizes (1,16,64,256)"
    )
    parser.add_argument(
        "--in-order", action="store_true", help="pages that follow one another, as of a pool that was never full"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


_numbers.__name__ = "list of whole numbers"


def run(asked: Namespace) -> int:
    settings = engine_settings(asked)
    refuse_of_others(asked)
    require_plot(asked.plot)
    for name in ("json", "plot", "out"):
        require_writable(flag_of(name), getattr(asked, name))
    if asked.figures is not None:
        if given := given_flags(asked):
            raise EspalierError(f"{flag_of(given[0])} is not for --figures; leave one out")
        shaped.draw(asked.figures, asked.plot)
        return 0
    if asked.shape is not None:
        stdout().print(Text(header(), QUIET))
        shaped.run(asked, settings, asked.page_size or [64])
        return 0
    for name, value in DEFAULTS.items():
        setattr(asked, name, value if getattr(asked, name) is None else getattr(asked, name))
    _check(asked)
    if asked.page_size is not None:
        if len(asked.page_size) > 1:
            raise EspalierError(f"--page-size={asked.page_size}: a model is measured at one; several are for --shape")
        settings["page_size"] = asked.page_size[0]
    stdout().print(Text(header(), QUIET))
    measured = choose.run if asked.choose else _memory if asked.memory else _acceptance if asked.acceptance else _round
    measured(asked, settings)
    return 0


def run_kernels(asked: Namespace) -> int:
    if not all(1 <= size <= MAX_PAGE_SIZE for size in asked.page_size):
        raise EspalierError(f"--page-size={asked.page_size} is not supported; use 1 to {MAX_PAGE_SIZE}")
    require_writable("--json", asked.json)
    device = require_gpu("bench kernels")
    stdout().print(Text(header(), QUIET))
    cells: list[kernels.Cell] = []
    with progress("measuring", len(kernels.SHAPES) * len(asked.page_size)) as advance:
        watch = Stopwatch()
        bytes_per_second = watch.bandwidth(device)
        for shape in kernels.SHAPES:
            for page_size in asked.page_size:
                cells.append(kernels.measure(shape, page_size, bytes_per_second, device, watch, asked.in_order))
                advance()
    order = "in order" if asked.in_order else "in no order"
    figures = {"bytes_per_second": bytes_per_second, "in_order": asked.in_order}
    write_json(asked.json, figures | {"cells": [cell.as_dict() for cell in cells]})
    about = f"{kernels.ABOUT}, pages {order}; memory reads {bytes_per_second / 1e12:.2f} TB/s"
    stdout().print(Text(about, QUIET))
    stdout().print(Text(_kernels_table(cells)))
    return 0


def _kernels_table(cells: list[kernels.Cell]) -> str:
    rows = [
        ["requests x queries x committed", "page size", "attention, us", "plan, us", "TB/s", "of memory's", "TFLOP/s"]
    ]
    for cell in cells:
        rate = "" if cell.terabytes_per_second is None else f"{cell.terabytes_per_second:.2f}"
        share = "" if cell.bandwidth_share is None else f"{cell.bandwidth_share:.1%}"
        times = f"{cell.attention_us:.1f}", f"{cell.plan_us:.1f}"
        rows.append([cell.shape, str(cell.page_size), *times, rate, share, f"{cell.tflops:.0f}"])
    return aligned(rows)


def _check(asked: Namespace) -> None:
    for name in ("batch", "context", "tokens", "repeats", "prompts"):
        value = getattr(asked, name)
        if min(value if isinstance(value, list) else [value]) < 1:
            raise EspalierError(f"--{name}={value} is not supported; use 1 or more")
    if asked.tokens < 2 and not asked.memory:
        raise EspalierError(f"--tokens={asked.tokens} is not supported: the first comes of no round; use 2 or more")


def _round(asked: Namespace, settings: dict[str, Any]) -> None:
    # Two engines stand on one device: each takes pages for what is measured, and no more.
    most, longest = max(asked.batch), max(asked.context) + asked.tokens
    settings = sized(settings, {"max_batch": most, "max_context": longest + 1}, max_batch=most, max_context=longest)
    cells: list[Cell] = []
    bench = RoundBench(settings, asked.compare is not None)
    stdout().print(Text(f"{bench.tree.config.algorithm} tree, {_shape(bench)}; {asked.tokens} tokens a prompt", QUIET))
    with progress("measuring", len(asked.batch) * len(asked.context)) as advance:
        for batch in asked.batch:
            for context in asked.context:
                cells.append(bench.measure(batch, context, asked.tokens, asked.repeats))
                advance()
    bench.close()
    # Kept before it is shown: whoever reads us may have left.
    write_json(asked.json, {"config": asdict(bench.tree.config), "cells": as_dicts(cells)})
    plot([_bars(cell) for cell in cells], _shape(bench), asked.plot)
    stdout().print(Text(_cells_table(cells)))


def _bars(cell: Cell) -> Bars:
    rates = cell.tree_tokens_per_second, cell.plain_tokens_per_second
    return Bars(f"{cell.batch}x{cell.context}", cell.round_ms, None, *rates)


def _shape(bench: RoundBench) -> str:
    config = bench.tree.config
    return f"steps {config.steps}, topk {config.topk}, num_draft_tokens {config.num_draft_tokens}, {config.dtype}"


def _cells_table(cells: list[Cell]) -> str:
    """A line a figure, a column a cell: what is measured is named in full."""
    rows = [
        ["batch", *(str(cell.batch) for cell in cells)],
        ["context", *(str(cell.context) for cell in cells)],
        ["round, ms", *(f"{cell.round_ms:.2f}" for cell in cells)],
        ["plain token, ms", *(f"{cell.plain_token_ms:.2f}" for cell in cells)],
        ["a round in plain tokens", *(f"{cell.ratio:.2f}" for cell in cells)],
        ["accept length", *(f"{cell.accept_length:.2f}" for cell in cells)],
        ["plain, tokens/s", *(f"{cell.plain_tokens_per_second:.1f}" for cell in cells)],
        ["tree, tokens/s", *(f"{cell.tree_tokens_per_second:.1f}" for cell in cells)],
        ["tree over plain", *(f"{cell.speedup:.2f}" for cell in cells)],
        ["same tokens as plain", *(f"{cell.identical}/{cell.batch}" for cell in cells)],
    ]
    if all(cell.outside_forwards is not None for cell in cells):
        rows.append(["a round outside model forwards", *(f"{cell.outside_forwards:.0%}" for cell in cells)])
    if all(cell.transformers_tokens_per_second is not None for cell in cells):
        rows.append(["transformers.generate, tokens/s", *(f"{c.transformers_tokens_per_second:.1f}" for c in cells)])
    return aligned(rows)


def _acceptance(asked: Namespace, settings: dict[str, Any]) -> None:
    with progress("measuring", 7) as advance:
        rows = acceptance.measure(settings, asked.prompts, asked.tokens, advance)
    about = {name: str(value) for name, value in settings.items()}
    write_json(asked.json, {"settings": about, "acceptance": [row.as_dict() for row in rows]})
    lines = [["", "accept length", "new text", "repeated", "share repeated", "rounds", "same tokens", "by depth"]]
    for row in rows:
        cells = [
            row.name,
            f"{row.accept_length:.2f}",
            f"{row.accept_length_new:.2f}",
            f"{row.accept_length_repeated:.2f}",
            f"{row.repeated_share:.0%}",
            str(row.rounds),
            "" if row.same_tokens is None else f"{row.same_tokens}/{row.requests}",
            " ".join(f"{accepted / tried:.2f}" for tried, accepted in row.by_depth),
        ]
        lines.append(cells)
    stdout().print(Text(aligned(lines)))


def _memory(asked: Namespace, settings: dict[str, Any]) -> None:
    figures = asdict(memory.measure(settings))
    write_json(asked.json, {"memory": figures})
    for name, value in figures.items():
        stdout().print(Text(f"  {name.replace('_', ' '):<20} {value}"))
