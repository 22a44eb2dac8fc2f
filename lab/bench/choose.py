"""`python -m lab choose`: like `espalier bench choose`, also for named shapes and with predicted accept lengths."""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from functools import partial

from espalier.bench.choose import choose, fill_and_check_flags
from espalier.bench.shapes import find_shape
from espalier.layout import TreeShape
from espalier.terminal.console import print_header
from espalier.terminal.flags import engine_settings
from lab.bench.engines import engines_with_settings
from lab.shape_flags import refuse_shape_flags
from lab.synthetic.chain import predicted_accept_length
from lab.synthetic.checkpoint import Recipe

# Accept lengths are predicted on the synthetic chain with the vocabulary of this shape.
PREDICTION_SHAPE = "llama-3.1-8b"


def run(args: Namespace) -> int:
    fill_and_check_flags(args)
    if args.shape is None:
        refuse_shape_flags(args, but=("accept_length",))
    predict = None
    if args.accept_length is not None and args.shape is None:
        predict = partial(predicted_accept_lengths, args.accept_length)
    print_header()
    choose(args, engine_settings(args), partial(engines_with_settings, args), predict)
    return 0


def predicted_accept_lengths(
    accept_length: float, configured: TreeShape, shapes: Sequence[TreeShape], is_block: bool = False
) -> Mapping[TreeShape, float]:
    """Predict the accept length of each tree on the synthetic chain.

    The draft is one that reaches `accept_length` with the configured tree.  is_block: it is a block draft, equally good
    at every depth.  Raises EspalierError if no draft reaches the accept length.
    """
    block_size = configured.steps if is_block else 0
    recipe = Recipe(find_shape(PREDICTION_SHAPE), block_size=block_size).with_accept_length(
        accept_length, **configured.sizes
    )
    chain = recipe.chain()
    known = {configured: accept_length}
    return known | {shape: known.get(shape) or predicted_accept_length(chain, **shape.sizes) for shape in shapes}
