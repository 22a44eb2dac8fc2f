"""The flags of `espalier bench choose`."""

from argparse import ArgumentParser
from pathlib import Path

from espalier.bench.flags.trees import tree_shape
from espalier.terminal.flags import add_engine_flags, add_json_flag, whole_numbers


def add_flags(parser: ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table of trees there")
    parser.add_argument(
        "--candidates",
        type=tree_shape,
        nargs="+",
        default=[],
        metavar="S,K,D",
        help="steps, topk and num_draft_tokens of the trees to compare (the configured tree and smaller ones)",
    )
    parser.add_argument("--batch", type=whole_numbers, metavar="N,N", help="batch sizes (all)")
    parser.add_argument("--context", type=int, metavar="N", help="prompt length (128)")
    parser.add_argument("--tokens", type=int, metavar="N", help="tokens to generate for each prompt (96)")
    parser.add_argument("--repeats", type=int, metavar="N", help="repetitions; medians are shown (5)")
    add_json_flag(parser)
    add_engine_flags(parser)
