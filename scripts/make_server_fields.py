"""Write the field tables of docs/server.md from the request models: `python scripts/make_server_fields.py`."""

from pathlib import Path

from pydantic import BaseModel

from espalier.server.fields import NoEffect, RefusedField
from espalier.server.openai import ChatRequest, CompletionRequest, Message
from espalier.server.responses import ResponsesRequest

PAGE = Path(__file__).parents[1] / "docs" / "server.md"
TABLES: tuple[tuple[str, type[BaseModel]], ...] = (
    ("completions", CompletionRequest),
    ("chat", ChatRequest),
    ("messages", Message),
    ("responses", ResponsesRequest),
)


def field_rows(model: type[BaseModel]) -> list[tuple[str, str, str]]:
    """(field, "honoured" / "no effect" / "refused", description or reason), in the order of the model."""
    rows = []
    for name, info in model.model_fields.items():
        notes = [note for note in info.metadata if isinstance(note, RefusedField | NoEffect)]
        if not notes:
            rows.append((name, "honoured", info.description or ""))
        else:
            rows.append((name, "refused" if isinstance(notes[0], RefusedField) else "no effect", notes[0].reason))
    return rows


def table(model: type[BaseModel]) -> str:
    """One row a field.  A refused field of OpenAI's API has the reason."""
    rows = sorted(field_rows(model), key=lambda row: ("honoured", "no effect", "refused").index(row[1]))
    lines = ["| field | | what it does, or why not |", "| --- | --- | --- |"]
    return "\n".join([*lines, *(f"| `{name}` | {verdict} | {note} |" for name, verdict, note in rows)])


def with_tables(text: str) -> str:
    """The page with a new table between each pair of marks."""
    for name, model in TABLES:
        before, mark, rest = text.partition(f"<!-- fields: {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        if not (mark and end):
            raise SystemExit(f"{PAGE} has no marks for the fields of {name}")
        text = f"{before}{mark}{table(model)}\n{end}{after}"
    return text


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
