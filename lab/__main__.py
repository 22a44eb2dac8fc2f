"""`python -m lab`: the table of the laboratory's commands."""

import sys
from collections.abc import Sequence
from types import MappingProxyType

from espalier.cli import start
from espalier.cli.parser import Command, Parser


def bench(name: str, about: str, flags: str = "") -> Command:
    """Returns a command that lab/bench/NAME.py runs.  flags: the function of lab/bench/flags.py, by default `name`."""
    return Command(about, flags=f"lab.bench.flags:{flags or name}", run_module=f"lab.bench.{name}")


COMMANDS = MappingProxyType(
    {
        "round": bench("round", "a round beside a plain token: time, accept length, memory"),
        "generate": bench("generate", "LLM.generate: time of a round and to the first token"),
        "kernels": bench("kernels", "attention on a GPU, compared with its memory bandwidth"),
        "attention": bench("attention", "attention over a committed prefix, for each backend"),
        "linears": bench("linear_times", "linear layers on a GPU: time and bandwidth of each format", "linears"),
        "ranks": bench("ranks", "how ranks on several GPUs join their results: time, equal bits"),
        "bits": bench("bits", "in how many bits ranks differ, over passes of an engine"),
        "prefill": bench("prefill", "time of prefill, and how long running requests wait for it"),
        "load": bench("load", "tokens a second and times under a mixed load, tree and plain"),
        "choose": bench("choose", "the fastest tree at each batch, also for a named shape"),
        "floor": bench("floor", "the shortest time of the linear layers of a pass on this GPU"),
        "foundry": bench("checkpoint", "write a synthetic checkpoint: target and draft with known text", "foundry"),
        "loading": bench("loading", "load a target from disk: GB/s and peak memory"),
        "grammar": bench("grammar", "grammars: time of masks, other requests, many JSON schemas"),
        "serve": bench("serve", "a server beside LLM.generate, a soak test, a bad host"),
        "server": Command("espalier serve with a synthetic model", flags="lab.server", run_module="lab.server"),
        "fault": Command(
            "run espalier with a planted fault", flags="lab.faults.command", run_module="lab.faults.command"
        ),
        "sharing": bench("sharing", "on paper: rows of a batch shared out by the draft's scores"),
        "mixes": bench("mixes", "requests whose drafts differ in skill: chosen trees over fixed ones"),
        "defaults": bench("defaults", "an engine without a flag on a CPU, over one without speculation"),
        "sources": bench("sources", "a draft with other sources beside it, against each alone"),
        "learn": bench("learn", "online learning: the topic of the traffic shifts, and the draft follows"),
        "bundled": Command("make the bundled model again", flags="lab.bundle.command", run_module="lab.bundle.command"),
    }
)


def make_parser() -> Parser:
    parser = Parser(prog="python -m lab", description=__doc__, allow_abbrev=False)
    parser.add_commands("command", "command", COMMANDS)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    return start(arguments, make_parser)


if __name__ == "__main__":
    sys.exit(main())
