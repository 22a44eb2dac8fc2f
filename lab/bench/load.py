"""`python -m lab load`: like `espalier bench load`, also for named shapes."""

from argparse import Namespace

from espalier.bench import load_report
from lab.bench.engines import engines_of_flags

# Defaults for a named shape on a GPU.
SHAPE_DEFAULTS = {"requests": 128, "input": (128, 2048), "output": (64, 512)}


def run(args: Namespace) -> int:
    for name, value in SHAPE_DEFAULTS.items():
        if args.shape is not None and getattr(args, name) is None:
            setattr(args, name, value)
    return load_report.run(args, engines_of_flags)
