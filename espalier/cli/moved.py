"""Commands and flags that left for the laboratory, a folder `lab/` of the clone that is not installed."""

from types import MappingProxyType

# By the command that had them: the name, and the command of the laboratory.
MOVED = MappingProxyType(
    {
        "espalier bench": {
            name: name
            for name in (
                *("round", "generate", "kernels", "attention", "linears", "prefill"),
                *("floor", "foundry", "loading", "grammar"),
            )
        },
        "espalier bench throughput": {"--shape": "throughput"},
        "espalier bench latency": {"--shape": "latency"},
        "espalier bench choose": {"--shape": "choose", "--accept-length": "choose"},
        "espalier bench serve": {f"--{name}": "serve" for name in ("soak", "bad-host", "shape", "concurrency")},
        "espalier serve": {"--shape": "server"},
    }
)


def moved_to(prog: str, name: str) -> str | None:
    """How a command or a flag is run now; None if it did not move.  prog: of the parser that does not know it."""
    found = MOVED.get(prog, {}).get(name)
    if found is None:
        return None
    also = "; to choose trees, `espalier bench choose`" if found == "round" else ""
    return f"it is now in the clone's laboratory: run `python -m lab {found}`{also}"
