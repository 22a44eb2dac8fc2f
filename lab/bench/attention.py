"""`python -m lab attention`: attention over committed rows, backend by backend, in one process on one GPU.

Only the part that a backend of a library supplies is timed: attention over the prefix.  Layers and pages are those of
`python -m lab kernels`.  A backend that plans on the host is timed with a plan of exact lengths, as in lock-step, and
without, as in overlap; what the plan itself costs on the host is printed beside it.
"""

import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median

import torch
from rich.text import Text

from espalier.attention import BACKENDS, AttentionBackend, CommittedLengths, Support, grouped_backend
from espalier.bench.timing import Stopwatch
from espalier.errors import EspalierError
from espalier.layout import MAX_PAGE_SIZE
from espalier.terminal.console import QUIET, print_header, print_table, progress, require_writable, stdout, write_json
from espalier.terminal.flags import written
from espalier.terminal.machine import require_gpu
from lab.bench.kernels import DTYPE, FEW_HEADS, SPEC, TURNS, Inputs, Shape, inputs, layers_beyond_cache

SIZES = ((1, 64, 4096), (1, 64, 32768), (8, 32, 4096), (32, 16, 4096), (64, 8, 4096), (1, 8, 65536))
SHAPES = (
    *(Shape(*sizes, spec=spec) for spec in (SPEC, FEW_HEADS) for sizes in SIZES),
    *(Shape(1, 2048, 8192, spec=spec, chain=True) for spec in (SPEC, FEW_HEADS)),
)
PLANS = 20


@dataclass(frozen=True)
class Cell:
    """prefix_us: attention of one layer over the prefix; None: the backend refuses the cell, `refused` says why.

    host_us: of a plan on the host, for each launch.  error: the largest difference from our kernels' result.
    """

    shape: str
    heads: str
    page_size: int
    backend: str
    exact: bool
    prefix_us: float | None = None
    terabytes_per_second: float = 0.0
    tflops: float = 0.0
    host_us: float = 0.0
    error: float = 0.0
    refused: str = ""


def run(args: Namespace) -> int:
    if not all(1 <= size <= MAX_PAGE_SIZE for size in args.page_size):
        raise EspalierError(f"--page-size={written(args.page_size)} is not supported; use 1 to {MAX_PAGE_SIZE}")
    names = [name.strip() for name in args.backends.split(",") if name.strip()] or installed()
    unknown = [name for name in names if name not in BACKENDS]
    if unknown:
        raise EspalierError(f"--backends: {unknown[0]!r} is unknown; use some of {', '.join(BACKENDS)}")
    require_writable("--json", args.json)
    device = require_gpu("attention")
    print_header()
    cells: list[Cell] = []
    with progress("measuring", len(SHAPES) * len(args.page_size)) as advance:
        stopwatch = Stopwatch()
        for shape in SHAPES:
            for page_size in args.page_size:
                cells += measure(shape, page_size, names, device, stopwatch)
                advance()
    write_json(args.json, {"cells": [asdict(cell) for cell in cells]})
    stdout().print(Text("bfloat16, pages in no order; attention over the prefix alone, one layer", QUIET))
    print_table(_table(cells))
    return 0


def installed() -> list[str]:
    """The backends for a GPU that are installed, without the reference: it would need minutes."""
    return [
        name
        for name, made in BACKENDS.items()
        if made.support.is_installed and "cuda" in made.support.devices and name != "reference"
    ]


def measure(
    shape: Shape, page_size: int, names: Sequence[str], device: torch.device, stopwatch: Stopwatch
) -> list[Cell]:
    """A cell for each backend, and for each way to plan where that differs."""
    layers = layers_beyond_cache(shape, device)
    made = inputs(shape, page_size, layers, device)
    ours = BACKENDS["triton"]().plan(*made.of_plan).over_prefix(made.q, 0)[0].float()
    cells = []
    for name in names:
        for exact in (True, False) if _plans_on_the_host(BACKENDS[name].support) else (True,):
            place = str(shape), shape.heads, page_size, name, exact
            # A prompt's chunk is eager, and its lengths are always exact.
            if shape.chain and not exact:
                continue
            try:
                grouped_backend(name, device.type, DTYPE, page_size, [shape.spec], range(1), exact_lengths=exact)
            except EspalierError as refusal:
                cells.append(Cell(*place, refused=str(refusal)))
                continue
            cells.append(_timed(Cell(*place), BACKENDS[name](), shape, made, ours, stopwatch))
            torch.cuda.empty_cache()
    return cells


def _plans_on_the_host(support: Support) -> bool:
    return bool(support.needs_exact_lengths)


def _timed(
    cell: Cell, backend: AttentionBackend, shape: Shape, made: Inputs, ours: torch.Tensor, stopwatch: Stopwatch
) -> Cell:
    layers, lengths = len(made.of_plan[1]), (shape.context,) * shape.batch
    backend.prepare(CommittedLengths(lengths, cell.exact, in_graph=True))
    made.of_plan[2].planned.clear()
    attention = backend.plan(*made.of_plan)
    error = float((attention.over_prefix(made.q, 0)[0].float() - ours).abs().max())
    [ms] = stopwatch.ms([lambda: [attention.over_prefix(made.q, layer) for layer in range(layers)]], TURNS)
    us = 1e3 * ms / layers
    return replace(
        cell,
        prefix_us=us,
        terabytes_per_second=shape.kv_bytes / us / 1e6,
        tflops=replace(shape, chain=False).flops / us / 1e6,  # without the chunk's own rows
        host_us=_host_us(backend, lengths, cell.exact),
        error=error,
    )


def _host_us(backend: AttentionBackend, lengths: tuple[int, ...], exact: bool) -> float:
    """What `prepare` of a launch costs, with lengths that change as they do from round to round."""
    times = []
    for more in range(PLANS):
        announced = CommittedLengths(tuple(length - more for length in lengths), exact, in_graph=True)
        torch.cuda.synchronize()
        began = time.perf_counter()
        backend.prepare(announced)
        times.append(1e6 * (time.perf_counter() - began))
    return median(times)


def _table(cells: Sequence[Cell]) -> list[list[str]]:
    rows = [["requests x queries x committed", "heads", "page size", "backend", "prefix, us", "TB/s", "TFLOP/s"]]
    rows[0] += ["host, us", "differs by"]
    for cell in cells:
        ways = "" if cell.exact else ", overlap"
        row = [cell.shape, cell.heads, str(cell.page_size), f"{cell.backend}{ways}"]
        if cell.prefix_us is None:
            rows.append([*row, "refused", "", "", "", ""])
            continue
        rates = f"{cell.terabytes_per_second:.2f}", f"{cell.tflops:.0f}"
        rows.append([*row, f"{cell.prefix_us:.1f}", *rates, f"{cell.host_us:.0f}", f"{cell.error:.1g}"])
    return rows
