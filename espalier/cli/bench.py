"""`espalier bench`: the table of its commands, whose work is in modules of espalier/bench."""

from types import MappingProxyType

from espalier.cli.parser import Command, Parser

COMMANDS = MappingProxyType(
    {
        "round": Command(
            "a round beside a plain token: time, accept length, memory",
            flags="espalier.bench.flags.round",
            work="espalier.bench.round",
        ),
        "generate": Command(
            "LLM.generate: time of a round and to the first token",
            flags="espalier.bench.flags.generate",
            work="espalier.bench.generate",
        ),
        "kernels": Command(
            "attention on a GPU, compared with its memory bandwidth",
            flags="espalier.bench.flags.kernels",
            work="espalier.bench.kernels",
        ),
        "attention": Command(
            "attention over a committed prefix, for each backend",
            flags="espalier.bench.flags.attention",
            work="espalier.bench.attention",
        ),
        "linears": Command(
            "linear layers on a GPU: time and bandwidth of each format",
            flags="espalier.bench.flags.linears",
            work="espalier.bench.linear_times",
        ),
        "prefill": Command(
            "time of prefill, and how long running requests wait for it",
            flags="espalier.bench.flags.prefill",
            work="espalier.bench.prefill",
        ),
        "throughput": Command(
            "tokens a second of a mixed load, tree and plain",
            flags="espalier.bench.flags.load",
            work="espalier.bench.throughput",
        ),
        "latency": Command(
            "time to the first token and between tokens, tree and plain",
            flags="espalier.bench.flags.latency",
            work="espalier.bench.latency",
        ),
        "floor": Command(
            "the shortest time of the linear layers of a pass on this GPU",
            flags="espalier.bench.flags.floor",
            work="espalier.bench.floor",
        ),
        "foundry": Command(
            "write a synthetic checkpoint: target and draft with known text",
            flags="espalier.bench.flags.foundry",
            work="espalier.bench.checkpoint",
        ),
        "loading": Command(
            "load a target from disk: GB/s and peak memory",
            flags="espalier.bench.flags.loading",
            work="espalier.bench.loading",
        ),
        "grammar": Command(
            "grammars: time of masks, other requests, many JSON schemas",
            flags="espalier.bench.flags.grammar",
            work="espalier.bench.grammar",
        ),
        "serve": Command(
            "a server: tokens/s, latency under load, or a soak test",
            flags="espalier.bench.flags.serve",
            work="espalier.bench.serve",
        ),
    }
)


def add_flags(parser: Parser) -> None:
    parser.add_commands("measured", "what", COMMANDS)
