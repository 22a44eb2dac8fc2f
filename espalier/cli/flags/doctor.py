"""The flags of `espalier doctor`."""

from argparse import ArgumentParser

from espalier.bench.flags import tune
from espalier.terminal.flags import add_engine_flags


def add_flags(parser: ArgumentParser) -> None:
    tune.add_flags(parser)
    parser.add_argument("--matrix", action="store_true", help="print what each attention backend can run, and end")
    add_engine_flags(parser)
