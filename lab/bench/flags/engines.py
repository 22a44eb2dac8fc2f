"""The flags of a model, or of a synthetic one, that several commands measure."""

import re
from argparse import ArgumentParser, ArgumentTypeError

from espalier.terminal.flags import add_engine_flags, add_json_flag
from lab.shape_flags import SHAPE_NAMES, add_shape_flags


def add_flags(parser: ArgumentParser) -> None:
    """The flags of engines_of (lab/bench/engines.py), and --json."""
    add_shape(parser)
    add_json_flag(parser)
    add_engine_flags(parser)


def add_shape(
    parser: ArgumentParser, accept_length: str = "accept length of the draft of --shape with tree 5,8,64 (4)"
) -> None:
    """accept_length: the help of that flag."""
    parser.add_argument(
        "--shape", metavar="NAME", help=f"instead of a model, on a GPU: one of {', '.join(SHAPE_NAMES)}"
    )
    parser.add_argument("--accept-length", type=float, metavar="X", help=accept_length)
    add_shape_flags(parser)


def add_prompts_flag(parser: ArgumentParser, of_shape: str, of_model: str) -> None:
    """--prompts.  of_shape, of_model: its defaults with --shape and for a model, for the help."""
    parser.add_argument(
        "--prompts",
        nargs="+",
        type=_prompt_group,
        metavar="NxL",
        help=f"N prompts of L tokens at once (with --shape: {of_shape}; of a model: {of_model})",
    )


def _prompt_group(text: str) -> tuple[int, int]:
    """(number of prompts, their length) of NxL."""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if match is None:
        raise ArgumentTypeError(f"{text!r} is not a group of prompts; write such as 1x8192 or 32x1024")
    return int(match[1]), int(match[2])
