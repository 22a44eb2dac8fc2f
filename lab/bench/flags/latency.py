"""The flags of `python -m lab latency`."""

from argparse import ArgumentParser

from espalier.bench.flags.latency import add_arrival_flags
from lab.bench.flags import load


def add_flags(parser: ArgumentParser) -> None:
    load.add_flags(parser)
    add_arrival_flags(parser)
