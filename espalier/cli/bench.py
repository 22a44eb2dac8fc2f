"""`espalier bench`: the table of its commands, whose work is in modules of espalier/bench."""

from types import MappingProxyType

from espalier.cli.parser import Command, Parser

COMMANDS = MappingProxyType(
    {
        "load": Command(
            "tokens a second and waits under a mixed load",
            flags="espalier.bench.flags:load",
            work="espalier.bench.load_report",
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
