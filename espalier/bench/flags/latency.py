"""The flags of `espalier bench latency`."""

from argparse import ArgumentParser

from espalier.bench.flags import load


def add_flags(parser: ArgumentParser) -> None:
    load.add_flags(parser)
    add_arrival_flags(parser)


def add_arrival_flags(parser: ArgumentParser) -> None:
    arrivals = parser.add_mutually_exclusive_group()
    arrivals.add_argument("--concurrency", type=int, metavar="N", help="requests at once, constantly (4)")
    arrivals.add_argument("--rate", type=float, metavar="X", help="requests a second, as a Poisson process")
