"""`espalier bench`: the table of its commands, whose work is in modules of espalier/bench."""

from types import MappingProxyType

from espalier.cli.parser import Command, Parser

COMMANDS = MappingProxyType(
    {
        "throughput": Command(
            "tokens a second of a mixed load, tree and plain",
            flags="espalier.bench.flags:throughput",
            work="espalier.bench.throughput",
        ),
        "latency": Command(
            "time to the first token and between tokens, tree and plain",
            flags="espalier.bench.flags:latency",
            work="espalier.bench.latency",
        ),
        "serve": Command(
            "latency of running servers under load",
            flags="espalier.bench.flags:serve",
            work="espalier.bench.open_loop",
        ),
        "choose": Command(
            "the fastest tree at each batch, for --by-batch",
            flags="espalier.bench.flags:choose",
            work="espalier.bench.choose",
        ),
    }
)


def add_flags(parser: Parser) -> None:
    parser.add_commands("measured", "what", COMMANDS)
