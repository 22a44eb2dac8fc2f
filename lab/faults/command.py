"""`python -m lab fault FAULT COMMAND ...` runs a command of `espalier` with a fault planted.

So the public configuration and the command line know of no fault.
"""

import sys
from argparse import REMAINDER, ArgumentParser, Namespace

from espalier.cli import start
from espalier.errors import EspalierError

# Other commands may run their engine in another process, where no fault is planted.
COMMANDS = ("demo", "generate")
BANNER = "!" * 80


def add_flags(parser: ArgumentParser) -> None:
    parser.add_argument("fault", help="a name, or the number of a public report (docs/seeds.md)")
    parser.add_argument("planted", metavar="command", nargs=REMAINDER, help=f"{' or '.join(COMMANDS)}, with its flags")


def run(args: Namespace) -> int:
    """The exit status of the command.  Raises EspalierError for a fault or a command that is not supported."""
    if not set(args.planted[:1]) & set(COMMANDS):
        raise EspalierError(f"give a command after the fault: {' or '.join(COMMANDS)}, with its flags")
    # Imported here, because it imports PyTorch, which the help must not do.
    from lab.faults.planted import plant

    with plant(args.fault) as fault:
        warning = f"planted fault {fault.name}: {fault.defect}.  The output of this process is WRONG BY INTENT."
        print(f"{BANNER}\nWARNING: {warning}\n{BANNER}", file=sys.stderr, flush=True)
        return start(args.planted)
