"""argparse with errors of one line that name what was meant: the nearest command or flag, or another engine's."""

import difflib
import sys
from argparse import Action, ArgumentError, ArgumentParser, Namespace, _SubParsersAction
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import Any, NoReturn

from espalier import counterparts

BAD_INPUT = 2
# What other engines call these commands, and what a newcomer tries.
COMMANDS = MappingProxyType(
    {
        "chat": "generate --chat",
        "complete": "generate",
        "completion": "generate",
        "run": "generate",
        "run-batch": "generate --file",
        "launch_server": "serve",
        "server": "serve",
        "start": "serve",
        "api_server": "serve",
        "benchmark": "bench",
        "bench_serving": "bench serve",
        "collect-env": "doctor",
        "check_env": "doctor",
        "help": "--help",
        "version": "--version",
    }
)


class Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {' '.join(message.split())}\n")

    def parse(self, arguments: Sequence[str] | None) -> Namespace:
        """Everything that was given, or one line on stderr and status 2."""
        given = sys.argv[1:] if arguments is None else list(arguments)
        if given and given[0].startswith("-") and given[0] not in self.all_flags():
            self.error(self._unknown(given[0], self))
        known, unknown = self.parse_known_args(given)
        parser: Parser = getattr(known, "parser", None) or self._deepest(known)
        if unknown:
            flags = [each for each in unknown if each.startswith("-")]
            parser.error(self._unknown(flags[0], parser) if flags else f"unknown argument {unknown[0]!r}")
        if "run" not in known:
            parser.error(f"no command is given; use one of {', '.join(parser.commands())}")
        return known

    def add_commands(self, dest: str, metavar: str, modules: Mapping[str, tuple[str, str]]) -> None:
        """Add a command for each name of `modules`: (module, help).  See LazyParser."""
        commands = self.add_subparsers(dest=dest, metavar=metavar, parser_class=LazyParser)
        for name, (module, about) in modules.items():
            commands.add_parser(name, help=about, description=about, allow_abbrev=False).module = module

    def commands(self) -> Mapping[str, "Parser"]:
        """The commands below this one, by name."""
        return next((dict(each.choices) for each in self._actions if isinstance(each, _SubParsersAction)), {})

    def all_flags(self) -> list[str]:
        return [flag for action in self._actions for flag in action.option_strings]

    def _deepest(self, known: Namespace) -> "Parser":
        """The command that was named, where one below it was not."""
        return self.commands().get(known.command or "", self)

    def _unknown(self, given: str, parser: "Parser") -> str:
        flag = given.partition("=")[0]
        flags = parser.all_flags()
        told = counterparts.flag(flag.lstrip("-").replace("-", "_"), flags)
        near = difflib.get_close_matches(flag, flags, n=1)
        if told is None and (others := [each.prog for each in _all(self) if flag in each.all_flags()]):
            told = f"it is a flag of {' and '.join(others[:2])}"
        if told is None and near:
            told = f"did you mean {near[0]}?"
        return f"unknown flag {flag}; {told or f'see {parser.prog} --help'}"

    def _check_value(self, action: Action, value: Any) -> None:
        """A command that there is not, with the one that was meant."""
        if not isinstance(action, _SubParsersAction) or value in action.choices:
            super()._check_value(action, value)
            return
        raise ArgumentError(None, f"unknown command {value!r}; {_meant(value, action.choices)}")


class LazyParser(Parser):
    """A command's parser, which imports the command's module when its flags are first needed.

    Most modules import PyTorch, which `espalier --help` need not wait for.  A module has add_flags(parser), and
    run(asked) -> status unless it only adds further commands.
    """

    module: str | None = None

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._load()
        return super().parse_known_args(args, namespace)

    def commands(self) -> Mapping[str, Parser]:
        self._load()
        return super().commands()

    def all_flags(self) -> list[str]:
        self._load()
        return super().all_flags()

    def _load(self) -> None:
        if self.module is None:
            return
        command: Any = import_module(self.module)
        self.module = None
        if hasattr(command, "run"):
            about = "log the resolved configuration and what is loaded"
            self.add_argument("-v", "--verbose", action="store_true", help=about)
            self.set_defaults(run=command.run, parser=self)
        command.add_flags(self)


def _meant(command: str, commands: Collection[str]) -> str:
    if (near := COMMANDS.get(command)) and (near.startswith("--") or near.split()[0] in commands):
        return f"here it is {near}"
    nearest = difflib.get_close_matches(command, commands, n=1)
    return f"did you mean {nearest[0]}?" if nearest else f"use one of {', '.join(commands)}"


def _all(parser: Parser) -> Iterator[Parser]:
    yield parser
    for command in parser.commands().values():
        yield from _all(command)
