"""`python -m lab latency`: as `espalier bench latency`, also for a named shape."""

from argparse import Namespace

from espalier.bench import latency
from lab.bench.engines import engines_of
from lab.bench.throughput import fill_in


def run(args: Namespace) -> int:
    fill_in(args)
    return latency.run(args, engines_of)
