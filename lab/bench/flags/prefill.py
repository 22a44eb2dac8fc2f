"""The flags of `python -m lab prefill`."""

from argparse import ArgumentParser

from lab.bench.flags import engines


def add_flags(parser: ArgumentParser) -> None:
    engines.add_flags(parser)
    engines.add_prompts_flag(parser, "1x8192 32x1024", "1x256 8x64")
    parser.add_argument(
        "--running", type=int, default=8, metavar="N", help="running requests that wait for the first prompt (8)"
    )
