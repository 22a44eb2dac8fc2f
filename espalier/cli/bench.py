"""`espalier bench`: the table of its commands, which are modules of espalier/bench."""

from types import MappingProxyType

from espalier.cli.parser import Parser

# name -> (module, help)
COMMANDS = MappingProxyType(
    {
        "round": ("espalier.bench.round", "a round compared with a plain token: time, accept length, memory"),
        "generate": ("espalier.bench.generate", "LLM.generate: time of a round and to the first token, tree and plain"),
        "kernels": ("espalier.bench.kernels", "attention on a GPU, compared with its memory bandwidth"),
        "attention": ("espalier.bench.attention", "attention over committed rows, backend by backend, in one process"),
        "linears": ("espalier.bench.linear_times", "linear layers on a GPU, format by format, by bandwidth"),
        "prefill": ("espalier.bench.prefill", "how long prompts take to enter, and how long running requests wait"),
        "throughput": ("espalier.bench.throughput", "tokens a second of a mixed load, with the tree and plain"),
        "latency": ("espalier.bench.latency", "time to first token and between tokens, with the tree and plain"),
        "floor": ("espalier.bench.roofline", "the least time of the linear layers of a pass on this GPU"),
        "foundry": (
            "espalier.bench.checkpoint",
            "write a synthetic checkpoint: target and draft with known text",
        ),
        "loading": ("espalier.bench.loading", "a target from disk: GB/s beside the disk alone, and peak memory"),
        "grammar": ("espalier.bench.grammar", "grammars: time of masks, requests beside one, JSON schemas in bulk"),
        "serve": ("espalier.bench.serve", "a server compared with LLM.generate: tokens a second, or a soak"),
    }
)


def add_flags(parser: Parser) -> None:
    parser.add_commands("measured", "what", COMMANDS)
