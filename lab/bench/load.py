"""`python -m lab load`: as `espalier bench load`, also for a named shape."""

from argparse import Namespace

from espalier.bench import load_report
from lab.bench.engines import engines_of_flags

# Defaults of a named shape on a GPU, which is larger than the models that users name.
SHAPE_DEFAULTS = {"requests": 128, "input": (128, 2048), "output": (64, 512)}


def run(args: Namespace) -> int:
    for name, value in SHAPE_DEFAULTS.items():
        if args.shape is not None and getattr(args, name) is None:
            setattr(args, name, value)
    return load_report.run(args, engines_of_flags)
