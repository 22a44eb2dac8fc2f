"""The flags of `espalier demo`."""

from argparse import ArgumentParser

from espalier.terminal.flags import add_engine_flags


def add_flags(parser: ArgumentParser) -> None:
    parser.add_argument("--prompts", type=int, default=3, metavar="N", help="number of prompts (3)")
    parser.add_argument("--max-tokens", type=int, default=96, metavar="N", help="output tokens for each (96)")
    add_engine_flags(parser)
