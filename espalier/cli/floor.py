"""`espalier bench floor`: what the linear layers of a pass cost at least, beside the bytes of their weights."""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.text import Text

from espalier.bench.floor import FloorBench, LinearTimes, known_ms
from espalier.bench.linears import SHAPES, shape_named
from espalier.bench.machine import header
from espalier.bench.timing import Ceilings
from espalier.cli.console import QUIET, aligned, require_writable, stdout, write_json
from espalier.cli.flags import new_command
from espalier.errors import EspalierError


def add(commands: Any) -> None:
    parser = new_command(commands, "floor", run, "the least that the linear layers of a pass take on this GPU")
    parser.add_argument("--shape", default="llama-3.1-8b", metavar="X", help=f"one of {', '.join(SHAPES)}")
    parser.add_argument(
        "--rows", default="1,16,32,64,128,256,512", metavar="N,N", help="rows of a verify pass (1 to 512, doubling)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")


def run(asked: Namespace) -> int:
    rows = [int(text) for text in asked.rows.split(",") if text.isdecimal()]
    if not rows or ",".join(map(str, rows)) != asked.rows or min(rows) < 1:
        raise EspalierError(f"--rows={asked.rows} is not supported; use whole numbers, 1 or more, such as 1,16,64")
    require_writable("--json", asked.json)
    bench = FloorBench(shape_named(asked.shape))
    stdout().print(Text(header(), QUIET))
    ceilings = bench.ceilings()
    times = [bench.target(count) for count in rows]
    known = known_ms(asked.shape, torch.cuda.get_device_name())
    passes = [{**asdict(each), "known_ms": known.get(each.rows)} for each in times]
    write_json(asked.json, {"shape": asked.shape, "ceilings": asdict(ceilings), "passes": passes})
    stdout().print(Text(f"read {ceilings.bandwidth / 1e12:.2f} TB/s; bf16 product {ceilings.peak / 1e12:.0f} TFLOP/s"))
    stdout().print(Text(table(times, ceilings, known)))
    return 0


def table(times: Sequence[LinearTimes], ceilings: Ceilings, known: Mapping[int, float]) -> str:
    """known: by rows, what F.linear took on such a chip before, ms."""
    lines = [["rows", "F.linear, ms", "known, ms", "differs", "fastest, ms", "weight bytes / bandwidth, ms"]]
    for each in times:
        bytes_ms = 1e3 * each.weight_bytes / ceilings.bandwidth
        before = known.get(each.rows)
        beside = ("", "") if before is None else (f"{before:.2f}", f"{each.cublas_ms / before - 1:+.1%}")
        lines.append([f"{each.rows}", f"{each.cublas_ms:.2f}", *beside, f"{each.fastest_ms:.2f}", f"{bytes_ms:.2f}"])
    return aligned(lines)
