"""Commands and flags that have another place: the laboratory, a folder `lab/` of the clone that is not installed, or
another command."""

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
        "espalier bench load": {"--shape": "load"},
        "espalier bench choose": {"--shape": "choose", "--accept-length": "choose"},
        "espalier serve": {"--shape": "server"},
    }
)


# Commands that one command does now.
RENAMED = MappingProxyType(
    {
        ("espalier bench", "throughput"): "espalier bench load",
        ("espalier bench", "latency"): "espalier bench load",
        (
            "espalier bench",
            "serve",
        ): "espalier bench load --url URL` or, for the server's own tests, `python -m lab serve",
        ("espalier bench load", "--prefix-words"): "--prefix-length",
    }
)


def moved_to(prog: str, name: str) -> str | None:
    """How a command or a flag is run now; None if it did not move.  prog: of the parser that does not know it."""
    if renamed := RENAMED.get((prog, name)):
        return f"it is now `{renamed}`"
    found = MOVED.get(prog, {}).get(name)
    if found is None:
        return None
    also = "; to choose trees, `espalier bench choose`" if found == "round" else ""
    return f"it is now in the clone's laboratory: run `python -m lab {found}`{also}"
