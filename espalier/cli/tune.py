"""`espalier doctor --tune`: measure the linear layers here, and write what is fastest into a file the engine reads."""

from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path

import torch
from rich.text import Text

from espalier.bench.linears import ModelShape, Shape, shape_named
from espalier.bench.machine import header, installed
from espalier.bench.tune import Measured, Tuner, as_choices
from espalier.cli.console import QUIET, aligned, progress, stdout
from espalier.config import EngineConfig
from espalier.engine.load import Checkpoint, find
from espalier.errors import EspalierError
from espalier.kernels.choices import Table, own_file, write
from espalier.kernels.linear import Choice
from espalier.models import ModelConfig

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def add(parser: ArgumentParser) -> None:
    tuning = parser.add_argument_group("linear layers")
    tuning.add_argument(
        "--tune", action="store_true", help="measure those of the given model, or of --shapes, on this GPU"
    )
    tuning.add_argument("--shapes", metavar="X,X", help="named sizes instead of a model, such as llama-3.1-8b")
    tuning.add_argument("--choices", type=Path, metavar="FILE", help="write what is fastest there (your own file)")


def run(asked: Namespace, config: EngineConfig) -> int:
    dtype = "bfloat16" if config.dtype == "auto" else config.dtype
    if dtype not in DTYPES:
        raise EspalierError(f"--tune measures bfloat16 and float16, not {dtype}; other dtypes take F.linear")
    shapes = _named(asked.shapes.split(",")) if asked.shapes else _of(find(config))
    tuner, path = Tuner(DTYPES[dtype]), asked.choices or own_file()
    stdout().print(Text(header(), QUIET))
    found: dict[Shape, list[Measured]] = {}
    with progress("measuring", len(shapes)) as advance:
        for shape in shapes:
            found[shape] = tuner.measure(shape)
            advance()
    about = {"gpu": torch.cuda.get_device_name(), "torch": str(torch.__version__), "triton": installed("triton")}
    write(path, Table(tuner.chip, dtype, {shape: as_choices(rows) for shape, rows in found.items()}, about))
    stdout().print(Text(_table([bucket for rows in found.values() for bucket in rows])))
    stdout().print(Text(f"written to {path}"))
    return 0


def _named(names: list[str]) -> tuple[Shape, ...]:
    return tuple(dict.fromkeys(shape for name in names for shape in shape_named(name).shapes()))


def _of(found: Checkpoint) -> tuple[Shape, ...]:
    """Every shape of a checkpoint, target and draft."""
    runs = _sizes(found.target).target_pass(1)
    if found.draft is not None:
        head = replace(
            _sizes(found.draft.layer), draft_vocab=found.draft.draft_vocab, captured=len(found.draft.capture)
        )
        runs = (*runs, *head.draft_pass(1, fused_rows=1))
    return tuple(dict.fromkeys(run.shape for run in runs))


def _sizes(config: ModelConfig) -> ModelShape:
    return ModelShape(
        hidden=config.hidden_size,
        layers=config.num_layers,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_size=config.head_size,
        intermediate=config.intermediate_size,
        vocab=config.vocab_size,
    )


def _table(measured: list[Measured]) -> str:
    lines = [["weight", "rows", "F.linear, µs", "ours, µs", "taken"]]
    for bucket in measured:
        shape = f"{bucket.shape[0]} x {bucket.shape[1]}"
        taken = "F.linear" if bucket.chosen is None else _launch(bucket.chosen)
        lines.append([shape, f"{bucket.rows}", f"{bucket.cublas_us:.1f}", f"{bucket.ours_us:.1f}", taken])
    return aligned(lines)


def _launch(choice: Choice) -> str:
    return f"{choice.block_out}x{choice.block_in}, {choice.splits} parts, {choice.stages} stages, {choice.warps} warps"
