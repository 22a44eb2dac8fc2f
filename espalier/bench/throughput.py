"""`espalier bench throughput`: tokens a second of a mixed load that arrives at once, with the tree and plain."""

from argparse import Namespace
from collections.abc import Callable

from espalier.bench.engines import BenchEngines, engines_of
from espalier.bench.load import Arrivals, tree_and_plain
from espalier.terminal.console import print_table, write_json

FORMATS = (
    ("seconds", "{:.2f}"),
    ("tokens_in_per_second", "{:.0f}"),
    ("tokens_out_per_second", "{:.0f}"),
    ("accept_length", "{:.2f}"),
)


def run(args: Namespace, engines_of: Callable[..., BenchEngines] = engines_of) -> int:
    served, config = tree_and_plain(args, Arrivals(), engines_of)
    figures = {name: each.throughput() for name, each in served.items()}
    write_json(args.json, {"config": config.as_dict(), **figures})
    lines = [
        [name.replace("_", " "), *(form.format(each[name]) for each in figures.values())] for name, form in FORMATS
    ]
    print_table([["", *figures], *lines])
    return 0
