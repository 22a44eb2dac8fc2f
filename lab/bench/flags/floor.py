"""The flags of `python -m lab floor`."""

from argparse import ArgumentParser

from espalier.terminal.flags import add_json_flag
from lab.shape_flags import SHAPE_NAMES


def add_flags(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--shape", default="llama-3.1-8b", metavar="NAME", help=f"one of {', '.join(SHAPE_NAMES)} (llama-3.1-8b)"
    )
    parser.add_argument(
        "--rows", default="1,16,32,64,128,256,512", metavar="N,N", help="rows of a verify pass (1 to 512, doubling)"
    )
    add_json_flag(parser)
