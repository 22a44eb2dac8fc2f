"""Console output: colours, progress bars and tables, a description of the machine, and the layout of help texts."""

import json
import os
import platform
import textwrap
from argparse import Action, ArgumentParser, HelpFormatter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

import espalier
from espalier.cores import available_cores
from espalier.errors import NUMBER_PARSERS, EspalierError
from espalier.text import Tokenizer

DRAFT_STYLE = "bold green"
TARGET_STYLE = "white"
DIM_STYLE = "dim"


if TYPE_CHECKING:
    import torch


def describe_machine() -> dict[str, str]:
    """Returns a description of the machine and the installed versions, on which measurements depend, by name."""
    import torch  # imported here, so that `--help` does not wait for PyTorch

    machine = {
        "machine": f"{_cpu_name()}, {available_cores()} cores, {_memory_gib():.0f} GiB",
        "system": platform.platform(),
        "python": platform.python_version(),
        "espalier": espalier.__version__,
        "torch": str(torch.__version__),
        "transformers": installed_version("transformers"),
    }
    if torch.cuda.is_available():
        machine["cuda"] = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return machine


def machine_line() -> str:
    """Returns one line with the machine and the versions, to print above a table."""
    machine = describe_machine()
    gpu = f"{machine['cuda']}; " if "cuda" in machine else ""
    return f"{gpu}{machine['machine']}; torch {machine['torch']}; python {machine['python']}"


def require_gpu(command: str) -> "torch.device":
    """Returns the GPU for the command `command`.  Raises EspalierError if no GPU is available."""
    import torch

    if not torch.cuda.is_available():
        raise EspalierError(f"{command} measures on a GPU, and there is none here; run it on a machine with one")
    return torch.device("cuda")


def installed_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _memory_gib() -> float:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30


class _Console(Console):
    def on_broken_pipe(self) -> NoReturn:
        """Raise the error, which main.py handles with exit status 0.  rich would exit with status 1."""
        raise BrokenPipeError


def stdout(wrap: bool = False) -> Console:
    """Returns a console for stdout.  wrap: on a terminal, break long lines between words."""
    console = _Console(highlight=False, soft_wrap=True)
    console.soft_wrap = not (wrap and console.is_terminal)
    return console


def stderr() -> Console:
    return Console(stderr=True, highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class DrawingSigns:
    """The characters for drawings: UNICODE_SIGNS, or ASCII_SIGNS if the terminal's encoding is not Unicode.

    branch, last_branch, vertical: the lines of a drawn tree."""

    branch: str
    last_branch: str
    vertical: str
    accepted: str
    rejected: str
    bar: str
    empty_bar: str
    prompt_end: str


UNICODE_SIGNS = DrawingSigns("├─", "└─", "│ ", "✓", "×", "█", "·", "▸")
ASCII_SIGNS = DrawingSigns("|-", "`-", "| ", "+", "x", "#", "-", ">>")


def drawing_signs(console: Console) -> DrawingSigns:
    return UNICODE_SIGNS if console.encoding.lower().startswith("utf") else ASCII_SIGNS


def align_table(rows: Sequence[Sequence[str]]) -> str:
    """Returns a table as text.  The first column is left-aligned, the others right-aligned.  No line is cut."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [[cell.rjust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    return "\n".join("  ".join(["", row[0].ljust(widths[0]), *line[1:]]) for row, line in zip(rows, lines, strict=True))


def print_header() -> None:
    """Print one line with the machine and the versions, above a table."""
    stdout().print(Text(machine_line(), DIM_STYLE))


def print_table(rows: Sequence[Sequence[str]]) -> None:
    stdout().print(Text(align_table(rows)))


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[..., None]]:
    """Show a progress bar on stderr if it is a terminal, and remove it at the end.  Yields a function that advances the
    bar by one step, or by a number of steps."""
    console = stderr()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=total)
        yield lambda count=1: bar.advance(task, count)


@contextmanager
def waiting(title: str) -> Iterator[None]:
    """Shows `title` on stderr while the block runs, if stderr is a terminal.  The title is not animated, because the
    block may show a progress bar in its place.  The title is cut to one line, because only one line can be removed."""
    console = stderr()
    if not console.is_terminal:
        yield
        return
    line = f"{title} ..."[: console.width - 1]
    console.print(Text(line, DIM_STYLE), end="\r")
    try:
        yield
    finally:
        console.print(" " * len(line), end="\r")


def colour_by_source(
    tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int], from_draft: Sequence[bool]
) -> Text:
    """Returns the text of output tokens, in which tokens from the draft are coloured.  prompt, tokens: token ids."""
    text_stream = tokenizer.text_stream(prompt)
    text = Text()
    for i, (token, drafted) in enumerate(zip(tokens, from_draft, strict=True)):
        text_stream.push_token(token)
        text.append(text_stream.take_text(final=i + 1 == len(tokens)), DRAFT_STYLE if drafted else TARGET_STYLE)
    return text


def has_colour(console: Console) -> bool:
    return console.color_system is not None and not console.no_color


def read_text(flag: str, path: Path) -> str:
    """Returns a file's text without byte order mark.  Raises EspalierError."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise EspalierError(f"{flag} {path} cannot be read ({error.strerror}); use a text file") from None
    except UnicodeDecodeError as error:
        raise EspalierError(f"{flag} {path} cannot be read ({error}); use a UTF-8 text file") from None


def require_writable(flag: str, path: Path | None) -> None:
    """Check, before any measurement, that a file can be written.  Raises EspalierError."""
    if path is None:
        return
    folder = path.parent
    if path.is_dir():
        reason = "it is a directory"
    elif not folder.is_dir():
        reason = f"{folder} is not a directory"
    elif not os.access(path if path.exists() else folder, os.W_OK):
        reason = "permission denied"
    else:
        return
    raise EspalierError(f"{flag} {path} cannot be written ({reason}); use another file")


def write_json(path: Path | None, figures: dict[str, Any]) -> None:
    """Write measurements and the machine to a file, if `path` is given.  Raises EspalierError.

    Call this before the table is printed, because printing fails if stdout is closed."""
    if path is None:
        return
    import torch  # imported here, so that `--help` does not wait for PyTorch

    try:
        # This is the engine's number of threads, because the engine sets it at startup.
        machine = describe_machine() | {"threads": str(torch.get_num_threads())}
        path.write_text(json.dumps({"machine": machine, **figures}, indent=1) + "\n")
    except OSError as error:
        raise EspalierError(f"--json {path} cannot be written ({error.strerror}); use another file") from None


# A command with more flags shows only a placeholder in its usage line.  The help text lists all flags below.
MAX_FLAGS_IN_USAGE = 10
FLAGS_PLACEHOLDER = "[flags]"


class HelpText(HelpFormatter):
    """Formats the help text of a command (argparse's formatter_class)."""

    def add_argument(self, action: Action) -> None:
        """Add an action like argparse, but make the first column as wide as the longest command name."""
        super().add_argument(action)
        for command in self._iter_indented_subactions(action):
            length = len(str(command.metavar)) + self._current_indent
            self._action_max_length = max(self._action_max_length, length)

    def _format_usage(self, usage: str | None, actions: Iterable[Action], groups: Any, prefix: str | None) -> str:
        """Format the usage like argparse, but show only required arguments of a command with many flags."""
        actions = list(actions)
        flags = [action for action in actions if action.option_strings]
        if usage is not None or len(flags) <= MAX_FLAGS_IN_USAGE:
            return super()._format_usage(usage, actions, groups, prefix)
        required_flags = [
            f"{flag.option_strings[-1]} {self._format_args(flag, flag.dest.upper())}" for flag in flags if flag.required
        ]
        start = f"{'usage: ' if prefix is None else prefix}{self._prog} "
        positional_arguments = [
            self._format_args(action, action.dest) for action in actions if not action.option_strings
        ]
        # A NUL instead of the space between a flag and its value keeps both on one line.
        words = " ".join(
            part.replace(" ", "\0") for part in [FLAGS_PLACEHOLDER, *required_flags, *positional_arguments]
        )
        indent = " " * len(start)
        return (
            textwrap.fill(start + words, self._width, subsequent_indent=indent, break_on_hyphens=False).replace(
                "\0", " "
            )
            + "\n\n"
        )

    def _split_lines(self, text: str, width: int) -> list[str]:
        """Break lines like argparse, but never inside a name such as --by-batch."""
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class CommandParser(ArgumentParser):
    """A parser of a command's flags.  Parses numbers like the config classes, and formats help with HelpText."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **{"formatter_class": HelpText, **settings})
        for kind, read in NUMBER_PARSERS.items():
            self.register("type", kind, read)
