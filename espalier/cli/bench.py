"""`espalier bench`: the table of its commands, which are modules of espalier/bench."""

from types import MappingProxyType

from espalier.cli.parser import Parser

# name -> (module, help)
COMMANDS = MappingProxyType(
    {
        "round": ("espalier.bench.round", "a round beside a plain token: time, accept length, memory"),
        "kernels": ("espalier.bench.kernels", "attention on a GPU beside its memory's bandwidth"),
        "prefill": ("espalier.bench.prefill", "prompts entering, and how long running requests wait for them"),
        "throughput": ("espalier.bench.throughput", "tokens a second of a mixed load, by tree and plain"),
        "latency": ("espalier.bench.latency", "time to first token and between tokens, by tree and plain"),
        "floor": ("espalier.bench.roofline", "the least that the linear layers of a pass take on this GPU"),
        "foundry": ("espalier.bench.checkpoint", "write a synthetic target and draft, known to the bit"),
        "serve": ("espalier.bench.serve", "a server beside LLM.generate: tokens a second, or a soak"),
    }
)


def add_flags(parser: Parser) -> None:
    parser.add_commands("measured", "what", COMMANDS)
