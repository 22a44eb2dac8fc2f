"""The flags of `espalier doctor --tune`."""

from argparse import ArgumentParser
from pathlib import Path

# Formats of a synthetic target: those of espalier/models/quantisers.py; and of its draft, which has no stacked experts.
SHAPE_WEIGHTS = ("fp8", "fp8-block", "int4", "mxfp4")
DRAFT_WEIGHTS = SHAPE_WEIGHTS[:3]
LINEARS, EXPERTS = "linears", "experts"


def add_flags(parser: ArgumentParser) -> None:
    tuning = parser.add_argument_group("linear layers and experts")
    tuning.add_argument(
        "--tune",
        nargs="?",
        choices=(LINEARS, EXPERTS),
        const=LINEARS,
        help="measure which kernels are fastest on this GPU, for those of the model or of --shapes (linears)",
    )
    tuning.add_argument("--shapes", metavar="X,X", help="named shapes instead of a model, such as llama-3.1-8b")
    tuning.add_argument(
        "--weights", choices=SHAPE_WEIGHTS, help="of --tune --shapes: format of the target's matrices (dense)"
    )
    tuning.add_argument(
        "--draft-weights",
        choices=DRAFT_WEIGHTS,
        help="of --tune --shapes: format of the draft's matrices; without --weights only the draft is measured (dense)",
    )
    tuning.add_argument(
        "--seconds",
        type=float,
        metavar="N",
        help="of --tune linears: measure for about N seconds, the likely best first (until all are measured)",
    )
    tuning.add_argument(
        "--choices",
        type=Path,
        metavar="FILE",
        help="write the fastest ones there ($ESPALIER_CHOICES, or ~/.config/espalier/choices.json)",
    )
