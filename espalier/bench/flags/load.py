"""The flags of `espalier bench throughput`, and those that `espalier bench latency` has too."""

from argparse import ArgumentParser
from collections.abc import Mapping

from espalier.bench.flags import engines

# Defaults: {True: of a named shape on a GPU, False: of a model}.  A bundled model is small.
INPUTS = {True: (128, 2048), False: (16, 128)}
OUTPUTS = {True: (64, 512), False: (16, 64)}
REQUESTS = {True: 128, False: 8}


def add_flags(parser: ArgumentParser) -> None:
    engines.add_flags(parser)
    parser.add_argument(
        "--requests", type=int, metavar="N", help="requests to serve (with --shape: 128; of a model: 8)"
    )
    parser.add_argument(
        "--input", type=bounds, metavar="N,N", help=f"tokens of the shortest and longest prompt ({_both(INPUTS)})"
    )
    parser.add_argument(
        "--output", type=bounds, metavar="N,N", help=f"tokens of the shortest and longest output ({_both(OUTPUTS)})"
    )


def _both(lengths: Mapping[bool, tuple[int, int]]) -> str:
    """The defaults in words, of a shape and of a model."""
    shape, model = (",".join(map(str, lengths[named])) for named in (True, False))
    return f"with --shape: {shape}; of a model: {model}"


def bounds(text: str) -> tuple[int, int]:
    """The type of a flag that takes the shortest and the longest length."""
    low, high = (int(part) for part in text.split(","))
    if not 1 <= low <= high:
        raise ValueError
    return low, high


bounds.__name__ = "pair of whole numbers, the smaller first, such as 16,64"
