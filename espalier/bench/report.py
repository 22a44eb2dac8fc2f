"""The report of a load: the command that made it, its tables in Markdown, and the table of categories."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from espalier.errors import EspalierError
from espalier.terminal.machine import header

COLUMNS = ("requests", "tokens out", "accept length", "ms a round", "tokens/s of a request")
KEY = "--api-key"


def command_line() -> str:
    """The command of this process, without the key that it was given."""
    words = [word if not word.startswith(f"{KEY}=") else f"{KEY}=..." for word in sys.argv[1:]]
    hidden = ["..." if before == KEY else word for before, word in zip(["", *words], words, strict=False)]
    return shlex.join(["espalier", *hidden])


def shown(value: Any) -> Any:
    """A flag's value as JSON has it."""
    return str(value) if isinstance(value, Path) else value


def category_table(title: str, categories: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """categories: figures as load.py:by_category gives them."""
    waits = [f"{name}, p50 / p99 ms" for name in ("ttft", "between pieces")]
    rows = [[title, *COLUMNS, *waits]]
    for name, each in categories.items():
        numbers = (each["accept_length"], each["step_ms"], each["tokens_per_second"])
        cells = ["-" if number is None else f"{number:.2f}" for number in numbers]
        times = [each[key] and f"{each[key]['p50']:.1f} / {each[key]['p99']:.1f}" for key in WAITS]
        rows.append([name or "-", str(each["requests"]), str(each["tokens_out"]), *cells, *(t or "-" for t in times)])
    return rows


WAITS = ("ttft_ms", "between_pieces_ms")


def write_markdown(path: Path | None, tables: Sequence[Sequence[Sequence[str]]]) -> None:
    """Write the tables with the command and the machine above them, if a path is given.  Raises EspalierError."""
    if path is None:
        return
    parts = [f"`{command_line()}`", header()]
    for first, *rows in tables:
        lines = [first, ["---"] * len(first), *rows]
        parts.append("\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines))
    try:
        path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    except OSError as error:
        raise EspalierError(f"--markdown {path} cannot be written ({error.strerror}); use another file") from None
