"""The flags of `espalier bench linears`."""

from argparse import ArgumentParser

from espalier.terminal.flags import SHAPE_NAMES, SHAPE_WEIGHTS, add_json_flag


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
        default="dense,fp8,fp8-block,int4,nvfp4,mxfp4",
        metavar="NAME,NAME",
        help=f"formats of their weights: dense, {', '.join(SHAPE_WEIGHTS)} (dense,fp8,fp8-block,int4,nvfp4,mxfp4)",
    )
    parser.add_argument("--rows", default="1,4,16,64", metavar="N,N", help="rows of the inputs (1,4,16,64)")
    add_json_flag(parser)
