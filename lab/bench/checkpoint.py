"""`python -m lab foundry`: write a synthetic checkpoint, a target and its draft of a named shape, for any engine."""

import json
from argparse import Namespace

import torch
from rich.text import Text

from espalier.config import EngineConfig
from espalier.errors import EspalierError
from espalier.startup.resolve import choose_device
from espalier.terminal.console import DIM_STYLE, print_table, stdout, waiting
from lab.bench.synthetic_models import recipe_of_shape
from lab.shape_flags import SHAPE_FLAGS, shape_flag
from lab.synthetic.chain import predicted_accept_length
from lab.synthetic.checkpoint import Recipe, write_checkpoint

# Trees whose accept length is printed: steps, topk, nodes.
PREDICTED_TREES = ((5, 8, 64), (5, 4, 16), (3, 2, 8), (5, 1, 6))


def run(args: Namespace) -> int:
    device = choose_device(EngineConfig(device=args.device))
    recipe = _recipe_of_flags(args)
    chain = recipe.chain()
    try:
        with waiting(f"drawing and writing the weights of {args.shape}"):
            target, draft = write_checkpoint(recipe, args.out, getattr(torch, args.dtype), device)
    except OSError as error:
        raise EspalierError(f"--out {args.out} cannot be written ({error.strerror}); name another directory") from None
    rows = [["tree (steps, topk, nodes)", "greedy accept length, predicted"]]
    for tree in dict.fromkeys((args.tree, *PREDICTED_TREES)):
        if 0 < recipe.block_size < tree[0]:
            continue
        rows.append([", ".join(map(str, tree)), f"{predicted_accept_length(chain, *tree):.2f}"])
    print_table(rows)
    stdout().print(Text(json.dumps({"model": str(target), "draft": str(draft), "skill": recipe.skill}), DIM_STYLE))
    return 0


def _recipe_of_flags(args: Namespace) -> Recipe:
    if args.mode == "copy" and (args.skill, args.accept_length) != (None, None):
        raise EspalierError("--skill and --accept-length are for --mode chain; leave them out, or use that mode")
    if args.mode != "copy" and args.reach is not None:
        raise EspalierError("--reach is for --mode copy; leave it out, or use that mode")
    if args.accept_length is not None and args.accept_lengths is not None:
        raise EspalierError("--accept-lengths and --accept-length both set how good the draft is; leave one out")
    names = {"mode", "reach", "skill", *SHAPE_FLAGS} - {"accept_length"}
    recipe = recipe_of_shape(args.shape, args.seed, **{name: shape_flag(args, name) for name in names})
    if args.accept_length is None:
        return recipe
    if 0 < recipe.block_size < args.tree[0]:
        raise EspalierError(f"--tree has {args.tree[0]} steps, above --block-size={args.block_size}; lower it")
    return recipe.with_accept_length(args.accept_length, *args.tree)
