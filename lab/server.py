"""`python -m lab server`: `espalier serve` with synthetic models of a named shape instead of a model's files."""

from argparse import ArgumentParser, Namespace
from typing import Any

from espalier.cli import serve
from espalier.errors import EspalierError
from espalier.terminal.flags import engine_settings
from lab.shape_flags import SHAPE_NAMES, add_shape_flags, shape_settings

SHAPE_WORKER = "lab.shape_worker"


def add_flags(parser: ArgumentParser) -> None:
    serve.add_flags(parser)
    shape = parser.add_argument_group("the synthetic model, on a GPU, without a tokenizer")
    shape.add_argument("--shape", required=True, metavar="NAME", help=f"one of {', '.join(SHAPE_NAMES)}")
    shape.add_argument("--accept-length", type=float, metavar="X", help="accept length of the draft (4)")
    add_shape_flags(shape)


def run(args: Namespace) -> int:
    """Raises EspalierError for flags that do not go with --shape."""
    if args.replicas is not None:
        raise EspalierError("--shape is for one engine; leave out --replicas")
    return serve.serve_worker(args, *_shape_settings(args), SHAPE_WORKER)


def _shape_settings(args: Namespace) -> tuple[dict[str, Any], str]:
    """(settings for the engine process, the model's name).  Raises EspalierError for flags that --shape rules out."""
    # Imported here, because these modules import PyTorch, which the API server needs only after it has read the flags.
    from lab.bench.engines import refuse_settings_of_shape
    from lab.bench.synthetic_models import recipe_with_accept_length

    settings = engine_settings(args)
    refuse_settings_of_shape(settings if args.model == "auto" else {"model": args.model})
    recipe = shape_settings(args, settings)
    recipe_with_accept_length(**recipe)
    return {"recipe": recipe, "settings": serve.plain_settings(settings)}, args.shape
