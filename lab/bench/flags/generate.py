"""The flags of `python -m lab generate`."""

from argparse import ArgumentParser, ArgumentTypeError

from espalier.bench.flags.trees import tree_shape
from espalier.layout import PLAIN, TreeShape
from lab.bench.flags import engines


def add_flags(parser: ArgumentParser) -> None:
    engines.add_flags(parser)
    engines.add_prompts_flag(parser, "1x1024 8x1024", "1x128 8x128")
    parser.add_argument("--tokens", type=int, default=256, metavar="N", help="tokens of each request (256)")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="repetitions; medians are used (3)")
    parser.add_argument(
        "--tree",
        nargs="+",
        type=_tree,
        metavar="S,K,D|plain",
        help="trees (steps, topk, num_draft_tokens) to compare with plain decoding, each in an engine of its own, at "
        "every batch; `plain`: plain decoding alone; by default the engine's trees",
    )


def _tree(text: str) -> TreeShape:
    try:
        return PLAIN if text == "plain" else tree_shape(text)
    except ArgumentTypeError as error:
        raise ArgumentTypeError(f"{error}, or plain") from None
