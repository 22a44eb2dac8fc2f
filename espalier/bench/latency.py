"""`espalier bench latency`: time to the first token and between tokens under a mixed load, with the tree and plain."""

from argparse import Namespace
from collections.abc import Callable

from espalier.bench.engines import BenchEngines, engines_of
from espalier.bench.load import TIMES, Arrivals, title_of, tree_and_plain
from espalier.errors import require_number
from espalier.terminal.console import print_table, write_json
from espalier.terminal.flags import require_at_least_one


def run(args: Namespace, engines_of: Callable[..., BenchEngines] = engines_of) -> int:
    if args.rate is not None:
        require_number("--rate", args.rate, lambda rate: rate > 0, "more than 0")
    require_at_least_one(args, "concurrency")
    concurrency = None if args.rate else args.concurrency or 4
    served, config = tree_and_plain(args, Arrivals(concurrency, args.rate), engines_of)
    figures = {name: each.latency() for name, each in served.items()}
    arrivals = {"concurrency": concurrency, "rate": args.rate}
    write_json(args.json, {"config": config.as_dict(), **arrivals, **figures})
    # Of few requests, p90 and p99 are the slowest one.
    rows = [[f"ms, of {len(served['plain'].requests)} requests", "p50", "p90", "p99"]]
    for times in TIMES:
        for name, each in figures.items():
            percentiles = [f"{value:.1f}" for value in (each[times] or {}).values()]
            title = f"{title_of(times)}, {name}"
            rows.append([title, *(percentiles or [""] * 3)])
    print_table(rows)
    return 0
