"""The flags of `python -m lab attention`."""

from argparse import ArgumentParser

from espalier.terminal.flags import add_json_flag, whole_numbers


def add_flags(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--page-size", type=whole_numbers, default=[1, 16, 64, 256], metavar="N,N", help="page sizes (1,16,64,256)"
    )
    parser.add_argument("--backends", default="", metavar="A,B", help="names of backends (all that are installed)")
    add_json_flag(parser)
