"""`espalier`: find the command, run it, and end in one line whatever goes wrong."""

import difflib
import logging
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from io import TextIOWrapper
from typing import NoReturn

from espalier import __version__
from espalier.cli import bench, demo, doctor, generate, interrupted, serve
from espalier.errors import EspalierError

BAD_INPUT = 2
COMMANDS = {"demo": demo, "generate": generate, "serve": serve, "bench": bench, "doctor": doctor}


class Parser(ArgumentParser):
    """argparse with errors of one line, and the nearest flag for an unknown one."""

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ").split()
        if len(unknown) < len(message.split()) and unknown[0].startswith("-"):
            near = difflib.get_close_matches(unknown[0].split("=")[0], self.flags(), n=1)
            message = f"unknown flag {unknown[0]}; " + (
                f"did you mean {near[0]}?" if near else f"see {self.prog} --help"
            )
        self.exit(BAD_INPUT, f"{self.prog}: {message}\n")

    def flags(self) -> list[str]:
        return [flag for action in self._actions for flag in action.option_strings]


def parse(arguments: Sequence[str] | None) -> Namespace:
    parser = Parser(prog="espalier", description="Lossless tree speculation.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"espalier {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True, parser_class=Parser)
    for name, command in COMMANDS.items():
        command.add(commands, name)
    known, unknown = parser.parse_known_args(arguments)
    if unknown:
        known.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return known


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.  0: done; 1: a check failed; 2: bad input, in one line; 130: interrupted."""
    asked = parse(arguments)
    logging.basicConfig(
        level=logging.INFO if asked.verbose else logging.WARNING, format="%(message)s", stream=sys.stderr
    )
    if isinstance(sys.stdout, TextIOWrapper):
        # Text that was generated is shown as far as the encoding goes, escaped where it has no such character.
        sys.stdout.reconfigure(errors="backslashreplace")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        return asked.run(asked)
    except EspalierError as error:
        print(f"espalier: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return interrupted()
    except BrokenPipeError:
        # Whoever read us has left; what Python would flush at exit goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
