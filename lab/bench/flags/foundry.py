"""The flags of `python -m lab foundry`."""

from argparse import ArgumentParser
from pathlib import Path

from espalier.config import DTYPES
from lab.shape_flags import SHAPE_NAMES, add_shape_flags


def add_flags(parser: ArgumentParser) -> None:
    parser.add_argument("--shape", required=True, metavar="NAME", help=f"one of {', '.join(SHAPE_NAMES)}")
    parser.add_argument(
        "--out",
        required=True,
        type=Path,
        metavar="DIR",
        help="the target is written into DIR/target, the draft into DIR/draft",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of all weights (0)")
    parser.add_argument(
        "--mode",
        choices=("chain", "copy"),
        default="chain",
        help="chain: each token depends on the one before; copy: on K/V rows far back too (chain)",
    )
    parser.add_argument("--reach", type=int, metavar="N", help="farthest position back in mode copy (256)")
    add_shape_flags(parser)
    skill = parser.add_mutually_exclusive_group()
    skill.add_argument("--skill", type=float, metavar="X", help="how often the draft's first guess is right (0.8)")
    skill.add_argument(
        "--accept-length", type=float, metavar="X", help="choose the skill that gives this accept length at --tree"
    )
    parser.add_argument("--tree", type=_tree, default=(5, 8, 64), metavar="S,K,D", help="steps, topk, nodes (5,8,64)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="dtype of the files (bfloat16)")
    parser.add_argument(
        "--device",
        default="cpu",
        help="device that draws the weights; another kind of device draws other weights (cpu)",
    )


def _tree(text: str) -> tuple[int, int, int]:
    steps, topk, nodes = (int(part) for part in text.split(","))
    return steps, topk, nodes


_tree.__name__ = "tree: steps,topk,nodes, such as 5,8,64"
