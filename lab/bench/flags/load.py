"""The flags of `python -m lab throughput`, and those that `latency` has too."""

from argparse import ArgumentParser

from espalier.bench.flags import load
from lab.bench.flags import engines


def add_flags(parser: ArgumentParser) -> None:
    engines.add_flags(parser)
    load.add_load_flags(
        parser,
        *(
            f"with --shape: {shape}; of a model: {model}"
            for shape, model in (("128", "8"), ("128,2048", "16,128"), ("64,512", "16,64"))
        ),
    )
