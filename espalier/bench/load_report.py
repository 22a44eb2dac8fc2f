"""`espalier bench load`: a mixed load on an engine as a user starts it, with the tree and plain, or on running servers.

It reports tokens a second, the times that a reader waits, what the time was spent on, and the share of rows in vain.
"""

from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

from espalier.bench import open_loop
from espalier.bench.drive import empty_prefix_cache
from espalier.bench.engines import BenchEngines, compared_ways, engines_of, require_positions
from espalier.bench.flags import INPUTS, OF_SERVERS, OUTPUTS, REQUESTS
from espalier.bench.load import TIMES, Arrivals, Load, Served, mixed, serve, title_of
from espalier.config import ResolvedConfig
from espalier.errors import EspalierError, require_number
from espalier.terminal.console import print_table, write_json
from espalier.terminal.flags import flag_of, given_flags, require_at_least_one

# Tokens of each output of the load that warms an engine up.
WARM_UP_TOKENS = 8
FORMATS = (
    ("seconds", "{:.2f}"),
    ("tokens_in_per_second", "{:.0f}"),
    ("tokens_out_per_second", "{:.0f}"),
    ("accept_length", "{:.2f}"),
    ("tokens_in_cached", "{}"),
    ("cached_share", "{:.1%}"),
    ("outputs_hash", "{}"),
    ("wasted_rows", "{:.0%}"),
)


def run(args: Namespace, engines_of: Callable[..., BenchEngines] = engines_of) -> int:
    """engines_of: as espalier/bench/engines.py:engines_of."""
    if args.url:
        if given := [name for name in given_flags(args) if name != "model"]:
            raise EspalierError(f"{flag_of(given[0])} is not for --url: its server runs already; leave one out")
        require_at_least_one(args, "concurrency")
        return open_loop.run(args)
    if given := [name for name in OF_SERVERS if getattr(args, name) is not None]:
        raise EspalierError(f"{flag_of(given[0])} is for a running server; give its --url too")
    load, batch = _load(args), args.concurrency or args.requests or REQUESTS
    served, config = {}, None
    for name, cells in _each_way(args, load, batch, engines_of):
        served[name], config = cells, config or cells[0][1]
    assert config is not None
    figures = {name: [each.figures() for each, _ in cells] for name, cells in served.items()}
    rates = args.rate or [None]
    cells = [{name: each[i] for name, each in figures.items()} for i in range(len(rates))]
    about = {"config": config.as_dict(), "concurrency": args.concurrency}
    write_json(args.json, {**about, "cells": [{"rate": rate, **cell} for rate, cell in zip(rates, cells, strict=True)]})
    for rate, cell in zip(rates, cells, strict=True):
        print_table(_table("" if rate is None else f"{rate:g} a second", cell))
    return 0


def _load(args: Namespace) -> Load:
    """The load of the flags.  Raises EspalierError."""
    require_at_least_one(args, "requests", "concurrency", "burst", "turns", "prefix_length")
    for rate in args.rate or ():
        require_number("--rate", rate, lambda rate: rate > 0, "more than 0")
    for name in ("prefixes", "think"):
        require_number(flag_of(name), getattr(args, name), lambda value: value >= 0, "0 or more", optional=True)
    return mixed(
        args.requests or REQUESTS,
        args.input or INPUTS,
        args.output or OUTPUTS,
        args.turns or 1,
        prefixes=args.prefixes or 0,
        prefix_tokens=args.prefix_length or open_loop.DEFAULTS["prefix_length"],
        think=open_loop.DEFAULTS["think"] if args.think is None else args.think,
    )


def _each_way(args: Namespace, load: Load, batch: int, engines_of: Callable[..., BenchEngines]) -> Any:
    """(name of a way to decode, (what was served, the config) at each rate), after a warm-up."""
    made = engines_of(args, {}, max_context=load.longest)
    asked = ("--input {},{}".format(*(args.input or INPUTS)), "--output {},{}".format(*(args.output or OUTPUTS)))
    require_positions(made.positions, load.longest, *asked)
    for name, way in compared_ways(made).items():
        with made.open(way) as bench:
            prompts = bench.prompts(load.lengths)
            some = min(batch, load.count, bench.config.layout.max_batch)
            first = [load.of(i).inputs[0] for i in range(some)]
            serve(bench.engine, bench.prompts(first), Load(tuple(first), (WARM_UP_TOKENS,) * some), Arrivals())
            cells: list[tuple[Served, ResolvedConfig]] = []
            for rate in args.rate or [None]:
                empty_prefix_cache(bench.engine)
                arrivals = open_loop.arrivals_of(args, rate)
                cells.append((serve(bench.engine, prompts, load, arrivals), bench.config))
            yield name, cells


def _table(title: str, figures: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """figures: by the way to decode."""
    rows = [[title, *figures]]
    rows += [
        [name.replace("_", " "), *(form.format(each[name]) for each in figures.values())] for name, form in FORMATS
    ]
    kinds = next(iter(figures.values()))["time_shares"]
    shares = [" / ".join(f"{share:.0%}" for share in each["time_shares"].values()) for each in figures.values()]
    rows.append([f"time in {', '.join(kinds)}", *shares])
    for name in TIMES:
        # Of few requests, p90 and p99 are the slowest one.
        cells = [" / ".join(f"{ms:.1f}" for ms in (each[name] or {}).values()) or "-" for each in figures.values()]
        rows.append([f"{title_of(name)}, p50 / p90 / p99 ms", *cells])
    return rows
