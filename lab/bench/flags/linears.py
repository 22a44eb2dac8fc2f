"""The flags of `python -m lab linears`."""

from argparse import ArgumentParser

from espalier.bench.flags.tune import SHAPE_WEIGHTS
from espalier.terminal.flags import add_json_flag
from lab.shape_flags import SHAPE_NAMES


def add_flags(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--shape",
        default="llama-3.1-8b",
        choices=SHAPE_NAMES,
        metavar="NAME",
        help=f"whose layers are measured: one of {', '.join(SHAPE_NAMES)} (llama-3.1-8b)",
    )
    parser.add_argument(
        "--weights",
        default="dense,fp8,fp8-block,int4,mxfp4",
        metavar="NAME,NAME",
        help=f"formats of their weights: dense, {', '.join(SHAPE_WEIGHTS)} (dense,fp8,fp8-block,int4,mxfp4)",
    )
    parser.add_argument("--rows", default="1,4,16,64", metavar="N,N", help="rows of the inputs (1,4,16,64)")
    add_json_flag(parser)
