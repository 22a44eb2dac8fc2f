"""`espalier doctor --tune`: measure the linear layers here, and write what is fastest into a file the engine reads."""

from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path

import torch
from rich.text import Text

from espalier.bench.linears import ModelShape, Shape, shape_named
from espalier.bench.machine import header, installed, require_gpu
from espalier.bench.tune import Measured, Tuner, as_choices
from espalier.bench.tune import Table as ByRows
from espalier.cli.console import QUIET, aligned, progress, require_writable, stdout
from espalier.cli.flags import flag_of, given_flags
from espalier.config import EngineConfig, is_open
from espalier.errors import EspalierError
from espalier.kernels.layers.linear import LibraryPlan, LinearPlan
from espalier.kernels.layers.linear_tuning import Table, own_file, read, write
from espalier.models import ModelConfig
from espalier.startup.load import Checkpoint, find
from espalier.startup.resolve import choose_device

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}

# What is heeded with --shapes, and of a model besides.
NAMED, OF_MODEL = ("device", "dtype"), ("model", "draft", "model_overrides")


def add(parser: ArgumentParser) -> None:
    tuning = parser.add_argument_group("linear layers")
    tuning.add_argument(
        "--tune", action="store_true", help="measure those of the given model, or of --shapes, on this GPU"
    )
    tuning.add_argument("--shapes", metavar="X,X", help="named sizes instead of a model, such as llama-3.1-8b")
    tuning.add_argument("--choices", type=Path, metavar="FILE", help="write what is fastest there (your own file)")


def run(asked: Namespace, config: EngineConfig) -> int:
    honoured = NAMED if asked.shapes else (*NAMED, *OF_MODEL)
    if refused := [flag_of(name) for name in given_flags(asked) if name not in honoured]:
        raise EspalierError(f"{refused[0]} is not for --tune{' --shapes' if asked.shapes else ''}; leave one out")
    path = asked.choices or own_file()
    if path.parent.is_dir():  # else it is made
        require_writable("--choices", path)
    if path.exists():
        read(path)  # what is measured is put beside what stands there
    require_gpu("--tune")
    device = choose_device(config)
    if device.type != "cuda":
        raise EspalierError(f"--tune measures on a GPU, and device is {device}; use --device cuda")
    with torch.cuda.device(device):
        return _run(asked, config)


def _run(asked: Namespace, config: EngineConfig) -> int:
    found = None if asked.shapes else find(config)
    dtype = _dtype(config, found)
    models = [shape_named(name) for name in asked.shapes.split(",")] if found is None else [_of(found)]
    shapes = tuple(dict.fromkeys(shape for model in models for shape in model.shapes()))
    tuner, path = Tuner(DTYPES[dtype]), asked.choices or own_file()
    stdout().print(Text(header(), QUIET))
    alone: dict[Shape, list[Measured]] = {}
    table: ByRows = {}
    with progress("measuring", len(shapes) + len(models)) as advance:
        for shape in shapes:
            alone[shape] = tuner.alone(shape)
            advance()
        for model in models:
            tuner.among_neighbours(model, alone, table)
            advance()
    about = {"gpu": torch.cuda.get_device_name(), "torch": str(torch.__version__), "triton": installed("triton")}
    write(path, Table(tuner.chip, dtype, as_choices(table), about))
    stdout().print(Text(_lines([bucket for rows in alone.values() for bucket in rows], table)))
    stdout().print(Text(f"written to {path}"))
    return 0


def _dtype(config: EngineConfig, found: Checkpoint | None) -> str:
    """What the engine would run in: what is set, else the checkpoint's own.  Raises EspalierError."""
    stored = found.target.raw.get("dtype") or found.target.raw.get("torch_dtype") if found else None
    dtype = (stored or "bfloat16") if is_open(config.dtype) else config.dtype
    if dtype not in DTYPES:
        raise EspalierError(f"--tune measures bfloat16 and float16, not {dtype}; other dtypes take F.linear")
    return dtype


def _of(found: Checkpoint) -> ModelShape:
    """The sizes of a checkpoint and of its draft."""
    sizes, head = _sizes(found.target), found.draft
    if head is None:
        return sizes
    return replace(sizes, draft_vocab=head.spec.vocab_size, captured=len(head.spec.capture), draft=_sizes(head.layer))


def _sizes(config: ModelConfig) -> ModelShape:
    if config.latent is not None:
        raise EspalierError(
            f"--tune does not measure the linear layers of latent attention ({config.architecture}); leave --tune out, "
            "and they run with F.linear"
        )
    return ModelShape(
        hidden=config.hidden_size,
        layers=config.num_layers,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_size=config.head_size,
        intermediate=config.intermediate_size,
        vocab=config.vocab_size,
    )


def _lines(measured: list[Measured], table: ByRows) -> str:
    lines = [["weight", "rows", "F.linear, µs", "ours, µs", "taken among its neighbours"]]
    for bucket in measured:
        shape = f"{bucket.shape[0]} x {bucket.shape[1]}"
        taken = _taken(table[bucket.shape, bucket.rows])
        lines.append([shape, f"{bucket.rows}", f"{bucket.cublas_us:.1f}", f"{bucket.ours_us:.1f}", taken])
    return aligned(lines)


def _taken(way: LinearPlan) -> str:
    if way is None:
        return "F.linear"
    if isinstance(way, LibraryPlan):
        return f"F.linear, {way.pieces} pieces" if way.splits == 1 else f"F.linear, {way.splits} parts"
    return f"{way.block_out}x{way.block_in}, {way.splits} parts, {way.stages} stages, {way.warps} warps"
