"""`espalier doctor`: machine, versions, and what a configuration comes to here; nothing is loaded."""

from argparse import Namespace
from typing import Any

from rich.text import Text

from espalier.bench.machine import describe, installed
from espalier.cli import tune
from espalier.cli.console import QUIET, stdout
from espalier.cli.flags import add_engine_flags, engine_settings, flag_of, new_command
from espalier.config import EngineConfig, is_open
from espalier.errors import EspalierError
from espalier.startup.load import find, resolve_config

OPTIONAL = ("triton", "flashinfer-python", "accelerate")


def add(commands: Any, name: str) -> None:
    parser = new_command(commands, name, run, "machine, versions, resolved configuration")
    tune.add(parser)
    add_engine_flags(parser, leave_out=("plant_fault",))


def run(asked: Namespace) -> int:
    if asked.tune:
        return tune.run(asked, EngineConfig(**engine_settings(asked)))
    for name in ("shapes", "choices"):
        if getattr(asked, name) is not None:
            raise EspalierError(f"{flag_of(name)} is for --tune; give that, or leave it out")
    config = EngineConfig(**engine_settings(asked))
    console = stdout()
    console.print(Text("machine", "bold"))
    about = describe() | {package: installed(package) for package in OPTIONAL}
    for name, value in about.items():
        console.print(Text(f"  {name:<18} {value}"))
    found = find(config)
    resolved = resolve_config(config, found)
    console.print(Text("resolved configuration", "bold"))
    console.print(Text(resolved.block()))
    if resolved.device != "cpu" and is_open(config.num_pages):
        console.print(Text("  num_pages is an estimate here: it is measured when the models are loaded", QUIET))
    target = found.target
    console.print(Text("model", "bold"))
    console.print(
        Text(
            f"  {target.architecture}: {target.num_layers} layers of {target.hidden_size}, {target.heads} heads over "
            f"{target.kv_heads}, vocabulary {target.vocab_size}, {target.max_position} positions"
        )
    )
    console.print(Text("everything fits", QUIET))
    return 0
