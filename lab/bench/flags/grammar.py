"""The flags of `python -m lab grammar`."""

from argparse import ArgumentParser
from pathlib import Path

from lab.bench.flags import engines


def add_flags(parser: ArgumentParser) -> None:
    engines.add_flags(parser)
    parser.add_argument("--tokens", type=int, default=400, metavar="N", help="tokens of each request (400)")
    bulk = parser.add_mutually_exclusive_group()
    bulk.add_argument("--schemas", type=int, metavar="N", help="generate a value of each of N random JSON schemas")
    bulk.add_argument(
        "--suite",
        type=Path,
        metavar="FOLDER",
        help="the same for the schemas of a folder of the JSON-Schema-Test-Suite",
    )
