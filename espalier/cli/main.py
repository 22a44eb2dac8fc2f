"""`espalier`: parses the command line, runs the command, and reports every error in one line."""

import logging
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from io import TextIOWrapper

from espalier import __version__
from espalier.cli import bench, demo, doctor, generate, interrupted, serve
from espalier.cli.parser import BAD_INPUT, Parser
from espalier.errors import EspalierError

FAILED = 1
COMMANDS = {"demo": demo, "generate": generate, "serve": serve, "bench": bench, "doctor": doctor}


def parse(arguments: Sequence[str] | None) -> Namespace:
    parser = Parser(prog="espalier", description="Lossless tree speculation.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"espalier {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", parser_class=Parser)
    for name, command in COMMANDS.items():
        command.add(commands, name)
    return parser.parse(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.  Returns the exit status.

    0: success; 1: a check or the system failed; 2: bad input, with one line on stderr; 130: interrupted.
    """
    args = parse(arguments)
    logging.basicConfig(
        level=logging.INFO if args.verbose else logging.WARNING, format="%(message)s", stream=sys.stderr
    )
    if isinstance(sys.stdout, TextIOWrapper):
        # Generated text may contain characters that stdout's encoding does not have: escape them.
        sys.stdout.reconfigure(errors="backslashreplace")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        status = args.run(args)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except EspalierError as error:
        print(f"espalier: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return interrupted()
    except BrokenPipeError:  # the reader of stdout, such as `head`, has exited
        _leave_stdout()
        return 0
    except OSError as error:
        logging.getLogger("espalier").info("traceback:", exc_info=True)
        print(f"espalier: {error}", file=sys.stderr)
        _leave_stdout()
        return FAILED


def _leave_stdout() -> None:
    """Redirect stdout to /dev/null, so that Python's flush at exit does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
