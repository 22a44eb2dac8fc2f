"""`espalier bench throughput`: tokens a second of a mixed load that arrives at once, with the tree and plain."""

from argparse import Namespace

from espalier.bench.engines import about
from espalier.bench.load import Arrivals, tree_and_plain
from espalier.terminal.console import print_table, write_json

FORMATS = (
    ("seconds", "{:.2f}"),
    ("tokens_in_per_second", "{:.0f}"),
    ("tokens_out_per_second", "{:.0f}"),
    ("accept_length", "{:.2f}"),
)


def run(args: Namespace) -> int:
    served, config = tree_and_plain(args, Arrivals())
    figures = {name: each.throughput() for name, each in served.items()}
    write_json(args.json, {**about(args, config), **figures})
    lines = [
        [name.replace("_", " "), *(form.format(each[name]) for each in figures.values())] for name, form in FORMATS
    ]
    print_table([["", *figures], *lines])
    return 0
