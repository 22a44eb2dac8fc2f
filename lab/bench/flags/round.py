"""The flags of `python -m lab round`."""

from argparse import ArgumentParser
from pathlib import Path

from espalier.bench.flags.trees import tree_shape
from espalier.terminal.flags import add_engine_flags, add_json_flag, whole_numbers
from lab.shape_flags import SHAPE_NAMES, add_shape_flags

CELL_EXAMPLES = "1x1024:5,8,64, 8x1024:plain or 1x8192:5,8,64@1,64 (BATCHxCONTEXT:STEPS,TOPK,NODES@PAGES)"


def add_flags(parser: ArgumentParser) -> None:
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--acceptance", action="store_true", help="accept length on held-out text, several ways to draft")
    mode.add_argument(
        "--memory", action="store_true", help="pages held by 50 mixed requests at page 256, topk 8; minutes on a CPU"
    )
    parser.add_argument("--batch", type=whole_numbers, metavar="N,N", help="batch sizes (1)")
    parser.add_argument("--context", type=whole_numbers, metavar="N,N", help="prompt lengths (128)")
    parser.add_argument("--tokens", type=int, metavar="N", help="tokens to generate for each prompt (96)")
    parser.add_argument("--repeats", type=int, metavar="N", help="repetitions; medians are shown (5)")
    parser.add_argument("--prompts", type=int, metavar="N", help="held-out prompts of --acceptance (16)")
    parser.add_argument(
        "--trees",
        type=tree_shape,
        nargs="+",
        default=[],
        metavar="S,K,D",
        help="of --acceptance: measure these trees alone, in each form of an MTP draft, and after hits and rejections",
    )
    parser.add_argument(
        "--page-size",
        type=whole_numbers,
        metavar="N,N",
        help="tokens a page of the cache (16); several with --shape",
    )
    parser.add_argument("--compare", choices=("transformers",), help="measure transformers.generate too")
    add_json_flag(parser)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="plot the cells into this .png, .svg or .pdf")
    _add_shaped_flags(parser)
    add_engine_flags(parser, leave_out=("page_size",))


def _add_shaped_flags(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("synthetic models of a named shape, on a GPU")
    group.add_argument("--shape", metavar="NAME", help=f"one of {', '.join(SHAPE_NAMES)}")
    group.add_argument(
        "--accept-length", type=float, metavar="X", help="accept length of the draft of --shape with tree 5,8,64 (4)"
    )
    add_shape_flags(parser)
    group.add_argument("--cells", nargs="+", metavar="CELL", help=f"such as {CELL_EXAMPLES}; plain decoding is added")
    group.add_argument(
        "--figures", type=Path, metavar="FILE", help="measure nothing: plot the figures that --json wrote"
    )
    group.add_argument("--rounds", type=int, metavar="N", help="full-batch rounds to time (40)")
    group.add_argument(
        "--own-size",
        action="store_true",
        help="give each cell an engine as large as the cell, as in the older tables of docs/log.md; by default the "
        "cells of a tree share an engine of the size that a user gets",
    )
    group.add_argument("--all-buckets", action="store_true", help="with --own-size: capture the rounds of every bucket")
