"""`espalier bench prefill`, `throughput` and `latency`: a model, or a named shape on a GPU, under a load, offline."""

import re
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.text import Text

from espalier.bench.engines import BenchEngines, OfModel, OfShape
from espalier.bench.floor import FloorBench
from espalier.bench.linears import shape_named
from espalier.bench.machine import header, require_gpu
from espalier.bench.prefill import pause, prefill
from espalier.bench.serving import Arrivals, Load, Served, mixed, serve
from espalier.cli.console import QUIET, aligned, require_writable, stdout, write_json
from espalier.cli.flags import add_engine_flags, engine_settings, flag_of, new_command, sized
from espalier.cli.shaped import recipe_of
from espalier.config import ResolvedConfig
from espalier.errors import EspalierError, require_number
from espalier.synthetic.shapes import SHAPES

# Of a named shape on a GPU, and of a model, which is small where nothing is said.
PROMPTS = {True: ["1x8192", "32x1024"], False: ["1x256", "8x64"]}
INPUTS = {True: (128, 2048), False: (16, 128)}
OUTPUTS = {True: (64, 512), False: (16, 64)}
REQUESTS = {True: 128, False: 8}
# A prompt's passes beside rounds of who runs.
SPARE = 512


def add(commands: Any) -> None:
    parser = _command(commands, "prefill", run_prefill, "prompts entering, and how long running requests wait for them")
    parser.add_argument("--prompts", nargs="+", metavar="NxL", help="N prompts of L tokens, such as 1x8192 32x1024")
    parser.add_argument(
        "--running", type=int, default=8, metavar="N", help="requests that the first one makes wait (8)"
    )
    throughput = _command(commands, "throughput", run_throughput, "tokens a second of a mixed load, by tree and plain")
    latency = _command(commands, "latency", run_latency, "time to first token and between tokens, by tree and plain")
    for parser in (throughput, latency):
        parser.add_argument("--requests", type=int, metavar="N", help="requests to serve (128; of a model 8)")
        parser.add_argument("--input", type=_bounds, metavar="N,N", help="shortest and longest prompt")
        parser.add_argument("--output", type=_bounds, metavar="N,N", help="shortest and longest output")
    when = latency.add_mutually_exclusive_group()
    when.add_argument("--concurrency", type=int, metavar="N", help="requests at once, the next as one finishes (4)")
    when.add_argument("--rate", type=float, metavar="X", help="requests a second, at random distances")


def _command(commands: Any, name: str, run: Callable[[Namespace], int], about: str) -> ArgumentParser:
    parser = new_command(commands, name, run, about)
    parser.add_argument("--shape", metavar="NAME", help=f"instead of a model, on a GPU: one of {', '.join(SHAPES)}")
    parser.add_argument("--accept-length", type=float, metavar="X", help="of --shape at tree 5,8,64 (4)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    add_engine_flags(parser)
    return parser


def _bounds(text: str) -> tuple[int, int]:
    low, high = (int(part) for part in text.split(","))
    if not 1 <= low <= high:
        raise ValueError
    return low, high


_bounds.__name__ = "two whole numbers, the smaller first"


def run_prefill(asked: Namespace) -> int:
    groups = [_group(text) for text in asked.prompts or PROMPTS[asked.shape is not None]]
    _at_least_one(asked, "running")
    longest = max(length for _, length in groups)
    most = max(asked.running + 1, *(batch for batch, _ in groups))
    least = {"max_batch": asked.running + 1, "max_context": longest + 1}
    stands = _stands(asked, "bench prefill", most, longest + SPARE, **least)
    floors = FloorBench(shape_named(asked.shape)) if asked.shape and torch.cuda.is_available() else None
    with stands.open(True) as stand:
        # First, as it may find that it has no room.
        waited = pause(stand, asked.running, max(1, groups[0][1] // 8), groups[0][1])
        entered = [prefill(stand, *group, floors) for group in groups]
    rows = [["prompts", "ms", "tokens/s", "passes", "linear layers, ms", "their share"]]
    for each in entered:
        share = "" if each.linear_ms is None else f"{each.linear_ms / each.ms:.0%}"
        linear = "" if each.linear_ms is None else f"{each.linear_ms:.1f}"
        name, rate = f"{each.batch}x{each.length}", f"{each.tokens_per_second:.0f}"
        rows.append([name, f"{each.ms:.1f}", rate, f"{each.passes}", linear, share])
    figures = {"prefill": [each.as_dict() for each in entered], "pause": asdict(waited)}
    write_json(asked.json, {**_about(asked, stand.config), **figures})
    stdout().print(Text(aligned(rows)))
    who = f"{waited.running} running requests of {waited.context} tokens"
    calm = f"{waited.median_before_ms:.1f} ms between tokens (at most {waited.longest_before_ms:.1f})"
    during = f"at most {waited.longest_during_ms:.1f} while a prompt of {waited.length} enters"
    stdout().print(Text(f"{who} wait {calm}, {during}"))
    return 0


def run_throughput(asked: Namespace) -> int:
    served, config = _served(asked, "bench throughput", Arrivals())
    rows = [["", "tree", "plain"]]
    figures = {name: each.throughput() for name, each in served.items()}
    for name, form in {
        "seconds": "{:.2f}",
        "tokens_in_per_second": "{:.0f}",
        "tokens_out_per_second": "{:.0f}",
        "accept_length": "{:.2f}",
    }.items():
        rows.append([name.replace("_", " "), *(form.format(each[name]) for each in figures.values())])
    write_json(asked.json, {**_about(asked, config), **figures})
    stdout().print(Text(aligned(rows)))
    return 0


def run_latency(asked: Namespace) -> int:
    if asked.rate is not None:
        require_number("--rate", asked.rate, lambda rate: rate > 0, "more than 0")
    _at_least_one(asked, "concurrency")
    concurrency = None if asked.rate else asked.concurrency or 4
    served, config = _served(asked, "bench latency", Arrivals(concurrency, asked.rate))
    figures = {name: each.latency() for name, each in served.items()}
    rows = [["ms", "p50", "p90", "p99"]]
    for what in ("ttft_ms", "between_pieces_ms", "per_token_ms"):
        for name, each in figures.items():
            found = each[what] or {}
            rows.append(
                [f"{what.removesuffix('_ms').replace('_', ' ')}, {name}", *(f"{v:.1f}" for v in found.values())]
            )
    arrivals = {"concurrency": concurrency, "rate": asked.rate}
    write_json(asked.json, {**_about(asked, config), **arrivals, **figures})
    stdout().print(Text(aligned([row + [""] * (4 - len(row)) for row in rows])))
    return 0


def _served(asked: Namespace, what: str, arrivals: Arrivals) -> tuple[dict[str, Served], ResolvedConfig]:
    """By tree and plain, each after a turn that warms up; and the configuration of the tree."""
    _at_least_one(asked, "requests")
    named = asked.shape is not None
    load = mixed(asked.requests or REQUESTS[named], asked.input or INPUTS[named], asked.output or OUTPUTS[named])
    most = min(len(load.inputs), arrivals.concurrency or 64)
    stands = _stands(asked, what, most, load.longest + 2, max_context=load.longest)
    served, configs = {}, []
    for name, tree in (("tree", True), ("plain", False)):
        with stands.open(tree) as stand:
            prompts = stand.prompts(load.inputs)
            warm = Load(load.inputs[:most], (8,) * most)
            serve(stand.engine, prompts[:most], warm, Arrivals())
            served[name] = serve(stand.engine, prompts, load, arrivals)
            configs.append(stand.config)
    return served, configs[0]


def _stands(asked: Namespace, what: str, most: int, longest: int, **least: int) -> BenchEngines:
    """Where nothing is found in a prefix cache, unless that is asked for.  least: what sizes must not be below."""
    require_writable("--json", asked.json)
    sizes = {"max_batch": most, "max_context": longest, "prefix_cache": False}
    settings = sized(engine_settings(asked), sizes, **least)
    if asked.shape is None:
        if asked.accept_length is not None:
            raise EspalierError("--accept-length is for a named shape; give --shape, or leave it out")
        stdout().print(Text(header(), QUIET))
        return OfModel(settings)
    refused = [name for name in ("model", "draft", "device", "dtype", "model_overrides") if name in settings]
    if refused:
        raise EspalierError(f"{flag_of(refused[0])} is not for --shape, whose models are made here; leave one out")
    device = require_gpu(f"{what} --shape")
    recipe = recipe_of(asked.shape, settings.get("seed", 0), asked.accept_length)
    stdout().print(Text(header(), QUIET))
    return OfShape(recipe, settings, device)


def _about(asked: Namespace, config: ResolvedConfig) -> dict[str, Any]:
    return {"shape": asked.shape, "config": asdict(config)}


def _group(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if found is None:
        raise EspalierError(f"--prompts {text!r} is not a group of prompts; write such as 1x8192 or 32x1024")
    return int(found[1]), int(found[2])


def _at_least_one(asked: Namespace, name: str) -> None:
    value = getattr(asked, name)
    if value is not None and value < 1:
        raise EspalierError(f"{flag_of(name)}={value} is not supported; use 1 or more")
