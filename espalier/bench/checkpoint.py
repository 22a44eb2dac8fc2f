"""`espalier bench foundry`: write a synthetic checkpoint, a target and its draft of a named shape, for any engine."""

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path

import torch
from rich.text import Text

from espalier.config import DTYPES, EngineConfig
from espalier.errors import EspalierError
from espalier.kernels.layers.linear_tuning import DENSE
from espalier.models.quantisers import QUANTISERS
from espalier.startup.resolve import choose_device
from espalier.synthetic.chain import MODES, predicted_accept_length
from espalier.synthetic.checkpoint import Recipe, write
from espalier.synthetic.mtp import FORMS
from espalier.synthetic.shapes import SHAPES, find_shape
from espalier.terminal.console import QUIET, print_table, stdout

# Trees whose accept length is printed: steps, topk, nodes.
TREES = ((5, 8, 64), (5, 4, 16), (3, 2, 8), (5, 1, 6))


def add_flags(parser: ArgumentParser) -> None:
    parser.add_argument("--shape", required=True, metavar="NAME", help=f"one of {', '.join(SHAPES)}")
    parser.add_argument(
        "--out", required=True, type=Path, metavar="DIR", help="DIR/target and DIR/draft are made there"
    )
    parser.add_argument("--seed", type=int, default=Recipe.seed, metavar="N", help="seed of all weights (0)")
    parser.add_argument(
        "--mode", choices=MODES, default=Recipe.mode, help="copy: the text depends on K/V rows far back (chain)"
    )
    parser.add_argument(
        "--reach", type=int, default=Recipe.reach, metavar="N", help="farthest position back in mode copy (256)"
    )
    parser.add_argument(
        "--routing-correlation",
        type=float,
        default=Recipe.routing_correlation,
        metavar="X",
        help="from 0 (each token's experts are random) to 1 (neighbouring tokens share theirs) (0)",
    )
    parser.add_argument(
        "--mtp-layers",
        type=int,
        default=Recipe.mtp_layers,
        metavar="N",
        help="the draft is an MTP head of N layers; 0: an EAGLE-3 head (0)",
    )
    parser.add_argument(
        "--mtp-form",
        choices=FORMS,
        default=Recipe.mtp_form,
        help="what the MTP layers read: the layer before, or the target (chain)",
    )
    parser.add_argument(
        "--block-size",
        type=int,
        default=Recipe.block_size,
        metavar="N",
        help="the draft is a block draft that proposes N tokens a pass; 0: no block draft (0)",
    )
    parser.add_argument(
        "--block-fade",
        type=float,
        default=Recipe.block_fade,
        metavar="X",
        help="of the block draft: its skill at each depth, divided by that at the depth before (1)",
    )
    parser.add_argument(
        "--weights", choices=(DENSE, *QUANTISERS), default=DENSE, help="format of the target's matrices (dense)"
    )
    skill = parser.add_mutually_exclusive_group()
    skill.add_argument(
        "--skill", type=float, metavar="X", help=f"how often the draft's first guess is right ({Recipe.skill})"
    )
    skill.add_argument(
        "--accept-length", type=float, metavar="X", help="choose the skill that gives this accept length at --tree"
    )
    parser.add_argument("--tree", type=_tree, default=TREES[0], metavar="S,K,D", help="steps, topk, nodes (5,8,64)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="dtype of the files (bfloat16)")
    parser.add_argument("--device", default="cpu", help="where weights are drawn; they differ by device (cpu)")


def _tree(text: str) -> tuple[int, int, int]:
    steps, topk, nodes = (int(part) for part in text.split(","))
    return steps, topk, nodes


_tree.__name__ = "tree: steps,topk,nodes, such as 5,8,64"


def run(args: Namespace) -> int:
    device = choose_device(EngineConfig(device=args.device))
    recipe = _recipe(args)
    chain = recipe.chain()
    try:
        target, draft = write(recipe, args.out, getattr(torch, args.dtype), device)
    except OSError as error:
        raise EspalierError(f"--out {args.out} cannot be written ({error.strerror}); name another directory") from None
    rows = [["tree (steps, topk, nodes)", "greedy accept length, predicted"]]
    for tree in dict.fromkeys((args.tree, *TREES)):
        if args.block_size and tree[0] > args.block_size:
            continue
        rows.append([", ".join(map(str, tree)), f"{predicted_accept_length(chain, *tree):.2f}"])
    print_table(rows)
    stdout().print(Text(json.dumps({"model": str(target), "draft": str(draft), "skill": recipe.skill}), QUIET))
    return 0


def _recipe(args: Namespace) -> Recipe:
    if args.mode == "copy" and (args.skill, args.accept_length) != (None, None):
        raise EspalierError("--skill and --accept-length are for --mode chain; leave them out, or use that mode")
    if args.block_size and args.mtp_layers:
        raise EspalierError("--block-size and --mtp-layers name two drafts; leave one out")
    if args.block_size < 0 or not 0 < args.block_fade <= 1:
        raise EspalierError(
            f"--block-size={args.block_size}, --block-fade={args.block_fade} are not supported; use 0 or more tokens, "
            "and a fade above 0, up to 1"
        )
    if args.accept_length is not None and 0 < args.block_size < args.tree[0]:
        raise EspalierError(f"--tree has {args.tree[0]} steps, above --block-size={args.block_size}; lower it")
    skill = Recipe.skill if args.skill is None else args.skill
    draft = {name: getattr(args, name) for name in ("mtp_layers", "mtp_form", "block_size", "block_fade", "weights")}
    recipe = Recipe(find_shape(args.shape), args.seed, args.mode, skill, args.reach, args.routing_correlation, **draft)
    return recipe if args.accept_length is None else recipe.with_accept_length(args.accept_length, *args.tree)
