"""The flags of a model, or of a synthetic one, that several commands measure."""

from argparse import ArgumentParser

from espalier.terminal.flags import SHAPE_NAMES, add_engine_flags, add_json_flag, add_shape_flags


def add_flags(parser: ArgumentParser) -> None:
    """The flags of engines_of (espalier/bench/engines.py), and --json."""
    parser.add_argument(
        "--shape",
        metavar="NAME",
        help=f"instead of a model, on a GPU: one of {', '.join(SHAPE_NAMES)}",
    )
    parser.add_argument("--accept-length", type=float, metavar="X", help="of the draft of --shape, at tree 5,8,64 (4)")
    add_shape_flags(parser)
    add_json_flag(parser)
    add_engine_flags(parser)
