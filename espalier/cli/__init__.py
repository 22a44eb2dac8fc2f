"""The command line.  Each command is a module with `add_flags` and `run`; most flags come from the config fields."""

import sys
from collections.abc import Sequence

INTERRUPTED = 130


def start(arguments: Sequence[str] | None = None) -> int:
    """The entry point of `espalier`.  Ctrl-C during the imports, which take seconds, also gives one line."""
    try:
        from espalier.cli.main import main
    except KeyboardInterrupt:
        return interrupted()
    return main(arguments)


def interrupted() -> int:
    print("espalier: interrupted", file=sys.stderr)
    return INTERRUPTED
