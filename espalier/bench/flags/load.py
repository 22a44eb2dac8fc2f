"""The flags of `espalier bench throughput`, and those that `espalier bench latency` has too."""

from argparse import ArgumentParser

from espalier.terminal.flags import add_engine_flags, add_json_flag

# Tokens of the shortest and longest prompt and output.
INPUTS, OUTPUTS = (16, 128), (16, 64)
REQUESTS = 8


def add_flags(parser: ArgumentParser) -> None:
    add_json_flag(parser)
    add_engine_flags(parser)
    add_load_flags(parser, "8", "16,128", "16,64")


def add_load_flags(parser: ArgumentParser, requests: str, inputs: str, outputs: str) -> None:
    """The flags of a load.  The other arguments: its defaults, for the help."""
    parser.add_argument("--requests", type=int, metavar="N", help=f"requests to serve ({requests})")
    parser.add_argument(
        "--input", type=bounds, metavar="N,N", help=f"tokens of the shortest and longest prompt ({inputs})"
    )
    parser.add_argument(
        "--output", type=bounds, metavar="N,N", help=f"tokens of the shortest and longest output ({outputs})"
    )


def bounds(text: str) -> tuple[int, int]:
    """The type of a flag that takes the shortest and the longest length."""
    low, high = (int(part) for part in text.split(","))
    if not 1 <= low <= high:
        raise ValueError
    return low, high


bounds.__name__ = "pair of whole numbers, the smaller first, such as 16,64"
