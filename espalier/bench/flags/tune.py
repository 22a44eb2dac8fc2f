"""The flags of `espalier doctor --tune`."""

from argparse import ArgumentParser
from pathlib import Path

from espalier.terminal.flags import DRAFT_WEIGHTS, SHAPE_WEIGHTS

LINEARS, EXPERTS = "linears", "experts"


def add_flags(parser: ArgumentParser) -> None:
    tuning = parser.add_argument_group("linear layers and experts")
    tuning.add_argument(
        "--tune",
        nargs="?",
        choices=(LINEARS, EXPERTS),
        const=LINEARS,
        help="measure those of the given model, or of --shapes, on this GPU (linears)",
    )
    tuning.add_argument("--shapes", metavar="X,X", help="named sizes instead of a model, such as llama-3.1-8b")
    tuning.add_argument("--weights", choices=SHAPE_WEIGHTS, help="of --tune --shapes: quantised matrices (dense)")
    tuning.add_argument(
        "--draft-weights", choices=DRAFT_WEIGHTS, help="of --tune --shapes: those of the draft too, or alone (dense)"
    )
    tuning.add_argument(
        "--seconds",
        type=float,
        metavar="N",
        help="of --tune linears: measure for about so long, the likely best first (until all are)",
    )
    tuning.add_argument("--choices", type=Path, metavar="FILE", help="write what is fastest there (your own file)")
