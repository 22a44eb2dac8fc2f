"""The flags of `espalier bench floor`."""

from argparse import ArgumentParser

from espalier.terminal.flags import SHAPE_NAMES, add_json_flag


def add_flags(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--shape", default="llama-3.1-8b", metavar="NAME", help=f"one of {', '.join(SHAPE_NAMES)} (llama-3.1-8b)"
    )
    parser.add_argument(
        "--rows", default="1,16,32,64,128,256,512", metavar="N,N", help="rows of a verify pass (1 to 512, doubling)"
    )
    add_json_flag(parser)
