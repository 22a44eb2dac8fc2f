"""The flags of a synthetic model of a named shape."""

import json
from argparse import ArgumentParser, Namespace, _ArgumentGroup
from collections.abc import Collection, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from espalier.bench.flags import DRAFT_WEIGHTS, SHAPE_WEIGHTS
from espalier.config import is_unresolved
from espalier.errors import EspalierError
from espalier.terminal.flags import flag_of

# The flags of a synthetic model besides --shape.
SHAPE_FLAGS = (
    "layers", "accept_length", "accept_lengths", "routing_correlation", "mtp_layers", "mtp_form", "block_size",
    "block_fade", "weights", "draft_weights",
)  # fmt: skip
# The names of espalier/bench/shapes.py.  They are repeated here because the help must not import PyTorch.
SHAPE_NAMES = (
    "llama-3.1-8b", "llama-3.1-70b", "llama-3.2-1b", "qwen3-8b", "qwen3-30b-a3b", "deepseek-v2-lite",
    "deepseek-v3-1gpu", "deepseek-v3-cut", "deepseek-v3.2-cut", "gpt-oss-20b", "gemma-4-31b", "gemma-4-26b-a4b",
    "ministral3-14b", "qwen3.6-27b", "qwen3.6-35b-a3b", "nemotron-30b-a3b", "phi-4",
)  # fmt: skip


def add_shape_flags(parser: ArgumentParser | _ArgumentGroup) -> None:
    """Flags of a synthetic model besides --shape and --accept-length."""
    parser.add_argument(
        "--layers", type=int, metavar="N", help="of --shape: the first N layers alone, where memory ends before all"
    )
    parser.add_argument(
        "--accept-lengths",
        type=Path,
        metavar="FILE",
        help="in place of --accept-length: JSON, a list of how often a guess is accepted at each depth where the one "
        'before was, or an accept length by draft length, {"1": 1.8, "2": 2.4}, as golden curves have it',
    )
    parser.add_argument(
        "--routing-correlation",
        type=float,
        metavar="X",
        help="for experts: from 0 (each token's experts are random) to 1 (neighbouring tokens share theirs) (0)",
    )
    parser.add_argument(
        "--mtp-layers",
        type=int,
        metavar="N",
        help="of --shape: make the draft an MTP head of N layers, not an EAGLE-3 head",
    )
    parser.add_argument(
        "--mtp-form",
        choices=("chain", "target"),
        help="what each MTP layer reads: chain, the layer before it; target, the target (chain)",
    )
    parser.add_argument(
        "--block-size",
        type=int,
        metavar="N",
        help="of --shape: make the draft a block draft with edges (DSpark) that proposes N tokens a pass",
    )
    parser.add_argument(
        "--block-fade",
        type=float,
        metavar="X",
        help="of the block draft: how good it is at each depth, as a share of the depth before (1)",
    )
    parser.add_argument(
        "--weights",
        choices=SHAPE_WEIGHTS,
        help="of --shape: format of the target's matrices; mxfp4 is for stacked experts, as in gpt-oss-20b",
    )
    parser.add_argument(
        "--draft-weights",
        choices=DRAFT_WEIGHTS,
        help="of --shape: format of the draft's matrices, its own head included; int4 leaves a matrix dense if 128 "
        "does not divide its number of columns",
    )


def acceptance_by_depth(path: Path) -> list[float]:
    """Read --accept-lengths: how often a guess is accepted at each depth if the guess before it was accepted.

    Raises EspalierError.
    """
    try:
        content = json.loads(path.read_text())
        if isinstance(content, dict):
            lengths = [1.0, *(float(content[str(depth)]) for depth in range(1, len(content) + 1))]
            reached = [1.0, *(after - before for before, after in pairwise(lengths))]
            content = [after / before for before, after in pairwise(reached)]
        rates = [float(rate) for rate in content]
    except OSError as error:
        raise EspalierError(f"--accept-lengths {path} cannot be read ({error.strerror}); use another file") from None
    except (ValueError, TypeError, KeyError, ZeroDivisionError, RecursionError):
        rates = []
    if not rates or not all(0 < rate <= 1 for rate in rates):
        raise EspalierError(
            f"--accept-lengths {path} holds no acceptance; use a JSON list of rates above 0 to 1, one a depth, or an "
            "object of accept lengths by draft length from 1 on, each gain at most the one before"
        )
    return rates


def seed_of(settings: Mapping[str, Any]) -> int:
    """The seed of synthetic models: --seed, else 0.  settings: the engine settings that were given as flags."""
    seed: Any = settings.get("seed")
    return 0 if is_unresolved(seed) else seed


def shape_settings(args: Namespace, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of recipe_with_accept_length (lab/bench/synthetic_models.py) from the flags of a synthetic model.

    settings: of the engine.
    """
    of_engine = {"seed": seed_of(settings), "model_impl": settings.get("model_impl")}
    return {"shape": args.shape, **of_engine, **{name: shape_flag(args, name) for name in SHAPE_FLAGS}}


def shape_flag(args: Namespace, name: str) -> Any:
    """Returns the value of one of SHAPE_FLAGS; for --accept-lengths the contents of the file.  Raises EspalierError."""
    value = getattr(args, name)
    return acceptance_by_depth(value) if name == "accept_lengths" and value is not None else value


def refuse_shape_flags(args: Namespace, but: Collection[str] = ()) -> None:
    """Raises EspalierError for a flag of a synthetic model without --shape.  but: flags that are allowed."""
    for name in SHAPE_FLAGS:
        if name not in but and getattr(args, name) is not None:
            raise EspalierError(f"{flag_of(name)} is for a named shape; give --shape, or leave it out")
