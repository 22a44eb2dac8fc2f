"""Flags of the commands whose modules import PyTorch, apart from those modules: see espalier/cli/parser.py."""

from argparse import ArgumentParser
from pathlib import Path
from types import MappingProxyType

from espalier.bench import flags
from espalier.cli.parser import Command, Parser
from espalier.terminal.flags import add_engine_flags


def demo(parser: ArgumentParser) -> None:
    parser.add_argument("--prompts", type=int, default=3, metavar="N", help="number of prompts (3)")
    parser.add_argument("--max-tokens", type=int, default=96, metavar="N", help="output tokens for each (96)")
    add_engine_flags(parser)


def doctor(parser: ArgumentParser) -> None:
    flags.tune(parser)
    parser.add_argument("--matrix", action="store_true", help="print what each attention backend can run, and end")
    add_engine_flags(parser)


def quantize(parser: ArgumentParser) -> None:
    parser.add_argument("model", help="a target or a draft: a directory, a Hugging Face id, or 'bundled' (a target)")
    parser.add_argument("--to", required=True, choices=("fp8", "int4"), help="the format of the copy")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="an empty or new directory")
    parser.add_argument("--device", default="auto", help="device to compute on: auto, cpu or cuda (auto)")
    parser.add_argument("--draft", metavar="DIR", help="of a target: also compare accept lengths with this draft")
    parser.add_argument(
        "--target",
        metavar="DIR",
        help="of a draft: compare accept lengths with this target (the target that the draft names)",
    )
    parser.add_argument(
        "--texts",
        type=int,
        default=32,
        metavar="N",
        help="compare with the original on N held-out texts, or without a tokenizer on texts that the original "
        "generates; 0: do not compare (32)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there as well")


BENCH = MappingProxyType(
    {
        "load": Command(
            "tokens a second and waits under a mixed load",
            flags="espalier.bench.flags:load",
            work="espalier.bench.load_report",
        ),
        "choose": Command(
            "the fastest tree at each batch, for --by-batch",
            flags="espalier.bench.flags:choose",
            work="espalier.bench.choose",
        ),
    }
)


def bench(parser: Parser) -> None:
    parser.add_commands("measured", "what", BENCH)
