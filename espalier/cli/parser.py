"""A parser based on argparse.  An error is one line that suggests the right command or flag.  The parser also knows
other engines' names, and the former places of commands that have moved."""

import difflib
import sys
from argparse import (
    Action,
    ArgumentError,
    ArgumentTypeError,
    BooleanOptionalAction,
    Namespace,
    _StoreAction,
    _SubParsersAction,
)
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

from espalier import other_engines
from espalier.startup.checkpoints import require_names
from espalier.terminal.console import CommandParser
from espalier.terminal.flags import named_models

# For each command, its former subcommands and flags, and the command of `python -m lab` that replaces each of them.
MOVED_COMMANDS = MappingProxyType(
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


# Maps (command, its former subcommand or flag) to the new name.
RENAMED_COMMANDS = MappingProxyType(
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
    """Returns the advice for a command or flag that has moved, else None.  prog: the command that lacks the name."""
    if new_command := RENAMED_COMMANDS.get((prog, name)):
        return f"it is now `{new_command}`"
    lab_command = MOVED_COMMANDS.get(prog, {}).get(name)
    if lab_command is None:
        return None
    other_advice = "; to choose trees, `espalier bench choose`" if lab_command == "round" else ""
    return f"it is now in the clone's laboratory: run `python -m lab {lab_command}`{other_advice}"


BAD_INPUT_STATUS = 2
# How messages name the types of flags' values.  A type that is a function of Espalier has its __name__ in messages.
VALUE_KINDS = MappingProxyType({int: "whole number", float: "number"})
# Maps the commands of other engines, and likely guesses, to Espalier's commands.
GUESSED_COMMANDS = MappingProxyType(
    {
        "chat": "generate --chat",
        "complete": "generate",
        "completion": "generate",
        "run": "generate",
        "run-batch": "batch",
        "launch_server": "serve",
        "server": "serve",
        "start": "serve",
        "api_server": "serve",
        "benchmark": "bench",
        "bench_serving": "bench load --url",
        "collect-env": "doctor",
        "check_env": "doctor",
        "help": "--help",
        "version": "--version",
    }
)


class Command(NamedTuple):
    """A command's help text, and the modules of its code.

    flags: the module whose function add_flags(parser) adds the flags; "module:function" for a function of another name.
    The module must not import PyTorch, so that help and errors about misspelt words are printed at once.
    run_module: the module with run(args) -> status, imported only to run the command; None for a command with
    subcommands."""

    help_text: str
    flags: str
    run_module: str | None

    def run(self, args: Namespace) -> int:
        assert self.run_module is not None
        require_names(named_models(args))
        module: Any = import_module(self.run_module)
        return module.run(args)


class Parser(CommandParser):
    """The parser of `espalier`, or of one of its commands.  An action is argparse's record of a flag or argument."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT_STATUS, f"{self.prog}: {' '.join(message.split())}\n")

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print like argparse, but raise OSError if help or version cannot be written to stdout."""
        if file is None or file is not sys.stdout:
            super()._print_message(message, file)
            return
        file.write(message)
        file.flush()

    def parse(self, arguments: Sequence[str] | None) -> Namespace:
        """Parse the arguments.  On bad input, print one line on stderr and exit with status 2."""
        words = sys.argv[1:] if arguments is None else list(arguments)
        if words and words[0].startswith("-") and words[0] not in self.all_flags():
            self.error(self._unknown_flag_error(words[0], self))
        namespace, unknown_words = self.parse_known_args(words)
        parser: Parser = getattr(namespace, "parser", None) or self._deepest_parser(namespace)
        if unknown_words:
            flags = [word for word in unknown_words if word.startswith("-")]
            parser.error(
                self._unknown_flag_error(flags[0], parser) if flags else f"unknown argument {unknown_words[0]!r}"
            )
        if "run" not in namespace:
            parser.error(f"a command is missing; use one of {', '.join(parser.commands())}")
        return namespace

    def add_commands(self, dest: str, metavar: str, command_table: Mapping[str, "Command"]) -> None:
        """Add a command for each name of `command_table`.  dest, metavar: as in argparse's add_subparsers."""
        commands = self.add_subparsers(dest=dest, metavar=metavar, parser_class=LazyParser)
        for name, command in command_table.items():
            about = command.help_text
            commands.add_parser(name, help=about, description=about, allow_abbrev=False).command = command

    def commands(self) -> Mapping[str, "Parser"]:
        """Returns this parser's subcommands, by name."""
        return next((dict(a.choices) for a in self._actions if isinstance(a, _SubParsersAction)), {})

    def all_flags(self) -> list[str]:
        """Returns this parser's flags."""
        return [flag for action in self._actions for flag in action.option_strings]

    def _deepest_parser(self, namespace: Namespace) -> "Parser":
        """Returns the parser whose subcommand is missing: the given command's, or this parser without a command."""
        return self.commands().get(namespace.command or "", self)

    def _unknown_flag_error(self, argument: str, parser: "Parser") -> str:
        """Returns the error for an unknown flag of the command of `parser`.  argument: --flag or --flag=value."""
        flag = argument.partition("=")[0]
        flags = parser.all_flags()
        arguments = [action.dest for action in parser._actions if not action.option_strings]
        setting = flag.lstrip("-").replace("-", "_")
        advice = moved_to(parser.prog, flag) or other_engines.flag_advice(setting, flags, arguments)
        near = difflib.get_close_matches(flag, flags, n=1)
        if advice is None and (others := [p.prog for p in _all_parsers(self) if flag in p.all_flags()]):
            advice = f"it is a flag of {' and '.join(others[:2])}"
        if advice is None and near:
            advice = f"did you mean {near[0]}?"
        return f"unknown flag {flag}; {advice or f'see {parser.prog} --help'}"

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._arguments: Sequence[str] = args or ()
        self._given_actions: set[Action] = set()
        return super().parse_known_args(args, namespace)

    def _get_values(self, action: Action, arg_strings: list[str]) -> Any:
        """Refuse a flag that is given twice, because argparse would keep only the last value.

        argparse calls this method once for each flag on the command line."""
        if isinstance(action, _StoreAction | BooleanOptionalAction) and action.option_strings:
            if action in self._given_actions:
                raise ArgumentError(None, f"{self._repetition_text(action)}; leave one out")
            self._given_actions.add(action)
        return super()._get_values(action, arg_strings)

    def _repetition_text(self, action: Action) -> str:
        """Returns the start of an error message: the spellings of a flag given twice, such as --x and --no-x."""
        arguments = (word.partition("=")[0] for word in self._arguments)
        written = list(dict.fromkeys(flag for flag in arguments if flag in action.option_strings))
        return f"{' and '.join(written)} are both given" if len(written) > 1 else f"{written[0]} is given twice"

    def _get_value(self, action: Action, arg_string: str) -> Any:
        """Parse a value like argparse, with an error message that tells what to use."""
        try:
            return super()._get_value(action, arg_string)
        except ArgumentError as error:
            if isinstance(error.__context__, ArgumentTypeError):
                raise
            kind: Any = action.type
            use = VALUE_KINDS.get(kind) or getattr(kind, "__name__", repr(kind))
            raise ArgumentError(action, f"{arg_string!r} is not supported; use a {use}") from None

    def _check_value(self, action: Action, value: Any) -> None:
        """Refuse an unknown command, and suggest a known one."""
        if not isinstance(action, _SubParsersAction) or value in action.choices:
            super()._check_value(action, value)
            return
        raise ArgumentError(
            None, f"unknown command {value!r}; {moved_to(self.prog, value) or _suggestion(value, action.choices)}"
        )


class LazyParser(Parser):
    """A command's parser, which imports the module Command.flags only when the flags are needed."""

    command: Command | None = None

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._load_flags()
        return super().parse_known_args(args, namespace)

    def commands(self) -> Mapping[str, Parser]:
        self._load_flags()
        return super().commands()

    def all_flags(self) -> list[str]:
        self._load_flags()
        return super().all_flags()

    def _load_flags(self) -> None:
        if self.command is None:
            return
        command, self.command = self.command, None
        if command.run_module is not None:
            about = "log the resolved configuration and what is loaded"
            self.add_argument("-v", "--verbose", action="store_true", help=about)
            self.set_defaults(run=command.run, parser=self)
        module, _, function = command.flags.partition(":")
        getattr(import_module(module), function or "add_flags")(self)


def _suggestion(command: str, commands: Collection[str]) -> str:
    """Returns advice for `command`, which is not one of the known `commands`."""
    if (near := GUESSED_COMMANDS.get(command)) and (near.startswith("--") or near.split()[0] in commands):
        return f"use {near}"
    nearest = difflib.get_close_matches(command, commands, n=1)
    return f"did you mean {nearest[0]}?" if nearest else f"use one of {', '.join(commands)}"


def _all_parsers(parser: Parser) -> Iterator[Parser]:
    yield parser
    for command in parser.commands().values():
        yield from _all_parsers(command)
