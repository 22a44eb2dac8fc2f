"""`espalier`: find the command, run it, and end in one line whatever goes wrong."""

import logging
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from io import TextIOWrapper
from types import MappingProxyType

from espalier import __version__
from espalier.cli import interrupted
from espalier.cli.parser import BAD_INPUT, Parser
from espalier.errors import EspalierError

FAILED = 1
# name -> (module, help)
COMMANDS = MappingProxyType(
    {
        "demo": ("espalier.cli.demo", "complete held-out prompts, plain and by tree, and draw a round"),
        "generate": ("espalier.cli.generate", "complete prompts; a prompt '-' is read from stdin"),
        "serve": ("espalier.cli.serve", "an OpenAI-compatible server"),
        "bench": ("espalier.cli.bench", "measurements"),
        "doctor": ("espalier.cli.doctor", "machine, versions, resolved configuration"),
    }
)


def parse(arguments: Sequence[str] | None) -> Namespace:
    parser = Parser(prog="espalier", description="Lossless tree speculation.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"espalier {__version__}")
    parser.add_commands("command", "command", COMMANDS)
    return parser.parse(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.  0: done; 1: a check failed, or the machine did; 2: bad input, in one line; 130: interrupted."""
    try:
        asked = parse(arguments)  # imports the command's module
    except KeyboardInterrupt:
        return interrupted()
    logging.basicConfig(
        level=logging.INFO if asked.verbose else logging.WARNING, format="%(message)s", stream=sys.stderr
    )
    if isinstance(sys.stdout, TextIOWrapper):
        # Text that was generated is shown as far as the encoding goes, escaped where it has no such character.
        sys.stdout.reconfigure(errors="backslashreplace")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        status = asked.run(asked)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except EspalierError as error:
        print(f"espalier: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return interrupted()
    except BrokenPipeError:  # whoever read us has left
        _leave_stdout()
        return 0
    except OSError as error:
        logging.getLogger("espalier").info("where it happened", exc_info=True)
        print(f"espalier: {error}", file=sys.stderr)
        _leave_stdout()
        return FAILED


def _leave_stdout() -> None:
    """What Python would flush at exit goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
