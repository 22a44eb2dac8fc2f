"""How help texts are laid out: a short usage, names in one column, and lines that break between words."""

import textwrap
from argparse import Action, HelpFormatter
from collections.abc import Iterable
from typing import Any

# A usage of more flags would take many lines, and the list of flags follows it.
MAX_FLAGS_IN_USAGE = 10
FLAGS = "[flags]"


class HelpText(HelpFormatter):
    def add_argument(self, action: Action) -> None:
        """As argparse does, but the column of names is as wide as the longest command's."""
        super().add_argument(action)
        for command in self._iter_indented_subactions(action):
            length = len(str(command.metavar)) + self._current_indent
            self._action_max_length = max(self._action_max_length, length)

    def _format_usage(self, usage: str | None, actions: Iterable[Action], groups: Any, prefix: str | None) -> str:
        """As argparse does; of a command with many flags, only what must be given."""
        actions = list(actions)
        flags = [action for action in actions if action.option_strings]
        if usage is not None or len(flags) <= MAX_FLAGS_IN_USAGE:
            return super()._format_usage(usage, actions, groups, prefix)
        needed = [
            f"{flag.option_strings[-1]} {self._format_args(flag, flag.dest.upper())}" for flag in flags if flag.required
        ]
        start = f"{'usage: ' if prefix is None else prefix}{self._prog} "
        places = [self._format_args(action, action.dest) for action in actions if not action.option_strings]
        # A flag and its value stay on one line.
        words = " ".join(part.replace(" ", "\0") for part in [FLAGS, *needed, *places])
        indent = " " * len(start)
        return (
            textwrap.fill(start + words, self._width, subsequent_indent=indent, break_on_hyphens=False).replace(
                "\0", " "
            )
            + "\n\n"
        )

    def _split_lines(self, text: str, width: int) -> list[str]:
        """As argparse does, but a name such as --by-batch stays whole."""
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)
