"""The flags of `python -m lab kernels`."""

from argparse import ArgumentParser

from espalier.terminal.flags import add_json_flag, whole_numbers


def add_flags(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--page-size", type=whole_numbers, default=[1, 16, 64, 256], metavar="N,N", help="page sizes (1,16,64,256)"
    )
    parser.add_argument(
        "--in-order", action="store_true", help="use consecutive pages, as a pool that was never full gives them"
    )
    add_json_flag(parser)
