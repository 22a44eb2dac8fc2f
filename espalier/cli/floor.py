"""`espalier bench floor`: what the linear layers of a pass cost at least, beside the bytes of their weights."""

from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.text import Text

from espalier.bench.floor import Ceilings, FloorBench, LinearTimes
from espalier.bench.linears import SHAPES, shape_named
from espalier.bench.machine import header
from espalier.cli.console import QUIET, aligned, stdout, write_json
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
    rows = [int(text) for text in asked.rows.split(",") if text.isdigit()]
    if not rows or ",".join(map(str, rows)) != asked.rows or min(rows) < 1:
        raise EspalierError(f"--rows={asked.rows} is not supported; use whole numbers, 1 or more, such as 1,16,64")
    bench = FloorBench(shape_named(asked.shape))
    stdout().print(Text(header(), QUIET))
    ceilings = bench.ceilings()
    times = [bench.target(count) for count in rows]
    stdout().print(Text(f"read {ceilings.bandwidth / 1e12:.2f} TB/s; bf16 product {ceilings.peak / 1e12:.0f} TFLOP/s"))
    stdout().print(Text(_table(times, ceilings)))
    figures = {"shape": asked.shape, "ceilings": asdict(ceilings), "passes": [asdict(each) for each in times]}
    write_json(asked.json, figures)
    return 0


def _table(times: list[LinearTimes], ceilings: Ceilings) -> str:
    lines = [["rows", "F.linear, ms", "fastest, ms", "weight bytes / bandwidth, ms"]]
    for each in times:
        bytes_ms = 1e3 * each.weight_bytes / ceilings.bandwidth
        lines.append([f"{each.rows}", f"{each.cublas_ms:.2f}", f"{each.fastest_ms:.2f}", f"{bytes_ms:.2f}"])
    return aligned(lines)
