"""The flags of the laboratory's benches: a function for each command.  None imports PyTorch."""

import re
from argparse import ArgumentParser, ArgumentTypeError
from pathlib import Path

from espalier.bench import flags
from espalier.bench.flags import SHAPE_WEIGHTS, parse_tree_shape
from espalier.config import DTYPES
from espalier.layout import PLAIN_TREE, TreeShape
from espalier.terminal.flags import add_engine_flags, add_json_flag, whole_numbers
from lab.shape_flags import SHAPE_NAMES, add_shape_flags

ACCEPT_LENGTH_HELP = "accept length of the draft of --shape with tree 5,8,64 (4)"
# The kinds of text of `lab sources`.
SOURCE_TEXTS = ("code", "prose", "edited")
CELL_EXAMPLES = "1x1024:5,8,64, 8x1024:plain, 8x1024:auto or 1x8192:5,8,64@1,64 (BATCHxCONTEXT:STEPS,TOPK,NODES@PAGES)"


def engines(parser: ArgumentParser) -> None:
    """The flags of engines_of_flags (lab/bench/engines.py), and --json."""
    _add_shape(parser)
    add_json_flag(parser)
    add_engine_flags(parser)


def _add_shape(parser: ArgumentParser, accept_length: str = ACCEPT_LENGTH_HELP) -> None:
    """accept_length: the help of that flag."""
    parser.add_argument(
        "--shape", metavar="NAME", help=f"instead of a model, on a GPU: one of {', '.join(SHAPE_NAMES)}"
    )
    parser.add_argument("--accept-length", type=float, metavar="X", help=accept_length)
    add_shape_flags(parser)


def _add_prompts(parser: ArgumentParser, of_shape: str, of_model: str) -> None:
    """--prompts.  of_shape, of_model: its defaults with --shape and for a model, for the help."""
    parser.add_argument(
        "--prompts",
        nargs="+",
        type=_prompt_group,
        metavar="NxL",
        help=f"N prompts of L tokens at once (with --shape: {of_shape}; of a model: {of_model})",
    )


def _add_page_sizes(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--page-size", type=whole_numbers, default=[1, 16, 64, 256], metavar="N,N", help="page sizes (1,16,64,256)"
    )


def round(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--acceptance", action="store_true", help="accept length on held-out text, several ways to draft"
    )
    parser.add_argument("--batch", type=whole_numbers, metavar="N,N", help="batch sizes (1)")
    parser.add_argument("--context", type=whole_numbers, metavar="N,N", help="prompt lengths (128)")
    parser.add_argument("--tokens", type=int, metavar="N", help="tokens to generate for each prompt (96)")
    parser.add_argument("--repeats", type=int, metavar="N", help="repetitions; medians are shown (5)")
    parser.add_argument("--prompts", type=int, metavar="N", help="held-out prompts of --acceptance (16)")
    parser.add_argument(
        "--trees",
        type=parse_tree_shape,
        nargs="+",
        default=[],
        metavar="S,K,D",
        help="of --acceptance: measure these trees alone, in each form of an MTP draft",
    )
    parser.add_argument(
        "--page-size", type=whole_numbers, metavar="N,N", help="tokens a page of the cache (16); several with --shape"
    )
    parser.add_argument("--compare", choices=("transformers",), help="measure transformers.generate too")
    add_json_flag(parser)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="plot the cells into this .png, .svg or .pdf")
    _add_shaped_flags(parser)
    add_engine_flags(parser, leave_out=("page_size",))


def _add_shaped_flags(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("synthetic models of a named shape, on a GPU")
    group.add_argument("--shape", metavar="NAME", help=f"one of {', '.join(SHAPE_NAMES)}")
    group.add_argument("--accept-length", type=float, metavar="X", help=ACCEPT_LENGTH_HELP)
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


def generate(parser: ArgumentParser) -> None:
    engines(parser)
    _add_prompts(parser, "1x1024 8x1024", "1x128 8x128")
    parser.add_argument("--tokens", type=int, default=256, metavar="N", help="tokens of each request (256)")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="repetitions; medians are used (3)")
    parser.add_argument(
        "--tree",
        nargs="+",
        type=_tree_or_plain,
        metavar="S,K,D|plain",
        help="trees (steps, topk, num_draft_tokens) to compare with plain decoding, each in an engine of its own, at "
        "every batch; `plain`: plain decoding alone; by default the engine's trees",
    )


def kernels(parser: ArgumentParser) -> None:
    _add_page_sizes(parser)
    parser.add_argument(
        "--in-order", action="store_true", help="use consecutive pages, as a pool that was never full gives them"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=("attention", "experts", "states"),
        metavar="PART",
        help="parts to time: attention, experts, states (all)",
    )
    add_json_flag(parser)


def attention(parser: ArgumentParser) -> None:
    _add_page_sizes(parser)
    parser.add_argument("--backends", default="", metavar="A,B", help="names of backends (all that are installed)")
    add_json_flag(parser)


def sharing(parser: ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=200, metavar="N", help="requests of each kind (200)")
    parser.add_argument("--tokens", type=int, default=71, metavar="N", help="tokens of each recorded request (71)")
    add_json_flag(parser)


def mixes(parser: ArgumentParser) -> None:
    parser.add_argument("--shape", required=True, metavar="NAME", help=f"one of {', '.join(SHAPE_NAMES)}")
    parser.add_argument("--layers", type=int, metavar="N", help="the first N layers alone")
    parser.add_argument(
        "--batch",
        type=whole_numbers,
        default=[64, 32, 16, 8, 96, 1],
        metavar="N,N",
        help="batch sizes, in this order (64,32,16,8,96,1)",
    )
    parser.add_argument("--context", type=int, default=512, metavar="N", help="tokens of each prompt (512)")
    parser.add_argument("--finding", type=int, default=80, metavar="N", help="rounds in which trees are found (80)")
    parser.add_argument("--rounds", type=int, default=40, metavar="N", help="rounds to time (40)")
    parser.add_argument("--even", action="store_true", help="without trees whose rows are shared out")
    parser.add_argument("--mix", action="append", metavar="NAME", help="a mix of skills, such as 'all 0.8' (all mixes)")
    add_json_flag(parser)


def defaults(parser: ArgumentParser) -> None:
    parser.add_argument("--model", default="bundled", help="a directory, a Hugging Face id, or 'bundled' (bundled)")
    parser.add_argument("--chat", action="store_true", help="ask a chat model, in place of texts that it continues")
    parser.add_argument("--prompts", type=int, default=2, metavar="N", help="prompts of each kind of text (2)")
    parser.add_argument("--tokens", type=int, default=96, metavar="N", help="tokens of each answer (96)")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="repetitions; medians are shown (3)")
    add_json_flag(parser)


def sources(parser: ArgumentParser) -> None:
    parser.add_argument("--prompts", type=int, default=8, metavar="N", help="prompts of each kind of text (8)")
    parser.add_argument(
        "--texts",
        nargs="+",
        choices=SOURCE_TEXTS,
        default=SOURCE_TEXTS,
        metavar="TEXT",
        help=f"kinds of text, of {', '.join(SOURCE_TEXTS)} (all)",
    )
    parser.add_argument(
        "--temperature", type=float, nargs="+", default=[0.0, 1.0], metavar="T", help="temperatures (0 1)"
    )
    parser.add_argument("--tokens", type=int, default=96, metavar="N", help="tokens of each answer (96)")
    add_json_flag(parser)


def linears(parser: ArgumentParser) -> None:
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


def ranks(parser: ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="ranks, each on a GPU of its own (2)")
    parser.add_argument("--rows", default="1,16,64,512,2048,4096", metavar="N,N", help="rows of a sum (1 to 4096)")
    parser.add_argument("--hidden", type=int, default=4096, metavar="N", help="columns of a sum (4096)")
    parser.add_argument("--vocab", type=int, default=128256, metavar="N", help="logits of a row (128256)")
    add_json_flag(parser)


def bits(parser: ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="ranks that share the model (2)")
    parser.add_argument("--passes", type=int, default=10_000, metavar="N", help="passes of the target (10000)")
    parser.add_argument("--device", default="auto", help="as of espalier")
    parser.add_argument("--max-batch", type=int, default=4, metavar="N", help="requests of a round (4)")
    add_json_flag(parser)


def prefill(parser: ArgumentParser) -> None:
    engines(parser)
    _add_prompts(parser, "1x8192 32x1024", "1x256 8x64")
    parser.add_argument(
        "--running", type=int, default=8, metavar="N", help="running requests that wait for the first prompt (8)"
    )


def load(parser: ArgumentParser) -> None:
    engines(parser)
    defaults = ("128", "8"), ("128,2048", "16,128"), ("64,512", "16,64")
    flags.add_load_flags(parser, *(f"with --shape: {shape}; of a model: {model}" for shape, model in defaults))
    flags.add_server_flags(parser.add_argument_group("running servers, in place of an engine"))


def choose(parser: ArgumentParser) -> None:
    flags.choose(parser)
    _add_shape(
        parser,
        "with --shape: accept length of the synthetic draft with tree 5,8,64 (4); of a model: accept length of the "
        "configured tree, from which those of other trees are predicted (by default all are measured)",
    )


def floor(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--shape", default="llama-3.1-8b", metavar="NAME", help=f"one of {', '.join(SHAPE_NAMES)} (llama-3.1-8b)"
    )
    parser.add_argument(
        "--rows", default="1,16,32,64,128,256,512", metavar="N,N", help="rows of a verify pass (1 to 512, doubling)"
    )
    add_json_flag(parser)


def loading(parser: ArgumentParser) -> None:
    parser.add_argument("model", help="the target: a directory, a Hugging Face id, or 'bundled'")
    parser.add_argument("--device", default="auto", help="device onto which it is loaded: auto, cpu or cuda (auto)")
    parser.add_argument(
        "--dtype",
        default="bfloat16",
        choices=("bfloat16", "float16", "float32"),
        help="dtype of the loaded weights (bfloat16)",
    )
    add_json_flag(parser)


def grammar(parser: ArgumentParser) -> None:
    engines(parser)
    parser.add_argument("--tokens", type=int, default=400, metavar="N", help="tokens of each request (400)")
    bulk = parser.add_mutually_exclusive_group()
    bulk.add_argument("--schemas", type=int, metavar="N", help="generate a value of each of N random JSON schemas")
    bulk.add_argument(
        "--suite",
        type=Path,
        metavar="FOLDER",
        help="the same for the schemas of a folder of the JSON-Schema-Test-Suite",
    )


def serve(parser: ArgumentParser) -> None:
    parser.add_argument("--soak", type=int, metavar="N", help="send N requests of all kinds, many of which disconnect")
    parser.add_argument(
        "--bad-host",
        action="store_true",
        help="how long other clients wait while one host sends large or broken requests",
    )
    parser.add_argument("--concurrency", metavar="N,N", help="requests at once (1,16)")
    parser.add_argument("--context", type=int, metavar="N", help="prompt length (128)")
    parser.add_argument("--tokens", type=int, metavar="N", help="tokens to generate for each prompt (96)")
    parser.add_argument("--repeats", type=int, metavar="N", help="repetitions; medians are shown (5)")
    engines(parser)


def foundry(parser: ArgumentParser) -> None:
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
    parser.add_argument(
        "--tree", type=_tree_sizes, default=(5, 8, 64), metavar="S,K,D", help="steps, topk, nodes (5,8,64)"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="dtype of the files (bfloat16)")
    parser.add_argument(
        "--device",
        default="cpu",
        help="device that draws the weights; another kind of device draws other weights (cpu)",
    )


def _prompt_group(text: str) -> tuple[int, int]:
    """(number of prompts, their length) of NxL."""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if match is None:
        raise ArgumentTypeError(f"{text!r} is not a group of prompts; write such as 1x8192 or 32x1024")
    return int(match[1]), int(match[2])


def _tree_or_plain(text: str) -> TreeShape:
    try:
        return PLAIN_TREE if text == "plain" else parse_tree_shape(text)
    except ArgumentTypeError as error:
        raise ArgumentTypeError(f"{error}, or plain") from None


def _tree_sizes(text: str) -> tuple[int, int, int]:
    steps, topk, nodes = (int(part) for part in text.split(","))
    return steps, topk, nodes


_tree_sizes.__name__ = "tree: steps,topk,nodes, such as 5,8,64"


def learn(parser: ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=32768, metavar="N", help="new tokens before a training (32768)")
    parser.add_argument("--seconds", type=int, default=600, metavar="N", help="longest time of a training (600)")
    parser.add_argument("--prompts", type=int, default=24, metavar="N", help="prompts after each swap (24)")
    topics = ("prose", "code", "logs")
    parser.add_argument(
        "--topics", nargs="+", choices=topics, default=topics, help=f"one after another ({' '.join(topics)})"
    )
    parser.add_argument("--busy", action="store_true", help="the trainer without its low priority, on a busy machine")
    add_json_flag(parser)
