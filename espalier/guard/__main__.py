"""`python -m espalier.guard FAULT COMMAND ...` runs a command of `espalier` with a fault planted.

So the public configuration and the command line know of no fault.
"""

import sys
from argparse import REMAINDER, ArgumentParser
from collections.abc import Sequence

from espalier.cli import start
from espalier.cli.parser import BAD_INPUT
from espalier.errors import EspalierError
from espalier.guard.faults import plant

# The engines of the others may run in processes of their own, where nothing is planted.
COMMANDS = ("demo", "generate")
BANNER = "!" * 80


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status of the command; 2 for a fault or a command that is not supported, with one line."""
    parser = ArgumentParser(prog="python -m espalier.guard", description="Run a command with a planted fault.")
    parser.add_argument("fault", help="a name, or the number of a public report (docs/seeds.md)")
    parser.add_argument("command", nargs=REMAINDER, help=f"{' or '.join(COMMANDS)}, with its flags")
    args = parser.parse_args(arguments)
    try:
        if not set(args.command[:1]) & set(COMMANDS):
            raise EspalierError(f"give a command after the fault: {' or '.join(COMMANDS)}, with its flags")
        with plant(args.fault) as fault:
            warning = f"planted fault {fault.name}: {fault.what}.  The output of this process is WRONG BY INTENT."
            print(f"{BANNER}\nWARNING: {warning}\n{BANNER}", file=sys.stderr, flush=True)
            return start(args.command)
    except EspalierError as error:
        print(f"espalier: {error}", file=sys.stderr)
        return BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
