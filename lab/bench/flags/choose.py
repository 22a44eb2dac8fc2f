"""The flags of `python -m lab choose`."""

from argparse import ArgumentParser

from espalier.bench.flags import choose
from lab.bench.flags import engines


def add_flags(parser: ArgumentParser) -> None:
    choose.add_flags(parser)
    engines.add_shape(
        parser,
        "with --shape: accept length of the synthetic draft with tree 5,8,64 (4); of a model: accept length of "
        "the configured tree, from which those of other trees are predicted (by default all are measured)",
    )
