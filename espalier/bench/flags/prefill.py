"""The flags of `espalier bench prefill`."""

from argparse import ArgumentParser

from espalier.bench.flags import engines
from espalier.terminal.flags import prompt_group


def add_flags(parser: ArgumentParser) -> None:
    engines.add_flags(parser)
    parser.add_argument(
        "--prompts",
        nargs="+",
        type=prompt_group,
        metavar="NxL",
        help="N prompts of L tokens (with --shape: 1x8192 32x1024; of a model: 1x256 8x64)",
    )
    parser.add_argument(
        "--running", type=int, default=8, metavar="N", help="running requests that wait for the first prompt (8)"
    )
